//! One peer's session.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rung::{
    Carrier, Fault, LeaseId, Meta, Owner, Packed, Parcel, Provenance, Reason, Receipt, Refusal,
    RungId, Storage, Trust,
};
use segment::{Received, Sealed};

use crate::memory::{self, ForeignMemory, OwnMemory, SealedMemory};

/// The metadata of a parcel whose block is not its sender's own.
const FORWARDED: &str = "forwarded";

#[derive(Debug)]
pub(crate) struct ShmCarrier {
    trust: Trust,
    next_lease: AtomicU64,
    leases: Arc<Leases>,
}

impl ShmCarrier {
    pub(crate) fn new(trust: Trust) -> Self {
        Self { trust, next_lease: AtomicU64::new(1), leases: Arc::default() }
    }
}

/// The leases of blocks that could be written again, and whether each is home.
#[derive(Debug, Default)]
struct Leases {
    out: Mutex<HashMap<LeaseId, bool>>,
    /// The peer is gone for sure.
    gone: AtomicBool,
}

impl Leases {
    fn out(&self) -> MutexGuard<'_, HashMap<LeaseId, bool>> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The owner of a block that could be written again (L4).
///
/// Dropping it is not enough for that: unless the receipt came, or the peer is known to be gone, the
/// peer may still look at the block, so it is kept for good and never written again.
struct Lent {
    storage: Option<Arc<Storage>>,
    lease: LeaseId,
    leases: Arc<Leases>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let came = self.leases.out().remove(&self.lease).unwrap_or(false);
        let is_home = came || self.leases.gone.load(Ordering::Acquire);
        let storage = self.storage.take();
        if !is_home {
            std::mem::forget(storage);
        }
    }
}

impl Carrier for ShmCarrier {
    fn export(&self, storage: &Arc<Storage>) -> Result<Packed, Refusal> {
        if !storage.device().is_host() {
            return Err(Refusal::new(Reason::DeviceMemory, storage.device().to_string()));
        }
        if storage.is_empty() {
            return Err(Reason::Empty.into());
        }
        let lease = LeaseId(self.next_lease.fetch_add(1, Ordering::Relaxed));
        let mut forwarded = false;
        let (descriptor, owner, copies): (_, Owner, _) =
            if let Some(descriptor) = memory::descriptor(storage) {
                // Ours or a peer's: the same block goes on, under a lease of this hop (L2).
                let descriptor = descriptor?;
                forwarded = storage.memory_as::<ForeignMemory>().is_some();
                memory::note_lent(storage);
                self.leases.out().insert(lease, false);
                let storage = Some(Arc::clone(storage));
                let lent = Lent { storage, lease, leases: Arc::clone(&self.leases) };
                (descriptor, Box::new(lent), 0)
            } else {
                // Private memory: one copy into a block that is sealed for good, so that the
                // receiver needs to trust nobody.
                let block = Sealed::build(storage.len(), |filling| {
                    storage.memory().for_each_piece(&mut |piece| filling.write(piece))
                })?;
                (block.descriptor()?, Box::new(block), 1)
            };
        let meta = Meta::write(&forwarded.then_some(FORWARDED))?;
        let parcel = Parcel {
            rung: RungId::SHM,
            lease,
            bytes: storage.len() as u64,
            copies,
            meta,
            handles: vec![descriptor],
        };
        Ok(Packed { parcel, owner })
    }

    fn import(&self, parcel: Parcel) -> Result<Storage, Fault> {
        if parcel.rung != RungId::SHM {
            return Err(Fault::new(Reason::UnknownRung, parcel.rung.as_str()));
        }
        let forwarded = match parcel.meta.read::<Option<String>>()?.as_deref() {
            None => false,
            Some(FORWARDED) => true,
            Some(_) => return Err(Fault::new(Reason::BadMetadata, "neither null nor forwarded")),
        };
        let handles = <[_; 1]>::try_from(parcel.handles);
        let [descriptor] = handles.map_err(|handles| {
            Fault::new(Reason::WrongHandles, format!("{}, not 1", handles.len()))
        })?;
        let len = usize::try_from(parcel.bytes).map_err(|_| Reason::WrongSize)?;
        let storage = match segment::receive(descriptor, len)? {
            Received::Sealed(sealed) => Storage::new(SealedMemory(sealed)),
            Received::Foreign(block) => match memory::own_block(&block) {
                // Ours, come back: held as such, so that it is not written while this is looked at.
                Some(own) => Storage::new(OwnMemory(own)),
                // The peer vouches for what it lends itself. What it was lent by another may be
                // written once that other has seen it die.
                None => {
                    let trust = if forwarded { Trust::none() } else { self.trust.clone() };
                    Storage::new(ForeignMemory { block, trust })
                }
            },
        };
        Ok(storage.with_provenance(Provenance { rung: parcel.rung, lease: parcel.lease }))
    }

    fn receipt(&self, lease: LeaseId) -> Receipt {
        Receipt { rung: RungId::SHM, lease, meta: None, handles: Vec::new() }
    }

    fn released(&self, receipt: Receipt) {
        // Of other leases nothing is noted: a peer must not fill this table.
        if let Some(home) = self.leases.out().get_mut(&receipt.lease) {
            *home = true;
        }
    }

    /// Every block of ours may be written again.
    fn peer_gone(&self) {
        self.leases.gone.store(true, Ordering::Release);
    }
}
