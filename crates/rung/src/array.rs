//! Arrays with NumPy's element types.

use std::sync::Arc;

use crate::descr::Descr;
use crate::dtype::DType;
use crate::layout::Layout;
use crate::limits;
use crate::reason::{Reason, Refusal};
use crate::storage::Storage;
use crate::tensor::{Flags, Tensor};

/// A view of a [`Storage`] whose elements are of a NumPy type: byte order, times, strings and records
/// included. Strides count **bytes**, since a record's fields need not lie a whole number of
/// themselves apart.
///
/// It is held as a tensor of bytes, the *cells*, with one more dimension: the bytes of an element.
/// Cloning one, or taking a field of it, copies no elements.
///
/// ```
/// use rung::{Array, DType, Tensor};
///
/// // Two packed records of an id and a weight.
/// let descr = serde_json::from_str(r#"[["id","|u1"],["weight","<f4"]]"#)?;
/// let mut bytes = vec![1];
/// bytes.extend(0.5f32.to_le_bytes());
/// bytes.push(2);
/// bytes.extend(2.5f32.to_le_bytes());
/// let records = Array::from_bytes(bytes, descr, &[2])?;
///
/// let id = records.field("id")?;
/// assert_eq!(id.strides(), [5]);
/// assert_eq!(id.to_tensor()?.to_vec::<u8>()?, [1, 2]);
/// // Every fifth byte is no whole number of floats: the elements have to be copied out.
/// assert_eq!(records.field("weight")?.to_bytes()?.len(), 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    descr: Descr,
    cells: Tensor,
}

impl Array {
    /// A view of `storage`; strides count bytes.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::new`]; one dimension less than a tensor's most is allowed.
    pub fn new(
        storage: Arc<Storage>,
        descr: Descr,
        shape: &[usize],
        strides: &[isize],
        offset: usize,
    ) -> Result<Self, Refusal> {
        if shape.len() != strides.len() {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("{} dimensions, {} strides", shape.len(), strides.len()),
            ));
        }
        let (mut extents, mut steps) = (shape.to_vec(), strides.to_vec());
        extents.push(descr.size());
        steps.push(1);
        let cells = Tensor::new(storage, DType::U8, &extents, &steps, offset)?;
        Ok(Self { descr, cells })
    }

    /// All of `storage`, in C order.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where the storage is not exactly as long as the shape needs.
    pub fn contiguous(
        storage: Arc<Storage>,
        descr: Descr,
        shape: &[usize],
    ) -> Result<Self, Refusal> {
        let mut extents = shape.to_vec();
        extents.push(descr.size());
        Self::from_cells(descr, Tensor::contiguous(storage, DType::U8, &extents)?)
    }

    /// The bytes of the elements in C order, without a copy.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where the shape takes another number of bytes.
    pub fn from_bytes(
        bytes: impl Into<bytes::Bytes>,
        descr: Descr,
        shape: &[usize],
    ) -> Result<Self, Refusal> {
        Self::contiguous(Arc::new(Storage::from_bytes(bytes)), descr, shape)
    }

    /// From a tensor of bytes whose last dimension is an element's.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongDType`] for a tensor of anything else; [`Reason::ShapeMismatch`] where the last
    /// dimension has another extent or its bytes do not lie side by side.
    pub fn from_cells(descr: Descr, cells: Tensor) -> Result<Self, Refusal> {
        if cells.dtype() != DType::U8 {
            return Err(Refusal::new(Reason::WrongDType, format!("cells of {}", cells.dtype())));
        }
        let last = cells.shape().last().copied();
        let step = cells.strides().last().copied();
        if last != Some(descr.size()) || (step != Some(1) && descr.size() > 1) {
            let detail = format!("cells of {last:?} bytes for elements of {}", descr.size());
            return Err(Refusal::new(Reason::ShapeMismatch, detail));
        }
        Ok(Self { descr, cells })
    }

    /// The tensor's elements, without a copy.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownDType`] for a dtype that NumPy does not have.
    pub fn from_tensor(tensor: &Tensor) -> Result<Self, Refusal> {
        let descr = Descr::try_from(tensor.dtype())?;
        let size = descr.size() as isize;
        let strides: Vec<isize> = tensor
            .strides()
            .iter()
            .map(|stride| stride.checked_mul(size))
            .collect::<Option<_>>()
            // Only a stride that is never used can be so large.
            .unwrap_or_else(|| vec![0; tensor.shape().len()]);
        let storage = Arc::clone(tensor.storage());
        let array = Self::new(storage, descr, tensor.shape(), &strides, tensor.offset())?;
        Ok(array.with_flags(tensor.flags()))
    }

    /// The same elements as a tensor, without a copy.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongDType`] for types that no tensor has (records, times, strings, other byte
    /// orders); [`Reason::Misaligned`] where the elements lie no whole number of themselves apart.
    pub fn to_tensor(&self) -> Result<Tensor, Refusal> {
        let dtype = self.descr.dtype().ok_or_else(|| {
            Refusal::new(Reason::WrongDType, format!("no tensor of {}", self.descr))
        })?;
        let size = dtype.size() as isize;
        let extents = self.shape();
        let mut strides = self.strides().to_vec();
        for (stride, &extent) in strides.iter_mut().zip(extents) {
            if extent > 1 && *stride % size != 0 && self.count() > 0 {
                let detail = format!("{dtype} every {stride} bytes");
                return Err(Refusal::new(Reason::Misaligned, detail));
            }
            *stride /= size;
        }
        let storage = Arc::clone(self.cells.storage());
        let tensor = Tensor::new(storage, dtype, extents, &strides, self.cells.offset())?;
        Ok(tensor.with_flags(self.cells.flags()))
    }

    /// One field of every record, without a copy; a sub-array's dimensions come last.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongDType`] where the elements are no records with such a field, [`Reason::Rank`]
    /// where a sub-array adds too many dimensions.
    pub fn field(&self, name: &str) -> Result<Self, Refusal> {
        let (at, field) = self.descr.field(name).ok_or_else(|| {
            Refusal::new(Reason::WrongDType, format!("no field {name:?} in {}", self.descr))
        })?;
        let (mut shape, mut strides) = (self.shape().to_vec(), self.strides().to_vec());
        let mut steps = Vec::with_capacity(field.shape.len());
        let mut step = field.descr.size();
        for &extent in field.shape.iter().rev() {
            steps.push(step as isize);
            // Too large only where there are no elements, and no stride is used.
            step = step.saturating_mul(extent.max(1));
        }
        shape.extend(&field.shape);
        strides.extend(steps.iter().rev());
        let empty = shape.contains(&0) || field.descr.size() == 0;
        let offset = self.cells.offset() + if empty { 0 } else { at };
        let storage = Arc::clone(self.cells.storage());
        let view = Self::new(storage, field.descr.clone(), &shape, &strides, offset)?;
        Ok(view.with_flags(self.flags()))
    }

    /// The type of the elements.
    #[must_use]
    pub fn descr(&self) -> &Descr {
        &self.descr
    }

    /// The bytes of the elements, with an element's bytes for a last dimension.
    #[must_use]
    pub fn cells(&self) -> &Tensor {
        &self.cells
    }

    /// Elements in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        let shape = self.cells.shape();
        &shape[..shape.len().saturating_sub(1)]
    }

    /// Distance between neighbours of each dimension, in **bytes**.
    #[must_use]
    pub fn strides(&self) -> &[isize] {
        let strides = self.cells.strides();
        &strides[..strides.len().saturating_sub(1)]
    }

    /// Number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        let shape = self.shape();
        // Elements of no bytes may be more than there is a number for.
        shape.iter().fold(1, |count: usize, &extent| count.saturating_mul(extent))
    }

    /// Bytes of all the elements, side by side.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        self.cells.byte_count()
    }

    /// What else is known of it.
    #[must_use]
    pub fn flags(&self) -> Flags {
        self.cells.flags()
    }

    /// The same view with other flags.
    #[must_use]
    pub fn with_flags(mut self, flags: Flags) -> Self {
        self.cells = self.cells.with_flags(flags);
        self
    }

    /// The bytes of the elements in C order, copied.
    ///
    /// # Errors
    ///
    /// A refusal where the CPU cannot read the memory.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Refusal> {
        self.cells.to_bytes()
    }

    /// The same elements with the dimensions in another order.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where `order` is no permutation of the dimensions.
    pub fn permute(&self, order: &[usize]) -> Result<Self, Refusal> {
        let mut all = order.to_vec();
        if all.len() >= limits::RANK || all.len() != self.shape().len() {
            return Err(Refusal::new(Reason::ShapeMismatch, format!("order {order:?}")));
        }
        all.push(order.len());
        Ok(Self { descr: self.descr.clone(), cells: self.cells.permute(&all)? })
    }

    /// How the elements lie: the layout of the [cells](Self::cells).
    #[must_use]
    pub fn layout(&self) -> &Layout {
        self.cells.layout()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descr(text: &str) -> Descr {
        text.parse().unwrap()
    }

    #[test]
    fn an_array_of_a_plain_type_is_a_tensor_and_back() {
        let tensor = Tensor::from_vec((0..12i32).collect::<Vec<_>>(), &[3, 4]).unwrap();
        let view = tensor.permute(&[1, 0]).unwrap().flip(0).unwrap();
        let array = Array::from_tensor(&view).unwrap();
        assert_eq!(array.strides(), [-4, 16]);
        assert_eq!(array.to_tensor().unwrap(), view);
        assert!(Arc::ptr_eq(array.to_tensor().unwrap().storage(), tensor.storage()));
        let empty = Tensor::from_vec(Vec::<f64>::new(), &[0, 3]).unwrap();
        assert_eq!(Array::from_tensor(&empty).unwrap().to_tensor().unwrap(), empty);
        let scalar = Tensor::from_vec(vec![2.5f64], &[]).unwrap();
        assert_eq!(Array::from_tensor(&scalar).unwrap().to_tensor().unwrap(), scalar);
    }

    #[test]
    fn what_no_tensor_can_be_says_why() {
        let swapped = Array::from_bytes(vec![0; 8], descr(">f4"), &[2]).unwrap();
        assert_eq!(swapped.to_tensor().unwrap_err().reason(), Reason::WrongDType);
        let record: Descr = serde_json::from_str(r#"[["a","|u1"],["b","<f4"]]"#).unwrap();
        let records = Array::from_bytes(vec![0; 10], record, &[2]).unwrap();
        let apart = records.field("b").unwrap().to_tensor().unwrap_err();
        assert_eq!(apart.reason(), Reason::Misaligned);
        assert_eq!(records.field("c").unwrap_err().reason(), Reason::WrongDType);
        let f8 = Tensor::from_bytes(vec![0; 4], DType::F8E4M3, &[4]).unwrap();
        assert_eq!(Array::from_tensor(&f8).unwrap_err().reason(), Reason::UnknownDType);
        let short = Array::from_bytes(vec![0; 7], descr("<U1"), &[2]);
        assert_eq!(short.unwrap_err().reason(), Reason::ShapeMismatch);
    }

    #[test]
    fn a_field_that_is_an_array_adds_its_dimensions() {
        let record: Descr = serde_json::from_str(r#"[["a","|i1"],["c",">i2",[2,3]]]"#).unwrap();
        let bytes: Vec<u8> = (0..26).collect();
        let field = Array::from_bytes(bytes, record, &[2]).unwrap().field("c").unwrap();
        assert_eq!((field.shape(), field.strides()), (&[2, 2, 3][..], &[13, 6, 2][..]));
        let expected: Vec<u8> = (1..13).chain(14..26).collect();
        assert_eq!(field.to_bytes().unwrap(), expected);
    }

    #[test]
    fn elements_of_no_bytes_are_still_counted() {
        let none = Array::from_bytes(Vec::new(), descr("|S0"), &[3]).unwrap();
        assert_eq!((none.count(), none.byte_count(), none.shape()), (3, 0, &[3][..]));
    }

    proptest! {
        /// Any view of any bytes lies inside its storage or is refused, and reads the bytes it should.
        #[test]
        fn views_never_leave_the_storage(
            size in 0usize..7,
            shape in prop::collection::vec(0usize..4, 0..4),
            strides in prop::collection::vec(-9isize..10, 4),
            offset in 0usize..70,
        ) {
            let bytes: Vec<u8> = (0..64).collect();
            let strides = &strides[..shape.len()];
            let storage = Arc::new(Storage::from_bytes(bytes.clone()));
            let made = Array::new(storage, descr(&format!("|V{size}")), &shape, strides, offset);
            if let Ok(array) = made {
                let mut expected = Vec::<u8>::new();
                let count: usize = shape.iter().product();
                for flat in (0..count).filter(|_| size > 0) {
                    let (mut rest, mut at) = (flat, offset as isize);
                    for dimension in (0..shape.len()).rev() {
                        at += (rest % shape[dimension]) as isize * strides[dimension];
                        rest /= shape[dimension];
                    }
                    expected.extend(&bytes[at as usize..at as usize + size]);
                }
                prop_assert_eq!(array.to_bytes().unwrap(), expected);
            }
        }
    }
}
