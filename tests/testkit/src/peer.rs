//! The other process of a test: this very binary, started again.

use std::io;
use std::process::{Child, Command, Stdio};

pub use link::Link;

/// Names the role of a started peer.
const ROLE: &str = "TESTKIT_PEER";

/// A started peer and the link to it; killed and reaped when dropped.
#[derive(Debug)]
pub struct Peer {
    /// To the peer's standard input.
    pub link: Link,
    child: Child,
}

impl Peer {
    /// Starts this binary again in a role.
    ///
    /// # Errors
    ///
    /// What starting a process gives.
    pub fn start(role: &str) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(ROLE, role).stdout(Stdio::null());
        let (link, child) = spawn(command)?;
        Ok(Self { link, child })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it now, and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts a process with the other end of a link as its standard input.
#[cfg(unix)]
fn spawn(mut command: Command) -> io::Result<(Link, Child)> {
    let (link, socket) = Link::pair_with_socket().map_err(io::Error::other)?;
    let child = command.stdin(Stdio::from(socket)).spawn()?;
    Ok((link, child))
}

/// Starts a process and tells it of the other end of a link by its standard input.
#[cfg(windows)]
fn spawn(mut command: Command) -> io::Result<(Link, Child)> {
    use std::io::Write;
    let (link, socket) = Link::pair_with_socket().map_err(io::Error::other)?;
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    let told = winproc::share_socket(&socket, child.id())?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(&told)?;
    }
    Ok((link.moving_handles(winproc::Process::of(&child)?), child))
}

/// The role of this process and the link to the one that started it, if it is a peer.
#[must_use]
pub fn role() -> Option<(String, Link)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role, attach()?))
}

#[cfg(unix)]
fn attach() -> Option<Link> {
    use std::os::fd::AsFd;
    Some(Link::over(io::stdin().as_fd().try_clone_to_owned().ok()?))
}

#[cfg(windows)]
fn attach() -> Option<Link> {
    use std::io::Read;
    let mut told = [0; winproc::SHARED];
    io::stdin().read_exact(&mut told).ok()?;
    let (socket, received) = winproc::take_socket(&told).ok()?;
    Some(Link::over(socket.into()).receiving_handles(received))
}

/// The process id of the one that started this one.
#[must_use]
pub fn parent() -> u32 {
    #[cfg(unix)]
    return std::os::unix::process::parent_id();
    #[cfg(windows)]
    return winproc::parent().map_or(0, |(pid, _)| pid);
}

/// Kills a process from outside, if it runs, as a system that has run out of memory does.
///
/// # Errors
///
/// What starting another process for it gives.
pub fn kill(pid: u32) -> io::Result<()> {
    let pid = pid.to_string();
    let (program, arguments) = if cfg!(windows) {
        ("taskkill", ["/F", "/PID", pid.as_str()].to_vec())
    } else {
        ("kill", ["-9", pid.as_str()].to_vec())
    };
    // It fails for one that has ended, and that is as good.
    Command::new(program).args(arguments).stdout(Stdio::null()).status().map(drop)
}

/// Whether a process runs; a zombie does not.
#[must_use]
pub fn runs(pid: u32) -> bool {
    #[cfg(target_os = "linux")]
    return std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.contains(") Z "));
    #[cfg(windows)]
    return winproc::Process::open(pid)
        .is_ok_and(|process| !process.wait(Some(std::time::Duration::ZERO)).unwrap_or(false));
    #[cfg(not(any(target_os = "linux", windows)))]
    return Command::new("kill").args(["-0", &pid.to_string()]).status().is_ok_and(|s| s.success());
}
