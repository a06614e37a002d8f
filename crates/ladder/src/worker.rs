//! A worker: a process and the channel to it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use rung::{Device, Trust};
use segment::PeerTrust;
use worker::{Command, Exit, Process};

use crate::channel::{Channel, Options};
use crate::error::ConnectError;
use crate::handler::Handler;
use crate::handshake::greet;
use crate::keeper::Bounds;
use crate::ladder::Ladder;
use crate::transfer::Verify;
use crate::unproven::Unproven;
use crate::wire::Role;

/// An isolated process and the channel to it; everything a [`Channel`] can do, it can.
///
/// Dropping it closes the channel, waits up to the command's grace for the process to end, kills it
/// if it does not, and reaps it.
#[derive(Debug)]
pub struct Worker {
    channel: Channel,
    process: Arc<Process>,
}

impl Worker {
    /// Starts a program, whose `main` asks [`Channel::from_env`], and does the handshake.
    ///
    /// # Errors
    ///
    /// Where the program cannot be started, ends, hangs, or speaks something else; [`ConnectError::Refused`] where
    /// host memory or plain values come out wrong between the two.
    pub fn spawn(command: Command) -> Result<Self, ConnectError> {
        WorkerBuilder::default().spawn(command)
    }

    /// Starts this very executable, and trusts it with memory, since it is the same code.
    ///
    /// # Errors
    ///
    /// As [`Self::spawn`].
    pub fn spawn_self() -> Result<Self, ConnectError> {
        Self::spawn(Command::this_executable())
    }

    pub(crate) fn of(channel: Channel, process: Arc<Process>) -> Self {
        Self { channel, process }
    }

    /// With other rungs, limits or trust.
    #[must_use]
    pub fn builder() -> WorkerBuilder {
        WorkerBuilder::default()
    }

    /// Its process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Closes the channel and waits up to `grace` for the process to end, then kills it.
    #[must_use]
    pub fn shutdown(mut self, grace: Duration) -> Exit {
        self.end(grace)
    }

    /// In this order: the worker sees the end of the link, so that it ends by itself; it has ended and
    /// is reaped; whether anybody else holds its end of the link is seen; and only then do the owners
    /// of what was lent to it go, with the channel (L3).
    fn end(&mut self, grace: Duration) -> Exit {
        self.channel.core.say_goodbye();
        let exit = self.process.end(grace);
        self.channel.core.note_exit();
        self.channel.close();
        exit
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.channel.core.is_home() {
            let exit = self.end(self.process.grace());
            tracing::debug!(pid = self.process.pid(), "{exit}");
        }
    }
}

impl Deref for Worker {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

/// What is done about memory of a peer's that it could still write, and that is not trusted not to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Untrusted {
    /// It is taken, and looking at it copies it out first: [`Tensor::as_slice`](rung::Tensor::as_slice) refuses with
    /// [`Reason::PeerNotTrusted`](rung::Reason::PeerNotTrusted), [`Tensor::to_vec`](rung::Tensor::to_vec) copies.
    /// Cheapest where most of it is forwarded, or looked at once.
    CopiedOut,
    /// It is not taken: the peer seals for good whatever it sends, in a fresh block each, and everything can be looked
    /// at in place. Nothing seals a device's memory, so its rungs are left off, and it goes through the host. Where
    /// nothing at all can be sealed (Windows, macOS), shared memory is not offered then. A carrier of your own is yours
    /// to hold to this; one that calls itself `shm` is replaced.
    Sealed,
}

impl Untrusted {
    /// The rungs and the trust for a peer of whom this is said, or nothing: then it is trusted as it is otherwise.
    pub(crate) fn terms(
        untrusted: Option<Self>,
        ladder: Ladder,
        trust: impl FnOnce() -> Trust,
    ) -> (Ladder, Trust) {
        match untrusted {
            None => (ladder, trust()),
            Some(Self::CopiedOut) => (ladder, Trust::none()),
            Some(Self::Sealed) => (ladder.sealed(), Trust::none()),
        }
    }
}

/// How a worker is started.
#[derive(Default)]
pub struct WorkerBuilder {
    ladder: Ladder,
    #[cfg(feature = "pool-ipc")]
    pools: Option<crate::Contract>,
    trust: Option<PeerTrust>,
    untrusted: Option<Untrusted>,
    options: Options,
    handler: Option<Arc<dyn Handler + Send + Sync>>,
}

impl std::fmt::Debug for WorkerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerBuilder")
            .field("ladder", &self.ladder)
            .field("trust", &self.trust)
            .field("untrusted", &self.untrusted)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl WorkerBuilder {
    /// Other rungs.
    #[must_use]
    pub fn ladder(mut self, ladder: Ladder) -> Self {
        self.ladder = ladder;
        self
    }

    /// As [`Ladder::experimental_pool_ipc`], beside whatever other rungs there are.
    #[cfg(feature = "pool-ipc")]
    #[must_use]
    pub fn experimental_pool_ipc(mut self, contract: crate::Contract) -> Self {
        self.pools = Some(contract);
        self
    }

    /// The user's word that the worker does not write what it lent; see [`PeerTrust::assume`].
    ///
    /// Without it, only a worker that runs this very executable is trusted.
    #[must_use]
    pub fn trust(mut self, trust: PeerTrust) -> Self {
        self.trust = Some(trust);
        self
    }

    /// The worker is not trusted with memory, also where it runs this very executable (a plugin that the program
    /// brings along, say): what it lends is copied out, or not taken unless it is sealed for good. The route tells
    /// which ([`Leg::access`](crate::Leg::access)). This goes before [`Self::trust`].
    #[must_use]
    pub fn untrusted(mut self, untrusted: Untrusted) -> Self {
        self.untrusted = Some(untrusted);
        self
    }

    /// How long the hellos may take, how long the proof, and how long any later one: 10 seconds each unless
    /// said otherwise.
    #[must_use]
    pub fn handshake(mut self, limit: Duration) -> Self {
        self.options.handshake = limit;
        self
    }

    /// Has a device proven at connect, though something has to be set up on it for that; otherwise it is proven
    /// before the first leaf on it, unless this process uses it already.
    #[must_use]
    pub fn prove_on(mut self, device: Device) -> Self {
        self.options.named.push(device);
        self
    }

    /// How each value is checked on its way, beside what every rung proves at connect: not at all, unless
    /// said otherwise. The worker decides for itself ([`Peer::verify`](crate::Peer::verify)).
    #[must_use]
    pub fn verify(mut self, verify: Verify) -> Self {
        self.options.verify = verify;
        self
    }

    /// How much the worker may be lent at a time.
    #[must_use]
    pub fn bounds(mut self, bounds: Bounds) -> Self {
        self.options.bounds = bounds;
        self
    }

    /// Answers calls of the worker's: nested ones on the thread that waits, others on threads of
    /// their own, 16 at most.
    #[must_use]
    pub fn handler(mut self, handler: impl Handler + Send + Sync + 'static) -> Self {
        self.handler = Some(Arc::new(handler));
        self
    }

    /// Starts a program and does the handshake.
    ///
    /// # Errors
    ///
    /// As [`Worker::spawn`].
    pub fn spawn(self, command: Command) -> Result<Worker, ConnectError> {
        self.greet(command)?.prove()
    }

    /// Starts a program and exchanges hellos; nothing is proven then, and nothing can be sent.
    ///
    /// # Errors
    ///
    /// Where the program cannot be started, ends, hangs, or speaks something else.
    pub fn greet(self, command: Command) -> Result<Unproven<Worker>, ConnectError> {
        let (process, link) = command.spawn()?;
        #[cfg(feature = "pool-ipc")]
        let ladder = match self.pools {
            Some(contract) => self.ladder.experimental_pool_ipc(contract),
            None => self.ladder,
        };
        #[cfg(not(feature = "pool-ipc"))]
        let ladder = self.ladder;
        let process = Arc::new(process);
        let known = || PeerTrust::same_executable(process.pid()).ok();
        let trust = || self.trust.or_else(known).map_or(Trust::none(), Trust::carrying);
        let (ladder, trust) = Untrusted::terms(self.untrusted, ladder, trust);
        let core = greet(link, Role::Host, &ladder, &trust, self.options, Some(process))?;
        Ok(Unproven::new(core, self.handler))
    }
}
