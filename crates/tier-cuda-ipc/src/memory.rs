//! Device memory as the memory of storages.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use bytemuck::AnyBitPattern;
use cuda::{Buffer, Context, Event, SliceView, Stream};
use cudarc::driver::{CudaStream, DeviceRepr};
use rung::{Device, Fault, LeaseId, Memory, Reason, Refusal, Storage};

use crate::block::Hold;
use crate::events::EventWire;
use crate::import::Import;
use crate::lock;
use crate::session::{Key, Session};

/// Memory of a CUDA device, ours or a peer's.
///
/// It lends no bytes: what it has is an address for work on a stream ([`CudaMemory::on`]), and the CPU gets copies
/// ([`Memory::read_at`]).
#[derive(Debug)]
pub struct CudaMemory {
    pub(crate) source: Source,
    /// Where in the source it begins.
    pub(crate) offset: usize,
    pub(crate) len: usize,
    /// What came back after it was lent on: the storage that it was lent of, which keeps its own lease.
    pub(crate) _whole: Option<Arc<Storage>>,
}

#[derive(Debug)]
pub(crate) enum Source {
    /// Ours; and whether it was lent out and came back.
    Own(Arc<Hold>, bool),
    Theirs(Arc<Lease>),
}

/// A lease on memory of a peer's.
#[derive(Debug)]
pub(crate) struct Lease {
    /// Let go before the session hears of it: it may be what closes it.
    pub(crate) import: Option<Arc<Import>>,
    /// Its number among what is kept; 0 where it is not.
    pub(crate) key: Key,
    /// Its owner's number for it.
    pub(crate) number: Key,
    pub(crate) lease: LeaseId,
    pub(crate) session: Weak<Session>,
    /// What its owner has yet to do to it.
    pub(crate) ready: Option<EventWire>,
    pub(crate) opened: OnceLock<Arc<Event>>,
    /// That is done: its event is not looked at again, since its owner may be gone by then.
    pub(crate) is_ready: AtomicBool,
    /// Streams that used it.
    pub(crate) used: Mutex<Vec<Stream>>,
    /// Whether what runs on it has to be done before its receipt goes.
    pub(crate) settles: bool,
}

impl Lease {
    pub(crate) fn import(&self) -> Result<&Arc<Import>, Refusal> {
        // Taken by `drop` alone.
        self.import.as_ref().ok_or_else(|| Reason::UnknownLease.into())
    }

    /// What is enqueued on a stream from now on comes after what its owner has enqueued.
    fn order(&self, stream: &Stream) -> Result<(), Fault> {
        if self.is_ready.load(Ordering::Acquire) {
            return Ok(());
        }
        let Some(event) = self.ready_event(stream.context())? else { return Ok(()) };
        if event.is_done()? {
            self.is_ready.store(true, Ordering::Release);
            return Ok(());
        }
        // Of an owner that is gone, what was not done may never be.
        if self.session.upgrade().is_none_or(|session| session.is_gone()) {
            return Err(Reason::OwnerGone.into());
        }
        Ok(stream.wait(&event)?)
    }

    /// Its owner's event, opened once.
    pub(crate) fn ready_event(&self, context: &Arc<Context>) -> Result<Option<Arc<Event>>, Fault> {
        let Some(ready) = &self.ready else { return Ok(None) };
        let event = match self.opened.get() {
            Some(event) => event,
            None => {
                let session = self.session.upgrade().ok_or(Reason::OwnerGone)?;
                let event = session.their_ready_event(ready, context)?;
                self.opened.get_or_init(|| event)
            }
        };
        Ok(Some(Arc::clone(event)))
    }
}

impl Lease {
    /// A stream is about to use it, or has.
    fn note(&self, stream: &Stream) -> Result<(), Refusal> {
        self.import()?.used_on(stream);
        let mut used = lock(&self.used);
        if !used.iter().any(|known| known.is(stream)) {
            used.push(stream.clone());
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let used = std::mem::take(&mut *lock(&self.used));
        let Some(session) = self.session.upgrade() else { return };
        // What is not kept is closed before its owner hears that it was let go, and after all work on it.
        let once = self.import.take().filter(|_| self.key == 0);
        session.note_used(self.lease, used, once, self.settles);
        session.let_go(self.key);
    }
}

impl CudaMemory {
    pub(crate) fn of(storage: &Storage) -> Result<&Self, Refusal> {
        storage.memory_as::<Self>().ok_or_else(|| {
            Refusal::new(Reason::OtherKind, "not device memory that these rungs know")
        })
    }

    /// The memory itself.
    fn buffer(&self) -> Result<Buffer, Fault> {
        let whole = match &self.source {
            Source::Own(hold, _) => hold.block.buffer.clone(),
            Source::Theirs(lease) => lease.import()?.open()?,
        };
        let end = self.offset.checked_add(self.len).ok_or(Reason::OutOfBounds)?;
        Ok(whole.part(self.offset..end)?)
    }

    /// An address for work on a stream: what is enqueued there from now on comes after what its owner has
    /// enqueued, and, once the [`Use`] is dropped, before whatever its owner does next.
    ///
    /// # Errors
    ///
    /// [`Reason::OwnerGone`] where the process that owned it took it along, or what the driver answers.
    pub fn on(&self, stream: &Stream) -> Result<Use<'_>, Refusal> {
        let buffer = self.buffer()?;
        match &self.source {
            Source::Own(hold, _) => stream.after(&hold.block.order)?,
            Source::Theirs(lease) => {
                lease.order(stream)?;
                lease.note(stream)?;
            }
        }
        Ok(Use { memory: self, buffer, stream: stream.clone() })
    }
}

/// Device memory that work on a stream may read, until this is dropped: by then that work has to be enqueued.
#[derive(Debug)]
pub struct Use<'a> {
    memory: &'a CudaMemory,
    buffer: Buffer,
    stream: Stream,
}

impl Use<'_> {
    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// The memory; not handed out, since whoever kept it would have it mapped after it was given back.
    pub(crate) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The elements as a slice of `cudarc`'s, for its functions; to be read, and by work on this very stream.
    ///
    /// # Errors
    ///
    /// As [`cuda::Buffer::as_slice`], and [`Reason::DeviceUnknown`] for another stream than [this one](Self::stream).
    pub fn as_slice<T: DeviceRepr + AnyBitPattern>(
        &self,
        stream: &Arc<CudaStream>,
    ) -> Result<SliceView<'_, T>, Refusal> {
        if !Stream::of_cudarc(stream)?.is(&self.stream) {
            return Err(Refusal::new(
                Reason::DeviceUnknown,
                "another stream than it was asked for",
            ));
        }
        self.buffer.as_slice(stream)
    }

    /// The stream that it may be read on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

/// A use on a stream has ended: where nothing could be ordered after it, waiting here is as good, if the driver does that
/// much.
pub(crate) fn or_wait(stream: &Stream, ordered: Result<(), Refusal>) {
    if let Err(refusal) = ordered {
        tracing::warn!("the owner's stream could not be ordered after a use: {refusal}");
        let _ = stream.synchronize();
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        or_wait(
            &self.stream,
            match &self.memory.source {
                Source::Own(hold, _) => hold.block.order.after(&self.stream),
                // By now the work is enqueued; what is let go asks all streams that were noted.
                Source::Theirs(lease) => lease.note(&self.stream),
            },
        );
    }
}

impl Memory for CudaMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn device(&self) -> Device {
        match &self.source {
            Source::Own(hold, _) => hold.block.buffer.device(),
            Source::Theirs(lease) => {
                lease.import.as_ref().map_or(Device::Host, |import| import.device)
            }
        }
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        Err(Refusal::new(Reason::DeviceMemory, self.device().to_string()))
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        if let Source::Own(hold, _) = &self.source
            && let Some((contents, _)) = &hold.block.contents
        {
            let from = self
                .offset
                .checked_add(offset)
                .and_then(|from| contents.get(from..from.checked_add(into.len())?));
            into.copy_from_slice(from.ok_or(Reason::OutOfBounds)?);
            return Ok(());
        }
        let stream = match &self.source {
            Source::Own(hold, _) => hold.block.order.clone(),
            Source::Theirs(lease) => lease.import()?.reads()?,
        };
        let used = self.on(&stream)?;
        used.buffer.read_at(offset, into, &stream)
    }

    fn block(&self) -> u64 {
        let serial = match &self.source {
            Source::Own(hold, _) => hold.block.serial,
            Source::Theirs(lease) => lease.import.as_ref().map_or(0, |import| import.serial),
        };
        // Apart from the numbers of other rungs.
        1 << 63 | serial
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn is_ours(&self) -> bool {
        matches!(self.source, Source::Own(_, true))
    }
}
