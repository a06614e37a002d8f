//! What a rung is: availability is three questions with three answers, and state is per peer.
//!
//! 1. [`Rung::probe`] asks this process, once: what can I export and import?
//! 2. [`Rung::open`] asks this pair of processes, purely from both offers: does it work between us?
//! 3. [`Carrier::export`] or [`Form::lower`] asks this very leaf.
//!
//! Each may answer with a [`Refusal`], which is data, and the work falls through to the next rung.
//! A tier works alone, in somebody else's protocol: what has to cross is an [`Offer`] at the
//! beginning, a [`Parcel`] for each storage, and a [`Receipt`] when it was let go.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::array::Array;
use crate::device::Device;
use crate::limits;
use crate::parcel::{LeaseId, Meta, Offer, Parcel, Receipt, RungId};
use crate::pickle::OpaquePickle;
use crate::reason::{Fault, Reason, Refusal};
use crate::storage::{Access, Storage};
use crate::tensor::Tensor;
use crate::value::Value;

/// A mechanism that moves leaves between two processes.
pub trait Rung: fmt::Debug + Send + Sync {
    /// Its name on the wire.
    fn id(&self) -> RungId;

    /// What this process can export and import on it.
    ///
    /// # Errors
    ///
    /// A refusal where this process or platform has no such mechanism.
    fn probe(&self) -> Result<Offer, Refusal>;

    /// What it knows of this process and a person who looks for a reason wants to see beside the other's: a
    /// driver's version, an allocator. Nothing, unless said otherwise. Of a value 256 bytes count.
    fn facts(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// Opens it between the two processes that made these offers; pure in both, and symmetric: the
    /// other side, with the offers exchanged, comes to the same answer.
    ///
    /// # Errors
    ///
    /// A refusal where it does not work between these two.
    fn open(&self, mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal>;
}

/// What a rung opens: one rung, one peer. Caches are inside, and all methods take `&self`.
pub enum Session {
    /// Moves storages.
    Carrier(Box<dyn Carrier>),
    /// Turns leaves into metadata and views of memory.
    Form(Box<dyn Form>),
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Carrier(_) => "Session::Carrier",
            Self::Form(_) => "Session::Form",
        })
    }
}

/// Whatever keeps exported memory alive; dropped when the lease ends.
pub type Owner = Box<dyn Any + Send + Sync>;

/// An exported storage: what to send, and what to keep until its receipt comes.
pub struct Packed {
    /// To the peer.
    pub parcel: Parcel,
    /// Kept by the sender under the parcel's lease (L1).
    pub owner: Owner,
    /// Who could write it while it is lent: what the route tells.
    pub access: Access,
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packed").field("parcel", &self.parcel).finish_non_exhaustive()
    }
}

/// Moves one storage at a time.
pub trait Carrier: Send + Sync {
    /// Makes a storage importable by the peer, under a lease that this session mints.
    ///
    /// # Errors
    ///
    /// A refusal: the storage is left for the next carrier.
    fn export(&self, storage: &Arc<Storage>) -> Result<Packed, Refusal>;

    /// Takes a storage that the peer exported. Whatever the peer says is checked against what the
    /// platform says.
    ///
    /// # Errors
    ///
    /// A fault, which is told to the sender, who sends again on a lower rung.
    fn import(&self, parcel: Parcel) -> Result<Storage, Fault>;

    /// The devices whose memory this session moves, and how it reaches each: the host's, unless said
    /// otherwise. It follows from both offers; whether it is so is for a canary to show, on each.
    fn devices(&self) -> Vec<(Device, Reach)> {
        vec![(Device::Host, Reach::Ready)]
    }

    /// So many bytes of memory of a device, of the kind that this carrier moves best, with the contents that
    /// `fill` puts into all of it at once: what its canary is made of. Private host memory, unless said otherwise.
    /// On a device, the last of it is written by work that a stream still has to do when this returns.
    ///
    /// # Errors
    ///
    /// A refusal where there can be no such memory; the rung is not proven then, and not used.
    fn specimen(&self, device: Device, len: usize, fill: Fill<'_>) -> Result<Storage, Refusal> {
        match device {
            Device::Host => {
                let mut bytes = vec![0; len];
                fill(&mut bytes);
                Ok(Storage::from_bytes(bytes))
            }
            device => Err(Refusal::new(Reason::DeviceMemory, device.to_string())),
        }
    }

    /// Whether shared memory of this kind goes to this peer as a copy all the same: a small part of something large
    /// then goes alone. It goes as it is, unless said otherwise.
    fn copies(&self, _access: Access) -> bool {
        false
    }

    /// What was exported under this lease has been sent: whatever is sent from now on comes after it.
    ///
    /// A transport that keeps its order tells this, so that what went once (a descriptor) need not go
    /// again. One that tells nothing sends it each time.
    fn sent(&self, _lease: LeaseId) {}

    /// A parcel under this lease of the peer's goes back unopened: its receipt should say that whatever
    /// went along with it once has to go again.
    fn unopened(&self, _lease: LeaseId) {}

    /// Whether a lease that was let go can go home yet: something of it may still run, and the peer cannot wait for that.
    /// Asked again soon where it cannot; its receipt is made once it can.
    fn is_settled(&self, _lease: LeaseId) -> bool {
        true
    }

    /// The importer lets go of a lease.
    fn receipt(&self, lease: LeaseId) -> Receipt;

    /// The exporter hears that the peer let go; told before the lease's owner is dropped.
    fn released(&self, receipt: Receipt);

    /// The peer is gone for sure, by the end of the stream and its process's exit (L3): its leases
    /// end by this rung's own rules. Told before their owners are dropped.
    fn peer_gone(&self);

    /// Something that this session has to say to the peer's, outside any parcel: to be asked for
    /// whenever something is sent, and when it [asks to be](Self::wake_with).
    fn notice(&self) -> Option<Meta> {
        None
    }

    /// Whether something is kept here that a [notice](Self::noticed) of the peer's may end: worth listening
    /// for then, also where nothing else is expected.
    fn keeps(&self) -> bool {
        false
    }

    /// What the peer's session had to say.
    ///
    /// # Errors
    ///
    /// A fault where it is nothing that this rung says.
    fn noticed(&self, _notice: Meta) -> Result<(), Fault> {
        Err(Fault::new(Reason::BadMetadata, "this rung has nothing to say"))
    }

    /// Gives the session a way to ask that its [notices](Self::notice) be sent though nothing else is.
    ///
    /// It may be called from destructors, so it must neither block nor panic.
    fn wake_with(&self, _wake: Arc<dyn Fn() + Send + Sync>) {}
}

/// What fills memory with contents: given all of it at once.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8]);

/// How a session reaches a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reach {
    /// It can be proven at once.
    Ready,
    /// Using the device would set something up (a context) that a session without leaves on it should not
    /// pay for: it is proven before the first leaf.
    Idle,
    /// Not at all: a definite mismatch of both offers.
    Not(Refusal),
}

/// A part of a value that a form may take whole.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Leaf<'a> {
    /// A tensor.
    Tensor(&'a Tensor),
    /// An array with a NumPy type.
    Array(&'a Array),
    /// A pickle that is not opened.
    Pickle(&'a OpaquePickle),
    /// A subtree without tensors.
    Plain(&'a Value),
}

/// A leaf as metadata plus what carriers move.
#[derive(Debug)]
pub struct Lowered {
    /// In the JSON.
    pub meta: Meta,
    /// Views of what goes on carriers, in this order: views, so that what shares memory still does on the
    /// other side, and a small part of something large goes alone.
    pub views: Vec<Tensor>,
}

/// What raising the leaves of one message may still make: a few bytes can say a lot.
///
/// A form that makes a value of what it reads takes from it before it makes it; one that hands out views of
/// the memory that came makes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// Values.
    pub nodes: usize,
    /// Bytes of text and byte strings.
    pub bytes: usize,
    /// Bytes of views that are read through: many leaves over one block are no reason to read it many times.
    pub read: usize,
    /// Levels that the value may have where it stands.
    pub depth: usize,
}

impl Room {
    /// For a message whose blocks have so many bytes.
    #[must_use]
    pub fn of(bytes: usize) -> Self {
        Self {
            // What is referred to twice is there twice; Python does so with every word it meets again.
            nodes: bytes.saturating_mul(16).clamp(limits::NODES, limits::PICKLE_NODES),
            bytes: bytes.saturating_mul(4).max(limits::RAISED_BYTES),
            read: bytes,
            depth: limits::VALUE_DEPTH,
        }
    }

    /// Takes what is about to be read through.
    ///
    /// # Errors
    ///
    /// [`Reason::TooLarge`] where the message has not so much.
    pub fn read(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.read = self.read.checked_sub(bytes).ok_or_else(|| {
            Refusal::new(Reason::TooLarge, "more bytes to read than the message has")
        })?;
        Ok(())
    }

    /// Takes what is about to be made.
    ///
    /// # Errors
    ///
    /// [`Reason::TooLarge`] where there is not so much left.
    pub fn take(&mut self, nodes: usize, bytes: usize) -> Result<(), Refusal> {
        match (self.nodes.checked_sub(nodes), self.bytes.checked_sub(bytes)) {
            (Some(nodes), Some(bytes)) => {
                (self.nodes, self.bytes) = (nodes, bytes);
                Ok(())
            }
            _ => {
                let detail = format!("{nodes} values with {bytes} bytes of text, of so few bytes");
                Err(Refusal::new(Reason::TooLarge, detail))
            }
        }
    }
}

/// Turns leaves into metadata and views of memory, and back.
pub trait Form: Send + Sync {
    /// Takes a leaf apart.
    ///
    /// # Errors
    ///
    /// A refusal: the leaf is left for the next form.
    fn lower(&self, leaf: Leaf<'_>) -> Result<Lowered, Refusal>;

    /// Values that this form takes whole, one of each kind, with contents that `random` fills: what its
    /// canary is made of. They must not be equal twice but by luck, are some hundred values together at most,
    /// and none is what rides as a tensor (null, and one view).
    ///
    /// # Errors
    ///
    /// A refusal where there can be none; the rung is not proven then, and not used.
    fn specimens(&self, random: Fill<'_>) -> Result<Vec<Value>, Refusal>;

    /// Puts a leaf together again.
    ///
    /// # Errors
    ///
    /// A fault where the metadata or the views are not what [`Self::lower`] makes, or there is no room.
    fn raise(&self, lowered: Lowered, room: &mut Room) -> Result<Value, Fault>;
}

/// Whether the peer is trusted not to write memory that it lent; made by those who can tell.
///
/// This crate has no unsafe code, so it cannot make a token that soundness rests on: it carries one
/// that `segment` made (`segment::PeerTrust`), and only `segment` looks inside.
#[derive(Clone, Default)]
pub struct Trust(Option<Arc<dyn Any + Send + Sync>>);

impl Trust {
    /// No trust: what the peer could still write is copied out.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Carries a token.
    #[must_use]
    pub fn carrying(token: impl Any + Send + Sync) -> Self {
        Self(Some(Arc::new(token)))
    }

    /// The token, if it is of this type.
    #[must_use]
    pub fn token<T: Any>(&self) -> Option<&T> {
        self.0.as_ref()?.downcast_ref()
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Trust(token)" } else { "Trust(none)" })
    }
}
