//! Host memory against its limits and against what a user would pick instead, interleaved in one run.
//!
//! Two processes on two cores: this one on CPU 0, whatever it talks to on CPU 1. In each round every
//! case runs one batch, so that load of the machine meets all alike; a ratio is the median over the
//! rounds of the two batches' medians, and beside it stands the baseline against itself. Every batch
//! checks its bytes.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a report for a person to read")]

mod canary;
mod cases;
mod hop;
mod peers;
mod report;
mod values;
#[expect(dead_code, reason = "the messages are the library's; not all are used here")]
#[path = "../../../crates/ladder/src/wire.rs"]
mod wire;

use std::process::ExitCode;

use clap::Parser;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::report::Report;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Names what a process started by this one does.
pub(crate) const ROLE: &str = "BENCH_ROLE";

#[derive(Debug, Parser)]
struct Arguments {
    /// Lines of JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Within a minute: fewer rounds, and nothing of 1 GiB but our own.
    #[arg(long)]
    quick: bool,
    /// The driver of the Rust peers.
    #[arg(long)]
    peers: Option<std::path::PathBuf>,
    /// A Python with torch and numpy, and the script of the Python peers.
    #[arg(long, num_args = 2, value_names = ["PYTHON", "SCRIPT"])]
    python: Option<Vec<std::path::PathBuf>>,
    /// Small values of many parts, instead of host memory.
    #[arg(long)]
    values: bool,
    /// What proving a worker costs, instead of host memory.
    #[arg(long)]
    canary: bool,
    /// So many calls with such a value, and nothing else: for a profiler.
    #[arg(long)]
    value_calls: Option<usize>,
    /// So many echoes of a tensor that is born shared, and nothing else: for a profiler.
    #[arg(long)]
    echoes: Option<usize>,
    /// So many sends of 64 MiB of private memory, and nothing else: for strace.
    #[arg(long)]
    sends: Option<usize>,
    /// So many passes through one hop of our codec and leases, and nothing else: for callgrind.
    #[arg(long)]
    hops: Option<u32>,
}

pub(crate) fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // On a machine with one CPU everything runs there.
    let _ = sched_setaffinity(None, &set);
}

fn main() -> ExitCode {
    let outcome = match std::env::var(ROLE) {
        Ok(role) => cases::act(&role),
        Err(_) => measure(&Arguments::parse()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &Arguments) -> Result<(), Error> {
    if let Some(hops) = arguments.hops {
        return hop::run(hops);
    }
    pin(0);
    if let Some(count) = arguments.echoes {
        return cases::echoes(count);
    }
    if let Some(count) = arguments.sends {
        return cases::sends(count);
    }
    if let Some(count) = arguments.value_calls {
        return values::calls(count);
    }
    let rounds = if arguments.quick { 7 } else { 15 };
    let mut report = Report::new(rounds);
    if arguments.canary {
        canary::run(&mut report)?;
    } else if arguments.values {
        values::run(&mut report, arguments.quick, arguments.peers.as_deref())?;
    } else {
        cases::run(&mut report, arguments.quick, arguments.peers.as_deref())?;
        hop::measure(&mut report)?;
    }
    if let Some([python, script]) = arguments.python.as_deref() {
        peers::python(&mut report, python, script, arguments.quick)?;
    }
    if arguments.json {
        report.print_json()
    } else {
        report.print_table()
    }
    Ok(())
}
