//! What a channel moved so far, counted.

use std::sync::{Mutex, PoisonError};

use rung::{Reason, RungId};

use crate::route::{Leg, Route};

/// Leaves of one rung in one direction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RungStats {
    /// The rung that the leaves rode.
    pub rung: RungId,
    /// Leaves.
    pub leaves: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that were copied for them: what was copied twice counts twice, and an element that a tensor
    /// repeats as often as it does.
    pub copied: u64,
}

/// A rung that declined leaves, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Declined {
    /// The rung that declined.
    pub rung: RungId,
    /// Why.
    pub reason: Reason,
    /// Leaves that then rode a lower rung.
    pub leaves: u64,
}

/// What a channel moved so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Values sent, answers included; one that was sent again after a refusal counts again.
    pub sent: u64,
    /// Values received, answers included.
    pub received: u64,
    /// Storages that the peer could not take.
    pub refused: u64,
    /// Leaves sent, by rung.
    pub out: Vec<RungStats>,
    /// Leaves received, by rung; of what stayed in the JSON, tensors without elements alone.
    pub into: Vec<RungStats>,
    /// Why leaves that were sent did not ride a higher rung; those that stayed in the JSON are left out.
    pub declined: Vec<Declined>,
}

impl Stats {
    /// What was sent on a rung.
    #[must_use]
    pub fn sent_on(&self, rung: &RungId) -> Option<&RungStats> {
        self.out.iter().find(|each| each.rung == *rung)
    }

    /// What was received on a rung.
    #[must_use]
    pub fn received_on(&self, rung: &RungId) -> Option<&RungStats> {
        self.into.iter().find(|each| each.rung == *rung)
    }
}

fn count(rungs: &mut Vec<RungStats>, leg: &Leg) {
    let at = rungs.iter().position(|each| each.rung == leg.rung).unwrap_or_else(|| {
        rungs.push(RungStats { rung: leg.rung.clone(), leaves: 0, bytes: 0, copied: 0 });
        rungs.len() - 1
    });
    let each = &mut rungs[at];
    each.leaves += 1;
    // A peer may claim any number: of a tensor that repeats one element for ever, say.
    each.bytes = each.bytes.saturating_add(leg.bytes);
    each.copied = each.copied.saturating_add(leg.bytes.saturating_mul(leg.copies.into()));
}

/// The counters of one channel.
#[derive(Debug, Default)]
pub(crate) struct Counters(Mutex<Stats>);

impl Counters {
    fn change(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn get(&self) -> Stats {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn sent(&self, route: &Route) {
        self.change(|stats| {
            stats.sent += 1;
            for leg in &route.legs {
                count(&mut stats.out, leg);
                if leg.rung == RungId::INLINE {
                    continue;
                }
                for (rung, refusal) in leg.declined.iter() {
                    let reason = refusal.reason();
                    let known = stats.declined.iter_mut();
                    match known.into_iter().find(|d| d.rung == *rung && d.reason == reason) {
                        Some(declined) => declined.leaves += 1,
                        None => {
                            let rung = rung.clone();
                            stats.declined.push(Declined { rung, reason, leaves: 1 });
                        }
                    }
                }
            }
        });
    }

    pub(crate) fn received<'l>(&self, legs: impl Iterator<Item = &'l Leg>) {
        self.change(|stats| {
            stats.received += 1;
            for leg in legs {
                count(&mut stats.into, leg);
            }
        });
    }

    pub(crate) fn refused(&self) {
        self.change(|stats| stats.refused += 1);
    }
}
