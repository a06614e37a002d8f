//! What crosses: metadata as JSON text, plus owned platform handles.
//!
//! [`Offer`], [`Parcel`] and [`Receipt`] each split into a serde part and a list of handles, and
//! rejoin, so that any transport that can pass both carries them: ours, or a user's own socket.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::limits;
use crate::reason::{Fault, Reason, Refusal};

/// An owned platform handle: a file descriptor.
#[cfg(unix)]
pub type Handle = std::os::fd::OwnedFd;

/// An owned platform handle.
#[cfg(windows)]
pub type Handle = std::os::windows::io::OwnedHandle;

/// The name of a rung, as on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RungId(Cow<'static, str>);

impl RungId {
    /// Device memory by handles of the driver's older kind.
    pub const CUDA_IPC: Self = Self::new("cuda-ipc");
    /// Device memory by descriptors of the driver's.
    pub const CUDA_VMM: Self = Self::new("cuda-vmm");
    /// Device memory of a shareable pool.
    pub const POOL_IPC: Self = Self::new("pool-ipc");
    /// Host memory shared by descriptor.
    pub const SHM: Self = Self::new("shm");
    /// Arrays with NumPy's dtypes, lowered to storages.
    pub const NUMPY: Self = Self::new("numpy");
    /// Anything that was pickled, in one block.
    pub const PICKLE: Self = Self::new("pickle");
    /// Primitives and small containers, in the JSON.
    pub const INLINE: Self = Self::new("inline");

    /// A rung's name: at most 32 bytes of lower-case letters, digits and dashes.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self(Cow::Borrowed(name))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is one that nobody should count on yet, and that both sides have to ask for.
    #[must_use]
    pub fn is_experimental(&self) -> bool {
        *self == Self::POOL_IPC
    }

    /// The name, and that it is experimental where it is: for a person to read.
    #[must_use]
    pub fn told(&self) -> Cow<'_, str> {
        if self.is_experimental() {
            format!("{} (experimental)", self.0).into()
        } else {
            Cow::Borrowed(&*self.0)
        }
    }
}

impl fmt::Display for RungId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for RungId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for RungId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = Cow::<'de, str>::deserialize(deserializer)?;
        // The common names cost no allocation.
        for known in [
            Self::SHM,
            Self::NUMPY,
            Self::PICKLE,
            Self::INLINE,
            Self::CUDA_IPC,
            Self::CUDA_VMM,
            Self::POOL_IPC,
        ] {
            if known.0 == name {
                return Ok(known);
            }
        }
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if name.is_empty() || name.len() > limits::RUNG_NAME || !name.bytes().all(plain) {
            return Err(serde::de::Error::custom("not a rung's name"));
        }
        Ok(Self(Cow::Owned(name.into_owned())))
    }
}

/// The number of a lease: minted by the exporting session, unique there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A rung's own metadata: a JSON document, kept as text until the rung that wrote it reads it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Meta(Box<RawValue>);

impl Meta {
    /// Writes metadata.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] for what JSON cannot hold (a map with keys that are no strings).
    pub fn write(metadata: &impl Serialize) -> Result<Self, Fault> {
        serde_json::value::to_raw_value(metadata)
            .map(Self)
            .map_err(|error| Fault::new(Reason::BadMetadata, error.to_string()))
    }

    /// Takes a JSON document as it is.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] where it is none.
    pub fn from_json(text: String) -> Result<Self, Fault> {
        RawValue::from_string(text)
            .map(Self)
            .map_err(|error| Fault::new(Reason::BadMetadata, error.to_string()))
    }

    /// Reads metadata.
    ///
    /// # Errors
    ///
    /// [`Reason::BadMetadata`] where it is not what `T` expects.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Fault> {
        serde_json::from_str(self.0.get())
            .map_err(|error| Fault::new(Reason::BadMetadata, error.to_string()))
    }

    /// The JSON text.
    #[must_use]
    pub fn as_json(&self) -> &str {
        self.0.get()
    }
}

/// What one process can do on one rung.
#[derive(Debug)]
pub struct Offer {
    /// The rung.
    pub rung: RungId,
    /// Its own facts.
    pub meta: Meta,
    /// Its own handles.
    pub handles: Vec<Handle>,
}

impl Offer {
    /// Of a rung whose only fact is the version of what it writes.
    ///
    /// # Errors
    ///
    /// None: a number is JSON.
    pub fn of_version(rung: RungId, version: u32) -> Result<Self, Fault> {
        Ok(Self { rung, meta: Meta::write(&version)?, handles: Vec::new() })
    }

    /// Checks that it was made by [`Self::of_version`] with this very version of `what`.
    ///
    /// # Errors
    ///
    /// [`Reason::NotOffered`], with both.
    pub fn expect_version(&self, what: &str, version: u32) -> Result<(), Refusal> {
        if self.meta.read::<u32>() == Ok(version) {
            return Ok(());
        }
        let detail = format!("{what} {}, here {version}", self.meta.as_json());
        Err(Refusal::new(Reason::NotOffered, detail))
    }
}

/// The part of an [`Offer`] that is text.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfferWire {
    #[serde(rename = "r")]
    rung: RungId,
    #[serde(rename = "h", default, skip_serializing_if = "is_zero")]
    handles: u8,
    #[serde(rename = "m")]
    meta: Meta,
}

impl OfferWire {
    /// Which rung it is for.
    #[must_use]
    pub fn rung(&self) -> &RungId {
        &self.rung
    }
}

/// One storage on its way.
#[derive(Debug)]
pub struct Parcel {
    /// The carrier.
    pub rung: RungId,
    /// The exporter's lease: named in the receipt.
    pub lease: LeaseId,
    /// Bytes of the storage.
    pub bytes: u64,
    /// How many times the exporter copied them.
    pub copies: u8,
    /// The carrier's own metadata.
    pub meta: Meta,
    /// The carrier's own handles.
    pub handles: Vec<Handle>,
}

/// The part of a [`Parcel`] that is text.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParcelWire {
    #[serde(rename = "r")]
    rung: RungId,
    #[serde(rename = "l")]
    lease: LeaseId,
    #[serde(rename = "n")]
    bytes: u64,
    #[serde(rename = "c", default, skip_serializing_if = "is_zero")]
    copies: u8,
    #[serde(rename = "h", default, skip_serializing_if = "is_zero")]
    handles: u8,
    #[serde(rename = "m")]
    meta: Meta,
}

impl ParcelWire {
    /// The receipt that gives the parcel's lease back unopened.
    #[must_use]
    pub fn lease(&self) -> (&RungId, LeaseId) {
        (&self.rung, self.lease)
    }

    /// How many handles belong to it.
    #[must_use]
    pub fn handle_count(&self) -> usize {
        usize::from(self.handles)
    }
}

/// A lease on its way home: the importer let go.
#[derive(Debug)]
pub struct Receipt {
    /// The carrier.
    pub rung: RungId,
    /// The exporter's lease.
    pub lease: LeaseId,
    /// The carrier's own metadata (a done-event), where it has some.
    pub meta: Option<Meta>,
    /// The carrier's own handles.
    pub handles: Vec<Handle>,
}

/// The part of a [`Receipt`] that is text.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptWire {
    #[serde(rename = "r")]
    rung: RungId,
    #[serde(rename = "l")]
    lease: LeaseId,
    #[serde(rename = "h", default, skip_serializing_if = "is_zero")]
    handles: u8,
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none")]
    meta: Option<Meta>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &u8) -> bool {
    *number == 0
}

fn count(handles: &[Handle]) -> Result<u8, Fault> {
    u8::try_from(handles.len())
        .ok()
        .filter(|&count| usize::from(count) <= limits::FRAME_HANDLES)
        .ok_or_else(|| Fault::new(Reason::OverCap, format!("{} handles", handles.len())))
}

/// Takes the declared number from the front of what came with the frame.
fn take(handles: &mut VecDeque<Handle>, count: u8) -> Result<Vec<Handle>, Fault> {
    let count = usize::from(count);
    if handles.len() < count {
        return Err(Fault::new(
            Reason::WrongHandles,
            format!("{count} declared, {} left", handles.len()),
        ));
    }
    Ok(handles.drain(..count).collect())
}

macro_rules! split_and_join {
    ($whole:ident, $wire:ident { $($field:ident),* }) => {
        impl $whole {
            /// Into what is text and what is handles.
            ///
            /// # Errors
            ///
            /// [`Reason::OverCap`] with more handles than a frame takes.
            pub fn split(self) -> Result<($wire, Vec<Handle>), Fault> {
                let handles = count(&self.handles)?;
                Ok(($wire { handles, $($field: self.$field),* }, self.handles))
            }

            /// From the text, and its handles from the front of those that came with it.
            ///
            /// # Errors
            ///
            /// [`Reason::WrongHandles`] where fewer are left than it declares.
            pub fn join(wire: $wire, handles: &mut VecDeque<Handle>) -> Result<Self, Fault> {
                let handles = take(handles, wire.handles)?;
                Ok(Self { handles, $($field: wire.$field),* })
            }
        }
    };
}

split_and_join!(Offer, OfferWire { rung, meta });
split_and_join!(Parcel, ParcelWire { rung, lease, bytes, copies, meta });
split_and_join!(Receipt, ReceiptWire { rung, lease, meta });

#[cfg(test)]
mod tests {
    use super::*;

    fn parcel(handles: Vec<Handle>) -> Parcel {
        Parcel {
            rung: RungId::SHM,
            lease: LeaseId(7),
            bytes: 12,
            copies: 1,
            meta: Meta::write(&"sealed").unwrap(),
            handles,
        }
    }

    fn handle() -> Handle {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_parcel_splits_and_rejoins() {
        let (wire, handles) = parcel(vec![handle()]).split().unwrap();
        let json = serde_json::to_string(&wire).unwrap();
        assert_eq!(json, r#"{"r":"shm","l":7,"n":12,"c":1,"h":1,"m":"sealed"}"#);
        let wire: ParcelWire = serde_json::from_str(&json).unwrap();
        let mut handles = VecDeque::from(handles);
        let back = Parcel::join(wire, &mut handles).unwrap();
        assert_eq!((back.lease, back.bytes, back.handles.len()), (LeaseId(7), 12, 1));
        assert!(handles.is_empty());
    }

    #[test]
    fn a_parcel_without_its_handles_is_a_fault() {
        let (wire, _) = parcel(vec![handle()]).split().unwrap();
        let fault = Parcel::join(wire, &mut VecDeque::new()).unwrap_err();
        assert_eq!(fault.reason(), Reason::WrongHandles);
    }

    #[test]
    fn names_of_rungs_are_held_to_their_alphabet() {
        for bad in ["\"\"", "\"a b\"", "\"\\n\"", &format!("\"{}\"", "x".repeat(33))] {
            assert!(serde_json::from_str::<RungId>(bad).is_err(), "{bad}");
        }
        assert_eq!(serde_json::from_str::<RungId>("\"cuda-ipc\"").unwrap().as_str(), "cuda-ipc");
    }
}
