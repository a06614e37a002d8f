//! Blocks of ours that are written, lent out, and written again.

use std::fs::File;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, SealFlag, fallocate};
use rung::{Reason, Refusal};

use crate::file::{Block, SIZE_SEALS, add_seals, duplicate, new_file, nonzero, number, refused};
use crate::headroom;
use crate::mapping::Writer;
use crate::sealed::Sealed;

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
    pub(crate) file: File,
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
        Ok(Sealed(Block::new(file, len)))
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

    /// The block's number: as long as it exists, no other block of the machine has it.
    #[must_use]
    pub fn number(&self) -> u64 {
        number(&self.0.file)
    }

    /// Writable again, once every lease on it is home (L4).
    ///
    /// Taking it by value is what shows that: whoever keeps it for a lease holds it in an `Arc`.
    #[must_use]
    pub fn reclaim(self) -> Draft {
        self.0
    }
}
