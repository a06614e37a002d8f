//! Files as values.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use image::{DynamicImage, ImageFormat};
use ladder::{DType, Tensor, Value};
use npyz::{Endianness, NpyHeader, Order, TypeChar};
use rung::Storage;
use safetensors::SafeTensors;

/// Whatever makes a file unreadable.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// A file's decoded content, by the ending of its name; anything unknown is bytes.
pub(crate) fn load(path: &Path) -> Result<Value, Error> {
    let bytes = Bytes::from(std::fs::read(path)?);
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    match ending.to_ascii_lowercase().as_str() {
        "png" => picture(&bytes, ImageFormat::Png),
        "jpg" | "jpeg" => picture(&bytes, ImageFormat::Jpeg),
        "npy" => npy(bytes),
        "safetensors" => tensors(bytes),
        _ => Ok(Value::Bytes(bytes)),
    }
}

/// As height × width × channels of u8.
fn picture(bytes: &[u8], format: ImageFormat) -> Result<Value, Error> {
    let image = image::load_from_memory_with_format(bytes, format)?;
    let (width, height) = (image.width() as usize, image.height() as usize);
    let channels = usize::from(image.color().channel_count());
    let pixels = match channels {
        1 => DynamicImage::into_luma8(image).into_raw(),
        2 => DynamicImage::into_luma_alpha8(image).into_raw(),
        3 => DynamicImage::into_rgb8(image).into_raw(),
        _ => DynamicImage::into_rgba8(image).into_raw(),
    };
    let channels = pixels.len() / (width * height).max(1);
    Ok(Tensor::from_vec(pixels, &[height, width, channels])?.into())
}

/// The array as it lies in the file, Fortran order by its strides.
fn npy(file: Bytes) -> Result<Value, Error> {
    let mut rest = &file[..];
    let header = NpyHeader::from_reader(&mut rest)?;
    let dtype = plain_dtype(&header.dtype())?;
    let shape: Vec<usize> =
        header.shape().iter().map(|&extent| usize::try_from(extent)).collect::<Result<_, _>>()?;
    let whole = rung::Layout::contiguous(dtype, &shape)?;
    if rest.len() != whole.byte_count() {
        return Err(format!(
            "shape {shape:?} of {dtype} takes {} bytes, the file has {}",
            whole.byte_count(),
            rest.len()
        )
        .into());
    }
    let data = file.slice(file.len() - rest.len()..);
    let tensor = match header.order() {
        Order::C => Tensor::from_bytes(data, dtype, &shape)?,
        Order::Fortran => {
            let reversed: Vec<usize> = shape.iter().rev().copied().collect();
            let order: Vec<usize> = (0..shape.len()).rev().collect();
            Tensor::from_bytes(data, dtype, &reversed)?.permute(&order)?
        }
    };
    if dtype == DType::Bool {
        // A byte that is neither 0 nor 1 would be no bool for whoever reads it.
        tensor.to_vec::<bool>()?;
    }
    Ok(tensor.into())
}

fn plain_dtype(dtype: &npyz::DType) -> Result<DType, Error> {
    let refused = || -> Error {
        format!("the dtype {} is not a plain little-endian one", dtype.descr()).into()
    };
    let npyz::DType::Plain(scalar) = dtype else {
        return Err(refused());
    };
    if scalar.endianness() == Endianness::Big && scalar.size_field() > 1 {
        return Err(refused());
    }
    Ok(match (scalar.type_char(), scalar.size_field()) {
        (TypeChar::Bool, 1) => DType::Bool,
        (TypeChar::Uint, 1) => DType::U8,
        (TypeChar::Uint, 2) => DType::U16,
        (TypeChar::Uint, 4) => DType::U32,
        (TypeChar::Uint, 8) => DType::U64,
        (TypeChar::Int, 1) => DType::I8,
        (TypeChar::Int, 2) => DType::I16,
        (TypeChar::Int, 4) => DType::I32,
        (TypeChar::Int, 8) => DType::I64,
        (TypeChar::Float, 2) => DType::F16,
        (TypeChar::Float, 4) => DType::F32,
        (TypeChar::Float, 8) => DType::F64,
        (TypeChar::Complex, 8) => DType::C64,
        (TypeChar::Complex, 16) => DType::C128,
        _ => return Err(refused()),
    })
}

/// A map of named tensors, all views of the file.
fn tensors(file: Bytes) -> Result<Value, Error> {
    let parsed = SafeTensors::deserialize(&file)?;
    let start = file.as_ptr() as usize;
    let mut views = Vec::new();
    for (name, view) in parsed.tensors() {
        let dtype: DType = view.dtype().to_string().parse()?;
        views.push((name, dtype, view.shape().to_vec(), view.data().as_ptr() as usize - start));
    }
    views.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    let storage = Arc::new(Storage::from_bytes(file.clone()));
    let mut named = Vec::new();
    for (name, dtype, shape, offset) in views {
        let layout = rung::Layout::contiguous(dtype, &shape)?;
        let tensor = Tensor::new(
            Arc::clone(&storage),
            dtype,
            &shape,
            layout.strides(),
            if layout.count() == 0 { 0 } else { offset },
        )?;
        named.push((name, tensor));
    }
    Ok(Value::map(named))
}
