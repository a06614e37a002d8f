//! The other process of a test: this very binary, started again.

use std::io;
use std::os::fd::AsFd;
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
        let (link, socket) = Link::pair_with_socket().map_err(io::Error::other)?;
        let child = Command::new(std::env::current_exe()?)
            .env(ROLE, role)
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .spawn()?;
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

/// The role of this process and the link to the one that started it, if it is a peer.
#[must_use]
pub fn role() -> Option<(String, Link)> {
    let role = std::env::var(ROLE).ok()?;
    let socket = io::stdin().as_fd().try_clone_to_owned().ok()?;
    Some((role, Link::over(socket)))
}
