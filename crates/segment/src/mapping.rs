//! Mappings, and what is lent of them; the one place that makes any.
#![expect(unsafe_code, reason = "lending slices of mapped memory")]

use std::any::Any;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::OnceLock;

use rung::{Reason, Refusal};

use crate::counters::{COUNTERS, count};
use crate::fork::generation;
use crate::sys::{self, Object};
#[cfg(not(target_os = "linux"))]
use crate::{file::refused, filling::Filling};

/// Bytes that are copied at a time.
const WORD: usize = size_of::<u64>();

/// A mapping of a whole object.
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
        unsafe { sys::unmap(self.start, self.len) };
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
    /// bytes.
    fn release(&self, range: Range<usize>) -> io::Result<usize> {
        if !self.is_here() {
            return Ok(0);
        }
        let page = sys::page_size();
        let start = range.start.next_multiple_of(page);
        // The last page of a block is whole also where its bytes are not: the file is that long.
        let end = if range.end >= self.len { self.len } else { range.end / page * page };
        if start >= end {
            return Ok(0);
        }
        // SAFETY: M1: `start < end <= len`, within the mapping.
        let first = unsafe { self.start.add(start) };
        // SAFETY: M1: the range lies in the mapping, and is whole pages of it.
        unsafe { sys::release(first, end - start) }
    }
}

/// Maps the first `len` bytes of an object that keeps M2.
fn map(object: &Object, len: NonZeroUsize, writable: bool) -> io::Result<Mapping> {
    let start = sys::map(object, len, writable)?;
    count(&COUNTERS.mapped, 1);
    Ok(Mapping { start, len: len.get(), home: None, attached: Attached::default() })
}

/// A read-only mapping.
#[derive(Debug)]
pub(crate) struct Reader(Mapping);

impl Reader {
    /// Maps an object that keeps M2 and, for as long as bytes are borrowed, M3.
    pub(crate) fn new(object: &Object, len: NonZeroUsize) -> io::Result<Self> {
        map(object, len, false).map(Self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: M1 (live, `len` bytes, initialised by the kernel), M2 (no fault), M3 (no writer);
        // `len` fits an isize since the kernel mapped it.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }

    /// Copies out what another process may be writing: some bytes of it, a word at a time.
    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        let end = offset.checked_add(into.len());
        if end.is_none_or(|end| end > self.0.len) {
            return Err(Reason::OutOfBounds.into());
        }
        // SAFETY: M1: `offset <= len`.
        let start = unsafe { self.0.start.add(offset) };
        let head = start.as_ptr().align_offset(WORD).min(into.len());
        let (head, rest) = into.split_at_mut(head);
        let (words, tail) = rest.split_at_mut(rest.len() / WORD * WORD);
        for (at, byte) in head.iter_mut().enumerate() {
            // SAFETY: M1: within the mapping, as checked above.
            let from = unsafe { start.add(at) };
            // SAFETY: M1, M2: there to be read. Volatile: it is no memory that Rust code lends meanwhile, and may
            // change at any time.
            *byte = unsafe { from.read_volatile() };
        }
        let mut at = head.len();
        for word in words.chunks_exact_mut(WORD) {
            // SAFETY: M1: as above.
            let from = unsafe { start.add(at) };
            // SAFETY: as above; the head ends where words begin.
            word.copy_from_slice(&unsafe { from.cast::<u64>().read_volatile() }.to_ne_bytes());
            at += WORD;
        }
        for byte in tail {
            // SAFETY: M1: as above.
            let from = unsafe { start.add(at) };
            // SAFETY: as above.
            *byte = unsafe { from.read_volatile() };
            at += 1;
        }
        Ok(())
    }

    /// As [`Mapping::attach`].
    pub(crate) fn attach<A: Any + Send + Sync>(
        &self,
        make: impl FnOnce(*const u8, usize) -> Result<A, Refusal>,
    ) -> Result<(), Refusal> {
        self.0.attach(make)
    }

    /// As [`Mapping::release`].
    pub(crate) fn release(&self, range: Range<usize>) -> io::Result<usize> {
        self.0.release(range)
    }
}

/// A writable mapping.
#[derive(Debug)]
pub(crate) struct Writer(Mapping);

impl Writer {
    /// Maps an object that keeps M2 and of which this is the only writable mapping.
    ///
    /// It stays the only one: a forked child does not inherit it (S3, L9).
    pub(crate) fn new(object: &Object, len: NonZeroUsize) -> io::Result<Self> {
        let mut mapping = map(object, len, true)?;
        // SAFETY: M1: exactly the mapping that was just made.
        unsafe { sys::keep_from_forks(mapping.start, len.get()) }?;
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

    /// Maps a new object and writes its contents, from first to last.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn filled(
        object: &Object,
        capacity: NonZeroUsize,
        len: usize,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        let mut writer = Self::new(object, capacity).map_err(|error| refused(&error, "mmap"))?;
        let contents = writer.bytes_mut().get_mut(..len).ok_or(Reason::OutOfBounds)?;
        Filling::memory(contents).fill(fill)?;
        Ok(writer)
    }

    /// Faults all pages in at once, for writing, where the platform can.
    pub(crate) fn populate(&self) {
        if !self.is_here() {
            return;
        }
        // SAFETY: M1: exactly this mapping, which is writable.
        unsafe { sys::populate(self.0.start, self.0.len) };
    }

    /// As [`Mapping::release`].
    pub(crate) fn release(&self, range: Range<usize>) -> io::Result<usize> {
        self.0.release(range)
    }
}
