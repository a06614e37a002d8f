//! Anything to a value.

use serde::Serialize;
use serde::ser::{self, Serializer};

use super::{BridgeError, MEMORY, SLOT, Slot};
use crate::limits;
use crate::map::Map;
use crate::value::Value;

/// Writes one value at a depth.
pub(super) struct ToValue {
    pub(super) depth: usize,
}

impl ToValue {
    fn deeper(&self) -> Result<usize, BridgeError> {
        if self.depth >= limits::VALUE_DEPTH {
            return Err(BridgeError::new(format!(
                "nested too deeply: at most {}",
                limits::VALUE_DEPTH
            )));
        }
        Ok(self.depth + 1)
    }

    fn sequence(self, tuple: bool, len: usize) -> Result<Sequence, BridgeError> {
        // A length is a hint, and may be anything.
        let items = Vec::with_capacity(len.min(1 << 16));
        Ok(Sequence { items, depth: self.deeper()?, tuple, variant: None })
    }

    fn record(self, len: usize) -> Result<Record, BridgeError> {
        let entries = Vec::with_capacity(len);
        Ok(Record { entries, depth: self.deeper()?, variant: None })
    }
}

/// A map of one entry: a variant with something in it.
fn variant(name: &str, content: Value) -> Value {
    Value::Map(Map::from_distinct(vec![(Value::from(name), content)]))
}

impl Serializer for ToValue {
    type Ok = Value;
    type Error = BridgeError;
    type SerializeSeq = Sequence;
    type SerializeTuple = Sequence;
    type SerializeTupleStruct = Sequence;
    type SerializeTupleVariant = Sequence;
    type SerializeMap = Entries;
    type SerializeStruct = Record;
    type SerializeStructVariant = Record;

    fn serialize_bool(self, truth: bool) -> Result<Value, BridgeError> {
        Ok(Value::Bool(truth))
    }

    fn serialize_i8(self, number: i8) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_i16(self, number: i16) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_i32(self, number: i32) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_i64(self, number: i64) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_i128(self, number: i128) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_u8(self, number: u8) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_u16(self, number: u16) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_u32(self, number: u32) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_u64(self, number: u64) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_u128(self, number: u128) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_f32(self, number: f32) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_f64(self, number: f64) -> Result<Value, BridgeError> {
        Ok(number.into())
    }

    fn serialize_char(self, c: char) -> Result<Value, BridgeError> {
        Ok(Value::Str(c.into()))
    }

    fn serialize_str(self, text: &str) -> Result<Value, BridgeError> {
        Ok(text.into())
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result<Value, BridgeError> {
        Ok(Value::bytes(bytes.to_vec()))
    }

    fn serialize_none(self) -> Result<Value, BridgeError> {
        Ok(Value::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, some: &T) -> Result<Value, BridgeError> {
        some.serialize(self)
    }

    fn serialize_unit(self) -> Result<Value, BridgeError> {
        Ok(Value::Null)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Value, BridgeError> {
        Ok(Value::Null)
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        name: &'static str,
    ) -> Result<Value, BridgeError> {
        Ok(name.into())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        inner: &T,
    ) -> Result<Value, BridgeError> {
        if name != MEMORY {
            return inner.serialize(self);
        }
        let before = SLOT.replace(Slot::Open);
        let handed = inner.serialize(self);
        let slot = SLOT.replace(before);
        match (handed?, slot) {
            (_, Slot::Filled(value)) => Ok(value),
            // Somebody else's newtype, of this very name.
            (value, _) => Ok(value),
        }
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        name: &'static str,
        inner: &T,
    ) -> Result<Value, BridgeError> {
        let depth = self.deeper()?;
        let inner = inner.serialize(Self { depth });
        Ok(variant(name, inner.map_err(|error| error.under(&name.into()))?))
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Sequence, BridgeError> {
        self.sequence(false, len.unwrap_or(0))
    }

    fn serialize_tuple(self, len: usize) -> Result<Sequence, BridgeError> {
        self.sequence(true, len)
    }

    fn serialize_tuple_struct(self, _: &'static str, len: usize) -> Result<Sequence, BridgeError> {
        self.sequence(true, len)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        name: &'static str,
        len: usize,
    ) -> Result<Sequence, BridgeError> {
        let depth = self.deeper()?;
        Ok(Sequence { variant: Some(name), ..Self { depth }.sequence(true, len)? })
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Entries, BridgeError> {
        let entries = Vec::with_capacity(len.unwrap_or(0).min(1 << 16));
        Ok(Entries { entries, key: None, depth: self.deeper()? })
    }

    fn serialize_struct(self, _: &'static str, len: usize) -> Result<Record, BridgeError> {
        self.record(len)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        name: &'static str,
        len: usize,
    ) -> Result<Record, BridgeError> {
        let depth = self.deeper()?;
        Ok(Record { variant: Some(name), ..Self { depth }.record(len)? })
    }
}

/// A list or a tuple, perhaps of a variant.
pub(super) struct Sequence {
    items: Vec<Value>,
    depth: usize,
    tuple: bool,
    variant: Option<&'static str>,
}

impl Sequence {
    fn push<T: Serialize + ?Sized>(&mut self, item: &T) -> Result<(), BridgeError> {
        let item = item.serialize(ToValue { depth: self.depth });
        self.items.push(item.map_err(|error| error.at(self.items.len()))?);
        Ok(())
    }

    fn finish(self) -> Value {
        let items = if self.tuple { Value::Tuple(self.items) } else { Value::List(self.items) };
        match self.variant {
            Some(name) => variant(name, items),
            None => items,
        }
    }
}

macro_rules! sequences {
    ($($trait:ident, $method:ident;)*) => {
        $(impl ser::$trait for Sequence {
            type Ok = Value;
            type Error = BridgeError;

            fn $method<T: Serialize + ?Sized>(&mut self, item: &T) -> Result<(), BridgeError> {
                self.push(item)
            }

            fn end(self) -> Result<Value, BridgeError> {
                Ok(self.finish())
            }
        })*
    };
}

sequences! {
    SerializeSeq, serialize_element;
    SerializeTuple, serialize_element;
    SerializeTupleStruct, serialize_field;
    SerializeTupleVariant, serialize_field;
}

/// A map of any keys.
pub(super) struct Entries {
    entries: Vec<(Value, Value)>,
    key: Option<Value>,
    depth: usize,
}

impl ser::SerializeMap for Entries {
    type Ok = Value;
    type Error = BridgeError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), BridgeError> {
        self.key = Some(key.serialize(ToValue { depth: self.depth })?);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), BridgeError> {
        let key = self.key.take().ok_or_else(|| BridgeError::new("a value without its key"))?;
        let value = value.serialize(ToValue { depth: self.depth });
        let value = value.map_err(|error| error.under(&key))?;
        self.entries.push((key, value));
        Ok(())
    }

    fn end(self) -> Result<Value, BridgeError> {
        Map::try_from_entries(self.entries).map(Value::Map).map_err(|key| {
            BridgeError::new("a key that stands there twice, or holds memory").under(&key)
        })
    }
}

/// A struct, perhaps of a variant.
pub(super) struct Record {
    entries: Vec<(Value, Value)>,
    depth: usize,
    variant: Option<&'static str>,
}

impl Record {
    fn push<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        field: &T,
    ) -> Result<(), BridgeError> {
        let key = Value::from(name);
        let field = field.serialize(ToValue { depth: self.depth });
        let field = field.map_err(|error| error.under(&key))?;
        self.entries.push((key, field));
        Ok(())
    }

    fn finish(self) -> Value {
        // The fields of a struct have a name each.
        let fields = Value::Map(Map::from_distinct(self.entries));
        match self.variant {
            Some(name) => variant(name, fields),
            None => fields,
        }
    }
}

macro_rules! records {
    ($($trait:ident)*) => {
        $(impl ser::$trait for Record {
            type Ok = Value;
            type Error = BridgeError;

            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                name: &'static str,
                field: &T,
            ) -> Result<(), BridgeError> {
                self.push(name, field)
            }

            fn end(self) -> Result<Value, BridgeError> {
                Ok(self.finish())
            }
        })*
    };
}

records! { SerializeStruct SerializeStructVariant }
