//! The soak: four workers, values of every kind, forwards, demotions, and kills at any moment, for as long as is asked.
//! Every byte is checked; at the end stands what was done, and the most that this process held of memory and
//! descriptors, which must not have grown on the way.
//!
//! `cargo xtask soak --minutes 30`
#![expect(clippy::print_stdout, reason = "a program for a person to read")]

mod host;
mod watermark;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

/// Sends, forwards, demotes and kills until the time is over.
#[derive(Debug, Parser)]
struct Arguments {
    /// How long.
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// What everything at random follows from; the threads' order does not.
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    match worker::serve() {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        Err(_) => return ExitCode::FAILURE,
    }
    let Arguments { minutes, seed } = Arguments::parse();
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    println!("seed {seed}");
    match host::run(Duration::from_secs_f64(minutes * 60.0), seed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}
