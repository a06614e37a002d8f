//! Linux: anonymous files (memfd_create(2)) and seals (fcntl(2)).
#![expect(unsafe_code, reason = "advice on mappings")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MmapAdvise, madvise};
use nix::sys::statfs::{HUGETLBFS_MAGIC, fstatfs};
use nix::unistd::{Whence, lseek};
use rung::{Fault, Handle, Reason, Refusal};

pub(crate) use super::memory::left;

use crate::counters::{COUNTERS, count};
use crate::file::{nonzero, refused};
use crate::filling::Filling;
use crate::mapping::Writer;
use crate::pool::Pool;

/// Set before a descriptor leaves (S1).
pub(crate) const SIZE_SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// Set where nobody writes it any more (S2).
const FINAL_SEALS: SealFlag = SealFlag::F_SEAL_WRITE.union(SealFlag::F_SEAL_SEAL);

/// memfd_create(2), since Linux 6.3; nix has no name for it yet.
const MFD_NOEXEC_SEAL: MFdFlags = MFdFlags::from_bits_retain(0x0008);

/// A memfd.
#[derive(Debug)]
pub(crate) struct Object(File);

/// Nothing: the number of the file is enough (inode(7)).
#[derive(Debug)]
pub(crate) struct Identity;

impl Object {
    /// Without memory, so far.
    pub(crate) fn new(_capacity: usize) -> Result<Self, Refusal> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        // Hosts may insist on non-executable memfds (vm.memfd_noexec); older kernels do not know them.
        let descriptor = match memfd_create(c"tensor-ladder", flags | MFD_NOEXEC_SEAL) {
            Err(Errno::EINVAL) => memfd_create(c"tensor-ladder", flags),
            made => made,
        };
        count(&COUNTERS.created, 1);
        descriptor
            .map(|descriptor| Self(File::from(descriptor)))
            .map_err(|errno| refused(&errno.into(), "memfd_create"))
    }

    pub(crate) fn allocate(&self, capacity: usize) -> Result<(), Refusal> {
        self.reserve(0..capacity)?;
        // From the start: nothing shrinks the file under the mapping.
        self.add_seals(SIZE_SEALS)
    }

    /// By pwrite(2): for the first use the kernel's copy saves the faults, which cost more than the copy does.
    pub(crate) fn fill(
        &self,
        capacity: usize,
        len: usize,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), Refusal>,
        is_final: bool,
    ) -> Result<Option<Writer>, Refusal> {
        Filling::file(&self.0, len).fill(fill)?;
        self.reserve(len..capacity)?;
        self.add_seals(if is_final { SIZE_SEALS | FINAL_SEALS } else { SIZE_SEALS })?;
        Ok(None)
    }

    pub(crate) fn close(&self) -> Result<(), Refusal> {
        self.add_seals(FINAL_SEALS)
    }

    pub(crate) fn lend(&self) -> Result<(), Refusal> {
        self.add_seals(SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SEAL)
    }

    pub(crate) fn handle(&self) -> io::Result<Handle> {
        self.0.as_fd().try_clone_to_owned()
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Of the file (inode(7)): among memfds, no two that exist have the same.
    pub(crate) fn number(&self) -> u64 {
        self.0.metadata().map_or(0, |metadata| metadata.ino())
    }

    pub(crate) fn identity(&self) -> Identity {
        Identity
    }

    #[cfg(test)]
    pub(crate) fn over(file: File) -> Self {
        Self(file)
    }

    #[cfg(test)]
    pub(crate) fn into_file(self) -> File {
        self.0
    }

    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    pub(crate) fn add_seals(&self, seals: SealFlag) -> Result<(), Refusal> {
        let added = fcntl(&self.0, FcntlArg::F_ADD_SEALS(seals)).map(drop);
        added.map_err(|errno| refused(&errno.into(), "sealing"))
    }

    /// Allocates a range (fallocate(2)): a full machine is a refusal here, not a SIGBUS later.
    fn reserve(&self, range: Range<usize>) -> Result<(), Refusal> {
        let offset = |at: usize| i64::try_from(at).map_err(|_| Refusal::from(Reason::NoMemory));
        if range.is_empty() {
            return Ok(());
        }
        let (start, len) = (offset(range.start)?, offset(range.len())?);
        count(&COUNTERS.allocated, 1);
        loop {
            match fallocate(&self.0, FallocateFlags::empty(), start, len) {
                Err(Errno::EINTR) => {}
                done => {
                    return done
                        .map_err(|errno| refused(&errno.into(), "allocating shared memory"));
                }
            }
        }
    }

    /// By pread(2), without a mapping: whatever the owner does meanwhile, it copies some bytes into memory of ours.
    pub(crate) fn read_at(&self, offset: usize, into: &mut [u8]) -> Option<io::Result<()>> {
        Some(self.0.read_exact_at(into, offset as u64))
    }
}

/// What a peer's descriptor is: the object, its bytes, and whether nobody can write it. Believes only the kernel.
pub(crate) fn receive(descriptor: OwnedFd, least: usize) -> Result<(Object, usize, bool), Fault> {
    let file = File::from(descriptor);
    // Seals first: after SHRINK and GROW are seen, what fstat says stays true.
    let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain);
    let seals = seals.map_err(|_| Fault::from(Reason::NotSharedMemory))?;
    let wanted = SIZE_SEALS | SealFlag::F_SEAL_SEAL;
    let unwritable = seals.contains(SealFlag::F_SEAL_WRITE);
    if !seals.contains(wanted) || !(unwritable || seals.contains(SealFlag::F_SEAL_FUTURE_WRITE)) {
        return Err(Fault::new(Reason::Unsealed, format!("it has {seals:?}")));
    }
    let metadata = file.metadata().map_err(|error| Fault::from(refused(&error, "fstat")))?;
    let size = metadata.size();
    let len = usize::try_from(size).ok().filter(|&len| len >= least).ok_or_else(|| {
        Fault::new(Reason::WrongSize, format!("{least} bytes declared, {size} there"))
    })?;
    // Huge-page files can be sealed too, but their mappings must be whole huge pages.
    if fstatfs(&file).is_ok_and(|filesystem| filesystem.filesystem_type() == HUGETLBFS_MAGIC) {
        return Err(Fault::new(Reason::NotSharedMemory, "a huge-page file"));
    }
    check_allocated(&file, len, metadata.blocks())?;
    Ok((Object(file), nonzero(len)?.get(), unwritable))
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

/// Has a forked child not have a mapping (madvise(2)).
///
/// # Safety
///
/// It is exactly what `map` gave (M1).
pub(crate) unsafe fn keep_from_forks(start: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: M1, as the caller has it; not inheriting it changes nothing in this process.
    Ok(unsafe { madvise(start.cast(), len, MmapAdvise::MADV_DONTFORK) }?)
}

/// Faults all pages in at once, for writing: a third of what faulting one by one costs. Where the
/// kernel cannot (before Linux 5.14), they fault as they are written.
///
/// # Safety
///
/// It is a writable mapping that is here (M1).
pub(crate) unsafe fn populate(start: NonNull<u8>, len: usize) {
    // SAFETY: M1, as the caller has it; populating it changes no byte (madvise(2)).
    unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) };
}

/// Gives resident pages back to the system: how many bytes. The mapping is shared, so the bytes stay in the file, and
/// come back at the next look.
///
/// # Safety
///
/// The range is whole pages of a mapping that is here (M1).
pub(crate) unsafe fn release(start: NonNull<u8>, len: usize) -> io::Result<usize> {
    // SAFETY: M1, as the caller has it. It is MAP_SHARED (`map` makes no others), where
    // MADV_DONTNEED drops pages of this process alone and changes no byte (madvise(2)).
    unsafe { madvise(start.cast(), len, MmapAdvise::MADV_DONTNEED) }?;
    Ok(len)
}
