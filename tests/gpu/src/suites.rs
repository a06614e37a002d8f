//! The suites beside this program: on the machine's own driver, each as a whole, with its output in a file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Error, Row};

/// What one may take: a driver that hangs takes no other's results along.
const LIMIT: Duration = Duration::from_secs(150);

/// Runs every program of the folder whose name begins with `suite-`, of those that are asked for, and tells of each when it has ended. What it said
/// goes into the folder that `OUT` names, or into this one.
pub(crate) fn each(
    folder: &Path,
    on_stand_in: bool,
    is_of_it: fn(&str) -> bool,
    mut tell: impl FnMut(Row),
) -> Result<(), Error> {
    let out = std::env::var_os("OUT").map_or_else(|| folder.to_path_buf(), PathBuf::from);
    let mut names: Vec<_> = std::fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    names.sort_by_key(std::fs::DirEntry::file_name);
    for entry in names {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_suite = |name: &&str| !name.contains('.') && is_of_it(name);
        let Some(suite) = name.strip_prefix("suite-").filter(is_suite) else {
            continue;
        };
        let started = Instant::now();
        let log = out.join(format!("{name}.txt"));
        let file = File::create(&log)?;
        let mut command = Command::new(entry.path());
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        if !on_stand_in {
            command.env("LADDER_TEST_DRIVER", "real");
        }
        let mut child = command.spawn()?;
        let ended = loop {
            match child.try_wait()? {
                Some(status) => break Some(status),
                None if started.elapsed() > LIMIT => {
                    child.kill()?;
                    child.wait()?;
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        let failed =
            text.lines().filter(|line| line.contains("FAILED") && line.starts_with("test "));
        failed.for_each(|line| tell(Row::told(format!("{suite}: failed"), line)));
        let last = text.lines().rev().find(|line| line.starts_with("test result"));
        let seconds = started.elapsed().as_secs_f64();
        let found = match ended {
            None => format!("not done within {LIMIT:?}"),
            Some(status) => format!("{} ({status}, {seconds:.0} s)", last.unwrap_or("no result")),
        };
        let passed = ended.is_some_and(|status| status.success());
        tell(Row::held(suite, found, "all pass", passed));
    }
    Ok(())
}
