//! The heart of a channel: who reads the socket, and where what is read goes.
//!
//! There is no reader thread: whoever waits for something reads, and hands what is not its own to
//! whoever waits for that ([`Core::wait_for`]). Reading runs no handler and copies no bulk.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use link::{Link, LinkError};
use rung::{Handle, LeaseId, ParcelWire, Receipt, RungId, Value};
use worker::Process;

use crate::error::Ended;
use crate::keeper::{Keeper, Returns};
use crate::ladder::Sessions;
use crate::pack::Packing;
use crate::wire::{self, Message, Of};

/// What came for one of our calls.
#[derive(Debug)]
pub(crate) enum Event {
    Accepted,
    Refused { attempt: u32, storage: usize, code: String, text: String },
    Returned { attempt: u32, parcels: Vec<ParcelWire>, value: String, handles: VecDeque<Handle> },
    Failed { code: String, text: String },
}

/// What came for whoever serves.
#[derive(Debug)]
pub(crate) enum Work {
    Call {
        id: u64,
        attempt: u32,
        method: String,
        parcels: Vec<ParcelWire>,
        value: String,
        handles: VecDeque<Handle>,
    },
    /// The caller could not take our answer.
    AnswerRefused { id: u64, attempt: u32, storage: usize, code: String, text: String },
}

/// An answer of ours that the caller has not accepted yet.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) value: Value,
    pub(crate) attempt: u32,
    /// What its storages rode, to demote the right rung.
    pub(crate) rungs: Vec<RungId>,
}

#[derive(Debug, Default)]
pub(crate) struct Router {
    reading: bool,
    ended: Option<Ended>,
    calls: HashMap<u64, VecDeque<Event>>,
    next_call: u64,
    pub(crate) work: VecDeque<Work>,
    pub(crate) answers: HashMap<u64, Answer>,
}

impl Router {
    /// A new call of ours, for which events may now come.
    pub(crate) fn begin(&mut self) -> u64 {
        self.next_call += 1;
        self.calls.insert(self.next_call, VecDeque::new());
        self.next_call
    }

    /// What comes for it from now on is stale.
    pub(crate) fn finish(&mut self, call: u64) {
        self.calls.remove(&call);
    }

    pub(crate) fn event(&mut self, call: u64) -> Option<Event> {
        self.calls.get_mut(&call)?.pop_front()
    }
}

/// Why waiting was in vain.
#[derive(Debug)]
pub(crate) enum NotYet {
    Deadline,
    Ended(Ended),
}

/// Why nothing was sent.
#[derive(Debug)]
pub(crate) enum NotSent {
    Deadline,
    OverCap(String),
    Ended(Ended),
}

/// What a channel is made of. Declared in the order of dropping: the process has ended and is reaped
/// before the owners of what was lent to it go (L3).
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) process: Option<Arc<Process>>,
    pub(crate) link: Link,
    pub(crate) sessions: Sessions,
    pub(crate) keeper: Keeper,
    pub(crate) returns: Arc<Returns>,
    router: Mutex<Router>,
    changed: Condvar,
    /// The process that this belongs to (L9).
    home: u32,
}

impl Core {
    pub(crate) fn new(link: Link, sessions: Sessions, process: Option<Arc<Process>>) -> Self {
        Self {
            process,
            link,
            sessions,
            keeper: Keeper::default(),
            returns: Arc::default(),
            router: Mutex::default(),
            changed: Condvar::new(),
            home: std::process::id(),
        }
    }

    /// Whether this is still the process that made it, not a fork of it.
    pub(crate) fn is_home(&self) -> bool {
        self.home == std::process::id()
    }

    pub(crate) fn router(&self) -> MutexGuard<'_, Router> {
        // Nothing under this lock is half done when somebody panics.
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `pick` finds what it looks for, reading the socket unless another thread does.
    pub(crate) fn wait_for<T>(
        &self,
        deadline: Option<Instant>,
        mut pick: impl FnMut(&mut Router) -> Option<T>,
    ) -> Result<T, NotYet> {
        if !self.is_home() {
            return Err(NotYet::Ended(Ended::Forked));
        }
        loop {
            let mut router = self.router();
            if let Some(found) = pick(&mut router) {
                return Ok(found);
            }
            if let Some(ended) = &router.ended {
                return Err(NotYet::Ended(ended.clone()));
            }
            if router.reading {
                // Whoever reads wakes us when it has put something where it belongs, or stops.
                let router = match deadline {
                    None => self.changed.wait(router).unwrap_or_else(PoisonError::into_inner),
                    Some(deadline) => {
                        let left = deadline.saturating_duration_since(Instant::now());
                        if left.is_zero() {
                            return Err(NotYet::Deadline);
                        }
                        let waited = self.changed.wait_timeout(router, left);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                drop(router);
                continue;
            }
            router.reading = true;
            drop(router);
            let received = self.receive(deadline);
            let mut router = self.router();
            router.reading = false;
            let mut stale = None;
            let mut done = None;
            let mut late = false;
            match received {
                Ok((message, handles)) => {
                    (stale, done) = dispatch(&mut router, message, handles);
                }
                Err(NotYet::Deadline) => late = true,
                Err(NotYet::Ended(ended)) => router.ended = Some(ended),
            }
            self.changed.notify_all();
            drop(router);
            // An accepted answer's value may hold leases of anybody: dropped outside the lock (L7).
            drop(done);
            if let Some(stale) = stale {
                self.send_back(stale);
            }
            if late {
                return Err(NotYet::Deadline);
            }
        }
    }

    /// One message; the leases that come home with it are ended.
    fn receive(&self, deadline: Option<Instant>) -> Result<(Message, VecDeque<Handle>), NotYet> {
        let frame = self.link.receive(deadline).map_err(|error| match error {
            LinkError::Deadline => NotYet::Deadline,
            other => NotYet::Ended(other.into()),
        })?;
        let broken = |fault| {
            self.link.close();
            NotYet::Ended(Ended::Broken(fault))
        };
        let (message, receipts) = wire::decode(&frame.json).map_err(broken)?;
        let mut handles = frame.handles;
        // The parcels' handles come first, the receipts' after them.
        let parcels: usize = match &message {
            Message::Call { parcels, .. } | Message::Return { parcels, .. } => {
                parcels.iter().map(ParcelWire::handle_count).sum()
            }
            _ => 0,
        };
        let mut of_receipts = handles.split_off(parcels.min(handles.len()));
        let mut ended = Vec::new();
        for wire in receipts {
            let receipt = Receipt::join(wire, &mut of_receipts).map_err(broken)?;
            let owner = self.keeper.release(&receipt.rung, receipt.lease);
            if owner.is_none() {
                let (rung, lease) = (&receipt.rung, receipt.lease);
                tracing::warn!(%rung, %lease, "a receipt for a lease that is not out");
            }
            if let Some(carrier) = self.sessions.carrier(&receipt.rung) {
                carrier.released(receipt);
            }
            ended.push(owner);
        }
        if handles.len() < parcels || !of_receipts.is_empty() {
            return Err(broken(rung::Fault::new(
                rung::Reason::WrongHandles,
                format!(
                    "{} descriptors came, the parcels need {parcels}",
                    handles.len() + of_receipts.len()
                ),
            )));
        }
        // Owners go outside all locks (L7): none is held here.
        drop(ended);
        Ok((message, handles))
    }

    /// Gives the leases of a message back unopened, and lets its sender forget it.
    fn send_back(&self, stale: Stale) {
        for parcel in stale.parcels {
            let (rung, lease) = parcel.lease();
            self.returns.untake(vec![(rung.clone(), lease)]);
        }
        tracing::debug!(call = stale.id, "an answer came too late and was dropped");
        let message = Message::Accept { of: Of::Return, id: stale.id, attempt: stale.attempt };
        // Where this fails the channel has ended, and whoever waits on it hears so.
        let _ = self.send(&message, Vec::new(), None);
    }

    /// Sends a message, with the receipts that wait to ride along.
    pub(crate) fn send(
        &self,
        message: &Message,
        mut handles: Vec<Handle>,
        deadline: Option<Instant>,
    ) -> Result<(), NotSent> {
        if !self.is_home() {
            return Err(NotSent::Ended(Ended::Forked));
        }
        let leases = self.returns.take();
        let sent = self.write(message, &leases, &mut handles, deadline);
        if sent.is_err() {
            self.returns.untake(leases);
        }
        sent
    }

    fn write(
        &self,
        message: &Message,
        leases: &[(RungId, LeaseId)],
        handles: &mut Vec<Handle>,
        deadline: Option<Instant>,
    ) -> Result<(), NotSent> {
        let over = |fault: rung::Fault| NotSent::OverCap(fault.to_string());
        let mut receipts = Vec::with_capacity(leases.len());
        for (rung, lease) in leases {
            let Some(carrier) = self.sessions.carrier(rung) else {
                continue;
            };
            let (wire, some) = carrier.receipt(*lease).split().map_err(over)?;
            receipts.push(wire);
            handles.extend(some);
        }
        let json = wire::encode(message, &receipts).map_err(over)?;
        self.link.send(&json, handles, deadline).map_err(|error| match error {
            LinkError::Deadline => NotSent::Deadline,
            LinkError::OverCap(text) => NotSent::OverCap(text),
            other => NotSent::Ended(other.into()),
        })
    }

    /// Keeps the owners of a packed message (L1): before it is sent, so that a receipt finds them.
    pub(crate) fn keep(&self, packing: &mut Packing) -> Vec<(RungId, LeaseId)> {
        let mut leases = Vec::with_capacity(packing.owners.len());
        for (rung, lease, bytes, owner) in packing.owners.drain(..) {
            leases.push((rung.clone(), lease));
            self.keeper.keep(rung, lease, bytes, owner);
        }
        leases
    }

    /// Ends leases that were never sent.
    pub(crate) fn unkeep(&self, leases: Vec<(RungId, LeaseId)>) {
        let owners: Vec<_> =
            leases.iter().map(|(rung, lease)| self.keeper.release(rung, *lease)).collect();
        drop(owners);
    }

    /// Sends receipts that nothing has taken along; until the channel is closed.
    pub(crate) fn flush_receipts(&self) {
        while self.returns.overdue() {
            let leases = self.returns.take();
            if leases.is_empty() {
                continue;
            }
            if self.write(&Message::Receipts, &leases, &mut Vec::new(), None).is_err() {
                return;
            }
        }
    }

    /// Ends the channel for this side.
    pub(crate) fn close(&self) {
        self.returns.close();
        self.link.close();
        self.sessions.peer_gone();
    }
}

/// An answer that nobody waits for.
struct Stale {
    id: u64,
    attempt: u32,
    parcels: Vec<ParcelWire>,
}

/// Puts a message where it belongs; what has to be done about it outside the lock.
fn dispatch(
    router: &mut Router,
    message: Message,
    handles: VecDeque<Handle>,
) -> (Option<Stale>, Option<Answer>) {
    match message {
        Message::Call { id, attempt, method, parcels, value } => {
            router.work.push_back(Work::Call { id, attempt, method, parcels, value, handles });
        }
        Message::Return { id, attempt, parcels, value } => match router.calls.get_mut(&id) {
            Some(events) => {
                events.push_back(Event::Returned { attempt, parcels, value, handles });
            }
            None => {
                return (Some(Stale { id, attempt, parcels }), None);
            }
        },
        Message::Error { id, code, text } => {
            if let Some(events) = router.calls.get_mut(&id) {
                events.push_back(Event::Failed { code, text });
            }
        }
        Message::Accept { of: Of::Call, id, .. } => {
            if let Some(events) = router.calls.get_mut(&id) {
                events.push_back(Event::Accepted);
            }
        }
        Message::Accept { of: Of::Return, id, attempt } => {
            if router.answers.get(&id).is_some_and(|answer| answer.attempt == attempt) {
                return (None, router.answers.remove(&id));
            }
        }
        Message::Refuse { of: Of::Call, id, attempt, storage, reason, text } => {
            if let Some(events) = router.calls.get_mut(&id) {
                events.push_back(Event::Refused { attempt, storage, code: reason, text });
            }
        }
        Message::Refuse { of: Of::Return, id, attempt, storage, reason, text } => {
            let code = reason;
            router.work.push_back(Work::AnswerRefused { id, attempt, storage, code, text });
        }
        // A second hello says nothing that the first did not; receipts are done with already.
        Message::Hello(_) | Message::Receipts => {}
    }
    (None, None)
}
