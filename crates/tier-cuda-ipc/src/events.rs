//! Events for the other process, used again and again: making one costs more than recording it.

use std::collections::HashMap;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use cuda::{Context, Event, EventHandle};
use rung::{Device, Fault, Reason, Refusal};
use serde::{Deserialize, Serialize};

/// Events of one direction of a session, at most: beyond, whoever sends waits instead. As many as the driver is known
/// to bear.
pub(crate) const EVENTS: usize = 1000;

/// An event in a parcel or a receipt: its number in the session, and the driver's handle.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct EventWire(pub(crate) u64, String);

/// An event of ours that the other process waits for.
#[derive(Debug, Clone)]
pub(crate) struct Ours {
    pub(crate) number: u64,
    pub(crate) device: Device,
    pub(crate) event: Arc<Event>,
}

impl Ours {
    pub(crate) fn wire(&self) -> Result<EventWire, Refusal> {
        Ok(EventWire(self.number, to_text(&self.event.handle()?.0)))
    }
}

/// 64 bytes as text.
pub(crate) fn to_text(bytes: &[u8; 64]) -> String {
    BASE64.encode(bytes)
}

/// 64 bytes from text.
pub(crate) fn from_text(text: &str) -> Result<[u8; 64], Fault> {
    let bad = || Fault::new(Reason::BadMetadata, "no handle of 64 bytes");
    BASE64.decode(text).ok().and_then(|bytes| bytes.try_into().ok()).ok_or_else(bad)
}

/// Events that this side makes.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: HashMap<Device, Vec<Ours>>,
    /// There are so many.
    made: usize,
    /// The last number: none is ever used twice, since the other side keeps what it opened.
    last: u64,
}

impl Pool {
    /// A free event, or a new one, if there may be one more: made by the caller, outside all locks.
    pub(crate) fn take(&mut self, device: Device) -> Option<Result<Ours, u64>> {
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
    pub(crate) fn shrink(&mut self) -> Vec<Ours> {
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
    pub(crate) fn give(&mut self, ours: Ours) {
        self.free.entry(ours.device).or_default().push(ours);
    }

    /// One that was not made after all.
    pub(crate) fn not_made(&mut self) {
        self.made -= 1;
    }
}

/// Events that the other side made, by their numbers there.
#[derive(Debug, Default)]
pub(crate) struct Theirs {
    known: HashMap<u64, Arc<Event>>,
}

impl Theirs {
    /// One that is known.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<Event>> {
        self.known.get(&number).cloned()
    }

    /// Keeps one that was opened; no more than the other side says it makes.
    pub(crate) fn keep(&mut self, number: u64, event: &Arc<Event>) {
        if self.known.len() >= EVENTS {
            // Those that are gone there are among them; what is needed again is opened again.
            self.known.clear();
        }
        self.known.insert(number, Arc::clone(event));
    }

    /// Nothing of the other side's is kept any more.
    pub(crate) fn forget(&mut self) -> HashMap<u64, Arc<Event>> {
        std::mem::take(&mut self.known)
    }
}

impl EventWire {
    /// For whoever gets it from another than made it: numbers are between two.
    pub(crate) fn of_a_third(&self) -> Self {
        Self(0, self.1.clone())
    }

    /// Opens it, for a device.
    pub(crate) fn open(&self, context: &Arc<Context>) -> Result<Arc<Event>, Fault> {
        let handle = EventHandle(from_text(&self.1)?);
        Ok(Arc::new(Event::open(context, handle)?))
    }
}
