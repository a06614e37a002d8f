//! Values as files that a person can open.

use std::collections::BTreeMap;
use std::io::BufWriter;
use std::path::Path;

use image::{ExtendedColorType, ImageFormat};
use ladder::{Array, Tensor, Value};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

use crate::load::Error;

/// Writes a value, in the form that the ending of the name asks for.
pub(crate) fn save(path: &Path, value: &Value) -> Result<(), Error> {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    match (ending.to_ascii_lowercase().as_str(), value) {
        ("png", Value::Tensor(tensor)) => picture(path, tensor, ImageFormat::Png),
        ("jpg" | "jpeg", Value::Tensor(tensor)) => picture(path, tensor, ImageFormat::Jpeg),
        ("npy", Value::Tensor(tensor)) => npy(path, &Array::from_tensor(tensor)?),
        ("npy", Value::Array(array)) => npy(path, array),
        ("pickle" | "pkl", Value::Pickle(pickle)) if !pickle.buffers().is_empty() => {
            Err("a pickle whose buffers are outside of it is no file".into())
        }
        ("pickle" | "pkl", Value::Pickle(pickle)) => Ok(std::fs::write(path, pickle.bytes()?)?),
        ("pickle" | "pkl", value) => Ok(std::fs::write(path, tier_pickle::dump(value)?)?),
        ("txt" | "md", Value::Str(text)) => Ok(std::fs::write(path, text)?),
        ("safetensors", value) => tensors(path, value),
        ("json", value) => Ok(std::fs::write(path, json(value)? + "\n")?),
        (_, Value::Bytes(bytes)) => Ok(std::fs::write(path, bytes)?),
        (ending, value) => {
            Err(format!("a {} cannot be written as {ending:?}", value.kind()).into())
        }
    }
}

/// A plain value as JSON.
pub(crate) fn json(value: &Value) -> Result<String, Error> {
    let mut json = String::new();
    tier_inline::codec::encode(value, &mut json, &mut tier_inline::codec::Plain)?;
    Ok(json)
}

fn picture(path: &Path, tensor: &Tensor, format: ImageFormat) -> Result<(), Error> {
    let (height, width, channels) = match *tensor.shape() {
        [height, width] => (height, width, 1),
        [height, width, channels] => (height, width, channels),
        _ => return Err(format!("shape {:?} is no picture", tensor.shape()).into()),
    };
    let color = match channels {
        1 => ExtendedColorType::L8,
        2 => ExtendedColorType::La8,
        3 => ExtendedColorType::Rgb8,
        4 => ExtendedColorType::Rgba8,
        _ => return Err(format!("{channels} channels are no picture").into()),
    };
    let pixels = tensor.to_vec::<u8>()?;
    let (width, height) = (u32::try_from(width)?, u32::try_from(height)?);
    image::save_buffer_with_format(path, &pixels, width, height, color, format)?;
    Ok(())
}

fn npy(path: &Path, array: &Array) -> Result<(), Error> {
    let file = BufWriter::new(std::fs::File::create(path)?);
    Ok(tier_numpy::npy::write(array, file)?)
}

fn tensors(path: &Path, value: &Value) -> Result<(), Error> {
    let mut contents = BTreeMap::new();
    match value {
        Value::Tensor(tensor) => {
            contents.insert("tensor".to_owned(), tensor);
        }
        Value::Map(map) => {
            for (name, tensor) in map {
                match (name.as_str(), tensor.as_tensor()) {
                    (Some(name), Some(tensor)) => contents.insert(name.to_owned(), tensor),
                    _ => return Err("only a map of named tensors can be written".into()),
                };
            }
        }
        other => return Err(format!("a {} is no map of tensors", other.kind()).into()),
    }
    let bytes: BTreeMap<&String, Vec<u8>> = contents
        .iter()
        .map(|(name, tensor)| Ok((name, tensor.to_bytes()?)))
        .collect::<Result<_, Error>>()?;
    let mut views = Vec::new();
    for (name, tensor) in &contents {
        let dtype: Dtype = serde_json::from_value(tensor.dtype().name().to_uppercase().into())
            .map_err(|_| format!("safetensors has no {}", tensor.dtype()))?;
        views.push((name, TensorView::new(dtype, tensor.shape().to_vec(), &bytes[name])?));
    }
    Ok(serialize_to_file(views, None, path)?)
}
