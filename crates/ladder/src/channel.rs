//! A proven connection: calls one way, answers the other.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use canary::Report;
use link::Traffic;
use rung::{BridgeError, Device, Refusal, RungId, Trust, Value, limits};
use segment::PeerTrust;
use serde::de::DeserializeOwned;

use crate::call::Call;
use crate::core::Core;
use crate::error::{CallError, CallErrorKind, ConnectError};
use crate::handler::Handler;
use crate::handshake::greet;
use crate::keeper::{Bounds, HeldLease};
use crate::ladder::{Ladder, Via};
use crate::own;
use crate::route::{Require, Route};
use crate::stats::Stats;
use crate::transfer::Verify;
use crate::unpack::Read;
use crate::unproven::Unproven;
use crate::wire::Role;

/// How a channel is set up.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// How long the handshake may take.
    pub(crate) handshake: Duration,
    pub(crate) bounds: Bounds,
    /// Devices to be proven at connect.
    pub(crate) named: Vec<Device>,
    pub(crate) verify: Verify,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            bounds: Bounds::default(),
            named: Vec::new(),
            verify: Verify::default(),
        }
    }
}

/// A connection to a peer with whom every rung was proven; there is no other way to get one.
///
/// What a [`Peer`] can do, it can. All methods take `&self`. Dropping it closes the connection.
#[derive(Debug)]
pub struct Channel {
    pub(crate) peer: Peer,
    threads: Vec<JoinHandle<()>>,
}

/// The other side of a channel, to be called: from any thread, and from handlers while they run.
///
/// A call that a handler makes to the side that called it is *nested*: over there it runs on the very
/// thread that waits for the handler, so two sides may call each other to any depth. Several threads
/// may call at the same time.
#[derive(Debug, Clone)]
pub struct Peer {
    pub(crate) core: Arc<Core>,
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

    /// The value as any type that `serde` can make of it; memory in it is shared with the value's.
    ///
    /// # Errors
    ///
    /// Where the type and the value do not fit each other, with the path.
    pub fn to<T: DeserializeOwned>(&self) -> Result<T, BridgeError> {
        rung::from_value(self.value().clone())
    }

    /// What each leaf of the argument rode.
    #[must_use]
    pub fn sent(&self) -> &Route {
        &self.sent
    }

    /// What each leaf of the answer rode; worked out by a look at the whole value.
    ///
    /// Which higher rungs declined is known to the sender alone; what this side could not take is here.
    #[must_use]
    pub fn received(&self) -> Route {
        self.read.route()
    }
}

/// How a call is made.
///
/// ```
/// use std::time::Duration;
///
/// use ladder::{CallOptions, RungId};
///
/// let options = CallOptions::new()
///     .limit(Duration::from_secs(5))
///     .require_at_least(RungId::SHM)
///     .require_max_copies(0);
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CallOptions {
    /// How long it may take, from sending to the answer; for ever if none is set.
    pub limit: Option<Duration>,
    /// What is required of the argument's leaves.
    pub(crate) require: Require,
}

impl CallOptions {
    /// No limit, and nothing required.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How long the call may take, from packing its value to the answer, with whatever has to be proven first.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Every leaf of the argument must ride this rung or a higher one, or nothing is sent:
    /// [`CallErrorKind::BelowRequired`]. What stays in the JSON is small, and is not asked.
    #[must_use]
    pub fn require_at_least(mut self, rung: RungId) -> Self {
        self.require.at_least = Some(rung);
        self
    }

    /// No leaf of the argument may be copied more often than this for it, or nothing is sent:
    /// [`CallErrorKind::BelowRequired`].
    #[must_use]
    pub fn require_max_copies(mut self, copies: u8) -> Self {
        self.require.max_copies = Some(copies);
        self
    }
}

impl Channel {
    /// Not proven yet, and without the threads that serve it.
    pub(crate) fn over(core: &Arc<Core>, handler: Option<Arc<dyn Handler + Send + Sync>>) -> Self {
        if let Some(handler) = handler {
            // The first one, since the connection is new.
            let _ = core.handler.set(handler);
        }
        Self { peer: Peer::of(core), threads: Vec::new() }
    }

    pub(crate) fn start(&mut self, name: &str, run: fn(&Arc<Core>)) -> std::io::Result<()> {
        let core = Arc::clone(&self.peer.core);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(&core))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Closes the connection and ends the threads that serve it; done once.
    pub(crate) fn close(&mut self) {
        if !self.peer.core.is_home() {
            // A fork: the connection is not ours to close (L9).
            return;
        }
        self.peer.core.close();
        for thread in self.threads.drain(..) {
            // They end with the channel; a panic of theirs would have nothing to add.
            let _ = thread.join();
        }
    }

    /// The channel to the host, if this process was spawned as a worker, or [invited](crate::Listener)
    /// as one.
    ///
    /// To be asked once, at the beginning of `main`:
    ///
    /// ```no_run
    /// use ladder::{Channel, Methods};
    ///
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     if let Some(channel) = Channel::from_env()? {
    ///         channel.serve(Methods::new().on("echo", Ok))?;
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
        Self::greet_from_env(ladder, trust)?.map(Unproven::<Self>::prove).transpose()
    }

    /// As [`Self::from_env_with`], before anything is proven.
    ///
    /// # Errors
    ///
    /// Where the peer ends, hangs, or speaks something else.
    pub fn greet_from_env(
        ladder: &Ladder,
        trust: Option<PeerTrust>,
    ) -> Result<Option<Unproven>, ConnectError> {
        let options = Options::default();
        let unproven = |link, trust: Option<PeerTrust>| {
            let trust = trust.map_or(Trust::none(), Trust::carrying);
            let core = greet(link, Role::Worker, ladder, &trust, options.clone(), None)?;
            Ok(Some(Unproven::new(core, None)))
        };
        #[cfg(unix)]
        if let Some(link) = crate::outside::invited(options.handshake)? {
            // Whoever listens said nothing of what it runs.
            return unproven(link, trust);
        }
        let Some(link) = worker::attach()? else {
            return Ok(None);
        };
        let known = || PeerTrust::same_executable(worker::host_pid()?).ok();
        unproven(link, trust.or_else(known))
    }
}

impl Peer {
    pub(crate) fn of(core: &Arc<Core>) -> Self {
        Self { core: Arc::clone(core) }
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
        let value = value.into();
        if method.len() > limits::METHOD_NAME {
            let text = format!("a method's name of {} bytes", method.len());
            return Err(CallError::new("", CallErrorKind::OverCap(text), Some(value)));
        }
        if own::is_own(method) {
            return Err(CallError::new(method, CallErrorKind::ReservedMethod, Some(value)));
        }
        let mut value = Some(value);
        let call = Call { method, deadline, require: &options.require, via: Via::Proven };
        self.place(&mut value, call).map_err(|kind| CallError::new(method, kind, value))
    }

    /// What is proven of every rung with this peer, by device and direction, and in what the two processes
    /// differ.
    #[must_use]
    pub fn report(&self) -> Report {
        self.core.report()
    }

    /// Proves every rung anew, both ways: one that was demoted is used again if it is right now. Nothing else
    /// ever brings it back.
    ///
    /// The peer has to answer: a host that neither calls nor serves does not. Where its plain values turn out
    /// wrong there is nothing to fall back to, and the channel ends.
    ///
    /// # Errors
    ///
    /// [`CallError`] where the channel ends, the peer does not answer within the handshake's limit, or one side
    /// has no time (`busy`: the other is proving something itself) or no memory for it; then what was
    /// found so far holds. What a canary shows is no error, but in the report.
    pub fn reprove(&self) -> Result<Report, CallError> {
        self.core.reprove().map_err(|kind| CallError::new(own::REPROVE, kind, None))
    }

    /// How each value that is sent from now on is checked on its way.
    pub fn verify(&self, verify: Verify) {
        self.core.sampling.every.store(verify.every(), Ordering::Relaxed);
    }

    /// What became of every rung with this peer in the direction of sending, from the highest.
    #[must_use]
    pub fn rungs(&self) -> Vec<(RungId, Result<(), Refusal>)> {
        self.core.sessions.report()
    }

    /// What crossed the socket so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.core.link.traffic()
    }

    /// What was moved so far, by rung.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core.counters.get()
    }

    /// Has a warning logged for every leaf of at least so many bytes that rides a rung below what its device
    /// allows: a megabyte, to begin with.
    pub fn warn_over(&self, bytes: u64) {
        self.core.warn_over.store(bytes, Ordering::Relaxed);
    }

    /// Leases that were [warned of](Bounds::alarm) so far, because the peer kept them for long.
    #[must_use]
    pub fn alarms(&self) -> u64 {
        self.core.keeper.alarms()
    }

    /// What the peer has kept for at least so long, the oldest first.
    #[must_use]
    pub fn held_for(&self, at_least: Duration) -> Vec<HeldLease> {
        self.core.keeper.held(at_least)
    }

    /// Has whoever waits for this peer look at the socket for so long before it sleeps: for calls that
    /// are answered in microseconds. Nothing, to begin with.
    ///
    /// It saves the time that waking a thread takes (some 10 µs), and costs a whole core while anybody
    /// waits, up to this long each time; on a machine without a core to spare it makes everything slower.
    /// Each side decides for itself: a worker that serves looks for its next call as long.
    pub fn spin_for(&self, time: Duration) {
        self.core.link.spin_for(time);
    }

    /// Leases of users' values that the peer has not given back, and the bytes that are kept for them. Canaries
    /// are counted apart ([`Bounds`]).
    #[must_use]
    pub fn lent(&self) -> (usize, u64) {
        self.core.keeper.out()
    }
}

impl Deref for Channel {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.close();
    }
}
