//! Shared host memory as a rung: sealed segments passed by descriptor; on Windows sections, by handle.
//!
//! Works alone, in any protocol that can pass text and file descriptors: see
//! `examples/07_tier_shm_alone.rs`. Within one process, the whole life of a tensor is:
//!
//! ```
//! use std::collections::VecDeque;
//! use rung::{DType, Parcel, Rung, Session, Tensor, Trust};
//! use tier_shm::{Shm, TensorMut};
//!
//! // Both sides probe, exchange their offers, and open.
//! let (mine, theirs) = (Shm.probe()?, Shm.probe()?);
//! let Session::Carrier(sender) = Shm.open(&mine, &theirs, Trust::none())? else { panic!() };
//! let Session::Carrier(receiver) = Shm.open(&theirs, &mine, Trust::none())? else { panic!() };
//!
//! // Born shared: filled in place, and sent without a copy.
//! let mut image = TensorMut::new(DType::F32, &[2, 2])?;
//! image.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
//! let image = image.share()?;
//! let packed = sender.export(image.storage())?;
//!
//! // Text and descriptors cross; the receiver checks both against what the kernel says.
//! let (text, descriptors) = packed.parcel.split()?;
//! let parcel = Parcel::join(text, &mut VecDeque::from(descriptors))?;
//! let lease = parcel.lease;
//! let storage = std::sync::Arc::new(receiver.import(parcel)?);
//! let received = Tensor::contiguous(storage, DType::F32, &[2, 2])?;
//! assert_eq!(received.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
//!
//! // The receiver lets go and says so; then the sender may write the memory again.
//! drop(received);
//! sender.released(receiver.receipt(lease));
//! drop(packed.owner);
//! let again = TensorMut::reclaim(image).expect("every lease is home");
//! assert_eq!(again.shape(), [2, 2]);
//! # Ok::<(), rung::Fault>(())
//! ```
//!
//! # Blocks and their reuse
//!
//! Blocks come from the process's [`Pool`] and go back to it. To a peer who is trusted, private memory
//! is copied into one, its descriptor goes there once, and both sides keep it mapped: in steady state
//! nothing is asked of the kernel. A peer who is not trusted could go on looking at what it gave back,
//! so private memory goes to it in fresh sealed blocks, and a shared tensor that it saw is not used again.
//! What it lends could be written while it is looked at: it is copied out first, unless it is sealed for good; with
//! [`SealedShm`] nothing else is taken.
//!
//! # Memory of devices
//!
//! Where no rung of devices takes a device's memory, it is copied straight into a block, and arrives on the host with a
//! word of where it was ([`rung::Tensor::origin`]). With the feature `cuda` such blocks are registered with the
//! driver, once a block, on both sides ([`pin_received`]): it then copies at the speed of the bus.
//!
//! # What it does not do
//!
//! It has no socket: whoever sends parcels keeps `Packed::owner` until the receipt came
//! and [`rung::Carrier::released`] was told of it. An owner that is dropped before is memory that is
//! never written again.
//!
//! Where nothing can be sealed (Windows, macOS: `docs/platforms.md`), a receiver that does not trust its peer copies out
//! what it looks at.

mod carrier;
mod memory;
mod session;
mod staging;
mod tensor;

pub use segment::PeerTrust;
pub use segment::{Limits, Pool, PoolStats, set_copy_threads};
pub use staging::pin_received;
pub use tensor::{TensorMut, release, seal_copy, share};

use rung::{Meta, Offer, Reason, Refusal, Rung, RungId, Session, Trust};
use serde::{Deserialize, Serialize};

use carrier::{OnlySealed, ShmCarrier};

/// The version of what parcels hold.
const FORMAT: u32 = 2;

/// What a side offers that takes only what is sealed for good; whoever takes any block offers the version alone.
#[derive(Debug, Serialize, Deserialize)]
struct SealedTerms {
    /// The version.
    v: u32,
    /// Whether it is so.
    s: bool,
}

/// Whether the side that offers this takes only what is sealed for good.
fn only_sealed(offer: &Offer) -> Result<bool, Refusal> {
    match offer.meta.read() {
        Ok(SealedTerms { v: FORMAT, s }) => Ok(s),
        _ => offer.expect_version("format", FORMAT).map(|()| false),
    }
}

/// To see that this process can.
fn try_it() -> Result<(), Refusal> {
    segment::Draft::new(1)?.share().map(drop)
}

fn open(mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal> {
    let only_sealed = OnlySealed { here: only_sealed(mine)?, there: only_sealed(peer)? };
    Ok(Session::Carrier(Box::new(ShmCarrier::new(trust, only_sealed))))
}

/// The rung.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shm;

impl Rung for Shm {
    fn id(&self) -> RungId {
        RungId::SHM
    }

    /// Makes a segment and seals it, to see that this process can.
    fn probe(&self) -> Result<Offer, Refusal> {
        try_it()?;
        Ok(Offer::of_version(self.id(), FORMAT)?)
    }

    fn open(&self, mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal> {
        open(mine, peer, trust)
    }
}

/// The rung towards a peer from whom nothing is taken that its owner could still write: the peer seals for good
/// what it sends, at the price of a fresh block and a copy for each tensor that is not sealed already, and what it
/// sends is looked at in place without trust. The other way nothing is different.
///
/// The same rung on the wire as [`Shm`]: one side may have this one, and the other that.
#[derive(Debug, Clone, Copy, Default)]
pub struct SealedShm;

impl Rung for SealedShm {
    fn id(&self) -> RungId {
        RungId::SHM
    }

    /// Makes a segment and seals it, to see that this process can.
    ///
    /// # Errors
    ///
    /// As of [`Shm`]; and [`Reason::Platform`] where no memory can be sealed (Windows, macOS).
    fn probe(&self) -> Result<Offer, Refusal> {
        if !cfg!(target_os = "linux") {
            return Err(Refusal::new(Reason::Platform, "memory cannot be sealed here"));
        }
        try_it()?;
        let meta = Meta::write(&SealedTerms { v: FORMAT, s: true })?;
        Ok(Offer { rung: self.id(), meta, handles: Vec::new() })
    }

    fn open(&self, mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal> {
        open(mine, peer, trust)
    }
}
