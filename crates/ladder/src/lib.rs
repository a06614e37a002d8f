//! Moves values between a host and isolated workers, each leaf on the best mechanism that its data,
//! this platform and *this pair of processes* allow.
//!
//! ```no_run
//! use ladder::{Channel, Methods, Tensor, Value, Worker};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // In the worker: the same executable, started again.
//!     if let Some(channel) = Channel::from_env()? {
//!         channel.serve(Methods::new().on("count", |value| {
//!             let tensor = value.as_tensor().ok_or("a tensor is wanted")?;
//!             Ok(Value::from(tensor.count()))
//!         }))?;
//!         return Ok(());
//!     }
//!     // In the host.
//!     let worker = Worker::spawn_self()?;
//!     let image = Tensor::from_vec(vec![0u8; 1920 * 1080 * 3], &[1080, 1920, 3])?;
//!     let reply = worker.call("count", image)?;
//!     assert_eq!(reply.value().as_i64(), Some(6_220_800));
//!     for leg in &reply.sent().legs {
//!         println!("{} rode {} with {} copies", leg.path, leg.rung, leg.copies);
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # How it works
//!
//! A [`Value`] is packed before anything is sent: every leaf goes down the rungs until one takes it,
//! and metadata alone crosses the socket. The receiver imports everything before its handler starts,
//! and then accepts, or says what it could not take, and the sender tries something else in the same
//! call. Memory that was lent is kept by its sender until the receiver's receipt is home. Every
//! answer says what each leaf rode, and why nothing higher: [`Route`].
//!
//! # What it does not do
//!
//! It confines nothing: a worker has the rights of its user (`SECURITY.md`).
//!
//! # Where to read on
//!
//! [`Registry`] (types of your own), `typed` (calls with any type that `serde` knows),
//! `survey`, `pack` and `unpack` (values to parcels and back), `core` (who reads the socket), `pool`
//! (which thread runs a handler), `call`, `serve` and `transfer` (the two sides of a call), `keeper` (leases), `wire` (every message),
//! `channel` and `worker` (what users hold).

mod bundle;
mod call;
mod channel;
mod core;
mod error;
mod facts;
mod fail;
#[cfg(all(feature = "failpoints", debug_assertions))]
pub mod fuzzing;
mod handler;
mod handshake;
mod keeper;
mod ladder;
#[cfg(unix)]
mod outside;
mod own;
mod pack;
mod pool;
mod prove;
mod registry;
mod route;
mod serve;
mod stats;
mod survey;
mod transfer;
mod typed;
mod unpack;
mod unproven;
mod wire;
mod worker;

pub use channel::{CallOptions, Channel, Peer, Reply};
#[cfg(all(feature = "failpoints", debug_assertions))]
pub use fail::ALL as FAILPOINTS;
#[cfg(all(feature = "failpoints", debug_assertions))]
pub use unproven::ByHand;

pub use error::{CallError, CallErrorKind, ConnectError, Ended};
pub use handler::{Failure, Handler, Methods};
pub use keeper::{AtBound, Bounds, HeldLease};
pub use ladder::Ladder;
#[cfg(unix)]
pub use outside::Listener;
pub use registry::{Decomposed, Decomposer, Parts, RegisterError, Registry, RegistryBuilder};
pub use route::{BelowRequired, LeafPath, Leg, Route, What};
pub use stats::{Declined, RungStats, Stats};
pub use transfer::Verify;
pub use typed::Answer;
pub use unproven::Unproven;
pub use worker::{Untrusted, Worker, WorkerBuilder};

pub use ::worker::{Command, Exit, Output, SpawnError};
pub use canary::{self, Difference, Facts, Proof, Report, RungReport, Verdict};
pub use link::Traffic;
pub use rung::{
    self, Access, Array, BigInt, BridgeError, DType, Descr, Device, Fault, Map, Object,
    OpaquePickle, Reason, Refusal, RungId, Tensor, Unsendable, Value, from_value, to_value,
};
pub use segment::PeerTrust;
#[cfg(feature = "cuda-unversioned")]
pub use tier_cuda_ipc::{self, DeviceTensorMut, alloc_on};
#[cfg(feature = "numpy")]
pub use tier_numpy;
#[cfg(feature = "pickle")]
pub use tier_pickle;
#[cfg(feature = "pool-ipc")]
pub use tier_pool_ipc::{self, Contract};
#[cfg(feature = "shm")]
pub use tier_shm::{self, TensorMut, release, share};
