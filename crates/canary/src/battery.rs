//! What is sent: specimens of everything that goes wrong in its own way.

use crate::digest::{Digest, answer};
use rung::{DType, Device, Fill, Form, Reason, Refusal, RungId, Storage, Tensor, Value};
use std::sync::Arc;

/// One message that proves a rung.
#[derive(Debug, Clone)]
pub struct Canary {
    /// The rung that is proven: its sender packs for this one alone.
    pub rung: RungId,
    /// The device whose memory it is.
    pub device: Device,
    /// What is sent.
    pub value: Value,
    /// What a right receiver answers.
    pub digest: Digest,
}

impl Canary {
    /// Of a map of leaves.
    ///
    /// # Errors
    ///
    /// As [`answer`].
    pub fn new(rung: RungId, device: Device, value: Value) -> Result<Self, Refusal> {
        let digest = answer(&value)?;
        Ok(Self { rung, device, value, digest })
    }

    /// The leaves, which are the entries of the value, by name, and what each must ride: the rung that is
    /// proven, but for a tensor without bytes. This is what a right receiver reports.
    #[must_use]
    pub fn expected(&self) -> Vec<(String, RungId)> {
        let mut leaves = Vec::new();
        if let Value::Map(map) = &self.value {
            for (name, item) in map.iter().filter_map(|(key, item)| Some((key.as_str()?, item))) {
                let empty = match item {
                    Value::Tensor(tensor) => tensor.count() == 0,
                    _ => false,
                };
                let rung = if empty { RungId::INLINE } else { self.rung.clone() };
                leaves.push((name.to_owned(), rung));
            }
        }
        leaves
    }
}

/// Random bytes: new ones each time they are asked for.
#[derive(Debug)]
pub struct Contents(fastrand::Rng);

impl Contents {
    /// With a seed of the system's.
    ///
    /// # Errors
    ///
    /// [`Reason::System`] where the system has no random bytes.
    pub fn random() -> Result<Self, Refusal> {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed)
            .map_err(|error| Refusal::new(Reason::System, error.to_string()))?;
        Ok(Self(fastrand::Rng::with_seed(u64::from_le_bytes(seed))))
    }

    /// Fills a slice.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes);
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }
}

/// Where there are bytes that are valid `bool`s.
const BOOLS: std::ops::Range<usize> = 512..1536;

/// Canaries of a carrier on a device: views of one block, the block again, and on the host private memory.
///
/// `page` is the larger of both sides' pages, in bytes; `make` makes so much memory of the device, with the
/// contents that it is given a way to fill in ([`rung::Carrier::specimen`]).
///
/// # Errors
///
/// What `make` answers, or the layout of a view that does not fit.
pub fn of_carrier(
    rung: &RungId,
    device: Device,
    page: usize,
    make: impl Fn(Device, usize, Fill<'_>) -> Result<Storage, Refusal>,
    contents: &mut Contents,
) -> Result<Vec<Canary>, Refusal> {
    let page = page.clamp(1 << 10, 256 << 10);
    // Over what a device hands out at least, and one byte over a page.
    let len = (2 << 20) + page + 1;
    let mut fill = |bytes: &mut [u8]| {
        contents.fill(bytes);
        let bools = bytes.get_mut(BOOLS).unwrap_or_default();
        bools.iter_mut().for_each(|byte| *byte &= 1);
    };
    let storage = Arc::new(make(device, len, &mut fill)?);
    let view = |dtype, shape: &[usize], strides: &[isize], offset| {
        Tensor::new(Arc::clone(&storage), dtype, shape, strides, offset)
    };
    let plain = |dtype, shape: &[usize], offset| {
        let layout = rung::Layout::contiguous(dtype, shape)?;
        view(dtype, shape, layout.strides(), offset)
    };
    let canary = |value| Canary::new(rung.clone(), device, value);
    let first = Value::map([
        ("whole", plain(DType::U8, &[len], 0)?),
        ("offset", plain(DType::F32, &[30, 7], page + 4)?),
        ("turned", view(DType::I16, &[16, 9], &[1, 16], 2 * page)?),
        ("sparse", view(DType::F64, &[5, 3], &[64, 8], 64)?),
        ("reversed", view(DType::I32, &[8, 3], &[-3, 1], 4 * 21)?),
        ("bf16", plain(DType::BF16, &[5, 11], 128)?),
        ("bool", plain(DType::Bool, &[32, 32], BOOLS.start)?),
        ("empty", plain(DType::F64, &[0, 3], 0)?),
        ("scalar", plain(DType::F64, &[], 8)?),
        ("under_a_page", plain(DType::U8, &[page - 1], 0)?),
        ("a_page", plain(DType::U8, &[page], page)?),
        ("over_a_page", plain(DType::U8, &[page + 1], page)?),
        ("last_byte", plain(DType::U8, &[1], len - 1)?),
    ]);
    // By now the other side has it: what is kept there is used.
    let again = Value::map([
        ("offset", plain(DType::F32, &[11, 5], 3 * page)?),
        ("reversed", view(DType::U8, &[100], &[-1], 700)?),
    ]);
    let mut canaries = vec![canary(first)?, canary(again)?];
    if device.is_host() {
        let mut private = |len| Tensor::from_bytes(contents.bytes(len), DType::U8, &[len]);
        let private = [
            ("under_a_page", private(page - 1)?),
            ("a_page", private(page)?),
            ("over_a_page", private(page + 1)?),
        ];
        canaries.push(canary(Value::map(private))?);
    }
    Ok(canaries)
}

/// What one process makes for another to forward, so that a third can say what it got: views of one block.
///
/// # Errors
///
/// As [`of_carrier`].
pub fn to_forward(
    rung: &RungId,
    device: Device,
    make: impl Fn(Device, usize, Fill<'_>) -> Result<Storage, Refusal>,
    contents: &mut Contents,
) -> Result<Canary, Refusal> {
    let len = (16 << 10) + 1;
    let storage = Arc::new(make(device, len, &mut |bytes| contents.fill(bytes))?);
    let whole = Tensor::contiguous(storage, DType::U8, &[len])?;
    let value = Value::map([("part", whole.slice(0, 100, 300)?.flip(0)?), ("whole", whole)]);
    Canary::new(rung.clone(), device, value)
}

/// The canary of a form: everything that it says it takes.
///
/// # Errors
///
/// What the form answers.
pub fn of_form(
    rung: &RungId,
    form: &dyn Form,
    contents: &mut Contents,
) -> Result<Vec<Canary>, Refusal> {
    let specimens = form.specimens(&mut |bytes| contents.fill(bytes))?;
    let names = (0..).map(|index| format!("leaf{index}"));
    let value = Value::map(names.zip(specimens));
    Ok(vec![Canary::new(rung.clone(), Device::Host, value)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canaries() -> Vec<Canary> {
        let make = |_, len, fill: Fill<'_>| {
            let mut bytes = vec![0; len];
            fill(&mut bytes);
            Ok(Storage::from_bytes(bytes))
        };
        let mut contents = Contents::random().unwrap();
        of_carrier(&RungId::SHM, Device::Host, 4096, make, &mut contents).unwrap()
    }

    #[test]
    fn no_two_batteries_have_the_same_contents() {
        for (one, other) in canaries().iter().zip(canaries()) {
            assert_ne!(one.digest, other.digest);
        }
    }

    #[test]
    fn the_battery_has_everything_that_goes_wrong_in_its_own_way() {
        let [first, again, private] = <[Canary; 3]>::try_from(canaries()).unwrap();
        let all: Vec<&Tensor> = [&first, &again, &private]
            .into_iter()
            .filter_map(|canary| canary.value.as_map())
            .flat_map(|map| map.iter().filter_map(|(_, item)| item.as_tensor()))
            .collect();
        let has = |what: &dyn Fn(&Tensor) -> bool| all.iter().any(|tensor| what(tensor));
        assert!(has(&|t| t.byte_count() > 2 << 20));
        assert!(has(&|t| t.offset() > 0 && t.count() > 1));
        assert!(has(&|t| !t.layout().is_contiguous()));
        assert!(has(&|t| t.strides().iter().any(|stride| *stride < 0)));
        assert!(has(&|t| t.dtype() == DType::BF16));
        assert!(has(&|t| t.as_slice::<bool>().is_ok_and(|bools| bools.len() == 1024)));
        assert!(has(&|t| t.count() == 0));
        assert!(has(&|t| t.shape().is_empty()));
        for size in [4095, 4096, 4097] {
            assert!(has(&|t| t.byte_count() == size && t.storage().len() == size));
        }
        let storage = |canary: &Canary| {
            canary.value.get("offset").and_then(Value::as_tensor).map(|t| Arc::clone(t.storage()))
        };
        assert!(Arc::ptr_eq(&storage(&first).unwrap(), &storage(&again).unwrap()));
    }
}
