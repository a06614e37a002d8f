//! Everything that can be sent.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::LazyLock;

use bytes::Bytes;

use crate::array::Array;
use crate::limits;
use crate::map::{Map, not_distinct, repeated};
use crate::object::Object;
use crate::pickle::OpaquePickle;
use crate::reason::{Reason, Refusal};
use crate::tensor::Tensor;

/// Everything that can be sent: primitives, containers, and tensors anywhere among them.
///
/// Equality is exact: floats by their bits (a NaN equals itself, 0.0 and −0.0 differ), tensors by
/// their elements' bits, maps and sets whatever their order. Nothing is equal across kinds: 1 is not
/// 1.0, a tuple is not a list.
///
/// The enum is `non_exhaustive`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Value {
    /// Nothing.
    Null,
    /// True or false.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// An integer past 64 bits; one that fits is always an `Int`.
    BigInt(BigInt),
    /// A double, any bit pattern.
    Float(f64),
    /// Text.
    Str(String),
    /// Bytes.
    Bytes(Bytes),
    /// An ordered list.
    List(Vec<Value>),
    /// A tuple: a list that keeps its kind.
    Tuple(Vec<Value>),
    /// A set: no element twice.
    Set(Vec<Value>),
    /// A map from any values to any values.
    Map(Map),
    /// A tensor.
    Tensor(Tensor),
    /// An array with a NumPy type.
    Array(Box<Array>),
    /// A pickle that is not opened.
    Pickle(Box<OpaquePickle>),
    /// An object of a registered type, taken apart.
    Object(Box<Object>),
}

impl Value {
    /// A list.
    pub fn list<V: Into<Value>>(items: impl IntoIterator<Item = V>) -> Self {
        Self::List(items.into_iter().map(Into::into).collect())
    }

    /// A tuple.
    pub fn tuple<V: Into<Value>>(items: impl IntoIterator<Item = V>) -> Self {
        Self::Tuple(items.into_iter().map(Into::into).collect())
    }

    /// A set; of equal elements the first stays.
    pub fn set<V: Into<Value>>(items: impl IntoIterator<Item = V>) -> Self {
        let mut seen = HashSet::new();
        let items = items.into_iter().map(Into::into);
        Self::Set(items.filter(|item: &Value| seen.insert(item.clone())).collect())
    }

    /// A set from items that may stand there twice: for decoders, which take that for a fault.
    ///
    /// # Errors
    ///
    /// The item that stands there twice, or that holds a tensor.
    pub fn try_set(items: Vec<Value>) -> Result<Self, Value> {
        match not_distinct(items.len(), |at| &items[at]) {
            Some(at) => Err(items[at].clone()),
            None => Ok(Self::Set(items)),
        }
    }

    /// As [`Self::try_set`], for items that are known to hold no memory: they are not looked through for it.
    ///
    /// # Errors
    ///
    /// The item that stands there twice.
    pub fn try_plain_set(items: Vec<Value>) -> Result<Self, Value> {
        match repeated(items.len(), |at| &items[at]) {
            Some(at) => Err(items[at].clone()),
            None => Ok(Self::Set(items)),
        }
    }

    /// Whether these can be the items of one set: each once, none with a tensor in it.
    #[must_use]
    pub fn are_distinct(items: &[Value]) -> bool {
        not_distinct(items.len(), |at| &items[at]).is_none()
    }

    /// Whether there is a tensor in it, at any depth, or anything else that is memory: an array, a pickle,
    /// an object.
    #[must_use]
    pub fn has_tensor(&self) -> bool {
        match self {
            Self::Tensor(_) | Self::Array(_) | Self::Pickle(_) | Self::Object(_) => true,
            Self::List(items) | Self::Tuple(items) | Self::Set(items) => {
                items.iter().any(Self::has_tensor)
            }
            Self::Map(map) => map.iter().any(|(key, item)| key.has_tensor() || item.has_tensor()),
            _ => false,
        }
    }

    /// A map; of equal keys the last value stays, in the first one's place.
    pub fn map<K: Into<Value>, V: Into<Value>>(entries: impl IntoIterator<Item = (K, V)>) -> Self {
        Self::Map(entries.into_iter().map(|(key, value)| (key.into(), value.into())).collect())
    }

    /// Bytes.
    pub fn bytes(bytes: impl Into<Bytes>) -> Self {
        Self::Bytes(bytes.into())
    }

    /// The kind, in a word.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::BigInt(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Set(_) => "set",
            Self::Map(_) => "map",
            Self::Tensor(_) => "tensor",
            Self::Array(_) => "array",
            Self::Pickle(_) => "pickle",
            Self::Object(_) => "object",
        }
    }

    /// The value under a string key, if this is a map that has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        match self {
            Self::Map(map) => map.get(key),
            _ => None,
        }
    }

    /// The items, if this is a list, tuple or set.
    #[must_use]
    pub fn items(&self) -> Option<&[Value]> {
        match self {
            Self::List(items) | Self::Tuple(items) | Self::Set(items) => Some(items),
            _ => None,
        }
    }

    /// The tensor, if this is one.
    #[must_use]
    pub fn as_tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// The array, if this is one.
    #[must_use]
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }

    /// The unopened pickle, if this is one.
    #[must_use]
    pub fn as_pickle(&self) -> Option<&OpaquePickle> {
        match self {
            Self::Pickle(pickle) => Some(pickle),
            _ => None,
        }
    }

    /// The object, taken apart, if this is one.
    #[must_use]
    pub fn as_object(&self) -> Option<&Object> {
        match self {
            Self::Object(object) => Some(object),
            _ => None,
        }
    }

    /// The text, if this is a string.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The bytes, if this is a byte string.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&Bytes> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The integer, if this is one of 64 bits.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// The double, if this is one.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// True or false, if this is either.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    /// The map, if this is one.
    #[must_use]
    pub fn as_map(&self) -> Option<&Map> {
        match self {
            Self::Map(map) => Some(map),
            _ => None,
        }
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::BigInt(a), Self::BigInt(b)) => a == b,
            (Self::Float(a), Self::Float(b)) => a.to_bits() == b.to_bits(),
            (Self::Str(a), Self::Str(b)) => a == b,
            (Self::Bytes(a), Self::Bytes(b)) => a == b,
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => a == b,
            (Self::Set(a), Self::Set(b)) => {
                let members: HashSet<&Value> = a.iter().collect();
                a.len() == b.len() && b.iter().all(|item| members.contains(item))
            }
            (Self::Map(a), Self::Map(b)) => a == b,
            (Self::Tensor(a), Self::Tensor(b)) => a == b,
            (Self::Array(a), Self::Array(b)) => a == b,
            (Self::Pickle(a), Self::Pickle(b)) => a == b,
            (Self::Object(a), Self::Object(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Value {}

impl Hash for Value {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::mem::discriminant(self).hash(state);
        match self {
            Self::Null => {}
            Self::Bool(truth) => truth.hash(state),
            Self::Int(number) => number.hash(state),
            Self::BigInt(number) => number.hash(state),
            Self::Float(number) => number.to_bits().hash(state),
            Self::Str(text) => text.hash(state),
            Self::Bytes(bytes) => bytes.hash(state),
            Self::List(items) | Self::Tuple(items) => items.hash(state),
            // Whatever the order: a sum. Hashes that leave the contents out would make many maps of
            // one shape collide, which a peer could use against us.
            Self::Set(items) => sum_of_hashes(items.iter()).hash(state),
            Self::Map(map) => sum_of_hashes(map.iter()).hash(state),
            // Reading gigabytes for a hash is not worth it.
            Self::Tensor(tensor) => (tensor.dtype(), tensor.shape()).hash(state),
            Self::Array(array) => (array.descr(), array.shape()).hash(state),
            Self::Pickle(pickle) => pickle.byte_count().hash(state),
            Self::Object(object) => object.hash(state),
        }
    }
}

/// Of this process alone: with keys that everybody knows, a peer could look for many sets of one sum.
static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);

fn sum_of_hashes<T: Hash>(items: impl Iterator<Item = T>) -> u64 {
    items.fold(0, |sum: u64, item| sum.wrapping_add(KEYS.hash_one(item)))
}

/// An integer that does not fit 64 bits, as its decimal digits.
///
/// At most 4,096 digits: enough for a 13,000-bit number; arithmetic is left to libraries made for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BigInt(String);

impl BigInt {
    /// The digits, with a leading `-` for a negative number.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BigInt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad_integral(!self.0.starts_with('-'), "", self.0.trim_start_matches('-'))
    }
}

impl Value {
    /// An integer of any size from its decimal digits: an [`Int`](Self::Int) where it fits.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] where they are no integer in plain form (no `+`, no leading zeros),
    /// [`Reason::TooLarge`] past the cap of digits.
    pub fn integer(digits: &str) -> Result<Self, Refusal> {
        let magnitude = digits.strip_prefix('-').unwrap_or(digits);
        if magnitude.len() > limits::BIG_INT_DIGITS {
            return Err(Refusal::new(
                Reason::TooLarge,
                format!("an integer of {} digits", magnitude.len()),
            ));
        }
        let plain = !magnitude.is_empty()
            && magnitude.bytes().all(|byte| byte.is_ascii_digit())
            && (magnitude.len() == 1 || !magnitude.starts_with('0'))
            && digits != "-0";
        if !plain {
            return Err(Refusal::new(Reason::BadMetadata, "not an integer"));
        }
        Ok(match digits.parse::<i64>() {
            Ok(number) => Self::Int(number),
            Err(_) => Self::BigInt(BigInt(digits.to_owned())),
        })
    }
}

macro_rules! integers {
    (small: $($small:ty)*; large: $($large:ty)*) => {
        $(impl From<$small> for Value {
            fn from(number: $small) -> Self {
                Self::Int(i64::from(number))
            }
        })*
        $(impl From<$large> for Value {
            fn from(number: $large) -> Self {
                match i64::try_from(number) {
                    Ok(number) => Self::Int(number),
                    Err(_) => Self::BigInt(BigInt(number.to_string())),
                }
            }
        })*
    };
}

integers!(small: i8 i16 i32 i64 u8 u16 u32; large: u64 usize isize i128 u128);

macro_rules! from {
    ($($type:ty => $variant:ident;)*) => {
        $(impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$variant(value.into())
            }
        })*
    };
}

from! {
    bool => Bool;
    f32 => Float;
    f64 => Float;
    &str => Str;
    String => Str;
    Bytes => Bytes;
    Vec<Value> => List;
    Map => Map;
    Tensor => Tensor;
}

macro_rules! from_boxed {
    ($($type:ident => $variant:ident;)*) => {
        $(impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$variant(Box::new(value))
            }
        })*
    };
}

from_boxed! {
    Array => Array;
    OpaquePickle => Pickle;
    Object => Object;
}

impl From<()> for Value {
    fn from((): ()) -> Self {
        Self::Null
    }
}

impl<V: Into<Value>> From<Option<V>> for Value {
    fn from(value: Option<V>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_take_the_smallest_home() {
        assert_eq!(Value::from(u64::MAX), Value::integer("18446744073709551615").unwrap());
        assert_eq!(Value::from(7u64), Value::Int(7));
        assert_eq!(Value::integer("-9223372036854775808").unwrap(), Value::Int(i64::MIN));
        for bad in ["", "-", "-0", "007", "+1", "1.0", "٣"] {
            assert_eq!(Value::integer(bad).unwrap_err().reason(), Reason::BadMetadata, "{bad:?}");
        }
        let long = "9".repeat(limits::BIG_INT_DIGITS + 1);
        assert_eq!(Value::integer(&long).unwrap_err().reason(), Reason::TooLarge);
    }

    #[test]
    fn nothing_is_equal_across_kinds() {
        assert_ne!(Value::from(1), Value::from(1.0));
        assert_ne!(Value::from(true), Value::from(1));
        assert_ne!(Value::list([1]), Value::tuple([1]));
        assert_ne!(Value::from(0.0), Value::from(-0.0));
        assert_eq!(Value::from(f64::NAN), Value::from(f64::NAN));
    }

    #[test]
    fn maps_and_sets_compare_whatever_the_order() {
        let many = |order: &mut dyn Iterator<Item = i64>| {
            Value::map(order.map(|i| (i, i * i)).collect::<Vec<_>>())
        };
        assert_eq!(many(&mut (0..50)), many(&mut (0..50).rev()));
        assert_eq!(Value::set([1, 2, 2]), Value::set([2, 1]));
        let last_wins = Value::map([("a", 1), ("b", 2), ("a", 3)]);
        assert_eq!(last_wins.get("a"), Some(&Value::Int(3)));
    }
}
