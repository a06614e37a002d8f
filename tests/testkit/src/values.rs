//! Arbitrary values.

use proptest::prelude::*;
use rung::{DType, Tensor, Value};

/// Words that the wire uses, and others that are easily mistaken.
const RESERVED: [&str; 12] =
    ["$", "$$", "$t", "$s", "$m", "$i", "$f", "$b", "$T", "$S", "$B", "\u{0}"];

/// Any text that stays in the JSON.
pub fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(&RESERVED[..]).prop_map(str::to_owned),
        any::<String>().prop_filter("short", |text| text.len() < 4096),
    ]
}

/// Any primitive: every bit pattern of a double, integers of any size, any bytes.
pub fn primitive() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i128>().prop_map(Value::from),
        "-?[1-9][0-9]{18,60}".prop_filter_map("an integer", |digits| Value::integer(&digits).ok()),
        any::<u64>().prop_map(|bits| Value::from(f64::from_bits(bits))),
        prop::sample::select(vec![0.0, -0.0, f64::INFINITY, f64::NAN, 1.0, 1e16, 5e-324])
            .prop_map(Value::from),
        text().prop_map(Value::from),
        prop::collection::vec(any::<u8>(), 0..64).prop_map(Value::bytes),
    ]
}

/// Any plain value: primitives and containers.
pub fn plain() -> impl Strategy<Value = Value> {
    nested(primitive().boxed())
}

/// A tensor of any dtype, small, perhaps a view.
pub fn tensor() -> impl Strategy<Value = Tensor> {
    (
        prop::sample::select(DType::ALL),
        prop::collection::vec(0usize..5, 0..4),
        any::<u64>(),
        any::<[bool; 3]>(),
    )
        .prop_filter_map("a tensor", |(dtype, shape, seed, [flip, turn, cut])| {
            let bytes = contents(seed, shape.iter().product::<usize>() * dtype.size(), dtype);
            let mut tensor = Tensor::from_bytes(bytes, dtype, &shape).ok()?;
            if flip && !shape.is_empty() {
                tensor = tensor.flip(0).ok()?;
            }
            if turn {
                let order: Vec<usize> = (0..shape.len()).rev().collect();
                tensor = tensor.permute(&order).ok()?;
            }
            if cut && tensor.shape().last().is_some_and(|&extent| extent > 1) {
                let last = tensor.shape().len() - 1;
                tensor = tensor.slice(last, 1, tensor.shape()[last]).ok()?;
            }
            Some(tensor)
        })
}

/// Any value: plain ones with tensors and long strings among them.
pub fn any_value() -> impl Strategy<Value = Value> {
    nested(
        prop_oneof![
            4 => primitive(),
            2 => tensor().prop_map(Value::from),
            1 => prop::collection::vec(any::<u8>(), 4097..6000).prop_map(Value::bytes),
            1 => "[a-é]{4097,5000}".prop_map(Value::from),
        ]
        .boxed(),
    )
}

fn nested(leaf: BoxedStrategy<Value>) -> impl Strategy<Value = Value> {
    leaf.prop_recursive(5, 48, 6, |inner| {
        let items = || prop::collection::vec(inner.clone(), 0..6);
        prop_oneof![
            items().prop_map(Value::List),
            items().prop_map(Value::Tuple),
            items().prop_map(without_tensors).prop_map(Value::set),
            prop::collection::vec((text(), inner.clone()), 0..6).prop_map(Value::map),
            prop::collection::vec((inner.clone(), inner.clone()), 0..4)
                .prop_map(|entries| entries.into_iter().filter(|(key, _)| !key.has_tensor()))
                .prop_map(Value::map),
        ]
    })
}

/// A set's items and a map's keys hold no tensors.
fn without_tensors(items: Vec<Value>) -> Vec<Value> {
    items.into_iter().filter(|item| !item.has_tensor()).collect()
}

/// Bytes that look random and are fixed by a seed; 0 and 1 for bools.
#[must_use]
pub fn contents(seed: u64, len: usize, dtype: DType) -> Vec<u8> {
    // SplitMix64, eight bytes at a time.
    let mut state = seed;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend((word ^ (word >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    if dtype == DType::Bool {
        for byte in &mut bytes {
            *byte &= 1;
        }
    }
    bytes
}
