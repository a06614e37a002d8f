use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::*;
use crate::dtype::DType;
use crate::map::Map;

fn tensor(elements: &[u8]) -> Tensor {
    Tensor::from_vec(elements.to_vec(), &[elements.len()]).unwrap()
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Shade {
    Flat,
    Texture(Tensor),
    Ramp(f32, Tensor),
    Light { colour: [u8; 3], map: Option<Tensor> },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Everything {
    image: Tensor,
    more: Vec<Tensor>,
    named: HashMap<String, Array>,
    by_number: BTreeMap<u8, (i64, char)>,
    shades: Vec<Shade>,
    raw: Value,
    nothing: Option<Tensor>,
    unit: (),
    huge: u128,
    small: i8,
    third: f32,
    bytes: Bytes,
    text: String,
}

fn everything() -> Everything {
    Everything {
        image: tensor(&[1, 2, 3]),
        more: vec![tensor(&[]), tensor(&[4])],
        named: [("a".to_owned(), Array::from_tensor(&tensor(&[5])).unwrap())].into(),
        by_number: [(7, (i64::MIN, 'é'))].into(),
        shades: vec![
            Shade::Flat,
            Shade::Texture(tensor(&[6])),
            Shade::Ramp(0.1, tensor(&[7])),
            Shade::Light { colour: [1, 2, 3], map: Some(tensor(&[8])) },
            Shade::Light { colour: [1, 2, 3], map: None },
        ],
        raw: Value::tuple([Value::set([1]), Value::from(tensor(&[9]))]),
        nothing: None,
        unit: (),
        huge: u128::MAX,
        small: -1,
        third: 1.0 / 3.0,
        bytes: Bytes::from_static(&[0, 255]),
        text: "naïve".into(),
    }
}

#[test]
fn a_struct_is_a_map_and_its_tensors_are_the_same_memory() {
    let all = everything();
    let value = to_value(&all).unwrap();
    let image = value.get("image").and_then(Value::as_tensor).unwrap();
    assert!(Arc::ptr_eq(image.storage(), all.image.storage()));
    assert_eq!(value.get("shades").unwrap().items().unwrap()[0], Value::from("Flat"));
    assert_eq!(value.get("raw"), Some(&all.raw));
    let back: Everything = from_value(value).unwrap();
    assert!(Arc::ptr_eq(back.image.storage(), all.image.storage()));
    assert_eq!(back, all);
}

#[test]
fn borrowed_tensors_are_sent_without_a_copy() {
    #[derive(Serialize)]
    struct Borrowed<'a> {
        image: &'a Tensor,
        name: &'a str,
    }
    let image = tensor(&[1]);
    let value = to_value(&Borrowed { image: &image, name: "x" }).unwrap();
    let sent = value.get("image").and_then(Value::as_tensor).unwrap();
    assert!(Arc::ptr_eq(sent.storage(), image.storage()));
}

/// `serde` buffers what it flattens, and what it has to try more than once.
#[test]
fn tensors_survive_being_buffered() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(u8),
        Pair { left: Tensor, right: Tensor },
        One(Tensor),
        Any(Value),
    }
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind")]
    enum Tagged {
        Image { pixels: Tensor },
    }
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Outer {
        #[serde(flatten)]
        rest: HashMap<String, Either>,
        #[serde(flatten)]
        inner: Tagged,
    }
    let rest = [
        ("a".to_owned(), Either::One(tensor(&[1, 2]))),
        ("b".to_owned(), Either::Pair { left: tensor(&[3]), right: tensor(&[4]) }),
        ("c".to_owned(), Either::Number(5)),
        ("d".to_owned(), Either::Any(Value::list([1000]))),
        ("e".to_owned(), Either::Any(Value::bytes(vec![1; 16]))),
    ];
    let outer = Outer { rest: rest.into(), inner: Tagged::Image { pixels: tensor(&[6]) } };
    let mut back: Outer = from_value(to_value(&outer).unwrap()).unwrap();
    // A flattened map gets everything, the other field's parts too.
    back.rest.retain(|name, _| outer.rest.contains_key(name));
    assert_eq!(back, outer);
}

#[test]
fn outside_of_a_channel_memory_is_an_error() {
    let error = serde_json::to_string(&everything()).unwrap_err();
    assert!(error.to_string().contains("only over a channel"), "{error}");
    assert!(serde_json::from_str::<Tensor>("[1,2]").is_err());
    assert!(serde_json::from_str::<Tensor>("null").is_err());

    /// A type that serializes a part of itself elsewhere, in the middle.
    struct Sly(Tensor);
    impl Serialize for Sly {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let text = serde_json::to_string(&self.0).map_err(serde::ser::Error::custom)?;
            serializer.serialize_str(&text)
        }
    }
    let error = to_value(&(Sly(tensor(&[1])), tensor(&[2]))).unwrap_err();
    assert_eq!(error.path(), "$[0]");
    assert!(error.to_string().contains("only over a channel"), "{error}");
    // And the slot is shut again: this one is still taken.
    assert!(to_value(&tensor(&[1])).is_ok());
}

#[test]
fn what_does_not_fit_says_where() {
    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only read")]
    struct Job {
        image: Tensor,
        sizes: Vec<u8>,
    }
    let job = |image: Value, size: i64| {
        from_value::<Job>(Value::map([("image", image), ("sizes", Value::list([1, size]))]))
    };
    let error = job(Value::from(1), 2).unwrap_err();
    assert_eq!(error.to_string(), "at $.image: a tensor is wanted, and a int is there");
    let error = job(tensor(&[1]).into(), 300).unwrap_err();
    assert_eq!(error.path(), "$.sizes[1]");
    assert!(from_value::<(u8, u8)>(Value::list([1, 2, 3])).is_err());
    assert!(from_value::<Shade>(Value::from("Round")).is_err());
    assert!(from_value::<Shade>(Value::from("Texture")).is_err());
    let twice = to_value(&Twice).unwrap_err();
    assert_eq!(twice.path(), "$.a");
}

struct Twice;

impl Serialize for Twice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map([("a", 1), ("a", 2)])
    }
}

#[test]
fn nesting_is_bounded() {
    #[derive(Serialize)]
    struct Chain(Option<Vec<Chain>>);
    let nested = |levels| (1..levels).fold(Chain(None), |inner, _| Chain(Some(vec![inner])));
    assert!(to_value(&nested(crate::limits::VALUE_DEPTH)).is_ok());
    let error = to_value(&nested(crate::limits::VALUE_DEPTH + 1)).unwrap_err();
    assert!(error.to_string().contains("nested too deeply"), "{error}");
}

#[test]
fn a_value_can_be_read_from_json() {
    let value: Value = serde_json::from_str(r#"{"a":[1,2.5,null,"x"]}"#).unwrap();
    let list = Value::list([Value::from(1), Value::from(2.5), Value::Null, Value::from("x")]);
    assert_eq!(value, Value::map([("a", list)]));
    assert_eq!(value.as_map().map(Map::len), Some(1));
    assert_eq!(tensor(&[]).dtype(), DType::U8);
}

/// What looks like a place is what it is, unless it knows what this session alone knows.
#[test]
fn nothing_in_a_message_names_a_place() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(u8),
        Any(Value),
    }
    for len in [0, 8, 16] {
        let forged = Value::map([(Value::bytes(vec![0; len]), 0)]);
        let value = Value::tuple([Value::from(tensor(&[1])), forged.clone()]);
        let (_, back): (Either, Either) = from_value(value.clone()).unwrap();
        assert_eq!(back, Either::Any(forged));
        assert!(from_value::<(Either, Tensor)>(value).is_err());
    }
}

/// `serde` tries the variants of an untagged type one after the other.
#[test]
fn a_tensor_is_nobody_elses_bytes() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Wrapped(Bytes);
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(untagged)]
    enum Either {
        Wrapped(Wrapped),
        Raw(Bytes),
        List(Vec<u8>),
        Named(HashMap<String, u64>),
        Image(Tensor),
    }
    let image = Either::Image(tensor(&[1, 2]));
    assert_eq!(from_value::<Either>(to_value(&image).unwrap()).unwrap(), image);
}

#[test]
fn types_with_two_forms_come_back_buffered_or_not() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind")]
    enum Peer {
        At { address: std::net::IpAddr },
    }
    let address: std::net::IpAddr = "127.0.0.1".parse().unwrap();
    let peer = (address, Peer::At { address });
    let back: (std::net::IpAddr, Peer) = from_value(to_value(&peer).unwrap()).unwrap();
    assert_eq!(back, peer);
}

#[test]
fn integers_of_any_size_are_values_and_no_strings() {
    let huge = Value::integer(&"9".repeat(100)).unwrap();
    assert_eq!(from_value::<Value>(huge.clone()).unwrap(), huge);
    assert!(from_value::<String>(huge).is_err());
    assert!(from_value::<u64>(Value::from(u128::MAX)).is_err());
}

proptest! {
    #[test]
    fn numbers_come_back(a in any::<i128>(), b in any::<u64>(), c in any::<f64>(), d in any::<f32>()) {
        let back: (i128, u64, f64, f32) = from_value(to_value(&(a, b, c, d)).unwrap()).unwrap();
        prop_assert_eq!((back.0, back.1), (a, b));
        prop_assert_eq!(back.2.to_bits(), c.to_bits());
        prop_assert!(back.3.to_bits() == d.to_bits() || d.is_nan() && back.3.is_nan());
    }
}
