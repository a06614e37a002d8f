//! Either side is killed, stopped or aborted at every step: the other errs in time, and nothing stays.
//!
//! Three processes: the test starts a host, the host a worker, and one of the two is armed.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitCode, Stdio};
use std::time::{Duration, Instant};

use ladder::{
    CallOptions, Channel, Command, DType, FAILPOINTS, Failure, Methods, Output, Peer, Tensor,
    TensorMut, Value, Worker,
};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use testkit::census::Census;
use testkit::{run_serially, trial};

type Outcome<T = ()> = Result<T, String>;

const ROLE: &str = "E2E_ROLE";
const ARMED: &str = "LADDER_FAILPOINT";
/// Armed for the worker alone: its host hands it on as [`ARMED`].
const ARM_WORKER: &str = "E2E_ARM_WORKER";
/// Names a cycle, in the environment of both processes.
const CYCLE: &str = "E2E_CYCLE";

/// How long a death may go unnoticed.
const NOTICED: Duration = Duration::from_secs(1);
/// How long a call may take where the peer does not die, but stops.
const LIMIT: Duration = Duration::from_millis(700);

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn methods() -> Methods {
    Methods::new().on("echo", Ok).on_with("back", |value: Value, peer: &Peer| {
        let options = CallOptions::new().limit(LIMIT);
        Ok::<_, Failure>(peer.call_with("echo", value, options)?.into_value())
    })
}

/// The host: a whole conversation, each step of which ends in time, well or not; how the worker ended.
fn host() -> Outcome<String> {
    let armed = std::env::var(ARM_WORKER).unwrap_or_default();
    let command = Command::this_executable()
        .env(ROLE, "worker")
        .env(ARMED, armed)
        .output(Output::Discard)
        .grace(Duration::from_millis(300));
    let in_time = |started: Instant, step: &str| {
        let took = started.elapsed();
        if took > NOTICED + LIMIT { Err(format!("{step} took {took:?}")) } else { Ok(()) }
    };
    let started = Instant::now();
    let spawned = Worker::builder().handler(methods()).handshake(LIMIT).spawn(command);
    in_time(started, "the handshake")?;
    let worker = match spawned {
        Ok(worker) => worker,
        Err(error) => return Ok(error.to_string()),
    };
    let private = Tensor::from_vec(vec![7u8; 100_000], &[100_000]).map_err(text)?;
    let mut born = TensorMut::new(DType::U8, &[100_000]).map_err(text)?;
    born.as_bytes_mut().fill(9);
    let shared = born.share().map_err(text)?;
    for method in ["echo", "back", "echo"] {
        let value = Value::list([private.clone(), shared.clone()]);
        let started = Instant::now();
        let options = CallOptions::new().limit(LIMIT);
        match worker.call_with(method, value.clone(), options) {
            Ok(reply) if *reply.value() == value => drop(reply),
            Ok(_) => return Err("another value came back".into()),
            Err(_) => {}
        }
        in_time(started, method)?;
        std::thread::sleep(Duration::from_millis(5));
    }
    let started = Instant::now();
    let exit = worker.shutdown(Duration::from_millis(300));
    in_time(started, "the end")?;
    Ok(exit.to_string())
}

fn act(role: &str) -> ExitCode {
    if role == "host" {
        return match host() {
            Ok(end) => {
                let _ = writeln!(std::io::stderr(), "{end}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "{error}");
                ExitCode::FAILURE
            }
        };
    }
    match Channel::from_env() {
        Ok(Some(channel)) => drop(channel.serve(methods())),
        Ok(None) => return ExitCode::from(90),
        Err(_) => return ExitCode::from(91),
    }
    ExitCode::SUCCESS
}

/// Processes of a cycle that are alive.
fn alive(cycle: &str) -> Vec<String> {
    let marker = format!("{CYCLE}={cycle}");
    let ours = |process: &std::fs::DirEntry| {
        let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|pair| pair == marker.as_bytes())
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter(ours).map(|process| process.path().display().to_string()).collect()
}

/// Waits until the host has exited or was stopped.
fn exited_or_stopped(host: &mut Child) -> Outcome<Option<std::process::ExitStatus>> {
    let pid = Pid::from_child(host);
    let options = WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(pid), options).map_err(text)? {
        Some(status) if status.stopped() => Ok(None),
        _ => host.wait().map(Some).map_err(text),
    }
}

/// One conversation in which one side is armed.
fn cycle(number: usize, side: &str, point: &str, action: &str) -> Outcome {
    let name = format!("{}-{number}", std::process::id());
    let armed = format!("{point}={action}");
    let this = std::env::current_exe().map_err(text)?;
    let mut command = std::process::Command::new(this);
    command.env(ROLE, "host").env(CYCLE, &name).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command.env(if side == "host" { ARMED } else { ARM_WORKER }, &armed);
    let mut host = command.spawn().map_err(text)?;
    let status = exited_or_stopped(&mut host)?;
    if status.is_none() {
        // A host that stands still for ever is the user's to kill; then its worker ends.
        host.kill().map_err(text)?;
        host.wait().map_err(text)?;
    }
    let says =
        host.stderr.take().map(std::io::read_to_string).and_then(Result::ok).unwrap_or_default();
    let started = Instant::now();
    // Three seconds: a worker whose host is gone may be in the middle of work for two.
    while !alive(&name).is_empty() {
        if started.elapsed() > Duration::from_secs(4) {
            return Err(format!("{side} {armed}: {:?} is still there", alive(&name)));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // The armed side did end there, so the point was reached; the other came to an orderly end.
    let signal = status.and_then(|status| status.signal());
    let as_it_must = match (side, action) {
        ("host", "kill") => signal == Some(9),
        ("host", "abort") => signal == Some(6),
        ("host", "stop") => status.is_none(),
        (_, action) if action.starts_with("delay") => status.is_some_and(|status| status.success()),
        // One that stands still is killed by its host in the end.
        (_, "kill" | "stop") => {
            says.contains("killed by signal 9") || says.contains("no handshake")
        }
        _ => says.contains("killed by signal 6"),
    };
    let orderly = side == "host" || status.is_some_and(|status| status.success());
    if as_it_must && orderly { Ok(()) } else { Err(format!("{side} {armed}: {status:?}: {says}")) }
}

fn shared_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find(|line| line.starts_with("Shmem:")).unwrap_or_default();
    line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

/// Every point, on either side, in every manner: more than 200 times in all.
fn every_point(side: &'static str) -> Outcome {
    let (before, shmem) = (Census::take(), shared_memory());
    let mut number = 0;
    for action in ["kill", "abort", "stop", "delay:30"] {
        let repeats = if action.starts_with("delay") { 1 } else { 2 };
        for point in FAILPOINTS {
            for _ in 0..repeats {
                number += 1;
                cycle(number, side, point, action)?;
            }
        }
    }
    if number < 102 {
        return Err(format!("only {number} cycles"));
    }
    before.settle()?;
    let left = shared_memory().saturating_sub(shmem);
    // In KiB; other programs of the machine have shared memory too.
    if left > 4096 { Err(format!("{left} KiB of shared memory left behind")) } else { Ok(()) }
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return act(&role);
    }
    run_serially(vec![
        trial("a_worker_that_ends_anywhere_takes_nothing_along", || every_point("worker")),
        trial("a_host_that_ends_anywhere_leaves_nothing_behind", || every_point("host")),
    ])
}
