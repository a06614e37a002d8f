//! Everything that can be sent.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::{Hash, Hasher};

use bytes::Bytes;

use crate::limits;
use crate::reason::{Reason, Refusal};
use crate::tensor::Tensor;

/// Everything that can be sent: primitives, containers, and tensors anywhere among them.
///
/// Equality is exact: floats by their bits (a NaN equals itself, 0.0 and −0.0 differ), tensors by
/// their elements' bits, maps and sets whatever their order. Nothing is equal across kinds: 1 is not
/// 1.0, a tuple is not a list.
///
/// The enum is `non_exhaustive`: arrays with NumPy's dtypes, pickled objects and registered types
/// come with their rungs.
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
    /// The item that stands there twice.
    pub fn try_set(items: Vec<Value>) -> Result<Self, Value> {
        match repeated(items.len(), |at| &items[at]) {
            Some(at) => Err(items[at].clone()),
            None => Ok(Self::Set(items)),
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
            // Whatever the order: the length will do.
            Self::Set(items) => items.len().hash(state),
            Self::Map(map) => map.len().hash(state),
            // Reading gigabytes for a hash is not worth it.
            Self::Tensor(tensor) => (tensor.dtype(), tensor.shape()).hash(state),
        }
    }
}

/// A map from any values to any values, in order of insertion, no key twice.
#[derive(Debug, Clone, Default)]
pub struct Map {
    entries: Vec<(Value, Value)>,
}

impl Map {
    /// With no entries.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entries in order.
    pub fn iter(&self) -> std::slice::Iter<'_, (Value, Value)> {
        self.entries.iter()
    }

    /// The value under a string key; time grows with the number of entries.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        let is_key = |(k, _): &&(Value, Value)| k.as_str() == Some(key);
        self.entries.iter().find(is_key).map(|(_, value)| value)
    }

    /// The value under any key; time grows with the number of entries.
    #[must_use]
    pub fn get_value(&self, key: &Value) -> Option<&Value> {
        self.entries.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// Sets a key, and gives back what stood there; time grows with the number of entries.
    pub fn insert(&mut self, key: impl Into<Value>, value: impl Into<Value>) -> Option<Value> {
        let (key, value) = (key.into(), value.into());
        match self.entries.iter_mut().find(|(k, _)| *k == key) {
            Some((_, old)) => Some(std::mem::replace(old, value)),
            None => {
                self.entries.push((key, value));
                None
            }
        }
    }

    /// From entries that may hold a key twice: for decoders, which take that for a fault.
    ///
    /// # Errors
    ///
    /// The key that stands there twice.
    pub fn try_from_entries(entries: Vec<(Value, Value)>) -> Result<Self, Value> {
        match repeated(entries.len(), |at| &entries[at].0) {
            Some(at) => Err(entries[at].0.clone()),
            None => Ok(Self { entries }),
        }
    }
}

/// The first of `count` values that equals an earlier one.
fn repeated<'a>(count: usize, value: impl Fn(usize) -> &'a Value) -> Option<usize> {
    // A few values are compared faster than hashed.
    if count <= 8 {
        (1..count).find(|&at| (0..at).any(|earlier| value(earlier) == value(at)))
    } else {
        let mut seen = HashSet::with_capacity(count);
        (0..count).find(|&at| !seen.insert(value(at)))
    }
}

impl PartialEq for Map {
    fn eq(&self, other: &Self) -> bool {
        if self.len() != other.len() {
            return false;
        }
        // The same order is the common case and needs no table.
        if self.entries == other.entries {
            return true;
        }
        let mine: HashMap<&Value, &Value> = self.entries.iter().map(|(k, v)| (k, v)).collect();
        other.entries.iter().all(|(key, value)| mine.get(key) == Some(&value))
    }
}

impl Eq for Map {}

impl FromIterator<(Value, Value)> for Map {
    /// Of equal keys the last value stays, in the first one's place.
    fn from_iter<I: IntoIterator<Item = (Value, Value)>>(entries: I) -> Self {
        let mut at: HashMap<Value, usize> = HashMap::new();
        let mut map = Self::new();
        for (key, value) in entries {
            match at.get(&key) {
                Some(&index) => map.entries[index].1 = value,
                None => {
                    at.insert(key.clone(), map.entries.len());
                    map.entries.push((key, value));
                }
            }
        }
        map
    }
}

impl IntoIterator for Map {
    type Item = (Value, Value);
    type IntoIter = std::vec::IntoIter<(Value, Value)>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

impl<'a> IntoIterator for &'a Map {
    type Item = &'a (Value, Value);
    type IntoIter = std::slice::Iter<'a, (Value, Value)>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
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

/// One step into a value.
#[derive(Debug, Clone, Copy)]
pub enum Step<'a> {
    /// Under a string key.
    Key(&'a str),
    /// At an index: of a list, a tuple, a set, or of a map's entries with other keys.
    Index(usize),
}

impl<'a> Step<'a> {
    /// To an entry of a map: by its key where that is a string, else by its position.
    #[must_use]
    pub fn of_entry(key: &'a Value, index: usize) -> Self {
        key.as_str().map_or(Self::Index(index), Self::Key)
    }
}

/// The place of a leaf in a value, as a chain of steps on the stack: printed as `$.images[3].meta`.
#[derive(Debug, Clone, Copy)]
pub struct Path<'a> {
    parent: Option<(&'a Path<'a>, Step<'a>)>,
}

impl<'a> Path<'a> {
    /// The value itself.
    pub const ROOT: Path<'static> = Path { parent: None };

    /// One step further.
    #[must_use]
    pub fn then(&'a self, step: Step<'a>) -> Self {
        Self { parent: Some((self, step)) }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((parent, step)) = self.parent else {
            return f.write_str("$");
        };
        write!(f, "{parent}")?;
        match step {
            Step::Index(index) => write!(f, "[{index}]"),
            Step::Key(key) => {
                let plain = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
                if !key.is_empty() && key.chars().count() <= 64 && key.chars().all(plain) {
                    write!(f, ".{key}")
                } else {
                    let shown: String = key.chars().take(64).collect();
                    write!(f, "[{shown:?}]")
                }
            }
        }
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

    #[test]
    fn repeated_keys_are_found() {
        for length in [3i64, 30] {
            let mut entries: Vec<_> = (0..length).map(|i| (Value::Int(i), Value::Null)).collect();
            assert!(Map::try_from_entries(entries.clone()).is_ok());
            entries.push((Value::Int(1), Value::Null));
            assert_eq!(Map::try_from_entries(entries), Err(Value::Int(1)));
        }
    }

    #[test]
    fn paths_read_like_paths() {
        let images = Path::ROOT.then(Step::Key("images"));
        let third = images.then(Step::Index(3));
        assert_eq!(third.then(Step::Key("meta")).to_string(), "$.images[3].meta");
        assert_eq!(third.then(Step::Key("a b")).to_string(), "$.images[3][\"a b\"]");
    }
}
