//! What each leaf rode, and why not something higher.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use rung::{Access, DType, Descr, Device, Path, Refusal, RungId, Value};
use smol_str::SmolStr;

/// What a leaf is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// A tensor of this type and shape.
    Tensor(DType, Vec<usize>),
    /// An array of this NumPy type and shape.
    Array(Descr, Vec<usize>),
    /// A pickle that is not opened.
    Pickle,
    /// An object of this tag and version, without its parts, which are leaves of their own.
    Object(String, u32),
    /// A long string.
    Str,
    /// A long byte string.
    Bytes,
    /// A tensor-free subtree of this kind.
    Plain(&'static str),
}

impl What {
    /// What a value is, as one leaf.
    pub(crate) fn of(value: &Value) -> Self {
        match value {
            Value::Tensor(tensor) => Self::Tensor(tensor.dtype(), tensor.shape().to_vec()),
            Value::Array(array) => Self::Array(array.descr().clone(), array.shape().to_vec()),
            Value::Pickle(_) => Self::Pickle,
            Value::Object(object) => Self::Object(object.tag().to_owned(), object.version()),
            other => Self::Plain(other.kind()),
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(dtype, _) => write!(f, "{dtype} tensor"),
            Self::Array(descr, _) => write!(f, "array of {descr}"),
            Self::Pickle => f.write_str("pickle"),
            Self::Object(tag, version) => write!(f, "object {tag} {version}"),
            Self::Str => f.write_str("str"),
            Self::Bytes => f.write_str("bytes"),
            Self::Plain(kind) => f.write_str(kind),
        }
    }
}

/// Where a leaf is in its value, as `$.images[3].meta`: a string that is not changed.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeafPath(SmolStr);

impl LeafPath {
    /// Written by way of `scratch`, so that a short one costs no allocation.
    pub(crate) fn of(path: &Path<'_>, scratch: &mut String) -> Self {
        scratch.clear();
        path.push_to(scratch);
        Self(SmolStr::new(scratch.as_str()))
    }
}

impl Deref for LeafPath {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for LeafPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for LeafPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

impl PartialEq<str> for LeafPath {
    fn eq(&self, other: &str) -> bool {
        **self == *other
    }
}

impl PartialEq<&str> for LeafPath {
    fn eq(&self, other: &&str) -> bool {
        **self == **other
    }
}

/// One leaf of a value that crossed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leg {
    /// Where in the value, as `$.images[3].meta`.
    pub path: LeafPath,
    /// What it is.
    pub what: What,
    /// Bytes: of the elements, the text, the pickle, or the JSON.
    pub bytes: u64,
    /// What it rode.
    pub rung: RungId,
    /// Where that is a form: the carrier of its bytes.
    pub over: Option<RungId>,
    /// How often its bytes were copied for it, as far as this side knows: a sender knows all that it did, a
    /// receiver what the carrier says and what it did itself.
    pub copies: u8,
    /// The device whose memory it was, where it was copied to the host for want of a better way.
    pub origin: Option<Device>,
    /// Who could write it on its way, and so how it is looked at: sealed for good, lent, or copied out of what its
    /// owner could still write.
    pub access: Access,
    /// Each higher rung, with the reason why it did not take it; and each rung, this one too, on which it was
    /// sent before and could not be taken.
    ///
    /// Why a rung declined is known to the sender alone; what a receiver knows is what it could not take.
    pub declined: Arc<[(RungId, Refusal)]>,
    /// What packing or unpacking it took here; a block's time is shared among its leaves by size. What
    /// stays in the JSON takes too little to be measured.
    pub time: Duration,
}

impl Leg {
    /// Whether it rode something that nobody should count on yet.
    #[must_use]
    pub fn is_experimental(&self) -> bool {
        self.rung.is_experimental() || self.over.as_ref().is_some_and(RungId::is_experimental)
    }
}

/// The legs of one value in one direction, in the order of the value.
///
/// One for every tensor, array, pickle, object, long string or byte string, and maximal subtree of anything
/// else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Route {
    /// The legs.
    pub legs: Vec<Leg>,
}

/// What a caller requires of every leaf.
#[derive(Debug, Clone, Default)]
pub(crate) struct Require {
    pub(crate) at_least: Option<RungId>,
    pub(crate) max_copies: Option<u8>,
}

/// A leaf that rode less than was required.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BelowRequired {
    /// What it would have ridden.
    pub leg: Leg,
    /// The lowest rung that was allowed, if one was named.
    pub at_least: Option<RungId>,
    /// How many copies were allowed, if it was said.
    pub max_copies: Option<u8>,
}

impl std::error::Error for BelowRequired {}

impl fmt::Display for BelowRequired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Leg { path, what, rung, copies, declined, .. } = &self.leg;
        let plural = if *copies == 1 { "copy" } else { "copies" };
        write!(f, "the {what} at {path} would ride {} with {copies} {plural}", rung.told())?;
        if let Some(at_least) = &self.at_least {
            write!(f, "; {at_least} or higher is required")?;
        }
        if let Some(most) = self.max_copies {
            write!(f, "; at most {most} are allowed")?;
        }
        for (rung, refusal) in declined.iter() {
            write!(f, "; {rung}: {refusal}")?;
        }
        match what {
            What::Plain(_) => f.write_str(" (send bulk as tensors, or register a serializer)"),
            _ if *copies > 0 => f.write_str(
                " (put it into shared memory first; for a peer that takes nothing else, sealed)",
            ),
            _ => Ok(()),
        }
    }
}

impl Require {
    /// The first leg that falls short; `rank` counts rungs from the highest.
    pub(crate) fn check(
        &self,
        route: &Route,
        rank: impl Fn(&RungId) -> Option<usize>,
    ) -> Result<(), Box<BelowRequired>> {
        let Self { at_least, max_copies } = self;
        if at_least.is_none() && max_copies.is_none() {
            return Ok(());
        }
        // A rung that is not on this ladder is met by none.
        let lowest = at_least.as_ref().map(|rung| rank(rung).map_or(0, |rank| rank + 1));
        let short = route.legs.iter().filter(|leg| leg.rung != RungId::INLINE).find(|leg| {
            lowest.is_some_and(|lowest| rank(&leg.rung).is_none_or(|rank| rank >= lowest))
                || max_copies.is_some_and(|most| leg.copies > most)
        });
        match short {
            Some(leg) => Err(Box::new(BelowRequired {
                leg: leg.clone(),
                at_least: at_least.clone(),
                max_copies: *max_copies,
            })),
            None => Ok(()),
        }
    }
}

/// Of the time that a whole block took, that of so many of its bytes.
pub(crate) fn share(time: Duration, bytes: usize, of: usize) -> Duration {
    let share = bytes as f64 / of.max(1) as f64;
    time.mul_f64(share.min(1.0))
}

impl Route {
    /// The leg of the leaf at a path.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<&Leg> {
        self.legs.iter().find(|leg| leg.path == path)
    }

    /// Adds what was tried on the way: whatever rode a carrier did not ride those that failed before.
    pub(crate) fn tell(&mut self, failed: &[(RungId, Refusal)]) {
        if failed.is_empty() {
            return;
        }
        for leg in self.legs.iter_mut().filter(|leg| leg.rung != RungId::INLINE) {
            let new = failed.iter().filter(|(rung, _)| {
                // That it is demoted says so already.
                !leg.declined.iter().any(|(known, _)| known == rung)
            });
            leg.declined = leg.declined.iter().chain(new).cloned().collect();
        }
    }

    /// Bytes of all leaves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.legs.iter().map(|leg| leg.bytes).fold(0, u64::saturating_add)
    }
}
