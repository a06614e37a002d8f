//! A lease on memory of a peer's.

use std::sync::{Arc, Weak};

use cuda::{Buffer, Context, Stream};
use cuda_memory::events::{EventWire, Ready, Streams};
use cuda_memory::memory::{Borrowed, Inside};
use rung::{Device, Fault, LeaseId, Reason, Refusal};

use crate::import::Import;
use crate::session::{Key, Session};

#[derive(Debug)]
pub(crate) struct Lease {
    /// Let go before the session hears of it: it may be what closes it.
    pub(crate) import: Option<Arc<Import>>,
    /// Its number among what is kept; 0 where it is not.
    pub(crate) key: Key,
    /// Its owner's number for it.
    pub(crate) number: Key,
    pub(crate) lease: LeaseId,
    pub(crate) session: Weak<Session>,
    /// What its owner has yet to do to it.
    pub(crate) ready: Ready,
    /// Streams that used it.
    pub(crate) used: Streams,
    /// Whether what runs on it has to be done before its receipt goes.
    pub(crate) settles: bool,
}

impl Lease {
    /// A lease of this crate's, where it is one.
    pub(crate) fn of(lease: &dyn Borrowed) -> Option<&Self> {
        (lease as &dyn std::any::Any).downcast_ref()
    }

    pub(crate) fn import(&self) -> Result<&Arc<Import>, Refusal> {
        // Taken by `drop` alone.
        self.import.as_ref().ok_or_else(|| Reason::UnknownLease.into())
    }

    fn event(&self, wire: &EventWire, context: &Arc<Context>) -> Result<Arc<cuda::Event>, Fault> {
        let session = self.session.upgrade().ok_or(Reason::OwnerGone)?;
        session.events.their_ready(wire, context)
    }

    /// Opens what it takes, now rather than when somebody looks.
    pub(crate) fn open_all(&self) -> Result<(), Fault> {
        let buffer = self.import()?.open()?;
        self.ready.event(|wire| self.event(wire, buffer.context()))?;
        Ok(())
    }
}

impl Borrowed for Lease {
    fn device(&self) -> Device {
        self.import.as_ref().map_or(Device::Host, |import| import.device)
    }

    fn serial(&self) -> u64 {
        self.import.as_ref().map_or(0, |import| import.serial)
    }

    fn open(&self, _: Inside) -> Result<Buffer, Fault> {
        self.import()?.open()
    }

    fn reads(&self) -> Result<Stream, Fault> {
        self.import()?.reads()
    }

    fn order(&self, stream: &Stream) -> Result<(), Fault> {
        let is_gone = || self.session.upgrade().is_none_or(|session| session.is_gone());
        self.ready.order(stream, is_gone, |wire| self.event(wire, stream.context()))
    }

    fn note(&self, stream: &Stream) -> Result<(), Refusal> {
        self.import()?.streams.note(stream);
        self.used.note(stream);
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let used = self.used.take();
        let Some(session) = self.session.upgrade() else { return };
        // What is not kept is closed before its owner hears that it was let go, and after all work on it.
        let once = self.import.take().filter(|_| self.key == 0);
        session.note_used(self.lease, used, once, self.settles);
        session.let_go(self.key);
    }
}
