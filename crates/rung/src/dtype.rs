//! Element types.

use std::fmt;
use std::str::FromStr;

use bytemuck::checked::CheckedCastError;
use bytemuck::{CheckedBitPattern, NoUninit, PodCastError, Zeroable};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::reason::{Reason, Refusal};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $size:literal;)*) => {
        /// The type of a tensor's elements, all little-endian and at least one byte wide.
        ///
        /// Names follow safetensors 0.8, in lower case. Its sub-byte types (`F4`, `F6_E2M3`,
        /// `F6_E3M2`) are refused by name: an element of a tensor here starts on a byte.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DType { $($(#[$doc])* $variant,)* }

        impl DType {
            /// All of them, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name on the wire and in tables.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bytes of one element.
            #[must_use]
            pub const fn size(self) -> usize {
                match self { $(Self::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool = "bool", 1;
    /// Unsigned 8-bit integer.
    U8 = "u8", 1;
    /// Unsigned 16-bit integer.
    U16 = "u16", 2;
    /// Unsigned 32-bit integer.
    U32 = "u32", 4;
    /// Unsigned 64-bit integer.
    U64 = "u64", 8;
    /// Signed 8-bit integer.
    I8 = "i8", 1;
    /// Signed 16-bit integer.
    I16 = "i16", 2;
    /// Signed 32-bit integer.
    I32 = "i32", 4;
    /// Signed 64-bit integer.
    I64 = "i64", 8;
    /// IEEE 754 binary16.
    F16 = "f16", 2;
    /// bfloat16: the upper half of a binary32.
    BF16 = "bf16", 2;
    /// IEEE 754 binary32.
    F32 = "f32", 4;
    /// IEEE 754 binary64.
    F64 = "f64", 8;
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinity (OCP `E4M3`, "fn").
    F8E4M3 = "f8_e4m3", 1;
    /// 8-bit float, 5 exponent and 2 mantissa bits (OCP `E5M2`).
    F8E5M2 = "f8_e5m2", 1;
    /// 8-bit float, 4 exponent and 3 mantissa bits, finite, one zero.
    F8E4M3Fnuz = "f8_e4m3fnuz", 1;
    /// 8-bit float, 5 exponent and 2 mantissa bits, finite, one zero.
    F8E5M2Fnuz = "f8_e5m2fnuz", 1;
    /// 8-bit power-of-two scale (OCP MX `E8M0`).
    F8E8M0 = "f8_e8m0", 1;
    /// Complex number of two binary32 (real, imaginary).
    C64 = "c64", 8;
    /// Complex number of two binary64 (real, imaginary).
    C128 = "c128", 16;
}

/// Types that safetensors names and a tensor here cannot hold.
const SUB_BYTE: [&str; 3] = ["f4", "f6_e2m3", "f6_e3m2"];

impl FromStr for DType {
    type Err = Refusal;

    /// Reads a name in either case, so that safetensors' `"BF16"` is `bf16`.
    ///
    /// # Errors
    ///
    /// [`Reason::SubByteDType`] for a type narrower than a byte, [`Reason::UnknownDType`] otherwise.
    fn from_str(name: &str) -> Result<Self, Refusal> {
        let lower = name.to_ascii_lowercase();
        if let Some(dtype) = Self::ALL.iter().find(|dtype| dtype.name() == lower) {
            return Ok(*dtype);
        }
        let reason = if SUB_BYTE.contains(&lower.as_str()) {
            Reason::SubByteDType
        } else {
            Reason::UnknownDType
        };
        let shown: String = name.chars().take(32).collect();
        Err(Refusal::new(reason, format!("{shown:?}")))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for DType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        // The wire's names are exact; only people and other libraries write upper case.
        Self::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| serde::de::Error::custom("unknown dtype"))
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the element of a tensor.
///
/// Sealed: a [`DType`] belongs to exactly one of these. Types with invalid bit patterns (`bool`)
/// are checked before a view of them is lent.
pub trait Element:
    CheckedBitPattern<Bits: NoUninit + Zeroable>
    + NoUninit
    + fmt::Debug
    + PartialEq
    + Send
    + Sync
    + sealed::Sealed
{
    /// The dtype that this type is.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty = $dtype:ident;)*) => {
        $(impl sealed::Sealed for $type {}
        impl Element for $type { const DTYPE: DType = DType::$dtype; })*
    };
}

elements! {
    bool = Bool;
    u8 = U8; u16 = U16; u32 = U32; u64 = U64;
    i8 = I8; i16 = I16; i32 = I32; i64 = I64;
    f32 = F32; f64 = F64;
    [f32; 2] = C64; [f64; 2] = C128;
}

#[cfg(feature = "half")]
elements! {
    half::f16 = F16;
    half::bf16 = BF16;
}

/// Bytes as elements, to write: for those who hold memory.
///
/// # Errors
///
/// [`Reason::Misaligned`], [`Reason::ShapeMismatch`] where they are no whole number of elements,
/// [`Reason::InvalidBits`] where they are no values of the type.
pub fn elements_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T], Refusal> {
    if bytes.is_empty() {
        return Ok(&mut []);
    }
    bytemuck::checked::try_cast_slice_mut(bytes).map_err(|error| cast_reason(error).into())
}

/// Why bytes are not lent as elements.
pub(crate) fn cast_reason(error: CheckedCastError) -> Reason {
    match error {
        CheckedCastError::PodCastError(PodCastError::TargetAlignmentGreaterAndInputNotAligned) => {
            Reason::Misaligned
        }
        CheckedCastError::PodCastError(_) => Reason::ShapeMismatch,
        CheckedCastError::InvalidBitPattern => Reason::InvalidBits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), *dtype);
            assert_eq!(dtype.name().to_uppercase().parse::<DType>().unwrap(), *dtype);
            let json = serde_json::to_string(dtype).unwrap();
            assert_eq!(serde_json::from_str::<DType>(&json).unwrap(), *dtype);
        }
    }

    #[test]
    fn sub_byte_types_are_refused_by_name() {
        for name in ["F4", "F6_E2M3", "F6_E3M2"] {
            assert_eq!(name.parse::<DType>().unwrap_err().reason(), Reason::SubByteDType);
        }
        // Two half floats, as torch's complex32, are no type here: refused by name, never taken for another.
        for name in ["f33", "c32", "complex32"] {
            assert_eq!(name.parse::<DType>().unwrap_err().reason(), Reason::UnknownDType);
        }
    }
}
