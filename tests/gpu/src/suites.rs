//! The suites beside this program: on the machine's own driver, each as a whole.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::{Error, Row};

/// Runs every program of the folder whose name begins with `suite-`.
pub(crate) fn rows(folder: &Path, on_stand_in: bool) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    let mut names: Vec<_> = std::fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    names.sort_by_key(std::fs::DirEntry::file_name);
    for entry in names {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(suite) = name.strip_prefix("suite-") else { continue };
        let started = Instant::now();
        let mut command = Command::new(entry.path());
        if !on_stand_in {
            command.env("LADDER_TEST_DRIVER", "real");
        }
        let output = command.output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let last =
            text.lines().rev().find(|line| line.starts_with("test result")).unwrap_or("no result");
        let found = format!("{last} ({:.0} s)", started.elapsed().as_secs_f64());
        for failed in
            text.lines().filter(|line| line.contains("FAILED") && line.starts_with("test "))
        {
            rows.push(Row::told(format!("{suite}: failed"), failed));
        }
        rows.push(Row::held(suite, found, "all pass", output.status.success()));
    }
    if rows.is_empty() {
        rows.push(Row::held("suites", "none beside this program", "some", on_stand_in));
    }
    Ok(rows)
}
