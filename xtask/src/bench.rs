//! Benchmarks: builds what is measured, and what it is measured against, and runs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;

use crate::{Error, succeed};

/// What is measured.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum What {
    /// Host memory.
    Host,
    /// Small values of many parts.
    Values,
    /// What proving a worker costs.
    Canary,
}

#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) json: bool,
    pub(crate) quick: bool,
    pub(crate) python: Option<PathBuf>,
    pub(crate) alone: bool,
}

/// Host memory against memcpy, sockets, iceoryx2, ipc-channel and, given a Python, torch; values against ipc-channel; a proof
/// against a raw ping-pong.
pub(crate) fn run(root: &Path, what: What, options: &Options) -> Result<(), Error> {
    let target = root.join("target");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root).args(["build", "--release", "--package", "bench", "--locked"]);
    succeed(cargo.env("CARGO_TARGET_DIR", &target))?;
    let mut bench = Command::new(target.join("release/bench-host"));
    bench.current_dir(root);
    if !options.alone && !matches!(what, What::Canary) {
        let peers = root.join("tests/bench/peers");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(&peers).args(["build", "--release", "--locked"]);
        let folder = target.join("bench-peers");
        succeed(cargo.env("CARGO_TARGET_DIR", &folder))?;
        bench.arg("--peers").arg(folder.join("release/bench-peers"));
    }
    for (given, flag) in [(options.json, "--json"), (options.quick, "--quick")] {
        if given {
            bench.arg(flag);
        }
    }
    match what {
        What::Host => {}
        What::Values => drop(bench.arg("--values")),
        What::Canary => drop(bench.arg("--canary")),
    }
    if let Some(python) = &options.python {
        let script = root.join("tests/bench/peers/peers.py");
        bench.arg("--python").arg(python).arg(script);
    }
    succeed(&mut bench)
}
