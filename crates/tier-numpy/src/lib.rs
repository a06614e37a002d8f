//! Arrays with NumPy's own element types, as a rung: byte order, times, strings, records.
//!
//! An array whose type a tensor can have rides as a tensor, and comes back as an array; any other rides
//! as the bytes of its elements, with its type in the JSON. No element is copied or converted on the way.
//!
//! ```
//! use rung::{Array, Leaf, Rung, Session, Trust, Value};
//! use tier_numpy::Numpy;
//!
//! let offer = Numpy.probe()?;
//! let Session::Form(form) = Numpy.open(&offer, &offer, Trust::none())? else { panic!() };
//!
//! let times = Array::from_bytes(vec![0; 16], "<M8[ns]".parse()?, &[2])?;
//! let lowered = form.lower(Leaf::Array(&times))?;
//! assert_eq!(lowered.meta.as_json(), r#""<M8[ns]""#);
//! assert_eq!(form.raise(lowered)?, Value::from(times));
//! # Ok::<(), rung::Fault>(())
//! ```
//!
//! # Where to read on
//!
//! | module | what |
//! |---|---|
//! | [`views`] | `ndarray` arrays and views of tensors, and tensors of them |
//! | [`npy`] | `.npy` files, and `.npz` archives with feature `npz` |
//!
//! # What it does not do
//!
//! Arrays of objects are pointers into one interpreter: they are pickles (`tier-pickle`), or lists.
//! Records whose fields overlap or stand out of order have no `descr` in NumPy either.

mod literal;
pub mod npy;
pub mod views;

use rung::{
    Array, Fault, Form, Leaf, Lowered, Meta, Offer, Reason, Refusal, Rung, RungId, Session, Trust,
    Value,
};

pub use views::{copy_ndarray, from_ndarray, to_ndarray, view};

/// The version of what this rung writes.
const FORMAT: u32 = 1;

/// The rung.
#[derive(Debug, Clone, Copy, Default)]
pub struct Numpy;

impl Rung for Numpy {
    fn id(&self) -> RungId {
        RungId::NUMPY
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        let meta = Meta::write(&FORMAT)?;
        Ok(Offer { rung: self.id(), meta, handles: Vec::new() })
    }

    fn open(&self, _mine: &Offer, peer: &Offer, _trust: Trust) -> Result<Session, Refusal> {
        match peer.meta.read::<u32>() {
            Ok(FORMAT) => Ok(Session::Form(Box::new(NumpyForm))),
            _ => Err(Refusal::new(
                Reason::NotOffered,
                format!("format {}, here {FORMAT}", peer.meta.as_json()),
            )),
        }
    }
}

#[derive(Debug)]
struct NumpyForm;

impl Form for NumpyForm {
    /// As a tensor and null, or as cells of bytes and the type.
    fn lower(&self, leaf: Leaf<'_>) -> Result<Lowered, Refusal> {
        let Leaf::Array(array) = leaf else {
            return Err(Reason::OtherKind.into());
        };
        Ok(match array.to_tensor() {
            Ok(tensor) => Lowered { meta: Meta::write(&())?, views: vec![tensor] },
            Err(_) => {
                Lowered { meta: Meta::write(array.descr())?, views: vec![array.cells().clone()] }
            }
        })
    }

    fn raise(&self, lowered: Lowered) -> Result<Value, Fault> {
        let Lowered { meta, views } = lowered;
        let count = views.len();
        let Ok([view]) = <[_; 1]>::try_from(views) else {
            return Err(Fault::new(Reason::BadMetadata, format!("an array of {count} views")));
        };
        let array = match meta.read::<Option<rung::Descr>>()? {
            None => Array::from_tensor(&view)?,
            Some(descr) => Array::from_cells(descr, view)?,
        };
        Ok(array.into())
    }
}
