//! Tests against real Python.

use std::path::Path;
use std::process::Command;

use crate::{Error, succeed};

/// What the environment holds: the versions that the tests were written with.
const PACKAGES: &[&str] = &["numpy==2.4.6"];

/// Makes the environment where there is none, and runs the tests.
pub(crate) fn run(root: &Path) -> Result<(), Error> {
    let folder = root.join("target/test-env");
    let python = folder.join("bin/python");
    let stamp = folder.join("packages.txt");
    let wanted = PACKAGES.join("\n");
    if std::fs::read_to_string(&stamp).ok().as_deref() != Some(&wanted) {
        succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        succeed(Command::new(&python).args(pip).args(PACKAGES))?;
        std::fs::write(&stamp, wanted)?;
    }
    let python = std::path::absolute(&python)?;
    // Those that need NumPy, and those that need any Python, which are ignored where there is none.
    for (test, arguments) in [("python", "--ignored"), ("trust", "--include-ignored")] {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root).env("LADDER_PYTHON", &python);
        cargo.args(["test", "--workspace", "--test", test, "--locked", "--", arguments]);
        succeed(&mut cargo)?;
    }
    Ok(())
}
