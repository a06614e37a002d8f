//! Peers that this process did not spawn: a socket in a directory of one's own, and a key.
//!
//! Three locks, each enough against whom it is meant for: the directory is 0700, so other users cannot
//! reach the socket; the kernel says whose process connects (`SO_PEERCRED`), should the directory's
//! mode be changed; and the first frame must be the key, which only those know who were given the
//! environment. Nothing else of a peer is read before.

use std::fs::{self, DirBuilder};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use subtle::ConstantTimeEq;

use crate::{Link, LinkError};

/// The environment variable that names the socket.
pub const ADDRESS: &str = "LADDER_ADDRESS";

/// The environment variable that holds the key; never an argument, which any user may read.
pub const KEY: &str = "LADDER_KEY";

/// How long a peer that has connected may take to send its key.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes of the first frame, at most: the key's.
const FIRST_FRAME: usize = 128;

/// Listens for one kind of peer: whoever was given [`Self::invitation`]. Its socket and directory are
/// removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    directory: PathBuf,
    key: Key,
}

/// 32 random bytes, in hex.
#[derive(Clone)]
struct Key(String);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

fn random_hex(bytes: usize) -> io::Result<String> {
    let mut random = vec![0; bytes];
    fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The first frame: a JSON string, so that the framing is the same for all.
fn first_frame(key: &str) -> String {
    format!("{{\"v\":1,\"k\":\"key\",\"key\":\"{key}\"}}")
}

impl Listener {
    /// Listens in a new directory under the user's runtime directory (`XDG_RUNTIME_DIR`), or under
    /// that for temporary files.
    ///
    /// # Errors
    ///
    /// What making a directory or a socket gives.
    pub fn bind() -> io::Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let base = runtime.filter(|path| path.is_dir()).unwrap_or_else(std::env::temp_dir);
        Self::bind_in(&base)
    }

    /// Listens in a new directory under this one.
    ///
    /// # Errors
    ///
    /// What making a directory or a socket gives.
    pub fn bind_in(base: &Path) -> io::Result<Self> {
        let directory = base.join(format!("ladder-{}", random_hex(8)?));
        DirBuilder::new().mode(0o700).create(&directory)?;
        let made = UnixListener::bind(directory.join("socket"))
            .and_then(|socket| random_hex(32).map(|key| (socket, Key(key))));
        match made {
            Ok((socket, key)) => Ok(Self { socket, directory, key }),
            Err(error) => {
                let _ = fs::remove_dir_all(&directory);
                Err(error)
            }
        }
    }

    /// What a peer's environment must hold: [`ADDRESS`] and [`KEY`].
    #[must_use]
    pub fn invitation(&self) -> [(&'static str, String); 2] {
        let path = self.directory.join("socket").to_string_lossy().into_owned();
        [(ADDRESS, path), (KEY, self.key.0.clone())]
    }

    /// Waits for a peer that has the key.
    ///
    /// Whoever comes without it, with another, with it too late, or as another user is turned away,
    /// and the waiting goes on.
    ///
    /// # Errors
    ///
    /// [`LinkError::Deadline`], [`LinkError::System`].
    pub fn accept(&self, deadline: Option<Instant>) -> Result<Link, LinkError> {
        loop {
            self.wait(deadline)?;
            let (stream, _) =
                self.socket.accept().map_err(|error| LinkError::System("accept", error))?;
            match self.admit(stream, deadline) {
                Some(link) => return Ok(link),
                // Turned away: the connection is closed, without a word.
                None => continue,
            }
        }
    }

    fn wait(&self, deadline: Option<Instant>) -> Result<(), LinkError> {
        loop {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            let mut waiting = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
            match poll(&mut waiting, timeout.as_ref()) {
                Ok(0) => return Err(LinkError::Deadline),
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(LinkError::System("poll", errno.into())),
            }
        }
    }

    fn admit(&self, stream: UnixStream, deadline: Option<Instant>) -> Option<Link> {
        if user_of(&stream)? != rustix::process::geteuid().as_raw() {
            return None;
        }
        let link = Link::over(OwnedFd::from(stream));
        link.limit_next_frame(FIRST_FRAME);
        let patience = Instant::now() + PATIENCE;
        let frame = link.receive(Some(deadline.map_or(patience, |end| end.min(patience)))).ok()?;
        let expected = first_frame(&self.key.0);
        let known = frame.json.as_bytes().ct_eq(expected.as_bytes());
        if !bool::from(known) || !frame.handles.is_empty() {
            return None;
        }
        Some(link)
    }
}

/// Whose process the other end is, as the kernel knows it.
#[cfg(target_os = "linux")]
fn user_of(stream: &UnixStream) -> Option<u32> {
    use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
    // nix gives the numbers as they are; of another pid namespace the process is 0.
    getsockopt(stream, PeerCredentials).ok().map(|peer| peer.uid())
}

#[cfg(not(target_os = "linux"))]
fn user_of(stream: &UnixStream) -> Option<u32> {
    nix::unistd::getpeereid(stream).ok().map(|(user, _)| user.as_raw())
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Whoever removed it before has done our work.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Connects to a listener and shows the key.
///
/// # Errors
///
/// Where nobody listens, or the link ends.
pub fn connect(address: &Path, key: &str, deadline: Option<Instant>) -> Result<Link, LinkError> {
    let stream =
        UnixStream::connect(address).map_err(|error| LinkError::System("connect", error))?;
    let link = Link::over(OwnedFd::from(stream));
    link.send(&first_frame(key), &[], deadline)?;
    Ok(link)
}
