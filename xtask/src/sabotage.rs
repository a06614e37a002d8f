//! Tests that cannot lie: each patch breaks one thing, and the test it names must turn red.
//!
//! A patch is a file of `tests/sabotage/`, made with `git diff`, with a first line
//! `test: <arguments of cargo test>`. The workspace is copied, so the tree at hand stays as it is; the
//! copy keeps its own build folder between runs.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;

struct Patch {
    name: String,
    path: PathBuf,
    /// Arguments of `cargo test`.
    test: Vec<String>,
}

/// Applies the patches one at a time.
pub(crate) fn run(root: &Path, only: Option<&str>, after_tests: bool) -> Result<(), Error> {
    let patches: Vec<Patch> = patches(&root.join("tests/sabotage"))?
        .into_iter()
        .filter(|patch| only.is_none_or(|only| patch.name.contains(only)))
        .collect();
    if patches.is_empty() {
        return Err("no such patch".into());
    }
    let copy = root.join("target/sabotage");
    let mut wrong = Vec::new();
    // Green before: a test that is red anyway, or does not exist, shows nothing. All of them first, so that what a patch
    // changed is built once afterwards, together with the next one, and not for itself.
    checkout(root, &copy)?;
    let mut seen: HashMap<&[String], bool> = HashMap::new();
    for patch in &patches {
        if after_tests {
            // A test that does not exist is none that turns red.
            seen.insert(&patch.test, true);
        } else if !seen.contains_key(&*patch.test) {
            let before = test(&copy, &patch.test)?;
            let is_green = matches!(before, Verdict::Green);
            if !is_green {
                wrong.push(format!("{}: {before:?} before the patch", patch.name));
            }
            seen.insert(&patch.test, is_green);
        }
    }
    for patch in patches.iter().filter(|patch| seen[&*patch.test]) {
        checkout(root, &copy)?;
        apply(&copy, &patch.path)?;
        match test(&copy, &patch.test)? {
            Verdict::Red => println!("{}: red, as it must be", patch.name),
            verdict => wrong.push(format!("{}: {verdict:?} with the patch", patch.name)),
        }
    }
    if wrong.is_empty() {
        println!("{} sabotages, each seen", patches.len());
        return Ok(());
    }
    Err(wrong.join("\n").into())
}

fn patches(folder: &Path) -> Result<Vec<Patch>, Error> {
    let mut patches = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|ending| ending != "patch") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let first = text.lines().next().and_then(|line| line.strip_prefix("test: "));
        let test =
            first.ok_or_else(|| format!("{}: the first line names no test", path.display()))?;
        patches.push(Patch {
            name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            test: test.split(' ').map(str::to_owned).collect(),
            path,
        });
    }
    patches.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(patches)
}

/// Brings the copy to the state of the tree, uncommitted changes included.
fn checkout(root: &Path, copy: &Path) -> Result<(), Error> {
    fs::create_dir_all(copy)?;
    let listed = Command::new("git")
        .current_dir(root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()?;
    let listed = String::from_utf8(listed.stdout)?;
    // Thousands of files that no test reads.
    let of_fuzzing = |name: &str| name.starts_with("tests/fuzz/corpus/");
    let names = listed.split('\0').filter(|name| !name.is_empty() && !of_fuzzing(name));
    let names: HashSet<&str> = names.collect();
    remove_others(copy, copy, &names)?;
    for name in names {
        let (from, to) = (root.join(name), copy.join(name));
        let Ok(contents) = fs::read(&from) else {
            continue;
        };
        // Only what differs: an unchanged file keeps its time, and what is built of it stays built.
        if fs::read(&to).is_ok_and(|known| known == contents) {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&to, contents)?;
    }
    Ok(())
}

/// Removes what an earlier state of the tree left in the copy, but for what was built there.
fn remove_others(copy: &Path, folder: &Path, names: &HashSet<&str>) -> Result<(), Error> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.strip_prefix(copy)?.to_string_lossy().into_owned();
        if name == "target" {
            continue;
        }
        if path.is_dir() {
            remove_others(copy, &path, names)?;
        } else if !names.contains(name.as_str()) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn apply(copy: &Path, patch: &Path) -> Result<(), Error> {
    let patch = patch.canonicalize()?;
    // Outside a repository of its own, `git apply` would take paths from the one around it.
    let output = Command::new("git")
        .current_dir(copy)
        .env("GIT_CEILING_DIRECTORIES", copy.canonicalize()?.join(".."))
        .args(["apply", "--whitespace=nowarn"])
        .arg(&patch)
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!("{} does not apply: {says}", patch.display()).into())
}

#[derive(Debug)]
enum Verdict {
    Green,
    Red,
    NothingRan,
    DoesNotBuild,
}

/// Runs a test; red is a test that failed, not a build that did.
fn test(copy: &Path, arguments: &[String]) -> Result<Verdict, Error> {
    let cargo = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO"));
        command
            .current_dir(copy)
            .env("CARGO_TARGET_DIR", copy.join("target"))
            // Nobody reads where a broken copy panics: less to build and to link.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("RUST_BACKTRACE", "0")
            .arg("test")
            .args(arguments.iter().take_while(|argument| *argument != "--"))
            .args(more);
        command
    };
    if !cargo(&["--no-run"]).output()?.status.success() {
        return Ok(Verdict::DoesNotBuild);
    }
    let after: Vec<&str> =
        arguments.iter().skip_while(|argument| *argument != "--").map(String::as_str).collect();
    let output = cargo(&after).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let ran = text.contains("1 passed") || text.contains("1 failed") || !output.status.success();
    Ok(match (output.status.success(), ran) {
        (true, true) => Verdict::Green,
        (true, false) => Verdict::NothingRan,
        // An aborted binary (a watchdog, a double panic) is as red as a failed test.
        (false, _) => Verdict::Red,
    })
}
