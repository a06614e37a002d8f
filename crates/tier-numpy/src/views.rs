//! `ndarray` and tensors.
//!
//! | from | to | copies |
//! |---|---|---|
//! | tensor | [`view`]: `ndarray::ArrayView`, any strides | none |
//! | tensor | [`to_ndarray`]: `ndarray::Array` | one |
//! | `ndarray::Array` | [`from_ndarray`]: tensor with the array's strides | none |
//! | any `ndarray` array or view | [`copy_ndarray`]: tensor in C order | one |
//!
//! A borrowed view cannot become a tensor without a copy: a tensor owns its memory, or shares it with
//! whoever does, so that it can be sent and outlive the call.

use std::sync::Arc;

use ndarray::{ArrayBase, ArrayView, ArrayViewD, Axis, Data, Dimension, IxDyn, ShapeBuilder};
use rung::{Element, Reason, Refusal, Storage, Tensor};

/// The elements of a tensor as an `ndarray` view, without a copy: negative strides, broadcast and Fortran
/// order included.
///
/// `D` is a fixed number of dimensions (`ndarray::Ix2`) or any (`ndarray::IxDyn`).
///
/// # Errors
///
/// [`Reason::WrongDType`] for another element type; [`Reason::ShapeMismatch`] for another number of
/// dimensions; [`Reason::Misaligned`] where the elements do not lie as `T` must; [`Reason::InvalidBits`]
/// where anything between the lowest and the highest element is no `T`; and what
/// [`Storage::host_bytes`] refuses. [`to_ndarray`] gets around the alignment, and around memory that
/// cannot be lent.
///
/// ```
/// use ndarray::{Ix2, array};
/// use rung::Tensor;
///
/// let image = Tensor::from_vec(vec![1u8, 2, 3, 4, 5, 6], &[2, 3])?;
/// let mirrored = image.flip(1)?;
/// assert_eq!(tier_numpy::view::<u8, Ix2>(&mirrored)?, array![[3, 2, 1], [6, 5, 4]]);
/// # Ok::<(), rung::Refusal>(())
/// ```
pub fn view<T: Element, D: Dimension>(tensor: &Tensor) -> Result<ArrayView<'_, T, D>, Refusal> {
    let view = dynamic(tensor)?;
    let dimensions = view.ndim();
    view.into_dimensionality().map_err(|_| {
        let wanted = D::NDIM.map_or_else(String::new, |wanted| format!(", {wanted} wanted"));
        Refusal::new(Reason::ShapeMismatch, format!("{dimensions} dimensions{wanted}"))
    })
}

fn dynamic<T: Element>(tensor: &Tensor) -> Result<ArrayViewD<'_, T>, Refusal> {
    let mismatch =
        |error: ndarray::ShapeError| Refusal::new(Reason::ShapeMismatch, error.to_string());
    let elements = tensor.span_as_slice::<T>()?;
    let shape = IxDyn(tensor.shape());
    if tensor.count() == 0 {
        return ArrayViewD::from_shape(shape, &[]).map_err(mismatch);
    }
    // The slice begins at the lowest element: negative strides are turned around, and back afterwards.
    let strides: Vec<usize> = tensor.strides().iter().map(|stride| stride.unsigned_abs()).collect();
    let mut view =
        ArrayViewD::from_shape(shape.strides(IxDyn(&strides)), elements).map_err(mismatch)?;
    for (axis, stride) in tensor.strides().iter().enumerate() {
        if *stride < 0 {
            view.invert_axis(Axis(axis));
        }
    }
    Ok(view)
}

/// The elements of a tensor as an `ndarray` array of its own, in C order.
///
/// # Errors
///
/// As [`Tensor::to_vec`], and [`Reason::ShapeMismatch`] for another number of dimensions.
pub fn to_ndarray<T: Element, D: Dimension>(
    tensor: &Tensor,
) -> Result<ndarray::Array<T, D>, Refusal> {
    let mismatch =
        |error: ndarray::ShapeError| Refusal::new(Reason::ShapeMismatch, error.to_string());
    let elements = tensor.to_vec::<T>()?;
    let array = ndarray::ArrayD::from_shape_vec(IxDyn(tensor.shape()), elements);
    array.map_err(mismatch)?.into_dimensionality().map_err(mismatch)
}

/// An `ndarray` array as a tensor, without a copy, whatever its strides.
///
/// # Errors
///
/// [`Reason::Rank`] past 64 dimensions.
pub fn from_ndarray<T: Element, D: Dimension>(
    array: ndarray::Array<T, D>,
) -> Result<Tensor, Refusal> {
    let (shape, strides) = (array.shape().to_vec(), array.strides().to_vec());
    // None for an array without elements.
    let (elements, first) = array.into_raw_vec_and_offset();
    let offset = first.unwrap_or(0).checked_mul(size_of::<T>()).ok_or(Reason::OutOfBounds)?;
    let storage = Arc::new(Storage::from_vec(elements));
    Tensor::new(storage, T::DTYPE, &shape, &strides, offset)
}

/// Any `ndarray` array or view as a tensor in C order, copied.
///
/// # Errors
///
/// [`Reason::Rank`] past 64 dimensions.
pub fn copy_ndarray<T: Element, S: Data<Elem = T>, D: Dimension>(
    array: &ArrayBase<S, D>,
) -> Result<Tensor, Refusal> {
    let shape = array.shape().to_vec();
    let elements = match array.as_slice() {
        Some(elements) => elements.to_vec(),
        None => array.iter().copied().collect(),
    };
    Tensor::from_vec(elements, &shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array, Array2, Array3, Ix1, Ix2, Ix3, array, s};
    use proptest::prelude::*;

    #[test]
    fn an_array_of_any_order_is_a_tensor_without_a_copy() {
        let mut fortran: Array2<f32> = Array::zeros((3, 4).f());
        fortran[[1, 2]] = 7.0;
        let address = fortran.as_ptr();
        let tensor = from_ndarray(fortran.clone()).unwrap();
        assert_eq!(tensor.strides(), [1, 3]);
        assert_eq!(view::<f32, Ix2>(&tensor).unwrap(), fortran);
        let moved = from_ndarray(fortran).unwrap();
        assert_eq!(view::<f32, Ix2>(&moved).unwrap().as_ptr(), address);

        let mut sliced = Array::from_iter(0..60u16).into_shape_with_order((3, 4, 5)).unwrap();
        sliced.slice_collapse(s![1..;-1, .., 1..4;2]);
        sliced.invert_axis(Axis(1));
        let expected = sliced.to_owned();
        let tensor = from_ndarray(sliced).unwrap();
        assert!(tensor.strides().iter().any(|stride| *stride < 0));
        assert_eq!(view::<u16, Ix3>(&tensor).unwrap(), expected);
        assert_eq!(to_ndarray::<u16, Ix3>(&tensor).unwrap(), expected);
    }

    #[test]
    fn views_are_copied_once() {
        let base = Array3::<i64>::from_shape_fn((4, 3, 2), |(a, b, c)| (a * 6 + b * 2 + c) as i64);
        for view in [base.view(), base.slice(s![..;-1, 1.., ..]), base.view().reversed_axes()] {
            let tensor = copy_ndarray(&view).unwrap();
            assert_eq!(super::view::<i64, Ix3>(&tensor).unwrap(), view);
        }
        let row = array![1u8, 2];
        let broadcast = row.broadcast((3, 2)).unwrap();
        let tensor = copy_ndarray(&broadcast).unwrap();
        assert_eq!(super::view::<u8, Ix2>(&tensor).unwrap(), broadcast);
    }

    #[test]
    fn refusals_have_reasons() {
        let bytes = Arc::new(Storage::from_vec(vec![0u32, 1, 2]));
        let tensor = Tensor::new(bytes, rung::DType::F32, &[2], &[1], 1).unwrap();
        assert_eq!(view::<f32, Ix1>(&tensor).unwrap_err().reason(), Reason::Misaligned);
        assert_eq!(view::<i32, Ix1>(&tensor).unwrap_err().reason(), Reason::WrongDType);
        assert!(to_ndarray::<f32, Ix1>(&tensor).is_ok());
        let two = Tensor::from_vec(vec![2u8], &[1]).unwrap();
        assert_eq!(view::<u8, Ix2>(&two).unwrap_err().reason(), Reason::ShapeMismatch);
        let no_bool = Tensor::from_bytes(vec![0u8, 2], rung::DType::Bool, &[2]).unwrap();
        assert_eq!(view::<bool, Ix1>(&no_bool).unwrap_err().reason(), Reason::InvalidBits);
        let swapped = rung::Array::from_bytes(vec![0; 4], ">f4".parse().unwrap(), &[1]).unwrap();
        assert_eq!(swapped.to_tensor().unwrap_err().reason(), Reason::WrongDType);
    }

    #[test]
    fn empty_and_scalar_arrays_are_arrays() {
        let none = Array2::<f64>::zeros((0, 3));
        let tensor = from_ndarray(none.clone()).unwrap();
        assert_eq!(view::<f64, Ix2>(&tensor).unwrap(), none);
        let one = ndarray::arr0(2.5f64);
        let tensor = from_ndarray(one.clone()).unwrap();
        assert_eq!(view::<f64, ndarray::Ix0>(&tensor).unwrap(), one);
    }

    proptest! {
        /// Any view of any storage shows exactly the elements that the tensor has.
        #[test]
        fn a_view_is_the_tensor(
            shape in prop::collection::vec(0usize..5, 0..5),
            strides in prop::collection::vec(-7isize..8, 5),
            offset in 0usize..64,
        ) {
            let storage = Arc::new(Storage::from_vec((0..64u16).collect::<Vec<_>>()));
            let strides = &strides[..shape.len()];
            let made = Tensor::new(storage, rung::DType::U16, &shape, strides, offset * 2);
            if let Ok(tensor) = made {
                let seen = view::<u16, IxDyn>(&tensor).unwrap();
                prop_assert_eq!(seen.shape(), tensor.shape());
                let elements: Vec<u16> = seen.iter().copied().collect();
                prop_assert_eq!(&elements, &tensor.to_vec::<u16>().unwrap());
                let back = copy_ndarray(&seen).unwrap();
                prop_assert_eq!(back.to_vec::<u16>().unwrap(), elements);
            }
        }
    }
}
