//! A view of a storage.

use std::sync::Arc;

use bytemuck::Zeroable;

use crate::device::Device;
use crate::dtype::{DType, Element};
use crate::layout::Layout;
use crate::reason::{Reason, Refusal};
use crate::storage::{Memory, Storage};

/// What else is known of a tensor; carried along, not acted upon.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Flags {
    /// The receiver is asked not to write it.
    pub read_only: bool,
    /// The producer tracks gradients of it.
    pub requires_grad: bool,
}

/// A view of a [`Storage`]: dtype, shape, signed strides in elements and a byte offset.
///
/// Cloning a tensor or taking a view of one copies no elements: both share the storage, and so they
/// still do after they crossed to another process in one message.
#[derive(Debug, Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    // Shared by clones, and small where a value holds it.
    layout: Arc<Layout>,
    flags: Flags,
}

impl Tensor {
    /// A view of `storage`.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`].
    pub fn new(
        storage: Arc<Storage>,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
        offset: usize,
    ) -> Result<Self, Refusal> {
        let layout = Layout::new(dtype, shape, strides, offset, storage.len())?;
        Ok(Self { storage, layout: Arc::new(layout), flags: Flags::default() })
    }

    /// All of `storage`, in C order.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where the storage is not exactly as long as the shape needs, and
    /// those of [`Layout::contiguous`].
    pub fn contiguous(
        storage: Arc<Storage>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self, Refusal> {
        let layout = Layout::contiguous(dtype, shape)?;
        if layout.byte_count() != storage.len() {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!(
                    "shape {shape:?} of {dtype} takes {} bytes, there are {}",
                    layout.byte_count(),
                    storage.len()
                ),
            ));
        }
        Ok(Self { storage, layout: Arc::new(layout), flags: Flags::default() })
    }

    /// The elements of a vector in C order, without a copy.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where the shape has another number of elements.
    pub fn from_vec<T: Element>(elements: Vec<T>, shape: &[usize]) -> Result<Self, Refusal> {
        Self::contiguous(Arc::new(Storage::from_vec(elements)), T::DTYPE, shape)
    }

    /// The little-endian bytes of the elements in C order, without a copy.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where the shape takes another number of bytes.
    pub fn from_bytes(
        bytes: impl Into<bytes::Bytes>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self, Refusal> {
        Self::contiguous(Arc::new(Storage::from_bytes(bytes)), dtype, shape)
    }

    /// All bytes of a storage, as `u8` in one dimension.
    #[must_use]
    pub fn all_bytes(storage: Arc<Storage>) -> Self {
        let layout = Layout::bytes(storage.len());
        Self { storage, layout: Arc::new(layout), flags: Flags::default() }
    }

    /// The storage.
    #[must_use]
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// The storage, if the tensor was no longer needed.
    #[must_use]
    pub fn into_storage(self) -> Arc<Storage> {
        self.storage
    }

    /// How the elements lie in the storage.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.layout.dtype()
    }

    /// Elements in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Distance between neighbours of each dimension, in elements.
    #[must_use]
    pub fn strides(&self) -> &[isize] {
        self.layout.strides()
    }

    /// Byte of the storage where the first element starts.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.layout.offset()
    }

    /// Number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.layout.count()
    }

    /// Bytes of all the elements, side by side.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        self.layout.byte_count()
    }

    /// Where the memory is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// The device whose memory it was, where it was copied to the host for want of a better way.
    #[must_use]
    pub fn origin(&self) -> Option<Device> {
        self.storage.origin()
    }

    /// What else is known of it.
    #[must_use]
    pub fn flags(&self) -> Flags {
        self.flags
    }

    /// The same view with other flags.
    #[must_use]
    pub fn with_flags(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// The part of dimension `dimension` from `start` up to `end`.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`] where there is no such dimension or range.
    pub fn slice(&self, dimension: usize, start: usize, end: usize) -> Result<Self, Refusal> {
        let (extent, stride) = self.dimension(dimension)?;
        if start > end || end > extent {
            return Err(Refusal::new(
                Reason::OutOfBounds,
                format!("{start}..{end} of {extent} in dimension {dimension}"),
            ));
        }
        let mut shape = self.shape().to_vec();
        shape[dimension] = end - start;
        let empty = start == end || self.count() == 0;
        let offset = if empty { self.offset() } else { self.step(start, stride) };
        self.viewed(shape, self.strides().to_vec(), offset)
    }

    /// The elements at `index` of dimension `dimension`, which disappears.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`] where there is no such dimension or index.
    pub fn select(&self, dimension: usize, index: usize) -> Result<Self, Refusal> {
        let (extent, stride) = self.dimension(dimension)?;
        if index >= extent {
            return Err(Refusal::new(
                Reason::OutOfBounds,
                format!("{index} of {extent} in dimension {dimension}"),
            ));
        }
        let (mut shape, mut strides) = (self.shape().to_vec(), self.strides().to_vec());
        shape.remove(dimension);
        strides.remove(dimension);
        let offset = if self.count() == 0 { self.offset() } else { self.step(index, stride) };
        self.viewed(shape, strides, offset)
    }

    /// Dimension `dimension` in reverse order: a negative stride, no copy.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`] where there is no such dimension.
    pub fn flip(&self, dimension: usize) -> Result<Self, Refusal> {
        let (extent, stride) = self.dimension(dimension)?;
        let mut strides = self.strides().to_vec();
        strides[dimension] = stride.checked_neg().ok_or(Reason::OutOfBounds)?;
        let offset = if self.count() == 0 { self.offset() } else { self.step(extent - 1, stride) };
        self.viewed(self.shape().to_vec(), strides, offset)
    }

    /// The dimensions in another order; `order[i]` is the old number of the new dimension `i`.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where `order` is no permutation of the dimensions.
    pub fn permute(&self, order: &[usize]) -> Result<Self, Refusal> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..self.shape().len()) {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("order {order:?} of {} dimensions", self.shape().len()),
            ));
        }
        let shape = order.iter().map(|&dimension| self.shape()[dimension]).collect();
        let strides = order.iter().map(|&dimension| self.strides()[dimension]).collect();
        self.viewed(shape, strides, self.offset())
    }

    fn dimension(&self, dimension: usize) -> Result<(usize, isize), Refusal> {
        match (self.shape().get(dimension), self.strides().get(dimension)) {
            (Some(&extent), Some(&stride)) => Ok((extent, stride)),
            _ => Err(Refusal::new(
                Reason::OutOfBounds,
                format!("dimension {dimension} of {}", self.shape().len()),
            )),
        }
    }

    /// The offset of element `index` along a stride; Y2 of the layout keeps it inside.
    fn step(&self, index: usize, stride: isize) -> usize {
        let bytes = index as isize * stride * self.dtype().size() as isize;
        self.offset().wrapping_add_signed(bytes)
    }

    fn viewed(
        &self,
        shape: Vec<usize>,
        strides: Vec<isize>,
        offset: usize,
    ) -> Result<Self, Refusal> {
        let layout = Arc::new(self.layout.view(shape, strides, offset)?);
        Ok(Self { storage: Arc::clone(&self.storage), layout, flags: self.flags })
    }

    /// The elements as a slice, without a copy.
    ///
    /// # Errors
    ///
    /// A refusal that [`Self::to_vec`] gets around by copying ([`Reason::NotContiguous`],
    /// [`Reason::Misaligned`], [`Reason::PeerNotTrusted`]), or not: [`Reason::WrongDType`],
    /// [`Reason::InvalidBits`], [`Reason::DeviceMemory`].
    pub fn as_slice<T: Element>(&self) -> Result<&[T], Refusal> {
        self.expect_dtype(T::DTYPE)?;
        if !self.layout.is_contiguous() {
            return Err(Reason::NotContiguous.into());
        }
        self.span_as_slice()
    }

    /// All that lies between the lowest and the highest element, both included, as a slice, without a
    /// copy: for those who walk it with [`Self::strides`].
    ///
    /// # Errors
    ///
    /// As [`Self::as_slice`], but for the order.
    pub fn span_as_slice<T: Element>(&self) -> Result<&[T], Refusal> {
        self.expect_dtype(T::DTYPE)?;
        if self.count() == 0 {
            return Ok(&[]);
        }
        // Every element lies a whole number of elements from the lowest: so the span is a whole number.
        let bytes =
            self.storage.host_bytes()?.get(self.layout.span()).ok_or(Reason::OutOfBounds)?;
        bytemuck::checked::try_cast_slice(bytes)
            .map_err(|error| crate::dtype::cast_reason(error).into())
    }

    /// The elements in C order, copied.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongDType`], [`Reason::InvalidBits`], or a refusal where the CPU cannot read the
    /// memory.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, Refusal> {
        self.expect_dtype(T::DTYPE)?;
        let mut bits = zeroed::<T::Bits>(self.count())?;
        self.copy_to(bytemuck::cast_slice_mut(&mut bits))?;
        bits.into_iter()
            .map(|bits| bytemuck::checked::try_cast(bits))
            .collect::<Result<_, _>>()
            .map_err(|_| Reason::InvalidBits.into())
    }

    /// The little-endian bytes of the elements in C order, copied: the logical contents, whatever
    /// the strides.
    ///
    /// # Errors
    ///
    /// A refusal where the CPU cannot read the memory.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Refusal> {
        let mut bytes = zeroed::<u8>(self.byte_count())?;
        self.copy_to(&mut bytes)?;
        Ok(bytes)
    }

    /// As [`Self::to_bytes`], into memory of exactly [`Self::byte_count`] bytes.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where `into` has another length, or a refusal where the CPU cannot
    /// read the memory.
    pub fn copy_to(&self, into: &mut [u8]) -> Result<(), Refusal> {
        if into.len() != self.byte_count() {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("{} bytes into {}", self.byte_count(), into.len()),
            ));
        }
        if self.count() == 0 {
            return Ok(());
        }
        let span = self.layout.span();
        let base = span.start;
        let bytes = self.storage.read(span)?;
        let mut rest = into;
        let mut whole = true;
        self.layout.for_each_run(|at, len| {
            let from = bytes.get(at - base..at - base + len);
            let (run, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            match from {
                Some(from) => run.copy_from_slice(from),
                None => whole = false,
            }
        });
        if whole { Ok(()) } else { Err(Reason::OutOfBounds.into()) }
    }

    /// Hands out the bytes of the elements in C order, each once, in runs as long as they lie side by side.
    ///
    /// # Errors
    ///
    /// What `piece` answers, or a refusal where the CPU cannot read the memory.
    pub fn for_each_piece(
        &self,
        piece: &mut dyn FnMut(&[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let span = self.layout.span();
        let base = span.start;
        let bytes = self.storage.read(span)?;
        let mut outcome = Ok(());
        self.layout.for_each_run(|at, len| {
            if outcome.is_ok() {
                outcome = match bytes.get(at - base..at - base + len) {
                    Some(run) => piece(run),
                    None => Err(Reason::OutOfBounds.into()),
                };
            }
        });
        outcome
    }

    /// The memory and the layout, if nobody else holds the storage, its memory is an `M`, and the caller
    /// may have it: asked last, when nobody else can change the answer.
    ///
    /// # Errors
    ///
    /// The tensor, unchanged.
    pub fn try_into_memory<M: Memory>(
        self,
        may: impl FnOnce(&M) -> bool,
    ) -> Result<(M, Layout), Self> {
        let Self { storage, layout, flags } = self;
        let taken = Arc::try_unwrap(storage).and_then(|storage| {
            if storage.memory_as::<M>().is_some_and(may) {
                storage.into_memory::<M>().map_err(Arc::new)
            } else {
                Err(Arc::new(storage))
            }
        });
        match taken {
            Ok(memory) => Ok((memory, Arc::unwrap_or_clone(layout))),
            Err(storage) => Err(Self { storage, layout, flags }),
        }
    }

    /// Compares elements of one shape and type, run by run: nothing is put side by side for it.
    fn same_elements(&self, other: &Self) -> Result<bool, Refusal> {
        let (my_span, their_span) = (self.layout.span(), other.layout.span());
        let (mine, theirs) =
            (self.storage.read(my_span.clone())?, other.storage.read(their_span.clone())?);
        let (mut my_runs, mut their_runs) = (self.layout.runs(), other.layout.runs());
        let (mut a, mut b): (&[u8], &[u8]) = (&[], &[]);
        loop {
            if a.is_empty() {
                let Some((at, len)) = my_runs.next() else { return Ok(true) };
                let at = at - my_span.start;
                a = mine.get(at..at + len).ok_or(Reason::OutOfBounds)?;
            }
            if b.is_empty() {
                let Some((at, len)) = their_runs.next() else { return Ok(true) };
                let at = at - their_span.start;
                b = theirs.get(at..at + len).ok_or(Reason::OutOfBounds)?;
            }
            let some = a.len().min(b.len());
            if a[..some] != b[..some] {
                return Ok(false);
            }
            (a, b) = (&a[some..], &b[some..]);
        }
    }

    fn expect_dtype(&self, asked: DType) -> Result<(), Refusal> {
        if self.dtype() == asked {
            return Ok(());
        }
        Err(Refusal::new(Reason::WrongDType, format!("{} asked for, {} held", asked, self.dtype())))
    }
}

/// Memory for a copy. What a tensor's elements come to is for whoever made its strides to say: a
/// broadcast view of two bytes may be terabytes, which is a refusal and not an abort.
pub(crate) fn zeroed<T: Zeroable + Clone>(count: usize) -> Result<Vec<T>, Refusal> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(count).map_err(|_| {
        let bytes = count.saturating_mul(size_of::<T>());
        Refusal::new(Reason::NoMemory, format!("{bytes} bytes for a copy"))
    })?;
    elements.resize(count, T::zeroed());
    Ok(elements)
}

/// Equal where dtype, shape, flags and the bits of every element are, whatever the strides; memory
/// that the CPU cannot read is equal to nothing but itself.
impl PartialEq for Tensor {
    fn eq(&self, other: &Self) -> bool {
        if self.dtype() != other.dtype()
            || self.shape() != other.shape()
            || self.flags != other.flags
        {
            return false;
        }
        if Arc::ptr_eq(&self.storage, &other.storage) && self.layout == other.layout {
            return true;
        }
        self.count() == 0 || self.same_elements(other).unwrap_or(false)
    }
}

impl Eq for Tensor {}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers() -> Tensor {
        Tensor::from_vec((0..12u16).collect(), &[3, 4]).unwrap()
    }

    #[test]
    fn views_share_the_storage_and_read_right() {
        let t = numbers();
        assert_eq!(t.slice(1, 1, 3).unwrap().to_vec::<u16>().unwrap(), [1, 2, 5, 6, 9, 10]);
        assert_eq!(t.select(0, 2).unwrap().as_slice::<u16>().unwrap(), [8, 9, 10, 11]);
        let flipped = t.flip(0).unwrap();
        assert_eq!(flipped.strides(), [-4, 1]);
        assert_eq!(flipped.to_vec::<u16>().unwrap()[..4], [8, 9, 10, 11]);
        assert_eq!(flipped.flip(0).unwrap(), t);
        let turned = t.permute(&[1, 0]).unwrap();
        assert_eq!(turned.to_vec::<u16>().unwrap()[..3], [0, 4, 8]);
        assert!(Arc::ptr_eq(turned.storage(), t.storage()));
    }

    #[test]
    fn what_cannot_be_lent_says_why() {
        let t = numbers();
        let reason = |r: Result<&[u16], Refusal>| r.unwrap_err().reason();
        assert_eq!(reason(t.slice(1, 0, 2).unwrap().as_slice()), Reason::NotContiguous);
        assert_eq!(t.as_slice::<i16>().unwrap_err().reason(), Reason::WrongDType);
        let odd =
            Tensor::new(Arc::new(Storage::from_vec(vec![0u64; 2])), DType::U16, &[2], &[1], 1)
                .unwrap();
        assert_eq!(reason(odd.as_slice()), Reason::Misaligned);
        assert_eq!(odd.to_vec::<u16>().unwrap(), [0, 0]);
        let two = Tensor::from_bytes(vec![2u8], DType::Bool, &[1]).unwrap();
        assert_eq!(two.as_slice::<bool>().unwrap_err().reason(), Reason::InvalidBits);
        assert_eq!(two.to_vec::<bool>().unwrap_err().reason(), Reason::InvalidBits);
    }

    #[test]
    fn empty_and_scalar_tensors_are_tensors() {
        let empty = Tensor::from_vec(Vec::<f32>::new(), &[0, 7]).unwrap();
        assert_eq!(empty.as_slice::<f32>().unwrap(), [] as [f32; 0]);
        assert!(empty.slice(1, 7, 7).unwrap().to_bytes().unwrap().is_empty());
        assert_eq!(empty.flip(0).unwrap().count(), 0);
        let scalar = Tensor::from_vec(vec![2.5f64], &[]).unwrap();
        assert_eq!(scalar.as_slice::<f64>().unwrap(), [2.5]);
    }

    #[test]
    fn a_broadcast_view_of_two_bytes_is_no_way_to_take_all_memory() {
        let storage = Arc::new(Storage::from_vec(vec![1u8, 2]));
        let view = Tensor::new(storage, DType::U8, &[1 << 62], &[0], 0).unwrap();
        assert_eq!(view.to_bytes().unwrap_err().reason(), Reason::NoMemory);
        assert_eq!(view.to_vec::<u8>().unwrap_err().reason(), Reason::NoMemory);
    }

    #[test]
    fn strides_that_are_never_used_may_be_anything() {
        let storage = Arc::new(Storage::from_vec(vec![1.0f32; 8]));
        let odd = [isize::MAX, 2, isize::MIN];
        let view = Tensor::new(Arc::clone(&storage), DType::F32, &[1, 3, 1], &odd, 0).unwrap();
        assert_eq!(view.to_vec::<f32>().unwrap(), [1.0; 3]);
        assert_eq!(view.flip(0).unwrap().flip(2).unwrap(), view);
        let empty = Tensor::new(storage, DType::F32, &[0, 5], &[1, isize::MAX], 0).unwrap();
        assert_eq!(empty.slice(1, 2, 4).unwrap().count(), 0);
        assert_eq!(empty.select(1, 4).unwrap().flip(0).unwrap().count(), 0);
    }

    #[test]
    fn bits_decide_equality() {
        let nan = |bits| Tensor::from_vec(vec![f32::from_bits(bits)], &[1]).unwrap();
        assert_eq!(nan(0x7fc0_0001), nan(0x7fc0_0001));
        assert_ne!(nan(0x7fc0_0001), nan(0x7fc0_0002));
        assert_ne!(nan(0), nan(0x8000_0000));
    }
}
