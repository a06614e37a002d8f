//! Shape, signed strides and offset: how a tensor's elements lie in its storage.

use std::ops::Range;

use crate::dtype::DType;
use crate::limits;
use crate::reason::{Reason, Refusal};

/// How the elements of a tensor lie in a storage; all of its arithmetic was checked at construction.
///
/// Invariants that every `Layout` holds:
///
/// - **Y1** `shape.len() == strides.len() <= 64`, and the number of elements times the element's
///   size fits an `isize`.
///   A stride that is never used (of a dimension of one element, or of a tensor without any) is that
///   of C order, whatever was asked for, so arithmetic on strides never overflows.
/// - **Y2** Every element `i` starts at byte `offset + Σ i[d]·stride[d]·size`, and that element lies
///   in `0..storage_len` of the length it was constructed with. No sum on the way overflows.
///
/// Shapes and strides count **elements**; the offset counts **bytes**. Strides may be negative (a
/// flipped view) or zero (a broadcast one).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<isize>,
    offset: usize,
    count: usize,
}

impl Layout {
    /// Elements in C order (last dimension fastest) from byte 0.
    ///
    /// # Errors
    ///
    /// [`Reason::Rank`] past 64 dimensions, [`Reason::OutOfBounds`] if the bytes do not fit an `isize`.
    pub fn contiguous(dtype: DType, shape: &[usize]) -> Result<Self, Refusal> {
        let count = element_count(dtype, shape)?;
        Ok(Self { dtype, strides: c_strides(shape), shape: shape.to_vec(), offset: 0, count })
    }

    /// All bytes of a storage in a row.
    pub(crate) fn bytes(storage_len: usize) -> Self {
        // No allocation is longer than isize::MAX (Y1).
        Self {
            dtype: DType::U8,
            shape: vec![storage_len],
            strides: vec![1],
            offset: 0,
            count: storage_len,
        }
    }

    /// Elements anywhere inside a storage of `storage_len` bytes.
    ///
    /// # Errors
    ///
    /// [`Reason::Rank`] past 64 dimensions, [`Reason::ShapeMismatch`] where shape and strides differ
    /// in length, [`Reason::OutOfBounds`] where an element would lie outside the storage or a sum
    /// overflows.
    pub fn new(
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
        offset: usize,
        storage_len: usize,
    ) -> Result<Self, Refusal> {
        if shape.len() != strides.len() {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("{} dimensions, {} strides", shape.len(), strides.len()),
            ));
        }
        let count = element_count(dtype, shape)?;
        let mut used = c_strides(shape);
        for (index, &extent) in shape.iter().enumerate() {
            if extent > 1 && count > 0 {
                used[index] = strides[index];
            }
        }
        let layout = Self { dtype, shape: shape.to_vec(), strides: used, offset, count };
        layout.check_inside(storage_len)?;
        Ok(layout)
    }

    /// Y2, for a storage of this length.
    fn check_inside(&self, storage_len: usize) -> Result<(), Refusal> {
        let outside = || {
            Refusal::new(
                Reason::OutOfBounds,
                format!(
                    "shape {:?}, strides {:?}, offset {} of {} in {storage_len} bytes",
                    self.shape, self.strides, self.offset, self.dtype
                ),
            )
        };
        if self.count == 0 {
            // No element, nothing to reach; the offset still has to be a place in the storage.
            return if self.offset <= storage_len { Ok(()) } else { Err(outside()) };
        }
        let size = self.dtype.size() as i128;
        let (mut low, mut high) = (self.offset as i128, self.offset as i128);
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            // i128 holds 64 products of two 64-bit numbers and a small size: |Σ| < 2^(63+63+4+6)
            // would not; hence the checks.
            let reach = (extent as i128 - 1)
                .checked_mul(stride as i128)
                .and_then(|steps| steps.checked_mul(size))
                .ok_or_else(outside)?;
            if reach < 0 {
                low = low.checked_add(reach).ok_or_else(outside)?;
            } else {
                high = high.checked_add(reach).ok_or_else(outside)?;
            }
        }
        let end = high.checked_add(size).ok_or_else(outside)?;
        if low < 0 || end > storage_len as i128 {
            return Err(outside());
        }
        Ok(())
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

    /// Distance between neighbours of each dimension, in elements.
    #[must_use]
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// Byte of the storage where element `[0, …, 0]` starts.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Number of elements; 1 for a 0-dimensional tensor, 0 if any dimension is 0.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of all the elements, side by side.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Whether the elements lie side by side in C order.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.count == 0 || self.run_dimensions() == self.shape.len()
    }

    /// The bytes of the storage from the lowest to the end of the highest element; empty where there
    /// is no element.
    #[must_use]
    pub fn span(&self) -> Range<usize> {
        if self.count == 0 {
            return self.offset..self.offset;
        }
        let size = self.dtype.size() as isize;
        // Y2: none of these can leave the storage, so none can overflow.
        let (mut low, mut high) = (self.offset as isize, self.offset as isize);
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = (extent as isize - 1) * stride * size;
            if reach < 0 { low += reach } else { high += reach }
        }
        low as usize..(high + size) as usize
    }

    /// The same elements in a storage that begins `bytes` later.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`] if an element would lie before the new beginning.
    pub fn rebased(&self, bytes: usize) -> Result<Self, Refusal> {
        let before = self.span().start.checked_sub(bytes);
        match (before, self.offset.checked_sub(bytes)) {
            (Some(_), Some(offset)) => Ok(Self { offset, ..self.clone() }),
            _ => Err(Refusal::new(Reason::OutOfBounds, format!("rebased by {bytes}"))),
        }
    }

    /// Another view of the same storage, for the view operations: Y2 holds because the caller only
    /// drops, reorders or reverses dimensions, or narrows them.
    pub(crate) fn view(
        &self,
        shape: Vec<usize>,
        strides: Vec<isize>,
        offset: usize,
    ) -> Result<Self, Refusal> {
        let count = element_count(self.dtype, &shape)?;
        Ok(Self { dtype: self.dtype, shape, strides, offset, count })
    }

    /// Calls `run(byte, len)` for each stretch of neighbouring bytes, in C order of the elements.
    ///
    /// The stretches are as long as the layout allows: one for a contiguous tensor, one a row for a
    /// slice of columns, one an element in the worst case.
    pub fn for_each_run(&self, mut run: impl FnMut(usize, usize)) {
        for (at, len) in self.runs() {
            run(at, len);
        }
    }

    /// As [`Self::for_each_run`], one after the other.
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        if self.count == 0 {
            return Runs { layout: self, index: Vec::new(), len: 0, next: None };
        }
        let outer = self.shape.len() - self.run_dimensions();
        let len = self.shape[outer..].iter().product::<usize>() * self.dtype.size();
        Runs { layout: self, index: vec![0; outer], len, next: Some(self.offset as isize) }
    }

    /// How many trailing dimensions lie side by side in C order.
    fn run_dimensions(&self) -> usize {
        let mut expected = 1isize;
        let mut dimensions = 0;
        for (&extent, &stride) in self.shape.iter().zip(&self.strides).rev() {
            // The stride of a dimension of one element is never used.
            if extent != 1 && stride != expected {
                break;
            }
            expected *= extent as isize;
            dimensions += 1;
        }
        dimensions
    }
}

/// Stretches of neighbouring bytes, as `(byte, len)`; see [`Layout::runs`].
#[derive(Debug)]
pub struct Runs<'a> {
    layout: &'a Layout,
    /// An odometer over the outer dimensions.
    index: Vec<usize>,
    len: usize,
    next: Option<isize>,
}

impl Iterator for Runs<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let run = self.next?;
        let size = self.layout.dtype.size() as isize;
        let mut at = run;
        self.next = None;
        for dimension in (0..self.index.len()).rev() {
            // Y2 keeps `at` inside the storage.
            let step = self.layout.strides[dimension] * size;
            self.index[dimension] += 1;
            if self.index[dimension] < self.layout.shape[dimension] {
                self.next = Some(at + step);
                break;
            }
            at -= step * (self.layout.shape[dimension] as isize - 1);
            self.index[dimension] = 0;
        }
        Some((run as usize, self.len))
    }
}

/// Strides of C order; those of an empty shape are whatever they come to.
fn c_strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![0isize; shape.len()];
    let mut step = 1isize;
    for (stride, &extent) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul(isize::try_from(extent.max(1)).unwrap_or(isize::MAX));
    }
    strides
}

/// Y1.
fn element_count(dtype: DType, shape: &[usize]) -> Result<usize, Refusal> {
    if shape.len() > limits::RANK {
        return Err(Refusal::new(
            Reason::Rank,
            format!("{}, at most {}", shape.len(), limits::RANK),
        ));
    }
    if shape.contains(&0) {
        return Ok(0);
    }
    shape
        .iter()
        .try_fold(1usize, |count, &extent| count.checked_mul(extent))
        .filter(|count| {
            count.checked_mul(dtype.size()).is_some_and(|bytes| isize::try_from(bytes).is_ok())
        })
        .ok_or_else(|| Refusal::new(Reason::OutOfBounds, format!("shape {shape:?} of {dtype}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn runs(layout: &Layout) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        layout.for_each_run(|at, len| all.push((at, len)));
        all
    }

    #[test]
    fn a_contiguous_tensor_is_one_run() {
        let layout = Layout::contiguous(DType::F32, &[2, 3, 4]).unwrap();
        assert_eq!(layout.strides(), [12, 4, 1]);
        assert_eq!(runs(&layout), [(0, 96)]);
        assert!(layout.is_contiguous());
    }

    #[test]
    fn a_slice_of_columns_is_one_run_a_row() {
        let layout = Layout::new(DType::U8, &[2, 2], &[4, 1], 1, 8).unwrap();
        assert_eq!(runs(&layout), [(1, 2), (5, 2)]);
        assert_eq!(layout.span(), 1..7);
    }

    #[test]
    fn negative_and_zero_strides_stay_inside() {
        let flipped = Layout::new(DType::I16, &[3], &[-1], 4, 6).unwrap();
        assert_eq!(runs(&flipped), [(4, 2), (2, 2), (0, 2)]);
        assert_eq!(flipped.span(), 0..6);
        let broadcast = Layout::new(DType::I16, &[2, 2], &[0, 1], 0, 4).unwrap();
        assert_eq!(runs(&broadcast), [(0, 4), (0, 4)]);
    }

    #[test]
    fn what_reaches_outside_is_refused() {
        for (shape, strides, offset, len) in [
            (&[3usize][..], &[1isize][..], 0usize, 11usize),
            (&[3], &[-1], 4, 12),
            (&[2, 2], &[isize::MAX, isize::MAX], 0, 64),
            (&[2], &[isize::MIN], 0, 64),
            (&[1], &[1], usize::MAX, 64),
            (&[0], &[1], 65, 64),
        ] {
            let refusal = Layout::new(DType::F32, shape, strides, offset, len).unwrap_err();
            assert_eq!(refusal.reason(), Reason::OutOfBounds, "{shape:?}");
        }
        let many = vec![usize::MAX; 3];
        assert_eq!(
            Layout::contiguous(DType::F32, &many).unwrap_err().reason(),
            Reason::OutOfBounds
        );
        assert_eq!(Layout::contiguous(DType::F32, &[1; 65]).unwrap_err().reason(), Reason::Rank);
    }

    #[test]
    fn a_huge_empty_shape_has_no_elements() {
        let layout = Layout::contiguous(DType::F64, &[usize::MAX, 0, usize::MAX]).unwrap();
        assert_eq!((layout.count(), layout.byte_count()), (0, 0));
        assert_eq!(runs(&layout), []);
    }

    #[test]
    fn a_scalar_is_one_element() {
        let layout = Layout::contiguous(DType::F64, &[]).unwrap();
        assert_eq!(runs(&layout), [(0, 8)]);
    }

    proptest! {
        /// Runs visit each element, in C order, and never leave the span.
        #[test]
        fn runs_are_the_elements_in_order(
            shape in prop::collection::vec(0usize..5, 0..5),
            seed in prop::collection::vec(-7isize..8, 5),
            offset in 0usize..400,
        ) {
            let strides = &seed[..shape.len()];
            if let Ok(layout) = Layout::new(DType::U16, &shape, strides, offset, 512) {
                let mut naive = Vec::new();
                for flat in 0..layout.count() {
                    let (mut rest, mut at) = (flat, offset as isize);
                    for dimension in (0..shape.len()).rev() {
                        at += (rest % shape[dimension]) as isize * strides[dimension] * 2;
                        rest /= shape[dimension];
                    }
                    naive.extend([at as usize, at as usize + 1]);
                }
                let mut seen = Vec::new();
                layout.for_each_run(|at, len| seen.extend(at..at + len));
                prop_assert_eq!(&seen, &naive);
                let span = layout.span();
                prop_assert!(seen.iter().all(|at| span.contains(at)));
                prop_assert!(span.end <= 512);
            }
        }
    }
}
