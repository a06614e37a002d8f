//! What Windows asks of a program that hands sockets and handles to a process it started; empty elsewhere.
//!
//! A Unix socket carries descriptors, is handed over as a standard input, and a pidfd or a kqueue says when a
//! process ended: all of it safe code. On Windows each of these takes calls that have no safe form in a kept
//! crate, and they are here, so that `link` and `worker` need no unsafe of their own (ADR 33):
//!
//! | what | how | here |
//! |---|---|---|
//! | a socket for a process | WSADuplicateSocketW, WSASocketW | `share_socket`, `take_socket` |
//! | handles to and from it | DuplicateHandle | `Process::give`, `Process::take`, `Received` |
//! | its end | WaitForSingleObject | `Process::wait` |
//! | no orphans | job objects, before it runs | `Job`, `resume` |
//! | who started this process | the tool help library | `parent` |
//! | the same program | the name of the mapped image | `runs_this_executable` |
//!
//! All handles are moved by the process that started the other one, in both directions: the started one needs no
//! right to the starter, and names only handles of its own.
//!
//! # Invariants
//!
//! - **N1** Every handle passed to a call is borrowed or owned for the time of the call, and every structure has the
//!   size that the call is told.
//! - **N2** A raw handle or socket that a call gives is owned from there on, once, and checked for failure first.
//! - **N3** A number becomes a handle by `Received::adopt` alone: `Process::give` made it for this process, and
//!   it came over the one socket of the process that may. That process started this one. (That it did come over that
//!   socket is for who has the token to see to: T6 of SAFETY.md.)
#![cfg(windows)]

mod job;
mod process;
mod socket;
mod system;

pub use job::Job;
pub use process::{Process, Received, parent, resume, runs_this_executable};
pub use socket::{SHARED, pair, share_socket, take_socket};
pub use system::{available_memory, children, handle_count};

/// The error of the call that just failed.
fn last() -> std::io::Error {
    std::io::Error::last_os_error()
}

/// A call that answers zero where it failed.
fn succeeded(answer: i32) -> std::io::Result<()> {
    if answer == 0 { Err(last()) } else { Ok(()) }
}
