//! What each leaf rode, and why not something higher.

use std::fmt;
use std::time::Duration;

use rung::{DType, Refusal, RungId};

/// What a leaf is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// A tensor of this type and shape.
    Tensor(DType, Vec<usize>),
    /// A long string.
    Str,
    /// A long byte string.
    Bytes,
    /// A tensor-free subtree of this kind.
    Plain(&'static str),
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(dtype, _) => write!(f, "{dtype} tensor"),
            Self::Str => f.write_str("str"),
            Self::Bytes => f.write_str("bytes"),
            Self::Plain(kind) => f.write_str(kind),
        }
    }
}

/// One leaf of a value that crossed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leg {
    /// Where in the value, as `$.images[3].meta`.
    pub path: String,
    /// What it is.
    pub what: What,
    /// Bytes: of the elements, the text, or the JSON.
    pub bytes: u64,
    /// What it rode.
    pub rung: RungId,
    /// How often its bytes were copied for it, by the sender and by this receiver.
    pub copies: u8,
    /// Each higher rung, with the reason why it did not take it.
    pub declined: Vec<(RungId, Refusal)>,
    /// What packing or unpacking it took here; a block's time is shared among its leaves by size.
    pub time: Duration,
}

/// The legs of one value in one direction, in the order of the value.
///
/// One for every tensor, long string, long byte string, and maximal subtree that stayed in the JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Route {
    /// The legs.
    pub legs: Vec<Leg>,
}

impl Route {
    /// The leg of the leaf at a path.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<&Leg> {
        self.legs.iter().find(|leg| leg.path == path)
    }

    /// Bytes of all leaves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.legs.iter().map(|leg| leg.bytes).sum()
    }
}
