//! Device memory as two rungs: `cuda-ipc`, by the driver's older handles, and `cuda-vmm`, by descriptors.
//!
//! | rung | takes | copies | when its process dies |
//! |---|---|---|---|
//! | [`CudaIpc`] | memory that the driver says is capable of it: `cuMemAlloc`'s | none | it goes along; using it is an error |
//! | [`CudaVmm`] | memory that was created shareable ([`alloc_on`]) | none | it stays, for those who have it |
//! | [`CudaVmm`] | any other: stream-ordered (`cuMemAllocAsync`: `cudarc`'s and `candle`'s own), managed, a pool's | one, on the device | likewise |
//!
//! Which of them is asked of the driver for each tensor: an allocator is never taken for another. There may be no
//! driver, no device, or none that both processes see: each is a [refusal](rung::Refusal) with a reason.
//!
//! ```
//! use rung::{DType, Reason, Rung};
//! use tier_cuda_ipc::{CudaVmm, alloc_on};
//!
//! match CudaVmm.probe() {
//!     Err(refusal) => assert!(!refusal.to_string().is_empty()), // no CUDA driver: …
//!     Ok(_) => {
//!         let device = cuda::driver()?.devices()[0].device();
//!         let mut image = alloc_on(device, DType::F32, &[2, 2])?;
//!         image.write(&[0; 16])?;
//!         let image = image.share(); // to any number of peers, without a copy
//!         assert_eq!(image.to_vec::<f32>()?, [0.0; 4]);
//!     }
//! }
//! # Ok::<(), rung::Refusal>(())
//! ```
//!
//! # Order
//!
//! Work of a device is ordered by streams, and two processes share none. So every send carries a *ready-event* behind
//! what its owner has enqueued, which the receiver's stream waits for ([`on`]); and every receipt carries *done-events*
//! behind what the receiver has enqueued, which the owner's stream waits for before anything that comes after. Nobody
//! waits on the CPU, unless the processes cannot share events.
//!
//! # Lifetime
//!
//! An allocation is mapped once and stays so until its users have let go (`session` has the rules). Memory of the
//! older kind is not freed before its peers have unmapped it, whatever its users do.
//!
//! | module | what |
//! |---|---|
//! | `staging` | shareable memory that other memory is copied into |
//! | `import` | memory of a peer's, mapped once |
//! | `session`, `carrier` | what is lent and kept, and the carrier |
//!
//! Tensors, the memory of both sides, leases, and events are those of [`cuda_memory`], for every rung of devices.
//!
//! # What it does not do
//!
//! Elsewhere than on Linux both rungs refuse, with [`rung::Reason::Platform`]; device memory goes by `shm` there. It launches nothing and has no socket. Memory that a peer has mapped can be written by that peer: the driver has no
//! seals.

mod carrier;
mod import;
mod session;
mod staging;

use cuda_memory::offer::{self, Pair};
use rung::{Device, Offer, Reason, Refusal, Rung, RungId, Session, Trust};
use segment::PeerTrust;

pub use cuda;
#[cfg(feature = "dlpark")]
pub use cuda_memory::dlpack::{from_dlpack, to_dlpack};
pub use cuda_memory::{
    CudaMemory, DeviceTensorMut, Use, UseMut, alloc_on, copy_to, on, share_buffer, share_slice,
};

use carrier::{CudaCarrier, Kind};

/// Memory of `cuMemAlloc`, by handles of whole allocations.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaIpc;

/// Memory that was created shareable, by descriptors; and any other, copied once on its device.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaVmm;

fn probe(kind: Kind) -> Result<Offer, Refusal> {
    offer::expect_linux()?;
    let driver = cuda::driver()?;
    let can = |info: &&cuda::DeviceInfo| kind == Kind::Legacy || info.can().share_descriptors;
    let of = |info: &cuda::DeviceInfo| (info.device(), info.can().share_events);
    let devices: Vec<(Device, bool)> = driver.devices().iter().filter(can).map(of).collect();
    if devices.is_empty() {
        let what = "no device makes memory that leaves as a descriptor";
        return Err(Refusal::new(Reason::Platform, what));
    }
    offer::make(kind.id(), devices)
}

fn open(kind: Kind, mine: &Offer, peer: &Offer, trust: &Trust) -> Result<Session, Refusal> {
    let pair = Pair::read(mine, peer)?;
    let is_trusted = trust.token::<PeerTrust>().is_some();
    let session = session::Session::new(pair, is_trusted);
    Ok(Session::Carrier(Box::new(CudaCarrier::new(kind, session))))
}

impl Rung for CudaIpc {
    fn id(&self) -> RungId {
        RungId::CUDA_IPC
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        probe(Kind::Legacy)
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let Ok(driver) = cuda::driver() else { return Vec::new() };
        let names =
            driver.devices().iter().map(|info| format!("{} {}", info.device(), info.name()));
        vec![("cuda driver", driver.version()), ("devices", names.collect::<Vec<_>>().join(", "))]
    }

    fn open(&self, mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal> {
        open(Kind::Legacy, mine, peer, &trust)
    }
}

impl Rung for CudaVmm {
    fn id(&self) -> RungId {
        RungId::CUDA_VMM
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        probe(Kind::Shareable)
    }

    fn open(&self, mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal> {
        open(Kind::Shareable, mine, peer, &trust)
    }
}
