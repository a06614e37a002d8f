//! JSON to values.

use std::borrow::Cow;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use rung::{Fault, Map, Object, Reason, Value, limits};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{Node, Unsplice, is_plain_entry, nodes};

/// Reads a value from JSON: exactly what [`encode`](super::encode) writes, or a fault.
///
/// # Errors
///
/// [`Reason::BadMetadata`] for what the grammar does not have, [`Reason::TooDeep`],
/// [`Reason::OverCap`], and whatever the [`Unsplice`] answers.
pub fn decode(json: &str, unsplice: &mut dyn Unsplice) -> Result<Value, Fault> {
    let mut context = Context { unsplice, fault: None, nodes: 0, number: 0 };
    let mut deserializer = serde_json::Deserializer::from_str(json);
    // Our own count takes its place: at three brackets a value at most, 128 values are 384 brackets.
    deserializer.disable_recursion_limit();
    let value = Seed { context: &mut context, depth: 1 }
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value));
    match (value, context.fault) {
        (Ok(value), _) => Ok(value),
        (Err(_), Some(fault)) => Err(fault),
        (Err(error), None) => Err(Fault::new(Reason::BadMetadata, error.to_string())),
    }
}

struct Context<'u> {
    unsplice: &'u mut dyn Unsplice,
    /// The fault behind the error that serde carries as text.
    fault: Option<Fault>,
    /// Values begun in the JSON so far.
    nodes: usize,
    /// With those that were unspliced: the number of the next, as [`nodes`] counts.
    number: usize,
}

impl Context<'_> {
    fn fail<E: serde::de::Error>(&mut self, fault: Fault) -> E {
        let error = E::custom(&fault);
        self.fault.get_or_insert(fault);
        error
    }
}

fn bad(detail: &str) -> Fault {
    Fault::new(Reason::BadMetadata, detail)
}

/// Reads one value at a depth.
struct Seed<'c, 'u> {
    context: &'c mut Context<'u>,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Seed<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if self.depth > limits::VALUE_DEPTH {
            let detail = format!("at most {}", limits::VALUE_DEPTH);
            return Err(self.context.fail(Fault::new(Reason::TooDeep, detail)));
        }
        self.context.nodes += 1;
        self.context.number += 1;
        if self.context.nodes > limits::NODES {
            let detail = format!("more than {} values in one", limits::NODES);
            return Err(self.context.fail(Fault::new(Reason::OverCap, detail)));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Value, E> {
        Ok(Value::Bool(truth))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Value, E> {
        if text.len() > limits::INLINE_TEXT {
            let detail = format!("a string of {} bytes in the JSON", text.len());
            return Err(self.context.fail(Fault::new(Reason::OverCap, detail)));
        }
        Ok(Value::Str(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Value, A::Error> {
        items(self.context, self.depth, seq).map(Value::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let Some(first) = map.next_key::<Key<'de>>()? else {
            return Ok(Value::Map(Map::new()));
        };
        let Self { context, depth } = self;
        if let Some(tag) = first.tag() {
            let value = tagged(context, depth, tag, &mut map)?;
            if map.next_key::<Key<'de>>()?.is_some() {
                return Err(context.fail(bad("a tag with a second key")));
            }
            return Ok(value);
        }
        let mut entries = Vec::new();
        let mut next = Some(first);
        while let Some(key) = next {
            if key.tag().is_some() {
                return Err(context.fail(bad("a tag that is not the first key")));
            }
            let key = match key.0.strip_prefix('$') {
                Some(escaped) => escaped.to_owned(),
                None => key.0.into_owned(),
            };
            if key.len() > limits::INLINE_KEY {
                let detail = format!("a key of {} bytes", key.len());
                return Err(context.fail(Fault::new(Reason::OverCap, detail)));
            }
            let value = map.next_value_seed(Seed { context, depth: depth + 1 })?;
            entries.push((Value::Str(key), value));
            next = map.next_key()?;
        }
        unique(context, entries)
    }
}

fn items<'de, A: SeqAccess<'de>>(
    context: &mut Context<'_>,
    depth: usize,
    mut seq: A,
) -> Result<Vec<Value>, A::Error> {
    let mut items = Vec::new();
    while let Some(item) = seq.next_element_seed(Seed { context, depth: depth + 1 })? {
        items.push(item);
    }
    Ok(items)
}

fn unique<E: serde::de::Error>(
    context: &mut Context<'_>,
    entries: Vec<(Value, Value)>,
) -> Result<Value, E> {
    Map::try_from_entries(entries)
        .map(Value::Map)
        .map_err(|_| context.fail(bad("a map with a key twice, or a tensor in one")))
}

fn tagged<'de, A: MapAccess<'de>>(
    context: &mut Context<'_>,
    depth: usize,
    tag: &str,
    map: &mut A,
) -> Result<Value, A::Error> {
    match tag {
        "t" => map.next_value_seed(Items { context, depth }).map(Value::Tuple),
        "s" => {
            let items = map.next_value_seed(Items { context: &mut *context, depth })?;
            Value::try_set(items)
                .map_err(|_| context.fail(bad("a set with an item twice, or a tensor in one")))
        }
        "m" => {
            let entries = map.next_value_seed(Entries { context: &mut *context, depth })?;
            unique(context, entries)
        }
        "i" => {
            let digits = map.next_value::<Key<'de>>()?;
            match Value::integer(&digits.0) {
                Ok(number @ Value::BigInt(_)) if digits.0.parse::<u64>().is_err() => Ok(number),
                Ok(_) => Err(context.fail(bad("a small integer as a big one"))),
                Err(refusal) => Err(context.fail(refusal.into())),
            }
        }
        "f" => {
            let bits = map.next_value::<Key<'de>>()?;
            let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            let number = (bits.0.len() == 16 && bits.0.bytes().all(is_hex))
                .then(|| u64::from_str_radix(&bits.0, 16).ok().map(f64::from_bits))
                .flatten();
            match number {
                Some(number) if !number.is_finite() => Ok(Value::Float(number)),
                _ => Err(context.fail(bad("not the bits of an infinity or a NaN"))),
            }
        }
        "b" => {
            let text = map.next_value::<Key<'de>>()?;
            match BASE64.decode(text.0.as_bytes()) {
                Ok(bytes) if bytes.len() <= limits::INLINE_TEXT => Ok(Value::bytes(bytes)),
                Ok(bytes) => {
                    let detail = format!("{} bytes in the JSON", bytes.len());
                    Err(context.fail(Fault::new(Reason::OverCap, detail)))
                }
                Err(_) => Err(context.fail(bad("not base64"))),
            }
        }
        "o" => map.next_value_seed(Parts { context, depth }),
        other => {
            let content = map.next_value::<&RawValue>()?;
            let node = Node { number: context.number - 1, depth };
            match context.unsplice.unsplice(other, content, node) {
                Ok(value) => {
                    context.number += nodes(&value) - 1;
                    Ok(value)
                }
                Err(fault) => Err(context.fail(fault)),
            }
        }
    }
}

/// A list under a tag.
struct Items<'c, 'u> {
    context: &'c mut Context<'u>,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Items<'_, '_> {
    type Value = Vec<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<Value>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Items<'_, '_> {
    type Value = Vec<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<Value>, A::Error> {
        items(self.context, self.depth, seq)
    }
}

/// What is under `$o`: tag, version, schema, parts.
struct Parts<'c, 'u> {
    context: &'c mut Context<'u>,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Parts<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Parts<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tag, a version, a schema and parts")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let Self { context, depth } = self;
        let short = || A::Error::custom("an object without its tag, version and schema");
        let tag = seq.next_element::<Key<'de>>()?.ok_or_else(short)?;
        let version = seq.next_element::<u32>()?.ok_or_else(short)?;
        let schema = Seed { context: &mut *context, depth: depth + 1 };
        let schema = seq.next_element_seed(schema)?.ok_or_else(short)?;
        let parts = items(context, depth, seq)?;
        Object::new(tag.0, version, schema, parts)
            .map(Value::from)
            .map_err(|refusal| context.fail(refusal.into()))
    }
}

/// The entries under `$m`.
struct Entries<'c, 'u> {
    context: &'c mut Context<'u>,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Entries<'_, '_> {
    type Value = Vec<(Value, Value)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_, '_> {
    type Value = Vec<(Value, Value)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let Self { context, depth } = self;
        let mut entries = Vec::new();
        while let Some(pair) = seq.next_element_seed(Items { context, depth })? {
            match <[Value; 2]>::try_from(pair) {
                Ok([key, value]) => entries.push((key, value)),
                Err(_) => return Err(context.fail(bad("an entry that is no pair"))),
            }
        }
        // What has string keys alone is an object: one way to write each value.
        if entries.iter().all(is_plain_entry) {
            return Err(A::Error::custom("a map with string keys under $m"));
        }
        Ok(entries)
    }
}

/// A string, borrowed from the JSON where it has no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl Key<'_> {
    /// The tag, if this is one.
    fn tag(&self) -> Option<&str> {
        self.0.strip_prefix('$').filter(|rest| !rest.starts_with('$'))
    }
}
