//! Values from and to any type that `serde` knows.
//!
//! A struct becomes a map, a tuple a tuple, a sequence a list, a variant its name or a map of one entry;
//! an option is what it holds, or null. A [`Tensor`], [`Array`], [`OpaquePickle`], [`Object`] or [`Value`]
//! inside of it is handed over as it is: its memory is shared, not copied.
//!
//! ```
//! use rung::{Tensor, from_value, to_value};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! struct Job {
//!     image: Tensor,
//!     radius: f32,
//! }
//!
//! let job = Job { image: Tensor::from_vec(vec![0u8; 12], &[2, 6])?, radius: 2.5 };
//! let value = to_value(&job)?;
//! assert_eq!(value.get("image").and_then(|image| image.as_tensor()), Some(&job.image));
//! assert_eq!(from_value::<Job>(value)?, job);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Any other serializer gets an error for them, not a number that means nothing elsewhere:
//!
//! ```
//! # let image = rung::Tensor::from_vec(vec![0u8; 12], &[2, 6])?;
//! let error = serde_json::to_string(&image).unwrap_err();
//! assert!(error.to_string().contains("only over a channel"));
//! # Ok::<(), rung::Refusal>(())
//! ```
//!
//! # How memory passes through `serde`
//!
//! `serde` hands primitives and containers to a serializer and nothing else. A tensor presents itself as a
//! newtype of a name that only this module knows; on that name, and for that moment alone, the serializer
//! of this module opens a slot of this thread, into which the tensor puts itself. The other way, a value's
//! place in a table of this thread passes through the deserializer, under a key that nobody else can know; it
//! survives being buffered, as `serde` does for flattened and untagged types.
//!
//! What `serde` buffers loses what it has no words for: in a flattened or untagged type, a tuple or set of a
//! [`Value`] comes back as a list, and an integer of 65 to 128 bits is an error.

mod de;
mod ser;

use std::cell::RefCell;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::array::Array;
use crate::object::Object;
use crate::pickle::OpaquePickle;
use crate::tensor::Tensor;
use crate::value::Value;

/// A type and a value that do not fit each other, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeError {
    text: String,
    /// From the innermost to the outermost.
    steps: Vec<String>,
}

impl BridgeError {
    fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), steps: Vec::new() }
    }

    fn under(mut self, key: &Value) -> Self {
        self.steps.push(match key.as_str() {
            Some(key) => format!(".{}", key.chars().take(64).collect::<String>()),
            None => format!("[{}]", key.kind()),
        });
        self
    }

    fn at(mut self, index: usize) -> Self {
        self.steps.push(format!("[{index}]"));
        self
    }

    /// Where in the value, as `$.images[3].meta`.
    #[must_use]
    pub fn path(&self) -> String {
        self.steps.iter().rev().fold("$".to_owned(), |path, step| path + step)
    }
}

impl fmt::Display for BridgeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", self.path(), self.text)
    }
}

impl std::error::Error for BridgeError {}

impl serde::ser::Error for BridgeError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::new(text.to_string())
    }
}

impl serde::de::Error for BridgeError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::new(text.to_string())
    }
}

/// A value of anything that can be serialized.
///
/// # Errors
///
/// What its `Serialize` answers, a map with a key twice, or nesting past the cap; with the path.
pub fn to_value<T: Serialize + ?Sized>(from: &T) -> Result<Value, BridgeError> {
    from.serialize(ser::ToValue { depth: 1 })
}

/// Anything that can be deserialized, from a value.
///
/// # Errors
///
/// What its `Deserialize` answers, with the path.
pub fn from_value<T: DeserializeOwned>(value: Value) -> Result<T, BridgeError> {
    let _session = Session::begin();
    T::deserialize(de::FromValue(value))
}

/// The name of the newtype that memory presents itself as.
const MEMORY: &str = "$rung::memory";

thread_local! {
    /// Open while the serializer of this module expects memory to put itself there.
    static SLOT: RefCell<Slot> = const { RefCell::new(Slot::Shut) };
    static TABLE: RefCell<Table> = const { RefCell::new(Table::NEW) };
}

enum Slot {
    Shut,
    Open,
    Filled(Value),
}

/// What passes through deserializers of this thread.
struct Table {
    sessions: usize,
    nonce: [u8; 16],
    values: Vec<Value>,
}

impl Table {
    const NEW: Self = Self { sessions: 0, nonce: [0; 16], values: Vec::new() };
}

/// While one lives, values may be [deposited](deposit) and [found](find).
struct Session;

impl Session {
    fn begin() -> Self {
        TABLE.with_borrow_mut(|table| {
            if table.sessions == 0 {
                // So that nothing in a message can name a place in the table.
                let random = RandomState::new();
                let (high, low) = (random.hash_one(0u8), random.hash_one(1u8));
                table.nonce = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
            }
            table.sessions += 1;
        });
        Self
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let gone = TABLE.with_borrow_mut(|table| {
            table.sessions -= 1;
            if table.sessions == 0 { std::mem::take(&mut table.values) } else { Vec::new() }
        });
        // Outside of the borrow: dropping memory may run anything.
        drop(gone);
    }
}

/// Keeps a value, and says where it is to be found: what this session alone knows, and a number.
fn deposit(value: Value) -> (Vec<u8>, u64) {
    TABLE.with_borrow_mut(|table| {
        table.values.push(value);
        (table.nonce.to_vec(), table.values.len() as u64 - 1)
    })
}

fn find(nonce: &[u8], at: i64) -> Option<Value> {
    TABLE.with_borrow(|table| {
        let known = table.sessions > 0 && nonce == table.nonce;
        // Not taken out: a type of several variants is tried more than once.
        table.values.get(usize::try_from(at).ok().filter(|_| known)?).cloned()
    })
}

/// Something that puts itself into the slot.
struct Handed<F>(F);

impl<F: Fn() -> Value> Serialize for Handed<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let open = SLOT.with_borrow(|slot| matches!(slot, Slot::Open));
        if !open {
            return Err(serde::ser::Error::custom(
                "memory goes by serde only over a channel; for a file, write .npy or .safetensors",
            ));
        }
        let value = (self.0)();
        SLOT.with_borrow_mut(|slot| *slot = Slot::Filled(value));
        serializer.serialize_unit()
    }
}

fn wrong<E: serde::de::Error>(wanted: &str, found: &Value) -> E {
    E::custom(format_args!("a {wanted} is wanted, and a {} is there", found.kind()))
}

macro_rules! memory {
    ($($type:ty = $variant:ident, $name:literal, $unboxed:expr;)*) => {
        $(impl Serialize for $type {
            /// # Errors
            ///
            /// From any serializer but that of a channel.
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_newtype_struct(MEMORY, &Handed(|| Value::from(self.clone())))
            }
        }

        impl<'de> Deserialize<'de> for $type {
            /// # Errors
            ///
            /// From any deserializer but that of a channel.
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let unboxed: fn(_) -> $type = $unboxed;
                match Value::deserialize(deserializer)? {
                    Value::$variant(memory) => Ok(unboxed(memory)),
                    other => Err(wrong($name, &other)),
                }
            }
        })*
    };
}

memory! {
    Tensor = Tensor, "tensor", |tensor| tensor;
    Array = Array, "array", |array: Box<Array>| *array;
    OpaquePickle = Pickle, "pickle", |pickle: Box<OpaquePickle>| *pickle;
    Object = Object, "object", |object: Box<Object>| *object;
}

impl Serialize for Value {
    /// # Errors
    ///
    /// From any serializer but that of a channel.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_newtype_struct(MEMORY, &Handed(|| self.clone()))
    }
}

impl<'de> Deserialize<'de> for Value {
    /// From a channel any value, and from other deserializers what they have words for.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(MEMORY, de::AnyValue)
    }
}

#[cfg(test)]
mod tests;
