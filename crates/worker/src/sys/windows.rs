//! Windows: a socket that is duplicated into the process, a handle for its end, and a job object that nobody outlives.

use std::ffi::{OsStr, OsString};
use std::io::{self, PipeReader, Read, Write};
use std::os::windows::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use link::{Link, Socket};
use winproc::{Job, Process, SHARED};

use crate::VARIABLE;

/// The end of a process, by its handle.
#[derive(Debug)]
pub(crate) struct Exit(Process);

impl Exit {
    pub(crate) fn of(child: &Child) -> io::Result<Self> {
        Process::of(child).map(Self)
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// For a link to watch: sockets are waited for together, a process only by a thread. It holds one end of a
    /// connection for as long as the process runs.
    pub(crate) fn socket(&self) -> io::Result<Socket> {
        let process = self.0.try_clone()?;
        let [here, held] = winproc::pair()?;
        std::thread::Builder::new().name("worker-exit".into()).spawn(move || {
            match process.wait(None) {
                Ok(_) => drop(held),
                // The end of the link is all that will be seen, and this is no end: it is kept for good.
                Err(_) => std::mem::forget(held),
            }
        })?;
        Ok(here.into())
    }

    /// Waits up to a limit for it.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        self.0.wait(Some(limit)).unwrap_or(false)
    }
}

/// One end of a new link, made known to the process once it runs.
#[derive(Debug)]
pub(crate) struct Handover {
    link: Link,
    socket: Socket,
    nonce: [u8; 16],
}

impl Handover {
    pub(crate) fn prepare(command: &mut Command) -> io::Result<Self> {
        let (link, socket) = Link::pair_with_socket().map_err(io::Error::other)?;
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).map_err(io::Error::other)?;
        let hex: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
        command
            .env(VARIABLE, format!("{hex}:{}", std::process::id()))
            .stdin(Stdio::piped())
            // Until it is in its group: whatever it starts is in it, too.
            .creation_flags(CREATE_SUSPENDED);
        Ok(Self { link, socket, nonce })
    }

    /// The socket is made known to this process alone; then its standard input ends.
    pub(crate) fn complete(self, child: &mut Child) -> io::Result<Link> {
        let link = self.link.moving_handles(Process::of(child)?);
        let told = match winproc::share_socket(&self.socket, child.id()) {
            Ok(told) => told,
            // A program that has ended is nobody to share with; its exit tells.
            Err(_) if child.try_wait()?.is_some() => return Ok(link),
            Err(error) => return Err(error),
        };
        if let Some(mut input) = child.stdin.take() {
            // Nor is it anybody to read.
            let _ = input.write_all(&[&self.nonce[..], &told[..]].concat());
        }
        Ok(link)
    }
}

/// The process and whatever it starts: none of them outlives this, or this process.
#[derive(Debug)]
pub(crate) struct Group(Option<Job>);

/// `CREATE_SUSPENDED`.
const CREATE_SUSPENDED: u32 = 4;

/// How long what is left in a pipe may take to be read, once everybody in a group has ended.
const DRAINED: Duration = Duration::from_secs(1);

impl Group {
    /// Puts it there, and lets it run.
    pub(crate) fn of(child: &Child) -> io::Result<Self> {
        let job = Job::new().and_then(|job| job.add(child).map(|()| job));
        let job = match job {
            Ok(job) => Some(job),
            // This process is in a job that allows no other in it. The worker watches its host all the same.
            Err(error) => {
                tracing::warn!(pid = child.id(), %error, "a worker is in no job: what it starts may outlive it");
                None
            }
        };
        winproc::resume(child.id())?;
        Ok(Self(job))
    }

    pub(crate) fn end(&self) {
        if let Some(job) = &self.0 {
            job.end();
        }
    }

    /// Waits for who reads the output: until nobody can write to it any more, or for a moment. Whoever got away
    /// from the group may hold it for ever.
    pub(crate) fn join(drainer: JoinHandle<()>) {
        let end = Instant::now() + DRAINED;
        while !drainer.is_finished() {
            if Instant::now() >= end {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        // Its panic would have nothing to add.
        let _ = drainer.join();
    }
}

/// The program that this process runs. Its file can be renamed while it runs, but neither replaced nor removed.
pub(crate) fn this_executable() -> (OsString, Option<OsString>) {
    (std::env::current_exe().unwrap_or_default().into(), None)
}

pub(crate) fn name(_command: &mut Command, _name: &OsStr) {}

/// What a process that cannot be asked counts for.
pub(crate) fn no_status() -> ExitStatus {
    ExitStatus::from_raw(0)
}

/// There are no signals here.
pub(crate) fn signal(_status: ExitStatus) -> Option<i32> {
    None
}

/// Reads a pipe until nobody can write to it any more: whatever the process started ends with it, by its [`Group`].
pub(crate) fn drain(mut pipe: PipeReader, _process: &Exit, mut take: impl FnMut(&[u8])) {
    let mut buffer = [0; 16 << 10];
    loop {
        match pipe.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => take(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// The link, and what its end is seen by.
pub(crate) fn attach() -> io::Result<Option<(Link, Socket)>> {
    static ATTACHED: AtomicBool = AtomicBool::new(false);
    let Some((nonce, host)) = announced() else { return Ok(None) };
    // A child of a worker has the variable too, and a standard input that may never end. Who cannot see its parent
    // (that one is another user's, say) is told by what is on its standard input alone.
    let is_childs = winproc::parent().is_some_and(|(parent, _)| parent != host);
    if is_childs || ATTACHED.swap(true, Ordering::Relaxed) {
        return Ok(None);
    }
    let (mut mine, mut told) = ([0; 16], [0; SHARED]);
    let mut input = io::stdin().lock();
    input.read_exact(&mut mine)?;
    if mine != nonce {
        return Err(io::Error::other("the standard input does not say what the host said"));
    }
    input.read_exact(&mut told)?;
    let (socket, received) = winproc::take_socket(&told)?;
    let watched = socket.try_clone()?;
    Ok(Some((Link::over(socket.into()).receiving_handles(received), watched.into())))
}

/// What the host said: how its message begins, and its number.
fn announced() -> Option<([u8; 16], u32)> {
    let value = std::env::var(VARIABLE).ok()?;
    let (hex, pid) = value.split_once(':')?;
    let nonce = u128::from_str_radix(hex, 16).ok()?.to_be_bytes();
    Some((nonce, pid.parse().ok()?))
}

/// The number of the host, if that is this process's parent.
pub(crate) fn host_pid() -> Option<u32> {
    let (_, host) = announced()?;
    let (parent, _) = winproc::parent()?;
    (parent == host).then_some(host)
}

/// The end of the host.
pub(crate) fn host() -> Option<Exit> {
    let (_, host) = announced()?;
    let (parent, process) = winproc::parent()?;
    (parent == host).then_some(Exit(process))
}

/// How often the end of a link is looked for, where nothing else can be seen.
const LOOK: Duration = Duration::from_millis(100);

/// Waits for the end of the host, or, where that cannot be seen, of the link; and ends the link.
pub(crate) fn watch(socket: &Socket, host: Option<&Exit>) {
    let Ok(socket) = socket.try_clone().map(std::net::TcpStream::from) else { return };
    if !host.is_some_and(|host| host.0.wait(None).is_ok()) {
        // It does not wait, since the link's other calls never do.
        while match socket.peek(&mut [0]) {
            Ok(count) => count > 0,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        } {
            std::thread::sleep(LOOK);
        }
    }
    let _ = socket.shutdown(std::net::Shutdown::Both);
}
