//! The program `ladder`.
//!
//! `ladder doctor` proves every rung with a worker and tells what works. `ladder relay FILE…` spawns an isolated worker (this program again), sends it each file's decoded
//! content, checks what comes back, and tells what every leaf rode. `load` and `save` turn files into
//! values and back, `device` puts tensors on one, `operate` is what the worker does with them, `report` prints; `machine` is what `doctor` looks at beside the
//! rungs.

mod device;
mod doctor;
mod load;
mod machine;
mod operate;
mod relay;
mod report;
mod save;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ladder::{Channel, Failure, Handler, Peer, Value};

use crate::operate::Operation;

/// Moves tensors between a host process and an isolated worker.
#[derive(Debug, Parser)]
#[command(name = "ladder", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Send files through a worker and back, and tell what each leaf rode.
    Relay(relay::Relay),
    /// Prove every rung with a worker, and tell what works and how to get the rest.
    Doctor(doctor::Doctor),
}

/// What a worker is told, that is to ask for the rung too.
const POOL_IPC: &str = "--experimental-pool-ipc";

/// The worker's side: one method an operation.
struct Operations;

impl Handler for Operations {
    fn call(&self, method: &str, argument: Value, _: &Peer) -> Result<Value, Failure> {
        let operation = Operation::named(method).ok_or_else(|| Failure::unknown_method(method))?;
        Ok(operation.apply(&argument)?)
    }
}

fn main() -> ExitCode {
    let asks_for_pools = std::env::args_os().skip(1).any(|argument| argument == POOL_IPC);
    match Channel::from_env_with(&device::rungs(asks_for_pools), None) {
        Ok(Some(channel)) => {
            return match channel.serve(Operations) {
                Ok(()) => ExitCode::SUCCESS,
                Err(ended) => report::failed(&ended),
            };
        }
        Ok(None) => {}
        Err(error) => return report::failed(&error),
    }
    match Arguments::parse().command {
        Command::Relay(relay) => match relay.run() {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => report::failed(&error),
        },
        Command::Doctor(doctor) => match doctor.run() {
            Ok(status) => status,
            Err(error) => {
                report::failed(&error);
                error.status()
            }
        },
    }
}
