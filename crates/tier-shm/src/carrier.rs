//! One peer's session.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rung::{
    Carrier, Fault, LeaseId, Meta, Owner, Packed, Parcel, Provenance, Reason, Receipt, Refusal,
    RungId, Storage, Trust,
};
use segment::{Received, Sealed};

use crate::memory::{self, ForeignMemory, SealedMemory};

#[derive(Debug)]
pub(crate) struct ShmCarrier {
    trust: Trust,
    next_lease: AtomicU64,
}

impl ShmCarrier {
    pub(crate) fn new(trust: Trust) -> Self {
        Self { trust, next_lease: AtomicU64::new(1) }
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
        let (descriptor, owner, copies): (_, Owner, _) =
            if let Some(descriptor) = memory::descriptor(storage) {
                // Ours or a peer's: the same block goes on, under a lease of this hop (L2).
                (descriptor?, Box::new(Arc::clone(storage)), 0)
            } else {
                // Private memory: one copy into a block that is sealed for good, so that the
                // receiver needs to trust nobody.
                let block = Sealed::build(storage.len(), |filling| {
                    storage.memory().for_each_piece(&mut |piece| filling.write(piece))
                })?;
                (block.descriptor()?, Box::new(block), 1)
            };
        let meta =
            Meta::write(&()).map_err(|fault| Refusal::new(fault.reason(), fault.detail()))?;
        let parcel = Parcel {
            rung: RungId::SHM,
            lease: LeaseId(self.next_lease.fetch_add(1, Ordering::Relaxed)),
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
        parcel.meta.read::<()>()?;
        let handles = <[_; 1]>::try_from(parcel.handles);
        let [descriptor] = handles.map_err(|handles| {
            Fault::new(Reason::WrongHandles, format!("{}, not 1", handles.len()))
        })?;
        let len = usize::try_from(parcel.bytes).map_err(|_| Reason::WrongSize)?;
        let storage = match segment::receive(descriptor, len)? {
            Received::Sealed(sealed) => Storage::new(SealedMemory(sealed)),
            Received::Foreign(block) => {
                Storage::new(ForeignMemory { block, trust: self.trust.clone() })
            }
        };
        Ok(storage.with_provenance(Provenance { rung: parcel.rung, lease: parcel.lease }))
    }

    fn receipt(&self, lease: LeaseId) -> Receipt {
        Receipt { rung: RungId::SHM, lease, meta: None, handles: Vec::new() }
    }

    /// Nothing to do: the owner that the sender drops is all there is.
    fn released(&self, _receipt: Receipt) {}

    /// Nothing to do: every block is fresh, so none can be given to anybody else.
    fn peer_gone(&self) {}
}
