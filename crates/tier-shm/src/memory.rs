//! Blocks as the memory of storages, and tensors that are born in one.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use rung::{DType, Element, Layout, Memory, Reason, Refusal, Storage, Tensor, Trust};
use segment::{Draft, Foreign, PeerTrust, Sealed, Shared};

/// A block that nobody can write, ours or a peer's.
#[derive(Debug)]
pub(crate) struct SealedMemory(pub(crate) Sealed);

impl Memory for SealedMemory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        self.0.bytes()
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        self.0.read_at(offset, into)
    }

    fn is_shared(&self) -> bool {
        true
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

    fn is_shared(&self) -> bool {
        true
    }
}

/// A block of a peer's, lent to us.
#[derive(Debug)]
pub(crate) struct ForeignMemory {
    pub(crate) block: Foreign,
    pub(crate) trust: Trust,
}

impl Memory for ForeignMemory {
    fn len(&self) -> usize {
        self.block.len()
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        self.block.bytes(self.trust.token::<PeerTrust>())
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        self.block.read_at(offset, into)
    }

    fn is_shared(&self) -> bool {
        true
    }
}

/// A block of ours that a peer sent back: the very storage, so that it cannot be reclaimed meanwhile.
#[derive(Debug)]
pub(crate) struct OwnMemory(pub(crate) Arc<Storage>);

impl Memory for OwnMemory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        self.0.host_bytes()
    }

    fn is_shared(&self) -> bool {
        true
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

/// The storage of ours that a received block is, if it is one.
pub(crate) fn own_block(block: &Foreign) -> Option<Arc<Storage>> {
    let lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
    let own = lent.get(&block.number())?.upgrade()?;
    (own.len() == block.len()).then_some(own)
}

/// A descriptor of the block that a storage lies on, if it lies on one.
pub(crate) fn descriptor(storage: &Storage) -> Option<Result<OwnedFd, Refusal>> {
    if let Some(memory) = storage.memory_as::<SealedMemory>() {
        return Some(memory.0.descriptor());
    }
    if let Some(memory) = storage.memory_as::<LentMemory>() {
        return Some(memory.0.descriptor());
    }
    if let Some(memory) = storage.memory_as::<OwnMemory>() {
        return descriptor(&memory.0);
    }
    storage.memory_as::<ForeignMemory>().map(|memory| memory.block.descriptor())
}

/// A tensor that is born in shared memory: written in place, then shared without a copy.
///
/// It is in C order from the start of a block of its own. It has one owner until it is shared; after
/// that nobody writes it, until every receiver has let go and it is [reclaimed](Self::reclaim).
#[derive(Debug)]
pub struct TensorMut {
    /// None for a tensor without elements, which needs no memory.
    block: Option<Draft>,
    dtype: DType,
    shape: Vec<usize>,
}

impl TensorMut {
    /// Of zeros.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::contiguous`] and of [`Draft::new`].
    pub fn new(dtype: DType, shape: &[usize]) -> Result<Self, Refusal> {
        let layout = Layout::contiguous(dtype, shape)?;
        let block = match layout.byte_count() {
            0 => None,
            bytes => Some(Draft::new(bytes)?),
        };
        Ok(Self { block, dtype, shape: shape.to_vec() })
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, to write.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongDType`]; [`Reason::InvalidBits`] where bytes written before are no `T`.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], Refusal> {
        if T::DTYPE != self.dtype {
            return Err(Refusal::new(
                Reason::WrongDType,
                format!("{} asked for, {} held", T::DTYPE, self.dtype),
            ));
        }
        rung::dtype::elements_mut(self.as_bytes_mut())
    }

    /// The little-endian bytes of the elements, to write.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.block.as_mut().map_or(&mut [], Draft::bytes_mut)
    }

    /// A tensor that nobody writes, to be sent to any peers any number of times.
    ///
    /// Receivers that do not trust this process copy it out, since this process could write it
    /// again; [`Self::seal`] spares them that.
    ///
    /// # Errors
    ///
    /// As [`Draft::share`].
    pub fn share(self) -> Result<Tensor, Refusal> {
        let Self { block, dtype, shape } = self;
        let storage = match block {
            Some(draft) => Storage::new(LentMemory(draft.share()?)),
            None => Storage::from_bytes(Vec::new()),
        };
        Tensor::contiguous(Arc::new(storage), dtype, &shape)
    }

    /// A tensor that nobody can ever write again: every receiver may look at it in place.
    ///
    /// # Errors
    ///
    /// As [`Draft::seal`]: not after it was shared once.
    pub fn seal(self) -> Result<Tensor, Refusal> {
        let Self { block, dtype, shape } = self;
        let storage = match block {
            Some(draft) => Storage::new(SealedMemory(draft.seal()?)),
            None => Storage::from_bytes(Vec::new()),
        };
        Tensor::contiguous(Arc::new(storage), dtype, &shape)
    }

    /// The memory of a tensor that was [shared](Self::share), writable again.
    ///
    /// # Errors
    ///
    /// The tensor, unchanged, where anybody still holds its storage (another tensor, or the lease of
    /// a receiver that has not let go, L4) or where it was not made by [`Self::share`].
    pub fn reclaim(tensor: Tensor) -> Result<Self, Tensor> {
        // A view of a part would give back more than it saw.
        if tensor.byte_count() != tensor.storage().len() || !tensor.layout().is_contiguous() {
            return Err(tensor);
        }
        let (memory, layout) = tensor.try_into_memory::<LentMemory>()?;
        Ok(Self {
            block: Some(memory.0.reclaim()),
            dtype: layout.dtype(),
            shape: layout.shape().to_vec(),
        })
    }
}
