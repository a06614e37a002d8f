//! Blocks as the memory of storages.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use rung::{Access, Handle, Memory, Reason, Refusal, Storage, Trust};
use segment::{BlockId, Draft, Foreign, PeerTrust, Sealed, Shared};

use crate::session::{Import, Session};

/// A block that nobody can write, ours or a peer's.
#[derive(Debug)]
pub(crate) struct SealedMemory {
    pub(crate) block: Arc<Sealed>,
    /// Of the contents; the block may be longer.
    pub(crate) len: usize,
    /// Whether it came to be used once: it is not worth keeping further on either.
    pub(crate) once: bool,
}

impl SealedMemory {
    /// The contents of a draft, closed for ever; copied, where the block was shared before and cannot be closed.
    pub(crate) fn of(draft: Draft) -> Result<Self, Refusal> {
        let len = draft.len();
        let block =
            if draft.was_shared() { Sealed::copy_from(draft.bytes())? } else { draft.seal()? };
        Ok(Self { block: Arc::new(block), len, once: false })
    }
}

impl Memory for SealedMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        part(self.block.bytes()?, self.len)
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        within(self.len, offset, into)?;
        self.block.read_at(offset, into)
    }

    fn block(&self) -> u64 {
        self.block.number()
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn access(&self) -> Access {
        Access::Sealed
    }
}

/// A block of ours, lent out.
#[derive(Debug)]
pub(crate) struct LentMemory(pub(crate) Shared);

impl Memory for LentMemory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        Ok(self.0.bytes())
    }

    fn block(&self) -> u64 {
        self.0.number()
    }

    fn is_shared(&self) -> bool {
        true
    }
}

/// A block of a peer's, lent to us.
#[derive(Debug)]
pub(crate) struct ForeignMemory {
    pub(crate) block: Arc<Foreign>,
    /// Of the contents; the block may be longer.
    pub(crate) len: usize,
    pub(crate) trust: Trust,
    /// As of [`SealedMemory`].
    pub(crate) once: bool,
    /// Where it came from: whoever lends it on tells its owner of strangers.
    pub(crate) import: Import,
}

impl Memory for ForeignMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        part(self.block.bytes(self.trust.token::<PeerTrust>())?, self.len)
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        within(self.len, offset, into)?;
        self.block.read_at(offset, into)
    }

    fn block(&self) -> u64 {
        self.block.number()
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn access(&self) -> Access {
        match self.trust.token::<PeerTrust>() {
            Some(_) => Access::Lent,
            None => Access::CopiedOut,
        }
    }
}

/// A block of ours that a peer sent back: the very storage, so that it cannot be reclaimed meanwhile.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    pub(crate) storage: Arc<Storage>,
    pub(crate) len: usize,
}

impl Memory for OwnMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        part(self.storage.host_bytes()?, self.len)
    }

    fn block(&self) -> u64 {
        self.storage.memory().block()
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn access(&self) -> Access {
        Access::Own
    }

    fn is_shared(&self) -> bool {
        true
    }
}

fn part(bytes: &[u8], len: usize) -> Result<&[u8], Refusal> {
    bytes.get(..len).ok_or_else(|| Reason::OutOfBounds.into())
}

fn within(len: usize, offset: usize, into: &[u8]) -> Result<(), Refusal> {
    match offset.checked_add(into.len()) {
        Some(end) if end <= len => Ok(()),
        _ => Err(Reason::OutOfBounds.into()),
    }
}

/// Blocks of ours that are lent out, by their number: no other block has it while ours exists.
static LENT: LazyLock<Mutex<HashMap<u64, Weak<Storage>>>> = LazyLock::new(Mutex::default);

/// Notes a block of ours, so that it is known when it comes back.
pub(crate) fn note_lent(storage: &Arc<Storage>) {
    let Some(memory) = storage.memory_as::<LentMemory>() else { return };
    let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
    // Those that are gone make room; a table that holds none of them is looked through as rarely.
    if lent.len() == lent.capacity() {
        lent.retain(|_, storage| storage.strong_count() > 0);
    }
    lent.insert(memory.0.number(), Arc::downgrade(storage));
}

/// The storage of ours that lies on a block with this number, while it is lent out.
pub(crate) fn own_storage(number: u64) -> Option<Arc<Storage>> {
    let lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
    lent.get(&number)?.upgrade()
}

/// The block that a storage lies on.
pub(crate) enum Block<'a> {
    Sealed(&'a SealedMemory),
    Lent(&'a Shared),
    Foreign(&'a ForeignMemory),
}

impl<'a> Block<'a> {
    pub(crate) fn of(storage: &'a Storage) -> Option<Self> {
        if let Some(memory) = storage.memory_as::<LentMemory>() {
            return Some(Self::Lent(&memory.0));
        }
        if let Some(memory) = storage.memory_as::<ForeignMemory>() {
            return Some(Self::Foreign(memory));
        }
        if let Some(memory) = storage.memory_as::<SealedMemory>() {
            return Some(Self::Sealed(memory));
        }
        storage.memory_as::<OwnMemory>().and_then(|memory| Block::of(&memory.storage))
    }

    pub(crate) fn id(&self) -> &BlockId {
        match self {
            Self::Sealed(memory) => memory.block.id(),
            Self::Lent(block) => block.id(),
            Self::Foreign(memory) => memory.block.id(),
        }
    }

    pub(crate) fn descriptor(&self) -> Result<Handle, Refusal> {
        match self {
            Self::Sealed(memory) => memory.block.descriptor(),
            Self::Lent(block) => block.descriptor(),
            Self::Foreign(memory) => memory.block.descriptor(),
        }
    }

    /// Whether it is not worth keeping.
    pub(crate) fn is_once(&self) -> bool {
        match self {
            Self::Sealed(memory) => memory.once,
            Self::Lent(_) => false,
            Self::Foreign(memory) => memory.once,
        }
    }

    /// Whether it is not this process's own to vouch for.
    pub(crate) fn is_forwarded(&self) -> bool {
        matches!(self, Self::Foreign(_))
    }

    /// Who could write it.
    pub(crate) fn access(&self) -> Access {
        match self {
            Self::Sealed(memory) => memory.access(),
            Self::Lent(_) => Access::Lent,
            Self::Foreign(memory) => memory.access(),
        }
    }

    /// Somebody sees it, or is about to, who may go on looking: a peer who is not trusted, unless the
    /// block goes back by the session that it came by.
    pub(crate) fn expose(&self, by: Option<&Arc<Session>>) {
        match self {
            // Never written again in any case.
            Self::Sealed(_) => {}
            Self::Lent(block) => block.expose(),
            Self::Foreign(memory) => {
                let goes_back = by.is_some_and(|by| {
                    std::ptr::eq(memory.import.session.as_ptr(), &raw const **by)
                });
                if !goes_back {
                    memory.import.expose();
                }
            }
        }
    }

    /// A lease on it will never be home.
    pub(crate) fn retire(&self) {
        match self {
            Self::Sealed(_) => {}
            Self::Lent(block) => block.retire(),
            Self::Foreign(memory) => memory.import.expose(),
        }
    }

    pub(crate) fn release(&self, range: Range<usize>) -> Result<usize, Refusal> {
        match self {
            Self::Sealed(memory) => memory.block.release(range),
            Self::Lent(block) => block.release(range),
            Self::Foreign(memory) => memory.block.release(range),
        }
    }
}
