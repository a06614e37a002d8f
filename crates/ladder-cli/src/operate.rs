//! What a worker does with a value.

use half::{bf16, f16};
use ladder::{DType, Map, Tensor, Value};
use rung::{Element, Path, Step};

use crate::load::Error;

/// An operation that a worker knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Operation {
    /// The value itself.
    Echo,
    /// The negative: the largest value less each element, 1 less each float, not each bool.
    Invert,
    /// Each pixel's mean with its neighbours (height × width, or height × width × channels).
    Blur,
    /// Count, least, greatest and mean of the elements.
    Stats,
}

impl Operation {
    /// Its name, as a method's.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Invert => "invert",
            Self::Blur => "blur",
            Self::Stats => "stats",
        }
    }

    /// The operation of a name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        [Self::Echo, Self::Invert, Self::Blur, Self::Stats]
            .into_iter()
            .find(|operation| operation.name() == name)
    }

    /// Every tensor and byte string of a value, operated on.
    pub(crate) fn apply(self, value: &Value) -> Result<Value, Error> {
        if self == Self::Echo {
            return Ok(value.clone());
        }
        self.walk(value, &Path::ROOT)
    }

    fn walk(self, value: &Value, path: &Path<'_>) -> Result<Value, Error> {
        match value {
            Value::Tensor(tensor) => {
                self.tensor(tensor).map_err(|error| format!("at {path}: {error}").into())
            }
            Value::Bytes(bytes) => {
                let as_tensor = Tensor::from_bytes(bytes.clone(), DType::U8, &[bytes.len()])?;
                match self {
                    Self::Invert => {
                        Ok(Value::bytes(bytes.iter().map(|byte| !byte).collect::<Vec<u8>>()))
                    }
                    Self::Stats => self.tensor(&as_tensor),
                    _ => Err(format!("at {path}: bytes have no {}", self.name()).into()),
                }
            }
            Value::Map(map) => {
                let mut results = Map::new();
                for (index, (key, item)) in map.iter().enumerate() {
                    let result = self.walk(item, &path.then(Step::of_entry(key, index)))?;
                    results.insert(key.clone(), result);
                }
                Ok(Value::Map(results))
            }
            other => Ok(other.clone()),
        }
    }

    fn tensor(self, tensor: &Tensor) -> Result<Value, Error> {
        match tensor.dtype() {
            DType::Bool => self.elements::<bool>(tensor),
            DType::U8 => self.elements::<u8>(tensor),
            DType::U16 => self.elements::<u16>(tensor),
            DType::U32 => self.elements::<u32>(tensor),
            DType::U64 => self.elements::<u64>(tensor),
            DType::I8 => self.elements::<i8>(tensor),
            DType::I16 => self.elements::<i16>(tensor),
            DType::I32 => self.elements::<i32>(tensor),
            DType::I64 => self.elements::<i64>(tensor),
            DType::F16 => self.elements::<f16>(tensor),
            DType::BF16 => self.elements::<bf16>(tensor),
            DType::F32 => self.elements::<f32>(tensor),
            DType::F64 => self.elements::<f64>(tensor),
            other => Err(format!("{} is not known for {other}", self.name()).into()),
        }
    }

    fn elements<T: Number>(self, tensor: &Tensor) -> Result<Value, Error> {
        let elements = tensor.to_vec::<T>()?;
        let shape = tensor.shape();
        Ok(match self {
            Self::Echo => tensor.clone().into(),
            Self::Invert => {
                let inverted = elements.into_iter().map(T::inverted).collect();
                Tensor::from_vec(inverted, shape)?.into()
            }
            Self::Blur => Tensor::from_vec(blurred(&elements, shape)?, shape)?.into(),
            Self::Stats => stats(&elements),
        })
    }
}

/// An element that can be averaged.
trait Number: Element {
    fn inverted(self) -> Self;
    fn wide(self) -> f64;
    fn narrow(wide: f64) -> Self;
}

macro_rules! numbers {
    ($($type:ty: $inverted:expr, $wide:expr, $narrow:expr;)*) => {
        $(impl Number for $type {
            fn inverted(self) -> Self {
                let inverted: fn($type) -> $type = $inverted;
                inverted(self)
            }

            fn wide(self) -> f64 {
                let wide: fn($type) -> f64 = $wide;
                wide(self)
            }

            fn narrow(wide: f64) -> Self {
                let narrow: fn(f64) -> $type = $narrow;
                narrow(wide)
            }
        })*
    };
}

numbers! {
    bool: |x| !x, |x| f64::from(u8::from(x)), |x| x >= 0.5;
    u8: |x| !x, f64::from, |x| x.round() as u8;
    u16: |x| !x, f64::from, |x| x.round() as u16;
    u32: |x| !x, f64::from, |x| x.round() as u32;
    u64: |x| !x, |x| x as f64, |x| x.round() as u64;
    i8: |x| !x, f64::from, |x| x.round() as i8;
    i16: |x| !x, f64::from, |x| x.round() as i16;
    i32: |x| !x, f64::from, |x| x.round() as i32;
    i64: |x| !x, |x| x as f64, |x| x.round() as i64;
    f16: |x| f16::ONE - x, f64::from, f16::from_f64;
    bf16: |x| bf16::ONE - x, f64::from, bf16::from_f64;
    f32: |x| 1.0 - x, f64::from, |x| x as f32;
    f64: |x| 1.0 - x, |x| x, |x| x;
}

/// A 3 × 3 box; at the edge, over the neighbours there are.
fn blurred<T: Number>(elements: &[T], shape: &[usize]) -> Result<Vec<T>, Error> {
    let (height, width, channels) = match *shape {
        [height, width] => (height, width, 1),
        [height, width, channels] => (height, width, channels),
        _ => return Err(format!("shape {shape:?} has no pixels to blur").into()),
    };
    let mut result = Vec::with_capacity(elements.len());
    for y in 0..height {
        for x in 0..width {
            for channel in 0..channels {
                let (mut sum, mut count) = (0.0, 0.0);
                for row in y.saturating_sub(1)..(y + 2).min(height) {
                    for column in x.saturating_sub(1)..(x + 2).min(width) {
                        sum += elements[(row * width + column) * channels + channel].wide();
                        count += 1.0;
                    }
                }
                result.push(T::narrow(sum / count));
            }
        }
    }
    Ok(result)
}

/// Least and greatest leave NaNs out; the mean does not.
fn stats<T: Number>(elements: &[T]) -> Value {
    let wide = || elements.iter().map(|element| element.wide());
    let some = |value: f64| (!elements.is_empty()).then_some(value);
    Value::map([
        ("count", Value::from(elements.len())),
        ("min", some(wide().fold(f64::INFINITY, f64::min)).into()),
        ("max", some(wide().fold(f64::NEG_INFINITY, f64::max)).into()),
        ("mean", some(wide().sum::<f64>() / elements.len() as f64).into()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_negative_of_a_negative_is_the_picture() {
        let picture = Value::from(Tensor::from_vec(vec![0u8, 7, 255], &[1, 3]).unwrap());
        let negative = Operation::Invert.apply(&picture).unwrap();
        let elements = negative.as_tensor().unwrap().to_vec::<u8>().unwrap();
        assert_eq!(elements, [255, 248, 0]);
        assert_eq!(Operation::Invert.apply(&negative).unwrap(), picture);
    }

    #[test]
    fn a_blur_spreads_a_pixel() {
        let mut pixels = vec![0f32; 25];
        pixels[12] = 9.0;
        let picture = Value::from(Tensor::from_vec(pixels, &[5, 5]).unwrap());
        let blurred = Operation::Blur.apply(&picture).unwrap();
        let elements = blurred.as_tensor().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(elements[..10], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn what_is_not_known_names_its_path() {
        let tensor = Tensor::from_bytes(vec![0u8; 4], DType::F8E4M3, &[4]).unwrap();
        let value = Value::map([("scales", tensor)]);
        let error = Operation::Invert.apply(&value).unwrap_err();
        assert_eq!(error.to_string(), "at $.scales: invert is not known for f8_e4m3");
    }

    #[test]
    fn stats_of_nothing_are_none() {
        let value = Value::from(Tensor::from_vec(Vec::<i16>::new(), &[0, 3]).unwrap());
        let stats = Operation::Stats.apply(&value).unwrap();
        assert_eq!(stats.get("count"), Some(&Value::from(0)));
        assert_eq!(stats.get("mean"), Some(&Value::Null));
    }
}
