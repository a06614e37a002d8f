//! One peer's session as a carrier.

use std::sync::Arc;

use rung::sent::Naming;
use rung::{
    Access, Carrier, Device, Fault, Fill, Handle, LeaseId, Meta, Packed, Parcel, Provenance,
    Reason, Receipt, Refusal, RungId, Storage, Trust,
};
use segment::{Draft, PeerTrust, Received, Sealed};
use serde::{Deserialize, Serialize};

use crate::memory::{self, Block, ForeignMemory, LentMemory, OwnMemory, SealedMemory};
use crate::session::{self, Import, Lent, Remark, Session, Theirs};

/// The metadata of a parcel, or null where it would be empty.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ParcelMeta {
    /// The block's number, where it is to be kept or is kept already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    b: Option<u64>,
    /// Whether the block is not its sender's own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    f: bool,
    /// The device whose memory it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    d: Option<String>,
}

/// Blocks that the peer need not keep any more.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notice {
    x: Vec<u64>,
}

const UNKNOWN: &str = "unknown";
const EXPOSED: &str = "exposed";

/// Which sides take only what is sealed for good.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnlySealed {
    pub(crate) here: bool,
    pub(crate) there: bool,
}

#[derive(Debug)]
pub(crate) struct ShmCarrier {
    trust: Trust,
    only_sealed: OnlySealed,
    session: Arc<Session>,
}

impl ShmCarrier {
    pub(crate) fn new(trust: Trust, only_sealed: OnlySealed) -> Self {
        Self { trust, only_sealed, session: Arc::default() }
    }

    /// Whether the peer can be counted on not to look at what it gave back.
    fn is_trusted(&self) -> bool {
        self.trust.token::<PeerTrust>().is_some()
    }

    /// Whether a copy for the peer may lie in a block that is used again.
    fn may_pool(&self, storage: &Storage) -> bool {
        self.is_trusted() && !self.only_sealed.there && !storage.memory().needs_fresh_memory()
    }

    /// A storage that lies on a block, under a lease.
    fn lend(
        &self,
        storage: Arc<Storage>,
        block: &Block<'_>,
        copies: u8,
        origin: Option<Device>,
    ) -> Result<Packed, Refusal> {
        if !self.is_trusted() {
            // Nobody can take the peer's mapping from it (L8).
            block.expose(Some(&self.session));
        }
        memory::note_lent(&storage);
        let lease = self.session.next_lease();
        let naming = self.session.lend(block.id(), block.is_once(), lease);
        let (number, handles) = match naming {
            Naming::Number => (Some(block.id().number()), Vec::new()),
            Naming::First => (Some(block.id().number()), vec![self.descriptor(block, lease)?]),
            Naming::Once => (None, vec![self.descriptor(block, lease)?]),
        };
        let forwarded = block.is_forwarded();
        let (bytes, access) = (storage.len() as u64, block.access());
        let session = Arc::clone(&self.session);
        let owner = Lent { storage, lease, session };
        let d = origin.map(|device| device.to_string());
        let meta = match (number, forwarded, d) {
            (None, false, None) => Meta::write(&()),
            (b, f, d) => Meta::write(&ParcelMeta { b, f, d }),
        }?;
        let parcel = Parcel { rung: RungId::SHM, lease, bytes, copies, meta, handles };
        Ok(Packed { parcel, owner: Box::new(owner), access })
    }

    fn descriptor(&self, block: &Block<'_>, lease: LeaseId) -> Result<Handle, Refusal> {
        block.descriptor().inspect_err(|_| self.session.unlend(lease))
    }

    /// A copy of a device's memory, straight into a block.
    fn stage(&self, storage: &Arc<Storage>) -> Result<Packed, Refusal> {
        let (origin, len) = (Some(storage.device()), storage.len());
        let copy = if self.may_pool(storage) {
            let copy = |bytes: &mut [u8]| storage.memory().read_at(0, bytes);
            let pin = |draft: &Draft| crate::staging::pin(storage.device(), draft);
            Storage::new(LentMemory(Draft::build_at_once(len, pin, copy)?.share()?))
        } else {
            // A fresh block, sealed for good, is written by the kernel; so it goes in pieces.
            let block = Sealed::build(len, |filling| {
                storage.memory().for_each_copied_piece(&mut |piece| filling.write(piece))
            })?;
            Storage::new(SealedMemory { block: Arc::new(block), len, once: true })
        };
        let copy = Arc::new(copy);
        let Some(block) = Block::of(&copy) else { return Err(Reason::OtherKind.into()) };
        self.lend(Arc::clone(&copy), &block, 1, origin)
    }

    /// What a parcel's descriptor turns out to be.
    fn receive(descriptor: Handle, len: usize) -> Result<Theirs, Fault> {
        Ok(match segment::receive(descriptor, len)? {
            Received::Sealed(block) => Theirs::Sealed(Arc::new(block)),
            Received::Foreign(block) if block.is_own() => Theirs::Own(block.number()),
            Received::Foreign(block) => Theirs::Foreign(Arc::new(block)),
        })
    }

    /// The block that a parcel names, by a descriptor, by a number, or by both.
    fn block(
        &self,
        number: Option<u64>,
        handles: Vec<Handle>,
        lease: LeaseId,
        len: usize,
    ) -> Result<Theirs, Fault> {
        let count = handles.len();
        let mut handles = handles.into_iter();
        match (number, handles.next(), count) {
            (Some(number), None, 0) => self.session.theirs(number).ok_or_else(|| {
                // The peer hears so with the receipt, and sends the descriptor along again.
                self.session.remark(lease, Remark::Unknown);
                Fault::new(Reason::UnknownBlock, format!("block {number}"))
            }),
            (Some(number), Some(descriptor), 1) => {
                Ok(self.session.keep(number, Self::receive(descriptor, len)?))
            }
            (None, Some(descriptor), 1) => Self::receive(descriptor, len),
            _ => Err(Fault::new(Reason::WrongHandles, format!("{count}, not 1"))),
        }
    }

    fn storage(
        &self,
        block: &Theirs,
        len: usize,
        forwarded: bool,
        once: bool,
        lease: LeaseId,
    ) -> Result<Storage, Fault> {
        let fits = |there: usize| {
            let detail = || format!("{len} bytes declared, {there} there");
            if len <= there { Ok(()) } else { Err(Fault::new(Reason::WrongSize, detail())) }
        };
        Ok(match block {
            Theirs::Sealed(block) => {
                fits(block.len())?;
                Storage::new(SealedMemory { block: Arc::clone(block), len, once })
            }
            Theirs::Foreign(_) if self.only_sealed.here => {
                return Err(Fault::new(Reason::Unsealed, "its owner could still write it"));
            }
            Theirs::Foreign(block) => {
                fits(block.len())?;
                // The peer vouches for what it lends itself. What it was lent by another may be
                // written once that other has seen it die.
                let trust = if forwarded { Trust::none() } else { self.trust.clone() };
                let import = Import { session: Arc::downgrade(&self.session), lease };
                Storage::new(ForeignMemory { block: Arc::clone(block), len, trust, once, import })
            }
            // Ours, come back: held as such, so that it is not written while this is looked at.
            Theirs::Own(inode) => {
                let storage = session::own(*inode)?;
                fits(storage.len())?;
                Storage::new(OwnMemory { storage, len })
            }
        })
    }
}

impl Carrier for ShmCarrier {
    fn export(&self, storage: &Arc<Storage>) -> Result<Packed, Refusal> {
        if storage.is_empty() {
            return Err(Reason::Empty.into());
        }
        // For whoever has nothing better left.
        if !storage.device().is_host() {
            return self.stage(storage);
        }
        // Ours or a peer's: the same block goes on, under a lease of this hop (L2).
        if let Some(block) = Block::of(storage)
            && !self.copies(block.access())
        {
            return self.lend(Arc::clone(storage), &block, 0, storage.origin());
        }
        // Private memory, or what the peer takes only sealed: one copy.
        let len = storage.len();
        if self.may_pool(storage) {
            let draft = Draft::build(len, |filling| {
                storage.memory().for_each_piece(&mut |piece| filling.write(piece))
            })?;
            let copy = Arc::new(Storage::new(LentMemory(draft.share()?)));
            let Some(block) = Block::of(&copy) else { return Err(Reason::OtherKind.into()) };
            return self.lend(Arc::clone(&copy), &block, 1, None);
        }
        // Into a fresh block that is sealed for good, so that the receiver needs to trust nobody, and
        // that is never used again, so that we need not trust the receiver (L1, L8).
        let block = Sealed::build(len, |filling| {
            storage.memory().for_each_piece(&mut |piece| filling.write(piece))
        })?;
        let lease = self.session.next_lease();
        let handles = vec![block.descriptor()?];
        let (meta, bytes) = (Meta::write(&())?, len as u64);
        let parcel = Parcel { rung: RungId::SHM, lease, bytes, copies: 1, meta, handles };
        Ok(Packed { parcel, owner: Box::new(block), access: Access::Sealed })
    }

    fn copies(&self, access: Access) -> bool {
        self.only_sealed.there && access != Access::Sealed
    }

    /// Born shared: what is private takes the same way after one copy. Sealed, where nothing else is taken.
    fn specimen(&self, device: Device, len: usize, fill: Fill<'_>) -> Result<Storage, Refusal> {
        if !device.is_host() {
            return Err(Refusal::new(Reason::DeviceMemory, device.to_string()));
        }
        let mut draft = Draft::new(len)?;
        fill(draft.bytes_mut());
        Ok(if self.only_sealed.there {
            Storage::new(SealedMemory::of(draft)?)
        } else {
            Storage::new(LentMemory(draft.share()?))
        })
    }

    fn import(&self, parcel: Parcel) -> Result<Storage, Fault> {
        let Parcel { rung, lease, bytes, meta, handles, .. } = parcel;
        if rung != RungId::SHM {
            return Err(Fault::new(Reason::UnknownRung, rung.as_str()));
        }
        let ParcelMeta { b: number, f: forwarded, d: origin } =
            meta.read::<Option<ParcelMeta>>()?.unwrap_or_default();
        let len = usize::try_from(bytes).map_err(|_| Reason::WrongSize)?;
        if len == 0 {
            return Err(Reason::Empty.into());
        }
        let block = self.block(number, handles, lease, len)?;
        let storage = self.storage(&block, len, forwarded, number.is_none(), lease)?;
        let storage = match origin {
            Some(device) => storage.with_origin(device.parse()?),
            None => storage,
        };
        Ok(storage.with_provenance(Provenance { rung, lease }))
    }

    fn sent(&self, lease: LeaseId) {
        self.session.sent(lease);
    }

    fn unopened(&self, lease: LeaseId) {
        self.session.remark(lease, Remark::Unknown);
    }

    fn receipt(&self, lease: LeaseId) -> Receipt {
        let remark = self.session.take_remark(lease).map(|remark| match remark {
            Remark::Unknown => UNKNOWN,
            Remark::Exposed => EXPOSED,
        });
        // A string is JSON in any case; were it not, the receipt alone does.
        let meta = remark.and_then(|remark| Meta::write(&remark).ok());
        Receipt { rung: RungId::SHM, lease, meta, handles: Vec::new() }
    }

    fn released(&self, receipt: Receipt) {
        let remark = receipt.meta.and_then(|meta| match meta.read::<String>().ok()?.as_str() {
            UNKNOWN => Some(Remark::Unknown),
            EXPOSED => Some(Remark::Exposed),
            _ => None,
        });
        self.session.released(receipt.lease, remark);
    }

    /// Every block of ours may be written again.
    fn peer_gone(&self) {
        self.session.peer_gone();
    }

    fn notice(&self) -> Option<Meta> {
        let x = self.session.take_retired();
        if x.is_empty() { None } else { Meta::write(&Notice { x }).ok() }
    }

    fn keeps(&self) -> bool {
        self.session.keeps()
    }

    fn noticed(&self, notice: Meta) -> Result<(), Fault> {
        self.session.forget(&notice.read::<Notice>()?.x);
        Ok(())
    }

    fn wake_with(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.session.wake.set(wake);
    }
}
