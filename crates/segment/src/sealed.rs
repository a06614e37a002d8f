//! Blocks that nobody can write any more.

use std::ops::Range;

use rung::{Handle, Refusal};

use crate::file::{Block, nonzero};
use crate::filling::Filling;
use crate::id::BlockId;
use crate::pool::Pool;

/// A block that nobody can write any more: its bytes are lent to anyone (S2).
///
/// Where the platform has no seals, only its owner knows that: others get it as a [`Foreign`](crate::Foreign).
#[derive(Debug)]
pub struct Sealed {
    block: Block,
    /// Of the contents; the block may be longer.
    len: usize,
}

impl Sealed {
    /// A new block with these contents: one copy.
    ///
    /// # Errors
    ///
    /// As [`Draft::new`](crate::Draft::new).
    pub fn copy_from(bytes: &[u8]) -> Result<Self, Refusal> {
        Self::build(bytes.len(), |filling| filling.write(bytes))
    }

    /// A new block of `len` bytes, filled from first to last; on Linux by pwrite(2), which saves both the
    /// mapping and the zeroing of pages that are overwritten at once.
    ///
    /// # Errors
    ///
    /// As [`Draft::new`](crate::Draft::new), what `fill` answers, and [`Reason::ShapeMismatch`](rung::Reason::ShapeMismatch) where it wrote another
    /// number of bytes.
    pub fn build(
        len: usize,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        nonzero(len)?;
        let pool = Pool::process();
        pool.make_room(len)?;
        let object = pool.new_object(len)?;
        // The mapping that wrote it, if one did, ends here.
        drop(object.fill(len, len, fill, true)?);
        Ok(Self::over(Block::new(object, len), len))
    }

    /// The first `len` bytes of a block for which S1 and S2 hold.
    pub(crate) fn over(block: Block, len: usize) -> Self {
        Self { len: len.min(block.len()), block }
    }

    /// Has something live as long as the mapping of this block, unless something does: what a driver knows of it.
    /// Given where the mapping begins and its bytes, which are more than the contents perhaps; it ends before the
    /// mapping does.
    ///
    /// # Errors
    ///
    /// What `make` answers, and [`Reason::Forked`](rung::Reason::Forked).
    pub fn attach<A: std::any::Any + Send + Sync>(
        &self,
        make: impl FnOnce(*const u8, usize) -> Result<A, Refusal>,
    ) -> Result<(), Refusal> {
        self.block.attach(make)
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a block has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The bytes; mapped on the first call.
    ///
    /// # Errors
    ///
    /// [`Reason::NoMemory`](rung::Reason::NoMemory) where the address space is full.
    pub fn bytes(&self) -> Result<&[u8], Refusal> {
        Ok(&self.block.bytes()?[..self.len])
    }

    /// Copies bytes out, without a mapping.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`](rung::Reason::OutOfBounds), [`Reason::System`](rung::Reason::System).
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        self.block.read_at(offset, into)
    }

    /// A descriptor for a peer, or on Windows a handle, for reading.
    ///
    /// # Errors
    ///
    /// [`Reason::NoDescriptors`](rung::Reason::NoDescriptors).
    pub fn descriptor(&self) -> Result<Handle, Refusal> {
        self.block.handle()
    }

    /// The block's number, as [`Shared::number`](crate::Shared::number).
    #[must_use]
    pub fn number(&self) -> u64 {
        self.block.number()
    }

    /// The block's identity in this process.
    #[must_use]
    pub fn id(&self) -> &BlockId {
        self.block.id()
    }

    /// As [`Shared::release`](crate::Shared::release); nothing where it is not mapped.
    ///
    /// # Errors
    ///
    /// [`Reason::System`](rung::Reason::System).
    pub fn release(&self, range: Range<usize>) -> Result<usize, Refusal> {
        self.block.release(range)
    }
}
