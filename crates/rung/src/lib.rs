//! The words of the tensor ladder: what moves, what moves it, and why something does not.
//!
//! Every other crate of the workspace depends on this one; it depends on none of them. There is no
//! I/O and no unsafe code here.
//!
//! ```
//! use rung::{DType, Tensor, Value};
//!
//! // A 2 × 3 tensor, and a view of its last column that shares the same storage.
//! let image = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
//! let column = image.select(1, 2)?;
//! assert_eq!(column.shape(), [2]);
//! assert_eq!(column.strides(), [3]);
//! assert_eq!(column.to_vec::<f32>()?, [3.0, 6.0]);
//!
//! // A value is what crosses to another process.
//! let job = Value::map([("image", Value::from(image)), ("radius", Value::from(2.5))]);
//! assert_eq!(job.get("image").and_then(Value::as_tensor).map(Tensor::dtype), Some(DType::F32));
//! # Ok::<(), rung::Refusal>(())
//! ```
//!
//! # Where to read on
//!
//! | module | words |
//! |---|---|
//! | [`mod@dtype`], [`mod@layout`] | element types; shape, signed strides in elements, byte offset, checked once |
//! | [`mod@storage`], [`mod@tensor`] | memory with an owner; a tensor is a view of it |
//! | [`mod@descr`], [`mod@array`] | NumPy's element types; arrays of them |
//! | [`mod@pickle`], [`mod@object`] | what is held unopened: pickles, and objects of registered types |
//! | [`mod@value`], [`mod@map`], [`mod@path`] | null … map, tensor: everything that can be sent, and places in it |
//! | [`mod@bridge`] | values from and to any type that `serde` knows, tensors in them without a copy |
//! | [`mod@parcel`] | `Offer`, `Parcel`, `Receipt`: metadata plus owned platform handles |
//! | [`mod@sent`] | what goes to a peer once, and by its number from then on |
//! | [`mod@wake`] | how a session asks that something be sent |
//! | [`mod@traits`] | `Rung`, and what it opens: a `Carrier` or a `Form` |
//! | [`mod@reason`] | `Refusal` ("cannot apply here", data) and `Fault` (broken, an error) |
//! | [`mod@limits`] | every cap, in one place |
//!
//! # What it does not do
//!
//! It maps no memory (`segment`), opens no socket (`link`) and knows no rung by more than its name.

pub mod array;
pub mod bridge;
pub mod descr;
pub mod device;
pub mod dtype;
pub mod layout;
pub mod limits;
pub mod map;
pub mod object;
pub mod parcel;
pub mod path;
pub mod pickle;
pub mod reason;
pub mod sent;
pub mod storage;
pub mod tensor;
pub mod traits;
pub mod value;
pub mod wake;

pub use array::Array;
pub use bridge::{BridgeError, from_value, to_value};
pub use descr::{ByteOrder, Descr, Field, Kind, Scalar, TimeUnit};
pub use device::Device;
pub use dtype::{DType, Element};
pub use layout::Layout;
pub use map::Map;
pub use object::Object;
pub use parcel::{
    Handle, LeaseId, Meta, Offer, OfferWire, Parcel, ParcelWire, Receipt, ReceiptWire, RungId,
};
pub use path::{Path, Step};
pub use pickle::OpaquePickle;
pub use reason::{Fault, Reason, Refusal, Unsendable};
pub use storage::{Access, Lendable, Memory, Provenance, Storage};
pub use tensor::{Flags, Tensor};
pub use traits::{
    Carrier, Fill, Form, Leaf, Lowered, Owner, Packed, Reach, Room, Rung, Session, Trust,
};
pub use value::{BigInt, Value};
