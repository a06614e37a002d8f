//! One peer's session as a carrier.

use std::sync::Arc;

use cuda::{Buffer, Context, PointerHandle, Stream};
use cuda_memory::CudaMemory;
use cuda_memory::block::{Block, Hold, Token};
use cuda_memory::events::{EventWire, Ours, from_text, to_text};
use cuda_memory::memory::Source;
use rung::sent::Naming;
use rung::{
    Access, Carrier, Device, Fault, Fill, LeaseId, Meta, Packed, Parcel, Provenance, Reach, Reason,
    Receipt, Refusal, RungId, Storage,
};
use serde::{Deserialize, Serialize};

use crate::contract::{Allocated, Exported, Home};
use crate::import::Import;
use crate::pools::{MAX_BYTES, STEP, allocate, too_large};
use crate::session::{End, ReceiptMeta, Session};
use crate::steps::Said;

/// The metadata of a parcel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ParcelMeta {
    /// The number of the allocation; of the receiver's own, where it comes back.
    b: u64,
    /// The number of its pool.
    #[serde(default, skip_serializing_if = "is_default")]
    p: u64,
    /// The device: its place in the sender's offer.
    d: usize,
    /// Bytes of the allocation, and where in it the storage begins.
    s: usize,
    #[serde(default, skip_serializing_if = "is_default")]
    o: usize,
    /// The handle of the pointer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    h: Option<String>,
    /// What has yet to run before it may be read (O4).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    e: Option<EventWire>,
    /// To be kept between leases.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    k: bool,
    /// The receiver's own, come back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    r: bool,
    /// A secret of the lease, between two ends in one process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    t: Option<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Where in its allocation a buffer begins, and the bytes of that.
fn place_in_allocation(buffer: &Buffer) -> Result<(usize, usize), Refusal> {
    let (start, size) = buffer.attributes()?.range;
    let before = buffer.address().checked_sub(start).and_then(|at| usize::try_from(at).ok());
    Ok((before.ok_or(Reason::OutOfBounds)?, size))
}

type Lease = cuda_memory::lease::Lease<Session>;

#[derive(Debug)]
pub(crate) struct PoolCarrier {
    session: Arc<Session>,
}

/// Says that an allocation is freed, when it is.
#[derive(Debug)]
struct Ends {
    owner: String,
    number: u64,
}

impl Drop for Ends {
    fn drop(&mut self) {
        let (owner, allocation) = (&*self.owner, self.number);
        Said { owner, importer: "-", allocation }.step("free");
    }
}

impl PoolCarrier {
    pub(crate) fn new(session: Session) -> Self {
        Self { session: Arc::new(session) }
    }

    /// Ours: a pool's, and of a size that drivers bear.
    fn lend(
        &self,
        storage: &Arc<Storage>,
        hold: &Arc<Hold>,
        range: std::ops::Range<usize>,
    ) -> Result<Packed, Refusal> {
        let session = &self.session;
        let buffer = &hold.block().buffer;
        if buffer.len() > MAX_BYTES {
            return Err(too_large(buffer.len()));
        }
        let pool = buffer.pool().filter(|pool| !pool.is_imported()).cloned();
        let pool = pool.ok_or_else(|| {
            Refusal::new(Reason::OtherAllocator, "not of a shareable pool of this process")
        })?;
        let (before, size) = place_in_allocation(buffer)?;
        if size > MAX_BYTES {
            return Err(too_large(size));
        }
        if !size.is_multiple_of(STEP) {
            let detail = format!("{size} bytes, which is no multiple of {} MiB (D3)", STEP >> 20);
            return Err(Refusal::new(Reason::OtherAllocator, detail));
        }
        let device = self.session.pair.place_of(buffer.device())?;
        // O2: the pool before any pointer of it.
        let exported = pool.exported()?;
        let handle = exported.pointer(buffer)?;
        let lease = session.next_lease();
        let is_one_process = session.pair.is_one_process;
        let token = if is_one_process { Some(Token::new(hold)?) } else { None };
        let descriptor =
            if session.has_pool(pool.number()) { None } else { Some(exported.descriptor()?) };
        let allocated = Allocated::new(Arc::clone(hold.block()));
        let ready = allocated.ready(|block| session.events.ready(&session.pair, &block.order))?;
        let (pin, event) = ready.export();
        let e = match event.as_ref().map(Ours::wire) {
            None => None,
            Some(Ok(wire)) => Some(wire),
            Some(Err(refusal)) => {
                event.into_iter().for_each(|event| session.events.give_back(event));
                drop(pin.home(Home(())).reclaim());
                return Err(refusal);
            }
        };
        let (terms, pin) = session.lend(lease, &pool, hold, event, pin);
        hold.block().watch(session);
        hold.block().at_end(|| {
            let owner = session.pair.names.mine.clone();
            Box::new(Ends { owner, number: hold.block().serial })
        });
        let handles = match terms.pool {
            Naming::Number => Vec::new(),
            // Unless the peer has forgotten it just now.
            Naming::First | Naming::Once => match descriptor {
                Some(descriptor) => vec![descriptor],
                None => exported.descriptor().into_iter().collect(),
            },
        };
        let t = token.as_ref().map(Token::wire);
        let owner = Lent {
            storage: Some(Arc::clone(storage)),
            hold: Some(Arc::clone(hold)),
            pin,
            lease,
            session: Arc::clone(session),
            _token: token,
        };
        let meta = Meta::write(&ParcelMeta {
            b: hold.block().serial,
            p: pool.number(),
            d: device,
            s: size,
            o: before + range.start,
            h: (!is_one_process).then(|| to_text(&handle.0)),
            e,
            k: terms.keep,
            r: false,
            t,
        })?;
        let handles = if is_one_process { Vec::new() } else { handles };
        let bytes = storage.len() as u64;
        let parcel = Parcel { rung: RungId::POOL_IPC, lease, bytes, copies: 0, meta, handles };
        Ok(Packed { parcel, owner: Box::new(owner), access: Access::Lent })
    }

    /// The peer's own goes back to it; to anybody else it does not go on (O8).
    fn give_back(
        &self,
        storage: &Arc<Storage>,
        theirs: &Lease,
        range: std::ops::Range<usize>,
    ) -> Result<Packed, Refusal> {
        let session = &self.session;
        if !std::ptr::eq(theirs.session.as_ptr(), Arc::as_ptr(session)) {
            let what = "another process's, of a pool, which goes no further (O8)";
            return Err(Refusal::new(Reason::OtherAllocator, what));
        }
        let import = theirs.import()?;
        let lease = session.next_lease();
        let meta = Meta::write(&ParcelMeta {
            b: theirs.number,
            p: 0,
            d: self.session.pair.place_of(import.device)?,
            s: import.size,
            o: range.start,
            h: None,
            e: None,
            k: false,
            r: true,
            t: None,
        })?;
        session.give_back(lease);
        let owner = Lent {
            storage: Some(Arc::clone(storage)),
            hold: None,
            pin: None,
            lease,
            session: Arc::clone(session),
            _token: None,
        };
        let bytes = storage.len() as u64;
        let parcel =
            Parcel { rung: RungId::POOL_IPC, lease, bytes, copies: 0, meta, handles: Vec::new() };
        Ok(Packed { parcel, owner: Box::new(owner), access: Access::Lent })
    }

    /// Memory of this process that a parcel brings back.
    fn returned(&self, meta: &ParcelMeta, len: usize) -> Result<CudaMemory, Fault> {
        let hold = match &meta.t {
            Some(token) => Hold::of_token(token),
            None => self.session.own(meta.b),
        };
        let found = hold.and_then(|hold| {
            let (before, _) = place_in_allocation(&hold.block().buffer).ok()?;
            let offset = meta.o.checked_sub(before)?;
            let fits = offset.checked_add(len)? <= hold.block().buffer.len();
            fits.then_some((hold, offset))
        });
        let (hold, offset) = found.ok_or_else(|| {
            Fault::new(Reason::UnknownLease, "memory of this process that is not lent out")
        })?;
        Ok(CudaMemory::own(hold, true, offset, len))
    }

    fn theirs(
        &self,
        lease: LeaseId,
        meta: ParcelMeta,
        device: Device,
        descriptor: Option<rung::Handle>,
        len: usize,
    ) -> Result<CudaMemory, Fault> {
        let session = &self.session;
        if meta.o.checked_add(len).is_none_or(|end| end > meta.s) {
            let detail = format!("{len} bytes from {} on, of {}", meta.o, meta.s);
            return Err(Fault::new(Reason::OutOfBounds, detail));
        }
        if meta.s > MAX_BYTES || !meta.s.is_multiple_of(STEP) {
            return Err(Fault::new(Reason::WrongSize, format!("{} bytes (D3)", meta.s)));
        }
        let bare = || Fault::new(Reason::BadMetadata, "no handle of a pointer");
        let handle = PointerHandle(from_text(meta.h.as_deref().ok_or_else(bare)?)?);
        let pool = session.pool(lease, meta.p, device, descriptor)?;
        let import = Import::of(pool, meta.b, meta.s, handle)?;
        session.hold(lease, meta.b, &import, meta.k)?;
        // What is not kept is freed before its receipt, after all work on it (O6).
        let how = (meta.k, !meta.k);
        let held = Lease::new(session, (lease, meta.b), import, how, meta.e);
        // Where this process has no context of the device, opening it waits until somebody looks.
        if Context::exists(device) {
            held.open_all()?;
        }
        Ok(CudaMemory::theirs(Arc::new(held), meta.o, len))
    }
}

impl Carrier for PoolCarrier {
    fn devices(&self) -> Vec<(Device, Reach)> {
        self.session.pair.reach()
    }

    fn specimen(&self, device: Device, len: usize, fill: Fill<'_>) -> Result<Storage, Refusal> {
        let context = Context::of(device)?;
        let mut contents = vec![0; len];
        fill(&mut contents);
        let stream = Stream::new(&context)?;
        let buffer = allocate(&stream, len)?;
        Block::written_late(buffer, stream, contents)
    }

    fn export(&self, storage: &Arc<Storage>) -> Result<Packed, Refusal> {
        if storage.is_empty() {
            return Err(Reason::Empty.into());
        }
        if storage.device().is_host() {
            return Err(Refusal::new(Reason::OtherKind, "memory of the host"));
        }
        let memory = CudaMemory::of(storage)?;
        match memory.source() {
            Source::Own(hold, _) => self.lend(storage, hold, memory.range()),
            Source::Theirs(lease) => match Lease::of(&**lease) {
                Some(lease) => self.give_back(storage, lease, memory.range()),
                None => {
                    let what = "another process's, which did not come of a pool";
                    Err(Refusal::new(Reason::OtherAllocator, what))
                }
            },
        }
    }

    fn import(&self, parcel: Parcel) -> Result<Storage, Fault> {
        let Parcel { rung, lease, bytes, meta, mut handles, .. } = parcel;
        if rung != RungId::POOL_IPC {
            return Err(Fault::new(Reason::UnknownRung, rung.as_str()));
        }
        let meta: ParcelMeta = meta.read()?;
        let len = usize::try_from(bytes).map_err(|_| Reason::WrongSize)?;
        if len == 0 {
            return Err(Reason::Empty.into());
        }
        if isize::try_from(len).is_err() {
            return Err(Fault::new(Reason::WrongSize, "more than there can be"));
        }
        let device = self.session.pair.device_at(meta.d)?;
        let is_ours = meta.r || meta.t.is_some();
        if handles.len() > usize::from(!is_ours) {
            return Err(Fault::new(Reason::WrongHandles, format!("{}", handles.len())));
        }
        let memory = if is_ours {
            self.returned(&meta, len)?
        } else {
            self.theirs(lease, meta, device, handles.pop(), len)?
        };
        Ok(Storage::new(memory).with_provenance(Provenance { rung, lease }))
    }

    fn sent(&self, lease: LeaseId) {
        self.session.sent(lease);
    }

    fn unopened(&self, lease: LeaseId) {
        self.session.unopened(lease);
    }

    fn is_settled(&self, lease: LeaseId) -> bool {
        self.session.is_settled(lease)
    }

    fn receipt(&self, lease: LeaseId) -> Receipt {
        let meta = self.session.receipt(lease);
        Receipt { rung: RungId::POOL_IPC, lease, meta, handles: Vec::new() }
    }

    fn released(&self, receipt: Receipt) {
        let said = receipt.meta.map_or(Ok(ReceiptMeta::default()), |meta| meta.read());
        // What cannot be read may have said that the peer is not done: it is lost, as if it had never come.
        if let Ok(said) = said {
            self.session.released(receipt.lease, &said);
        }
    }

    fn peer_gone(&self) {
        self.session.peer_gone();
    }

    fn notice(&self) -> Option<Meta> {
        self.session.notice()
    }

    fn keeps(&self) -> bool {
        self.session.keeps()
    }

    fn noticed(&self, notice: Meta) -> Result<(), Fault> {
        self.session.noticed(&notice)
    }

    fn wake_with(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.session.wake.set(wake);
    }
}

/// The owner of what is lent: pins it until the lease is home (O3).
struct Lent {
    storage: Option<Arc<Storage>>,
    /// Ours, where it is: its users do not end before its leases do.
    hold: Option<Arc<Hold>>,
    /// Where the session does not pin it until its importer has freed it.
    pin: Option<Exported<Arc<Block>>>,
    lease: LeaseId,
    session: Arc<Session>,
    _token: Option<Token>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let end = self.session.end(self.lease);
        if let Some(hold) = &self.hold
            && matches!(end, End::Unknown)
        {
            hold.block().spoil();
        }
        match (self.pin.take(), end) {
            (None, _) => {}
            (Some(pin), End::Home) => drop(pin.home(Home(())).reclaim()),
            (Some(pin), End::Dead(proof)) => drop(pin.dead(proof).reclaim()),
            (Some(pin), End::Unknown) => self.session.quarantine(pin),
        }
        drop((self.storage.take(), self.hold.take()));
    }
}
