//! What a peer sends: checked against what the kernel says before it is mapped.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use nix::fcntl::{FallocateFlags, SealFlag, fallocate};
use nix::sys::statfs::{HUGETLBFS_MAGIC, fstatfs};
use nix::unistd::{Whence, lseek};
use rung::{Fault, Reason, Refusal};

use crate::PeerTrust;
use crate::file::{Block, SIZE_SEALS, nonzero, refused_io, seals_of};
use crate::id::BlockId;
use crate::pool::{Pool, is_own};
use crate::sealed::Sealed;

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

    /// Copies bytes out, without a mapping and without trust: they are some bytes of the block at
    /// some moments of the call.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`], [`Reason::System`].
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        self.0.read_at(offset, into)
    }

    /// The block's number: as long as it exists, no other block of the machine has it.
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
    pub fn descriptor(&self) -> Result<OwnedFd, Refusal> {
        self.0.descriptor()
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

/// Sees that every page is there. F_SEAL_WRITE and F_SEAL_FUTURE_WRITE forbid punching holes, so pages
/// that are there stay there.
fn check_allocated(file: &File, len: usize, blocks: u64) -> Result<(), Fault> {
    let sparse = |detail: String| Fault::new(Reason::Sparse, detail);
    // Blocks of 512 bytes (inode(7)).
    if blocks.saturating_mul(512) < len as u64 {
        return Err(sparse(format!("{blocks} blocks for {len} bytes")));
    }
    if lseek(file, 0, Whence::SeekHole).is_ok_and(|hole| hole as u64 >= len as u64) {
        return Ok(());
    }
    // A page that was allocated and never written reads as a hole (lseek(2)), and blocks may also lie
    // beyond the end of the file, where they were counted above. Allocating what is there already
    // changes nothing; what is not there is now, or the machine has no memory for it.
    Pool::process().make_room(len)?;
    let size = i64::try_from(len).map_err(|_| Reason::WrongSize)?;
    fallocate(file, FallocateFlags::empty(), 0, size)
        .map_err(|errno| sparse(format!("allocating it: {}", errno.desc())))
}

/// Takes a descriptor that a peer says is a block of `least` bytes or more; believes only the kernel,
/// and gives the block as long as it is.
///
/// Nothing is mapped yet. After this, S1 holds, and S2 for [`Received::Sealed`].
///
/// # Errors
///
/// [`Reason::Empty`] for no bytes, [`Reason::NotSharedMemory`] where it cannot be sealed at all or
/// is no tmpfs file, [`Reason::Unsealed`] where it could be resized or written by anybody who maps
/// it, [`Reason::WrongSize`] where it is shorter, [`Reason::Sparse`] where pages are missing.
pub fn receive(descriptor: OwnedFd, least: usize) -> Result<Received, Fault> {
    nonzero(least)?;
    let file = File::from(descriptor);
    // Seals first: after SHRINK and GROW are seen, what fstat says stays true.
    let seals = seals_of(&file).map_err(|_| Fault::from(Reason::NotSharedMemory))?;
    let wanted = SIZE_SEALS | SealFlag::F_SEAL_SEAL;
    let unwritable = seals.contains(SealFlag::F_SEAL_WRITE);
    if !seals.contains(wanted) || !(unwritable || seals.contains(SealFlag::F_SEAL_FUTURE_WRITE)) {
        return Err(Fault::new(Reason::Unsealed, format!("it has {seals:?}")));
    }
    let metadata = file.metadata().map_err(|error| Fault::from(refused_io(&error, "fstat")))?;
    let size = metadata.size();
    let len = usize::try_from(size).ok().filter(|&len| len >= least).ok_or_else(|| {
        Fault::new(Reason::WrongSize, format!("{least} bytes declared, {size} there"))
    })?;
    // Huge-page files can be sealed too, but their mappings must be whole huge pages.
    if fstatfs(&file).is_ok_and(|filesystem| filesystem.filesystem_type() == HUGETLBFS_MAGIC) {
        return Err(Fault::new(Reason::NotSharedMemory, "a huge-page file"));
    }
    check_allocated(&file, len, metadata.blocks())?;
    let block = Block::new(file, len);
    Ok(if unwritable {
        Received::Sealed(Sealed::over(block, len))
    } else {
        Received::Foreign(Foreign(block))
    })
}
