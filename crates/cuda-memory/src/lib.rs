//! Device memory, ours or a peer's, as the rungs share it.
//!
//! Two crates move device memory between processes, `tier-cuda-ipc` and `tier-pool-ipc`, by mechanisms that have their
//! own rules for who frees what, and when. What they have in common is here, once: so a tensor is of one kind of memory
//! ([`CudaMemory`]), whichever rung will take it.
//!
//! | module | what |
//! |---|---|
//! | [`offer`] | what each process says of its devices; what follows for the pair |
//! | [`block`] | memory of ours, who uses it, and who hears of their end |
//! | [`events`] | the order of work between two processes: ready- and done-events |
//! | [`lease`] | a lease on memory of a peer's |
//! | [`memory`] | both as the memory of storages |
//! | [`tensor`] | tensors that are born for peers, or of memory that somebody else allocated |
//! | `dlpack` | tensors of other frameworks (feature `dlpark`) |
//!
//! ```
//! use cuda_memory::alloc_on;
//! use rung::DType;
//!
//! if let Ok(driver) = cuda::driver() {
//!     let mut image = alloc_on(driver.devices()[0].device(), DType::F32, &[2, 2])?;
//!     image.write(&[0; 16])?;
//!     assert_eq!(image.share().to_vec::<f32>()?, [0.0; 4]);
//! }
//! # Ok::<(), rung::Refusal>(())
//! ```
//!
//! # What it does not do
//!
//! It sends nothing and decides nothing: which memory leaves how is its rung's business.

pub mod block;
#[cfg(feature = "dlpark")]
pub mod dlpack;
pub mod events;
pub mod lease;
pub mod memory;
pub mod offer;
pub mod tensor;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use memory::{CudaMemory, Use};
pub use tensor::{DeviceTensorMut, UseMut, alloc_on, copy_to, on, share_buffer, share_slice};

/// A table of this crate's or a rung's.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks is half done when somebody panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
