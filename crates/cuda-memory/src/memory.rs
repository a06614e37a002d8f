//! Device memory as the memory of storages.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use cuda::{Buffer, SliceView, Stream};
use cudarc::driver::{CudaStream, DeviceRepr};
use rung::{Device, Fault, Memory, Reason, Refusal, Storage};

use crate::block::Hold;

/// Memory of a CUDA device, ours or a peer's.
///
/// It lends no bytes: what it has is an address for work on a stream ([`CudaMemory::on`]), and the CPU gets copies
/// ([`Memory::read_at`]).
#[derive(Debug)]
pub struct CudaMemory {
    source: Source,
    /// Where in the source it begins.
    offset: usize,
    len: usize,
    /// What came back after it was lent on: the storage that it was lent of, which keeps its own lease.
    _whole: Option<Arc<Storage>>,
}

/// Whose memory it is.
#[derive(Debug, Clone)]
pub enum Source {
    /// Ours; and whether it was lent out and came back.
    Own(Arc<Hold>, bool),
    /// A peer's, under a lease of some rung's.
    Theirs(Arc<dyn Borrowed>),
}

/// What only this crate can make.
#[derive(Debug)]
pub struct Inside(());

/// A lease on memory of a peer's, as the rung that borrowed it keeps it.
pub trait Borrowed: Any + fmt::Debug + Send + Sync {
    /// Where the memory is.
    fn device(&self) -> Device;

    /// What storages of the same memory have in common.
    fn serial(&self) -> u64;

    /// All of the memory that was borrowed; for this crate alone, which lends no more of it than an address: whoever kept
    /// it would have it mapped after it was given back.
    ///
    /// # Errors
    ///
    /// [`Reason::OwnerGone`], or what the driver answers.
    fn open(&self, inside: Inside) -> Result<Buffer, Fault>;

    /// A stream for copies to the host.
    ///
    /// # Errors
    ///
    /// Those of [`Self::open`].
    fn reads(&self) -> Result<Stream, Fault>;

    /// Has a stream wait for what the owner has yet to do.
    ///
    /// # Errors
    ///
    /// [`Reason::OwnerGone`], or what the driver answers.
    fn order(&self, stream: &Stream) -> Result<(), Fault>;

    /// A stream is about to use it, or has: the owner goes on after what is enqueued there.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownLease`] where it was given back.
    fn note(&self, stream: &Stream) -> Result<(), Refusal>;
}

impl CudaMemory {
    /// Memory of this process, from `offset` on; `came_back`: it was lent out, and this is what came back.
    #[must_use]
    pub fn own(hold: Arc<Hold>, came_back: bool, offset: usize, len: usize) -> Self {
        Self { source: Source::Own(hold, came_back), offset, len, _whole: None }
    }

    /// Memory of a peer's, from `offset` on.
    #[must_use]
    pub fn theirs(lease: Arc<dyn Borrowed>, offset: usize, len: usize) -> Self {
        Self { source: Source::Theirs(lease), offset, len, _whole: None }
    }

    /// Part of a storage that was lent on and came back, which keeps it.
    #[must_use]
    pub fn part_of(whole: &Arc<Storage>, range: Range<usize>) -> Option<Self> {
        let memory = whole.memory_as::<Self>()?;
        let source = memory.source.clone();
        let _whole = Some(Arc::clone(whole));
        Some(Self { source, offset: range.start, len: range.len(), _whole })
    }

    /// A storage's memory, where it is of this kind.
    ///
    /// # Errors
    ///
    /// [`Reason::OtherKind`].
    pub fn of(storage: &Storage) -> Result<&Self, Refusal> {
        storage.memory_as::<Self>().ok_or_else(|| {
            Refusal::new(Reason::OtherKind, "not device memory that these rungs know")
        })
    }

    /// Whose it is.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Where in its source it lies.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        // Made of a length that is there.
        self.offset..self.offset.saturating_add(self.len)
    }

    /// The memory itself.
    fn buffer(&self) -> Result<Buffer, Fault> {
        let whole = match &self.source {
            Source::Own(hold, _) => hold.block().buffer.clone(),
            Source::Theirs(lease) => lease.open(Inside(()))?,
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
            Source::Own(hold, _) => stream.after(&hold.block().order)?,
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

    /// Enqueues a copy of it to the beginning of other memory of this device, on the stream of this use.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`], or what the driver answers.
    pub fn copy_to(&self, to: &Buffer) -> Result<(), Refusal> {
        to.copy_from(&self.buffer, &self.stream)
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
                Source::Own(hold, _) => hold.block().order.after(&self.stream),
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
            Source::Own(hold, _) => hold.block().buffer.device(),
            Source::Theirs(lease) => lease.device(),
        }
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        Err(Refusal::new(Reason::DeviceMemory, self.device().to_string()))
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        if let Source::Own(hold, _) = &self.source
            && let Some((contents, _)) = &hold.block().contents
        {
            let from = self
                .offset
                .checked_add(offset)
                .and_then(|from| contents.get(from..from.checked_add(into.len())?));
            into.copy_from_slice(from.ok_or(Reason::OutOfBounds)?);
            return Ok(());
        }
        let stream = match &self.source {
            Source::Own(hold, _) => hold.block().order.clone(),
            Source::Theirs(lease) => lease.reads()?,
        };
        let used = self.on(&stream)?;
        used.buffer.read_at(offset, into, &stream)
    }

    fn block(&self) -> u64 {
        let serial = match &self.source {
            Source::Own(hold, _) => hold.block().serial,
            Source::Theirs(lease) => lease.serial(),
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
