//! A worker: a process and the channel to it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use rung::Trust;
use segment::PeerTrust;
use worker::{Command, Exit, Process};

use crate::channel::{Channel, HANDSHAKE};
use crate::error::ConnectError;
use crate::ladder::Ladder;
use crate::wire::Role;

/// An isolated process and the channel to it; everything a [`Channel`] can do, it can.
///
/// Dropping it closes the channel, waits up to the command's grace for the process to end, kills it
/// if it does not, and reaps it.
#[derive(Debug)]
pub struct Worker {
    // Closed first, so that the process sees the end of the link and ends by itself.
    channel: Channel,
    process: Arc<Process>,
}

impl Worker {
    /// Starts a program, whose `main` asks [`Channel::from_env`], and does the handshake.
    ///
    /// # Errors
    ///
    /// Where the program cannot be started, ends, hangs, or speaks something else.
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
    pub fn shutdown(self, grace: Duration) -> Exit {
        let Self { channel, process } = self;
        drop(channel);
        process.end(grace)
    }
}

impl Deref for Worker {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

/// How a worker is started.
#[derive(Debug)]
pub struct WorkerBuilder {
    ladder: Ladder,
    trust: Option<PeerTrust>,
    handshake: Duration,
}

impl Default for WorkerBuilder {
    fn default() -> Self {
        Self { ladder: Ladder::standard(), trust: None, handshake: HANDSHAKE }
    }
}

impl WorkerBuilder {
    /// Other rungs.
    #[must_use]
    pub fn ladder(mut self, ladder: Ladder) -> Self {
        self.ladder = ladder;
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

    /// How long the handshake may take: 10 seconds unless said otherwise.
    #[must_use]
    pub fn handshake(mut self, limit: Duration) -> Self {
        self.handshake = limit;
        self
    }

    /// Starts a program and does the handshake.
    ///
    /// # Errors
    ///
    /// As [`Worker::spawn`].
    pub fn spawn(self, command: Command) -> Result<Worker, ConnectError> {
        let (process, link) = command.spawn()?;
        let process = Arc::new(process);
        let trust = self
            .trust
            .or_else(|| PeerTrust::same_executable(process.pid()).ok())
            .map_or(Trust::none(), Trust::carrying);
        let channel = Channel::connect(
            link,
            Role::Host,
            &self.ladder,
            &trust,
            self.handshake,
            Some(Arc::clone(&process)),
        )?;
        Ok(Worker { channel, process })
    }
}
