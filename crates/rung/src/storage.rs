//! Memory with an owner.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::device::Device;
use crate::dtype::Element;
use crate::parcel::{LeaseId, RungId};
use crate::reason::{Reason, Refusal};
use crate::tensor::zeroed;

/// A block of memory, wherever it is: what a [`Storage`] owns.
///
/// Implemented by the crates that hold memory (`segment`'s blocks in `tier-shm`, a `Vec` here). A
/// carrier finds its own memory again with [`Storage::memory`] and `Any`, and then sends it without
/// a copy.
pub trait Memory: Any + fmt::Debug + Send + Sync {
    /// Bytes.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it is.
    fn device(&self) -> Device {
        Device::Host
    }

    /// All of the bytes, where they may be lent as a plain slice.
    ///
    /// The first call may map the memory. The slice must not change while it is borrowed: memory
    /// that somebody could still write refuses with [`Reason::PeerNotTrusted`].
    ///
    /// # Errors
    ///
    /// A refusal where the CPU cannot read it or it cannot be lent.
    fn bytes(&self) -> Result<&[u8], Refusal>;

    /// Copies bytes out, also where they cannot be lent.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`] past the end, or a refusal where the CPU cannot read the memory.
    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        let bytes = self.bytes()?;
        let from = offset
            .checked_add(into.len())
            .and_then(|end| bytes.get(offset..end))
            .ok_or(Reason::OutOfBounds)?;
        into.copy_from_slice(from);
        Ok(())
    }

    /// Hands out all bytes from first to last, in as many pieces as it likes: how private memory is
    /// copied once, wherever its parts are.
    ///
    /// # Errors
    ///
    /// What `piece` answers, or a refusal where the CPU cannot read the memory.
    fn for_each_piece(
        &self,
        piece: &mut dyn FnMut(&[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        match self.bytes() {
            Ok(bytes) => piece(bytes),
            Err(refusal) if is_to_be_copied(refusal.reason()) => self.for_each_copied_piece(piece),
            Err(refusal) => Err(refusal),
        }
    }

    /// As [`for_each_piece`](Self::for_each_piece), of copies that [`read_at`](Self::read_at) makes: for memory that
    /// cannot be borrowed, such as a device's, where a copy to the host is what is wanted.
    ///
    /// # Errors
    ///
    /// What `piece` or `read_at` answers.
    fn for_each_copied_piece(
        &self,
        piece: &mut dyn FnMut(&[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        // It may be for want of memory that nothing is borrowed.
        let window = |most| zeroed::<u8>(self.len().min(most));
        let mut copy = window(1 << 20).or_else(|_| window(64 << 10))?;
        let mut at = 0;
        while at < self.len() {
            let some = copy.len().min(self.len() - at);
            self.read_at(at, &mut copy[..some])?;
            piece(&copy[..some])?;
            at += some;
        }
        Ok(())
    }

    /// What tells this memory from any other that exists: two that answer the same are the same bytes, or a
    /// part of them, however often they were named.
    fn block(&self) -> u64 {
        std::ptr::from_ref(self).cast::<()>() as u64
    }

    /// Whether it can be sent to another process as it is, without a copy.
    fn is_shared(&self) -> bool {
        false
    }

    /// Who could still write it, and so how it is looked at: what routes tell.
    fn access(&self) -> Access {
        if self.is_shared() { Access::Lent } else { Access::Own }
    }

    /// Whether it is memory of this process that was lent out and came back: known by its carrier.
    fn is_ours(&self) -> bool {
        false
    }

    /// Whether its copy must lie in memory that was used for nothing before: the answer to a peer that
    /// could not take what it was sent.
    fn needs_fresh_memory(&self) -> bool {
        false
    }
}

/// Who could still write memory that crosses, and so how its receiver looks at it.
///
/// ```
/// use rung::{Access, Storage};
///
/// assert_eq!(Storage::from_vec(vec![1u8]).memory().access(), Access::Own);
/// ```
///
/// In this order: of several, the last is what holds for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Access {
    /// Nobody else can write it: it is in the message, a copy of this process's, or what this process lent itself.
    Own,
    /// It is sealed for good: nobody can write it, and whoever has it looks at it in place.
    Sealed,
    /// Its owner could write it: whoever trusts the owner looks at it in place. All memory of devices, which nothing can
    /// seal.
    Lent,
    /// Its owner could write it and is not trusted here: looking at it copies it out first.
    CopiedOut,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Own => "own",
            Self::Sealed => "sealed",
            Self::Lent => "lent",
            Self::CopiedOut => "copied out",
        })
    }
}

/// Whether memory that cannot be lent for this reason can be read all the same, by copying: it could be written
/// meanwhile, or the address space has no room for all of it.
fn is_to_be_copied(reason: Reason) -> bool {
    matches!(reason, Reason::PeerNotTrusted | Reason::NoMemory)
}

/// Which carrier and lease an imported storage came by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provenance {
    /// The carrier.
    pub rung: RungId,
    /// The sender's lease.
    pub lease: LeaseId,
}

/// Memory with an owner: what tensors are views of, and what carriers move.
///
/// A storage keeps its memory alive, and, if it was imported, the lease on it: dropping the last
/// `Arc` lets go of both, the memory first.
pub struct Storage {
    // Declared first, so dropped first: the peer must not hear that the memory was let go before
    // it is (L1).
    memory: Box<dyn Memory>,
    provenance: Option<Provenance>,
    origin: Option<Device>,
    guard: Option<Box<dyn Any + Send + Sync>>,
}

impl Storage {
    /// Over some memory.
    #[must_use]
    pub fn new(memory: impl Memory) -> Self {
        Self { memory: Box::new(memory), provenance: None, origin: None, guard: None }
    }

    /// The elements of a vector, without a copy.
    #[must_use]
    pub fn from_vec<T: Element>(elements: Vec<T>) -> Self {
        Self::new(VecMemory(elements))
    }

    /// Bytes, without a copy.
    #[must_use]
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        Self::new(BytesMemory(bytes.into()))
    }

    /// Notes where it came from.
    #[must_use]
    pub fn with_provenance(mut self, provenance: Provenance) -> Self {
        self.provenance = Some(provenance);
        self
    }

    /// Notes the device whose memory it was copied from on its way.
    #[must_use]
    pub fn with_origin(mut self, device: Device) -> Self {
        self.origin = Some(device);
        self
    }

    /// The device whose memory it was, where it was copied to the host for want of a better way.
    #[must_use]
    pub fn origin(&self) -> Option<Device> {
        self.origin
    }

    /// The guard as a concrete type, if it is one.
    #[must_use]
    pub fn guard_as<G: Any>(&self) -> Option<&G> {
        let any: &dyn Any = &**self.guard.as_ref()?;
        any.downcast_ref()
    }

    /// Something to drop once the memory is gone: how a receiver's receipt is sent.
    #[must_use]
    pub fn with_guard(mut self, guard: impl Any + Send + Sync) -> Self {
        self.guard = Some(Box::new(guard));
        self
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Where the memory is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    /// The memory itself, for a carrier that looks for its own kind.
    #[must_use]
    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// The memory as a concrete type, if it is one.
    #[must_use]
    pub fn memory_as<M: Memory>(&self) -> Option<&M> {
        let any: &dyn Any = &*self.memory;
        any.downcast_ref()
    }

    /// Takes the storage apart into its memory, if that is an `M`; the guard is dropped.
    ///
    /// # Errors
    ///
    /// The storage, unchanged, where its memory is of another type.
    pub fn into_memory<M: Memory>(self) -> Result<M, Self> {
        if self.memory_as::<M>().is_none() {
            return Err(self);
        }
        let Self { memory, provenance, origin, guard } = self;
        let any: Box<dyn Any> = memory;
        match any.downcast() {
            Ok(memory) => Ok(*memory),
            // Not reached: the type was just asked for. Kept total rather than a panic.
            Err(_) => {
                Err(Self { memory: Box::new(BytesMemory(Bytes::new())), provenance, origin, guard })
            }
        }
    }

    /// How it came into this process, if it did.
    #[must_use]
    pub fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_ref()
    }

    /// All of the bytes, where they may be lent: maps them on the first call.
    ///
    /// # Errors
    ///
    /// A refusal where the CPU cannot read them or they cannot be lent; [`Self::read`] then copies.
    pub fn host_bytes(&self) -> Result<&[u8], Refusal> {
        self.memory.bytes()
    }

    /// A range of the bytes: lent where they may be, else copied out, from a device too where its memory
    /// can be ([`Memory::read_at`]).
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`], or a refusal where the memory cannot be read.
    pub fn read(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>, Refusal> {
        match self.memory.bytes() {
            Ok(bytes) => {
                let lent = bytes.get(range).ok_or(Reason::OutOfBounds)?;
                Ok(Cow::Borrowed(lent))
            }
            // What cannot be lent may still be copied out: also from a device, where its rung can.
            Err(refusal)
                if is_to_be_copied(refusal.reason())
                    || refusal.reason() == Reason::DeviceMemory =>
            {
                if range.end > self.len() || range.start > range.end {
                    return Err(Reason::OutOfBounds.into());
                }
                let mut copy = zeroed::<u8>(range.len())?;
                self.memory.read_at(range.start, &mut copy)?;
                Ok(Cow::Owned(copy))
            }
            Err(refusal) => Err(refusal),
        }
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("memory", &self.memory)
            .field("provenance", &self.provenance)
            .finish_non_exhaustive()
    }
}

/// A range of another storage, as a storage: how a small part of a huge block is sent alone.
#[derive(Debug)]
pub(crate) struct Window {
    whole: Arc<Storage>,
    range: Range<usize>,
}

impl Memory for Window {
    fn len(&self) -> usize {
        self.range.len()
    }

    fn device(&self) -> Device {
        self.whole.device()
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        let bytes = self.whole.host_bytes()?;
        bytes.get(self.range.clone()).ok_or_else(|| Reason::OutOfBounds.into())
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        let end = offset.checked_add(into.len()).ok_or(Reason::OutOfBounds)?;
        if end > self.range.len() {
            return Err(Reason::OutOfBounds.into());
        }
        self.whole.memory().read_at(self.range.start + offset, into)
    }
}

impl Storage {
    /// A range of a storage, as a storage of its own that keeps the whole alive.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`] past the end.
    pub fn window(self: &Arc<Self>, range: Range<usize>) -> Result<Self, Refusal> {
        if range.start > range.end || range.end > self.len() {
            return Err(Reason::OutOfBounds.into());
        }
        Ok(Self::new(Window { whole: Arc::clone(self), range }))
    }
}

/// The elements of a vector.
struct VecMemory<T>(Vec<T>);

impl<T: Element> fmt::Debug for VecMemory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.0.len(), T::DTYPE)
    }
}

impl<T: Element> Memory for VecMemory<T> {
    fn len(&self) -> usize {
        size_of_val(self.0.as_slice())
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        Ok(bytemuck::cast_slice(&self.0))
    }
}

/// Reference-counted bytes.
struct BytesMemory(Bytes);

impl fmt::Debug for BytesMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Memory for BytesMemory {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        Ok(&self.0)
    }
}

/// All bytes of a storage whose memory was seen to be lendable: an owner for [`Bytes`].
#[derive(Debug)]
pub struct Lendable(Arc<Storage>);

impl Lendable {
    /// Checks that the bytes can be lent.
    ///
    /// # Errors
    ///
    /// As [`Storage::host_bytes`].
    pub fn new(storage: Arc<Storage>) -> Result<Self, Refusal> {
        storage.host_bytes()?;
        Ok(Self(storage))
    }
}

impl AsRef<[u8]> for Lendable {
    fn as_ref(&self) -> &[u8] {
        // Memory that has once been lent stays lendable; were one to break that rule, no bytes are
        // the answer that harms nobody.
        self.0.host_bytes().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_reads_its_part_and_no_more() {
        let whole = Arc::new(Storage::from_vec(vec![0u8, 1, 2, 3, 4]));
        let part = whole.window(1..4).unwrap();
        assert_eq!(part.host_bytes().unwrap(), [1, 2, 3]);
        let mut two = [0; 2];
        part.memory().read_at(1, &mut two).unwrap();
        assert_eq!(two, [2, 3]);
        assert_eq!(part.memory().read_at(2, &mut two).unwrap_err().reason(), Reason::OutOfBounds);
        assert_eq!(whole.window(4..6).unwrap_err().reason(), Reason::OutOfBounds);
    }

    #[test]
    fn memory_goes_before_its_guard() {
        #[derive(Debug)]
        struct Noting(&'static str, Arc<std::sync::Mutex<Vec<&'static str>>>);
        impl Drop for Noting {
            fn drop(&mut self) {
                self.1.lock().unwrap().push(self.0);
            }
        }
        impl Memory for Noting {
            fn len(&self) -> usize {
                0
            }
            fn bytes(&self) -> Result<&[u8], Refusal> {
                Ok(&[])
            }
        }
        let order = Arc::default();
        let storage = Storage::new(Noting("memory", Arc::clone(&order)))
            .with_guard(Noting("guard", Arc::clone(&order)));
        drop(storage);
        assert_eq!(*order.lock().unwrap(), ["memory", "guard"]);
    }
}
