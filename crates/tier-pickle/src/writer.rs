//! Plain values as pickles, in protocol 4: the first with a set.

use rung::{Reason, Refusal, Value, limits};

/// Items between a mark and what takes them, as Python writes them.
const BATCH: usize = 1000;

/// Pickles a plain value, exactly: what [`open`](crate::open) reads is equal to it, and Python's
/// `pickle.loads` reads the same (where keys and set items are what Python can hash).
///
/// # Errors
///
/// [`Reason::OtherKind`] for tensors and whatever else is memory, and for a set with an item twice;
/// [`Reason::TooDeep`]; [`Reason::TooLarge`] past 16 million values.
pub fn dump(value: &Value) -> Result<Vec<u8>, Refusal> {
    let mut writer = Writer { out: vec![0x80, 4], nodes: 0 };
    writer.value(value, 1)?;
    writer.out.push(b'.');
    Ok(writer.out)
}

struct Writer {
    out: Vec<u8>,
    nodes: usize,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Refusal> {
        if depth > limits::VALUE_DEPTH {
            return Err(Refusal::new(Reason::TooDeep, format!("at most {}", limits::VALUE_DEPTH)));
        }
        self.nodes += 1;
        if self.nodes > limits::PICKLE_NODES {
            let detail = format!("over {} values", limits::PICKLE_NODES);
            return Err(Refusal::new(Reason::TooLarge, detail));
        }
        match value {
            Value::Null => self.out.push(b'N'),
            Value::Bool(truth) => self.out.push(if *truth { 0x88 } else { 0x89 }),
            Value::Int(number) => self.int(*number),
            Value::BigInt(number) => {
                self.out.push(b'L');
                self.out.extend(number.as_str().bytes());
                self.out.extend(b"L\n");
            }
            Value::Float(number) => {
                self.out.push(b'G');
                self.out.extend(number.to_be_bytes());
            }
            Value::Str(text) => self.counted(text.as_bytes(), [0x8c, b'X', 0x8d]),
            Value::Bytes(bytes) => self.counted(bytes, [b'C', b'B', 0x8e]),
            Value::List(items) => {
                self.out.push(b']');
                self.items(items, b'e', depth)?;
            }
            Value::Tuple(items) => {
                self.out.push(b'(');
                for item in items {
                    self.value(item, depth + 1)?;
                }
                self.out.push(b't');
            }
            Value::Set(items) => {
                if !Value::are_distinct(items) {
                    let detail = "a set with an item twice, or a tensor in one";
                    return Err(Refusal::new(Reason::OtherKind, detail));
                }
                self.out.push(0x8f);
                self.items(items, 0x90, depth)?;
            }
            Value::Map(map) => {
                self.out.push(b'}');
                let entries: Vec<&(Value, Value)> = map.iter().collect();
                for batch in entries.chunks(BATCH) {
                    self.out.push(b'(');
                    for (key, value) in batch {
                        self.value(key, depth + 1)?;
                        self.value(value, depth + 1)?;
                    }
                    self.out.push(b'u');
                }
            }
            other => {
                return Err(Refusal::new(Reason::OtherKind, format!("a {} in it", other.kind())));
            }
        }
        Ok(())
    }

    fn items(&mut self, items: &[Value], close: u8, depth: usize) -> Result<(), Refusal> {
        for batch in items.chunks(BATCH) {
            self.out.push(b'(');
            for item in batch {
                self.value(item, depth + 1)?;
            }
            self.out.push(close);
        }
        Ok(())
    }

    fn int(&mut self, number: i64) {
        if let Ok(small) = u8::try_from(number) {
            self.out.extend([b'K', small]);
        } else if let Ok(middle) = i32::try_from(number) {
            self.out.push(b'J');
            self.out.extend(middle.to_le_bytes());
        } else {
            self.out.extend([0x8a, 8]);
            self.out.extend(number.to_le_bytes());
        }
    }

    fn counted(&mut self, bytes: &[u8], [one, four, eight]: [u8; 3]) {
        if let Ok(len) = u8::try_from(bytes.len()) {
            self.out.extend([one, len]);
        } else if let Ok(len) = u32::try_from(bytes.len()) {
            self.out.push(four);
            self.out.extend(len.to_le_bytes());
        } else {
            self.out.push(eight);
            self.out.extend((bytes.len() as u64).to_le_bytes());
        }
        self.out.extend(bytes);
    }
}
