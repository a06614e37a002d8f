//! A proven connection: calls one way, answers the other.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use link::{Link, Traffic};
use rung::{Refusal, RungId, Trust, Value};
use segment::PeerTrust;

use crate::core::Core;
use crate::error::{CallError, ConnectError};
use crate::handshake::shake;
use crate::ladder::Ladder;
use crate::route::Route;
use crate::unpack::Read;
use crate::wire::Role;

/// How long a handshake may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(10);

/// A connection to a peer with whom a handshake was done; there is no other way to get one.
///
/// All methods take `&self`. Dropping it closes the connection.
#[derive(Debug)]
pub struct Channel {
    pub(crate) core: Arc<Core>,
    flusher: Option<JoinHandle<()>>,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub(crate) read: Read,
    pub(crate) sent: Route,
}

impl Reply {
    /// The value.
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.read.value
    }

    /// The value.
    #[must_use]
    pub fn into_value(self) -> Value {
        self.read.value
    }

    /// What each leaf of the argument rode.
    #[must_use]
    pub fn sent(&self) -> &Route {
        &self.sent
    }

    /// What each leaf of the answer rode; worked out by a look at the whole value.
    ///
    /// Which higher rungs declined is known to the sender alone.
    #[must_use]
    pub fn received(&self) -> Route {
        self.read.route()
    }
}

/// How a call is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct CallOptions {
    /// How long it may take, from sending to the answer; for ever if none is set.
    pub limit: Option<Duration>,
}

impl Channel {
    pub(crate) fn connect(
        link: Link,
        role: Role,
        ladder: &Ladder,
        trust: &Trust,
        limit: Duration,
        process: Option<Arc<worker::Process>>,
    ) -> Result<Self, ConnectError> {
        let core = Arc::new(shake(link, role, ladder, trust, limit, process)?);
        let flushed = Arc::clone(&core);
        let flusher = std::thread::Builder::new()
            .name("ladder-receipts".into())
            .spawn(move || flushed.flush_receipts())?;
        Ok(Self { core, flusher: Some(flusher) })
    }

    /// The channel to the host, if this process was spawned as a worker.
    ///
    /// To be asked once, at the beginning of `main`:
    ///
    /// ```no_run
    /// use ladder::{Channel, Methods};
    ///
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     if let Some(channel) = Channel::from_env()? {
    ///         channel.serve(&Methods::new().on("echo", Ok))?;
    ///         return Ok(());
    ///     }
    ///     // Otherwise this is the host …
    ///     Ok(())
    /// }
    /// ```
    ///
    /// The host is trusted with memory if it runs this very executable; see
    /// [`Self::from_env_with`].
    ///
    /// # Errors
    ///
    /// Where the handshake fails. Not having been spawned as a worker is `Ok(None)`.
    pub fn from_env() -> Result<Option<Self>, ConnectError> {
        Self::from_env_with(&Ladder::standard(), None)
    }

    /// As [`Self::from_env`], with other rungs, and with the user's word for the host.
    ///
    /// # Errors
    ///
    /// As [`Self::from_env`].
    pub fn from_env_with(
        ladder: &Ladder,
        trust: Option<PeerTrust>,
    ) -> Result<Option<Self>, ConnectError> {
        let Some(link) = worker::attach()? else {
            return Ok(None);
        };
        let known = || {
            let pid = link.peer_pid().ok()?;
            PeerTrust::same_executable(pid).ok()
        };
        let trust = trust.or_else(known).map_or(Trust::none(), Trust::carrying);
        Self::connect(link, Role::Worker, ladder, &trust, HANDSHAKE, None).map(Some)
    }

    /// Calls a method of the peer, and waits for its answer.
    ///
    /// Bulk goes by the highest rung that takes it; the value is packed before anything is sent, so
    /// nothing is half-sent.
    ///
    /// # Errors
    ///
    /// [`CallError`], with the value in it unless the peer had accepted it.
    pub fn call(&self, method: &str, value: impl Into<Value>) -> Result<Reply, CallError> {
        self.call_with(method, value, CallOptions::default())
    }

    /// As [`Self::call`], with a limit of time.
    ///
    /// # Errors
    ///
    /// As [`Self::call`]. After a deadline the channel lives on: an answer that comes too late is
    /// dropped, and its memory goes back.
    pub fn call_with(
        &self,
        method: &str,
        value: impl Into<Value>,
        options: CallOptions,
    ) -> Result<Reply, CallError> {
        let deadline = options.limit.and_then(|limit| Instant::now().checked_add(limit));
        let id = self.core.router().begin();
        let mut value = Some(value.into());
        let outcome = self.exchange(id, method, &mut value, deadline);
        self.core.router().finish(id);
        outcome.map_err(|kind| CallError::new(method, kind, value))
    }

    /// What became of every rung with this peer, from the highest.
    #[must_use]
    pub fn rungs(&self) -> Vec<(RungId, Result<(), Refusal>)> {
        self.core.sessions.report()
    }

    /// What crossed the socket so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.core.link.traffic()
    }

    /// Leases that the peer has not given back, and the bytes that are kept for them.
    #[must_use]
    pub fn lent(&self) -> (usize, u64) {
        self.core.keeper.out()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.core.is_home() {
            // A fork: the connection is not ours to close (L9).
            return;
        }
        self.core.close();
        if let Some(flusher) = self.flusher.take() {
            // It ends with the channel; its panic would have nothing to add.
            let _ = flusher.join();
        }
    }
}
