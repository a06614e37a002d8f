//! What every block is: an object of shared memory, and perhaps a mapping of it.

use std::any::Any;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::OnceLock;

use rung::{Handle, Reason, Refusal};

use crate::counters::{COUNTERS, count};
use crate::id::BlockId;
use crate::mapping::Reader;
use crate::sys::{self, Object};

pub(crate) fn refused(error: &io::Error, what: &str) -> Refusal {
    Refusal::new(sys::reason(error), format!("{what}: {}", sys::words(error)))
}

pub(crate) fn nonzero(len: usize) -> Result<NonZeroUsize, Refusal> {
    NonZeroUsize::new(len).ok_or_else(|| Reason::Empty.into())
}

/// A handle of an object for a peer.
pub(crate) fn handle(object: &Object) -> Result<Handle, Refusal> {
    count(&COUNTERS.duplicated, 1);
    object.handle().map_err(|error| refused(&error, "duplicating a descriptor"))
}

/// An object and, once somebody looks, a read-only mapping of it.
#[derive(Debug)]
pub(crate) struct Block {
    object: Object,
    len: usize,
    number: u64,
    reader: OnceLock<Reader>,
    id: BlockId,
}

impl Block {
    pub(crate) fn new(object: Object, len: usize) -> Self {
        let number = object.number();
        Self { object, len, number, reader: OnceLock::new(), id: BlockId::new() }
    }

    pub(crate) fn id(&self) -> &BlockId {
        &self.id
    }

    /// Gives resident pages back, if it is mapped.
    pub(crate) fn release(&self, range: Range<usize>) -> Result<usize, Refusal> {
        let released = self.reader.get().map_or(Ok(0), |reader| reader.release(range));
        released.map_err(|error| refused(&error, "madvise"))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn handle(&self) -> Result<Handle, Refusal> {
        handle(&self.object)
    }

    /// Attaches something to the mapping, which is made where there is none.
    pub(crate) fn attach<A: Any + Send + Sync>(
        &self,
        make: impl FnOnce(*const u8, usize) -> Result<A, Refusal>,
    ) -> Result<(), Refusal> {
        self.bytes()?;
        self.reader.get().map_or(Ok(()), |reader| reader.attach(make))
    }

    fn reader(&self) -> Result<&Reader, Refusal> {
        if let Some(reader) = self.reader.get() {
            return Ok(reader);
        }
        let len = nonzero(self.len)?;
        let reader = Reader::new(&self.object, len).map_err(|error| refused(&error, "mmap"))?;
        // Two threads may both have mapped it; one mapping is dropped, which harms nobody.
        Ok(self.reader.get_or_init(|| reader))
    }

    /// Whoever calls this has S1, and S2 or S4.
    pub(crate) fn bytes(&self) -> Result<&[u8], Refusal> {
        Ok(self.reader()?.bytes())
    }

    /// Copies out: whatever the owner does meanwhile, they are some bytes of the block. Without a mapping, where the
    /// platform can.
    pub(crate) fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        let end = offset.checked_add(into.len());
        if end.is_none_or(|end| end > self.len) {
            return Err(Reason::OutOfBounds.into());
        }
        match self.object.read_at(offset, into) {
            Some(read) => read.map_err(|error| refused(&error, "reading shared memory")),
            None => self.reader()?.copy_out(offset, into),
        }
    }
}
