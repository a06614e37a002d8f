//! Blocks of host memory that two processes share: the only crate that maps memory.
//!
//! A block is an anonymous file (memfd_create(2)): it has no name, so nothing is left behind when
//! both sides are killed, and no `/dev/shm` mount limits it. What a peer could do to it is ruled out
//! by seals, which the kernel enforces and any holder of the descriptor can read. (Elsewhere than on Linux it is what
//! `sys` has in its place: without a name too, and without seals, so that what comes from a peer is always
//! [`Foreign`]; `docs/platforms.md`.)
//!
//! | type | whose | who can write it | lends `&[u8]` |
//! |---|---|---|---|
//! | [`Draft`] | ours, not yet sent | its one owner, through `&mut` | to its owner |
//! | [`Sealed`] | ours or a peer's | nobody, for ever | to anyone |
//! | [`Shared`] | ours, lent out | nobody until it is a `Draft` again | to us |
//! | [`Foreign`] | a peer's `Shared` | that peer | only with [`PeerTrust`]; else it copies out |
//!
//! Blocks of ours that nobody holds any more wait in a [`Pool`], mapped, for their next use. Where a
//! peer keeps its mappings too, nothing is asked of the kernel in steady state ([`calls`]).
//!
//! ```
//! use segment::{Draft, Received, Sealed};
//!
//! let mut draft = Draft::new(4096)?;
//! draft.bytes_mut()[..5].copy_from_slice(b"hello");
//! let sealed = draft.seal()?;
//!
//! // The descriptor goes to another process, which believes nothing but the kernel:
//! let descriptor = sealed.descriptor()?;
//! let mut hello = [0; 5];
//! match segment::receive(descriptor, 4096)? {
//!     Received::Sealed(received) => hello.copy_from_slice(&received.bytes()?[..5]),
//!     // Where nothing can be sealed, what is not trusted is copied out.
//!     Received::Foreign(received) => received.read_at(0, &mut hello)?,
//! }
//! assert_eq!(&hello, b"hello");
//! # Ok::<(), rung::Fault>(())
//! ```
//!
//! # Invariants
//!
//! - **S1** A block's size never changes once a second process can see it: `F_SEAL_SHRINK` and
//!   `F_SEAL_GROW` are set before its descriptor leaves, and checked before one is mapped. With that,
//!   and with every page allocated (checked too), no access to a mapping can raise SIGBUS. (Sections are not
//!   resizable, and their memory is committed, which is checked.)
//! - **S2** The bytes of a [`Sealed`] block never change: `F_SEAL_WRITE` cannot be set while a
//!   writable mapping exists, and no writable one can be made after (fcntl(2)). (Without seals: its owner has no
//!   writable mapping of it any more, and nobody else can make one.)
//! - **S3** A [`Shared`] block is written by nobody but its owner, and by that only as a [`Draft`]:
//!   `F_SEAL_FUTURE_WRITE` leaves the owner's old mapping as the only writable one. (Without it: peers get handles
//!   for reading.)
//! - **S4** Plain `&[u8]` over a [`Foreign`] block is lent only under a [`PeerTrust`].
//!
//! # What it does not do
//!
//! It sends nothing (`link`, or your own socket) and knows no tensor (`tier-shm`).

/// What [`marks`] is made of; in `tests/loom` another thing by the same name.
mod atomic {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
}
mod copy;
mod counters;
mod draft;
mod file;
mod filling;
mod foreign;
mod fork;
mod headroom;
mod id;
mod mapping;
mod marks;
mod pool;
mod sealed;
mod sys;
#[cfg(test)]
mod tests;
mod trust;

pub use copy::set_copy_threads;
pub use counters::{Calls, calls};
pub use draft::{Draft, Shared};
pub use filling::Filling;
pub use foreign::{Foreign, Received, receive};
pub use fork::generation;
pub use id::{BlockId, Watcher};
pub use pool::{Limits, Pool, PoolStats};
pub use sealed::Sealed;
pub use trust::PeerTrust;
