//! The four states of a block, and the checks before one is mapped.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rung::{Fault, Reason, Refusal};

use crate::PeerTrust;
use crate::headroom;
use crate::mapping::{Reader, Writer};

/// Set before a descriptor leaves (S1).
const SIZE_SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// memfd_create(2), since Linux 6.3; nix has no name for it yet.
const MFD_NOEXEC_SEAL: MFdFlags = MFdFlags::from_bits_retain(0x0008);

fn refused(errno: Errno, what: &str) -> Refusal {
    let reason = match errno {
        Errno::ENOMEM | Errno::ENOSPC | Errno::EDQUOT => Reason::NoMemory,
        Errno::EMFILE | Errno::ENFILE => Reason::NoDescriptors,
        Errno::ENOSYS => Reason::Platform,
        _ => Reason::System,
    };
    Refusal::new(reason, format!("{what}: {}", errno.desc()))
}

fn refused_io(error: &std::io::Error, what: &str) -> Refusal {
    refused(Errno::from_raw(error.raw_os_error().unwrap_or(0)), what)
}

fn nonzero(len: usize) -> Result<NonZeroUsize, Refusal> {
    NonZeroUsize::new(len).ok_or_else(|| Reason::Empty.into())
}

fn new_file() -> Result<File, Refusal> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    // Hosts may insist on non-executable memfds (vm.memfd_noexec); older kernels do not know them.
    let descriptor = match memfd_create(c"tensor-ladder", flags | MFD_NOEXEC_SEAL) {
        Err(Errno::EINVAL) => memfd_create(c"tensor-ladder", flags),
        made => made,
    };
    Ok(File::from(descriptor.map_err(|errno| refused(errno, "memfd_create"))?))
}

fn add_seals(file: &File, seals: SealFlag) -> Result<(), Refusal> {
    fcntl(file, FcntlArg::F_ADD_SEALS(seals)).map(drop).map_err(|errno| refused(errno, "sealing"))
}

fn seals_of(file: impl AsFd) -> Result<SealFlag, Errno> {
    fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain)
}

fn duplicate(file: &File) -> Result<OwnedFd, Refusal> {
    file.as_fd()
        .try_clone_to_owned()
        .map_err(|error| refused_io(&error, "duplicating a descriptor"))
}

/// A writable block with one owner.
///
/// Written through `&mut`, then [sealed](Self::seal) for good or [shared](Self::share) until it
/// comes back:
///
/// ```
/// # #[cfg(target_os = "linux")] {
/// let mut draft = segment::Draft::new(8)?;
/// draft.bytes_mut().fill(1);
/// let shared = draft.share()?;
/// assert_eq!(shared.bytes(), [1; 8]);
/// let mut again = shared.reclaim();
/// again.bytes_mut().fill(2);
/// # }
/// # Ok::<(), rung::Refusal>(())
/// ```
///
/// What was shared cannot be written until it is reclaimed:
///
/// ```compile_fail
/// let mut draft = segment::Draft::new(8)?;
/// draft.bytes_mut().fill(1);
/// let shared = draft.share()?;
/// assert_eq!(shared.bytes(), [1; 8]);
/// let mut again = shared;
/// again.bytes_mut().fill(2);
/// # Ok::<(), rung::Refusal>(())
/// ```
#[derive(Debug)]
pub struct Draft {
    file: File,
    writer: Writer,
    /// Whether a peer has seen it: its seals are then final.
    was_shared: bool,
}

impl Draft {
    /// A new block of zeros.
    ///
    /// Its memory is allocated at once (fallocate(2)): a full machine is a refusal here, not a
    /// SIGBUS later.
    ///
    /// # Errors
    ///
    /// [`Reason::Empty`] for no bytes, [`Reason::NoMemory`], [`Reason::NoDescriptors`],
    /// [`Reason::Platform`], [`Reason::System`].
    pub fn new(len: usize) -> Result<Self, Refusal> {
        let mapped = nonzero(len)?;
        let size = i64::try_from(len).map_err(|_| Reason::NoMemory)?;
        headroom::check(len)?;
        let file = new_file()?;
        loop {
            match fallocate(&file, FallocateFlags::empty(), 0, size) {
                Err(Errno::EINTR) => {}
                done => {
                    done.map_err(|errno| refused(errno, "allocating shared memory"))?;
                    break;
                }
            }
        }
        // S1, from the start: nothing shrinks the file under the mapping.
        add_seals(&file, SIZE_SEALS)?;
        let writer = Writer::new(&file, mapped).map_err(|errno| refused(errno, "mmap"))?;
        Ok(Self { file, writer, was_shared: false })
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.writer.bytes().len()
    }

    /// Never: a block has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.writer.bytes()
    }

    /// The bytes, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.writer.bytes_mut()
    }

    /// Closes it for writing, for ever and for everyone (S2); drops the writable mapping.
    ///
    /// # Errors
    ///
    /// [`Reason::StillLent`] for a block that was shared before: its seals are final. Use
    /// [`Sealed::copy_from`]. [`Reason::System`] otherwise.
    pub fn seal(self) -> Result<Sealed, Refusal> {
        if self.was_shared {
            return Err(Refusal::new(
                Reason::StillLent,
                "a block that was shared cannot be sealed",
            ));
        }
        let Self { file, writer, .. } = self;
        let len = writer.bytes().len();
        // F_SEAL_WRITE is refused while a writable mapping exists.
        drop(writer);
        add_seals(&file, SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL)?;
        Ok(Sealed(Block { file, len, reader: OnceLock::new() }))
    }

    /// Lends it out: peers may map it for reading, nobody for writing (S3).
    ///
    /// # Errors
    ///
    /// [`Reason::System`] where the kernel has no `F_SEAL_FUTURE_WRITE` (before Linux 5.1).
    pub fn share(self) -> Result<Shared, Refusal> {
        if !self.was_shared {
            add_seals(&self.file, SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SEAL)?;
        }
        Ok(Shared(Self { was_shared: true, ..self }))
    }
}

/// A block of ours that is lent out: not written until it is a [`Draft`] again.
#[derive(Debug)]
pub struct Shared(Draft);

impl Shared {
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

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// A descriptor for a peer.
    ///
    /// # Errors
    ///
    /// [`Reason::NoDescriptors`].
    pub fn descriptor(&self) -> Result<OwnedFd, Refusal> {
        duplicate(&self.0.file)
    }

    /// Writable again, once every lease on it is home (L4).
    ///
    /// Taking it by value is what shows that: whoever keeps it for a lease holds it in an `Arc`.
    #[must_use]
    pub fn reclaim(self) -> Draft {
        self.0
    }
}

/// A file and, once somebody looks, a read-only mapping of it.
#[derive(Debug)]
struct Block {
    file: File,
    len: usize,
    reader: OnceLock<Reader>,
}

impl Block {
    /// Whoever calls this has S1, and S2 or S4.
    fn bytes(&self) -> Result<&[u8], Refusal> {
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
    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        let end = offset.checked_add(into.len());
        if end.is_none_or(|end| end > self.len) {
            return Err(Reason::OutOfBounds.into());
        }
        self.file
            .read_exact_at(into, offset as u64)
            .map_err(|error| refused_io(&error, "reading shared memory"))
    }
}

/// A block that nobody can write any more: its bytes are lent to anyone (S2).
#[derive(Debug)]
pub struct Sealed(Block);

impl Sealed {
    /// A new block with these contents: one copy.
    ///
    /// # Errors
    ///
    /// As [`Draft::new`].
    pub fn copy_from(bytes: &[u8]) -> Result<Self, Refusal> {
        Self::build(bytes.len(), |filling| filling.write(bytes))
    }

    /// A new block of `len` bytes, filled from first to last by pwrite(2), which saves both the
    /// mapping and the zeroing of pages that are overwritten at once.
    ///
    /// # Errors
    ///
    /// As [`Draft::new`], what `fill` answers, and [`Reason::ShapeMismatch`] where it wrote another
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
        Ok(Self(Block { file, len, reader: OnceLock::new() }))
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
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
        duplicate(&self.0.file)
    }
}

/// Small pieces are gathered up to this size: a system call a row of a narrow view would cost more
/// than the copy.
const GATHER: usize = 256 << 10;

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

/// A block that a peer lends and could still write.
#[derive(Debug)]
pub struct Foreign(Block);

impl Foreign {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
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

    /// A descriptor for another peer: the block is forwarded, not copied.
    ///
    /// # Errors
    ///
    /// [`Reason::NoDescriptors`].
    pub fn descriptor(&self) -> Result<OwnedFd, Refusal> {
        duplicate(&self.0.file)
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

/// Takes a descriptor that a peer says is a block of `len` bytes; believes only the kernel.
///
/// Nothing is mapped yet. After this, S1 holds, and S2 for [`Received::Sealed`].
///
/// # Errors
///
/// [`Reason::Empty`] for no bytes, [`Reason::NotSharedMemory`] where it cannot be sealed at all or
/// is no tmpfs file, [`Reason::Unsealed`] where it could be resized or written by anybody who maps
/// it, [`Reason::WrongSize`], [`Reason::Sparse`] where pages are missing.
pub fn receive(descriptor: OwnedFd, len: usize) -> Result<Received, Fault> {
    nonzero(len)?;
    let file = File::from(descriptor);
    // Seals first: after SHRINK and GROW are seen, what fstat says stays true.
    let seals = seals_of(&file).map_err(|_| Fault::from(Reason::NotSharedMemory))?;
    let wanted = SIZE_SEALS | SealFlag::F_SEAL_SEAL;
    let unwritable = seals.contains(SealFlag::F_SEAL_WRITE);
    if !seals.contains(wanted) || !(unwritable || seals.contains(SealFlag::F_SEAL_FUTURE_WRITE)) {
        return Err(Fault::new(Reason::Unsealed, format!("it has {seals:?}")));
    }
    let metadata = file.metadata().map_err(|error| Fault::from(refused_io(&error, "fstat")))?;
    if metadata.size() != len as u64 {
        return Err(Fault::new(
            Reason::WrongSize,
            format!("{len} bytes declared, {} there", metadata.size()),
        ));
    }
    // Blocks of 512 bytes (inode(7)). F_SEAL_WRITE and F_SEAL_FUTURE_WRITE forbid punching holes,
    // so pages that are there stay there.
    if metadata.blocks().saturating_mul(512) < len as u64 {
        return Err(Fault::new(
            Reason::Sparse,
            format!("{} blocks for {len} bytes", metadata.blocks()),
        ));
    }
    // Huge-page files can be sealed too, but their mappings must be whole huge pages.
    if metadata.blksize() > 1 << 20 {
        return Err(Fault::new(Reason::NotSharedMemory, "a huge-page file"));
    }
    let block = Block { file, len, reader: OnceLock::new() };
    Ok(if unwritable { Received::Sealed(Sealed(block)) } else { Received::Foreign(Foreign(block)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(received: Result<Received, Fault>) -> Reason {
        received.unwrap_err().reason()
    }

    /// A memfd as a careless or hostile peer might make it.
    fn memfd(len: u64, seals: SealFlag) -> OwnedFd {
        let file = new_file().unwrap();
        file.set_len(len).unwrap();
        add_seals(&file, seals).unwrap();
        file.into()
    }

    #[test]
    fn a_sealed_block_cannot_be_written_by_anyone() {
        let mut draft = Draft::new(5000).unwrap();
        draft.bytes_mut()[4999] = 7;
        let sealed = draft.seal().unwrap();
        let file = File::from(sealed.descriptor().unwrap());
        assert_eq!(
            file.write_all_at(b"x", 0).unwrap_err().raw_os_error(),
            Some(Errno::EPERM as i32)
        );
        assert!(file.set_len(0).is_err());
        assert_eq!(Writer::new(&file, nonzero(5000).unwrap()).unwrap_err(), Errno::EPERM);
        let Received::Sealed(received) = receive(file.into(), 5000).unwrap() else {
            panic!("not seen as sealed")
        };
        assert_eq!(received.bytes().unwrap()[4998..], [0, 7]);
    }

    #[test]
    fn a_block_is_filled_from_pieces_of_any_size() {
        let sizes = [1, 100, GATHER - 1, GATHER, GATHER + 1, 7, 3 * GATHER, GATHER / 2, 1];
        let pieces: Vec<Vec<u8>> =
            sizes.iter().enumerate().map(|(index, &size)| vec![index as u8 + 1; size]).collect();
        let whole = pieces.concat();
        let fill = |filling: &mut Filling| pieces.iter().try_for_each(|piece| filling.write(piece));
        let sealed = Sealed::build(whole.len(), fill).unwrap();
        assert!(sealed.bytes().unwrap() == whole);
        for wrong in [whole.len() - 1, whole.len() + 1] {
            let refusal = Sealed::build(wrong, fill).unwrap_err();
            assert_eq!(refusal.reason(), Reason::ShapeMismatch);
        }
    }

    #[test]
    fn a_shared_block_is_written_by_its_owner_alone() {
        let mut draft = Draft::new(64).unwrap();
        draft.bytes_mut().fill(1);
        let shared = draft.share().unwrap();
        let file = File::from(shared.descriptor().unwrap());
        assert!(file.write_all_at(b"x", 0).is_err());
        assert_eq!(Writer::new(&file, nonzero(64).unwrap()).unwrap_err(), Errno::EPERM);
        let punched = fallocate(
            &file,
            FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE,
            0,
            64,
        );
        assert_eq!(punched, Err(Errno::EPERM));
        let Received::Foreign(foreign) = receive(file.into(), 64).unwrap() else {
            panic!("not seen as writable by its owner")
        };
        assert_eq!(foreign.bytes(None).unwrap_err().reason(), Reason::PeerNotTrusted);
        let mut copied = [0; 64];
        foreign.read_at(0, &mut copied).unwrap();
        assert_eq!(copied, [1; 64]);
        let trust = PeerTrust::same_executable(std::process::id()).unwrap();
        assert_eq!(foreign.bytes(Some(&trust)).unwrap(), [1; 64]);

        let mut again = shared.reclaim();
        again.bytes_mut().fill(2);
        assert_eq!(again.seal().unwrap_err().reason(), Reason::StillLent);
    }

    #[test]
    fn an_unsealed_segment_is_refused() {
        let all = [
            SealFlag::F_SEAL_SHRINK,
            SealFlag::F_SEAL_GROW,
            SealFlag::F_SEAL_WRITE,
            SealFlag::F_SEAL_SEAL,
        ];
        for missing in all {
            let seals = all
                .into_iter()
                .filter(|seal| *seal != missing)
                .fold(SealFlag::empty(), SealFlag::union);
            // Allocated, so that the seals alone decide.
            let file = new_file().unwrap();
            file.write_all_at(&[1; 4096], 0).unwrap();
            add_seals(&file, seals).unwrap();
            assert_eq!(reason(receive(file.into(), 4096)), Reason::Unsealed, "{missing:?}");
        }
    }

    #[test]
    fn the_kernels_size_counts_not_the_peers() {
        for said in [1, 4095, 4097, usize::MAX] {
            let descriptor = Sealed::copy_from(&[1; 4096]).unwrap().descriptor().unwrap();
            assert_eq!(reason(receive(descriptor, said)), Reason::WrongSize, "{said}");
        }
        let descriptor = Sealed::copy_from(&[1]).unwrap().descriptor().unwrap();
        assert_eq!(reason(receive(descriptor, 0)), Reason::Empty);
    }

    #[test]
    fn a_segment_with_holes_is_refused() {
        let seals = SIZE_SEALS | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
        assert_eq!(reason(receive(memfd(8 << 20, seals), 8 << 20)), Reason::Sparse);
    }

    #[test]
    fn what_is_no_shared_memory_is_refused() {
        let null = File::open("/dev/null").unwrap();
        assert_eq!(reason(receive(null.into(), 4096)), Reason::NotSharedMemory);
        let (pipe, _) = std::io::pipe().unwrap();
        assert_eq!(reason(receive(pipe.into(), 4096)), Reason::NotSharedMemory);
    }

    #[test]
    fn more_than_the_machine_has_is_a_refusal() {
        // More than any machine's memory: refused before the kernel starts to look for pages.
        let refusal = Draft::new(1 << 50).unwrap_err();
        assert_eq!(refusal.reason(), Reason::NoMemory, "{refusal}");
        assert_eq!(Draft::new(0).unwrap_err().reason(), Reason::Empty);
    }

    #[test]
    fn a_new_block_is_zero_and_its_size_is_fixed() {
        let draft = Draft::new(12_345).unwrap();
        assert!(draft.bytes().iter().all(|byte| *byte == 0));
        assert!(draft.file.set_len(1).is_err());
        assert!(draft.file.set_len(1 << 20).is_err());
    }
}
