//! Why something did not happen: [`Refusal`] is data, [`Fault`] is an error.

use std::fmt;
use std::sync::Arc;

use crate::parcel::RungId;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $text:literal, $remedy:expr;)*) => {
        /// Why a rung cannot apply, or what is wrong with something a peer sent.
        ///
        /// The code is stable: it stands in routes, logs, the program's JSON and on the wire.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason { $($(#[$doc])* $variant,)* }

        impl Reason {
            /// All of them, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The stable name.
            #[must_use]
            pub const fn code(self) -> &'static str {
                match self { $(Self::$variant => $code,)* }
            }

            /// What a person reads.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// What a person can do about it, where there is something to do.
            #[must_use]
            pub const fn remedy(self) -> Option<&'static str> {
                match self { $(Self::$variant => $remedy,)* }
            }
        }
    };
}

reasons! {
    // The rung and this pair of processes.
    /// The peer does not offer the rung.
    NotOffered = "not-offered", "the peer does not offer this rung", Some("build both sides with the rung's feature");
    /// The platform has no such mechanism.
    Platform = "platform", "this platform has no such mechanism", None;
    /// The rung failed earlier and was taken out of use for this peer and direction.
    Demoted = "demoted", "the rung failed earlier and was demoted", Some("mend the cause, then prove it again (Peer::reprove), or reconnect");
    /// No canary has crossed on it yet.
    Unproven = "unproven", "not proven for this pair of processes yet", None;
    /// A canary was not answered.
    NoAnswer = "no-answer", "a canary was not answered in time", Some("see what the other process is doing, then prove it again (Peer::reprove)");
    /// Other contents came than were sent.
    Corrupt = "corrupt", "other contents came than were sent", Some("report the driver, the kernel and both library versions; the rung is not used meanwhile");
    /// A leaf rode another rung than the one that its sender named.
    WrongRung = "wrong-rung", "it rode another rung than its sender named", None;
    /// Views of one storage came as views of several.
    Unshared = "unshared", "views of one storage came apart", None;
    /// Nothing that could carry what a form writes is open or in order.
    NoCarrier = "no-carrier", "no rung is in order that could carry it", None;
    /// The peer does not see the device.
    DeviceUnknown = "device-unknown", "the other process does not see this device", Some("make the device visible to both processes (CUDA_VISIBLE_DEVICES)");
    /// The rung was tried for this very leaf and the peer could not take it.
    PeerFault = "peer-fault", "the peer could not take it", None;

    // The leaf.
    /// The form does not take leaves of this kind.
    OtherKind = "other-kind", "not a kind of leaf that this rung takes", None;
    /// The memory is on a device and the rung moves host memory.
    DeviceMemory = "device-memory", "the memory is on a device", Some("copy it to host memory, or enable a device rung");
    /// There is nothing to move.
    Empty = "empty", "there are no bytes to move", None;
    /// Larger than the rung takes.
    TooLarge = "too-large", "larger than this rung takes", Some("send bulk data as a tensor or a byte string");
    /// Nested deeper than the cap.
    TooDeep = "too-deep", "nested too deeply", Some("flatten the value");
    /// More dimensions than the cap.
    Rank = "rank", "too many dimensions", Some("reshape the tensor");
    /// An element narrower than a byte.
    SubByteDType = "sub-byte-dtype", "elements narrower than a byte are not supported", Some("send the packed bytes as u8");
    /// A dtype that is not known here.
    UnknownDType = "unknown-dtype", "unknown dtype", None;
    /// NumPy's `object` dtype: pointers into the producer's interpreter.
    ObjectDType = "object-dtype", "arrays of objects are pointers into one process", Some("send it as a pickle, or as a list");
    /// Small enough for the JSON, where it costs nothing more.
    Small = "small", "small enough for the JSON", None;
    /// An object's version that its type, as registered here, does not read.
    Version = "version", "registered here for other versions of the type", Some("register the type on both sides at versions that read each other");
    /// A Rust type that nobody registered, or another than the object's.
    UnknownType = "unknown-type", "the type is not registered for it", Some("register a serializer for the type on both sides");
    /// A pickle of what only its own interpreter can make again.
    NotPlain = "not-plain", "more than plain data is in the pickle", Some("forward it unopened to a process that has its classes");
    /// A pickle that refers to itself.
    Recursive = "recursive", "it refers to itself", None;

    // Looking into memory.
    /// A view of another element type than the tensor's.
    WrongDType = "wrong-dtype", "the tensor holds another dtype", Some("ask for the tensor's own dtype");
    /// A slice of memory that is not in C order.
    NotContiguous = "not-contiguous", "the elements are not contiguous in C order", Some("copy with to_vec");
    /// A slice at an address the type cannot have.
    Misaligned = "misaligned", "the elements are not aligned for their type", Some("copy with to_vec");
    /// Bytes that are no value of the type (a bool of 2).
    InvalidBits = "invalid-bits", "the bytes are no value of the type", Some("read them as u8");
    /// The owner can still write the memory and is not trusted.
    PeerNotTrusted = "peer-not-trusted", "the peer could still write this memory", Some("copy out, have it sealed, or trust the peer");
    /// The memory belongs to this process alone.
    PrivateMemory = "private-memory", "the memory is private to this process", Some("put it into shared memory first");
    /// Memory is still lent out, so it cannot be written.
    StillLent = "still-lent", "the memory is still lent out", Some("wait until every receiver has let go");

    // Shapes and ranges.
    /// Offset, shape and strides reach outside the storage, or overflow.
    OutOfBounds = "out-of-bounds", "reaches outside the storage", None;
    /// Shape and number of elements disagree.
    ShapeMismatch = "shape-mismatch", "shape and elements disagree", None;

    // The machine.
    /// The system has no memory left for it.
    NoMemory = "no-memory", "the system has no memory left", Some("free memory, or raise the container's limit");
    /// Descriptors ran out.
    NoDescriptors = "no-descriptors", "no descriptors left", Some("raise the limit of open files (ulimit -n)");
    /// Another failure of a system call.
    System = "system", "a system call failed", None;

    // The devices.
    /// No driver of the devices is there.
    NoDriver = "no-driver", "no CUDA driver", Some("install the device's driver; in a container, pass it in");
    /// The driver lacks what is called.
    OldDriver = "old-driver", "the CUDA driver is too old", Some("update the driver");
    /// The driver shows this process no device.
    NoDevice = "no-device", "the driver shows no device", Some("make a device visible (CUDA_VISIBLE_DEVICES; in a container, pass one in)");
    /// A function of the driver failed.
    Driver = "driver", "the CUDA driver refused", None;
    /// The allocator's memory cannot cross as it is.
    OtherAllocator = "other-allocator", "memory of this allocator cannot cross as it is", Some("allocate it shareable (alloc_on), and it crosses without a copy");
    /// The process that owned the memory is gone.
    OwnerGone = "owner-gone", "the process that owned the memory is gone", Some("copy what is to outlive its owner, or have it sent by cuda-vmm");
    /// Process numbers of one side mean nothing to the other.
    Namespace = "namespace", "the processes are in different pid namespaces", Some("share the pid namespace (--pid), or send by cuda-vmm, which needs none");
    /// A fork of the process that set something up.
    Forked = "forked", "not usable in a fork of the process that set it up", Some("start processes with exec (Worker::spawn)");

    // What a peer sent.
    /// The JSON is not what the wire says it is.
    BadMetadata = "bad-metadata", "malformed metadata", None;
    /// The number of handles is not the number declared or needed.
    WrongHandles = "wrong-handles", "wrong number of handles", None;
    /// The handle is no sealable shared memory.
    NotSharedMemory = "not-shared-memory", "the handle is not sealable shared memory", None;
    /// A seal is missing that makes the memory safe to map.
    Unsealed = "unsealed", "the segment lacks a seal", Some("seal it before it is sent");
    /// The kernel says another size than the peer.
    WrongSize = "wrong-size", "the segment is not as long as declared", None;
    /// The segment has holes: reading it would charge the reader, or fail.
    Sparse = "sparse", "the segment is not fully allocated", Some("allocate it (fallocate) before it is sent");
    /// A block that this side was told of, and has not or no longer.
    UnknownBlock = "unknown-block", "no such block is held", None;
    /// A rung that this side has not opened.
    UnknownRung = "unknown-rung", "no such rung is open", None;
    /// A tag that this side does not know.
    UnknownTag = "unknown-tag", "unknown tag", None;
    /// A storage or leaf index that the message does not have.
    UnknownStorage = "unknown-storage", "no such storage in the message", None;
    /// A cap of the wire is exceeded.
    OverCap = "over-cap", "exceeds a cap of the wire", None;
    /// A lease that is not out.
    UnknownLease = "unknown-lease", "no such lease is out", None;
}

impl Reason {
    /// The reason with this code, if there is one.
    #[must_use]
    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.code() == code)
    }

    /// Whether its details are of what the peer itself sent or offered. Others may be of this process: what the
    /// system or a driver said, paths, how much memory is left.
    #[must_use]
    pub fn is_of_the_peer(self) -> bool {
        matches!(
            self,
            Self::BadMetadata
                | Self::WrongHandles
                | Self::WrongSize
                | Self::UnknownBlock
                | Self::UnknownRung
                | Self::UnknownTag
                | Self::UnknownStorage
                | Self::UnknownLease
                | Self::UnknownDType
                | Self::OverCap
                | Self::TooLarge
                | Self::OutOfBounds
                | Self::ShapeMismatch
                | Self::Corrupt
                | Self::WrongRung
                | Self::Unshared
                | Self::NotOffered
                | Self::Platform
                | Self::Version
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.code())
    }
}

macro_rules! because {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
        pub struct $name {
            reason: Reason,
            // Shared: why a rung is not there goes with every leaf.
            detail: Option<Arc<str>>,
        }

        impl $name {
            /// With a detail: a lowercase fragment, empty where the reason says it all.
            #[must_use]
            pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
                let detail: String = detail.into();
                Self { reason, detail: (!detail.is_empty()).then(|| detail.into()) }
            }

            /// Why.
            #[must_use]
            pub fn reason(&self) -> Reason {
                self.reason
            }

            /// As a peer may hear it: without a detail that may be of this process.
            ///
            /// ```
            #[doc = concat!("use rung::{Reason, ", stringify!($name), "};")]
            ///
            #[doc = concat!("let local = ", stringify!($name), "::new(Reason::System, \"open(/home/me/x) failed\");")]
            /// assert_eq!(local.for_peer().to_string(), "a system call failed");
            #[doc = concat!("let theirs = ", stringify!($name), "::new(Reason::WrongSize, \"8 bytes declared, 4 there\");")]
            /// assert_eq!(theirs.for_peer(), theirs);
            /// ```
            #[must_use]
            pub fn for_peer(&self) -> Self {
                if self.reason.is_of_the_peer() { self.clone() } else { self.reason.into() }
            }

            /// What exactly, for a person; may be empty.
            #[must_use]
            pub fn detail(&self) -> &str {
                self.detail.as_deref().unwrap_or_default()
            }
        }

        impl From<Reason> for $name {
            fn from(reason: Reason) -> Self {
                Self { reason, detail: None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.reason.text())?;
                if let Some(detail) = &self.detail {
                    write!(f, ": {detail}")?;
                }
                Ok(())
            }
        }
    };
}

because! {
    /// "Cannot apply here": an answer, with a reason. The work falls through to the next rung.
    Refusal
}

because! {
    /// Something is broken: what a peer sent, or what the platform did with it.
    Fault
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        Self { reason: refusal.reason, detail: refusal.detail }
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self { reason: fault.reason, detail: fault.detail }
    }
}

/// A leaf that no rung takes: an error at the sender, before anything is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsendable {
    /// Where in the value, as `$.images[3].meta`.
    pub path: String,
    /// What it is, as `f32 tensor` or `list`.
    pub kind: String,
    /// What each rung that was asked answered, in the order of asking.
    pub refusals: Vec<(RungId, Refusal)>,
}

impl Unsendable {
    /// As a peer may hear it.
    #[must_use]
    pub fn for_peer(&self) -> Self {
        let heard = |(rung, refusal): &(RungId, Refusal)| (rung.clone(), refusal.for_peer());
        let refusals = self.refusals.iter().map(heard).collect();
        Self { path: self.path.clone(), kind: self.kind.clone(), refusals }
    }

    /// What a person can do about it: the first remedy among the refusals.
    #[must_use]
    pub fn remedy(&self) -> Option<&'static str> {
        self.refusals.iter().find_map(|(_, refusal)| refusal.reason().remedy())
    }
}

impl std::error::Error for Unsendable {}

impl fmt::Display for Unsendable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no rung takes the {} at {}", self.kind, self.path)?;
        for (rung, refusal) in &self.refusals {
            write!(f, "; {rung}: {refusal}")?;
        }
        if let Some(remedy) = self.remedy() {
            write!(f, " ({remedy})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_read_back() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_code(reason.code()), Some(*reason));
        }
        assert_eq!(Reason::from_code("nonsense"), None);
    }

    #[test]
    fn text_fits_after_failed_to() {
        let refusal = Refusal::new(Reason::TooLarge, "5 GiB");
        assert_eq!(refusal.to_string(), "larger than this rung takes: 5 GiB");
        assert_eq!(Fault::from(Reason::Sparse).to_string(), "the segment is not fully allocated");
    }
}
