//! The check of a machine with a device: built here, packed into one folder, and run where no toolchain is.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, succeed};

/// What the folder may hold, so that it travels.
const FOLDER: u64 = 64 << 20;

/// The suites, by package and test target.
const SUITES: &[(&str, &str)] = &[
    ("cuda", "driver"),
    ("cuda", "pools"),
    ("tier-cuda-ipc", "ipc"),
    ("tier-cuda-ipc", "vmm"),
    ("e2e", "gpu"),
    ("tier-pool-ipc", "pool"),
    ("e2e", "pool"),
];

#[derive(Debug)]
pub(crate) struct Options {
    /// Builds and packs, and runs nothing.
    pub(crate) dry_run: bool,
    /// Runs on the stand-in, with every line labelled.
    pub(crate) stand_in: bool,
}

const SCRIPT: &str = r#"#!/bin/sh
# The check of a machine with a device; needs nothing but this folder. With --stand-in, on the stand-in of the tests.
cd "$(dirname "$0")" || exit 1
case "$1" in
--stand-in)
    export LD_LIBRARY_PATH="$PWD/stand-in" CUDA_CPU_STANDIN=1
    exec ./gpu-check --stand-in
    ;;
esac
exec ./gpu-check
"#;

pub(crate) fn run(root: &Path, options: &Options) -> Result<(), Error> {
    let folder = pack(root)?;
    let size = size_of(&folder)?;
    println!(
        "{} holds {:.1} MiB: copy it to a machine with a device, and run ./run.sh there",
        folder.display(),
        size as f64 / 1048576.0
    );
    if size > FOLDER {
        return Err(format!("more than {} MiB", FOLDER >> 20).into());
    }
    if options.dry_run && !options.stand_in {
        return Ok(());
    }
    let mut script = Command::new(folder.join("run.sh"));
    if options.stand_in {
        script.arg("--stand-in");
    }
    succeed(&mut script)
}

fn pack(root: &Path) -> Result<PathBuf, Error> {
    let folder = root.join("target/gpu-check");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(folder.join("stand-in"))?;
    let mut build = cargo(root, "build");
    succeed(build.args([
        "--package",
        "gpu-check",
        "--package",
        "ladder-cli",
        "--package",
        "cuda-standin",
    ]))?;
    let release = root.join("target/release");
    for name in ["gpu-check", "ladder"] {
        place(&release.join(name), &folder.join(name))?;
    }
    // One library under both names that it is looked for by: two files would be two libraries.
    place(&release.join("libcuda_standin.so"), &folder.join("stand-in/libcuda.so.1"))?;
    link("libcuda.so.1", &folder.join("stand-in/libcuda.so"))?;
    let mut build = cargo(root, "build");
    succeed(build.args([
        "--package",
        "examples",
        "--example",
        "gpu_relay",
        "--example",
        "gpu_forward",
    ]))?;
    for name in ["gpu_relay", "gpu_forward"] {
        place(&release.join("examples").join(name), &folder.join(name))?;
    }
    for (package, test) in SUITES {
        let binary = test_binary(root, package, test)?;
        place(&binary, &folder.join(format!("suite-{package}-{test}")))?;
    }
    let script = folder.join("run.sh");
    fs::write(&script, SCRIPT)?;
    executable(&script)?;
    Ok(folder)
}

fn cargo(root: &Path, command: &str) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root).args([command, "--release", "--locked"]);
    cargo.env("CARGO_TARGET_DIR", root.join("target"));
    // Line tables are most of a program, and nobody debugs there.
    cargo.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
    cargo
}

/// Builds a test target, and says where it is.
fn test_binary(root: &Path, package: &str, test: &str) -> Result<PathBuf, Error> {
    let mut build = cargo(root, "test");
    let output = build
        .args(["--no-run", "--message-format", "json", "--package", package, "--test", test])
        .stderr(std::process::Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Err(format!("{package} {test} does not build").into());
    }
    for message in cargo_metadata::Message::parse_stream(&*output.stdout) {
        if let cargo_metadata::Message::CompilerArtifact(artifact) = message?
            && artifact.target.name == test
            && let Some(path) = artifact.executable
        {
            return Ok(path.into_std_path_buf());
        }
    }
    Err(format!("no program of {package} {test}").into())
}

fn place(from: &Path, to: &Path) -> Result<(), Error> {
    fs::copy(from, to).map_err(|error| format!("{}: {error}", from.display()))?;
    Ok(())
}

#[cfg(unix)]
fn link(to: &str, from: &Path) -> Result<(), Error> {
    Ok(std::os::unix::fs::symlink(to, from)?)
}

#[cfg(not(unix))]
fn link(_: &str, _: &Path) -> Result<(), Error> {
    Err("devices are checked on Linux".into())
}

#[cfg(unix)]
fn executable(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

#[cfg(not(unix))]
fn executable(_: &Path) -> Result<(), Error> {
    Err("devices are checked on Linux".into())
}

fn size_of(folder: &Path) -> Result<u64, Error> {
    let mut all = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let found = entry.metadata()?;
        all += if found.is_dir() { size_of(&entry.path())? } else { found.len() };
    }
    Ok(all)
}
