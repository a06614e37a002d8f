//! Unix: a socket as the standard input, and a descriptor for the end of a process.

use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use link::{Link, Socket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::VARIABLE;

/// Reads of 16 KiB that empty the largest pipe an ordinary user may have (pipe(7): 1 MiB).
const PIPE_READS: usize = 64;

/// A descriptor that can be read from once a process has ended.
#[derive(Debug)]
pub(crate) struct Exit(OwnedFd);

impl Exit {
    /// Of a child that is not reaped, so its number is still its own.
    pub(crate) fn of(child: &Child) -> io::Result<Self> {
        Self::of_number(child.id())
    }

    #[cfg(target_os = "linux")]
    fn of_number(pid: u32) -> io::Result<Self> {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// A queue in which one event waits, once it happens, and is never taken (kqueue(2)).
    #[cfg(not(target_os = "linux"))]
    fn of_number(pid: u32) -> io::Result<Self> {
        use nix::sys::event::{EvFlags, EventFilter, FilterFlag, KEvent, Kqueue};
        let queue = Kqueue::new()?;
        let exit = KEvent::new(
            pid as usize,
            EventFilter::EVFILT_PROC,
            EvFlags::EV_ADD,
            FilterFlag::NOTE_EXIT,
            0,
            0,
        );
        match queue.kevent(&[exit], &mut [], None) {
            Ok(_) => {}
            // It has ended already: the end of a pipe that nobody writes to can be read, too.
            Err(nix::errno::Errno::ESRCH) => return Ok(Self(io::pipe()?.0.into())),
            Err(errno) => return Err(errno.into()),
        }
        let queue = OwnedFd::from(queue);
        rustix::io::fcntl_setfd(&queue, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Self(queue))
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// For a link to watch.
    pub(crate) fn socket(&self) -> io::Result<Socket> {
        self.0.try_clone()
    }

    /// Waits up to a limit for it.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let end = Instant::now().checked_add(limit);
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout.as_ref()) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

impl AsFd for Exit {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// One end of a new link as the standard input; nothing more once the process runs.
#[derive(Debug)]
pub(crate) struct Handover(Link);

impl Handover {
    pub(crate) fn prepare(command: &mut Command) -> io::Result<Self> {
        let (link, socket) = Link::pair_with_socket().map_err(io::Error::other)?;
        let inode = File::from(socket.try_clone()?).metadata()?.ino();
        command.env(VARIABLE, format!("{inode}:{}", std::process::id())).stdin(Stdio::from(socket));
        Ok(Self(link))
    }

    pub(crate) fn complete(self, _child: &mut Child) -> io::Result<Link> {
        Ok(self.0)
    }
}

/// The process alone: what it starts is its own.
#[derive(Debug)]
pub(crate) struct Group;

impl Group {
    pub(crate) fn of(_child: &Child) -> io::Result<Self> {
        Ok(Self)
    }

    pub(crate) fn end(&self) {}

    /// Waits for who reads the output: it ends with the process.
    pub(crate) fn join(drainer: JoinHandle<()>) {
        // Its panic would have nothing to add.
        let _ = drainer.join();
    }
}

/// The program that this process runs, and the name to give it.
pub(crate) fn this_executable() -> (std::ffi::OsString, Option<std::ffi::OsString>) {
    #[cfg(target_os = "linux")]
    let program = "/proc/self/exe".into();
    #[cfg(not(target_os = "linux"))]
    let program = std::env::current_exe().unwrap_or_default().into();
    (program, std::env::args_os().next())
}

pub(crate) fn name(command: &mut Command, name: &std::ffi::OsStr) {
    std::os::unix::process::CommandExt::arg0(command, name);
}

/// What a process that somebody else reaped counts for.
pub(crate) fn no_status() -> ExitStatus {
    ExitStatus::from_raw(0)
}

/// The signal that ended a process.
pub(crate) fn signal(status: ExitStatus) -> Option<i32> {
    status.signal()
}

/// Reads a pipe until its process is gone and nothing is left in it.
///
/// A grandchild may hold the pipe open for ever; the process, not the end of the stream, decides.
pub(crate) fn drain(mut pipe: PipeReader, process: &Exit, mut take: impl FnMut(&[u8])) {
    if rustix::io::ioctl_fionbio(&pipe, true).is_err() {
        return;
    }
    let mut buffer = [0; 16 << 10];
    // Once the process is gone: what a pipe can hold, and no more. Its children may go on writing.
    let mut left = PIPE_READS;
    loop {
        let mut waiting = [
            PollFd::new(&pipe, PollFlags::IN),
            PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN),
        ];
        if matches!(poll(&mut waiting, None), Err(errno) if errno != rustix::io::Errno::INTR) {
            break;
        }
        let exited = !waiting[1].revents().is_empty();
        match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => take(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !exited => {}
            Err(_) => break,
        }
        if exited {
            left -= 1;
            if left == 0 {
                break;
            }
        }
    }
}

/// The link, and what its end is seen by.
pub(crate) fn attach() -> io::Result<Option<(Link, Socket)>> {
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
    Ok(Some((Link::over(socket), watched)))
}

/// What the host said of itself and the socket.
fn announced() -> Option<(u64, u32)> {
    let value = std::env::var(VARIABLE).ok()?;
    let (inode, pid) = value.split_once(':')?;
    Some((inode.parse().ok()?, pid.parse().ok()?))
}

/// The number of the host, if that is this process's parent.
pub(crate) fn host_pid() -> Option<u32> {
    let (_, host) = announced()?;
    let parent = rustix::process::getppid()?;
    (u32::try_from(parent.as_raw_nonzero().get()) == Ok(host)).then_some(host)
}

/// The end of the host.
pub(crate) fn host() -> Option<Exit> {
    let exit = Exit::of_number(host_pid()?).ok()?;
    // Still our parent, so it was when the descriptor was made.
    host_pid().is_some().then_some(exit)
}

/// Waits for the end of the host, or, where that cannot be seen, of the link; and ends the link.
pub(crate) fn watch(socket: &Socket, host: Option<&Exit>) {
    #[cfg(target_os = "linux")]
    let end = PollFlags::RDHUP;
    #[cfg(not(target_os = "linux"))]
    let end = PollFlags::HUP;
    let mut signs = match host {
        Some(exit) => PollFd::new(exit, PollFlags::IN),
        // Not our parent's socket: its end is all that can be seen.
        None => PollFd::new(socket, end),
    };
    while let Err(rustix::io::Errno::INTR) = poll(std::slice::from_mut(&mut signs), None) {}
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}
