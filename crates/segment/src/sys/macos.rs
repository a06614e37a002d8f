//! macOS and other Unixes without memfds: shm_open(2) with a random name that is gone before anybody could be told it,
//! so that a killed owner leaves nothing behind. Type-checked, not run (docs/platforms.md).
#![expect(unsafe_code, reason = "what a fork inherits")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::OFlag;
use nix::libc;
use nix::sys::mman::{shm_open, shm_unlink};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use rung::{Fault, Handle, Reason, Refusal};

use crate::counters::{COUNTERS, count};
use crate::file::{nonzero, refused};
use crate::filling::Filling;
use crate::mapping::Writer;

/// The memory: writable for its owner, and what a peer gets.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    file: Arc<File>,
    /// For reading alone; the same as `file` where it came from a peer.
    for_peers: Arc<File>,
    number: u64,
}

/// Nothing: what comes back is not known for ours, and is mapped again.
#[derive(Debug)]
pub(crate) struct Identity;

fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Object {
    pub(crate) fn new(capacity: usize) -> Result<Self, Refusal> {
        let failed = |error: &io::Error| refused(error, "shm_open");
        count(&COUNTERS.created, 1);
        // Names are 31 bytes at most there (PSHMNAMLEN).
        let mut random = [0; 10];
        getrandom::fill(&mut random).map_err(|_| Refusal::from(Reason::System))?;
        let name: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("/ladder-{name}");
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
        let owner = shm_open(name.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR);
        let owner = owner.map_err(|errno| failed(&errno.into()))?;
        let reader = shm_open(name.as_str(), OFlag::O_RDONLY, Mode::empty());
        let unlinked = shm_unlink(name.as_str());
        let reader = reader.map_err(|errno| failed(&errno.into()))?;
        unlinked.map_err(|errno| failed(&errno.into()))?;
        let file = File::from(owner);
        count(&COUNTERS.allocated, 1);
        // The one time that this works (ftruncate(2)): from here on its size is fixed (S1).
        file.set_len(capacity as u64)
            .map_err(|error| refused(&error, "allocating shared memory"))?;
        let for_peers = Arc::new(File::from(reader));
        Ok(Self { file: Arc::new(file), for_peers, number: next_number() })
    }

    /// Nothing to do: it has its memory from the start.
    pub(crate) fn allocate(&self, _capacity: usize) -> Result<(), Refusal> {
        Ok(())
    }

    pub(crate) fn fill(
        &self,
        capacity: usize,
        len: usize,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), Refusal>,
        _is_final: bool,
    ) -> Result<Option<Writer>, Refusal> {
        Writer::filled(self, nonzero(capacity)?, len, fill).map(Some)
    }

    pub(crate) fn close(&self) -> Result<(), Refusal> {
        Ok(())
    }

    pub(crate) fn lend(&self) -> Result<(), Refusal> {
        Ok(())
    }

    pub(crate) fn handle(&self) -> io::Result<Handle> {
        self.for_peers.as_fd().try_clone_to_owned()
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn identity(&self) -> Identity {
        Identity
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Such files are mapped, never read.
    pub(crate) fn read_at(&self, _offset: usize, _into: &mut [u8]) -> Option<io::Result<()>> {
        None
    }
}

/// What a peer's descriptor is: the object and its bytes. Nothing can be sealed, so its owner can always write.
pub(crate) fn receive(descriptor: OwnedFd, least: usize) -> Result<(Object, usize, bool), Fault> {
    let status: FileStat = fstat(&descriptor).map_err(|_| Fault::from(Reason::NotSharedMemory))?;
    // A file of a file system could be cut short under the mapping; shared memory has no type of file.
    if status.st_mode & SFlag::S_IFMT.bits() != 0 {
        return Err(Reason::NotSharedMemory.into());
    }
    let size = status.st_size;
    let len = usize::try_from(size).ok().filter(|&len| len >= least).ok_or_else(|| {
        Fault::new(Reason::WrongSize, format!("{least} bytes declared, {size} there"))
    })?;
    let file = Arc::new(File::from(descriptor));
    let object = Object { for_peers: Arc::clone(&file), file, number: next_number() };
    Ok((object, nonzero(len)?.get(), false))
}

/// Has a forked child not have a mapping (minherit(2)).
///
/// # Safety
///
/// It is exactly what `map` gave (M1).
pub(crate) unsafe fn keep_from_forks(start: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: M1, as the caller has it; not inheriting it changes nothing in this process.
    match unsafe { libc::minherit(start.as_ptr().cast(), len, libc::VM_INHERIT_NONE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Pages fault as they are written.
///
/// # Safety
///
/// None.
pub(crate) unsafe fn populate(_start: NonNull<u8>, _len: usize) {}

/// Nothing is given back.
///
/// # Safety
///
/// None.
pub(crate) unsafe fn release(_start: NonNull<u8>, _len: usize) -> io::Result<usize> {
    Ok(0)
}

/// Not known.
pub(crate) fn left() -> Option<u64> {
    None
}
