//! The worker's side.

use std::io;
use std::time::Duration;

use link::Link;

use crate::sys;

/// The status with which a worker exits whose host is gone.
pub const HOST_GONE: i32 = 83;

/// How long the work at hand may take to notice that the host is gone.
const GRACE: Duration = Duration::from_secs(2);

/// The link to the host, if this process was spawned as a worker; the first time it is asked.
///
/// Nothing is left on the standard input afterwards, so that nothing else reads the link. A
/// thread then watches the host (W3): when it is gone the link is closed, so that whoever waits on
/// it returns, and 2 seconds later the process exits with [`HOST_GONE`], whatever it is doing. (On Windows it is ended
/// with its host, by a job object; the thread is for hosts that could not have one.)
///
/// # Errors
///
/// A failing system call; not having been spawned as a worker is `Ok(None)`.
pub fn attach() -> io::Result<Option<Link>> {
    let Some((link, watched)) = sys::attach()? else { return Ok(None) };
    let host = sys::host();
    std::thread::Builder::new().name("worker-host-watch".into()).spawn(move || {
        sys::watch(&watched, host.as_ref());
        std::thread::sleep(GRACE);
        std::process::exit(HOST_GONE);
    })?;
    Ok(Some(link))
}

/// The host's process id, if the host is this process's parent.
///
/// Only of its parent can a process tell that a number still means who it meant: as long as it is our
/// parent, it has not been reaped and its number given to another (on Windows: it began before us). In another pid
/// namespace the numbers differ, and nothing is known.
#[must_use]
pub fn host_pid() -> Option<u32> {
    sys::host_pid()
}
