//! Which rungs there are, which of them this pair of processes opened, and what is proven of each.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use canary::{Facts, Finding, Proof, RungReport, Verdict};
use rung::{
    Access, Carrier, Device, Form, LeaseId, Meta, Offer, Owner, ParcelWire, Reach, Reason, Receipt,
    Refusal, Rung, RungId, Session, Trust,
};

use crate::core::Core;

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
                #[cfg(feature = "cuda-unversioned")]
                Arc::new(tier_cuda_ipc::CudaIpc),
                #[cfg(feature = "cuda-unversioned")]
                Arc::new(tier_cuda_ipc::CudaVmm),
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

    /// With `pool-ipc`, which is experimental, by this contract (`docs/pool-ownership-contract.md`): memory of a pool
    /// goes by it, without a copy, before `cuda-vmm` would copy it once. Both sides have to ask for it, and each proves
    /// it at connect as every other rung.
    #[cfg(feature = "pool-ipc")]
    #[must_use]
    pub fn experimental_pool_ipc(mut self, contract: tier_pool_ipc::Contract) -> Self {
        if self.rungs.iter().any(|rung| rung.id() == RungId::POOL_IPC) {
            return self;
        }
        let pool = Arc::new(tier_pool_ipc::PoolIpc::experimental(contract));
        // Memory of a pool is never born shareable, so this is the order of copies (docs/adr/0031).
        let before = [RungId::CUDA_VMM, RungId::SHM];
        let at = self.rungs.iter().position(|rung| before.contains(&rung.id())).unwrap_or(0);
        self.rungs.insert(at, pool);
        self
    }

    /// These rungs, in this order.
    #[must_use]
    pub fn of(rungs: Vec<Arc<dyn Rung>>) -> Self {
        Self { rungs }
    }

    /// The same rungs, where nothing is taken from the peer that its owner could still write: host memory sealed, and
    /// device memory, which nothing can seal, through the host.
    pub(crate) fn sealed(mut self) -> Self {
        let of_devices = [RungId::CUDA_IPC, RungId::CUDA_VMM, RungId::POOL_IPC];
        self.rungs.retain(|rung| !of_devices.contains(&rung.id()));
        #[cfg(feature = "shm")]
        for rung in self.rungs.iter_mut().filter(|rung| rung.id() == RungId::SHM) {
            *rung = Arc::new(tier_shm::SealedShm);
        }
        self
    }

    /// Asks every rung what this process can do.
    pub(crate) fn probe(&self) -> Vec<(RungId, Result<Offer, Refusal>)> {
        self.rungs.iter().map(|rung| (rung.id(), rung.probe())).collect()
    }

    /// Adds what the rungs know of this process.
    pub(crate) fn state(&self, facts: &mut Facts) {
        for (name, value) in self.rungs.iter().flat_map(|rung| rung.facts()) {
            facts.state(name, value);
        }
    }

    /// Opens every rung that both sides offer; nothing is proven yet.
    pub(crate) fn open(
        &self,
        mine: &[(RungId, Result<Offer, Refusal>)],
        theirs: &[Offer],
        lacks: &[(RungId, String, String)],
        trust: &Trust,
    ) -> Sessions {
        let opened = self.rungs.iter().map(|rung| {
            let id = rung.id();
            let mine = mine.iter().find(|(known, _)| *known == id).map(|(_, offer)| offer);
            let session = match (mine, theirs.iter().find(|offer| offer.rung == id)) {
                (Some(Ok(mine)), Some(theirs)) => rung.open(mine, theirs, trust.clone()),
                (Some(Err(refusal)), _) => Err(refusal.clone()),
                _ => Err(match lacks.iter().find(|(lacking, ..)| *lacking == id) {
                    Some((_, code, detail)) => {
                        let reason = Reason::from_code(code).filter(|reason| !is_verdict(*reason));
                        let reason = reason.unwrap_or(Reason::NotOffered);
                        let detail: String = detail.chars().take(200).collect();
                        let colon = if detail.is_empty() { "" } else { ": " };
                        Refusal::new(reason, format!("on the other side{colon}{detail}"))
                    }
                    None if id.is_experimental() => Refusal::new(
                        Reason::NotOffered,
                        "experimental: the other side did not ask for it",
                    ),
                    None => Reason::NotOffered.into(),
                }),
            };
            match &session {
                Ok(_) => tracing::debug!(rung = %id, "opened"),
                // A machine without devices is nothing to be warned of.
                Err(refusal)
                    if matches!(
                        refusal.reason(),
                        Reason::NoDriver | Reason::NoDevice | Reason::Platform
                    ) =>
                {
                    tracing::info!(rung = %id, code = %refusal.reason(), "{refusal}");
                }
                Err(refusal) => tracing::warn!(rung = %id, code = %refusal.reason(), "{refusal}"),
            }
            Opened::new(id, session)
        });
        let opened: Vec<Opened> = opened.collect();
        for offer in theirs.iter().filter(|offer| offer.rung.is_experimental()) {
            if !opened.iter().any(|opened| opened.id == offer.rung) {
                let rung = offer.rung.told();
                tracing::warn!(%rung, "left off: the other side asks for it, and this one does not");
            }
        }
        Sessions {
            opened,
            above_inline: RwLock::default(),
            changes: AtomicU64::new(0),
            forwards: RwLock::default(),
        }
    }
}

impl Default for Ladder {
    fn default() -> Self {
        Self::standard()
    }
}

/// What may carry a value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Via<'a> {
    /// What is proven: everything of a user's.
    Proven,
    /// A canary of this rung: that one alone of its kind, proven or not; of the other kind, whatever was not
    /// found wrong.
    Canary(&'a RungId),
}

/// The rungs of one peer, from the highest to the lowest.
#[derive(Debug)]
pub(crate) struct Sessions {
    opened: Vec<Opened>,
    /// Worked out once for many messages, until a verdict changes.
    above_inline: RwLock<Option<Declined>>,
    /// How often a verdict changed.
    changes: AtomicU64,
    /// What is known of memory that another channel's peer lent, on its rung and device: whether this peer
    /// can take it.
    forwards: RwLock<HashMap<Way, (Verdict, Weak<Core>)>>,
}

/// Rungs, and why each did not take a leaf.
type Declined = Arc<[(RungId, Refusal)]>;

/// From the peer of which channel, or [`MINE`], on which rung and device.
pub(crate) type Way = (u64, RungId, Device);

/// Forwards that are known before those of channels that are gone are forgotten.
const FORWARDS: usize = 1024;

/// Of memory that no other channel's peer lent.
pub(crate) const MINE: u64 = 0;

#[derive(Debug)]
struct Opened {
    id: RungId,
    session: Result<Session, Refusal>,
    /// One a device.
    proofs: RwLock<Vec<Known>>,
    /// Whether a device may be proven at connect.
    ready: Vec<Device>,
}

/// What is known of a rung on a device, and from whom: each source says anew what it knows.
#[derive(Debug, Clone)]
struct Known {
    proof: Proof,
    /// What this side's canaries showed of the way there, and of the way back.
    sent: Verdict,
    came_back: Verdict,
    /// What the peer's showed, likewise: its way there is the way here.
    their_sent: Verdict,
    their_came_back: Verdict,
    /// How often it was demoted in the middle of work: a canary that flew before says nothing of after.
    demotions: u64,
}

impl Known {
    fn new(proof: Proof) -> Self {
        let (sent, their_sent) = (proof.sending.clone(), proof.receiving.clone());
        let (came_back, their_came_back) = (Verdict::Unproven, Verdict::Unproven);
        Self { proof, sent, came_back, their_sent, their_came_back, demotions: 0 }
    }

    /// A way is what whoever sends on it found, unless what came back on it was wrong.
    fn settle(&mut self) {
        let and_back = |sent: &Verdict, back: &Verdict| match sent {
            // What its sender does not use is not wrong in itself.
            Verdict::NotOffered(_) => sent.clone(),
            sent if back.is_demoted() => sent.clone().and(back.clone()),
            sent => sent.clone(),
        };
        self.proof.sending = and_back(&self.sent, &self.their_came_back);
        self.proof.receiving = and_back(&self.their_sent, &self.came_back);
    }
}

/// What only a canary can say, and no side of itself.
fn is_verdict(reason: Reason) -> bool {
    matches!(reason, Reason::Unproven | Reason::Demoted | Reason::NoCarrier | Reason::Corrupt)
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    // Nothing under these locks is half done when somebody panics.
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl Opened {
    fn new(id: RungId, session: Result<Session, Refusal>) -> Self {
        let mut ready = Vec::new();
        let proofs = match &session {
            Err(refusal) => vec![Proof::of(Device::Host, Verdict::NotOffered(refusal.clone()))],
            Ok(Session::Form(_)) => {
                ready.push(Device::Host);
                vec![Proof::unproven(Device::Host)]
            }
            Ok(Session::Carrier(carrier)) => {
                let proof = |(device, reach): (Device, Reach)| match reach {
                    Reach::Not(refusal) if device.is_host() => {
                        Proof::of(device, Verdict::NotOffered(refusal))
                    }
                    Reach::Not(refusal) => {
                        tracing::warn!(rung = %id, %device, code = %refusal.reason(), "demoted: {refusal}");
                        Proof::of(device, Verdict::Demoted(refusal))
                    }
                    reach => {
                        // The host's memory needs nothing set up.
                        if reach == Reach::Ready || device.is_host() {
                            ready.push(device);
                        }
                        Proof::unproven(device)
                    }
                };
                carrier.devices().into_iter().map(proof).collect::<Vec<_>>()
            }
        };
        let proofs: Vec<Known> = proofs.into_iter().map(Known::new).collect();
        Self { id, session, proofs: RwLock::new(proofs), ready }
    }

    /// What is known of sending memory of a device.
    fn sending(&self, device: Device) -> Verdict {
        let proofs = read(&self.proofs);
        let known = proofs.iter().find(|known| known.proof.device == device);
        match (known, &self.session) {
            (Some(known), _) => known.proof.sending.clone(),
            (None, Err(refusal)) => Verdict::NotOffered(refusal.clone()),
            // What it has nothing to do with it is not asked.
            (None, Ok(_)) => Verdict::NotOffered(if device.is_host() {
                Reason::OtherKind.into()
            } else {
                Refusal::new(Reason::DeviceMemory, device.to_string())
            }),
        }
    }

    /// The session, for a leaf on this device.
    fn usable(&self, device: Device, via: Via<'_>) -> Result<&Session, Refusal> {
        let session = self.session.as_ref().map_err(Clone::clone)?;
        let verdict = self.sending(device);
        let flies = match via {
            Via::Proven => false,
            Via::Canary(rung) => *rung == self.id || verdict == Verdict::Unproven,
        };
        if flies { Ok(session) } else { verdict.usable().map(|()| session) }
    }

    fn is_carrier(&self) -> bool {
        matches!(self.session, Ok(Session::Carrier(_)))
    }
}

impl Sessions {
    /// Whether a rung is not what a canary of another one of its kind may ride.
    fn is_out_of(&self, opened: &Opened, via: Via<'_>) -> bool {
        let Via::Canary(rung) = via else { return false };
        let alone = self.opened.iter().find(|each| each.id == *rung);
        alone
            .is_some_and(|alone| alone.is_carrier() == opened.is_carrier() && alone.id != opened.id)
    }

    /// The carriers for memory of a device, or why not, from the highest.
    pub(crate) fn carriers<'s>(
        &'s self,
        device: Device,
        via: Via<'s>,
    ) -> impl Iterator<Item = (&'s RungId, Result<&'s dyn Carrier, Refusal>)> {
        let opened = self.opened.iter().filter(move |opened| !self.is_out_of(opened, via));
        opened.filter_map(move |opened| match &opened.session {
            Ok(Session::Form(_)) => None,
            // What was never opened is of no kind; a demoted form does not exist.
            Err(refusal) => Some((&opened.id, Err(refusal.clone()))),
            Ok(Session::Carrier(carrier)) => {
                Some((&opened.id, opened.usable(device, via).map(|_| &**carrier)))
            }
        })
    }

    /// Every rung, from the highest, as the form that it is, or why it is none.
    pub(crate) fn all<'s>(
        &'s self,
        via: Via<'s>,
    ) -> impl Iterator<Item = (&'s RungId, Result<&'s dyn Form, Refusal>)> {
        let opened = self.opened.iter().filter(move |opened| !self.is_out_of(opened, via));
        opened.map(move |opened| match opened.usable(Device::Host, via) {
            Ok(Session::Form(form)) => (&opened.id, Ok(&**form)),
            Ok(Session::Carrier(_)) => {
                (&opened.id, Err(Refusal::new(Reason::OtherKind, "it is no tensor")))
            }
            Err(refusal) => (&opened.id, Err(refusal)),
        })
    }

    /// The form to raise what came in it, and to lower what stays in the JSON.
    pub(crate) fn form(&self, rung: &RungId) -> Option<&dyn Form> {
        match self.session(rung)? {
            Session::Form(form) => Some(&**form),
            Session::Carrier(_) => None,
        }
    }

    /// The carrier to receive on.
    pub(crate) fn carrier(&self, rung: &RungId) -> Option<&dyn Carrier> {
        match self.session(rung)? {
            Session::Carrier(carrier) => Some(&**carrier),
            Session::Form(_) => None,
        }
    }

    pub(crate) fn session(&self, rung: &RungId) -> Option<&Session> {
        self.opened.iter().find(|opened| opened.id == *rung)?.session.as_ref().ok()
    }

    /// Whether a form has nothing to carry what it writes; the lowest needs nothing.
    pub(crate) fn lacks_a_carrier(&self, form: &RungId) -> bool {
        *form != RungId::INLINE
            && self.form(form).is_some()
            && !self.carriers(Device::Host, Via::Canary(form)).any(|(_, carrier)| carrier.is_ok())
    }

    /// How far down the ladder a rung is.
    pub(crate) fn rank(&self, rung: &RungId) -> Option<usize> {
        self.opened.iter().position(|opened| opened.id == *rung)
    }

    /// Why each rung above the lowest does not take what stays in the JSON.
    pub(crate) fn above_inline(&self) -> Declined {
        if let Some(known) = &*read(&self.above_inline) {
            return Arc::clone(known);
        }
        let changes = self.changes.load(Ordering::Acquire);
        let above = self.all(Via::Proven).take_while(|(rung, _)| **rung != RungId::INLINE);
        let why = above.map(|(rung, form)| {
            let refusal = match form {
                Err(refusal) => refusal,
                Ok(_) if *rung == RungId::PICKLE => Reason::Small.into(),
                Ok(_) => Reason::OtherKind.into(),
            };
            (rung.clone(), refusal)
        });
        let why: Declined = why.collect();
        let mut known = write(&self.above_inline);
        if changes == self.changes.load(Ordering::Acquire) {
            *known = Some(Arc::clone(&why));
        }
        drop(known);
        why
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

    /// Whether shared memory of this kind is copied for this peer all the same.
    pub(crate) fn copies(&self, access: Access) -> bool {
        self.opened.iter().any(|opened| match &opened.session {
            Ok(Session::Carrier(carrier)) => carrier.copies(access),
            _ => false,
        })
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

/// What is proven.
impl Sessions {
    fn change(&self, rung: &RungId, device: Device, change: impl FnOnce(&mut Known)) {
        let Some(opened) = self.opened.iter().find(|opened| opened.id == *rung) else { return };
        let mut proofs = write(&opened.proofs);
        if let Some(known) = proofs.iter_mut().find(|known| known.proof.device == device) {
            change(known);
            known.settle();
        }
        drop(proofs);
        let mut known = write(&self.above_inline);
        self.changes.fetch_add(1, Ordering::AcqRel);
        *known = None;
    }

    /// What is to be proven at connect, from the highest rung but the forms last, since theirs ride a
    /// carrier: whatever needs nothing set up for it, and the devices that are named.
    pub(crate) fn at_connect(&self, named: &[Device]) -> Vec<(RungId, Device)> {
        let mut carriers = Vec::new();
        let mut forms = Vec::new();
        for opened in self.opened.iter().filter(|opened| opened.session.is_ok()) {
            let those = if opened.is_carrier() { &mut carriers } else { &mut forms };
            for Known { proof, sent, .. } in read(&opened.proofs).iter() {
                let now = opened.ready.contains(&proof.device) || named.contains(&proof.device);
                // Also what the peer has found wrong by now: it waits for this side's word.
                if now && *sent == Verdict::Unproven {
                    those.push((opened.id.clone(), proof.device));
                }
            }
        }
        carriers.append(&mut forms);
        carriers
    }

    /// Everything that was proven or found wrong, to be proven anew.
    pub(crate) fn to_reprove(&self) -> Vec<(RungId, Device)> {
        let known = |opened: &Opened| {
            let id = opened.id.clone();
            let proofs = read(&opened.proofs);
            let known = proofs.iter().filter(|known| known.proof.sending != Verdict::Unproven);
            known.map(|known| (id.clone(), known.proof.device)).collect::<Vec<_>>()
        };
        let of = |carriers| {
            let opened = self.opened.iter().filter(|opened| opened.session.is_ok());
            opened.filter(move |opened| opened.is_carrier() == carriers).flat_map(known)
        };
        of(true).chain(of(false)).collect()
    }

    /// What is known of sending on a rung and device, and how often it was demoted.
    pub(crate) fn sending(&self, rung: &RungId, device: Device) -> Option<(Verdict, u64)> {
        let opened = self.opened.iter().find(|opened| opened.id == *rung)?;
        let proofs = read(&opened.proofs);
        let known = proofs.iter().find(|known| known.proof.device == device)?;
        Some((known.proof.sending.clone(), known.demotions))
    }

    /// What this side's canary showed, unless the rung was demoted since it flew; gives what is known then.
    pub(crate) fn found(&self, finding: Finding, demotions: u64) -> Finding {
        let mut kept = finding.clone();
        self.change(&finding.rung, finding.device, |known| {
            if known.demotions == demotions {
                known.sent = finding.sending;
            }
            kept.sending = known.sent.clone();
            known.came_back = finding.returning;
            known.proof.time = finding.time;
        });
        kept
    }

    /// What the peer's canary showed: its way there is the way here.
    pub(crate) fn heard(
        &self,
        rung: &RungId,
        device: Device,
        sending: Verdict,
        returning: Verdict,
    ) {
        self.change(rung, device, |known| {
            // Said of no canary that came here, it says nothing.
            if sending != Verdict::Unproven {
                known.their_sent = sending;
            }
            known.their_came_back = returning;
        });
    }

    /// Whether something that this side can receive on the host was not proven by the peer.
    pub(crate) fn unproven_by_the_peer(&self) -> Option<RungId> {
        let missing = |opened: &&Opened| {
            read(&opened.proofs)
                .iter()
                .any(|known| known.proof.device.is_host() && known.their_sent == Verdict::Unproven)
        };
        self.opened.iter().find(missing).map(|opened| opened.id.clone())
    }

    /// Takes a carrier out of use for sending memory of a device; whether a lower one is left.
    pub(crate) fn demote(&self, rung: &RungId, device: Device, why: &Refusal) -> bool {
        // What no carrier of devices takes any more, one of host memory may copy.
        let way = |lower: &Opened| match lower.sending(device) {
            Verdict::NotOffered(_) if !device.is_host() => lower.sending(Device::Host),
            way => way,
        };
        if !self.has_lower(rung, way) {
            return false;
        }
        self.change(rung, device, |known| {
            known.sent = Verdict::Demoted(why.clone());
            known.demotions += 1;
        });
        true
    }

    /// As the peer will do that hears of a fault: what came by this carrier comes by a lower one, if it has one.
    pub(crate) fn demote_receiving(&self, rung: &RungId, why: &Refusal) {
        let Some(opened) = self.opened.iter().find(|opened| opened.id == *rung) else { return };
        let devices: Vec<Device> =
            read(&opened.proofs).iter().map(|known| known.proof.device).collect();
        // Which device it was a parcel that was not imported says to nobody.
        let [device] = devices[..] else { return };
        let receiving = |lower: &Opened| {
            let proofs = read(&lower.proofs);
            let known = proofs.iter().find(|known| known.proof.device == device);
            known.map_or(Verdict::NotOffered(Reason::OtherKind.into()), |known| {
                known.proof.receiving.clone()
            })
        };
        if self.has_lower(rung, receiving) {
            self.change(rung, device, |known| known.their_sent = Verdict::Demoted(why.clone()));
        }
    }

    /// Whether a carrier below this one is left, by what is known of a way.
    fn has_lower(&self, rung: &RungId, way: impl Fn(&Opened) -> Verdict) -> bool {
        let below = self.opened.iter().skip_while(|opened| opened.id != *rung).skip(1);
        below.into_iter().any(|lower| {
            lower.is_carrier() && matches!(way(lower), Verdict::Verified | Verdict::Unproven)
        })
    }

    /// Every rung with what became of it, in the direction of sending.
    pub(crate) fn report(&self) -> Vec<(RungId, Result<(), Refusal>)> {
        let report = |opened: &Opened| {
            let proofs = read(&opened.proofs);
            let mut usable = proofs.iter().map(|known| known.proof.sending.usable());
            let first = usable.next().unwrap_or_else(|| Err(Reason::DeviceUnknown.into()));
            (opened.id.clone(), usable.fold(first, Result::or))
        };
        self.opened.iter().map(report).collect()
    }

    /// Everything that is known of every rung.
    pub(crate) fn proofs(&self) -> Vec<RungReport> {
        let report = |opened: &Opened| {
            let proofs = read(&opened.proofs).iter().map(|known| known.proof.clone()).collect();
            RungReport::new(opened.id.clone(), proofs)
        };
        self.opened.iter().map(report).collect()
    }

    /// What is known of a forward.
    pub(crate) fn forward(&self, way: &Way) -> Option<Verdict> {
        read(&self.forwards).get(way).map(|(verdict, _)| verdict.clone())
    }

    /// What a forwarded canary showed.
    pub(crate) fn forwarded(&self, way: Way, verdict: Verdict, lender: Weak<Core>) {
        let mut forwards = write(&self.forwards);
        // Of channels that are gone nothing needs to be known for ever.
        if forwards.len() >= FORWARDS {
            forwards.retain(|_, (_, lender)| lender.strong_count() > 0);
        }
        forwards.insert(way, (verdict, lender));
    }

    /// Memory of another channel's peer could not be taken after all.
    pub(crate) fn demote_forward(&self, way: &Way, why: &Refusal) {
        if let Some((verdict, _)) = write(&self.forwards).get_mut(way) {
            *verdict = Verdict::Demoted(why.clone());
        }
    }

    /// Forwards are proven again before the next one.
    pub(crate) fn forget_forwards(&self) {
        write(&self.forwards).clear();
    }
}
