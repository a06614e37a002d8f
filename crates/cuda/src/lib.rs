//! The CUDA driver, owned and checked: the only FFI of the workspace.
//!
//! Nothing is linked. The driver's library is looked for at run time, and that there is none is a refusal with
//! a reason, like any other. Types and constants are `cudarc`'s (`cudarc::driver::sys`); functions are looked up
//! by name and typed to return a plain number, because a code that a newer driver knows and this build does not
//! must be a number that can be looked at.
//!
//! | module | what |
//! |---|---|
//! | [`mod@driver`] | the library, its version, the devices by UUID and what each can do |
//! | [`mod@context`] | the primary context of a device, held while something needs it |
//! | [`mod@stream`] | streams and events: what device work is ordered by, across processes too |
//! | [`mod@memory`] | [`Buffer`]: device memory with an owner; allocations of every kind; what a pointer says of itself |
//! | [`mod@ipc`] | both ways in which memory crosses: legacy handles, and descriptors of shareable allocations |
//! | [`mod@pool`] | pools of stream-ordered memory that another process can see into |
//! | [`mod@host`] | host memory that the driver knows (pinned) |
//! | `dlpack` | DLPack's managed tensors in and out (feature `dlpark`) |
//! | [`mod@slices`] | `cudarc`'s slices in, and views of them out |
//!
//! ```
//! use rung::Reason;
//!
//! match cuda::driver() {
//!     // A machine without a driver, or with one and no device, says so.
//!     Err(refusal) => assert!(matches!(
//!         refusal.reason(),
//!         Reason::NoDriver | Reason::OldDriver | Reason::NoDevice | Reason::Driver
//!     )),
//!     Ok(driver) => {
//!         let device = driver.devices()[0].device();
//!         let context = cuda::Context::of(device)?;
//!         let stream = cuda::Stream::new(&context)?;
//!         let buffer = cuda::Buffer::shareable(&context, 4096)?;
//!         buffer.write_at(0, b"hello", &stream)?;
//!         let mut back = [0; 5];
//!         buffer.read_at(0, &mut back, &stream)?;
//!         assert_eq!(&back, b"hello");
//!     }
//! }
//! # Ok::<(), rung::Refusal>(())
//! ```
//!
//! # Invariants
//!
//! - **C1** A function is called with the types that `cuda.h` gives it, under the name that `cuda.h` maps it to
//!   (`_v2` where it does), and only after `cuInit` succeeded. The library is never unloaded.
//! - **C2** What the driver handed out (contexts, streams, events, allocations, reservations, mappings, imports,
//!   registrations) is owned by one value, given back once, when that value is dropped, with its context current.
//! - **C3** After a fork nothing is called: use is refused, and drops do nothing (the driver does not survive one).
//! - **C4** An address that reaches a copy or a fill comes from a [`Buffer`] or a registered slice whose owner
//!   lives until the work is done or is ordered before whatever ends it; ranges are checked against its length.
//! - **C5** Host memory that a copy touches is borrowed until the copy is done: such copies wait before they return.
//!
//! # What it does not do
//!
//! Outside Linux nothing leaves this process: exporting is refused. It decides nothing: which mechanism moves which memory is `tier-cuda-ipc`'s business. It launches no kernels.

mod code;
pub mod context;
mod descriptor;
#[cfg(feature = "dlpark")]
pub mod dlpack;
pub mod driver;
mod functions;
pub mod host;
pub mod ipc;
mod keeps;
pub mod memory;
pub mod pool;
pub mod slices;
pub mod stream;

pub use code::name as code_name;
pub use context::Context;
pub use driver::{DeviceInfo, Driver, driver};
pub use host::Registered;
pub use ipc::MemHandle;
pub use memory::{Attributes, Buffer};
pub use pool::{ExportedPool, PointerHandle, Pool, WeakPool};
pub use slices::SliceView;
pub use stream::{Event, EventHandle, Stream};
