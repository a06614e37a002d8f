//! What the real thing does at random, held to the rules of the model.

use std::path::PathBuf;
use std::process::{Command as Process, ExitStatus};

use ladder::{Tensor, Value, Worker};
use testkit::stand_in;
use testkit::steps::Steps;

use super::{Outcome, check, eventually, pooled, sent, text, worker};

/// Where every process of a run says what it does.
const LOG: &str = "E2E_POOL_LOG";

/// The seed of a run: this process is one.
const SEED: &str = "E2E_POOL_SEED";

const FIELDS: &[&str] = &["step", "owner", "importer", "allocation", "lease", "more"];

/// From now on, in this process, where that is asked for.
pub(crate) fn say_steps() {
    if let Ok(path) = std::env::var(LOG)
        && let Ok(steps) = Steps::to(path, "pool_ipc", FIELDS)
    {
        let _ = tracing::subscriber::set_global_default(steps);
    }
}

/// One thing that may happen, at random.
fn something(
    random: &mut fastrand::Rng,
    workers: &mut Vec<Worker>,
    tensors: &mut Vec<Tensor>,
) -> Outcome {
    let at = random.usize(0..workers.len());
    let worker_at = &workers[at];
    match random.u8(0..12) {
        0 | 1 => tensors.push(pooled(random.usize(1..5000), random.u8(..))?),
        2 if !tensors.is_empty() => drop(tensors.swap_remove(random.usize(0..tensors.len()))),
        3 => drop(worker_at.call("let go", Value::Null).map_err(text)?),
        4 => {
            let made = worker_at.call("make", random.i64(1..5000)).map_err(text)?.into_value();
            tensors.push(made.as_tensor().ok_or("no tensor")?.clone());
        }
        5 => std::thread::sleep(std::time::Duration::from_millis(random.u64(0..8))),
        6 if random.u8(0..6) == 0 => {
            let old = workers.swap_remove(at);
            old.process().kill();
            if random.bool() {
                // What it still has of ours, and we of it, ends whenever its death is known.
                drop(old);
            } else {
                eventually("the end is seen", || Ok(old.call("echo", Value::Null).is_err()))?;
            }
            workers.push(worker()?);
        }
        method if !tensors.is_empty() => {
            let method = ["digest", "hold", "echo"][usize::from(method) % 3];
            let tensor = &tensors[random.usize(0..tensors.len())];
            match sent(worker_at, method, tensor) {
                // Of an owner that was killed.
                Err(why) if why.contains("gone") || why.contains("owner") => {}
                other => drop(other?),
            }
        }
        _ => {}
    }
    Ok(())
}

/// A host and its workers, for a while.
fn run(seed: u64) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut workers = vec![worker()?, worker()?];
    let mut tensors = Vec::new();
    for _ in 0..120 {
        something(&mut random, &mut workers, &mut tensors)?;
    }
    drop(tensors);
    for worker in &workers {
        worker.call("let go", Value::Null).map_err(text)?;
        eventually("every lease is home", || Ok(worker.lent().0 == 0))?;
    }
    Ok(())
}

/// Runs in processes of their own, each with a log that every process of it appends to.
pub(crate) fn traces_are_by_the_contract() -> Outcome {
    if let Ok(seed) = std::env::var(SEED) {
        return run(seed.parse().map_err(text)?);
    }
    let folder = tempfile::tempdir().map_err(text)?;
    let mut seen = pool_model::trace::Seen::default();
    let runs: u64 = if stand_in::is_deferred() { 4 } else { 8 };
    let first = fastrand::u64(..);
    for seed in (0..runs).map(|run| first.wrapping_add(run)) {
        let log = folder.path().join(seed.to_string());
        let status = again(seed, &log).map_err(text)?;
        let log = std::fs::read_to_string(&log).map_err(text)?;
        check(status.success(), (seed, status))?;
        let steps = pool_model::trace::accept(&log).map_err(|why| format!("seed {seed}: {why}"))?;
        for (step, times) in steps.steps {
            *seen.steps.entry(step).or_default() += times;
        }
    }
    // All that may happen did, or nothing was shown.
    for step in [
        "export",
        "import",
        "use",
        "release",
        "home",
        "let-go",
        "retire",
        "free-import",
        "hear-freed",
        "free",
        "know-dead",
        "know-owner-dead",
    ] {
        check(seen.steps.contains_key(step), (step, &seen))?;
    }
    Ok(())
}

/// This test once more, for one seed.
fn again(seed: u64, log: &PathBuf) -> std::io::Result<ExitStatus> {
    Process::new(std::env::current_exe()?)
        .args(["--exact", "traces_are_by_the_contract"])
        .env(SEED, seed.to_string())
        .env(LOG, log)
        .stdout(std::process::Stdio::null())
        .status()
}
