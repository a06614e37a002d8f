//! Memory: files that stand for a device's, and addresses that the CPU cannot touch.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::state::{Code, INVALID_VALUE, OUT_OF_MEMORY, State, fault};

const PAGE: usize = 4096;

/// Whether a process is there and no zombie.
pub(crate) fn is_running(process: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

/// What freed memory reads as.
const POISON: u8 = 0xDB;

/// The last page of a file: what it is.
#[repr(C)]
pub(crate) struct Header {
    magic: AtomicU64,
    /// 0 once it is freed.
    alive: AtomicU64,
    physical_device: AtomicU64,
    len: AtomicU64,
    /// Processes that have it mapped as a legacy import.
    openers: [AtomicU64; 16],
    /// Of events: see `work`.
    pub(crate) recorded: AtomicU64,
    /// By the number of the record: it is waited for, and it is done. A later record says nothing of an earlier one,
    /// which may be on another stream.
    wanted: [AtomicU64; RECORDS],
    done: [AtomicU64; RECORDS],
}

/// Records of one event that may be under way at a time.
const RECORDS: usize = 128;

impl Header {
    fn slot(number: u64) -> usize {
        usize::try_from(number).unwrap_or(0) % RECORDS
    }

    pub(crate) fn is_done(&self, number: u64) -> bool {
        number == 0 || self.done[Self::slot(number)].load(Ordering::Acquire) >= number
    }

    pub(crate) fn note_done(&self, number: u64) {
        self.done[Self::slot(number)].fetch_max(number, Ordering::AcqRel);
    }

    pub(crate) fn is_wanted(&self, number: u64) -> bool {
        self.wanted[Self::slot(number)].load(Ordering::Acquire) >= number
    }

    pub(crate) fn want(&self, number: u64) {
        self.wanted[Self::slot(number)].fetch_max(number, Ordering::AcqRel);
    }
}

/// A file in memory, mapped here.
pub(crate) struct Backing {
    file: OwnedFd,
    start: *mut u8,
    len: usize,
    magic: u64,
}

// SAFETY: a mapping that lives as long as this; what is in it belongs to tests that race on purpose.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

pub(crate) const LEGACY: u64 = 0x4c45_4741_4359_0001;
pub(crate) const SHAREABLE: u64 = 0x5348_4152_4544_0002;
/// Bytes that show what was there before, or that something was freed: more would cost more than it shows.
const SHOWN: usize = 4 << 20;

pub(crate) const POOL: u64 = 0x504f_4f4c_0000_0004;
pub(crate) const EVENT: u64 = 0x4556_454e_5400_0003;

fn rounded(len: usize) -> usize {
    len.next_multiple_of(PAGE)
}

impl Backing {
    pub(crate) fn make(magic: u64, physical_device: usize, len: usize) -> Result<Arc<Self>, Code> {
        // SAFETY: a constant name.
        let file = unsafe { libc::memfd_create(c"device".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: just made.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let bytes = i64::try_from(rounded(len) + PAGE).map_err(|_| OUT_OF_MEMORY)?;
        // SAFETY: a file of ours.
        if unsafe { libc::ftruncate(file.as_raw_fd(), bytes) } != 0 {
            return Err(OUT_OF_MEMORY);
        }
        let this = Self::map(file, len, magic)?;
        let header = this.header();
        header.physical_device.store(physical_device as u64, Ordering::Relaxed);
        header.len.store(len as u64, Ordering::Relaxed);
        header.alive.store(1, Ordering::Relaxed);
        header.magic.store(magic, Ordering::Release);
        // What was in a device's memory before is anything.
        if magic == LEGACY {
            this.fill(0, len.min(SHOWN), 0xA5);
        }
        Ok(Arc::new(this))
    }

    fn map(file: OwnedFd, len: usize, magic: u64) -> Result<Self, Code> {
        let (read, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let all = rounded(len) + PAGE;
        // SAFETY: a new mapping.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), all, read, shared, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        Ok(Self { file, start: start.cast(), len, magic })
    }

    /// A file of another process, if it is one of these and lives.
    pub(crate) fn open(file: OwnedFd, magic: u64) -> Option<Arc<Self>> {
        // SAFETY: a file of ours; `stat` is zeroed plain data.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        if unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) } != 0 {
            return None;
        }
        let all = usize::try_from(stat.st_size).ok()?;
        let rounded = all.checked_sub(PAGE)?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG || !rounded.is_multiple_of(PAGE) {
            return None;
        }
        let mut this = Self::map(file, rounded, magic).ok()?;
        let header = this.header();
        let len = usize::try_from(header.len.load(Ordering::Relaxed)).ok()?;
        let is_one = header.magic.load(Ordering::Acquire) == magic
            && header.alive.load(Ordering::Relaxed) == 1
            && len.next_multiple_of(PAGE) == rounded;
        if !is_one {
            return None;
        }
        this.len = len;
        Some(Arc::new(this))
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the last page of the mapping, zeroed when it was made, of atomics alone.
        unsafe { &*self.start.add(rounded(self.mapped())).cast() }
    }

    /// Bytes before the header, as mapped.
    fn mapped(&self) -> usize {
        self.len
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn physical_device(&self) -> usize {
        usize::try_from(self.header().physical_device.load(Ordering::Relaxed)).unwrap_or(0)
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    #[allow(clippy::mut_from_ref)]
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset + len <= self.len);
        // SAFETY: within the mapping; whoever races on it is a test that has to.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), len) }
    }

    /// Makes every byte of a range this one; of a long range that becomes zero, the pages are given back.
    pub(crate) fn fill(&self, offset: usize, len: usize, byte: u8) {
        let (start, end) = (offset.next_multiple_of(PAGE), (offset + len) / PAGE * PAGE);
        if byte != 0 || len <= SHOWN || end <= start {
            return self.bytes(offset, len).fill(byte);
        }
        self.bytes(offset, start - offset).fill(0);
        let pages = self.bytes(start, end - start);
        // SAFETY: whole pages of a mapping of a file of ours.
        let given_back =
            unsafe { libc::madvise(pages.as_mut_ptr().cast(), pages.len(), libc::MADV_REMOVE) };
        if given_back != 0 {
            pages.fill(0);
        }
        self.bytes(end, offset + len - end).fill(0);
    }

    /// This process maps it as a legacy import, or does so no more.
    pub(crate) fn note_open(&self, open: bool) {
        let me = u64::from(std::process::id());
        let (from, to) = if open { (0, me) } else { (me, 0) };
        let order = Ordering::AcqRel;
        let openers = &self.header().openers;
        let _ = openers
            .iter()
            .any(|slot| slot.compare_exchange(from, to, order, Ordering::Relaxed).is_ok());
    }

    /// A living process that has it mapped.
    fn opener(&self) -> Option<u64> {
        let openers = self.header().openers.iter().map(|slot| slot.load(Ordering::Acquire));
        openers.filter(|process| *process != 0).find(|process| is_running(*process))
    }

    /// It was freed: every handle is dead, and whoever still looks sees poison.
    pub(crate) fn free(&self) {
        if let Some(process) = self.opener() {
            // Undefined behaviour of the driver's: nothing a test should get away with.
            eprintln!("cuda-standin: freed while process {process} has it mapped");
            std::process::abort();
        }
        self.header().alive.store(0, Ordering::Relaxed);
        if self.magic == LEGACY {
            let shown = self.len.min(SHOWN);
            self.fill(0, shown, POISON);
            // Beyond it is nothing of what was there, either.
            self.fill(shown, self.len - shown, 0);
        }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: mapped once, with this length.
        unsafe { libc::munmap(self.start.cast(), rounded(self.len) + PAGE) };
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Plain,
    Managed,
    StreamOrdered,
    /// Opened so often.
    Import(u32),
    /// Of a pool of another process's, by its file.
    PoolImport,
    /// Of shareable memory: nothing is mapped there, or something that nobody may touch yet, or all is well.
    Reserved,
    Mapped,
    Accessible,
}

impl Kind {
    /// Whether it goes with its context: shareable memory and its addresses are the process's.
    pub(crate) fn is_of_a_context(self) -> bool {
        !matches!(self, Self::Reserved | Self::Mapped | Self::Accessible)
    }
}

/// A range of device addresses.
pub(crate) struct Range {
    pub(crate) len: usize,
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    pub(crate) backing: Option<Arc<Backing>>,
    pub(crate) buffer_id: u64,
    /// What imports are known by.
    pub(crate) inode: u64,
    /// The pool that it is of, or 0.
    pub(crate) pool: u64,
}

/// Addresses that the CPU cannot touch.
pub(crate) fn reserve(len: usize) -> Result<u64, Code> {
    let all = rounded(len);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), all, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(OUT_OF_MEMORY) } else { Ok(start as u64) }
}

pub(crate) fn unreserve(start: u64, len: usize) {
    // SAFETY: reserved with this length by `reserve`, and given back once.
    unsafe { libc::munmap(start as *mut libc::c_void, rounded(len)) };
}

pub(crate) fn inode(file: &OwnedFd) -> u64 {
    // SAFETY: a file of ours; `stat` is zeroed plain data.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) };
    stat.st_ino
}

impl State {
    /// A new range with a new file.
    pub(crate) fn allocate(&mut self, device: usize, len: usize, kind: Kind) -> Result<u64, Code> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if fault("no-memory") || len > 1 << 40 {
            return Err(OUT_OF_MEMORY);
        }
        let backing = Backing::make(LEGACY, self.visible[device], len)?;
        let start = reserve(len)?;
        let (buffer_id, inode) = (self.id(), inode(backing.file()));
        let range = Range { len, device, kind, backing: Some(backing), buffer_id, inode, pool: 0 };
        self.ranges.insert(start, range);
        Ok(start)
    }

    /// Ends a range: its handles are dead, its addresses nobody's.
    pub(crate) fn free(&mut self, start: u64) {
        let Some(range) = self.ranges.remove(&start) else { return };
        if let (Some(backing), Kind::Import(_) | Kind::PoolImport) = (&range.backing, range.kind) {
            backing.note_open(false);
        }
        if let (Some(backing), Kind::Plain | Kind::Managed | Kind::StreamOrdered) =
            (&range.backing, range.kind)
        {
            backing.free();
        }
        unreserve(start, range.len);
    }

    /// The range that an address lies in.
    pub(crate) fn range_of(&self, address: u64) -> Option<(u64, &Range)> {
        let (start, range) = self.ranges.range(..=address).next_back()?;
        (address < start + range.len as u64).then_some((*start, range))
    }
}
