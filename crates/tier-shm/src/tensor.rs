//! Tensors in shared memory: born there, or put there once.

use std::sync::Arc;

use rung::{DType, Element, Layout, Reason, Refusal, Storage, Tensor};
use segment::{Draft, Filling, Sealed};

use crate::memory::{Block, LentMemory, SealedMemory};

/// A tensor that is born in shared memory: written in place, then shared without a copy.
///
/// It is in C order from the start of a block of its own. It has one owner until it is shared; after
/// that nobody writes it, until every receiver has let go and it is [reclaimed](Self::reclaim).
/// Dropped, its block goes back to the process's pool.
///
/// It is filled as a slice of its elements, or as bytes by anything that reads or writes:
///
/// ```
/// use std::io::{Read, Write};
/// use rung::DType;
/// use tier_shm::TensorMut;
///
/// let mut tensor = TensorMut::new(DType::U8, &[2, 3])?;
/// tensor.as_mut_slice::<u8>()?[5] = 9;
/// // A file, a socket, a decompressor …
/// let mut file: &[u8] = b"abcdef";
/// file.read_exact(tensor.as_bytes_mut())?;
/// // … or what writes into a slice.
/// tensor.as_bytes_mut().write_all(b"xyz")?;
/// assert_eq!(tensor.share()?.as_slice::<u8>()?, b"xyzdef");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With the feature `ndarray` it also lends itself as an `ArrayViewMutD`.
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

    /// With the elements of another tensor, whatever its strides: one copy.
    ///
    /// # Errors
    ///
    /// Those of [`Draft::build`], or a refusal where the CPU cannot read them.
    pub fn copy_of(tensor: &Tensor) -> Result<Self, Refusal> {
        let block = match tensor.byte_count() {
            0 => None,
            bytes => Some(Draft::build(bytes, |filling| write_elements(tensor, filling))?),
        };
        Ok(Self { block, dtype: tensor.dtype(), shape: tensor.shape().to_vec() })
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

    /// The elements as an array, to write.
    ///
    /// # Errors
    ///
    /// As [`Self::as_mut_slice`].
    #[cfg(feature = "ndarray")]
    pub fn as_array_mut<T: Element>(&mut self) -> Result<ndarray::ArrayViewMutD<'_, T>, Refusal> {
        let shape = ndarray::IxDyn(&self.shape.clone());
        ndarray::ArrayViewMutD::from_shape(shape, self.as_mut_slice()?)
            .map_err(|error| Refusal::new(Reason::ShapeMismatch, error.to_string()))
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
    /// Without a copy on a new block; a block that was shared before, by this tensor or by an earlier
    /// one (the pool hands such blocks out), cannot be closed any more, and a new one is filled.
    ///
    /// # Errors
    ///
    /// As [`Draft::seal`] and [`Sealed::copy_from`].
    pub fn seal(self) -> Result<Tensor, Refusal> {
        let Self { block, dtype, shape } = self;
        let storage = match block {
            Some(draft) => Storage::new(SealedMemory::of(draft)?),
            None => Storage::from_bytes(Vec::new()),
        };
        Tensor::contiguous(Arc::new(storage), dtype, &shape)
    }

    /// The memory of a tensor that was [shared](Self::share), writable again.
    ///
    /// # Errors
    ///
    /// The tensor, unchanged, where anybody still holds its storage (another tensor, or the lease of
    /// a receiver that has not let go, L4), where somebody may go on looking who cannot say when he is
    /// done (a peer whose end is not sure, or whom a peer handed it to without trusting him), or where
    /// it was not made by [`Self::share`].
    pub fn reclaim(tensor: Tensor) -> Result<Self, Tensor> {
        // A view of a part would give back more than it saw.
        if tensor.byte_count() != tensor.storage().len() || !tensor.layout().is_contiguous() {
            return Err(tensor);
        }
        let may = |memory: &LentMemory| !memory.0.is_retired();
        let (memory, layout) = tensor.try_into_memory::<LentMemory>(may)?;
        let (dtype, shape) = (layout.dtype(), layout.shape().to_vec());
        // Asked just now, when nobody else held it.
        let block = memory.0.reclaim().ok();
        Ok(Self { block, dtype, shape })
    }
}

/// Writes the elements in C order, each once.
fn write_elements(tensor: &Tensor, filling: &mut Filling<'_>) -> Result<(), Refusal> {
    if tensor.layout().is_contiguous() && tensor.byte_count() == tensor.storage().len() {
        return tensor.storage().memory().for_each_piece(&mut |piece| filling.write(piece));
    }
    tensor.for_each_piece(&mut |piece| filling.write(piece))
}

/// The same elements in shared memory, to be sent to any peers any number of times: one copy, or none
/// where they are there already.
///
/// # Errors
///
/// As [`TensorMut::copy_of`].
pub fn share(tensor: &Tensor) -> Result<Tensor, Refusal> {
    if Block::of(tensor.storage()).is_some() {
        return Ok(tensor.clone());
    }
    let flags = tensor.flags();
    Ok(TensorMut::copy_of(tensor)?.share()?.with_flags(flags))
}

/// The same elements in memory that nobody can ever write again: one copy into a fresh block.
///
/// # Errors
///
/// As [`TensorMut::copy_of`].
pub fn seal_copy(tensor: &Tensor) -> Result<Tensor, Refusal> {
    let len = tensor.byte_count();
    let storage = match len {
        0 => Storage::from_bytes(Vec::new()),
        _ => {
            let block = Sealed::build(len, |filling| write_elements(tensor, filling))?;
            Storage::new(SealedMemory { block: Arc::new(block), len, once: false })
        }
    };
    let copy = Tensor::contiguous(Arc::new(storage), tensor.dtype(), tensor.shape())?;
    Ok(copy.with_flags(tensor.flags()))
}

/// Gives the resident pages of a tensor in shared memory back to the system, rounded inward to whole
/// pages, and says how many bytes: the elements stay where they are and come back at the next look,
/// at the price of a fault a page (madvise(2), `MADV_DONTNEED`).
///
/// The memory itself is freed when nobody holds the tensor any more, here or at a peer.
///
/// # Errors
///
/// [`Reason::PrivateMemory`]: dropping pages of private memory would lose what is on them.
pub fn release(tensor: &Tensor) -> Result<usize, Refusal> {
    match Block::of(tensor.storage()) {
        Some(block) => block.release(tensor.layout().span()),
        None => Err(Reason::PrivateMemory.into()),
    }
}
