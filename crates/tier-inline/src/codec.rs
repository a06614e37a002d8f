//! Values as JSON, exactly, in both directions.
//!
//! # The grammar
//!
//! | value | JSON |
//! |---|---|
//! | null, true, false, a list, a string | themselves |
//! | an integer of 64 bits, signed or not | a number without `.` or `e` |
//! | an integer past them | `{"$i":"<decimal digits>"}` |
//! | a finite float | a number with `.` or `e`: the shortest that reads back the same bits |
//! | another float | `{"$f":"<16 hex digits: its bits>"}` |
//! | bytes | `{"$b":"<base64>"}` |
//! | a tuple, a set | `{"$t":[…]}`, `{"$s":[…]}` |
//! | a map with string keys | an object; a key that begins with `$` gets another `$` before it |
//! | a map with any other key | `{"$m":[[key,value],…]}` |
//! | what a rung moves | `{"$<letter>":…}`, written by a [`Splice`], read by an [`Unsplice`] |
//!
//! So an object whose first key begins with one `$` is a tag, has no second key, and can never be
//! user data. A reader in another language must write integers past 64 bits as `$i`: a JSON number
//! that large would be read as a float here.
//!
//! Depth counts values, not brackets: 128 at most, on both sides.

use std::borrow::Cow;
use std::fmt::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use rung::{Fault, Map, Path, Reason, Refusal, RungId, Step, Unsendable, Value, limits};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Writes what the codec does not: tensors, and whatever else rides a rung.
pub trait Splice {
    /// Asked at every value before the codec looks into it; writes the value and answers `true`, or
    /// leaves it to the codec with `false`.
    ///
    /// # Errors
    ///
    /// A leaf that no rung takes.
    fn splice(
        &mut self,
        value: &Value,
        path: &Path<'_>,
        out: &mut String,
    ) -> Result<bool, Unsendable>;
}

/// Reads what the codec does not.
pub trait Unsplice {
    /// Reads the content of a tag that the codec does not know, at this place of the value.
    ///
    /// # Errors
    ///
    /// [`Reason::UnknownTag`], or whatever is wrong with the content.
    fn unsplice(&mut self, tag: &str, content: &RawValue, node: Node) -> Result<Value, Fault>;
}

/// A place in a value that is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// Its number, counted from 0 as [`nodes`] counts.
    pub number: usize,
    /// Its depth, from 1.
    pub depth: usize,
}

/// How many values a value consists of: itself, its items, and of a map the values, with their keys
/// where [`has_plain_keys`] does not hold.
#[must_use]
pub fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            items.iter().map(nodes).sum()
        }
        Value::Map(map) if has_plain_keys(map) => map.iter().map(|(_, item)| nodes(item)).sum(),
        Value::Map(map) => map.iter().map(|(key, item)| nodes(key) + nodes(item)).sum(),
        _ => 0,
    }
}

/// Whether a map is an object in the JSON: its keys are strings, none of them long.
#[must_use]
pub fn has_plain_keys(map: &Map) -> bool {
    map.iter().all(is_plain_entry)
}

fn is_plain_entry((key, _): &(Value, Value)) -> bool {
    // A long key would be bulk in the JSON; as a value of its own it is treated like any string.
    key.as_str().is_some_and(|key| key.len() <= limits::INLINE_TEXT)
}

/// Splices nothing: plain values alone.
#[derive(Debug, Clone, Copy, Default)]
pub struct Plain;

impl Splice for Plain {
    fn splice(&mut self, _: &Value, _: &Path<'_>, _: &mut String) -> Result<bool, Unsendable> {
        Ok(false)
    }
}

impl Unsplice for Plain {
    fn unsplice(&mut self, tag: &str, _: &RawValue, _: Node) -> Result<Value, Fault> {
        Err(unknown_tag(tag))
    }
}

/// The fault for a tag that nobody knows.
#[must_use]
pub fn unknown_tag(tag: &str) -> Fault {
    let shown: String = tag.chars().take(16).collect();
    Fault::new(Reason::UnknownTag, format!("{shown:?}"))
}

/// Appends a value as JSON.
///
/// # Errors
///
/// The path to what is nested too deeply, too long for the JSON, or of a kind that neither the codec
/// nor the splice takes.
pub fn encode(value: &Value, out: &mut String, splice: &mut dyn Splice) -> Result<(), Unsendable> {
    Encoder { out, splice }.value(value, &Path::ROOT, 1)
}

struct Encoder<'a> {
    out: &'a mut String,
    splice: &'a mut dyn Splice,
}

impl Encoder<'_> {
    fn value(&mut self, value: &Value, path: &Path<'_>, depth: usize) -> Result<(), Unsendable> {
        if depth > limits::VALUE_DEPTH {
            return Err(refused(
                value,
                path,
                Refusal::new(Reason::TooDeep, format!("at most {}", limits::VALUE_DEPTH)),
            ));
        }
        if self.splice.splice(value, path, self.out)? {
            return Ok(());
        }
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(true) => self.out.push_str("true"),
            Value::Bool(false) => self.out.push_str("false"),
            Value::Int(number) => self.print(format_args!("{number}")),
            Value::BigInt(number) => {
                // Unsigned 64-bit integers are plain numbers too.
                if number.as_str().parse::<u64>().is_ok() {
                    self.out.push_str(number.as_str());
                } else {
                    self.print(format_args!("{{\"$i\":\"{}\"}}", number.as_str()));
                }
            }
            // `Debug` is the shortest decimal that reads back the same, always with `.` or `e`.
            Value::Float(number) if number.is_finite() => self.print(format_args!("{number:?}")),
            Value::Float(number) => {
                self.print(format_args!("{{\"$f\":\"{:016x}\"}}", number.to_bits()));
            }
            Value::Str(text) => {
                short_enough(value, path, text.len())?;
                self.string("", text);
            }
            Value::Bytes(bytes) => {
                short_enough(value, path, bytes.len())?;
                self.out.push_str("{\"$b\":\"");
                BASE64.encode_string(bytes, self.out);
                self.out.push_str("\"}");
            }
            Value::List(items) => self.list(items, path, depth)?,
            Value::Tuple(items) => self.tagged_list("t", items, path, depth)?,
            Value::Set(items) => self.tagged_list("s", items, path, depth)?,
            Value::Map(map) => self.map(map, path, depth)?,
            other => return Err(refused(other, path, Reason::OtherKind.into())),
        }
        Ok(())
    }

    fn list(&mut self, items: &[Value], path: &Path<'_>, depth: usize) -> Result<(), Unsendable> {
        self.out.push('[');
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push(',');
            }
            self.value(item, &path.then(Step::Index(index)), depth + 1)?;
        }
        self.out.push(']');
        Ok(())
    }

    fn tagged_list(
        &mut self,
        tag: &str,
        items: &[Value],
        path: &Path<'_>,
        depth: usize,
    ) -> Result<(), Unsendable> {
        self.print(format_args!("{{\"${tag}\":"));
        self.list(items, path, depth)?;
        self.out.push('}');
        Ok(())
    }

    fn map(&mut self, map: &Map, path: &Path<'_>, depth: usize) -> Result<(), Unsendable> {
        // Long keys would be bulk in the JSON; as values they are refused like any string.
        let is_plain = |(key, _): &(Value, Value)| {
            key.as_str().is_some_and(|k| k.len() <= limits::INLINE_TEXT)
        };
        if map.iter().all(is_plain) {
            self.out.push('{');
            for (index, (key, value)) in map.iter().enumerate() {
                let Value::Str(key) = key else { continue };
                if index > 0 {
                    self.out.push(',');
                }
                self.string(if key.starts_with('$') { "$" } else { "" }, key);
                self.out.push(':');
                self.value(value, &path.then(Step::Key(key)), depth + 1)?;
            }
            self.out.push('}');
            return Ok(());
        }
        self.out.push_str("{\"$m\":[");
        for (index, (key, value)) in map.iter().enumerate() {
            self.out.push_str(if index > 0 { ",[" } else { "[" });
            let entry = path.then(Step::of_entry(key, index));
            self.value(key, &entry, depth + 1)?;
            self.out.push(',');
            self.value(value, &entry, depth + 1)?;
            self.out.push(']');
        }
        self.out.push_str("]}");
        Ok(())
    }

    fn string(&mut self, before: &str, text: &str) {
        let plain = |byte: u8| byte >= 0x20 && byte != b'"' && byte != b'\\';
        self.out.push('"');
        self.out.push_str(before);
        if text.bytes().all(plain) {
            self.out.push_str(text);
        } else {
            let escaped = serde_json::Value::from(text).to_string();
            self.out.push_str(&escaped[1..escaped.len() - 1]);
        }
        self.out.push('"');
    }

    fn print(&mut self, text: fmt::Arguments<'_>) {
        // Writing to a String does not fail.
        let _ = self.out.write_fmt(text);
    }
}

fn short_enough(value: &Value, path: &Path<'_>, len: usize) -> Result<(), Unsendable> {
    if len <= limits::INLINE_TEXT {
        return Ok(());
    }
    let detail = format!("{len} bytes, at most {}", limits::INLINE_TEXT);
    Err(refused(value, path, Refusal::new(Reason::TooLarge, detail)))
}

fn refused(value: &Value, path: &Path<'_>, refusal: Refusal) -> Unsendable {
    Unsendable {
        path: path.to_string(),
        kind: value.kind().to_owned(),
        refusals: vec![(RungId::INLINE, refusal)],
    }
}

/// Reads a value from JSON: exactly what [`encode`] writes, or a fault.
///
/// # Errors
///
/// [`Reason::BadMetadata`] for what the grammar does not have, [`Reason::TooDeep`],
/// [`Reason::OverCap`], and whatever the [`Unsplice`] answers.
pub fn decode(json: &str, unsplice: &mut dyn Unsplice) -> Result<Value, Fault> {
    let mut context = Context { unsplice, fault: None, nodes: 0 };
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
    /// Values begun so far.
    nodes: usize,
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
            if key.len() > limits::INLINE_TEXT {
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
        .map_err(|_| context.fail(bad("a map with a key twice")))
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
            Value::try_set(items).map_err(|_| context.fail(bad("a set with an item twice")))
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
        other => {
            let content = map.next_value::<&RawValue>()?;
            let node = Node { number: context.nodes - 1, depth };
            let value = context.unsplice.unsplice(other, content, node);
            value.map_err(|fault| context.fail(fault))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn round(value: &Value) -> String {
        let mut json = String::new();
        encode(value, &mut json, &mut Plain).unwrap();
        assert_eq!(decode(&json, &mut Plain).unwrap(), *value, "{json}");
        json
    }

    #[test]
    fn each_kind_has_one_form() {
        for (value, json) in [
            (Value::Null, "null"),
            (Value::from(true), "true"),
            (Value::from(-1), "-1"),
            (Value::from(u64::MAX), "18446744073709551615"),
            (Value::from(i128::MIN), r#"{"$i":"-170141183460469231731687303715884105728"}"#),
            (Value::from(1.0), "1.0"),
            (Value::from(-0.0), "-0.0"),
            (Value::from(1e300), "1e300"),
            (Value::from(5e-324), "5e-324"),
            (Value::from(f64::NEG_INFINITY), r#"{"$f":"fff0000000000000"}"#),
            (Value::from(f64::from_bits(0x7ff0_0000_0000_0001)), r#"{"$f":"7ff0000000000001"}"#),
            (Value::from("a\"\n\u{0}é"), "\"a\\\"\\n\\u0000é\""),
            (Value::bytes(vec![0u8, 255]), r#"{"$b":"AP8="}"#),
            (Value::tuple([1]), r#"{"$t":[1]}"#),
            (Value::set([1]), r#"{"$s":[1]}"#),
            (Value::Map(Map::new()), "{}"),
            (Value::map([("$t", 1), ("$$", 2), ("a", 3)]), r#"{"$$t":1,"$$$":2,"a":3}"#),
            (Value::map([(7, "x")]), r#"{"$m":[[7,"x"]]}"#),
        ] {
            assert_eq!(round(&value), json);
        }
    }

    #[test]
    fn what_the_grammar_does_not_have_is_a_fault() {
        for json in [
            "",
            "nul",
            "[1",
            "[1]]",
            "{\"$t\":1}",
            "{\"$t\":[],\"a\":1}",
            "{\"a\":1,\"$t\":[]}",
            "{\"$f\":\"3ff0000000000000\"}",
            "{\"$f\":\"7FF0000000000000\"}",
            "{\"$f\":\"+ff000000000000\"}",
            "{\"$i\":\"12\"}",
            "{\"$i\":\"18446744073709551615\"}",
            "{\"$i\":\"1e9\"}",
            "{\"$b\":\"?\"}",
            "{\"$s\":[1,1]}",
            "{\"a\":1,\"a\":2}",
            "{\"$m\":[[1]]}",
            "{\"$m\":[[\"a\",1]]}",
            "{\"$m\":[[1,2],[1,3]]}",
            "{\"$\":1}",
            "1 2",
        ] {
            let fault = decode(json, &mut Plain).unwrap_err();
            let known = matches!(fault.reason(), Reason::BadMetadata | Reason::UnknownTag);
            assert!(known, "{json}: {fault}");
        }
        let fault = decode("{\"$T\":{}}", &mut Plain).unwrap_err();
        assert_eq!(fault.reason(), Reason::UnknownTag);
    }

    #[test]
    fn depth_is_counted_in_values_on_both_sides() {
        let nest = |levels: usize| {
            (1..levels).fold(Value::Null, |inner, _| Value::map([(Value::Int(1), inner)]))
        };
        round(&nest(limits::VALUE_DEPTH));
        let unsendable =
            encode(&nest(limits::VALUE_DEPTH + 1), &mut String::new(), &mut Plain).unwrap_err();
        assert_eq!(unsendable.refusals[0].1.reason(), Reason::TooDeep);
        assert!(unsendable.path.starts_with("$[0][0]"));
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(decode(&deep, &mut Plain).unwrap_err().reason(), Reason::TooDeep);
    }

    #[test]
    fn long_text_is_refused_by_path() {
        let long = "x".repeat(limits::INLINE_TEXT + 1);
        let value = Value::map([("notes", Value::list(["short", long.as_str()]))]);
        let unsendable = encode(&value, &mut String::new(), &mut Plain).unwrap_err();
        assert_eq!(unsendable.path, "$.notes[1]");
        assert_eq!(unsendable.refusals[0].1.reason(), Reason::TooLarge);
        let json = format!("\"{long}\"");
        assert_eq!(decode(&json, &mut Plain).unwrap_err().reason(), Reason::OverCap);
    }
}
