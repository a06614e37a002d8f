//! Maps from any values to any values.

use std::collections::{HashMap, HashSet};

use crate::value::Value;

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

    /// As [`Self::try_from_entries`], for keys that are known to hold no memory: they are not looked through
    /// for it.
    ///
    /// # Errors
    ///
    /// The key that stands there twice.
    pub fn try_from_plain_entries(entries: Vec<(Value, Value)>) -> Result<Self, Value> {
        match repeated(entries.len(), |at| &entries[at].0) {
            Some(at) => Err(entries[at].0.clone()),
            None => Ok(Self { entries }),
        }
    }

    /// From entries whose keys are known to differ.
    pub(crate) fn from_distinct(entries: Vec<(Value, Value)>) -> Self {
        Self { entries }
    }

    /// From entries that may hold a key twice: for decoders, which take that for a fault.
    ///
    /// # Errors
    ///
    /// The key that stands there twice, or that holds a tensor.
    pub fn try_from_entries(entries: Vec<(Value, Value)>) -> Result<Self, Value> {
        match not_distinct(entries.len(), |at| &entries[at].0) {
            Some(at) => Err(entries[at].0.clone()),
            None => Ok(Self { entries }),
        }
    }
}

/// The first of `count` values that cannot be a key or a set's item: it equals an earlier one, or
/// holds a tensor, which nobody can compare without reading gigabytes.
pub(crate) fn not_distinct<'a>(count: usize, value: impl Fn(usize) -> &'a Value) -> Option<usize> {
    (0..count).find(|&at| value(at).has_tensor()).or_else(|| repeated(count, value))
}

/// The first of `count` values that equals an earlier one.
pub(crate) fn repeated<'a>(count: usize, value: impl Fn(usize) -> &'a Value) -> Option<usize> {
    // A few values are compared faster than hashed, and strings mostly differ at a glance.
    if count <= 64 && (0..count).all(|at| value(at).as_str().is_some()) {
        return repeated_string(count, value);
    }
    if count <= 8 {
        (1..count).find(|&at| (0..at).any(|earlier| value(earlier) == value(at)))
    } else {
        let mut seen = HashSet::with_capacity(count);
        (0..count).find(|&at| !seen.insert(value(at)))
    }
}

/// As [`repeated`], of strings: only where another one looked alike is it compared.
fn repeated_string<'a>(count: usize, value: impl Fn(usize) -> &'a Value) -> Option<usize> {
    let mut seen = [0u64; 4];
    (0..count).find(|&at| {
        let bytes = value(at).as_str().unwrap_or_default().as_bytes();
        let ends = (bytes.first().copied().unwrap_or(0), bytes.last().copied().unwrap_or(0));
        let glance =
            bytes.len().wrapping_mul(31) ^ (usize::from(ends.0) << 1) ^ (usize::from(ends.1) << 3);
        let (word, bit) = (glance / 64 % 4, 1u64 << (glance % 64));
        let alike = seen[word] & bit != 0;
        seen[word] |= bit;
        alike && (0..at).any(|earlier| value(earlier) == value(at))
    })
}

impl PartialEq for Map {
    fn eq(&self, other: &Self) -> bool {
        if self.len() != other.len() {
            return false;
        }
        // The same string keys in the same order are the common case and need no table. Each value
        // is compared once: twice, at every level, would take a time exponential in the depth.
        let pairs = || self.entries.iter().zip(&other.entries);
        if pairs().all(|((a, _), (b, _))| a.as_str().is_some() && a.as_str() == b.as_str()) {
            return pairs().all(|((_, a), (_, b))| a == b);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deep_maps_that_differ_at_the_bottom_are_compared_in_no_time() {
        let nest = |leaf: i64| {
            (0..127).fold(Value::Int(leaf), |inner, level| {
                Value::map([(Value::Int(level), inner), (Value::from("x"), Value::Int(1))])
            })
        };
        assert_ne!(nest(1), nest(2));
        assert_eq!(nest(1), nest(1));
        assert!(Value::try_set(vec![nest(1), nest(2)]).is_ok());
    }

    #[test]
    fn many_maps_of_one_shape_are_told_apart_in_no_time() {
        let items: Vec<Value> = (0..200_000i64).map(|n| Value::map([("a", n)])).collect();
        assert!(Value::try_set(items).is_ok());
    }

    #[test]
    fn a_tensor_is_no_key() {
        let tensor = || Value::from(crate::Tensor::from_vec(vec![1u8], &[1]).unwrap());
        assert!(Map::try_from_entries(vec![(Value::list([tensor()]), Value::Null)]).is_err());
        assert!(Value::try_set(vec![tensor()]).is_err());
        assert!(Map::try_from_entries(vec![(Value::Null, tensor())]).is_ok());
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
}
