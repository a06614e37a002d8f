//! A connected stream as the platform has it; each file has the same items.
//!
//! - `Socket`: what is handed to another process, and to [`crate::Link::over`].
//! - `Stream`: `send` and `receive` never wait; `wait` does, for the stream and for the peer's end. `told` is what goes
//!   between the prefix of a frame and its text: the names of its handles, where those cannot ride it.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
pub use unix::Socket;
#[cfg(unix)]
pub(crate) use unix::{NAME, Stream};
#[cfg(windows)]
pub use windows::Socket;
#[cfg(windows)]
pub(crate) use windows::{NAME, Stream};

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};

const LOOK_UP: Duration = Duration::from_millis(100);

/// Whether the stream is over.
pub(crate) fn is_gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected};
    /// This side has shut it.
    const WSAESHUTDOWN: i32 = 10058;
    if cfg!(windows) {
        return matches!(error.kind(), ConnectionAborted | ConnectionReset | NotConnected)
            || error.raw_os_error() == Some(WSAESHUTDOWN);
    }
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// What there is to do.
pub(crate) struct Ready {
    /// Something can be read, the end included.
    pub(crate) readable: bool,
    /// Something can be written, or never will be.
    pub(crate) writable: bool,
    pub(crate) peer_exited: bool,
}

/// What came.
pub(crate) struct Came {
    pub(crate) bytes: usize,
    /// Handles that rode along.
    pub(crate) handles: Vec<rung::Handle>,
    /// More did than could be taken.
    pub(crate) truncated: bool,
}

/// Waits for a stream and, where somebody watches it, for the end of a process: what can be read from then.
fn wait(
    stream: impl AsFd,
    peer: Option<BorrowedFd<'_>>,
    write: bool,
    read: bool,
    limit: Option<Duration>,
) -> std::io::Result<Ready> {
    let mut interest = PollFlags::empty();
    interest.set(PollFlags::OUT, write);
    interest.set(PollFlags::IN, read);
    // Past what a timespec holds is for ever. Elsewhere than on Linux what the call takes is less than that, and whether
    // this side's own shutting ends it is not said: there it looks up now and then, and the caller waits again.
    let limit = if cfg!(target_os = "linux") {
        limit
    } else {
        Some(limit.map_or(LOOK_UP, |limit| limit.min(LOOK_UP)))
    };
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    let stream = stream.as_fd();
    let mut waiting = [
        PollFd::from_borrowed_fd(stream, interest),
        PollFd::from_borrowed_fd(peer.unwrap_or(stream), PollFlags::IN),
    ];
    let count = if peer.is_some() { 2 } else { 1 };
    let nothing = Ready { readable: false, writable: false, peer_exited: false };
    match poll(&mut waiting[..count], limit.as_ref()) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(nothing),
        Ok(_) => {}
        Err(errno) => return Err(errno.into()),
    }
    let came = waiting[0].revents();
    let over = PollFlags::ERR | PollFlags::NVAL;
    // On Windows the peer's end of the stream is one too, and this side may write on.
    let never_more = if cfg!(windows) { over } else { over | PollFlags::HUP };
    Ok(Ready {
        readable: came.intersects(PollFlags::IN | PollFlags::HUP | over),
        writable: came.intersects(PollFlags::OUT | never_more),
        peer_exited: peer.is_some() && !waiting[1].revents().is_empty(),
    })
}
