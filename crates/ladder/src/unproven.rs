//! A connection before its proof: there is no way to send anything of a user's on it.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use canary::{Difference, Facts};

use crate::channel::Channel;
use crate::core::Core;
use crate::error::{ConnectError, Ended};
use crate::handler::Handler;
use crate::worker::Worker;

/// Two processes that said hello, and have proven nothing yet: what a [`Channel`] or a [`Worker`] is made of.
///
/// The other side waits for the proof as long as its own handshake may take, so this is not to be kept for long.
///
/// It has no way to send a value. Only [`prove`](Self::prove) makes what can, by sending canaries on every
/// rung, both ways; nothing skips that.
///
/// ```no_run
/// # use ladder::{Command, Worker};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let unproven = Worker::builder().greet(Command::this_executable())?;
/// for difference in unproven.differences() {
///     println!("{difference}");
/// }
/// let worker = unproven.prove()?;
/// worker.call("echo", 1)?;
/// # Ok(()) }
/// ```
///
/// The same without the proof is no program:
///
/// ```compile_fail,E0599
/// # use ladder::{Command, Worker};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let unproven = Worker::builder().greet(Command::this_executable())?;
/// for difference in unproven.differences() {
///     println!("{difference}");
/// }
/// let worker = unproven;
/// worker.call("echo", 1)?;
/// # Ok(()) }
/// ```
pub struct Unproven<T = Channel> {
    /// Until it is proven.
    core: Option<Arc<Core>>,
    handler: Option<Arc<dyn Handler + Send + Sync>>,
    facts: [Facts; 2],
    becomes: PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for Unproven<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unproven").field("core", &self.core).finish_non_exhaustive()
    }
}

impl<T> Drop for Unproven<T> {
    /// The peer sees that nothing comes of it, before its process is asked to end.
    fn drop(&mut self) {
        if let Some(core) = self.core.take().filter(|core| core.is_home()) {
            core.close();
        }
    }
}

impl<T> Unproven<T> {
    pub(crate) fn new(core: Arc<Core>, handler: Option<Arc<dyn Handler + Send + Sync>>) -> Self {
        let facts = core.facts.clone();
        Self { core: Some(core), handler, facts, becomes: PhantomData }
    }

    /// In which facts the two processes differ: no reason to expect anything to fail, but the first thing to
    /// look at where something does.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        let [mine, theirs] = &self.facts;
        mine.differences(theirs)
    }

    /// What this process and the peer say of themselves.
    #[must_use]
    pub fn facts(&self) -> [&Facts; 2] {
        self.facts.each_ref()
    }

    /// What it is made of, to be taken once.
    fn take(&mut self) -> Result<Arc<Core>, ConnectError> {
        let core = self.core.take().filter(|core| core.is_home());
        core.ok_or(ConnectError::Ended(Ended::Forked, None))
    }

    fn rehearse(self) -> Result<Channel, ConnectError> {
        self.become_a_channel(|core| core.rehearse(Instant::now().checked_add(core.patience)))
    }

    /// A channel, once what is to be done with the connection before that is done.
    pub(crate) fn become_a_channel(
        mut self,
        prove: impl FnOnce(&Arc<Core>) -> Result<(), ConnectError>,
    ) -> Result<Channel, ConnectError> {
        let core = self.take()?;
        let mut channel = Channel::over(&core, self.handler.take());
        // What is refused or given back meanwhile has to be said too. Where the proof fails, the channel is
        // dropped, and the peer sees that nothing more comes, also where it still waits.
        channel.start("ladder-receipts", |core| core.flush_receipts())?;
        prove(&core)?;
        channel.start("ladder-parked", Core::park)?;
        Ok(channel)
    }
}

impl Unproven<Channel> {
    /// Proves every rung, both ways: random contents there and back, with a digest of what the other side
    /// decoded and the rung of each leaf.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Refused`] with the whole report where host memory, or what writes plain values, fails;
    /// a device that fails is demoted and warned of instead. Where the peer ends, hangs, or speaks something
    /// else.
    pub fn prove(self) -> Result<Channel, ConnectError> {
        self.rehearse()
    }
}

/// A proven connection that nobody serves: for tests that go on frame by frame.
#[cfg(all(feature = "failpoints", debug_assertions))]
#[derive(Debug)]
pub struct ByHand(Arc<Core>);

#[cfg(all(feature = "failpoints", debug_assertions))]
impl ByHand {
    /// The link.
    #[must_use]
    pub fn link(&self) -> &link::Link {
        &self.0.link
    }

    /// The worker, if this side spawned one.
    #[must_use]
    pub fn process(&self) -> Option<&worker::Process> {
        self.0.process.as_deref()
    }
}

#[cfg(all(feature = "failpoints", debug_assertions))]
impl<T> Unproven<T> {
    /// Proves, and leaves the rest to the caller.
    ///
    /// # Errors
    ///
    /// As [`Unproven::prove`].
    pub fn prove_by_hand(mut self) -> Result<ByHand, ConnectError> {
        let core = self.take()?;
        core.rehearse(Instant::now().checked_add(core.patience))?;
        let _ = core.say_what_is_due(None);
        Ok(ByHand(core))
    }

    /// Answers the other side's canaries, proves nothing, and leaves the rest to the caller.
    ///
    /// # Errors
    ///
    /// As [`Unproven::prove`].
    pub fn answer_by_hand(mut self) -> Result<ByHand, ConnectError> {
        let core = self.take()?;
        core.answer_canaries(Instant::now().checked_add(core.patience))?;
        Ok(ByHand(core))
    }
}

impl Unproven<Worker> {
    /// As for a channel.
    ///
    /// # Errors
    ///
    /// As for a channel.
    pub fn prove(self) -> Result<Worker, ConnectError> {
        let process = self.core.as_ref().and_then(|core| core.process.clone());
        let channel = self.rehearse()?;
        // It was spawned, so there is one.
        let process = process.ok_or(std::io::Error::from(std::io::ErrorKind::NotFound))?;
        Ok(Worker::of(channel, process))
    }
}
