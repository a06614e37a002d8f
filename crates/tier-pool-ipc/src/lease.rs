//! A lease on memory of another process's pool.

use std::sync::{Arc, Weak};

use cuda::{Buffer, Context, Event, Stream};
use cuda_memory::events::{EventWire, Ready, Streams};
use cuda_memory::memory::{Borrowed, Inside};
use rung::{Device, Fault, LeaseId, Reason, Refusal};

use crate::import::Import;
use crate::session::Session;

#[derive(Debug)]
pub(crate) struct Lease {
    /// Let go before the session hears of it: it may be what frees it.
    pub(crate) import: Option<Arc<Import>>,
    /// Its owner's number for the allocation.
    pub(crate) number: u64,
    pub(crate) lease: LeaseId,
    pub(crate) session: Weak<Session>,
    /// Whether the import is kept between leases.
    pub(crate) is_kept: bool,
    /// What its owner has yet to do to it (O4).
    pub(crate) ready: Ready,
    /// Streams that used it (O5).
    pub(crate) used: Streams,
}

impl Lease {
    /// A lease of this crate's, where it is one.
    pub(crate) fn of(lease: &dyn Borrowed) -> Option<&Self> {
        (lease as &dyn std::any::Any).downcast_ref()
    }

    fn import(&self) -> Result<&Arc<Import>, Refusal> {
        // Taken by `drop` alone.
        self.import.as_ref().ok_or_else(|| Reason::UnknownLease.into())
    }

    fn event(&self, wire: &EventWire, context: &Arc<Context>) -> Result<Arc<Event>, Fault> {
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
        if let Some(session) = self.session.upgrade() {
            session.note_used(self.lease, self.number);
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let used = self.used.take();
        let Some(session) = self.session.upgrade() else { return };
        // What is not kept is freed before its owner hears that it was let go, and after all work on it (O6).
        let once = self.import.take().filter(|_| !self.is_kept);
        session.let_go(self.lease, self.number, used, once);
    }
}
