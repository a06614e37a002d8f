//! `ladder doctor`, as a person or a script runs it.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::process::{Command, ExitCode, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ladder::{Channel, Ladder, Methods};
use serde_json::Value as Json;
use testkit::faulty::{Faulty, Kind, On, Trigger};
use testkit::{linux, run_serially, trial};

type Outcome = Result<(), String>;

const ROLE: &str = "DOCTOR_ROLE";

/// Around a word of a command line.
const QUOTE: char = if cfg!(windows) { '"' } else { '\'' };

/// How many things of the machine are told.
const LOOKED_AT: usize = if cfg!(target_os = "linux") { 5 } else { 2 };

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

/// A worker of this test's, in a role.
fn doctor(role: &str, arguments: &[&str]) -> Output {
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ladder"));
    command.arg("doctor").args(arguments);
    if !role.is_empty() {
        command
            .env(ROLE, role)
            .args(["--worker", &format!("{QUOTE}{}{QUOTE} --quiet", this.display())]);
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn act(role: &str) -> ExitCode {
    let inner: Arc<dyn rung::Rung> = Arc::new(ladder::tier_shm::Shm);
    let shm: Arc<dyn rung::Rung> = match role {
        "flips" => {
            let (id, trigger) = (inner.id(), Trigger::always());
            Arc::new(Faulty { inner, id, kind: Kind::Flip, on: On::Import, trigger })
        }
        _ => inner,
    };
    let inline = Arc::new(tier_inline::Inline);
    let Ok(Some(channel)) = Channel::from_env_with(&Ladder::of(vec![shm, inline]), None) else {
        return ExitCode::FAILURE;
    };
    match channel.serve(Methods::new()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn all_is_well_with_itself() -> Outcome {
    let output = doctor("", &[]);
    let table = text(&output.stdout);
    check(output.status.code() == Some(0), (output.status, &table))?;
    let looked_at = if cfg!(target_os = "linux") {
        &["/dev/shm: ", "memlock: ", "descriptors: ", "pid namespace: the same"][..]
    } else {
        // Why the rungs of devices are not there.
        &["platform: ", "memory of devices is shared on Linux alone", "cuda-vmm"]
    };
    let always = ["every rung that both sides offer is verified", "CUDA: "];
    for says in always.iter().chain(looked_at) {
        check(table.contains(says), (says, &table))?;
    }
    let words = |line: &str| line.split_whitespace().skip(1).take(4).map(str::to_owned).collect();
    let rows: Vec<Vec<String>> = table.lines().map(words).collect();
    check(
        rows.contains(&["shm", "host", "verified", "verified"].map(str::to_owned).into()),
        &table,
    )?;
    check(output.stderr.is_empty(), text(&output.stderr))
}

fn on_stand_in() -> Command {
    #[cfg(target_os = "linux")]
    let variables = testkit::stand_in::environment().unwrap();
    #[cfg(not(target_os = "linux"))]
    let variables: [(&str, &str); 0] = [];
    let mut command = Command::new(env!("CARGO_BIN_EXE_ladder"));
    command.envs(variables);
    command
}

/// Every device of the driver is proven, and a stand-in never passes for one.
fn devices_are_listed_and_proven() -> Outcome {
    let mut command = on_stand_in();
    command.args(["doctor", "--json"]);
    let output = command.output().unwrap();
    let json: Json = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    check(output.status.code() == Some(0), &json)?;
    let rungs = json["rungs"].as_array().ok_or("rungs")?;
    let devices = rungs.iter().filter(|row| row["memory"] != "host");
    let verified = devices.filter(|row| {
        row["from_here"]["verdict"] == "verified" && row["to_here"]["verdict"] == "verified"
    });
    check(verified.count() == 4, rungs)?;
    let cuda = &json["machine"][0]["found"];
    let says = |what| cuda.as_str().is_some_and(|found| found.contains(what));
    check(says("STAND-IN, no device is there") && says("(at least 11.4)"), cuda)
}

/// The experimental rung is there where it is asked for, proven on every device, and called what it is.
fn an_experiment_is_asked_for_and_called_one() -> Outcome {
    let output =
        on_stand_in().args(["doctor", "--json", "--experimental-pool-ipc"]).output().unwrap();
    let json: Json = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    let rungs = json["rungs"].as_array().ok_or("rungs")?;
    let pools: Vec<&Json> = rungs.iter().filter(|row| row["experimental"] == true).collect();
    let is_proven = |row: &&&Json| {
        let is = |way: &str| row[way]["verdict"] == "verified";
        row["rung"] == "pool-ipc" && is("from_here") && is("to_here")
    };
    check(pools.len() == 2 && pools.iter().filter(is_proven).count() == 2, rungs)?;
    // A worker that does not ask for it is no fault.
    let output = doctor("plain", &["--experimental-pool-ipc"]);
    let table = text(&output.stdout);
    check(output.status.code() == Some(0) && table.contains("pool-ipc (experimental)"), table)
}

/// A rung that the worker has not is no fault, and the reason and the remedy stand beside it.
fn what_is_missing_is_told() -> Outcome {
    let output = doctor("plain", &["--json"]);
    let json: Json = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    check(output.status.code() == Some(0) && json["verdict"] == "verified", &json)?;
    let rungs = json["rungs"].as_array().ok_or("rungs")?;
    let pickle = rungs.iter().find(|rung| rung["rung"] == "pickle").ok_or("no pickle")?;
    check(pickle["from_here"]["verdict"] == "not offered", pickle)?;
    check(pickle["from_here"]["code"] == "not-offered", pickle)?;
    check(pickle["from_here"]["remedy"].is_string(), pickle)?;
    let shm = rungs.iter().find(|rung| rung["rung"] == "shm").ok_or("no shm")?;
    check(shm["to_here"]["verdict"] == "verified" && shm["us"].as_f64() > Some(0.0), shm)?;
    check(json["here"]["library"] == env!("CARGO_PKG_VERSION"), &json["here"])?;
    check(
        json["machine"].as_array().is_some_and(|checks| checks.len() == LOOKED_AT),
        &json["machine"],
    )
}

fn a_worker_that_is_refused_is_status_2_with_the_report() -> Outcome {
    let output = doctor("flips", &[]);
    let table = text(&output.stdout);
    check(output.status.code() == Some(2), (output.status, &table))?;
    for says in
        ["THE WORKER IS REFUSED", "demoted", "$.whole: byte ", " differ", "report the driver"]
    {
        check(table.contains(says), (says, &table))?;
    }
    let output = doctor("flips", &["--json"]);
    let json: Json = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    check(output.status.code() == Some(2) && json["verdict"] == "refused", &json)
}

fn what_is_no_worker_is_one_clear_line() -> Outcome {
    let started = Instant::now();
    for (arguments, says) in [
        (&["--worker", "true"][..], "exited with status 0"),
        (&["--worker", "sleep 20", "--timeout", "0.3"], "no handshake within"),
        (&["--worker", "/no/such/program"], "no handshake"),
    ] {
        let output = doctor("", arguments);
        let line = text(&output.stderr);
        check(output.status.code() == Some(2) && line.contains(says), (output.status, &line))?;
        check(line.lines().count() == 1 && output.stdout.is_empty(), &line)?;
    }
    check(started.elapsed() < Duration::from_secs(20), started.elapsed())
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return act(&role);
    }
    run_serially(vec![
        trial("all_is_well_with_itself", all_is_well_with_itself),
        linux("devices_are_listed_and_proven", devices_are_listed_and_proven),
        linux(
            "an_experiment_is_asked_for_and_called_one",
            an_experiment_is_asked_for_and_called_one,
        ),
        trial("what_is_missing_is_told", what_is_missing_is_told),
        trial(
            "a_worker_that_is_refused_is_status_2_with_the_report",
            a_worker_that_is_refused_is_status_2_with_the_report,
        ),
        linux("what_is_no_worker_is_one_clear_line", what_is_no_worker_is_one_clear_line),
    ])
}
