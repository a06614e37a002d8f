//! The watchdog bites: a hung test ends its process.

use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use testkit::{Watchdog, run, trial};

fn hangs() -> Result<(), String> {
    let started = Instant::now();
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(this).env("HANG", "1").output().map_err(|error| error.to_string())?;
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    if !was_aborted(output.status) || !says.contains("a hung one did not end within 100ms") {
        return Err(format!("{}: {says}", output.status));
    }
    if started.elapsed() > Duration::from_secs(20) {
        return Err(format!("it took {:?}", started.elapsed()));
    }
    Ok(())
}

#[cfg(unix)]
fn was_aborted(status: ExitStatus) -> bool {
    // SIGABRT.
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(6)
}

#[cfg(not(unix))]
fn was_aborted(status: ExitStatus) -> bool {
    !status.success()
}

fn main() -> ExitCode {
    if std::env::var_os("HANG").is_some() {
        let _dog = Watchdog::new("a hung one", Duration::from_millis(100));
        std::thread::sleep(Duration::from_secs(30));
        return ExitCode::SUCCESS;
    }
    run(vec![
        trial("a_hung_test_is_aborted", hangs),
        trial("a_test_that_ends_in_time_is_left_alone", || {
            drop(Watchdog::new("a quick one", Duration::from_millis(50)));
            std::thread::sleep(Duration::from_millis(100));
            Ok(())
        }),
    ])
}
