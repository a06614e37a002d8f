//! Blocks of ours that are written, lent out, and written again.

use std::sync::Arc;

use rung::{Handle, Reason, Refusal};

use crate::counters::{COUNTERS, count};
use crate::file::{Block, handle, refused};
use crate::filling::Filling;
use crate::id::BlockId;
use crate::pool::{Own, Pool, size_class};
use crate::sealed::Sealed;

/// A writable block with one owner.
///
/// Written through `&mut`, then [sealed](Self::seal) for good or [shared](Self::share) until it
/// comes back. It begins at a page, so elements of any type are aligned. Dropped, it goes back to its
/// [`Pool`].
///
/// ```
/// let mut draft = segment::Draft::new(8)?;
/// draft.bytes_mut().fill(1);
/// let shared = draft.share()?;
/// assert_eq!(shared.bytes(), [1; 8]);
/// let mut again = shared.reclaim().expect("nobody looks at it");
/// again.bytes_mut().fill(2);
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
    /// There until it is dropped or sealed.
    own: Option<Own>,
    /// Of the contents; the block may be longer.
    len: usize,
    id: Arc<BlockId>,
    pool: Arc<Pool>,
}

impl Draft {
    /// A block of zeros, from the process's pool.
    ///
    /// Its memory is allocated at once (on Linux by fallocate(2)): a full machine is a refusal here, not a
    /// SIGBUS later.
    ///
    /// # Errors
    ///
    /// [`Reason::Empty`] for no bytes, [`Reason::NoMemory`], [`Reason::NoDescriptors`],
    /// [`Reason::Platform`], [`Reason::System`].
    pub fn new(len: usize) -> Result<Self, Refusal> {
        Self::new_in(Pool::process(), len)
    }

    /// As [`Self::new`], from this pool.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn new_in(pool: &Arc<Pool>, len: usize) -> Result<Self, Refusal> {
        let capacity = size_class(len)?;
        if let Some(own) = pool.take(capacity) {
            return Ok(Self::of(own, len, 0, pool));
        }
        pool.make_room(capacity)?;
        let object = pool.new_object(capacity)?;
        object.allocate(capacity)?;
        let mut own = Own::new(object, None, capacity)?;
        // Whoever asks for memory is about to write it.
        own.writer.populate();
        own.populated = true;
        pool.note_made(capacity);
        Ok(Self::of(own, len, 0, pool))
    }

    /// A block with contents, from the process's pool, filled from first to last: one copy.
    ///
    /// # Errors
    ///
    /// As [`Self::new`], what `fill` answers, and [`Reason::ShapeMismatch`] where it wrote another
    /// number of bytes.
    pub fn build(
        len: usize,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        Self::build_in(Pool::process(), len, fill)
    }

    /// As [`Self::build`], from this pool.
    ///
    /// # Errors
    ///
    /// As [`Self::build`].
    pub fn build_in(
        pool: &Arc<Pool>,
        len: usize,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        let capacity = size_class(len)?;
        if let Some(own) = pool.take(capacity) {
            let mut draft = Self::of(own, len, len, pool);
            Filling::memory(draft.bytes_mut()).fill(fill)?;
            return Ok(draft);
        }
        pool.make_room(capacity)?;
        // Its pages may not have been faulted in by that; at the second use all are, at once.
        let object = pool.new_object(capacity)?;
        let writer = object.fill(capacity, len, fill, false)?;
        let own = Own::new(object, writer, capacity)?;
        pool.note_made(capacity);
        Ok(Self::of(own, len, len, pool))
    }

    /// A block with contents, from the process's pool, filled all at once; what `fill` does not write is whatever was
    /// there before. `before` may [attach](Self::attach) something first.
    ///
    /// # Errors
    ///
    /// As [`Self::new`], and what `fill` answers.
    pub fn build_at_once(
        len: usize,
        before: impl FnOnce(&Self),
        fill: impl FnOnce(&mut [u8]) -> Result<(), Refusal>,
    ) -> Result<Self, Refusal> {
        let (pool, capacity) = (Pool::process(), size_class(len)?);
        let mut draft = match pool.take(capacity) {
            Some(own) => Self::of(own, len, len, pool),
            None => Self::new_in(pool, len)?,
        };
        before(&draft);
        fill(draft.bytes_mut())?;
        count(&COUNTERS.copied, len);
        Ok(draft)
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
        self.own.as_ref().map_or(Ok(()), |own| own.writer.attach(make))
    }

    /// A block of which all of the contents count as written, the first `kept` bytes as they are and
    /// whatever an earlier use left after them zeroed.
    fn of(mut own: Own, len: usize, kept: usize, pool: &Arc<Pool>) -> Self {
        let used_before = own.dirty > 0;
        if used_before && !own.populated {
            own.writer.populate();
            own.populated = true;
        }
        let id = Arc::clone(&own.id);
        let mut draft = Self { own: Some(own), len, id, pool: Arc::clone(pool) };
        draft.zero_from(kept);
        if let Some(own) = &mut draft.own {
            own.dirty = own.dirty.max(len);
        }
        draft
    }

    /// Zeroes what an earlier use left from here on (P2).
    fn zero_from(&mut self, start: usize) {
        if let Some(own) = &mut self.own {
            if let Some(left) = own.writer.bytes_mut().get_mut(start..own.dirty) {
                left.fill(0);
            }
            own.dirty = own.dirty.min(start);
        }
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a block has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The block's identity in this process.
    #[must_use]
    pub fn id(&self) -> &Arc<BlockId> {
        &self.id
    }

    /// Whether a peer has seen the block, in this use of it or an earlier one: it cannot be sealed then.
    #[must_use]
    pub fn was_shared(&self) -> bool {
        self.own.as_ref().is_none_or(|own| own.was_shared)
    }

    /// The bytes; none in a forked child, which does not have them (L9).
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let own = self.own.as_ref();
        own.and_then(|own| own.writer.bytes().get(..self.len)).unwrap_or_default()
    }

    /// The bytes, to write; none in a forked child.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        let own = self.own.as_mut();
        own.and_then(|own| own.writer.bytes_mut().get_mut(..len)).unwrap_or_default()
    }

    /// Closes it for writing, for ever and for everyone (S2); drops the writable mapping.
    ///
    /// # Errors
    ///
    /// [`Reason::StillLent`] for a block that was shared before, also by an earlier user: its seals are
    /// final. Use [`Sealed::copy_from`]. [`Reason::System`] otherwise.
    pub fn seal(mut self) -> Result<Sealed, Refusal> {
        let Some(own) = self.own.take_if(|own| !own.was_shared && own.writer.is_here()) else {
            return Err(Refusal::new(
                Reason::StillLent,
                "a block that was shared cannot be sealed",
            ));
        };
        let capacity = own.capacity();
        self.pool.note_left(capacity);
        let object = own.into_object()?;
        object.close()?;
        Ok(Sealed::over(Block::new(object, capacity), self.len))
    }

    /// Lends it out: peers may map it for reading, nobody for writing (S3).
    ///
    /// # Errors
    ///
    /// [`Reason::System`] where the kernel has no `F_SEAL_FUTURE_WRITE` (before Linux 5.1).
    pub fn share(mut self) -> Result<Shared, Refusal> {
        if let Some(own) = &mut self.own
            && !own.was_shared
        {
            own.object.lend()?;
            own.was_shared = true;
        }
        Ok(Shared(self))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(own) = self.own.take() {
            self.pool.put(own);
        }
    }
}

/// A block of ours that is lent out: not written until it is a [`Draft`] again.
///
/// Dropped, it goes back to its [`Pool`]: whoever lends it keeps it until every lease is home (L4).
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

    /// A descriptor for a peer, or on Windows a handle, for reading.
    ///
    /// # Errors
    ///
    /// [`Reason::NoDescriptors`].
    pub fn descriptor(&self) -> Result<Handle, Refusal> {
        match &self.0.own {
            Some(own) => handle(&own.object),
            None => Err(Reason::NoDescriptors.into()),
        }
    }

    /// The block's identity in this process.
    #[must_use]
    pub fn id(&self) -> &Arc<BlockId> {
        self.0.id()
    }

    /// The block's number: as long as it exists, no other block that this process sees has it. On Linux it is the
    /// inode's (inode(7)), the same for all that see the block.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.own.as_ref().map_or(0, |own| own.number)
    }

    /// Notes that somebody sees it who may go on looking after the lease is home: it is never used
    /// again (P3, L8), and its memory goes back to the system.
    pub fn expose(&self) {
        if let Some(own) = &self.0.own {
            own.marks.expose();
        }
    }

    /// Gives the resident pages of a range back to the system, rounded inward to whole pages, and says
    /// how many bytes; the contents stay, and come back at the next look (madvise(2),
    /// `MADV_DONTNEED`).
    ///
    /// # Errors
    ///
    /// [`Reason::System`].
    pub fn release(&self, range: std::ops::Range<usize>) -> Result<usize, Refusal> {
        let released = self.0.own.as_ref().map_or(Ok(0), |own| own.writer.release(range));
        released.map_err(|error| refused(&error, "madvise"))
    }

    /// Notes that a lease on it will never be home: it is neither written nor used again, and goes
    /// back to the system when it is dropped (L3).
    pub fn retire(&self) {
        if let Some(own) = &self.0.own {
            own.marks.retire();
        }
    }

    /// Whether it was [retired](Self::retire).
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.0.own.as_ref().is_none_or(|own| own.marks.is_retired())
    }

    /// Writable again, once every lease on it is home (L4).
    ///
    /// Taking it by value is what shows that: whoever keeps it for a lease holds it in an `Arc`.
    ///
    /// # Errors
    ///
    /// The block, where it was [retired](Self::retire).
    pub fn reclaim(self) -> Result<Draft, Self> {
        if self.is_retired() { Err(self) } else { Ok(self.0) }
    }
}
