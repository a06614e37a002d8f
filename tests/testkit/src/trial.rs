//! Tests of binaries without the standard harness.

use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};

use crate::Watchdog;

/// How long one test may take; none comes near it on a loaded machine.
const LIMIT: Duration = Duration::from_secs(180);

/// A test with a watchdog.
pub fn trial(
    name: impl Into<String>,
    test: impl FnOnce() -> Result<(), String> + Send + 'static,
) -> Trial {
    let name = name.into();
    let watched = name.clone();
    Trial::test(name, move || {
        let _dog = Watchdog::new(&watched, LIMIT);
        test().map_err(Failed::from)
    })
}

/// A test with a watchdog that is ignored where the system is another one than Linux.
pub fn linux(
    name: impl Into<String>,
    test: impl FnOnce() -> Result<(), String> + Send + 'static,
) -> Trial {
    trial(name, test).with_ignored_flag(!cfg!(target_os = "linux"))
}

/// Runs tests as `cargo test` and `cargo nextest` expect it.
#[must_use]
pub fn run(trials: Vec<Trial>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The same, one test at a time: for tests that count what their process holds.
#[must_use]
pub fn run_serially(trials: Vec<Trial>) -> ExitCode {
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials).exit_code()
}
