//! DLPack's managed tensors in and out: how frameworks in one process hand tensors to each other.
//!
//! Versioned ones alone: a legacy one cannot say that it is not to be written.
#![expect(unsafe_code, reason = "memory that another library owns")]

use std::any::Any;

use dlpark::DlpackFlags;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::versioned::Dlpack;
use rung::{DType, Flags, Layout, Reason, Refusal};

use crate::context::Context;
use crate::memory::{Buffer, attributes};

const CUDA: DLDeviceType = DLDeviceType(2);
const CUDA_MANAGED: DLDeviceType = DLDeviceType(13);

/// Each of ours that DLPack has, by code and bits.
const TYPES: &[(DType, u8, u8)] = &[
    (DType::Bool, DLDataTypeCode::BOOL.0, 8),
    (DType::U8, DLDataTypeCode::UINT.0, 8),
    (DType::U16, DLDataTypeCode::UINT.0, 16),
    (DType::U32, DLDataTypeCode::UINT.0, 32),
    (DType::U64, DLDataTypeCode::UINT.0, 64),
    (DType::I8, DLDataTypeCode::INT.0, 8),
    (DType::I16, DLDataTypeCode::INT.0, 16),
    (DType::I32, DLDataTypeCode::INT.0, 32),
    (DType::I64, DLDataTypeCode::INT.0, 64),
    (DType::F16, DLDataTypeCode::FLOAT.0, 16),
    (DType::BF16, DLDataTypeCode::BFLOAT.0, 16),
    (DType::F32, DLDataTypeCode::FLOAT.0, 32),
    (DType::F64, DLDataTypeCode::FLOAT.0, 64),
    (DType::F8E4M3, DLDataTypeCode::FLOAT8_E4M3FN.0, 8),
    (DType::F8E5M2, DLDataTypeCode::FLOAT8_E5M2.0, 8),
    (DType::C64, DLDataTypeCode::COMPLEX.0, 64),
    (DType::C128, DLDataTypeCode::COMPLEX.0, 128),
];

/// A tensor that came by DLPack.
#[derive(Debug)]
pub struct Imported {
    /// All that its elements lie in, and no more; it keeps the producer's tensor.
    pub buffer: Buffer,
    /// How they lie there.
    pub layout: Layout,
    /// Whether the producer forbids writing.
    pub flags: Flags,
}

/// Takes a tensor of a CUDA device over. What the producer enqueued on it is for the caller to be ordered after: by
/// DLPack's rules it is ready on the stream that the producer was told of.
///
/// # Errors
///
/// [`Reason::DeviceMemory`] for memory of the host or another kind of device, [`Reason::UnknownDType`],
/// [`Reason::SubByteDType`], [`Reason::Empty`] for no elements, [`Reason::OutOfBounds`] where it reaches outside of what
/// the driver says is one allocation, [`Reason::BadMetadata`] for what DLPack does not allow, and what the driver answers.
pub fn import(managed: Dlpack) -> Result<Imported, Refusal> {
    let bad = |error: dlpark::tensor::Error| Refusal::new(Reason::BadMetadata, error.to_string());
    let view = managed.validate().map_err(bad)?;
    let device = view.device();
    if device.device_type != CUDA && device.device_type != CUDA_MANAGED {
        let detail = format!("a device of DLPack's type {}", device.device_type.0);
        return Err(Refusal::new(Reason::DeviceMemory, detail));
    }
    let dtype = dtype_of(view.dtype())?;
    let size = |size: &i64| usize::try_from(*size).map_err(|_| Refusal::from(Reason::BadMetadata));
    let shape = view.shape().iter().map(size).collect::<Result<Vec<_>, _>>()?;
    let strides = view.strides_or_compact().map_err(bad)?;
    let step = |step: &i64| isize::try_from(*step).map_err(|_| Refusal::from(Reason::BadMetadata));
    let strides = strides.iter().map(step).collect::<Result<Vec<_>, _>>()?;
    if shape.contains(&0) {
        return Err(Reason::Empty.into());
    }
    let first = (view.data_ptr() as u64).checked_add(view.byte_offset());
    let first = first.ok_or(Reason::OutOfBounds)?;
    let driver = crate::driver()?;
    let known = driver.devices().iter().find(|info| info.ordinal() == device.device_id);
    let context = Context::of(known.ok_or(Reason::DeviceUnknown)?.device())?;
    let said = attributes(&context.enter()?, first)?;
    if !said.is_device || said.ordinal != device.device_id {
        return Err(Refusal::new(Reason::DeviceMemory, "not memory of the device that it names"));
    }
    let (start, whole) = said.range;
    let offset = first.checked_sub(start).and_then(|offset| usize::try_from(offset).ok());
    let layout = Layout::new(dtype, &shape, &strides, offset.ok_or(Reason::OutOfBounds)?, whole)?;
    let span = layout.span();
    let layout = Layout::new(dtype, &shape, &strides, layout.offset() - span.start, span.len())?;
    let flags =
        Flags { read_only: managed.flags().contains(DlpackFlags::READ_ONLY), ..Flags::default() };
    // SAFETY: the driver says that all of it is one allocation of this device, just now; whoever made the managed
    // tensor keeps it until that is dropped, by DLPack's contract.
    let buffer = unsafe { Buffer::adopt(&context, start + span.start as u64, span.len(), managed) };
    Ok(Imported { buffer, layout, flags })
}

/// Hands a tensor out: read-only where it is said to be, and ready for work on the stream that the caller has ordered;
/// `owner` is dropped when the consumer has let go.
///
/// # Errors
///
/// [`Reason::UnknownDType`] for a type that DLPack has not, [`Reason::OutOfBounds`] where the layout does not lie in the
/// buffer.
pub fn export(
    buffer: &Buffer,
    layout: &Layout,
    flags: Flags,
    owner: impl Any + Send + Sync,
) -> Result<Dlpack, Refusal> {
    let (dtype, shape, strides) = (layout.dtype(), layout.shape(), layout.strides());
    // Of this very buffer.
    Layout::new(dtype, shape, strides, layout.offset(), buffer.len())?;
    let bad = |error: &dyn std::fmt::Display| Refusal::new(Reason::BadMetadata, error.to_string());
    let device = crate::driver()?.device(buffer.device())?.ordinal();
    let prepared = Dynamic::new(shape.to_vec(), strides.to_vec())
        .prepare_as::<DLManagedTensorVersioned>()
        .map_err(|error| bad(&error))?;
    // In this order: the memory goes before whatever gives it back.
    let mut tensor = prepared.initialize(Box::new((buffer.clone(), owner)));
    tensor.set_data(std::ptr::without_provenance_mut(buffer.address() as usize));
    tensor.set_device(DLDevice { device_type: CUDA, device_id: device });
    tensor.set_dtype(code_of(dtype)?);
    tensor.set_byte_offset(layout.offset() as u64);
    if flags.read_only {
        tensor.set_flags(DlpackFlags::READ_ONLY).map_err(|error| bad(&error))?;
    }
    // SAFETY: memory of this device that the context of the tensor keeps, checked against its length; explicit strides.
    Ok(unsafe { tensor.finish() })
}

fn dtype_of(of: DLDataType) -> Result<DType, Refusal> {
    if of.lanes != 1 {
        return Err(Refusal::new(Reason::UnknownDType, format!("{} lanes", of.lanes)));
    }
    if of.bits < 8 {
        return Err(Reason::SubByteDType.into());
    }
    let known = TYPES.iter().find(|(_, code, bits)| (of.code.0, of.bits) == (*code, *bits));
    known.map(|(dtype, ..)| *dtype).ok_or_else(|| {
        Refusal::new(Reason::UnknownDType, format!("DLPack's {} of {} bits", of.code.0, of.bits))
    })
}

fn code_of(dtype: DType) -> Result<DLDataType, Refusal> {
    let known = TYPES.iter().find(|(known, ..)| *known == dtype);
    let (_, code, bits) =
        known.ok_or_else(|| Refusal::new(Reason::UnknownDType, dtype.to_string()))?;
    Ok(DLDataType { code: DLDataTypeCode(*code), bits: *bits, lanes: 1 })
}
