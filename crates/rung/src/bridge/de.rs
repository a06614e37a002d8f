//! A value to anything.

use std::fmt;

use serde::Deserialize;
use serde::de::value::BytesDeserializer;
use serde::de::{
    self, DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};

use super::{BridgeError, MEMORY, deposit, find};
use crate::map::Map;
use crate::value::Value;

pub(super) struct FromValue(pub(super) Value);

impl FromValue {
    /// Its place in the table of this thread, as the newtype that memory presents itself as.
    fn handed<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, BridgeError> {
        let (nonce, at) = deposit(self.0);
        visitor.visit_newtype_struct(Place { nonce: Some(nonce), at: Some(at) })
    }
}

impl<'de> Deserializer<'de> for FromValue {
    type Error = BridgeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, BridgeError> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(truth) => visitor.visit_bool(truth),
            Value::Int(number) => visitor.visit_i64(number),
            Value::BigInt(number) => {
                let digits = number.as_str();
                if let Ok(number) = digits.parse::<u64>() {
                    visitor.visit_u64(number)
                } else if let Ok(number) = digits.parse::<i128>() {
                    visitor.visit_i128(number)
                } else if let Ok(number) = digits.parse::<u128>() {
                    visitor.visit_u128(number)
                } else {
                    // No type of Rust's own holds it: it is handed over as it is.
                    Self(Value::BigInt(number)).handed(visitor)
                }
            }
            Value::Float(number) => visitor.visit_f64(number),
            Value::Str(text) => visitor.visit_string(text),
            Value::Bytes(bytes) => visitor.visit_byte_buf(bytes.into()),
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                let mut items = Items { items: items.into_iter(), at: 0 };
                let read = visitor.visit_seq(&mut items)?;
                match items.items.len() {
                    0 => Ok(read),
                    more => Err(BridgeError::new(format!("{more} items more than are wanted"))),
                }
            }
            Value::Map(map) => visitor.visit_map(Entries { entries: map.into_iter(), value: None }),
            memory => Self(memory).handed(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, BridgeError> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, BridgeError> {
        if name == MEMORY { self.handed(visitor) } else { visitor.visit_newtype_struct(self) }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, BridgeError> {
        let (variant, content) = match self.0 {
            Value::Str(variant) => (Value::Str(variant), None),
            Value::Map(map) if map.len() == 1 => match map.into_iter().next() {
                Some((variant, content)) => (variant, Some(content)),
                None => return Err(BridgeError::new(format!("no variant of {name}"))),
            },
            other => {
                let kind = other.kind();
                return Err(BridgeError::new(format!("a {kind} is no variant of {name}")));
            }
        };
        visitor.visit_enum(Variant { variant, content })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, BridgeError> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier
    }
}

/// A place in the table: a map of one entry, whose key no message can have. Nothing but a place looks like it,
/// so that no other variant of an untagged type is taken for it.
struct Place {
    nonce: Option<Vec<u8>>,
    at: Option<u64>,
}

impl<'de> Deserializer<'de> for Place {
    type Error = BridgeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, BridgeError> {
        visitor.visit_map(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Place {
    type Error = BridgeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, BridgeError> {
        match self.nonce.take() {
            Some(nonce) => seed.deserialize(BytesDeserializer::new(&nonce)).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<T::Value, BridgeError> {
        seed.deserialize(self.at.take().unwrap_or(u64::MAX).into_deserializer())
    }
}

struct Items {
    items: std::vec::IntoIter<Value>,
    at: usize,
}

impl<'de> SeqAccess<'de> for &mut Items {
    type Error = BridgeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, BridgeError> {
        let Some(item) = self.items.next() else { return Ok(None) };
        let at = self.at;
        self.at += 1;
        seed.deserialize(FromValue(item)).map(Some).map_err(|error| error.at(at))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len())
    }
}

struct Entries {
    entries: std::vec::IntoIter<(Value, Value)>,
    /// The value of the key that was read last, and the key where it is needed to say where.
    value: Option<(Value, Value)>,
}

impl<'de> MapAccess<'de> for Entries {
    type Error = BridgeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, BridgeError> {
        let Some((key, value)) = self.entries.next() else { return Ok(None) };
        self.value = Some((key.clone(), value));
        seed.deserialize(FromValue(key)).map(Some)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<T::Value, BridgeError> {
        let (key, value) =
            self.value.take().ok_or_else(|| BridgeError::new("a value before its key"))?;
        seed.deserialize(FromValue(value)).map_err(|error| error.under(&key))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.entries.len())
    }
}

struct Variant {
    variant: Value,
    content: Option<Value>,
}

impl<'de> EnumAccess<'de> for Variant {
    type Error = BridgeError;
    type Variant = Content;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Content), BridgeError> {
        let content = Content { variant: self.variant.clone(), content: self.content };
        Ok((seed.deserialize(FromValue(self.variant))?, content))
    }
}

struct Content {
    variant: Value,
    content: Option<Value>,
}

impl Content {
    fn some(content: Option<Value>) -> Result<FromValue, BridgeError> {
        content.map(FromValue).ok_or_else(|| BridgeError::new("a variant without its content"))
    }
}

impl<'de> VariantAccess<'de> for Content {
    type Error = BridgeError;

    fn unit_variant(self) -> Result<(), BridgeError> {
        match self.content {
            None => Ok(()),
            Some(content) => {
                <()>::deserialize(FromValue(content)).map_err(|error| error.under(&self.variant))
            }
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<T::Value, BridgeError> {
        let Self { variant, content } = self;
        let read = Self::some(content).and_then(|content| seed.deserialize(content));
        read.map_err(|error| error.under(&variant))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, BridgeError> {
        let Self { variant, content } = self;
        let read = Self::some(content).and_then(|content| content.deserialize_any(visitor));
        read.map_err(|error| error.under(&variant))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, BridgeError> {
        let Self { variant, content } = self;
        let read = Self::some(content).and_then(|content| content.deserialize_any(visitor));
        read.map_err(|error| error.under(&variant))
    }
}

/// A value from any deserializer: from that of this module what is in the table, from another one what it
/// has words for.
pub(super) struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<Value, D::Error> {
        inner.deserialize_any(self)
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Value, D::Error> {
        inner.deserialize_any(self)
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Value, E> {
        Ok(truth.into())
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_i128<E>(self, number: i128) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u128<E>(self, number: u128) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Value, E> {
        Ok(Value::bytes(bytes.to_vec()))
    }

    fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Value, E> {
        Ok(Value::bytes(bytes))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        if let [(Value::Bytes(nonce), Value::Int(at))] = entries.as_slice()
            && let Some(value) = find(nonce, *at)
        {
            return Ok(value);
        }
        Map::try_from_entries(entries)
            .map(Value::Map)
            .map_err(|_| de::Error::custom("a key that stands there twice, or holds memory"))
    }
}
