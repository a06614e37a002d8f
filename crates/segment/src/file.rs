//! What every block is: a memfd, and perhaps a mapping of it.

use std::any::Any;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rung::{Reason, Refusal};

use crate::counters::{COUNTERS, count};
use crate::id::BlockId;
use crate::mapping::Reader;

/// Set before a descriptor leaves (S1).
pub(crate) const SIZE_SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// memfd_create(2), since Linux 6.3; nix has no name for it yet.
const MFD_NOEXEC_SEAL: MFdFlags = MFdFlags::from_bits_retain(0x0008);

pub(crate) fn refused(errno: Errno, what: &str) -> Refusal {
    let reason = match errno {
        Errno::ENOMEM | Errno::ENOSPC | Errno::EDQUOT => Reason::NoMemory,
        Errno::EMFILE | Errno::ENFILE => Reason::NoDescriptors,
        Errno::ENOSYS => Reason::Platform,
        _ => Reason::System,
    };
    Refusal::new(reason, format!("{what}: {}", errno.desc()))
}

pub(crate) fn refused_io(error: &std::io::Error, what: &str) -> Refusal {
    refused(Errno::from_raw(error.raw_os_error().unwrap_or(0)), what)
}

pub(crate) fn nonzero(len: usize) -> Result<NonZeroUsize, Refusal> {
    NonZeroUsize::new(len).ok_or_else(|| Reason::Empty.into())
}

pub(crate) fn new_file() -> Result<File, Refusal> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    // Hosts may insist on non-executable memfds (vm.memfd_noexec); older kernels do not know them.
    let descriptor = match memfd_create(c"tensor-ladder", flags | MFD_NOEXEC_SEAL) {
        Err(Errno::EINVAL) => memfd_create(c"tensor-ladder", flags),
        made => made,
    };
    count(&COUNTERS.created, 1);
    Ok(File::from(descriptor.map_err(|errno| refused(errno, "memfd_create"))?))
}

pub(crate) fn add_seals(file: &File, seals: SealFlag) -> Result<(), Refusal> {
    fcntl(file, FcntlArg::F_ADD_SEALS(seals)).map(drop).map_err(|errno| refused(errno, "sealing"))
}

pub(crate) fn seals_of(file: impl AsFd) -> Result<SealFlag, Errno> {
    fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain)
}

/// The number of a file (inode(7)): among memfds, no two that exist have the same.
pub(crate) fn number(file: &File) -> u64 {
    file.metadata().map_or(0, |metadata| std::os::unix::fs::MetadataExt::ino(&metadata))
}

pub(crate) fn duplicate(file: &File) -> Result<OwnedFd, Refusal> {
    count(&COUNTERS.duplicated, 1);
    file.as_fd()
        .try_clone_to_owned()
        .map_err(|error| refused_io(&error, "duplicating a descriptor"))
}

/// Allocates a range of a file (fallocate(2)): a full machine is a refusal here, not a SIGBUS later.
pub(crate) fn allocate(file: &File, range: Range<usize>) -> Result<(), Refusal> {
    let offset = |at: usize| i64::try_from(at).map_err(|_| Refusal::from(Reason::NoMemory));
    if range.is_empty() {
        return Ok(());
    }
    let (start, len) = (offset(range.start)?, offset(range.len())?);
    count(&COUNTERS.allocated, 1);
    loop {
        match fallocate(file, FallocateFlags::empty(), start, len) {
            Err(Errno::EINTR) => {}
            done => return done.map_err(|errno| refused(errno, "allocating shared memory")),
        }
    }
}

/// A file and, once somebody looks, a read-only mapping of it.
#[derive(Debug)]
pub(crate) struct Block {
    file: File,
    len: usize,
    /// Of the file (inode(7)).
    inode: u64,
    reader: OnceLock<Reader>,
    id: BlockId,
}

impl Block {
    pub(crate) fn new(file: File, len: usize) -> Self {
        let inode = number(&file);
        Self { file, len, inode, reader: OnceLock::new(), id: BlockId::new() }
    }

    pub(crate) fn id(&self) -> &BlockId {
        &self.id
    }

    /// Gives resident pages back, if it is mapped.
    pub(crate) fn release(&self, range: Range<usize>) -> Result<usize, Refusal> {
        let released = self.reader.get().map_or(Ok(0), |reader| reader.release(range));
        released.map_err(|errno| refused(errno, "madvise"))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn number(&self) -> u64 {
        self.inode
    }

    pub(crate) fn descriptor(&self) -> Result<OwnedFd, Refusal> {
        duplicate(&self.file)
    }

    /// Attaches something to the mapping, which is made where there is none.
    pub(crate) fn attach<A: Any + Send + Sync>(
        &self,
        make: impl FnOnce(*const u8, usize) -> Result<A, Refusal>,
    ) -> Result<(), Refusal> {
        self.bytes()?;
        self.reader.get().map_or(Ok(()), |reader| reader.attach(make))
    }

    /// Whoever calls this has S1, and S2 or S4.
    pub(crate) fn bytes(&self) -> Result<&[u8], Refusal> {
        if let Some(reader) = self.reader.get() {
            return Ok(reader.bytes());
        }
        let len = nonzero(self.len)?;
        let reader = Reader::new(&self.file, len).map_err(|errno| refused(errno, "mmap"))?;
        // Two threads may both have mapped it; one mapping is dropped, which harms nobody.
        Ok(self.reader.get_or_init(|| reader).bytes())
    }

    /// Copies out without a mapping: whatever the owner does meanwhile, pread(2) copies some bytes
    /// into memory of ours.
    pub(crate) fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        let end = offset.checked_add(into.len());
        if end.is_none_or(|end| end > self.len) {
            return Err(Reason::OutOfBounds.into());
        }
        self.file
            .read_exact_at(into, offset as u64)
            .map_err(|error| refused_io(&error, "reading shared memory"))
    }
}
