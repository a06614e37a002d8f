//! One peer's session as a carrier, on either rung.

use std::sync::Arc;

use cuda::{Buffer, Context, MemHandle, Stream};
use cuda_memory::CudaMemory;
use cuda_memory::block::{Block, Hold, Token};
use cuda_memory::events::{EventWire, Ours, from_text, to_text};
use cuda_memory::memory;
use rung::{
    Access, Carrier, Device, Fault, Fill, Handle, LeaseId, Memory, Meta, Packed, Parcel,
    Provenance, Reach, Reason, Receipt, Refusal, RungId, Storage,
};
use serde::{Deserialize, Serialize};

use crate::import::Source;
use crate::session::{Key, Lookers, ReceiptMeta, Session};
use crate::staging::forget;

/// Which of both rungs it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By handles of whole allocations, which their process owns.
    Legacy,
    /// By descriptors, which the driver counts.
    Shareable,
}

impl Kind {
    pub(crate) fn id(self) -> RungId {
        match self {
            Self::Legacy => RungId::CUDA_IPC,
            Self::Shareable => RungId::CUDA_VMM,
        }
    }

    /// Whether a peer who is shown an allocation of `size` bytes sees nothing beside the `len` from `offset` on. Shareable
    /// memory is rounded up, with zeros; of the other kind the driver shares pieces among allocations.
    fn shows_nothing_else(self, size: usize, offset: usize, len: usize) -> bool {
        offset == 0
            && match self {
                Self::Legacy => len == size && size.is_multiple_of(PIECE),
                Self::Shareable => size.saturating_sub(len) < PIECE,
            }
    }
}

/// What the driver hands out memory in.
const PIECE: usize = 2 << 20;

/// The metadata of a parcel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ParcelMeta {
    /// The number of the allocation.
    b: Key,
    /// Its serial, where that is another number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    x: Option<u64>,
    /// The device: its place in the sender's offer.
    d: usize,
    /// Bytes of the whole allocation, and where in it the storage begins.
    s: usize,
    #[serde(default, skip_serializing_if = "is_zero")]
    o: usize,
    /// The handle of the older kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    h: Option<String>,
    /// What has yet to run before it may be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    e: Option<EventWire>,
    /// To be kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    k: bool,
    /// Not the sender's own: what runs on it is to be done before its receipt.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    f: bool,
    /// The receiver's own, come back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    r: bool,
    /// A secret of the lease, between two ends in one process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    t: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// What is lent, whoever's it is.
struct Lending {
    number: Key,
    /// The receiver's own number for it, where it goes back.
    returned: Option<Key>,
    serial: u64,
    device: Device,
    size: usize,
    offset: usize,
    once: bool,
    forwarded: bool,
    copies: u8,
    ready: Option<Ours>,
    /// A ready-event that is not this side's own.
    their_ready: Option<EventWire>,
    hold: Option<Arc<Hold>>,
    staged: bool,
}

type Lease = cuda_memory::lease::Lease<Session>;

/// The lease of this crate's that a storage is under.
fn borrowed(storage: &Storage) -> Option<&Lease> {
    match storage.memory_as::<CudaMemory>()?.source() {
        memory::Source::Theirs(lease) => Lease::of(&**lease),
        memory::Source::Own(..) => None,
    }
}

#[derive(Debug)]
pub(crate) struct CudaCarrier {
    kind: Kind,
    session: Arc<Session>,
}

impl CudaCarrier {
    pub(crate) fn new(kind: Kind, session: Session) -> Self {
        Self { kind, session: Arc::new(session) }
    }

    /// Ours, as it is.
    fn own(&self, hold: &Arc<Hold>, offset: usize) -> Result<Lending, Refusal> {
        let block = hold.block();
        let (number, size, from) = match self.kind {
            Kind::Legacy => {
                let legacy = block.legacy()?;
                let is_alone =
                    self.kind.shows_nothing_else(legacy.size, legacy.offset, block.buffer.len());
                if !self.session.is_trusted && !is_alone {
                    // A handle stands for the whole block that the driver took it from.
                    let what = "more than the tensor lies in what a handle shows";
                    return Err(Refusal::new(Reason::PeerNotTrusted, what));
                }
                let number = self.session.number_of(legacy.allocation);
                (number, legacy.size, legacy.offset)
            }
            Kind::Shareable => {
                let shareable = block.buffer.as_shareable().ok_or(Reason::OtherAllocator)?;
                let from = block.buffer.offset_in(shareable).ok_or(Reason::OutOfBounds)?;
                (block.serial, shareable.len(), from)
            }
        };
        let ready = self.session.events.ready(&self.session.pair, &block.order)?;
        let lending = Lending {
            number,
            serial: block.serial,
            device: block.buffer.device(),
            size,
            offset: from + offset,
            once: false,
            forwarded: false,
            returned: None,
            copies: 0,
            ready,
            their_ready: None,
            hold: Some(Arc::clone(hold)),
            staged: false,
        };
        Ok(lending)
    }

    /// A peer's, as it is: the same allocation goes on, under a lease of this hop (L2).
    fn forward(&self, lease: &Lease, offset: usize, len: usize) -> Result<Lending, Refusal> {
        let import = lease.import()?;
        let is_back = std::ptr::eq(lease.session.as_ptr(), Arc::as_ptr(&self.session));
        let is_alone = self.kind.shows_nothing_else(import.size, offset, len);
        if !is_back && !self.session.is_trusted && !is_alone {
            let what = "more than the tensor lies in what the peer would be shown";
            return Err(Refusal::new(Reason::PeerNotTrusted, what));
        }
        if !is_back && let Some(session) = lease.session.upgrade() {
            session.note_lent_on(lease.lease, lease.number);
        }
        let lending = Lending {
            number: if is_back { 0 } else { import.serial },
            returned: is_back.then_some(lease.number),
            serial: import.serial,
            device: import.device,
            size: import.size,
            offset,
            // Of memory that goes with its owner nothing may stay mapped when its owner hears that it came home.
            once: self.kind == Kind::Legacy,
            forwarded: true,
            copies: 0,
            ready: None,
            their_ready: lease.ready.lent_on(),
            hold: None,
            staged: false,
        };
        Ok(lending)
    }

    /// What it is mapped by.
    fn source(&self, storage: &Storage, hold: Option<&Arc<Hold>>) -> Result<Source, Refusal> {
        match (hold, self.kind) {
            (Some(hold), Kind::Legacy) => Ok(Source::Legacy(hold.block().legacy()?.handle)),
            (Some(hold), Kind::Shareable) => {
                let shareable = hold.block().buffer.as_shareable().ok_or(Reason::OtherAllocator)?;
                Ok(Source::Descriptor(shareable.descriptor()?))
            }
            (None, _) => borrowed(storage).ok_or(Reason::OtherKind)?.import()?.source(),
        }
    }

    /// Copied once, on the device.
    fn staged(&self, memory: &CudaMemory) -> Result<Lending, Refusal> {
        let hold = self.session.staging.take(memory.device(), memory.range().len())?;
        let order = hold.block().order.clone();
        memory.on(&order)?.copy_to(&hold.block().buffer)?;
        Ok(Lending { copies: 1, staged: true, ..self.own(&hold, 0)? })
    }

    fn lend(&self, storage: &Arc<Storage>, lending: Lending) -> Result<Packed, Refusal> {
        let lease = self.session.next_lease();
        let Lending { number, serial, ready, hold, .. } = lending;
        let ready_wire = match ready.as_ref().map(Ours::wire) {
            None => lending.their_ready,
            Some(Ok(wire)) => Some(wire),
            Some(Err(refusal)) => {
                ready.into_iter().for_each(|ready| self.session.events.give_back(ready));
                return Err(refusal);
            }
        };
        if let Some(hold) = &hold
            && !self.session.is_trusted
            && !lending.staged
        {
            // Nobody can take the peer's mapping from it (L8).
            hold.block().spoil();
        }
        let one_process = self.session.pair.is_one_process;
        let token = match hold.as_ref().filter(|_| one_process) {
            Some(hold) => Some(Token::new(hold)?),
            None => None,
        };
        let once = lending.once || one_process;
        let forwarded = (hold.is_none() && lending.returned.is_none()).then_some(storage);
        let lent = (hold.as_ref(), forwarded);
        let naming = self.session.lend(lease, (number, serial), once, lent, ready);
        let t = token.as_ref().map(Token::wire);
        // From here on, what is not sent is taken back when this is dropped.
        let mut owner = Lent {
            storage: (!lending.staged).then(|| Arc::clone(storage)),
            hold,
            is_legacy: self.kind == Kind::Legacy,
            staged: lending.staged,
            lease,
            session: Arc::clone(&self.session),
            _token: token,
            packed: false,
        };
        match (&owner.hold, borrowed(storage)) {
            (Some(hold), _) if naming.keep => {
                if self.kind == Kind::Legacy {
                    self.session.keep(hold.block());
                }
                hold.block().watch(&self.session);
            }
            (None, Some(lease)) if lending.returned.is_none() => {
                lease.import()?.watch(&self.session);
            }
            _ => {}
        }
        let with_source = naming.with_source && !one_process;
        let source =
            if with_source { Some(self.source(storage, owner.hold.as_ref())?) } else { None };
        let (h, handles) = match source {
            None => (None, Vec::new()),
            Some(Source::Legacy(handle)) => (Some(to_text(&handle.0)), Vec::new()),
            Some(Source::Descriptor(descriptor)) => (None, vec![descriptor]),
        };
        let meta = Meta::write(&ParcelMeta {
            b: lending.returned.unwrap_or(number),
            x: (serial != number && lending.returned.is_none()).then_some(serial),
            d: self.session.pair.place_of(lending.device)?,
            s: lending.size,
            o: lending.offset,
            h,
            e: ready_wire,
            k: naming.keep,
            f: lending.forwarded,
            r: lending.returned.is_some(),
            t,
        })?;
        let (rung, bytes, copies) = (self.kind.id(), storage.len() as u64, lending.copies);
        let parcel = Parcel { rung, lease, bytes, copies, meta, handles };
        owner.packed = true;
        Ok(Packed { parcel, owner: Box::new(owner), access: Access::Lent })
    }

    /// The memory of this process that a parcel brings back.
    fn returned(&self, meta: &ParcelMeta, len: usize) -> Result<CudaMemory, Fault> {
        let out = match &meta.t {
            Some(token) => Hold::of_token(token).into_iter().collect(),
            None => self.session.own(meta.b),
        };
        // Several blocks may lie in one allocation.
        if out.is_empty() && meta.t.is_none() {
            return self.forward_returned(meta, len);
        }
        let found = out.into_iter().find_map(|hold| {
            let from = match self.kind {
                Kind::Legacy => hold.block().legacy().ok()?.offset,
                Kind::Shareable => {
                    let shareable = hold.block().buffer.as_shareable()?;
                    hold.block().buffer.offset_in(shareable)?
                }
            };
            let offset = meta.o.checked_sub(from)?;
            let fits = offset.checked_add(len)? <= hold.block().buffer.len();
            fits.then_some((hold, offset))
        });
        let (hold, offset) = found.ok_or_else(|| {
            Fault::new(Reason::UnknownLease, "memory of this process that is not lent out")
        })?;
        Ok(CudaMemory::own(hold, true, offset, len))
    }

    /// A third's, which was lent on to the peer and came back: the very memory that it was lent of.
    fn forward_returned(&self, meta: &ParcelMeta, len: usize) -> Result<CudaMemory, Fault> {
        let found = self.session.forwarded(meta.b).into_iter().find_map(|whole| {
            borrowed(&whole)?;
            let (all, end) = (CudaMemory::of(&whole).ok()?.range(), meta.o.checked_add(len)?);
            let fits = meta.o >= all.start && end <= all.end;
            if fits { CudaMemory::part_of(&whole, meta.o..end) } else { None }
        });
        found
            .ok_or_else(|| Fault::new(Reason::UnknownLease, "memory that was not lent to the peer"))
    }

    /// What a parcel's allocation is mapped by, if that came along.
    fn source_of(&self, meta: &ParcelMeta, handles: Vec<Handle>) -> Result<Option<Source>, Fault> {
        let count = handles.len();
        let mut handles = handles.into_iter();
        match (self.kind, &meta.h, handles.next(), count) {
            (Kind::Legacy, Some(text), None, 0) => {
                Ok(Some(Source::Legacy(MemHandle(from_text(text)?))))
            }
            (Kind::Shareable, None, Some(descriptor), 1) => {
                Ok(Some(Source::Descriptor(descriptor)))
            }
            (_, None, None, 0) if meta.k => Ok(None),
            _ => Err(Fault::new(Reason::WrongHandles, format!("{count}"))),
        }
    }

    fn theirs(
        &self,
        lease: LeaseId,
        meta: ParcelMeta,
        device: Device,
        source: Option<Source>,
        len: usize,
    ) -> Result<CudaMemory, Fault> {
        let end = meta.o.checked_add(len).filter(|end| *end <= meta.s);
        if end.is_none() {
            let detail = format!("{len} bytes from {} on, of {}", meta.o, meta.s);
            return Err(Fault::new(Reason::OutOfBounds, detail));
        }
        let session = &self.session;
        let whole = (device, meta.s);
        let (import, key) = session.obtain(lease, meta.b, whole, source, meta.k)?;
        let how = (key != 0, meta.f);
        let held = Lease::new(session, (lease, meta.b), Arc::clone(&import), how, meta.e);
        // Where this process has no context of the device, opening it waits until somebody looks: what only
        // forwards needs none.
        if Context::exists(device)
            && let Err(fault) = held.open_all()
        {
            drop(import);
            // Sent again, it comes with all that it takes.
            drop(held);
            session.discard(key);
            return Err(fault);
        }
        Ok(CudaMemory::theirs(Arc::new(held), meta.o, len))
    }

    /// Whether a block can be shown to the peer as it is: a stranger sees all of its allocation.
    fn goes_as_it_is(&self, hold: &Hold) -> bool {
        let buffer = &hold.block().buffer;
        buffer.as_shareable().is_some_and(|shareable| {
            let (size, len) = (shareable.len(), buffer.len());
            let at = buffer.offset_in(shareable);
            self.session.is_trusted
                || at.is_some_and(|at| self.kind.shows_nothing_else(size, at, len))
        })
    }
}

impl Carrier for CudaCarrier {
    fn devices(&self) -> Vec<(Device, Reach)> {
        self.session.pair.reach()
    }

    fn specimen(&self, device: Device, len: usize, fill: Fill<'_>) -> Result<Storage, Refusal> {
        let context = Context::of(device)?;
        let mut contents = vec![0; len];
        fill(&mut contents);
        let buffer = match self.kind {
            // Alone in what its handle shows.
            Kind::Legacy => Buffer::plain(&context, len.next_multiple_of(PIECE))?,
            Kind::Shareable => Buffer::shareable(&context, len)?,
        };
        let stream = Stream::new(&context)?;
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
        // Before anything is set up for it.
        self.session.pair.place_of(memory.device())?;
        let range = memory.range();
        let lending = match (memory.source(), self.kind) {
            (memory::Source::Own(hold, _), Kind::Legacy) => self.own(hold, range.start)?,
            (memory::Source::Own(hold, _), Kind::Shareable) => {
                if self.goes_as_it_is(hold) {
                    self.own(hold, range.start)?
                } else {
                    self.staged(memory)?
                }
            }
            (memory::Source::Theirs(borrowed), kind) => {
                let lease = Lease::of(&**borrowed);
                let is_legacy = lease.map(|lease| lease.import().map(|import| import.is_legacy()));
                match (lease.zip(is_legacy.transpose()?), kind) {
                    // By a rung that is not this crate's.
                    (None, Kind::Legacy) => {
                        let what = "another process's, which did not come by cuda-ipc";
                        return Err(Refusal::new(Reason::OtherAllocator, what));
                    }
                    (None, Kind::Shareable) => self.staged(memory)?,
                    (Some((lease, true)), Kind::Legacy)
                    | (Some((lease, false)), Kind::Shareable) => {
                        match self.forward(lease, range.start, range.len()) {
                            Err(why)
                                if why.reason() == Reason::PeerNotTrusted
                                    && kind == Kind::Shareable =>
                            {
                                self.staged(memory)?
                            }
                            forwarded => forwarded?,
                        }
                    }
                    (Some((_, false)), Kind::Legacy) => {
                        let what = "another process's, which came by cuda-vmm";
                        return Err(Refusal::new(Reason::OtherAllocator, what));
                    }
                    (Some((_, true)), Kind::Shareable) => self.staged(memory)?,
                }
            }
        };
        self.lend(storage, lending)
    }

    fn import(&self, parcel: Parcel) -> Result<Storage, Fault> {
        let Parcel { rung, lease, bytes, meta, handles, .. } = parcel;
        if rung != self.kind.id() {
            return Err(Fault::new(Reason::UnknownRung, rung.as_str()));
        }
        let meta: ParcelMeta = meta.read()?;
        let len = usize::try_from(bytes).map_err(|_| Reason::WrongSize)?;
        if len == 0 {
            return Err(Reason::Empty.into());
        }
        if isize::try_from(len).is_err() || isize::try_from(meta.s).is_err() {
            return Err(Fault::new(Reason::WrongSize, "more than there can be"));
        }
        let device = self.session.pair.device_at(meta.d)?;
        let memory = if meta.r || meta.t.is_some() {
            self.returned(&meta, len)?
        } else {
            let source = self.source_of(&meta, handles)?;
            self.theirs(lease, meta, device, source, len)?
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
        Receipt { rung: self.kind.id(), lease, meta, handles: Vec::new() }
    }

    fn released(&self, receipt: Receipt) {
        let said = receipt.meta.map_or(Ok(ReceiptMeta::default()), |meta| meta.read());
        // What cannot be read may have said that the peer is not done: it is lost, as if it had never come.
        if let Ok(said) = said {
            self.session.released(receipt.lease, said);
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

/// The owner of what is lent.
struct Lent {
    /// Kept until the lease is home; not of what was copied.
    storage: Option<Arc<Storage>>,
    hold: Option<Arc<Hold>>,
    is_legacy: bool,
    staged: bool,
    lease: LeaseId,
    session: Arc<Session>,
    _token: Option<Token>,
    /// Whether a parcel was made for it: without one nobody was lent anything.
    packed: bool,
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !self.packed {
            self.session.unlend(self.lease);
            if let Some(hold) = self.hold.take().filter(|_| self.staged) {
                self.session.staging.give(hold);
            }
            return;
        }
        let lookers = self.session.end(self.lease);
        let lent_on = self.hold.as_ref().is_some_and(|hold| hold.block().was_lent_on());
        let may_be_mapped = match lookers {
            Lookers::Nobody => false,
            Lookers::Heirs => lent_on,
            Lookers::Somebody => true,
        };
        if may_be_mapped && self.is_legacy {
            // Freeing what somebody may have mapped is undefined behaviour of the driver's: it stays for good.
            std::mem::forget(self.storage.take());
            if let Some(hold) = &self.hold {
                std::mem::forget(Arc::clone(hold.block()));
            }
        }
        let Some(hold) = self.hold.take() else { return };
        match lookers {
            Lookers::Nobody if self.staged => return self.session.staging.give(hold),
            Lookers::Nobody => {}
            Lookers::Heirs | Lookers::Somebody => hold.block().spoil(),
        }
        // Its users may have let go: freeing waits for the device, and whoever reads the socket is here.
        let storage = self.storage.take();
        if storage.as_ref().is_none_or(|storage| Arc::strong_count(storage) == 1) {
            forget((storage, hold));
        }
    }
}
