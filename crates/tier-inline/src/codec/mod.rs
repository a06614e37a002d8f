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
//! | a map with string keys of up to 128 bytes | an object; a key that begins with `$` gets another `$` before it |
//! | a map with any other key | `{"$m":[[key,value],…]}` |
//! | an object | `{"$o":["<tag>",<version>,<schema>,<part>,…]}` |
//! | what a rung moves | `{"$<letter>":…}`, written by a [`Splice`], read by an [`Unsplice`] |
//!
//! So an object whose first key begins with one `$` is a tag, has no second key, and can never be
//! user data. A reader in another language must write integers past 64 bits as `$i`: a JSON number
//! that large would be read as a float here.
//!
//! Depth counts values, not brackets: 128 at most, on both sides.

mod decode;
mod encode;

use rung::{Fault, Map, Path, Reason, Unsendable, Value, limits};
use serde_json::value::RawValue;

pub use decode::decode;
pub use encode::encode;

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
/// where [`has_plain_keys`] does not hold; of an object its schema and its parts.
#[must_use]
pub fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            items.iter().map(nodes).sum()
        }
        Value::Map(map) if has_plain_keys(map) => map.iter().map(|(_, item)| nodes(item)).sum(),
        Value::Map(map) => map.iter().map(|(key, item)| nodes(key) + nodes(item)).sum(),
        Value::Object(object) => {
            nodes(object.schema()) + object.parts().iter().map(nodes).sum::<usize>()
        }
        _ => 0,
    }
}

/// Whether a map is an object in the JSON: its keys are strings of 128 bytes at most.
#[must_use]
pub fn has_plain_keys(map: &Map) -> bool {
    map.iter().all(is_plain_entry)
}

pub(crate) fn is_plain_entry((key, _): &(Value, Value)) -> bool {
    // A long key would be bulk in the JSON; as a value of its own it is treated like any string.
    key.as_str().is_some_and(|key| key.len() <= limits::INLINE_KEY)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn round(value: &Value) -> String {
        let mut json = String::new();
        encode(value, &mut json, &mut Plain).unwrap();
        assert_eq!(decode(&json, &mut Plain).unwrap(), *value, "{json}");
        json
    }

    fn object() -> Value {
        let parts = vec![Value::List(vec![]), Value::from("x")];
        rung::Object::new("mesh", 2, Value::map([("n", 1)]), parts).unwrap().into()
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
            (object(), r#"{"$o":["mesh",2,{"n":1},[],"x"]}"#),
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
            "{\"$o\":[]}",
            "{\"$o\":[\"a\",1]}",
            "{\"$o\":[\"\",1,null]}",
            "{\"$o\":[\"a\",-1,null]}",
            "{\"$o\":[\"a\",1.0,null]}",
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
