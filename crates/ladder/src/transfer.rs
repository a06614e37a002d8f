//! What calls and answers share: taking what came, and what to try after a refusal.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rung::{Fault, Handle, ParcelWire, Reason, RungId};

use crate::core::{Core, NotSent};
use crate::error::Ended;
use crate::fail::reached;
use crate::pack::{Blocks, Packing};
use crate::route::{Leg, Route, What};
use crate::unpack::{self, Entry, NotTaken};
use crate::wire::{Accepted, Message, Of};

/// Attempts at sending one value: as it is, rung by rung down, and once in fresh blocks.
pub(crate) const ATTEMPTS: u32 = 16;

#[derive(Debug)]
pub(crate) enum TakeError {
    Refused(Fault),
    Deadline,
    Ended(Ended),
}

impl Core {
    /// Imports what came, and tells the sender that it was accepted, soon, or that it was not, at once.
    pub(crate) fn take(
        &self,
        of: Of,
        id: u64,
        attempt: u32,
        parcels: Vec<ParcelWire>,
        handles: &mut VecDeque<Handle>,
        deadline: Option<Instant>,
    ) -> Result<Vec<Entry>, TakeError> {
        let ended = |error| match error {
            NotSent::Ended(ended) => TakeError::Ended(ended),
            NotSent::Deadline | NotSent::Begun => TakeError::Deadline,
            NotSent::OverCap(text) => {
                TakeError::Ended(Ended::Broken(Fault::new(Reason::OverCap, text)))
            }
        };
        match unpack::import(&self.sessions, &self.returns, parcels, handles) {
            Ok(table) => {
                reached("call-imported");
                // It rides the next frame, an answer to this very call perhaps, or goes alone soon: until
                // then the sender keeps what it sent.
                self.accept(Accepted { of, id, attempt }, &[]);
                Ok(table)
            }
            Err(NotTaken::Storage(storage, fault)) => {
                self.counters.refused();
                let message = Message::Refuse {
                    of,
                    id,
                    attempt,
                    storage,
                    reason: fault.reason().code().to_owned(),
                    // The reason's own text: a detail might tell the peer of this process.
                    text: fault.reason().text().to_owned(),
                };
                match self.send(&message, Vec::new(), deadline) {
                    Err(NotSent::Deadline) => self.post(message, &[]),
                    sent => sent.map_err(ended)?,
                }
                Err(TakeError::Refused(fault))
            }
            Err(NotTaken::Broken(fault)) => {
                self.link.close();
                Err(TakeError::Ended(Ended::Broken(fault)))
            }
        }
    }
}

impl Core {
    /// Counts what was sent, and says so where a large leaf rode a low rung.
    pub(crate) fn count_sent(&self, route: &Route) {
        self.counters.sent(route);
        let large = self.warn_over.load(Ordering::Relaxed);
        // What lies in host memory can all ride the rung that moves host memory, but for what has no memory
        // of its own and had to be written first.
        let low = |leg: &&Leg| leg.bytes >= large && matches!(leg.what, What::Plain(_));
        for leg in route.legs.iter().filter(low) {
            let Leg { path, bytes, rung, .. } = leg;
            tracing::warn!(path = &**path, bytes, %rung, "a large {} rode a low rung: send it as a tensor", leg.what);
        }
    }
}

/// What each storage of a message rides, in the order of the table.
pub(crate) fn rungs_of(packing: &Packing) -> Vec<RungId> {
    packing.parcels.iter().map(|parcel| parcel.lease().0.clone()).collect()
}

/// What to try after a NACK, loudly; false where nothing is left.
pub(crate) fn next_blocks(
    core: &Core,
    blocks: &mut Blocks,
    rungs: &[RungId],
    storage: usize,
    code: &str,
    text: &str,
) -> bool {
    let Some(rung) = rungs.get(storage) else {
        return false;
    };
    if code == Reason::UnknownBlock.code() {
        // The rung heard so with the receipt; this time it sends all there is.
        tracing::debug!(%rung, "the peer does not know a block");
        return true;
    }
    if core.sessions.demote(rung) {
        tracing::warn!(%rung, code, "the peer could not take a storage and the rung is demoted: {text}");
        return true;
    }
    // Nothing below it: a fresh block, once.
    if *blocks == Blocks::Fresh {
        return false;
    }
    tracing::warn!(%rung, code, "the peer could not take a storage, trying a fresh block: {text}");
    *blocks = Blocks::Fresh;
    true
}
