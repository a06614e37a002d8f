//! Events for the other process, used again and again: making one costs more than recording it.
//!
//! [`Exchange`] is one session's: a *ready-event* goes with what is lent, behind what its owner has enqueued; a
//! *done-event* comes with its receipt, behind what the peer has enqueued.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use cuda::{Context, Event, EventHandle, Stream};
use rung::{Device, Fault, Reason, Refusal};
use serde::{Deserialize, Serialize};

use crate::lock;
use crate::offer::Pair;

/// Events of one direction of a session, at most: beyond, whoever sends waits instead. As many as the driver is known
/// to bear.
const EVENTS: usize = 1000;

/// An event in a parcel or a receipt: its number in the session, and the driver's handle.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EventWire(pub(crate) u64, String);

/// An event of ours that the other process waits for.
#[derive(Debug, Clone)]
pub struct Ours {
    number: u64,
    device: Device,
    event: Arc<Event>,
}

impl Ours {
    /// As in a parcel.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn wire(&self) -> Result<EventWire, Refusal> {
        Ok(EventWire(self.number, to_text(&self.event.handle()?.0)))
    }
}

/// 64 bytes as text.
#[must_use]
pub fn to_text(bytes: &[u8; 64]) -> String {
    BASE64.encode(bytes)
}

/// 64 bytes from text.
///
/// # Errors
///
/// [`Reason::BadMetadata`] for anything else.
pub fn from_text(text: &str) -> Result<[u8; 64], Fault> {
    let bad = || Fault::new(Reason::BadMetadata, "no handle of 64 bytes");
    BASE64.decode(text).ok().and_then(|bytes| bytes.try_into().ok()).ok_or_else(bad)
}

/// Events that this side makes.
#[derive(Debug, Default)]
struct Pool {
    free: HashMap<Device, Vec<Ours>>,
    /// There are so many.
    made: usize,
    /// The last number: none is ever used twice, since the other side keeps what it opened.
    last: u64,
}

impl Pool {
    /// A free event, or a new one, if there may be one more: made by the caller, outside all locks.
    fn take(&mut self, device: Device) -> Option<Result<Ours, u64>> {
        if let Some(free) = self.free.get_mut(&device).and_then(Vec::pop) {
            return Some(Ok(free));
        }
        if self.made >= EVENTS {
            return None;
        }
        self.made += 1;
        self.last += 1;
        Some(Err(self.last))
    }

    /// Nothing is lent any more: those behind which nothing is left go, and with them what they hold.
    fn shrink(&mut self) -> Vec<Ours> {
        let (done, left): (Vec<Ours>, Vec<Ours>) = self
            .free
            .drain()
            .flat_map(|(_, free)| free)
            .partition(|ours| ours.event.is_done().unwrap_or(false));
        self.made -= done.len();
        left.into_iter().for_each(|ours| self.give(ours));
        done
    }

    /// It is not needed any more: what it is recorded behind next is another matter.
    fn give(&mut self, ours: Ours) {
        self.free.entry(ours.device).or_default().push(ours);
    }

    /// One that was not made after all.
    fn not_made(&mut self) {
        self.made -= 1;
    }
}

/// Events that the other side made, by their numbers there.
#[derive(Debug, Default)]
struct Theirs {
    known: HashMap<u64, Arc<Event>>,
}

impl Theirs {
    /// One that is known.
    fn get(&self, number: u64) -> Option<Arc<Event>> {
        self.known.get(&number).cloned()
    }

    /// Keeps one that was opened; no more than the other side says it makes.
    fn keep(&mut self, number: u64, event: &Arc<Event>) {
        if self.known.len() >= EVENTS {
            // Those that are gone there are among them; what is needed again is opened again.
            self.known.clear();
        }
        self.known.insert(number, Arc::clone(event));
    }

    /// Nothing of the other side's is kept any more.
    fn forget(&mut self) -> HashMap<u64, Arc<Event>> {
        std::mem::take(&mut self.known)
    }
}

impl EventWire {
    /// For whoever gets it from another than made it: numbers are between two.
    #[must_use]
    pub fn of_a_third(&self) -> Self {
        Self(0, self.1.clone())
    }

    /// Opens it, for a device.
    fn open(&self, context: &Arc<Context>) -> Result<Arc<Event>, Fault> {
        let handle = EventHandle(from_text(&self.1)?);
        Ok(Arc::new(Event::open(context, handle)?))
    }
}

/// Done-events of one receipt, at most: as many streams as used one lease; for more of them its receipt waits.
const DONE: usize = 64;

/// What is left to do before a lease's owner may go on.
#[derive(Debug)]
pub struct Unfinished(Left);

#[derive(Debug)]
enum Left {
    Event(Ours),
    /// The peer cannot wait for it, so its receipt does.
    Stream(Stream),
}

impl Unfinished {
    /// Whether a receipt that speaks of it waits for nothing.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        match &self.0 {
            Left::Event(_) => true,
            Left::Stream(stream) => stream.is_done().unwrap_or(true),
        }
    }
}

/// The events of one session: ours and the peer's, in both directions.
#[derive(Debug, Default)]
pub struct Exchange {
    /// Behind what is lent.
    ready: Mutex<Pool>,
    their_ready: Mutex<Theirs>,
    /// Behind what was done to what the peer lent.
    done: Mutex<Pool>,
    their_done: Mutex<Theirs>,
    /// Done-events of ours that the peer has been told of and has not waited for.
    flying: Mutex<HashMap<u64, Ours>>,
    /// Done-events of the peer's that are waited for, and of which it is to be told.
    waited: Mutex<Vec<u64>>,
}

/// An event of a pool behind what is enqueued on a stream; none where the pool is out of events.
fn recorded(pool: &Mutex<Pool>, stream: &Stream) -> Result<Option<Ours>, Refusal> {
    let device = stream.device();
    let taken = lock(pool).take(device);
    let ours = match taken {
        None => return Ok(None),
        Some(Ok(ours)) => ours,
        Some(Err(number)) => match Event::shared(stream.context()) {
            Ok(event) => Ours { number, device, event: Arc::new(event) },
            Err(refusal) => {
                lock(pool).not_made();
                tracing::debug!("no event for another process: {refusal}");
                return Ok(None);
            }
        },
    };
    if let Err(refusal) = ours.event.record(stream) {
        lock(pool).give(ours);
        return Err(refusal);
    }
    Ok(Some(ours))
}

fn opened(
    table: &Mutex<Theirs>,
    wire: &EventWire,
    context: &Arc<Context>,
) -> Result<Arc<Event>, Fault> {
    // One that a third process made is opened each time.
    if wire.0 == 0 {
        return wire.open(context);
    }
    let known = lock(table).get(wire.0);
    if let Some(event) = known {
        return Ok(event);
    }
    let event = wire.open(context)?;
    lock(table).keep(wire.0, &event);
    Ok(event)
}

impl Exchange {
    /// An event behind everything that is enqueued on a stream, for the peer to wait for; none where nothing is, or
    /// where this thread has waited instead.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn ready(&self, pair: &Pair, order: &Stream) -> Result<Option<Ours>, Refusal> {
        if order.is_done()? {
            return Ok(None);
        }
        if pair.has_events(order.device())
            && let Some(ours) = recorded(&self.ready, order)?
        {
            return Ok(Some(ours));
        }
        order.synchronize().map(|()| None)
    }

    /// A ready-event that the peer does not wait for any more.
    pub fn give_back(&self, ready: Ours) {
        lock(&self.ready).give(ready);
    }

    /// A lease has ended, with this ready-event.
    pub fn lease_ended(&self, ready: Option<Ours>, peer_is_gone: bool) {
        match ready {
            Some(ready) if peer_is_gone => self.give_back(ready),
            // A peer that is there may yet wait for it.
            Some(ready) => std::mem::forget(ready),
            None => {}
        }
    }

    /// A ready-event of the peer's, opened once.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn their_ready(
        &self,
        wire: &EventWire,
        context: &Arc<Context>,
    ) -> Result<Arc<Event>, Fault> {
        opened(&self.their_ready, wire, context)
    }

    /// Streams used what was lent: what still runs there. `may_wait`: whether the peer can wait for it.
    #[must_use]
    pub fn used(&self, pair: &Pair, streams: Vec<Stream>, may_wait: bool) -> Vec<Unfinished> {
        let mut unfinished = Vec::new();
        for stream in streams.into_iter().filter(|stream| !stream.is_done().unwrap_or(false)) {
            let may_wait = may_wait && unfinished.len() < DONE && pair.has_events(stream.device());
            let event = if may_wait { recorded(&self.done, &stream) } else { Ok(None) };
            unfinished.push(Unfinished(match event {
                Ok(Some(ours)) => Left::Event(ours),
                _ => Left::Stream(stream),
            }));
        }
        unfinished
    }

    /// What a receipt says of what is left: a done-event, or nothing, after it has waited.
    pub fn say(&self, unfinished: Unfinished) -> Option<EventWire> {
        let waited = match unfinished.0 {
            Left::Event(ours) => match (ours.event.is_done(), ours.wire()) {
                (Ok(false), Ok(wire)) => {
                    lock(&self.flying).insert(ours.number, ours);
                    return Some(wire);
                }
                _ => {
                    let waited = ours.event.synchronize();
                    lock(&self.done).give(ours);
                    waited
                }
            },
            // Done, by the time that it is asked for.
            Left::Stream(stream) => stream.synchronize(),
        };
        if let Err(refusal) = waited {
            // Work that failed does not run any more.
            tracing::warn!("work on memory that is let go failed: {refusal}");
        }
        None
    }

    /// Has a stream wait for the peer's done-events. Whether there were any: the peer is to be told.
    ///
    /// # Errors
    ///
    /// [`Reason::OverCap`], or what the driver answers: then nobody here can tell when the peer is done.
    pub fn wait_for(&self, done: &[EventWire], order: &Stream) -> Result<bool, Fault> {
        if done.len() > DONE {
            return Err(Fault::new(Reason::OverCap, format!("{} events", done.len())));
        }
        for wire in done {
            let event = opened(&self.their_done, wire, order.context())?;
            order.wait(&event)?;
            lock(&self.waited).push(wire.0);
        }
        Ok(!done.is_empty())
    }

    /// Numbers of the peer's done-events that are waited for: it may use them again.
    #[must_use]
    pub fn take_waited(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.waited))
    }

    /// The peer waits for these of ours.
    pub fn waited(&self, numbers: Vec<u64>) {
        let mut flying = lock(&self.flying);
        let ours: Vec<Ours> = numbers.iter().filter_map(|number| flying.remove(number)).collect();
        drop(flying);
        let mut done = lock(&self.done);
        ours.into_iter().for_each(|ours| done.give(ours));
    }

    /// Whether the peer has been told of events that it has not waited for.
    #[must_use]
    pub fn is_flying(&self) -> bool {
        !lock(&self.flying).is_empty()
    }

    /// Nothing is lent any more: events would hold a context for nothing.
    pub fn nothing_lent(&self) {
        let gone = lock(&self.ready).shrink();
        let theirs = lock(&self.their_done).forget();
        drop((gone, theirs));
    }

    /// The same, of what was lent to this side.
    pub fn nothing_borrowed(&self) {
        if self.is_flying() {
            return;
        }
        let gone = lock(&self.done).shrink();
        let theirs = lock(&self.their_ready).forget();
        drop((gone, theirs));
    }

    /// The session ends, and the peer may be there and wait for what was recorded: those events stay for good.
    pub fn leave(&self) {
        self.nothing_lent();
        drop(lock(&self.done).shrink());
        let ready = std::mem::take(&mut *lock(&self.ready));
        let done = std::mem::take(&mut *lock(&self.done));
        let flying = std::mem::take(&mut *lock(&self.flying));
        std::mem::forget((ready, done, flying));
    }
}

/// What the owner of memory has yet to do to it, as its borrower sees it.
#[derive(Debug, Default)]
pub struct Ready {
    wire: Option<EventWire>,
    opened: OnceLock<Arc<Event>>,
    /// That is done: its event is not looked at again, since its owner may be gone by then.
    is_done: AtomicBool,
}

impl Ready {
    /// As a parcel says.
    #[must_use]
    pub fn new(wire: Option<EventWire>) -> Self {
        Self { wire, ..Self::default() }
    }

    /// As it is said to whom the memory is lent on.
    #[must_use]
    pub fn lent_on(&self) -> Option<EventWire> {
        self.wire.as_ref().map(EventWire::of_a_third)
    }

    /// Its owner's event, opened once.
    ///
    /// # Errors
    ///
    /// What `exchange` answers, which is the session's, or why there is none any more.
    pub fn event(
        &self,
        exchange: impl FnOnce(&EventWire) -> Result<Arc<Event>, Fault>,
    ) -> Result<Option<Arc<Event>>, Fault> {
        let Some(wire) = &self.wire else { return Ok(None) };
        let event = match self.opened.get() {
            Some(event) => event,
            None => {
                let event = exchange(wire)?;
                self.opened.get_or_init(|| event)
            }
        };
        Ok(Some(Arc::clone(event)))
    }

    /// What is enqueued on a stream from now on comes after what the owner has enqueued.
    ///
    /// # Errors
    ///
    /// [`Reason::OwnerGone`] where that will never be done, and those of [`Self::event`].
    pub fn order(
        &self,
        stream: &Stream,
        owner_is_gone: impl FnOnce() -> bool,
        exchange: impl FnOnce(&EventWire) -> Result<Arc<Event>, Fault>,
    ) -> Result<(), Fault> {
        if self.is_done.load(Ordering::Acquire) {
            return Ok(());
        }
        let Some(event) = self.event(exchange)? else { return Ok(()) };
        if event.is_done()? {
            self.is_done.store(true, Ordering::Release);
            return Ok(());
        }
        // Of an owner that is gone, what was not done may never be.
        if owner_is_gone() {
            return Err(Reason::OwnerGone.into());
        }
        Ok(stream.wait(&event)?)
    }
}

/// Streams that used something, each once.
#[derive(Debug, Default)]
pub struct Streams(Mutex<Vec<Stream>>);

impl Streams {
    /// Work was enqueued there.
    pub fn note(&self, stream: &Stream) {
        let mut streams = lock(&self.0);
        if streams.iter().any(|known| known.is(stream)) {
            return;
        }
        if streams.len() >= 8 {
            streams.retain(|known| !known.is_done().unwrap_or(false));
        }
        streams.push(stream.clone());
    }

    /// Whether nothing runs there any more.
    #[must_use]
    pub fn are_done(&self) -> bool {
        let mut streams = lock(&self.0);
        streams.retain(|stream| !stream.is_done().unwrap_or(true));
        streams.is_empty()
    }

    /// All of them.
    #[must_use]
    pub fn take(&self) -> Vec<Stream> {
        std::mem::take(&mut *lock(&self.0))
    }

    /// Waits for what is enqueued there.
    pub fn wait(&self) {
        for stream in self.take() {
            if let Err(refusal) = stream.synchronize() {
                tracing::warn!("work on memory that is let go failed: {refusal}");
            }
        }
    }
}
