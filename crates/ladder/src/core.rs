//! The heart of a channel: who reads the socket, and where what is read goes.
//!
//! Whoever waits for something reads, and hands what is not its own to whoever waits for that
//! ([`Core::wait_for`]). When nobody waits, a parked thread takes over ([`Core::park`]). Reading runs
//! no handler and copies no bulk. Which thread runs a handler: `pool`.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use canary::Facts;
use link::{Link, LinkError};
use rung::{Device, Fault, Handle, LeaseId, Owner, ParcelWire, Reason, Receipt, RungId, Value};
use worker::Process;

use crate::channel::Options;
use crate::error::Ended;
use crate::fail::{reached, reached_of};
use crate::handler::Handler;
use crate::keeper::{AtBound, Bounds, Due, Keeper, Returns, lock};
use crate::ladder::Sessions;
use crate::own;
use crate::pack::{Packing, Sampling};
use crate::pool::{Pool, Refused};
use crate::prove::Proofs;
use crate::stats::Counters;
use crate::transfer::Tries;
use crate::wire::{self, Accepted, Message, Of, Riders, Role, Root};

/// How long the socket may stay unread before the parked thread takes over.
const TAKE_OVER: Duration = Duration::from_millis(4);

/// How often whoever waits for room looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long a goodbye may wait for a peer that does not read.
const FAREWELL: Duration = Duration::from_millis(100);

/// What may wait for one call of ours, in messages and by [`cost`]: more is a peer that floods us.
const EVENTS: usize = 256;
const EVENTS_COST: usize = 128 << 20;

/// The channel's own calls are numbered from here: within what a double holds exactly.
const OWN_CALLS: u64 = 1 << 52;

/// Whether a call is one of the channel's own, this side's or the peer's.
pub(crate) fn is_own_id(id: u64) -> bool {
    id > OWN_CALLS
}

/// How many of the peer's own calls are answered at a time where nobody serves. One that has answered counts
/// until it is gone, so that a peer that asks one after the other may find a few.
const OWN_THREADS: usize = 16;

/// How deep our calls may be nested in one root: each is a part of one thread's stack.
const NESTED: usize = 64;

/// What a message costs to keep: descriptors are far rarer than bytes.
fn cost(value: &str, handles: &VecDeque<Handle>) -> usize {
    value.len() + (256 << 10) * handles.len()
}

/// What came for one of our calls.
#[derive(Debug)]
pub(crate) enum Event {
    Accepted,
    Refused {
        attempt: u32,
        storage: usize,
        code: String,
        text: String,
    },
    Returned {
        attempt: u32,
        parcels: Vec<ParcelWire>,
        value: String,
        handles: VecDeque<Handle>,
    },
    Failed {
        code: String,
        text: String,
    },
    /// The peer calls back while it answers us: the thread that waits runs it.
    Nested(Box<Incoming>),
}

/// What came for whoever serves.
#[derive(Debug)]
pub(crate) enum Work {
    Call(Incoming),
    /// The caller could not take our answer.
    AnswerRefused {
        id: u64,
        answer: Answer,
        storage: usize,
        code: String,
        text: String,
    },
}

/// A call of the peer's.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) id: u64,
    pub(crate) attempt: u32,
    pub(crate) root: Root,
    pub(crate) method: String,
    pub(crate) parcels: Vec<ParcelWire>,
    pub(crate) value: String,
    pub(crate) handles: VecDeque<Handle>,
}

/// An answer of ours that the caller has not accepted yet.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) answer: Outgoing,
    pub(crate) tries: Tries,
}

/// An answer of ours, and how it goes.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) id: u64,
    /// Of the call that it answers.
    pub(crate) root: Root,
    pub(crate) attempt: u32,
    pub(crate) value: Value,
    /// Of a call of the channel's own: the rung that it goes on.
    pub(crate) only: Option<RungId>,
}

#[derive(Debug)]
struct InFlight {
    root: Root,
    events: VecDeque<Event>,
    /// Of the events that came since the last one was taken and none was left.
    cost: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Router {
    /// Whether a thread is reading.
    reading: bool,
    /// Threads inside [`Core::wait_for`].
    waiting: usize,
    /// Those of them that sleep until another one has read something: waking nobody is a system call too.
    sleeping: usize,
    /// Those of these that are servers without work: all that they wait for is somebody's call.
    spare: usize,
    /// Messages read so far: how the parked thread sees that others read.
    read: u64,
    /// Whether the parked thread waits to be woken, rather than looking again soon.
    parked: bool,
    /// Nobody calls or serves any more; what comes is still read, until the end of the stream.
    closing: bool,
    ended: Option<Ended>,
    calls: HashMap<u64, InFlight>,
    /// Our calls that wait in each root, the innermost last.
    roots: HashMap<Root, Vec<u64>>,
    next_call: u64,
    next_own: u64,
    pub(crate) pool: Pool,
    /// Threads that answer the channel's own calls where nobody serves.
    own_threads: usize,
    pub(crate) answers: HashMap<u64, Answer>,
}

impl Router {
    /// Whether somebody reads, or is awake and will.
    fn attended(&self) -> bool {
        self.reading || self.waiting > self.spare
    }

    /// A new call of ours, for which events may now come; nested in a root, or a root itself.
    ///
    /// The channel's own calls are numbered apart, so that users' are numbered from 1.
    pub(crate) fn begin(&mut self, mine: Role, nested: Option<Root>, own: bool) -> u64 {
        let id = if own {
            self.next_own += 1;
            OWN_CALLS + self.next_own
        } else {
            self.next_call += 1;
            self.next_call
        };
        let root = nested.unwrap_or(Root { side: mine, id });
        self.calls.insert(id, InFlight { root, events: VecDeque::new(), cost: 0 });
        self.roots.entry(root).or_default().push(id);
        id
    }

    /// What comes for it from now on is stale; so is what came and was not looked at.
    fn finish(&mut self, call: u64) -> VecDeque<Event> {
        let Some(InFlight { root, events, .. }) = self.calls.remove(&call) else {
            return VecDeque::new();
        };
        if let Some(waiting) = self.roots.get_mut(&root) {
            waiting.retain(|known| *known != call);
            if waiting.is_empty() {
                self.roots.remove(&root);
            }
        }
        events
    }

    pub(crate) fn event(&mut self, call: u64) -> Option<Event> {
        let flight = self.calls.get_mut(&call)?;
        let event = flight.events.pop_front();
        if flight.events.is_empty() {
            flight.cost = 0;
        }
        event
    }

    /// The answer that is out to a call, if this was the last attempt at it.
    fn take_answer(&mut self, id: u64, attempt: u32) -> Option<Answer> {
        let current = self.answers.get(&id).is_some_and(|out| out.answer.attempt == attempt);
        if current { self.answers.remove(&id) } else { None }
    }

    /// A message of ours was taken: an answer is done with then, and given back to be dropped.
    fn accepted(&mut self, accepted: Accepted) -> Option<Answer> {
        let Accepted { of, id, attempt } = accepted;
        match of {
            // About a call that is over it says nothing any more.
            Of::Call => {
                drop(self.deliver(id, Event::Accepted));
                None
            }
            Of::Return => self.take_answer(id, attempt),
        }
    }

    /// Adds an event to a call in flight; given back where there is no such call.
    fn deliver(&mut self, call: u64, event: Event) -> Option<Event> {
        let Some(flight) = self.calls.get_mut(&call) else { return Some(event) };
        flight.cost = flight.cost.saturating_add(match &event {
            Event::Returned { value, handles, .. } => cost(value, handles),
            Event::Nested(call) => cost(&call.value, &call.handles),
            _ => 0,
        });
        // One is always taken: a frame has a cap of its own.
        let too_much = flight.cost > EVENTS_COST && !flight.events.is_empty();
        if flight.events.len() >= EVENTS || too_much {
            self.ended.get_or_insert(Ended::Broken(Fault::new(
                Reason::OverCap,
                "more than anybody could have to say about one call",
            )));
            return Some(event);
        }
        flight.events.push_back(event);
        None
    }
}

/// Why waiting was in vain.
#[derive(Debug)]
pub(crate) enum NotYet {
    Deadline,
    Ended(Ended),
}

/// Why owners were not kept.
#[derive(Debug)]
pub(crate) enum NotKept {
    /// What the peer holds and what the bounds are, in words.
    OverBound(String),
    /// Waiting for room was in vain.
    NotYet(NotYet),
}

/// What came in one frame.
struct Received {
    message: Message,
    handles: VecDeque<Handle>,
    /// Of the leases that came home.
    owners: Vec<Owner>,
    accepted: Vec<Accepted>,
}

/// Why nothing was sent.
#[derive(Debug)]
pub(crate) enum NotSent {
    Deadline,
    /// The deadline passed when a part was out: the peer will get the rest, and the leases in it.
    Begun,
    OverCap(String),
    Ended(Ended),
}

/// What a channel is made of.
pub(crate) struct Core {
    /// Its number in this process.
    pub(crate) id: u64,
    /// What both sides said of themselves.
    pub(crate) facts: [Facts; 2],
    /// How long whatever proves a rung may take.
    pub(crate) patience: Duration,
    /// Devices that are proven at connect though something has to be set up for it.
    pub(crate) named: Vec<Device>,
    pub(crate) sampling: Sampling,
    /// Whether both sides proved their rungs; before that nothing of a user's is taken.
    pub(crate) proven: AtomicBool,
    /// Whether the peer has told what its canaries showed.
    pub(crate) heard: AtomicBool,
    /// What is being proven, and what the peer has not been told.
    pub(crate) proofs: Proofs,
    pub(crate) process: Option<Arc<Process>>,
    pub(crate) link: Link,
    pub(crate) sessions: Sessions,
    pub(crate) keeper: Keeper,
    pub(crate) returns: Arc<Returns>,
    pub(crate) handler: OnceLock<Arc<dyn Handler + Send + Sync>>,
    pub(crate) role: Role,
    pub(crate) bounds: Bounds,
    pub(crate) counters: Counters,
    /// Bytes of a leaf from which on a low rung is worth a warning.
    pub(crate) warn_over: AtomicU64,
    /// Whether the last handler ran for long: then the next call should not have to wait for it.
    pub(crate) slow: AtomicBool,
    /// Calls that were given up and may still be answered.
    given_up: AtomicUsize,
    router: Mutex<Router>,
    changed: Condvar,
    unread: Condvar,
    /// The process that this belongs to (L9).
    home: u32,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("role", &self.role)
            .field("process", &self.process)
            .field("keeper", &self.keeper)
            .finish_non_exhaustive()
    }
}

impl Core {
    pub(crate) fn new(
        link: Link,
        role: Role,
        sessions: Sessions,
        facts: [Facts; 2],
        options: Options,
        process: Option<Arc<Process>>,
    ) -> Arc<Self> {
        static CHANNELS: AtomicU64 = AtomicU64::new(1);
        let id = CHANNELS.fetch_add(1, Ordering::Relaxed);
        let returns: Arc<Returns> = Arc::default();
        let waker = Arc::downgrade(&returns);
        let wake: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            if let Some(returns) = waker.upgrade() {
                returns.wake();
            }
        });
        sessions.wake_with(&wake);
        let Options { handshake, bounds, named, verify } = options;
        let sampling = Sampling::default();
        sampling.every.store(verify.every(), Ordering::Relaxed);
        let core = Arc::new(Self {
            id,
            facts,
            patience: handshake,
            named,
            sampling,
            proven: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            proofs: Proofs::default(),
            process,
            link,
            sessions,
            keeper: Keeper::default(),
            returns,
            handler: OnceLock::new(),
            role,
            bounds,
            counters: Counters::default(),
            warn_over: AtomicU64::new(1 << 20),
            slow: AtomicBool::new(false),
            given_up: AtomicUsize::new(0),
            router: Mutex::default(),
            changed: Condvar::new(),
            unread: Condvar::new(),
            home: segment::generation(),
        });
        let channel = (id, Arc::downgrade(&core));
        // The first one, since the returns are new.
        let _ = core.returns.channel.set(channel);
        core
    }

    /// Whether this is still the process that made it, not a fork of it.
    pub(crate) fn is_home(&self) -> bool {
        self.home == segment::generation()
    }

    pub(crate) fn router(&self) -> MutexGuard<'_, Router> {
        lock(&self.router)
    }

    /// Waits until `pick` finds what it looks for, reading the socket unless another thread does.
    pub(crate) fn wait_for<T>(
        self: &Arc<Self>,
        deadline: Option<Instant>,
        pick: impl FnMut(&mut Router) -> Option<T>,
    ) -> Result<T, NotYet> {
        self.wait_as(false, deadline, pick)
    }

    /// As [`Self::wait_for`], as a server without work or as anybody else.
    pub(crate) fn wait_as<T>(
        self: &Arc<Self>,
        spare: bool,
        deadline: Option<Instant>,
        mut pick: impl FnMut(&mut Router) -> Option<T>,
    ) -> Result<T, NotYet> {
        if !self.is_home() {
            return Err(NotYet::Ended(Ended::Forked));
        }
        self.router().waiting += 1;
        let outcome = self.wait_and_read(spare, deadline, &mut pick);
        self.router().waiting -= 1;
        self.wake_parked();
        outcome
    }

    /// Wakes the parked thread where nobody else reads and something may come.
    fn wake_parked(&self) {
        let mut router = self.router();
        if !router.attended() && router.parked && (router.closing || self.is_worth_reading()) {
            router.parked = false;
            self.unread.notify_one();
        }
    }

    /// Whether anything may come that nobody waits for: a call, a receipt, an answer that came too late
    /// for its caller, or word that a block need not be kept any more.
    fn is_worth_reading(&self) -> bool {
        self.handler.get().is_some()
            || self.keeper.has_lent()
            || self.given_up.load(Ordering::Relaxed) > 0
            || self.sessions.keep()
            // The host may prove something before this side begins to serve.
            || (self.role == Role::Worker && self.proven.load(Ordering::Relaxed))
    }

    /// A call of ours is given up before its answer came.
    pub(crate) fn give_up(&self) {
        self.given_up.fetch_add(1, Ordering::Relaxed);
        // Nobody waits for it any more: somebody has to read it all the same.
        self.wake_parked();
    }

    fn was_answered_late(&self) {
        let one_less = |count: usize| Some(count.saturating_sub(1));
        let _ = self.given_up.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }

    fn wait_and_read<T>(
        self: &Arc<Self>,
        spare: bool,
        deadline: Option<Instant>,
        pick: &mut impl FnMut(&mut Router) -> Option<T>,
    ) -> Result<T, NotYet> {
        loop {
            let mut router = self.router();
            if let Some(found) = pick(&mut router) {
                return Ok(found);
            }
            if let Some(ended) = &router.ended {
                return Err(NotYet::Ended(ended.clone()));
            }
            if router.closing {
                return Err(NotYet::Ended(Ended::Closed));
            }
            // Asked here, so that a peer that never stops sending does not put it off.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(NotYet::Deadline);
            }
            if router.reading {
                // Whoever reads wakes us when it has put something where it belongs, or stops.
                router.sleeping += 1;
                router.spare += usize::from(spare);
                let mut router = match deadline {
                    None => self.changed.wait(router).unwrap_or_else(PoisonError::into_inner),
                    Some(deadline) => {
                        let left = deadline.saturating_duration_since(Instant::now());
                        let waited = self.changed.wait_timeout(router, left);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                router.sleeping -= 1;
                router.spare -= usize::from(spare);
                drop(router);
                continue;
            }
            router.reading = true;
            drop(router);
            if !self.read_one(spare, deadline) {
                return Err(NotYet::Deadline);
            }
        }
    }

    /// Reads one message and puts it where it belongs; false where the deadline passed first. The
    /// caller has set `reading`.
    ///
    /// Whoever sleeps is woken, to read on. Not so where a server has read a call, which it will take itself,
    /// and all that sleep are other servers, and handlers are quick: then this one will be back before another
    /// has woken up, and if it is not, the parked thread wakes one.
    fn read_one(self: &Arc<Self>, spare: bool, deadline: Option<Instant>) -> bool {
        /// Gives the reading up, also where a rung panics.
        struct Reading<'a> {
            core: &'a Core,
            for_itself: bool,
        }
        impl Drop for Reading<'_> {
            fn drop(&mut self) {
                let mut router = self.core.router();
                router.reading = false;
                let wake = router.sleeping > if self.for_itself { router.spare } else { 0 };
                drop(router);
                if wake {
                    self.core.changed.notify_all();
                }
            }
        }
        let mut reading = Reading { core: self, for_itself: false };
        let mut effects = Effects::default();
        let mut in_time = true;
        match self.receive(deadline) {
            Ok(Received { message, handles, owners, accepted }) => {
                let mut router = self.router();
                router.read += 1;
                for accepted in accepted {
                    effects.accepted.extend(router.accepted(accepted));
                }
                let is_call = matches!(message, Message::Call { .. });
                dispatch(&mut router, self, message, handles, &mut effects);
                let alone = spare && is_call && router.pool.is_one() && !effects.spawn;
                reading.for_itself = alone && !self.slow.load(Ordering::Relaxed);
                effects.owners = owners;
                if router.ended.is_some() {
                    // Nobody will read any more: the peer should see so.
                    self.link.close_for_sending();
                }
            }
            Err(NotYet::Deadline) => in_time = false,
            Err(NotYet::Ended(ended)) => {
                self.router().ended.get_or_insert(ended);
                // The peer should see so; what it does then is still to be seen (L3).
                self.link.close_for_sending();
            }
        }
        drop(reading);
        self.apply(effects);
        in_time
    }

    /// The parked thread: reads when nobody else does and something may come, until the end.
    ///
    /// While others come and go it looks around every [`TAKE_OVER`], so that nobody has to wake it for
    /// each call. Where nobody has read for so long, it waits in the read itself; where others wait (and
    /// so read), or nothing is worth reading, it waits to be woken.
    pub(crate) fn park(self: &Arc<Self>) {
        // Messages read, as of the last look around.
        let mut seen = None;
        loop {
            let mut router = self.router();
            if router.ended.is_some() {
                return;
            }
            let quiet = seen == Some(router.read);
            if quiet && (router.attended() || !(router.closing || self.is_worth_reading())) {
                router.parked = true;
                drop(self.unread.wait(router).unwrap_or_else(PoisonError::into_inner));
                seen = None;
                continue;
            }
            let before = router.read;
            seen = Some(before);
            let waited = self.unread.wait_timeout(router, TAKE_OVER);
            let mut router = waited.unwrap_or_else(PoisonError::into_inner).0;
            let unread = router.read == before && !router.attended();
            if !unread || !(router.closing || self.is_worth_reading()) {
                continue;
            }
            if router.ended.is_some() {
                return;
            }
            if router.spare > 0 {
                // The server that should be back by now is not: another one reads.
                drop(router);
                self.changed.notify_all();
                continue;
            }
            router.reading = true;
            drop(router);
            self.read_one(false, None);
        }
    }

    /// What a message asks for that is not done under the lock.
    fn apply(self: &Arc<Self>, effects: Effects) {
        let Effects { stale, accepted, owners, spawn, own, refused } = effects;
        // Owners, and the values of accepted answers, may hold anything, leases of others too: dropped
        // outside all locks, when this thread no longer reads (L7).
        drop((accepted, owners));
        if let Some(stale) = stale {
            self.send_back(stale);
        }
        if let Some(Refused { call, code, text }) = refused {
            self.refuse(call, code, text);
        }
        if spawn {
            self.spawn_server();
        }
        if let Some(call) = own {
            self.answer_apart(call);
        }
    }

    /// Answers one of the channel's own calls on a thread for it alone: a server that took users' calls too
    /// would take them before there is a handler.
    fn answer_apart(self: &Arc<Self>, call: Incoming) {
        let core = Arc::clone(self);
        let slot = Arc::new(Mutex::new(Some(call)));
        let mine = Arc::clone(&slot);
        let started = std::thread::Builder::new().name("ladder-canary".into()).spawn(move || {
            let call = lock(&mine).take();
            if let Some(call) = call
                && let Err(ended) = core.perform(Work::Call(call), None)
            {
                tracing::debug!("while answering a canary: {ended}");
            }
            core.router().own_threads -= 1;
        });
        if let Err(error) = started {
            tracing::error!("no thread to answer a canary with: {error}");
            self.router().own_threads -= 1;
            let call = lock(&slot).take();
            if let Some(call) = call {
                self.refuse(call, "busy", "no thread could be started".into());
            }
        }
    }

    /// Ends a call of ours; what came for it and was not looked at is given back.
    pub(crate) fn finish(&self, id: u64) {
        let left = self.router().finish(id);
        for event in left {
            match event {
                Event::Returned { attempt, parcels, .. } => {
                    self.send_back(Stale { id, attempt, parcels });
                }
                Event::Nested(call) => self.abandon(*call),
                _ => {}
            }
        }
    }

    /// Has a message sent by the thread that sends receipts: whoever reads must not wait for a peer
    /// that does not. Gives the leases of some parcels back with it.
    pub(crate) fn post(&self, message: Message, parcels: &[ParcelWire]) {
        parcels.iter().for_each(|parcel| self.sessions.unopened(parcel));
        let posted = self.returns.post(message, leases_of(parcels));
        self.check_posted(posted);
    }

    /// Says that a message was taken, with the next frame or soon; gives the leases of parcels back
    /// with it.
    pub(crate) fn accept(&self, accepted: Accepted, parcels: &[ParcelWire]) {
        parcels.iter().for_each(|parcel| self.sessions.unopened(parcel));
        let posted = self.returns.accept(accepted, leases_of(parcels));
        self.check_posted(posted);
    }

    fn check_posted(&self, posted: bool) {
        if !posted {
            let detail = "the peer asks for more messages than it reads";
            self.break_off(Ended::Broken(Fault::new(Reason::OverCap, detail)));
        }
    }

    /// Answers a call that is nested in one of ours which is over.
    pub(crate) fn abandon(&self, call: Incoming) {
        self.refuse(call, "abandoned", "the call that it belongs to was given up".into());
    }

    /// Answers a call with an error, unopened.
    pub(crate) fn refuse(&self, call: Incoming, code: &str, text: String) {
        tracing::warn!(method = call.method, code, "a call was refused: {text}");
        let message = Message::Error { id: call.id, code: code.to_owned(), text };
        self.post(message, &call.parcels);
    }

    /// One message, and what rode it.
    fn receive(&self, deadline: Option<Instant>) -> Result<Received, NotYet> {
        let frame = self.link.receive(deadline).map_err(|error| match error {
            LinkError::Deadline => NotYet::Deadline,
            other => NotYet::Ended(other.into()),
        })?;
        if !frame.handles.is_empty() {
            reached_of(|| !self.proven.load(Ordering::Relaxed), "descriptors-received");
        }
        let broken = |fault| {
            self.link.close();
            NotYet::Ended(Ended::Broken(fault))
        };
        let (message, riders) = wire::decode(&frame.json).map_err(broken)?;
        let Riders { receipts, accepted, notices } = riders;
        if !accepted.is_empty() {
            reached_of(|| !self.proven.load(Ordering::Relaxed), "accept-received");
        }
        for (rung, notice) in notices {
            match self.sessions.carrier(&rung) {
                Some(carrier) => carrier.noticed(notice).map_err(broken)?,
                None => return Err(broken(Fault::new(Reason::UnknownRung, rung.as_str()))),
            }
        }
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
            reached_of(|| !self.proven.load(Ordering::Relaxed), "receipt-received");
            let receipt = Receipt::join(wire, &mut of_receipts).map_err(broken)?;
            let owner = self.keeper.release(&receipt.rung, receipt.lease);
            if owner.is_none() {
                let (rung, lease) = (&receipt.rung, receipt.lease);
                tracing::warn!(%rung, %lease, "a receipt for a lease that is not out");
            }
            if let Some(carrier) = self.sessions.carrier(&receipt.rung) {
                carrier.released(receipt);
            }
            ended.extend(owner);
        }
        if handles.len() < parcels || !of_receipts.is_empty() {
            return Err(broken(Fault::new(
                Reason::WrongHandles,
                format!(
                    "{} descriptors came, the parcels need {parcels}",
                    handles.len() + of_receipts.len()
                ),
            )));
        }
        Ok(Received { message, handles, owners: ended, accepted })
    }

    /// Gives the leases of a message back unopened, and lets its sender forget it.
    fn send_back(&self, stale: Stale) {
        tracing::debug!(call = stale.id, "an answer came too late and was dropped");
        let accepted = Accepted { of: Of::Return, id: stale.id, attempt: stale.attempt };
        self.accept(accepted, &stale.parcels);
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
        let answers = match message {
            Message::Return { id, .. } => Some(*id),
            _ => None,
        };
        self.write(message, self.take_due(answers), &mut handles, deadline)?;
        if let Message::Call { parcels, .. } | Message::Return { parcels, .. } = message {
            for parcel in parcels {
                let (rung, lease) = parcel.lease();
                if let Some(carrier) = self.sessions.carrier(rung) {
                    carrier.sent(lease);
                }
            }
        }
        Ok(())
    }

    /// What is due, but for leases that cannot go home yet: they are due again soon.
    fn take_due(&self, answers: Option<u64>) -> Due {
        let mut due = self.returns.take(answers);
        let is_later = |(rung, lease): &mut (RungId, LeaseId)| {
            self.sessions.carrier(rung).is_some_and(|carrier| !carrier.is_settled(*lease))
        };
        let later = due.leases.extract_if(.., is_later).collect();
        self.returns.untake(Due { leases: later, ..Due::default() });
        due
    }

    /// Sends a message with what is due; what rode a frame that was not sent is due again, as it was: a
    /// rung says what it has to say once.
    fn write(
        &self,
        message: &Message,
        mut due: Due,
        handles: &mut Vec<Handle>,
        deadline: Option<Instant>,
    ) -> Result<(), NotSent> {
        let sent = self.write_with(message, &mut due, handles, deadline);
        match sent {
            // The peer gets the rest of it.
            Ok(()) | Err(NotSent::Begun) => {}
            Err(_) => self.returns.untake(due),
        }
        sent
    }

    fn write_with(
        &self,
        message: &Message,
        due: &mut Due,
        handles: &mut Vec<Handle>,
        deadline: Option<Instant>,
    ) -> Result<(), NotSent> {
        let over = |fault: Fault| NotSent::OverCap(fault.to_string());
        for (rung, lease) in due.leases.drain(..) {
            let Some(carrier) = self.sessions.carrier(&rung) else {
                continue;
            };
            let (wire, some) = carrier.receipt(lease).split().map_err(over)?;
            due.riders.receipts.push(wire);
            due.handles.extend(some);
        }
        if std::mem::take(&mut due.notices) {
            due.riders.notices.extend(self.sessions.notices());
        }
        let json = wire::encode(message, &due.riders).map_err(over)?;
        let of_message = handles.len();
        handles.append(&mut due.handles);
        let sent = self.link.send(&json, handles, deadline);
        due.handles = handles.split_off(of_message);
        sent.map_err(|error| match error {
            LinkError::Deadline => NotSent::Deadline,
            LinkError::Begun => NotSent::Begun,
            LinkError::OverCap(text) => NotSent::OverCap(text),
            // Nothing of it is out, and the link is as it was: too many descriptors on their way, say.
            LinkError::System(call, error) => NotSent::OverCap(format!("{call} failed: {error}")),
            other => NotSent::Ended(other.into()),
        })
    }

    /// Keeps the owners of a packed message (L1): before it is sent, so that a receipt finds them.
    /// Where the peer would be lent more than the bounds allow (L5), refuses or waits, by their policy.
    pub(crate) fn keep(
        self: &Arc<Self>,
        packing: &mut Packing,
        own: bool,
        deadline: Option<Instant>,
    ) -> Result<Vec<(RungId, LeaseId)>, NotKept> {
        let mut owners = std::mem::take(&mut packing.owners);
        let leases: Vec<_> =
            owners.iter().map(|(rung, lease, ..)| (rung.clone(), *lease)).collect();
        let bytes = owners.iter().map(|(_, _, bytes, _)| bytes).sum();
        let error = loop {
            let text;
            (text, owners) = match self.keeper.keep_all(owners, own, self.bounds) {
                Ok(()) => return Ok(leases),
                Err(refused) => refused,
            };
            let room = || self.keeper.has_room(leases.len(), bytes, self.bounds);
            if own || self.bounds.policy == AtBound::Refuse || !room().1 {
                break NotKept::OverBound(text);
            }
            // Reading meanwhile, since what makes room is read; and looking again soon, since room is also
            // made by a message of ours that is not sent after all.
            let soon = Instant::now().checked_add(LOOK_AGAIN);
            let until = deadline.into_iter().chain(soon).min();
            match self.wait_for(until, |_| room().0.then_some(())) {
                Err(NotYet::Deadline)
                    if deadline.is_none_or(|deadline| Instant::now() < deadline) => {}
                Err(not_yet) => break NotKept::NotYet(not_yet),
                Ok(()) => {}
            }
        };
        for (rung, lease, _, owner) in owners {
            self.sessions.take_back(&rung, lease, Some(owner));
        }
        Err(error)
    }

    /// Ends leases that were never sent.
    pub(crate) fn unkeep(&self, leases: Vec<(RungId, LeaseId)>) {
        for (rung, lease) in leases {
            let owner = self.keeper.release(&rung, lease);
            self.sessions.take_back(&rung, lease, owner);
        }
    }

    /// Sends receipts that nothing has taken along, and what readers have posted; until the channel is
    /// closed.
    pub(crate) fn flush_receipts(&self) {
        let look_around = (self.bounds.alarm / 2).max(Duration::from_millis(10));
        while let Some(posted) = self.returns.overdue(look_around) {
            self.keeper.sound_alarms(self.bounds.alarm);
            let mut ended = false;
            let mut note = |sent| ended |= matches!(sent, Err(NotSent::Ended(_)));
            for message in posted {
                note(self.send(&message, Vec::new(), None));
            }
            note(self.say_what_is_due(None));
            if ended {
                // Without receipts the peer would keep everything for ever. After a goodbye nothing can
                // be sent, and what the peer still says is read.
                if !self.router().closing {
                    self.link.close();
                }
                return;
            }
            reached("receipts-sent");
        }
    }

    /// Sends what waits for a frame to ride on, alone.
    pub(crate) fn say_what_is_due(&self, deadline: Option<Instant>) -> Result<(), NotSent> {
        let due = self.take_due(None);
        if due.is_empty() {
            return Ok(());
        }
        self.write(&Message::More, due, &mut Vec::new(), deadline)
    }

    /// Ends the channel for a reason of this side's.
    pub(crate) fn break_off(&self, why: Ended) {
        self.router().ended.get_or_insert(why);
        self.link.close();
        self.changed.notify_all();
        self.unread.notify_all();
    }

    /// Ends the channel for this side, so that the peer sees the end of the stream.
    pub(crate) fn close(&self) {
        reached("closing");
        self.router().ended.get_or_insert(Ended::Closed);
        self.returns.close();
        self.link.close();
        self.changed.notify_all();
        self.unread.notify_all();
    }

    /// Nothing more is said, and the peer sees so; what it says is still heard.
    pub(crate) fn say_goodbye(&self) {
        self.router().closing = true;
        // What nothing took along yet; a peer that does not read has no use for it.
        let _ = self.say_what_is_due(Instant::now().checked_add(FAREWELL));
        self.link.close_for_sending();
        self.changed.notify_all();
        self.unread.notify_all();
    }

    /// Once the peer's process has exited: whether the stream has ended too, and nobody else holds its
    /// end. Only with both signs may what it was lent be written again (L3); with one alone, a child
    /// of it that has the socket, or it itself without it, may still look.
    pub(crate) fn note_exit(&self) {
        if self.link.has_ended() {
            self.sessions.peer_gone();
        }
    }
}

fn leases_of(parcels: &[ParcelWire]) -> Vec<(RungId, LeaseId)> {
    let lease = |parcel: &ParcelWire| {
        let (rung, lease) = parcel.lease();
        (rung.clone(), lease)
    };
    parcels.iter().map(lease).collect()
}

/// An answer that nobody waits for.
struct Stale {
    id: u64,
    attempt: u32,
    parcels: Vec<ParcelWire>,
}

/// What has to be done about a message outside the lock.
#[derive(Default)]
struct Effects {
    stale: Option<Stale>,
    accepted: Vec<Answer>,
    /// Of the leases that came home.
    owners: Vec<Owner>,
    spawn: bool,
    /// One of the channel's own calls, for a thread of its own.
    own: Option<Incoming>,
    refused: Option<Refused>,
}

/// Puts a message where it belongs.
fn dispatch(
    router: &mut Router,
    core: &Core,
    message: Message,
    handles: VecDeque<Handle>,
    effects: &mut Effects,
) {
    match message {
        Message::Call { id, attempt, root, method, parcels, value } => {
            // The channel's own calls it answers itself; nothing of a user's before all is proven.
            let own = own::is_own(&method);
            let unproven = !own && !core.proven.load(Ordering::Acquire);
            let root = root.unwrap_or(Root { side: core.role.other(), id });
            let call = Incoming { id, attempt, root, method, parcels, value, handles };
            let ours = router.roots.get(&root);
            let waits = ours.and_then(|calls| Some((calls.len(), *calls.last()?)));
            match waits {
                _ if unproven => {
                    let text = "nothing is proven yet".into();
                    effects.refused = Some(Refused { call, code: "unproven", text });
                }
                Some((depth, _)) if depth > NESTED => {
                    let text = format!("calls are nested more than {NESTED} deep");
                    effects.refused = Some(Refused { call, code: "too-deep", text });
                }
                Some((_, ours)) => {
                    let event = Event::Nested(Box::new(call));
                    if let Some(Event::Nested(call)) = router.deliver(ours, event) {
                        let text = "more calls at once than anybody could make".into();
                        effects.refused = Some(Refused { call: *call, code: "busy", text });
                    }
                }
                None => {
                    let has_handler = core.handler.get().is_some();
                    if own && !has_handler && !router.pool.has_time() {
                        if router.own_threads < OWN_THREADS {
                            router.own_threads += 1;
                            effects.own = Some(call);
                        } else {
                            let text = "enough canaries are being answered".into();
                            effects.refused = Some(Refused { call, code: "busy", text });
                        }
                        return;
                    }
                    (effects.spawn, effects.refused) =
                        router.pool.offer(call, has_handler, core.role);
                }
            }
        }
        Message::Return { id, attempt, parcels, value } => {
            let event = Event::Returned { attempt, parcels, value, handles };
            if let Some(Event::Returned { attempt, parcels, .. }) = router.deliver(id, event) {
                core.was_answered_late();
                effects.stale = Some(Stale { id, attempt, parcels });
            }
        }
        // What is said about a call that is over says nothing any more.
        Message::Error { id, code, text } => {
            if router.deliver(id, Event::Failed { code, text }).is_some() {
                core.was_answered_late();
            }
        }
        Message::Refuse { of: Of::Call, id, attempt, storage, reason, text } => {
            drop(router.deliver(id, Event::Refused { attempt, storage, code: reason, text }));
        }
        Message::Refuse { of: Of::Return, id, attempt, storage, reason, text } => {
            // Only of an answer that is out, so there are never more of these than answers.
            if let Some(answer) = router.take_answer(id, attempt) {
                let code = reason;
                let work = Work::AnswerRefused { id, answer, storage, code, text };
                effects.spawn = router.pool.push(work);
            }
        }
        // A second hello says nothing that the first did not; riders are done with already.
        Message::Hello(_) | Message::More => {}
    }
}
