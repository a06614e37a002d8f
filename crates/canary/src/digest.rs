//! A digest of what a value says, whatever its strides and wherever its memory is.
//!
//! The SHA-256 of these bytes, item by item (numbers in decimal, `;` after each):
//!
//! ```text
//! null          n
//! bool          b0 or b1
//! integer       i<decimal>;
//! float         f<its 64 bits, little-endian>
//! text, bytes   s<bytes>;<UTF-8>        y<bytes>;<bytes>
//! list, tuple   l<items>;<each item>    t<items>;<each item>
//! set, map      e<items>;<each item>    m<entries>;<key and item of each>
//! tensor        T<dtype>;<rank>;<each extent>;<contents>
//! array         A<type, as JSON>;<rank>;<each extent>;<contents>
//! pickle        P<views>;<bytes of each>;<contents of each>
//! object        o<bytes of the tag>;<tag><version>;<schema><parts>;<each part>
//! contents      the CRC-32 of each 4,096 bytes of the elements, little-endian in C order, as 4 bytes
//!               little-endian; the last of what is left, if anything is
//! ```
//!
//! Both are in the standard library of every language (Python: `hashlib.sha256`, `zlib.crc32`), and the CRCs
//! run at the speed of memory, so that a gigabyte can go with its digest too. A changed byte, or four in a row,
//! is always seen; anything else that happens to a block slips through once in four thousand million times,
//! and what happens to a thousand blocks never does.

use std::fmt;

use rung::{Array, Meta, Reason, Refusal, Tensor, Value};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A SHA-256; in hexadecimal where it is written.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Digest {
    type Err = Refusal;

    fn from_str(text: &str) -> Result<Self, Refusal> {
        let bad = || Refusal::new(Reason::BadMetadata, "no digest");
        let nibble = |digit: u8| char::from(digit).to_digit(16).ok_or_else(bad);
        let mut digest = [0; 32];
        if text.len() != 2 * digest.len() {
            return Err(bad());
        }
        for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = u8::try_from(nibble(pair[0])? << 4 | nibble(pair[1])?).map_err(|_| bad())?;
        }
        Ok(Self(digest))
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What the receiver of a canary answers with.
///
/// # Errors
///
/// A refusal where memory cannot be read, or the value has something in it that this version does not know.
pub fn answer(value: &Value) -> Result<Digest, Refusal> {
    let mut hash = Sha256::new();
    feed(&mut hash, value)?;
    Ok(Digest(hash.finalize().into()))
}

/// Of the elements of a tensor alone, in C order: what a leaf's digest on the wire is.
///
/// # Errors
///
/// A refusal where the memory cannot be read.
pub fn of_elements(tensor: &Tensor) -> Result<Digest, Refusal> {
    let mut hash = Sha256::new();
    elements(&mut hash, tensor)?;
    Ok(Digest(hash.finalize().into()))
}

/// Of bytes, as of the elements of a tensor that has them.
#[must_use]
pub fn of_bytes(bytes: &[u8]) -> Digest {
    let mut hash = Sha256::new();
    contents(&mut hash, bytes);
    Digest(hash.finalize().into())
}

fn number(hash: &mut Sha256, number: impl fmt::Display) {
    hash.update(format!("{number};"));
}

/// Bytes that have a CRC of their own.
const BLOCK: usize = 4096;

/// Contents that come in pieces of any length.
struct Blocks<'a> {
    hash: &'a mut Sha256,
    /// Of a block that is not whole yet.
    part: Vec<u8>,
}

impl Blocks<'_> {
    fn block(&mut self, block: &[u8]) {
        self.hash.update(crc32fast::hash(block).to_le_bytes());
    }

    fn update(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            if self.part.is_empty() && piece.len() >= BLOCK {
                let (block, rest) = piece.split_at(BLOCK);
                self.block(block);
                piece = rest;
                continue;
            }
            let (some, rest) = piece.split_at(piece.len().min(BLOCK - self.part.len()));
            self.part.extend_from_slice(some);
            piece = rest;
            if self.part.len() == BLOCK {
                self.end();
            }
        }
    }

    fn end(&mut self) {
        let part = std::mem::take(&mut self.part);
        if !part.is_empty() {
            self.block(&part);
        }
        // Its memory is used again.
        self.part = part;
        self.part.clear();
    }
}

fn contents(hash: &mut Sha256, bytes: &[u8]) {
    let mut blocks = Blocks { hash, part: Vec::new() };
    blocks.update(bytes);
    blocks.end();
}

fn elements(hash: &mut Sha256, tensor: &Tensor) -> Result<(), Refusal> {
    if tensor.count() == 0 {
        return Ok(());
    }
    let mut blocks = Blocks { hash, part: Vec::new() };
    tensor.for_each_piece(&mut |piece| {
        blocks.update(piece);
        Ok(())
    })?;
    blocks.end();
    Ok(())
}

fn shape(hash: &mut Sha256, shape: &[usize]) {
    number(hash, shape.len());
    shape.iter().for_each(|extent| number(hash, extent));
}

fn array(hash: &mut Sha256, array: &Array) -> Result<(), Refusal> {
    let descr = Meta::write(array.descr())?;
    hash.update("A");
    number(hash, descr.as_json());
    shape(hash, array.shape());
    elements(hash, array.cells())
}

fn feed(hash: &mut Sha256, value: &Value) -> Result<(), Refusal> {
    match value {
        Value::Null => hash.update("n"),
        Value::Bool(truth) => hash.update(if *truth { "b1" } else { "b0" }),
        Value::Int(integer) => hash.update(format!("i{integer};")),
        Value::BigInt(integer) => hash.update(format!("i{};", integer.as_str())),
        Value::Float(float) => {
            hash.update("f");
            hash.update(float.to_bits().to_le_bytes());
        }
        Value::Str(text) => {
            hash.update("s");
            number(hash, text.len());
            hash.update(text);
        }
        Value::Bytes(bytes) => {
            hash.update("y");
            number(hash, bytes.len());
            hash.update(bytes);
        }
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            hash.update(match value {
                Value::List(_) => "l",
                Value::Tuple(_) => "t",
                _ => "e",
            });
            number(hash, items.len());
            items.iter().try_for_each(|item| feed(hash, item))?;
        }
        Value::Map(map) => {
            hash.update("m");
            number(hash, map.iter().len());
            for (key, item) in map.iter() {
                feed(hash, key)?;
                feed(hash, item)?;
            }
        }
        Value::Tensor(tensor) => {
            hash.update("T");
            number(hash, tensor.dtype());
            shape(hash, tensor.shape());
            elements(hash, tensor)?;
        }
        Value::Array(of) => array(hash, of)?,
        Value::Pickle(pickle) => {
            hash.update("P");
            let views = || std::iter::once(pickle.stream()).chain(pickle.buffers());
            number(hash, views().count());
            views().for_each(|view| number(hash, view.byte_count()));
            views().try_for_each(|view| elements(hash, view))?;
        }
        Value::Object(object) => {
            hash.update("o");
            number(hash, object.tag().len());
            hash.update(object.tag());
            number(hash, object.version());
            feed(hash, object.schema())?;
            number(hash, object.parts().len());
            object.parts().iter().try_for_each(|part| feed(hash, part))?;
        }
        other => {
            return Err(Refusal::new(Reason::OtherKind, format!("a {}", other.kind())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_value_says_is_pinned() {
        // hashlib.sha256(b"l3;ni-7;Tu8;2;2;2;" + zlib.crc32(b"\0\2\1\3").to_bytes(4, "little"))
        let tensor =
            Tensor::from_vec(vec![0u8, 1, 2, 3], &[2, 2]).unwrap().permute(&[1, 0]).unwrap();
        let value = Value::List(vec![Value::Null, Value::from(-7), tensor.into()]);
        let pinned = "a97c19216006a281ca4509eb2314da7ee5ff3df78917ccabfceccba39b6502ed";
        assert_eq!(answer(&value).unwrap().to_string(), pinned);
        // 10,000 bytes 0 … 250, 0 …: three blocks.
        let bytes: Vec<u8> = (0..10_000u32).map(|n| (n % 251) as u8).collect();
        let pinned = "46b837c67f4caeff40477985bdfe49d22aa883c6eaa4a22c29f6aa7b158e2ae9";
        assert_eq!(of_bytes(&bytes).to_string(), pinned);
        let tensor = Tensor::from_vec(bytes, &[10_000]).unwrap();
        assert_eq!(of_elements(&tensor).unwrap().to_string(), pinned);
    }

    #[test]
    fn pieces_of_any_length_are_the_same_contents() {
        let bytes: Vec<u8> = (0..20_000u32).map(|n| (n * 7 % 253) as u8).collect();
        for length in [1, 3, 4095, 4096, 4097, 9000] {
            let mut hash = Sha256::new();
            let mut blocks = Blocks { hash: &mut hash, part: Vec::new() };
            bytes.chunks(length).for_each(|piece| blocks.update(piece));
            blocks.end();
            assert_eq!(Digest(hash.finalize().into()), of_bytes(&bytes), "{length}");
        }
    }

    #[test]
    fn strides_do_not_matter_and_everything_else_does() {
        let tensor = Tensor::from_vec((0..60u16).collect(), &[3, 4, 5]).unwrap();
        let turned = tensor.permute(&[2, 0, 1]).unwrap();
        let straight =
            Tensor::from_bytes(turned.to_bytes().unwrap(), turned.dtype(), turned.shape());
        let digest = |value: Value| answer(&value).unwrap();
        assert_eq!(digest(turned.clone().into()), digest(straight.unwrap().into()));
        let different = [
            Value::from(tensor.clone()),
            turned.clone().into(),
            tensor.flip(0).unwrap().into(),
            Value::list([tensor.clone()]),
            Value::tuple([tensor]),
            Value::Null,
            Value::from(""),
            Value::bytes(Vec::new()),
            Value::from(0),
            Value::from(0.0),
            Value::from(-0.0),
            Value::list([Value::from("ab"), Value::from("c")]),
            Value::list([Value::from("a"), Value::from("bc")]),
        ];
        let digests: std::collections::HashSet<Digest> =
            different.iter().map(|value| answer(value).unwrap()).collect();
        assert_eq!(digests.len(), different.len());
    }

    #[test]
    fn a_digest_reads_back() {
        let digest = of_bytes(b"abc");
        let text = &digest.to_string();
        assert_eq!(text.parse(), Ok(digest));
        for bad in ["", &text[1..], &format!("g{}", &text[1..]), &format!("é{}", &text[2..])] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
