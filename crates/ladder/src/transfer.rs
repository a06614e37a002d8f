//! What calls and answers share: taking what came, and what to try after a refusal.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rung::{Fault, Handle, ParcelWire, Reason, Refusal, RungId, Unsendable, Value};

use crate::core::{Core, NotSent, is_own_id};
use crate::error::Ended;
use crate::fail::reached_of;
use crate::ladder::{MINE, Via, Way};
use crate::pack::{Blocks, How, Names, NotPacked, Packing, pack};
use crate::route::{Leg, Route, What};
use crate::unpack::{self, NotRead, NotTaken, Read};
use crate::wire::{Accepted, Message, Of};

/// Attempts at sending one value: as it is, rung by rung down, and once in fresh blocks.
pub(crate) const ATTEMPTS: u32 = 16;

#[derive(Debug)]
pub(crate) enum TakeError {
    /// What came on this rung.
    Refused(RungId, Fault),
    Deadline,
    Ended(Ended),
}

impl Core {
    /// Imports and reads what came, and tells the sender that it was accepted, soon, or that it was not, at
    /// once. What is malformed is accepted all the same: sent again it would be no better.
    pub(crate) fn take(
        &self,
        (of, id, attempt): (Of, u64, u32),
        parcels: Vec<ParcelWire>,
        handles: &mut VecDeque<Handle>,
        json: &str,
        deadline: Option<Instant>,
    ) -> Result<Result<Read, Fault>, TakeError> {
        let ended = |error| match error {
            NotSent::Ended(ended) => TakeError::Ended(ended),
            NotSent::Deadline | NotSent::Begun => TakeError::Deadline,
            NotSent::OverCap(text) => {
                TakeError::Ended(Ended::Broken(Fault::new(Reason::OverCap, text)))
            }
        };
        let taken = unpack::import(&self.sessions, &self.returns, parcels, handles);
        let taken = taken.and_then(|table| {
            if of == Of::Call {
                reached_of(|| is_own_id(id), "call-imported");
            }
            match unpack::read(json, &table, &self.sessions) {
                Ok(read) => Ok(Ok(read)),
                Err(NotRead::Malformed(fault)) => Ok(Err(fault)),
                Err(NotRead::Corrupt(storage, rung, fault)) => {
                    Err(NotTaken::Storage(storage, rung, fault))
                }
            }
        });
        match taken {
            Ok(read) => {
                // It rides the next frame, an answer to this very call perhaps, or goes alone soon: until
                // then the sender keeps what it sent.
                self.accept(Accepted { of, id, attempt }, &[]);
                Ok(read)
            }
            Err(NotTaken::Storage(storage, rung, fault)) => {
                self.counters.refused();
                if fault.reason() != Reason::UnknownBlock && !is_own_id(id) {
                    tracing::warn!(%rung, code = %fault.reason(), "not taken: {fault}");
                    self.sessions.demote_receiving(&rung, &fault.clone().into());
                }
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
                Err(TakeError::Refused(rung, fault))
            }
            Err(NotTaken::Broken(fault)) => {
                self.link.close();
                Err(TakeError::Ended(Ended::Broken(fault)))
            }
        }
    }
}

/// How each value is checked on its way, beside what every rung proves at connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Verify {
    /// Not: the canaries are what is checked.
    #[default]
    CanaryOnly,
    /// With every so-manieth leaf goes a digest of its contents, and whoever gets it checks; as [`Self::Always`].
    Sampled(NonZeroU32),
    /// With every leaf that rides a carrier goes a digest of its contents, made of what the caller holds; other
    /// contents are as good as none, and heal as a failed import does. It costs both sides a pass over all
    /// bytes. Views that show the same bytes more than four times over are let pass.
    Always,
}

impl Verify {
    pub(crate) fn every(self) -> u32 {
        match self {
            Self::CanaryOnly => 0,
            Self::Sampled(every) => every.get(),
            Self::Always => 1,
        }
    }
}

/// Why there is nothing to send.
pub(crate) enum NotReady {
    Unsendable(Unsendable),
    Ended(Ended),
}

impl Core {
    /// Packs a value, and proves what is to be proven first.
    pub(crate) fn pack(
        self: &Arc<Self>,
        value: &Value,
        tries: &mut Tries,
        (names, via): (Names, Via<'_>),
        deadline: Option<Instant>,
    ) -> Result<Packing, NotReady> {
        loop {
            let how = How {
                blocks: tries.blocks,
                names,
                via,
                sampling: (!tries.canary).then_some(&self.sampling),
                doubted: tries.doubted(),
                channel: self.id,
                avoid: &tries.avoid,
            };
            match pack(value, &self.sessions, how) {
                Ok(packing) => return Ok(packing),
                Err(NotPacked::Unsendable(unsendable)) => {
                    return Err(NotReady::Unsendable(unsendable));
                }
                // A verdict, or what is to be avoided this time: the next time something else is wanting, if
                // anything.
                Err(NotPacked::Unproven(need)) => {
                    self.prove_first(need, tries, deadline).map_err(NotReady::Ended)?;
                }
            }
        }
    }

    /// Counts what was sent, and says so where a large leaf rode a low rung.
    pub(crate) fn count_sent(&self, route: &Route) {
        self.counters.sent(route);
        let large = self.warn_over.load(Ordering::Relaxed);
        // What lies in host memory can all ride the rung that moves host memory, but for what has no memory
        // of its own and had to be written first.
        let low = |leg: &&Leg| {
            leg.bytes >= large && (matches!(leg.what, What::Plain(_)) || leg.origin.is_some())
        };
        for leg in route.legs.iter().filter(low) {
            let Leg { path, bytes, rung, .. } = leg;
            match leg.origin {
                None => {
                    tracing::warn!(path = &**path, bytes, %rung, "a large {} rode a low rung: send it as a tensor", leg.what);
                }
                Some(device) => {
                    let why = leg
                        .declined
                        .first()
                        .map_or(String::new(), |(rung, why)| format!(": {rung}: {why}"));
                    tracing::warn!(path = &**path, bytes, %rung, %device, "a large {} left its device{why}", leg.what);
                }
            }
        }
    }
}

/// How a value is sent, and what it rode so far: what healing goes by.
#[derive(Debug)]
pub(crate) struct Tries {
    /// A canary shows what fails, and heals nothing.
    canary: bool,
    pub(crate) blocks: Blocks,
    /// What each storage of the last attempt rode, in the order of the table.
    rode: Vec<Way>,
    /// What could not be proven in time.
    pub(crate) avoid: Vec<(Way, Refusal)>,
    /// On what it could not be taken, and why.
    pub(crate) failed: Vec<(RungId, Refusal)>,
}

impl Tries {
    /// None yet.
    pub(crate) fn of(canary: bool) -> Self {
        let blocks = Blocks::AsTheyAre;
        Self { canary, blocks, rode: Vec::new(), avoid: Vec::new(), failed: Vec::new() }
    }

    /// Whether other contents came than were sent.
    pub(crate) fn doubted(&self) -> bool {
        self.failed.iter().any(|(_, why)| why.reason() == Reason::Corrupt)
    }

    /// Another attempt is packed.
    pub(crate) fn note(&mut self, packing: &mut Packing) {
        self.rode = std::mem::take(&mut packing.ways);
    }

    /// What to try after a NACK, loudly; false where nothing is left.
    ///
    /// One rung lower, for this peer and direction; where nothing is lower, a fresh block, once.
    pub(crate) fn go_on(&mut self, core: &Core, storage: usize, code: &str, text: &str) -> bool {
        let Some(way) = self.rode.get(storage) else {
            return false;
        };
        let (lender, rung, device) = way;
        if code == Reason::UnknownBlock.code() {
            // The rung heard so with the receipt; this time it sends all there is.
            tracing::debug!(%rung, "the peer does not know a block");
            return true;
        }
        if self.canary {
            return false;
        }
        let why = refusal_of(code, text);
        self.failed.push((rung.clone(), why.clone()));
        if *lender != MINE {
            // What the peer can take of ours says nothing of it, nor it of that.
            core.sessions.demote_forward(way, &why);
            tracing::warn!(%rung, %device, code, "what another peer lent could not be taken, and goes on no more: {text}");
            return true;
        }
        if core.sessions.demote(rung, *device, &why) {
            tracing::warn!(%rung, %device, code, "the peer could not take a storage and the rung is demoted: {text}");
            return true;
        }
        if self.blocks == Blocks::Fresh {
            return false;
        }
        tracing::warn!(%rung, code, "the peer could not take a storage, trying a fresh block: {text}");
        self.blocks = Blocks::Fresh;
        true
    }
}

/// What a peer says, as a refusal here: its code where that is known.
pub(crate) fn refusal_of(code: &str, text: &str) -> Refusal {
    match Reason::from_code(code) {
        Some(reason) => {
            let detail = text.strip_prefix(reason.text()).unwrap_or(text);
            Refusal::new(reason, detail.trim_start_matches([':', ' ']))
        }
        None => Refusal::new(Reason::PeerFault, format!("{text} ({code})")),
    }
}
