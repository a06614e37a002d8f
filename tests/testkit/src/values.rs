//! Arbitrary values.

use proptest::prelude::*;
use rung::{Array, DType, Descr, Field, Flags, Object, OpaquePickle, Tensor, Value};

/// Words that the wire uses, and others that are easily mistaken.
const RESERVED: [&str; 14] =
    ["$", "$$", "$t", "$s", "$m", "$i", "$f", "$b", "$T", "$S", "$B", "$o", "$L", "\u{0}"];

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
        any::<[bool; 5]>(),
    )
        .prop_filter_map("a tensor", |(dtype, shape, seed, [flip, turn, cut, fixed, grad])| {
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
            Some(tensor.with_flags(Flags { read_only: fixed, requires_grad: grad }))
        })
}

/// Any type of NumPy's: scalars and records, nested, padded, with sub-arrays.
pub fn descr() -> impl Strategy<Value = Descr> {
    let scalar = prop::sample::select(&SCALARS[..])
        .prop_filter_map("a type", |name| name.parse::<Descr>().ok());
    scalar.prop_recursive(3, 12, 4, |inner| {
        let field = (any::<bool>(), inner, prop::collection::vec(0usize..3, 0..3));
        prop::collection::vec(field, 0..4).prop_filter_map("a record", |fields| {
            let mut record = Vec::new();
            for (index, (padded, descr, shape)) in fields.into_iter().enumerate() {
                if padded {
                    record.push(Field::new("", "|V3".parse().ok()?));
                }
                let title = (index == 1).then(|| "a title, 'quoted' \\".to_owned());
                record.push(Field { title, shape, ..Field::new(format!("f{index}"), descr) });
            }
            Descr::record(record).ok()
        })
    })
}

/// Scalars of every kind.
const SCALARS: [&str; 18] = [
    "|b1",
    "|i1",
    ">i4",
    "<u8",
    "<f2",
    ">f8",
    "<f16",
    "<c8",
    ">c16",
    "<M8[ns]",
    "<M8",
    "<m8[25us]",
    "|S0",
    "|S7",
    "<U3",
    ">U1",
    "|V5",
    "|u1",
];

/// An array of any type, small, perhaps a view.
pub fn array() -> impl Strategy<Value = Array> {
    let parts = (descr(), prop::collection::vec(0usize..4, 0..4), any::<u64>(), any::<bool>());
    parts.prop_filter_map("an array", |(descr, shape, seed, turn)| {
        // Bools are 0 or 1 to whoever takes the array for a tensor.
        let dtype = descr.dtype().unwrap_or(DType::U8);
        let bytes = contents(seed, shape.iter().product::<usize>() * descr.size(), dtype);
        let array = Array::from_bytes(bytes, descr, &shape).ok()?;
        let order: Vec<usize> = (0..shape.len()).rev().collect();
        if turn { array.permute(&order).ok() } else { Some(array) }
    })
}

/// Arrays of the kinds that are easily lost.
#[must_use]
pub fn arrays() -> Vec<(&'static str, Value)> {
    let made = |json: &str, shape: &[usize]| -> Value {
        let descr: Descr = serde_json::from_str(json).expect("a type");
        let bytes = contents(7, shape.iter().product::<usize>() * descr.size(), DType::Bool);
        Array::from_bytes(bytes, descr, shape).expect("an array").into()
    };
    vec![
        ("plain", made("\"<f4\"", &[2, 3])),
        ("bools", made("\"|b1\"", &[5])),
        ("big_endian", made("\">f4\"", &[2, 3])),
        ("times", made("\"<M8[ns]\"", &[3])),
        ("times_of_25_seconds", made("\"<m8[25s]\"", &[3])),
        ("text", made("\"<U8\"", &[4])),
        ("bytes", made("\"|S3\"", &[4])),
        ("no_bytes", made("\"|S0\"", &[4])),
        ("no_dimensions", made("\"<f8\"", &[])),
        ("no_elements", made("\">i2\"", &[0, 3])),
        ("record", made(r#"[["f0","<i4"],["f1","<f4"]]"#, &[4])),
        ("nested", made(r#"[["a",[["b","<f8"],["c","<i2",[3]]]],["s","|S4"],["d",">i4"]]"#, &[3])),
        ("padded", made(r#"[["k","|i1"],["","|V7"],["v","<f8"]]"#, &[2])),
        ("titled", made(r#"[[["title","name"],"<f4"]]"#, &[1])),
    ]
}

/// Any value: plain ones with tensors, arrays, pickles, objects and long strings among them.
pub fn any_value() -> impl Strategy<Value = Value> {
    nested(
        prop_oneof![
            4 => primitive(),
            2 => tensor().prop_map(Value::from),
            1 => prop::collection::vec(any::<u8>(), 4097..6000).prop_map(Value::bytes),
            1 => "[a-é]{4097,5000}".prop_map(Value::from),
            2 => array().prop_map(Value::from),
            1 => prop::collection::vec(any::<u8>(), 0..20).prop_map(|b| OpaquePickle::new(b).into()),
            1 => (plain(), tensor()).prop_filter_map("an object", |(schema, part)| {
                Object::new("tests/any", 3, schema, vec![part.into()]).ok().map(Value::from)
            }),
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
