//! Pickles as a rung: what no higher rung takes, in one block.
//!
//! | what | how it goes | what arrives |
//! |---|---|---|
//! | a large subtree without tensors | [pickled](dump) by the rung | the subtree |
//! | a value of any `serde` type | [`to_pickle`] | [`OpaquePickle`]: the type, with [`from_pickle`] |
//! | a pickle from Python | [`load`]ed: plain data become a value, the rest stays shut | as it was sent |
//!
//! ```
//! use rung::Value;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! struct Settings {
//!     name: String,
//!     weights: Vec<f32>,
//! }
//!
//! let settings = Settings { name: "fine".into(), weights: vec![0.5; 3] };
//! let pickle = tier_pickle::to_pickle(&settings)?;
//! // Sent, held, forwarded; and at last, where the type is known:
//! assert_eq!(tier_pickle::from_pickle::<Settings>(&pickle)?, settings);
//! # Ok::<(), rung::Refusal>(())
//! ```
//!
//! # What is opened, and what is not
//!
//! A pickle is a program for a machine that may call anything. The machine here has no such instruction:
//! it builds the plain data of the language (None, booleans, integers, floats, strings, bytes, lists,
//! tuples, sets, dictionaries), of every protocol, and knows just the two calls that older protocols need
//! for bytes and sets. A class, any other call, a persistent id, an extension code or an out-of-band
//! buffer leaves the whole pickle as it is: [`Reason::NotPlain`]. So do kinds that [`Value`] does not keep
//! apart: `bytearray`, `frozenset`, `complex`. What is cut, too large or nested too deeply is refused.
//!
//! # What it does not do
//!
//! It opens no tensor or array that was pickled; they stay shut. Send them as what they are.

mod machine;
mod ops;
mod writer;

use std::sync::Arc;

use bytes::Bytes;
use rung::{
    Fault, Fill, Form, Leaf, Lowered, Meta, Offer, OpaquePickle, Reason, Refusal, Room, Rung,
    RungId, Session, Storage, Tensor, Trust, Value, limits,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use writer::dump;

/// The version of what this rung writes.
const FORMAT: u32 = 1;

/// Pickles any value that `serde` can serialize.
///
/// As serde-pickle writes it (a struct is a dictionary, a variant its name or a dictionary of one entry), with
/// integers of any size.
///
/// # Errors
///
/// [`Reason::OtherKind`] for what a pickle has no words for, memory of a tensor above all, or what its
/// `Serialize` answers; [`Reason::TooDeep`].
pub fn to_pickle<T: Serialize + ?Sized>(value: &T) -> Result<OpaquePickle, Refusal> {
    let value = rung::to_value(value);
    let value = value.map_err(|error| Refusal::new(Reason::OtherKind, error.to_string()))?;
    dump(&value).map(OpaquePickle::new)
}

/// Opens a pickle as a type, whoever pickled it.
///
/// # Errors
///
/// As [`open`]; [`Reason::BadMetadata`] where the data are not that type's.
pub fn from_pickle<T: DeserializeOwned>(pickle: &OpaquePickle) -> Result<T, Refusal> {
    let value = open(pickle)?;
    rung::from_value(value).map_err(|error| Refusal::new(Reason::BadMetadata, error.to_string()))
}

/// Opens a pickle that holds plain data.
///
/// # Errors
///
/// [`Reason::NotPlain`] and [`Reason::Recursive`] for what can be held and forwarded, but not opened;
/// [`Reason::TooDeep`], [`Reason::TooLarge`] and [`Reason::BadMetadata`] for what should not be; or a
/// refusal where its memory cannot be read.
pub fn open(pickle: &OpaquePickle) -> Result<Value, Refusal> {
    open_within(pickle, &mut Room::of(pickle.stream().byte_count()))
}

fn open_within(pickle: &OpaquePickle, room: &mut Room) -> Result<Value, Refusal> {
    if !pickle.buffers().is_empty() {
        return Err(Refusal::new(Reason::NotPlain, "buffers outside of the stream"));
    }
    room.read(pickle.stream().byte_count())?;
    machine::run(&pickle.bytes()?, room)
}

/// A pickle's bytes as a value: opened where they are plain data, and otherwise held as they are.
///
/// # Errors
///
/// [`Reason::TooDeep`], [`Reason::TooLarge`] and [`Reason::BadMetadata`].
pub fn load(bytes: impl Into<Bytes>) -> Result<Value, Refusal> {
    let bytes = bytes.into();
    match machine::run(&bytes, &mut Room::of(bytes.len())) {
        Err(refusal) if matches!(refusal.reason(), Reason::NotPlain | Reason::Recursive) => {
            Ok(OpaquePickle::new(bytes).into())
        }
        opened => opened,
    }
}

/// The rung.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pickle;

impl Rung for Pickle {
    fn id(&self) -> RungId {
        RungId::PICKLE
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        Ok(Offer::of_version(self.id(), FORMAT)?)
    }

    fn open(&self, _mine: &Offer, peer: &Offer, _trust: Trust) -> Result<Session, Refusal> {
        peer.expect_version("format", FORMAT)?;
        Ok(Session::Form(Box::new(PickleForm)))
    }
}

/// A subtree that was pickled for the way.
const VALUE: &str = "v";

/// A pickle that somebody else made: the stream, then the buffers.
const SHUT: &str = "o";

#[derive(Debug)]
struct PickleForm;

impl Form for PickleForm {
    fn lower(&self, leaf: Leaf<'_>) -> Result<Lowered, Refusal> {
        match leaf {
            Leaf::Plain(value) => {
                let view = Tensor::all_bytes(Arc::new(Storage::from_bytes(dump(value)?)));
                Ok(Lowered { meta: Meta::write(&VALUE)?, views: vec![view] })
            }
            Leaf::Pickle(pickle) => {
                let mut views = vec![pickle.stream().clone()];
                views.extend(pickle.buffers().iter().cloned());
                Ok(Lowered { meta: Meta::write(&SHUT)?, views })
            }
            _ => Err(Reason::OtherKind.into()),
        }
    }

    /// More plain data than stays in the JSON, and a pickle that nobody opens.
    fn specimens(&self, random: Fill<'_>) -> Result<Vec<Value>, Refusal> {
        let mut bits = [0; 16];
        random(&mut bits);
        let integer = i128::from_le_bytes(bits);
        let double = f64::from_bits(integer as u64);
        let mut items = vec![
            Value::from(integer),
            Value::from(integer as i64),
            Value::tuple([Value::from(double), Value::from(-0.0), Value::Null]),
            Value::map([(Value::from(true), Value::set([1, 2])), (Value::from("é"), 3.into())]),
        ];
        // As long as stays in the JSON alone, and together too much for it.
        let enough = limits::INLINE_SUBTREE / limits::INLINE_TEXT;
        for _ in 0..enough {
            let mut bytes = vec![0; limits::INLINE_TEXT];
            random(&mut bytes);
            items.push(Value::bytes(bytes));
        }
        let mut text = vec![0; 500];
        random(&mut text);
        items.push(Value::from(text.iter().map(|byte| char::from(*byte)).collect::<String>()));
        let mut shut = vec![0; 1000];
        random(&mut shut);
        let buffer = Tensor::all_bytes(Arc::new(Storage::from_bytes(shut.clone())));
        let shut = OpaquePickle::new(shut).with_buffers(vec![buffer])?;
        Ok(vec![Value::List(items), shut.into()])
    }

    fn raise(&self, lowered: Lowered, room: &mut Room) -> Result<Value, Fault> {
        let Lowered { meta, views } = lowered;
        let mut views = views.into_iter();
        let stream =
            views.next().ok_or_else(|| Fault::new(Reason::BadMetadata, "a pickle of no views"))?;
        let pickle = OpaquePickle::from_tensors(stream, views.collect())?;
        match meta.read::<String>()?.as_str() {
            SHUT => Ok(pickle.into()),
            VALUE => Ok(open_within(&pickle, room)?),
            other => {
                let shown: String = other.chars().take(16).collect();
                Err(Fault::new(Reason::BadMetadata, format!("a pickle that is {shown:?}")))
            }
        }
    }
}
