//! Which rungs there are, and which of them this pair of processes opened.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rung::{
    Carrier, Form, LeaseId, Meta, Offer, Owner, ParcelWire, Reason, Receipt, Refusal, Rung, RungId,
    Session, Trust,
};

/// Rungs from the highest to the lowest.
#[derive(Debug, Clone)]
pub struct Ladder {
    rungs: Vec<Arc<dyn Rung>>,
}

impl Ladder {
    /// Every rung that this build has, in the order of copies, then price.
    #[must_use]
    pub fn standard() -> Self {
        Self {
            rungs: vec![
                #[cfg(feature = "shm")]
                Arc::new(tier_shm::Shm),
                #[cfg(feature = "numpy")]
                Arc::new(tier_numpy::Numpy),
                #[cfg(feature = "pickle")]
                Arc::new(tier_pickle::Pickle),
                Arc::new(tier_inline::Inline),
            ],
        }
    }

    /// These rungs, in this order.
    #[must_use]
    pub fn of(rungs: Vec<Arc<dyn Rung>>) -> Self {
        Self { rungs }
    }

    /// Asks every rung what this process can do.
    pub(crate) fn probe(&self) -> Vec<(RungId, Result<Offer, Refusal>)> {
        self.rungs.iter().map(|rung| (rung.id(), rung.probe())).collect()
    }

    /// Opens every rung that both sides offer.
    pub(crate) fn open(
        &self,
        mine: &[(RungId, Result<Offer, Refusal>)],
        theirs: &[Offer],
        trust: &Trust,
    ) -> Sessions {
        let opened = self.rungs.iter().map(|rung| {
            let id = rung.id();
            let mine = mine.iter().find(|(known, _)| *known == id).map(|(_, offer)| offer);
            let session = match (mine, theirs.iter().find(|offer| offer.rung == id)) {
                (Some(Ok(mine)), Some(theirs)) => rung.open(mine, theirs, trust.clone()),
                (Some(Err(refusal)), _) => Err(refusal.clone()),
                _ => Err(Reason::NotOffered.into()),
            };
            match &session {
                Ok(_) => tracing::debug!(rung = %id, "opened"),
                Err(refusal) => tracing::warn!(rung = %id, code = %refusal.reason(), "{refusal}"),
            }
            Opened { id, session, demoted: AtomicBool::new(false) }
        });
        Sessions { opened: opened.collect(), above_inline: OnceLock::new() }
    }
}

impl Default for Ladder {
    fn default() -> Self {
        Self::standard()
    }
}

/// The rungs of one peer, from the highest to the lowest.
#[derive(Debug)]
pub(crate) struct Sessions {
    opened: Vec<Opened>,
    above_inline: OnceLock<Arc<[(RungId, Refusal)]>>,
}

#[derive(Debug)]
struct Opened {
    id: RungId,
    session: Result<Session, Refusal>,
    /// In the direction of sending; what comes in on the rung is still taken.
    demoted: AtomicBool,
}

impl Opened {
    fn usable(&self) -> Result<&Session, Refusal> {
        if self.demoted.load(Ordering::Relaxed) {
            return Err(Reason::Demoted.into());
        }
        self.session.as_ref().map_err(Clone::clone)
    }
}

impl Sessions {
    /// The carriers to send on, or why not, from the highest.
    pub(crate) fn carriers(
        &self,
    ) -> impl Iterator<Item = (&RungId, Result<&dyn Carrier, Refusal>)> {
        self.opened.iter().filter_map(|opened| match opened.usable() {
            Ok(Session::Carrier(carrier)) => Some((&opened.id, Ok(&**carrier))),
            Ok(Session::Form(_)) => None,
            // What was never opened is of no kind; a demoted form does not exist.
            Err(refusal) => Some((&opened.id, Err(refusal))),
        })
    }

    /// Every rung, from the highest, as the form that it is, or why it is none.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&RungId, Result<&dyn Form, Refusal>)> {
        self.opened.iter().map(|opened| match opened.usable() {
            Ok(Session::Form(form)) => (&opened.id, Ok(&**form)),
            Ok(Session::Carrier(_)) => {
                (&opened.id, Err(Refusal::new(Reason::OtherKind, "it is no tensor")))
            }
            Err(refusal) => (&opened.id, Err(refusal)),
        })
    }

    /// The form to raise what came in it, and to lower what stays in the JSON.
    pub(crate) fn form(&self, rung: &RungId) -> Option<&dyn Form> {
        self.opened.iter().find(|opened| opened.id == *rung).and_then(|opened| {
            match &opened.session {
                Ok(Session::Form(form)) => Some(&**form),
                _ => None,
            }
        })
    }

    /// How far down the ladder a rung is.
    pub(crate) fn rank(&self, rung: &RungId) -> Option<usize> {
        self.opened.iter().position(|opened| opened.id == *rung)
    }

    /// Why each rung above the lowest does not take what stays in the JSON.
    pub(crate) fn above_inline(&self) -> Arc<[(RungId, Refusal)]> {
        Arc::clone(self.above_inline.get_or_init(|| {
            let above = self.all().take_while(|(rung, _)| **rung != RungId::INLINE);
            let why = above.map(|(rung, form)| {
                let refusal = match form {
                    Err(refusal) => refusal,
                    Ok(_) if *rung == RungId::PICKLE => Reason::Small.into(),
                    Ok(_) => Reason::OtherKind.into(),
                };
                (rung.clone(), refusal)
            });
            why.collect()
        }))
    }

    /// The carrier to receive on.
    pub(crate) fn carrier(&self, rung: &RungId) -> Option<&dyn Carrier> {
        self.opened.iter().find(|opened| opened.id == *rung).and_then(|opened| {
            match &opened.session {
                Ok(Session::Carrier(carrier)) => Some(&**carrier),
                _ => None,
            }
        })
    }

    /// Ends a lease that was never sent: the carrier hears of it as of a receipt, since nobody else has
    /// it, and only then its owner goes.
    pub(crate) fn take_back(&self, rung: &RungId, lease: LeaseId, owner: Option<Owner>) {
        if let Some(carrier) = self.carrier(rung) {
            let (rung, handles) = (rung.clone(), Vec::new());
            carrier.released(Receipt { rung, lease, meta: None, handles });
        }
        drop(owner);
    }

    /// What the rungs have to say to the peer's.
    pub(crate) fn notices(&self) -> Vec<(RungId, Meta)> {
        let notices = self.opened.iter().filter_map(|opened| match &opened.session {
            Ok(Session::Carrier(carrier)) => Some((opened.id.clone(), carrier.notice()?)),
            _ => None,
        });
        notices.collect()
    }

    /// Whether any rung keeps something that the peer may have to say something about.
    pub(crate) fn keep(&self) -> bool {
        self.opened.iter().any(|opened| match &opened.session {
            Ok(Session::Carrier(carrier)) => carrier.keeps(),
            _ => false,
        })
    }

    /// A parcel goes back unopened.
    pub(crate) fn unopened(&self, parcel: &ParcelWire) {
        let (rung, lease) = parcel.lease();
        if let Some(carrier) = self.carrier(rung) {
            carrier.unopened(lease);
        }
    }

    /// Has every rung call this when it has something to say.
    pub(crate) fn wake_with(&self, wake: &Arc<dyn Fn() + Send + Sync>) {
        for opened in &self.opened {
            if let Ok(Session::Carrier(carrier)) = &opened.session {
                carrier.wake_with(Arc::clone(wake));
            }
        }
    }

    /// Takes a carrier out of use for sending; whether a lower one is left.
    pub(crate) fn demote(&self, rung: &RungId) -> bool {
        let mut below = self.opened.iter().skip_while(|opened| opened.id != *rung);
        let Some(opened) = below.next() else {
            return false;
        };
        if !below.any(|lower| matches!(lower.usable(), Ok(Session::Carrier(_)))) {
            return false;
        }
        opened.demoted.store(true, Ordering::Relaxed);
        true
    }

    /// Every rung with what became of it.
    pub(crate) fn report(&self) -> Vec<(RungId, Result<(), Refusal>)> {
        let report = |opened: &Opened| (opened.id.clone(), opened.usable().map(drop));
        self.opened.iter().map(report).collect()
    }

    /// The peer is gone.
    pub(crate) fn peer_gone(&self) {
        for opened in &self.opened {
            if let Ok(Session::Carrier(carrier)) = &opened.session {
                carrier.peer_gone();
            }
        }
    }
}
