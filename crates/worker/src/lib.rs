//! Spawns, supervises and reaps an isolated process, with a control link to it.
//!
//! The link is handed over through the worker's standard input: it has no address that anyone else could
//! connect to, and no argument or variable that gives it away.
//!
//! ```no_run
//! use worker::Command;
//!
//! // In the host:
//! let (process, link) = Command::new("my-worker").arg("--fast").spawn()?;
//! link.send(r#"{"hello":"worker"}"#, &[], None)?;
//! # drop(link);
//! let exit = process.end(std::time::Duration::from_secs(1));
//! println!("{exit}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```no_run
//! // In the worker:
//! if let Some(link) = worker::attach()? {
//!     let frame = link.receive(None)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules
//!
//! - **W1** A spawned process is reaped before its [`Process`] is gone: no zombie stays.
//! - **W2** Its output is drained by a thread that waits for nothing else, so it never blocks on a
//!   full pipe; what cannot be passed on fast enough is dropped and counted.
//! - **W3** A worker ends when its host does: [`attach`] watches the host's process, not a signal
//!   tied to one of the host's threads. On Windows the host's system ends it, and whatever it started.
//!
//! # What it does not do
//!
//! It speaks no protocol over the link (`ladder` does), and confines nothing: a worker has the
//! rights of its user.

mod attach;
mod output;
mod process;
mod sys;

pub use attach::{HOST_GONE, attach, host_pid};
pub use output::Output;
pub use process::{Command, Exit, Process, SpawnError};

/// Names what a worker's standard input is, and the host: `INODE:PID`, on Windows `NONCE:PID` with the first bytes that
/// are on it. A child of the worker, which inherits the variable but not the standard input, is not taken for a worker.
pub const VARIABLE: &str = "LADDER_WORKER";
