//! The one place that calls mmap(2).
#![expect(unsafe_code, reason = "mapping memory and lending slices of it")]

use std::any::Any;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use rung::{Reason, Refusal};

use crate::counters::{COUNTERS, count};
use crate::fork::generation;

/// A mapping of a whole memfd.
///
/// - **M1** Where it [is here](Mapping::is_here), `start` is the start of a live mapping of at least
///   `len > 0` bytes, made by [`map`] and unmapped by this value's `Drop` alone.
/// - **M2** No access to the first `len` bytes can fault: whoever calls [`map`] has seen S1 hold for
///   the file (its size is at least `len`, cannot shrink, and every page is allocated).
/// - **M3** Reads through it are reads of plain memory that no one writes at the same time: whoever
///   lends [`Reader::bytes`] or [`Writer::bytes`] has S2, S3 or S4 on its side, and a [`Writer`]
///   lends `&mut` only through `&mut self`.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Of a mapping that a forked child does not have: the process that has it.
    home: Option<u32>,
    /// Ends before the mapping does.
    attached: Attached,
}

/// Something that lives as long as a mapping: what a driver knows of it.
#[derive(Default)]
struct Attached(OnceLock<Box<dyn Any + Send + Sync>>);

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.get().is_some() { "attached" } else { "nothing" })
    }
}

impl Mapping {
    /// Whether the mapping is there: in a forked child, whatever has been mapped in its place is not this
    /// (L9).
    fn is_here(&self) -> bool {
        self.home.is_none_or(|home| home == generation())
    }
}

// SAFETY: M1: the mapping belongs to the process, not to a thread, and `start` is only an address;
// what it points to is lent by reference alone, under M3.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`; through `&Mapping` the bytes can only be read (M3).
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.attached.0.take());
        if !self.is_here() {
            return;
        }
        // SAFETY: M1: this is the mapping that `map` made, and nobody else unmaps it; every borrow
        // of its bytes borrows `self` and has ended.
        let unmapped = unsafe { munmap(self.start.cast(), self.len) };
        // munmap fails only for a range that was never mapped, which M1 rules out; a drop has
        // nobody to tell, and leaking address space harms nobody.
        debug_assert_eq!(unmapped, Ok(()));
        count(&COUNTERS.unmapped, 1);
    }
}

impl Mapping {
    /// Attaches something, unless something is; given where the mapping begins, and its bytes.
    fn attach<A: Any + Send + Sync>(
        &self,
        make: impl FnOnce(*const u8, usize) -> Result<A, Refusal>,
    ) -> Result<(), Refusal> {
        if !self.is_here() {
            return Err(Reason::Forked.into());
        }
        if self.attached.0.get().is_none() {
            match make(self.start.as_ptr(), self.len) {
                // Of two at once one is enough.
                Ok(made) => drop(self.attached.0.set(Box::new(made))),
                Err(_) if self.attached.0.get().is_some() => {}
                Err(refusal) => return Err(refusal),
            }
        }
        Ok(())
    }

    /// Gives the resident pages of a range back to the system, rounded inward to whole pages; how many
    /// bytes. The mapping is shared, so the bytes stay in the file, and come back at the next look.
    fn release(&self, range: Range<usize>) -> Result<usize, Errno> {
        if !self.is_here() {
            return Ok(0);
        }
        let page = page_size();
        let start = range.start.next_multiple_of(page);
        // The last page of a block is whole also where its bytes are not: the file is that long.
        let end = if range.end >= self.len { self.len } else { range.end / page * page };
        if start >= end {
            return Ok(0);
        }
        // SAFETY: M1: `start < end <= len`, within the mapping.
        let first = unsafe { self.start.add(start) };
        // SAFETY: M1: the range lies in the mapping. It is MAP_SHARED (`map` makes no others), where
        // MADV_DONTNEED drops pages of this process alone and changes no byte (madvise(2)).
        unsafe { madvise(first.cast(), end - start, MmapAdvise::MADV_DONTNEED) }?;
        Ok(end - start)
    }
}

fn page_size() -> usize {
    // SAFETY: sysconf(3) reads a number; it has no conditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

/// Maps the first `len` bytes of a file that keeps M2, shared with every other mapping of it.
fn map(file: impl AsFd, len: NonZeroUsize, protection: ProtFlags) -> Result<Mapping, Errno> {
    // SAFETY: a new mapping at an address that the kernel chooses replaces no existing one, so no
    // memory that Rust knows of changes under it (mmap(2); no MAP_FIXED).
    let start = unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, file, 0) }?;
    count(&COUNTERS.mapped, 1);
    Ok(Mapping { start: start.cast(), len: len.get(), home: None, attached: Attached::default() })
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

impl Reader {
    /// As [`Mapping::attach`].
    pub(crate) fn attach<A: Any + Send + Sync>(
        &self,
        make: impl FnOnce(*const u8, usize) -> Result<A, Refusal>,
    ) -> Result<(), Refusal> {
        self.0.attach(make)
    }

    /// As [`Mapping::release`].
    pub(crate) fn release(&self, range: Range<usize>) -> Result<usize, Errno> {
        self.0.release(range)
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
        let mut mapping = map(file, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        // SAFETY: M1: exactly the mapping that was just made; not inheriting it changes nothing in
        // this process (madvise(2)).
        unsafe { madvise(mapping.start.cast(), len.get(), MmapAdvise::MADV_DONTFORK) }?;
        mapping.home = Some(generation());
        Ok(Self(mapping))
    }

    /// As [`Mapping::attach`].
    pub(crate) fn attach<A: Any + Send + Sync>(
        &self,
        make: impl FnOnce(*const u8, usize) -> Result<A, Refusal>,
    ) -> Result<(), Refusal> {
        self.0.attach(make)
    }

    /// Bytes of the mapping, here or not.
    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    pub(crate) fn is_here(&self) -> bool {
        self.0.is_here()
    }

    /// None in a forked child.
    pub(crate) fn bytes(&self) -> &[u8] {
        if !self.is_here() {
            return &[];
        }
        // SAFETY: as in `Reader::bytes`; writing needs `&mut self`, which this borrow excludes.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }

    /// None in a forked child.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if !self.is_here() {
            return &mut [];
        }
        // SAFETY: M1, M2; M3: `&mut self` excludes every other borrow of this mapping, and it is
        // the only writable one. Peers that still map the block promised to be done with it (their
        // receipts are home, L4); what they see concerns their process, not this one.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.len) }
    }

    /// Faults all pages in at once, for writing: a third of what faulting one by one costs. Where the
    /// kernel cannot (before Linux 5.14), they fault as they are written.
    pub(crate) fn populate(&self) {
        if !self.is_here() {
            return;
        }
        // SAFETY: M1: exactly this mapping; populating it changes no byte (madvise(2)).
        unsafe {
            libc::madvise(self.0.start.as_ptr().cast(), self.0.len, libc::MADV_POPULATE_WRITE);
        }
    }

    /// As [`Mapping::release`].
    pub(crate) fn release(&self, range: Range<usize>) -> Result<usize, Errno> {
        self.0.release(range)
    }
}
