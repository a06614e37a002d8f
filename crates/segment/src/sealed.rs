//! Blocks that nobody can write any more.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use nix::fcntl::SealFlag;
use rung::{Reason, Refusal};

use crate::file::{Block, SIZE_SEALS, add_seals, new_file, nonzero, refused_io};
use crate::headroom;

/// A block that nobody can write any more: its bytes are lent to anyone (S2).
#[derive(Debug)]
pub struct Sealed(pub(crate) Block);

impl Sealed {
    /// A new block with these contents: one copy.
    ///
    /// # Errors
    ///
    /// As [`Draft::new`](crate::Draft::new).
    pub fn copy_from(bytes: &[u8]) -> Result<Self, Refusal> {
        Self::build(bytes.len(), |filling| filling.write(bytes))
    }

    /// A new block of `len` bytes, filled from first to last by pwrite(2), which saves both the
    /// mapping and the zeroing of pages that are overwritten at once.
    ///
    /// # Errors
    ///
    /// As [`Draft::new`](crate::Draft::new), what `fill` answers, and [`Reason::ShapeMismatch`] where it wrote another
    /// number of bytes.
    pub fn build(
        len: usize,
        fill: impl FnOnce(&mut Filling) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        nonzero(len)?;
        headroom::check(len)?;
        let mut filling = Filling { file: new_file()?, len, written: 0, waiting: Vec::new() };
        fill(&mut filling)?;
        let file = filling.finish()?;
        add_seals(&file, SIZE_SEALS | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL)?;
        Ok(Self(Block::new(file, len)))
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
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
    /// [`Reason::NoMemory`] where the address space is full.
    pub fn bytes(&self) -> Result<&[u8], Refusal> {
        self.0.bytes()
    }

    /// Copies bytes out, without a mapping.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`], [`Reason::System`].
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        self.0.read_at(offset, into)
    }

    /// A descriptor for a peer.
    ///
    /// # Errors
    ///
    /// [`Reason::NoDescriptors`].
    pub fn descriptor(&self) -> Result<OwnedFd, Refusal> {
        self.0.descriptor()
    }
}

/// Small pieces are gathered up to this size: a system call a row of a narrow view would cost more
/// than the copy.
pub(crate) const GATHER: usize = 256 << 10;

/// A block that is being filled.
#[derive(Debug)]
pub struct Filling {
    file: File,
    len: usize,
    /// Bytes in the file; `waiting` comes after them.
    written: usize,
    waiting: Vec<u8>,
}

impl Filling {
    /// Appends bytes.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] past the block's length, [`Reason::NoMemory`], [`Reason::System`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let end = (self.written + self.waiting.len()).checked_add(bytes.len());
        if end.is_none_or(|end| end > self.len) {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("more than the {} bytes of the block", self.len),
            ));
        }
        if self.waiting.len() + bytes.len() <= GATHER {
            self.waiting.extend_from_slice(bytes);
            return Ok(());
        }
        self.flush()?;
        if bytes.len() <= GATHER / 2 {
            self.waiting.extend_from_slice(bytes);
            return Ok(());
        }
        self.put(bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        self.file
            .write_all_at(bytes, self.written as u64)
            .map_err(|error| refused_io(&error, "writing shared memory"))?;
        self.written += bytes.len();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Refusal> {
        let waiting = std::mem::take(&mut self.waiting);
        self.put(&waiting)?;
        self.waiting = waiting;
        self.waiting.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<File, Refusal> {
        self.flush()?;
        if self.written != self.len {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("{} bytes written to a block of {}", self.written, self.len),
            ));
        }
        Ok(self.file)
    }
}
