//! Memory of a shareable CUDA pool as a rung, `pool-ipc`: experimental, and off unless both sides ask for it.
//!
//! A pointer of a pool crosses without a copy. In exchange the driver counts nothing: whoever imported it has to free it
//! before its owner does, in an order that the two processes have to keep between them. Other systems that shared pools
//! left that to chance. Here it is a written contract (`docs/pool-ownership-contract.md`), a model of it that a checker
//! goes through (`tests/pool-model`), and types whose methods are its steps ([`contract`]).
//!
//! ```
//! use rung::{DType, Rung};
//! use tier_pool_ipc::{Contract, PoolIpc, alloc_on};
//!
//! let rung = PoolIpc::experimental(Contract::V1);
//! match rung.probe() {
//!     Err(refusal) => assert!(!refusal.to_string().is_empty()), // no CUDA driver: …
//!     Ok(_) => {
//!         let device = cuda::driver()?.devices()[0].device();
//!         let mut image = alloc_on(device, DType::F32, &[2, 2])?;
//!         image.write(&[0; 16])?;
//!         assert_eq!(image.share().to_vec::<f32>()?, [0.0; 4]);
//!     }
//! }
//! # Ok::<(), rung::Refusal>(())
//! ```
//!
//! What to use instead, unless memory has to come out of a pool: `tier_cuda_ipc::alloc_on`, whose memory the driver
//! counts across processes, without a copy as well.
//!
//! | module | what |
//! |---|---|
//! | [`contract`] | the states of an allocation, and the proofs between them |
//! | `pools` | this process's pools, and tensors in them |
//! | `import` | memory of a peer's pool, imported once |
//! | `session`, `carrier` | what is lent and kept, and the carrier |
//! | `steps` | what was done, as `tracing` events |
//!
//! # What it does not do
//!
//! Elsewhere than on Linux it refuses, with [`rung::Reason::Platform`]. It speaks to peers that are trusted, since whoever has a
//! pool may see all of it. What came by it goes back to its owner, and no further: to a third process it is copied, by
//! `cuda-vmm`.

mod carrier;
pub mod contract;
mod import;
mod pools;
mod session;
mod steps;

use cuda_memory::offer::{self, Pair};
use rung::{Device, Meta, Offer, Reason, Refusal, Rung, RungId, Session, Trust};
use segment::PeerTrust;
use serde::{Deserialize, Serialize};

pub use contract::Contract;
pub use cuda_memory::{CudaMemory, DeviceTensorMut};
pub use pools::{MAX_BYTES, STEP, alloc_on};

use carrier::PoolCarrier;

/// The rung; there is no other way to it than to name the contract.
#[derive(Debug, Clone, Copy)]
pub struct PoolIpc(Contract);

impl PoolIpc {
    /// The rung, for who knows what it is: experimental, by this contract.
    #[must_use]
    pub fn experimental(contract: Contract) -> Self {
        Self(contract)
    }
}

/// What a process offers: the contract's number, and its devices.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    c: u32,
    o: Meta,
}

fn read(offer: &Offer) -> Result<(u32, Offer), Refusal> {
    let Said { c, o } = offer.meta.read()?;
    Ok((c, Offer { rung: offer.rung.clone(), meta: o, handles: Vec::new() }))
}

impl Rung for PoolIpc {
    fn id(&self) -> RungId {
        RungId::POOL_IPC
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        offer::expect_linux()?;
        let driver = cuda::driver()?;
        let can = |info: &&cuda::DeviceInfo| info.can().pools && info.can().share_pools;
        let of = |info: &cuda::DeviceInfo| (info.device(), info.can().share_events);
        let devices: Vec<(Device, bool)> = driver.devices().iter().filter(can).map(of).collect();
        if devices.is_empty() {
            let what = "no device makes pools that leave as descriptors";
            return Err(Refusal::new(Reason::Platform, what));
        }
        tracing::warn!(
            "pool-ipc is experimental: docs/pool-ownership-contract.md is what it goes by"
        );
        let o = offer::make(self.id(), devices)?.meta;
        let meta = Meta::write(&Said { c: self.0.number(), o })?;
        Ok(Offer { rung: self.id(), meta, handles: Vec::new() })
    }

    fn open(&self, mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal> {
        let ((own, mine), (theirs, peer)) = (read(mine)?, read(peer)?);
        if own != theirs {
            let detail = format!("contract {theirs}, here {own}");
            return Err(Refusal::new(Reason::NotOffered, detail));
        }
        if trust.token::<PeerTrust>().is_none() {
            let what = "whoever has a pool may see all of it, and has to free in time (O7)";
            return Err(Refusal::new(Reason::PeerNotTrusted, what));
        }
        let session = session::Session::new(Pair::read(&mine, &peer)?);
        Ok(Session::Carrier(Box::new(PoolCarrier::new(session))))
    }
}
