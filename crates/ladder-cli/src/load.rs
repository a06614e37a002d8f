//! Files as values.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use image::{DynamicImage, ImageFormat};
use ladder::{Array, DType, Tensor, Value};
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
        "npy" => Ok(array(tier_numpy::npy::read(bytes)?)),
        "npz" => archive(bytes),
        "pickle" | "pkl" => Ok(tier_pickle::load(bytes)?),
        "txt" | "md" => Ok(text(bytes)),
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

/// A tensor where its type is one's, else an array; as it lies in the file, Fortran order by its strides.
fn array(array: Array) -> Value {
    array.to_tensor().map_or_else(|_| array.into(), Value::from)
}

/// The lines of a text as one string, or bytes where it is none.
fn text(bytes: Bytes) -> Value {
    std::str::from_utf8(&bytes).map(Value::from).unwrap_or(Value::Bytes(bytes))
}

/// Bytes that an archive may become.
const ARCHIVE: u64 = 16 << 30;

fn archive(bytes: Bytes) -> Result<Value, Error> {
    let arrays = tier_numpy::npy::read_npz(std::io::Cursor::new(bytes), ARCHIVE)?;
    Ok(Value::map(arrays.into_iter().map(|(name, each)| (name, array(each)))))
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
