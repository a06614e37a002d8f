//! What a peer sends: checked against what the kernel says before it is mapped.

use std::ops::Range;

use rung::{Fault, Handle, Reason, Refusal};

use crate::PeerTrust;
use crate::file::{Block, nonzero};
use crate::id::BlockId;
use crate::pool::is_own;
use crate::sealed::Sealed;
use crate::sys;

/// A block that a peer lends and could still write.
#[derive(Debug)]
pub struct Foreign(Block);

impl Foreign {
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

    /// The bytes, if the peer is trusted not to write them meanwhile (S4); mapped on the first call.
    ///
    /// # Errors
    ///
    /// [`Reason::PeerNotTrusted`] without a token, [`Reason::NoMemory`] where the address space is
    /// full.
    pub fn bytes(&self, trust: Option<&PeerTrust>) -> Result<&[u8], Refusal> {
        if trust.is_none() {
            return Err(Reason::PeerNotTrusted.into());
        }
        self.0.bytes()
    }

    /// Copies bytes out, without trust: they are some bytes of the block at
    /// some moments of the call.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`], [`Reason::System`].
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        self.0.read_at(offset, into)
    }

    /// The block's number, as [`Shared::number`](crate::Shared::number).
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.number()
    }

    /// Whether this process made it: it was lent out, and came back.
    #[must_use]
    pub fn is_own(&self) -> bool {
        is_own(self.0.number())
    }

    /// The block's identity in this process.
    #[must_use]
    pub fn id(&self) -> &BlockId {
        self.0.id()
    }

    /// As [`Shared::release`](crate::Shared::release); nothing where it is not mapped.
    ///
    /// # Errors
    ///
    /// [`Reason::System`].
    pub fn release(&self, range: Range<usize>) -> Result<usize, Refusal> {
        self.0.release(range)
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
        self.0.attach(make)
    }

    /// A descriptor for another peer: the block is forwarded, not copied.
    ///
    /// # Errors
    ///
    /// [`Reason::NoDescriptors`].
    pub fn descriptor(&self) -> Result<Handle, Refusal> {
        self.0.handle()
    }
}

/// What a peer's descriptor turned out to be.
#[derive(Debug)]
pub enum Received {
    /// Nobody can write it.
    Sealed(Sealed),
    /// The peer can.
    Foreign(Foreign),
}

/// Takes a descriptor, or on Windows a handle, that a peer says is a block of `least` bytes or more; believes only the
/// kernel, and gives the block as long as it is.
///
/// Nothing is mapped yet. Where the platform has no seals, it is always [`Received::Foreign`]. After this, S1 holds, and S2 for [`Received::Sealed`].
///
/// # Errors
///
/// [`Reason::Empty`] for no bytes, [`Reason::NotSharedMemory`] where it cannot be sealed at all or
/// is no tmpfs file, [`Reason::Unsealed`] where it could be resized or written by anybody who maps
/// it, [`Reason::WrongSize`] where it is shorter, [`Reason::Sparse`] where pages are missing.
pub fn receive(descriptor: Handle, least: usize) -> Result<Received, Fault> {
    nonzero(least)?;
    let (object, len, unwritable) = sys::receive(descriptor, least)?;
    let block = Block::new(object, len);
    Ok(if unwritable {
        Received::Sealed(Sealed::over(block, len))
    } else {
        Received::Foreign(Foreign(block))
    })
}
