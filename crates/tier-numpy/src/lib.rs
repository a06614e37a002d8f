//! Arrays with NumPy's own element types, as a rung: byte order, times, strings, records.
//!
//! An array whose type a tensor can have rides as a tensor, and comes back as an array; any other rides
//! as the bytes of its elements, with its type in the JSON. No element is copied or converted on the way.
//!
//! ```
//! use rung::{Array, Leaf, Room, Rung, Session, Trust, Value};
//! use tier_numpy::Numpy;
//!
//! let offer = Numpy.probe()?;
//! let Session::Form(form) = Numpy.open(&offer, &offer, Trust::none())? else { panic!() };
//!
//! let times = Array::from_bytes(vec![0; 16], "<M8[ns]".parse()?, &[2])?;
//! let lowered = form.lower(Leaf::Array(&times))?;
//! assert_eq!(lowered.meta.as_json(), r#""<M8[ns]""#);
//! assert_eq!(form.raise(lowered, &mut Room::of(0))?, Value::from(times));
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

use std::sync::Arc;

use rung::{
    Array, Fault, Fill, Form, Leaf, Lowered, Meta, Offer, Reason, Refusal, Room, Rung, RungId,
    Session, Storage, Tensor, Trust, Value, limits,
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
        Ok(Offer::of_version(self.id(), FORMAT)?)
    }

    fn open(&self, _mine: &Offer, peer: &Offer, _trust: Trust) -> Result<Session, Refusal> {
        peer.expect_version("format", FORMAT)?;
        Ok(Session::Form(Box::new(NumpyForm)))
    }
}

#[derive(Debug)]
struct NumpyForm;

impl Form for NumpyForm {
    /// As a tensor and null, or as cells of bytes and the type; where that is long, it is a view of its own.
    fn lower(&self, leaf: Leaf<'_>) -> Result<Lowered, Refusal> {
        let Leaf::Array(array) = leaf else {
            return Err(Reason::OtherKind.into());
        };
        if let Ok(tensor) = array.to_tensor() {
            return Ok(Lowered { meta: Meta::write(&())?, views: vec![tensor] });
        }
        let (descr, cells) = (Meta::write(array.descr())?, array.cells().clone());
        if descr.as_json().len() > limits::NPY_HEADER {
            let detail = format!("a type of {} bytes", descr.as_json().len());
            return Err(Refusal::new(Reason::TooLarge, detail));
        }
        if descr.as_json().len() <= limits::INLINE_META {
            return Ok(Lowered { meta: descr, views: vec![cells] });
        }
        let text = Storage::from_bytes(descr.as_json().to_owned());
        let text = Tensor::all_bytes(Arc::new(text));
        Ok(Lowered { meta: Meta::write(&TYPE_IN_A_VIEW)?, views: vec![cells, text] })
    }

    /// Types that no tensor has: byte order, times, strings, records; in views that are turned and cut; and a
    /// type so long that it is a view of its own.
    fn specimens(&self, random: Fill<'_>) -> Result<Vec<Value>, Refusal> {
        let record = r#"[["id","<u2"],["when",">M8[us]"],["at",">f4",[2,3]],["name","|S5"]]"#;
        let long: Vec<String> = (0..30).map(|n| format!(r#"["field{n}",">i2"]"#)).collect();
        let long = format!("[{}]", long.join(","));
        let types: [(&str, &[usize]); 5] = [
            (r#"">f8""#, &[4, 5]),
            (r#""<m8[25s]""#, &[7]),
            (record, &[3, 2]),
            (&long, &[2]),
            (r#"">i4""#, &[0, 3]),
        ];
        let mut arrays = Vec::new();
        for (descr, shape) in types {
            let descr: rung::Descr = Meta::from_json(descr.to_owned())?.read()?;
            let count: usize = shape.iter().product();
            let mut bytes = vec![0; count * descr.size()];
            random(&mut bytes);
            let array = Array::from_bytes(bytes, descr, shape)?;
            if shape.len() == 2 {
                arrays.push(array.permute(&[1, 0])?.into());
            }
            arrays.push(array.into());
        }
        Ok(arrays)
    }

    fn raise(&self, lowered: Lowered, room: &mut Room) -> Result<Value, Fault> {
        let Lowered { meta, mut views } = lowered;
        let meta = if meta.read::<u32>().ok() == Some(TYPE_IN_A_VIEW) {
            let text = views.pop().ok_or_else(|| bad("a type in no view"))?;
            if text.byte_count() > limits::NPY_HEADER {
                return Err(Fault::new(
                    Reason::OverCap,
                    format!("a type of {} bytes", text.byte_count()),
                ));
            }
            room.read(text.byte_count())?;
            room.take(0, text.byte_count())?;
            let text =
                String::from_utf8(text.to_bytes()?).map_err(|_| bad("a type that is no text"))?;
            Meta::from_json(text)?
        } else {
            meta
        };
        let count = views.len();
        let Ok([view]) = <[_; 1]>::try_from(views) else {
            return Err(bad(&format!("an array of {count} views")));
        };
        let array = match meta.read::<Option<rung::Descr>>()? {
            None => Array::from_tensor(&view)?,
            Some(descr) => Array::from_cells(descr, view)?,
        };
        Ok(array.into())
    }
}

/// Metadata that says where the type is: as JSON, in the last view.
const TYPE_IN_A_VIEW: u32 = 1;

fn bad(detail: &str) -> Fault {
    Fault::new(Reason::BadMetadata, detail)
}
