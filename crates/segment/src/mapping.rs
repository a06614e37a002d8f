//! The one place that calls mmap(2).
#![expect(unsafe_code, reason = "mapping memory and lending slices of it")]

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};

/// A mapping of a whole memfd.
///
/// - **M1** `start` is the start of a live mapping of at least `len > 0` bytes, made by [`map`] and
///   unmapped by this value's `Drop` alone.
/// - **M2** No access to the first `len` bytes can fault: whoever calls [`map`] has seen S1 hold for
///   the file (its size is at least `len`, cannot shrink, and every page is allocated).
/// - **M3** Reads through it are reads of plain memory that no one writes at the same time: whoever
///   lends [`Reader::bytes`] or [`Writer::bytes`] has S2, S3 or S4 on its side, and a [`Writer`]
///   lends `&mut` only through `&mut self`.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: M1: the mapping belongs to the process, not to a thread, and `start` is only an address;
// what it points to is lent by reference alone, under M3.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`; through `&Mapping` the bytes can only be read (M3).
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: M1: this is the mapping that `map` made, and nobody else unmaps it; every borrow
        // of its bytes borrows `self` and has ended.
        let unmapped = unsafe { munmap(self.start.cast(), self.len) };
        // munmap fails only for a range that was never mapped, which M1 rules out; a drop has
        // nobody to tell, and leaking address space harms nobody.
        debug_assert_eq!(unmapped, Ok(()));
    }
}

/// Maps the first `len` bytes of a file that keeps M2, shared with every other mapping of it.
fn map(file: impl AsFd, len: NonZeroUsize, protection: ProtFlags) -> Result<Mapping, Errno> {
    // SAFETY: a new mapping at an address that the kernel chooses replaces no existing one, so no
    // memory that Rust knows of changes under it (mmap(2); no MAP_FIXED).
    let start = unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, file, 0) }?;
    Ok(Mapping { start: start.cast(), len: len.get() })
}

/// A read-only mapping.
#[derive(Debug)]
pub(crate) struct Reader(Mapping);

impl Reader {
    /// Maps a file that keeps M2 and, for as long as bytes are borrowed, M3.
    pub(crate) fn new(file: impl AsFd, len: NonZeroUsize) -> Result<Self, Errno> {
        map(file, len, ProtFlags::PROT_READ).map(Self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: M1 (live, `len` bytes, initialised by the kernel), M2 (no fault), M3 (no writer);
        // `len` fits an isize since the kernel mapped it.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }
}

/// A writable mapping.
#[derive(Debug)]
pub(crate) struct Writer(Mapping);

impl Writer {
    /// Maps a file that keeps M2 and of which this is the only writable mapping.
    ///
    /// It stays the only one: a forked child does not inherit it (S3, L9).
    pub(crate) fn new(file: impl AsFd, len: NonZeroUsize) -> Result<Self, Errno> {
        let mapping = map(file, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        // SAFETY: M1: exactly the mapping that was just made; not inheriting it changes nothing in
        // this process (madvise(2)).
        unsafe { madvise(mapping.start.cast(), len.get(), MmapAdvise::MADV_DONTFORK) }?;
        Ok(Self(mapping))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `Reader::bytes`; writing needs `&mut self`, which this borrow excludes.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: M1, M2; M3: `&mut self` excludes every other borrow of this mapping, and it is
        // the only writable one. Peers that still map the block promised to be done with it (their
        // receipts are home, L4); what they see concerns their process, not this one.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.len) }
    }
}
