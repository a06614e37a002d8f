//! Values to JSON.

use std::fmt::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use rung::{Map, Object, Path, Reason, Refusal, RungId, Step, Unsendable, Value, limits};

use super::{Splice, has_plain_keys};

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
            Value::Int(number) => self.out.push_str(itoa::Buffer::new().format(*number)),
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
            Value::Set(items) => {
                if !Value::are_distinct(items) {
                    let detail = "a set with an item twice, or a tensor in one";
                    return Err(refused(value, path, Refusal::new(Reason::OtherKind, detail)));
                }
                self.tagged_list("s", items, path, depth)?;
            }
            Value::Map(map) => self.map(map, path, depth)?,
            Value::Object(object) => self.object(object, path, depth)?,
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
        if has_plain_keys(map) {
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
        if map.iter().any(|(key, _)| key.has_tensor()) {
            let refusal = Refusal::new(Reason::OtherKind, "a map with a tensor in a key");
            return Err(Unsendable {
                path: path.to_string(),
                kind: "map".into(),
                refusals: vec![(RungId::INLINE, refusal)],
            });
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

    fn object(&mut self, object: &Object, path: &Path<'_>, depth: usize) -> Result<(), Unsendable> {
        self.out.push_str("{\"$o\":[");
        self.string("", object.tag());
        self.print(format_args!(",{},", object.version()));
        self.value(object.schema(), &path.then(Step::Key("schema")), depth + 1)?;
        for (index, part) in object.parts().iter().enumerate() {
            self.out.push(',');
            self.value(part, &path.then(Step::Index(index)), depth + 1)?;
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
