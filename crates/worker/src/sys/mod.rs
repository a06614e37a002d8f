//! Processes as the platform has them; each file has the same items.
//!
//! | | the link is handed over as | the end of a process | orphans |
//! |---|---|---|---|
//! | Linux | the standard input itself | a pidfd (pidfd_open(2)) | the worker watches its host |
//! | macOS | the standard input itself | a kqueue (kqueue(2)) | the worker watches its host |
//! | Windows | a name of it, through the standard input | its handle | a job object, and the worker watches its host |
//!
//! - `Exit`: the end of a process, to be waited for, and for a link to watch.
//! - `Handover`: what goes to a new process before and after it is started.
//! - `Group`: the process and whatever must not outlive it.
//! - `attach`, `host`, `watch`: the worker's side.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
pub(crate) use unix::*;
#[cfg(windows)]
pub(crate) use windows::*;
