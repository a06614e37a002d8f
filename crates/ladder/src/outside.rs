//! Workers that this process did not spawn.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use link::{Link, LinkError, Listener as Socket};
use rung::Trust;
use segment::PeerTrust;

use crate::channel::{Channel, Options};
use crate::error::ConnectError;
use crate::handshake::greet;
use crate::ladder::Ladder;
use crate::unproven::Unproven;
use crate::wire::Role;
use crate::worker::Untrusted;

/// Listens for a worker that somebody else starts, with [`Self::invitation`] in its environment; there
/// [`Channel::from_env`] finds it.
///
/// Only processes of the same user that have the key are let in. What they lend is copied out unless
/// it is sealed, or you vouch for them.
///
/// ```no_run
/// use ladder::Listener;
/// use std::time::Duration;
///
/// let listener = Listener::bind()?;
/// // Started by a supervisor, a container, a debugger …
/// std::process::Command::new("my-worker").envs(listener.invitation()).spawn()?;
/// let channel = listener.accept(Duration::from_secs(10))?;
/// channel.call("hello", "you")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    trust: Trust,
    untrusted: Option<Untrusted>,
    options: Options,
    ladder: Ladder,
}

impl Listener {
    /// Listens on a socket in a new directory of the user's own.
    ///
    /// # Errors
    ///
    /// What making it gives.
    pub fn bind() -> std::io::Result<Self> {
        Ok(Self {
            socket: Socket::bind()?,
            trust: Trust::none(),
            untrusted: None,
            options: Options::default(),
            ladder: Ladder::standard(),
        })
    }

    /// The user's word that whoever has the key does not write what it lent; see
    /// [`PeerTrust::assume`].
    #[must_use]
    pub fn trust(mut self, trust: PeerTrust) -> Self {
        self.trust = Trust::carrying(trust);
        self
    }

    /// What is done about memory that the worker could still write: copied out, unless said otherwise. This goes before
    /// [`Self::trust`].
    #[must_use]
    pub fn untrusted(mut self, untrusted: Untrusted) -> Self {
        self.untrusted = Some(untrusted);
        self
    }

    /// What the worker's environment must hold: the address and the key. Never pass these as
    /// arguments, which any user of the machine may read.
    #[must_use]
    pub fn invitation(&self) -> [(&'static str, String); 2] {
        self.socket.invitation()
    }

    /// Waits for a worker with the key, and does the handshake.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Deadline`] where none came in time; those of the handshake.
    pub fn accept(&self, limit: Duration) -> Result<Channel, ConnectError> {
        self.greet(limit)?.prove()
    }

    /// Waits for a worker with the key, and exchanges hellos; nothing is proven then.
    ///
    /// # Errors
    ///
    /// As [`Self::accept`].
    pub fn greet(&self, limit: Duration) -> Result<Unproven, ConnectError> {
        let deadline = Instant::now().checked_add(limit);
        let link = self.socket.accept(deadline).map_err(|error| match error {
            LinkError::Deadline => ConnectError::Deadline(limit),
            other => ConnectError::Ended(other.into(), None),
        })?;
        let options = self.options.clone();
        let (ladder, trust) =
            Untrusted::terms(self.untrusted, self.ladder.clone(), || self.trust.clone());
        let core = greet(link, Role::Host, &ladder, &trust, options, None)?;
        Ok(Unproven::new(core, None))
    }
}

/// A link to the listener that this process was invited by, if it was; the first time it is asked.
pub(crate) fn invited(limit: Duration) -> Result<Option<Link>, ConnectError> {
    static ASKED: AtomicBool = AtomicBool::new(false);
    let variable = |name| std::env::var(name).ok();
    let invitation = variable(link::outside::ADDRESS).zip(variable(link::outside::KEY));
    let Some((address, key)) = invitation else { return Ok(None) };
    if ASKED.swap(true, Ordering::Relaxed) {
        return Ok(None);
    }
    let deadline = Instant::now().checked_add(limit);
    link::outside::connect(Path::new(&address), &key, deadline)
        .map(Some)
        .map_err(|error| ConnectError::Ended(error.into(), None))
}
