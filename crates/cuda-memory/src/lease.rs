//! A lease on memory of a peer's, for every rung that imports some.

use std::any::Any;
use std::fmt::Debug;
use std::sync::{Arc, Weak};

use cuda::{Buffer, Context, Event, Stream};
use rung::{Device, Fault, LeaseId, Reason, Refusal};

use crate::events::{EventWire, Exchange, Ready, Streams, Unfinished};
use crate::memory::{Borrowed, Inside};

/// Memory of a peer's, mapped here: by each rung in its own way.
pub trait Mapped: Debug + Send + Sync + 'static {
    /// Where it is.
    fn device(&self) -> Device;

    /// A number of this process's own.
    fn serial(&self) -> u64;

    /// All of it.
    ///
    /// # Errors
    ///
    /// [`Reason::OwnerGone`], or what the driver answers.
    fn open(&self) -> Result<Buffer, Fault>;

    /// A stream for copies to the host.
    ///
    /// # Errors
    ///
    /// Those of [`Self::open`].
    fn reads(&self) -> Result<Stream, Fault>;

    /// What still has to run before it is let go.
    fn streams(&self) -> &Streams;
}

/// A session that borrows.
pub trait Borrower: Debug + Send + Sync + 'static {
    /// What it imports.
    type Import: Mapped;

    /// Its events.
    fn events(&self) -> &Exchange;

    /// Whether the peer is gone for sure.
    fn is_gone(&self) -> bool;

    /// Work is enqueued under a lease.
    fn note_used(&self, _lease: LeaseId, _number: u64) {}

    /// A lease has ended.
    fn let_go(&self, ended: Ended<Self::Import>);
}

/// What is left of a lease that has ended.
#[derive(Debug)]
pub struct Ended<I> {
    /// Which.
    pub lease: LeaseId,
    /// Its owner's number for the allocation.
    pub number: u64,
    /// Streams that used it.
    pub used: Vec<Stream>,
    /// What is not kept: to be let go before its owner hears of it, and after all work on it.
    pub once: Option<Arc<I>>,
    /// Whether what runs on it has to be done before its receipt goes.
    pub settles: bool,
}

/// What a receipt has to see to first.
#[derive(Debug)]
pub struct Unsettled<I> {
    /// To be let go.
    pub once: Option<Arc<I>>,
    /// To be told of, or waited for.
    pub used: Vec<Unfinished>,
}

// Not of `I: Default`, as deriving it would have it.
impl<I> Default for Unsettled<I> {
    fn default() -> Self {
        Self { once: None, used: Vec::new() }
    }
}

impl<I: Mapped> Unsettled<I> {
    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.once.is_none() && self.used.is_empty()
    }

    /// Whether a receipt waits for nothing of it.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.used.iter().all(Unfinished::is_settled)
            && self.once.as_ref().is_none_or(|import| import.streams().are_done())
    }
}

/// A lease.
#[derive(Debug)]
pub struct Lease<S: Borrower> {
    /// Let go before the session hears of it: it may be what ends it.
    import: Option<Arc<S::Import>>,
    /// Its owner's number for the allocation.
    pub number: u64,
    /// Its number.
    pub lease: LeaseId,
    /// The session that borrowed it.
    pub session: Weak<S>,
    /// Whether the import is kept between leases.
    is_kept: bool,
    /// Whether what runs on it has to be done before its receipt goes.
    settles: bool,
    /// What its owner has yet to do to it.
    pub ready: Ready,
    /// Streams that used it.
    used: Streams,
}

impl<S: Borrower> Lease<S> {
    /// A lease on an import, as a parcel says.
    #[must_use]
    pub fn new(
        session: &Arc<S>,
        (lease, number): (LeaseId, u64),
        import: Arc<S::Import>,
        (is_kept, settles): (bool, bool),
        ready: Option<EventWire>,
    ) -> Self {
        Self {
            import: Some(import),
            number,
            lease,
            session: Arc::downgrade(session),
            is_kept,
            settles,
            ready: Ready::new(ready),
            used: Streams::default(),
        }
    }

    /// One of this session's kind, where it is.
    #[must_use]
    pub fn of(lease: &dyn Borrowed) -> Option<&Self> {
        (lease as &dyn Any).downcast_ref()
    }

    /// What it is a lease on.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownLease`] where it has ended.
    pub fn import(&self) -> Result<&Arc<S::Import>, Refusal> {
        // Taken by `drop` alone.
        self.import.as_ref().ok_or_else(|| Reason::UnknownLease.into())
    }

    fn event(&self, wire: &EventWire, context: &Arc<Context>) -> Result<Arc<Event>, Fault> {
        let session = self.session.upgrade().ok_or(Reason::OwnerGone)?;
        session.events().their_ready(wire, context)
    }

    /// Opens what it takes, now rather than when somebody looks.
    ///
    /// # Errors
    ///
    /// Those of [`Mapped::open`].
    pub fn open_all(&self) -> Result<(), Fault> {
        let buffer = self.import()?.open()?;
        self.ready.event(|wire| self.event(wire, buffer.context()))?;
        Ok(())
    }
}

impl<S: Borrower> Borrowed for Lease<S> {
    fn device(&self) -> Device {
        self.import.as_ref().map_or(Device::Host, |import| import.device())
    }

    fn serial(&self) -> u64 {
        self.import.as_ref().map_or(0, |import| import.serial())
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
        self.import()?.streams().note(stream);
        self.used.note(stream);
        if let Some(session) = self.session.upgrade() {
            session.note_used(self.lease, self.number);
        }
        Ok(())
    }
}

impl<S: Borrower> Drop for Lease<S> {
    fn drop(&mut self) {
        let used = self.used.take();
        let Some(session) = self.session.upgrade() else { return };
        // What is not kept ends before its owner hears that it was let go, and after all work on it.
        let once = self.import.take().filter(|_| !self.is_kept);
        let (lease, number, settles) = (self.lease, self.number, self.settles);
        session.let_go(Ended { lease, number, used, once, settles });
    }
}
