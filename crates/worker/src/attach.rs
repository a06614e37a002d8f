//! The worker's side.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use link::Link;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::VARIABLE;

/// The status with which a worker exits whose host is gone.
pub const HOST_GONE: i32 = 83;

/// How long the work at hand may take to notice that the host is gone.
const GRACE: Duration = Duration::from_secs(2);

/// The link to the host, if this process was spawned as a worker; the first time it is asked.
///
/// The standard input is pointed at `/dev/null` afterwards, so that nothing else reads the link. A
/// thread then watches the host (W3): when it is gone the link is closed, so that whoever waits on
/// it returns, and 2 seconds later the process exits with [`HOST_GONE`], whatever it is doing.
///
/// # Errors
///
/// A failing system call; not having been spawned as a worker is `Ok(None)`.
pub fn attach() -> io::Result<Option<Link>> {
    let Some((inode, _)) = announced() else { return Ok(None) };
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let socket = File::from(socket);
    if socket.metadata()?.ino() != inode {
        // A child of a worker, or the second call: the standard input is something else.
        return Ok(None);
    }
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    let socket = OwnedFd::from(socket);
    let watched = socket.try_clone()?;
    let link = Link::over(socket);
    let host = host_process();
    std::thread::Builder::new()
        .name("worker-host-watch".into())
        .spawn(move || watch(&watched, host.as_ref()))?;
    Ok(Some(link))
}

/// What the host said of itself and the socket.
fn announced() -> Option<(u64, u32)> {
    let value = std::env::var(VARIABLE).ok()?;
    let (inode, pid) = value.split_once(':')?;
    Some((inode.parse().ok()?, pid.parse().ok()?))
}

/// The host's process id, if the host is this process's parent.
///
/// Only of its parent can a process tell that a number still means who it meant: as long as it is our
/// parent, it has not been reaped and its number given to another. In another pid namespace the
/// numbers differ, and nothing is known.
#[must_use]
pub fn host_pid() -> Option<u32> {
    let (_, host) = announced()?;
    let parent = rustix::process::getppid()?;
    (u32::try_from(parent.as_raw_nonzero().get()) == Ok(host)).then_some(host)
}

/// A descriptor of the host's process.
fn host_process() -> Option<OwnedFd> {
    let host = Pid::from_raw(i32::try_from(host_pid()?).ok()?)?;
    let pidfd = pidfd_open(host, PidfdFlags::empty()).ok()?;
    // Still our parent, so it was when the descriptor was made.
    host_pid().is_some().then_some(pidfd)
}

fn watch(socket: &OwnedFd, host: Option<&OwnedFd>) {
    let mut signs = match host {
        Some(pidfd) => PollFd::new(pidfd, PollFlags::IN),
        // Not our parent's socket: its end is all that can be seen.
        None => PollFd::new(socket, PollFlags::RDHUP),
    };
    while let Err(rustix::io::Errno::INTR) = poll(std::slice::from_mut(&mut signs), None) {}
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    std::thread::sleep(GRACE);
    std::process::exit(HOST_GONE);
}
