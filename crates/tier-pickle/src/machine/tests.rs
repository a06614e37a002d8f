use proptest::prelude::*;

use super::*;
use crate::{dump, from_pickle, load, open, to_pickle};

fn run(bytes: &[u8]) -> Result<Value, Refusal> {
    super::run(bytes, &mut Room::of(bytes.len()))
}
use rung::OpaquePickle;

fn data(name: &str) -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data/");
    std::fs::read(format!("{path}{name}")).unwrap()
}

/// What `make.py` pickled.
fn plain() -> Value {
    let ints = ["0", "-1", "2147483648", "-9223372036854775808", "9223372036854775808"];
    let mut ints: Vec<Value> = ints.iter().map(|digits| Value::integer(digits).unwrap()).collect();
    ints.push(Value::integer("1000000000000000000000000000000").unwrap());
    let floats = Value::list([0.5, -0.0, f64::INFINITY, 1e-320]);
    let inner = Value::map([("x", Value::List(vec![]))]);
    Value::map([
        (Value::from("none"), Value::Null),
        (Value::from("t"), Value::from(true)),
        (Value::from("ints"), Value::List(ints)),
        (Value::from("floats"), floats),
        (Value::from("s"), Value::from("naïve 火箭")),
        (Value::from("b"), Value::bytes(vec![0, 255])),
        (Value::from("tuple"), Value::tuple([Value::from(1), Value::tuple(["a"])])),
        (Value::from("set"), Value::set([3])),
        (Value::from("nested"), Value::map([("k", Value::list([inner]))])),
        (Value::from(7), Value::from("int key")),
    ])
}

#[test]
fn every_protocol_of_python_opens() {
    for protocol in 0..6 {
        assert_eq!(
            run(&data(&format!("plain_p{protocol}.pickle"))).unwrap(),
            plain(),
            "{protocol}"
        );
        let shared = Value::list(["seen", "twice"]);
        let twice = Value::map([("a", shared.clone()), ("b", shared)]);
        assert_eq!(run(&data(&format!("shared_twice_p{protocol}.pickle"))).unwrap(), twice);
    }
}

#[test]
fn what_is_not_plain_stays_as_it_is() {
    for protocol in 0..6 {
        for name in ["unknown_class", "ndarray"] {
            let bytes = data(&format!("{name}_p{protocol}.pickle"));
            assert_eq!(run(&bytes).unwrap_err().reason(), Reason::NotPlain);
            assert_eq!(load(bytes.clone()).unwrap(), OpaquePickle::new(bytes).into());
        }
    }
    let bytes = data("executes_p2.pickle");
    let refusal = run(&bytes).unwrap_err();
    assert_eq!(refusal.reason(), Reason::NotPlain);
    assert!(refusal.detail().contains("system"), "{refusal}");
    assert!(load(bytes).unwrap().as_pickle().is_some());
    assert!(load(data("stdlib_p4.pickle")).unwrap().as_pickle().is_some());
}

#[test]
fn depth_is_refused_and_the_process_lives() {
    assert_eq!(load(data("deep_20000_p2.pickle")).unwrap_err().reason(), Reason::TooDeep);
    let nested = |levels: usize| {
        [&b"\x80\x02"[..], &b"]".repeat(levels), &b"a".repeat(levels - 1), b"."].concat()
    };
    assert!(run(&nested(limits::VALUE_DEPTH)).is_ok());
    let over = run(&nested(limits::VALUE_DEPTH + 1)).unwrap_err();
    assert_eq!(over.reason(), Reason::TooDeep);
    assert_eq!(run(&nested(1_000_000)).unwrap_err().reason(), Reason::TooDeep);
}

#[test]
fn what_refers_to_itself_is_held() {
    for recursive in [&b"]q\x00h\x00a."[..], b"}q\x00K\x01h\x00s.", b"]q\x00(h\x00tq\x01a."] {
        assert_eq!(run(recursive).unwrap_err().reason(), Reason::Recursive);
        assert!(load(recursive.to_vec()).unwrap().as_pickle().is_some());
    }
}

/// Each would cost far more than its bytes.
#[test]
fn bombs_are_refused() {
    // Thirty lists, each twice in the next: 2^30 items.
    let mut doubled = b"]".to_vec();
    for level in 0..30u8 {
        doubled.extend([b'q', level, b'0', b']', b'(', b'h', level, b'h', level, b'e']);
    }
    doubled.push(b'.');
    assert_eq!(run(&doubled).unwrap_err().reason(), Reason::TooLarge);
    // A megabyte of text, a thousand times.
    let mut long = b"X\x00\x00\x10\x00".to_vec();
    long.extend(b"x".repeat(1 << 20));
    long.extend(b"q\x000](");
    long.extend(b"h\x00".repeat(1000));
    long.extend(b"e.");
    assert_eq!(run(&long).unwrap_err().reason(), Reason::TooLarge);
    // Lengths that are not there.
    for claimed in [
        &b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."[..],
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"B\xff\xff\xff\xff.",
        b"\x8b\xff\xff\xff\x7f.",
        b"r\xff\xff\xff\xff.",
    ] {
        assert_eq!(run(claimed).unwrap_err().reason(), Reason::BadMetadata);
    }
    let long = [&b"\x8b\x00\x00\x10\x00"[..], &vec![1; 1 << 20], b"."].concat();
    assert_eq!(run(&long).unwrap_err().reason(), Reason::NotPlain);
    // One integer of 4,000 digits, a million times.
    let mut digits = format!("L{}L\nq\x000", "9".repeat(4000)).into_bytes();
    digits.extend(b"](");
    digits.extend(b"h\x00".repeat(900));
    digits.extend(b"eq\x010](");
    digits.extend(b"h\x01".repeat(900));
    digits.extend(b"e.");
    assert_eq!(run(&digits).unwrap_err().reason(), Reason::TooLarge);
    // One call that copies, again and again.
    let mut sets = b"](".to_vec();
    sets.extend(b"N".repeat(100_000));
    sets.extend(b"eq\x000c__builtin__\nset\nq\x010");
    sets.extend(b"h\x01h\x00\x85R0".repeat(1000));
    sets.extend(b"N.");
    assert_eq!(run(&sets).unwrap_err().reason(), Reason::TooLarge);
    let mut encodes = b"X\xa0\x86\x01\x00".to_vec();
    encodes.extend(b"x".repeat(100_000));
    encodes.extend(b"q\x000X\x06\x00\x00\x00latin1q\x010c_codecs\nencode\nq\x020");
    encodes.extend(b"h\x02h\x00h\x01\x86R0".repeat(1000));
    encodes.extend(b"N.");
    assert_eq!(run(&encodes).unwrap_err().reason(), Reason::TooLarge);
    // A set in a set, and so on: all of it is compared at every level.
    let mut sets = b"\x8f(".repeat(100);
    sets.extend(b"](");
    sets.extend(b"N".repeat(990_000));
    sets.extend(b"e");
    sets.extend(b"\x90".repeat(100));
    sets.push(b'.');
    assert_eq!(run(&sets).unwrap_err().reason(), Reason::TooLarge);
    // What is left behind without being a value.
    for code in [b'(', b'2'] {
        let many = [&b"N"[..], &vec![code; limits::PICKLE_NODES + 2], b"."].concat();
        assert_eq!(run(&many).unwrap_err().reason(), Reason::TooLarge);
    }
}

#[test]
fn what_is_no_pickle_is_refused() {
    for bad in [
        &b""[..],
        b".",
        b"N",
        b"NN",
        b"a.",
        b"]a.",
        b"(.",
        b"t.",
        b"e.",
        b"]N.N",
        b"\x80\x06N.",
        b"h\x00.",
        b"(Nu.",
        b"}(Nu.",
        b"N(NNs.",
        b"R.",
        b"NNR.",
        b"Ix\n.",
        b"Fx\n.",
        b"S'a\n.",
        b"V\\u12\n.",
        b"c__builtin__\nset\nNR.",
        b"cos\nsystem\n",
        b"\x85.",
        b"]\x85\x86.",
        b"N(N\x86.",
        b"\xff",
    ] {
        let refusal = load(bad.to_vec()).unwrap_err();
        assert_eq!(refusal.reason(), Reason::BadMetadata, "{}: {refusal}", bad.escape_ascii());
    }
}

/// `int.to_bytes(…, "little", signed=True)`, and the integer.
const BIG: [(&str, &str); 6] = [
    (
        "e37e80a938dcb7af6ec9b6aa32e3a93337bba05de4352cee",
        "-437124189620885610010004822109262358637075660656881926429",
    ),
    ("000000000061f5b9abbfa45cc3f129631d", "10000000000000000000000000000000000000000"),
    (
        "00000000000000000000000000000000000000000000000000ff",
        "-1606938044258990275541962092341162602522202993782792835301376",
    ),
    ("0000000000000000000000000000008000", "170141183460469231731687303715884105728"),
    ("00000000000000000000000000000080ff", "-170141183460469231731687303715884105728"),
    ("ffffffffffffffffffffffffffffffff00", "340282366920938463463374607431768211455"),
];

#[test]
fn the_rarer_instructions_are_obeyed() {
    for (pickle, value) in [
        (&b"I01\n."[..], Value::from(true)),
        (b"I-7\n.", Value::from(-7)),
        (b"L99999999999999999999L\n.", Value::integer("99999999999999999999").unwrap()),
        (b"\x8a\x00.", Value::from(0)),
        (b"\x8a\x01\xff.", Value::from(-1)),
        (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00.", Value::from(1u64 << 63)),
        (b"Fnan\n.", Value::from(f64::NAN)),
        (b"S'old'\n.", Value::from("old")),
        (b"U\x03old.", Value::from("old")),
        (b"VA\\u00e9\\U0001f680\\n\xe9\n.", Value::from("Aé\u{1f680}\\né")),
        (b"V\\\\u0041\n.", Value::from("\\\\u0041")),
        (b"(NNd.", Value::map([(Value::Null, Value::Null)])),
        (b"(K\x01K\x02l.", Value::list([1, 2])),
        (b"K\x012\x86.", Value::tuple([1, 1])),
        (b"K\x01(K\x02K\x031.", Value::from(1)),
        (b"K\x01(0.", Value::from(1)),
        (b"c__builtin__\nset\n)R.", Value::Set(vec![])),
        (b"c__builtin__\nbytes\n)R.", Value::bytes(vec![])),
        (b"\x8f(K\x01K\x02\x90.", Value::set([1, 2])),
    ] {
        assert_eq!(run(pickle).unwrap(), value, "{}", pickle.escape_ascii());
    }
    for (hex, digits) in BIG {
        let bytes: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect();
        let pickle = [&[0x8a, bytes.len() as u8], &bytes[..], b"."].concat();
        assert_eq!(run(&pickle).unwrap(), Value::integer(digits).unwrap());
    }
    assert_eq!(decimal(&[0, 0, 0, 0, 0, 0, 0, 0, 1]), "18446744073709551616");
    // Two lists of one memo are one list.
    let aliased = run(b"(lq\x00h\x00K\x01a0h\x00\x85.").unwrap();
    assert_eq!(aliased, Value::tuple([Value::list([1])]));
    // To Python these are two members, to a value one: neither is lost.
    let nan = [&b"G"[..], &f64::NAN.to_be_bytes()].concat();
    let set = [b"\x8f(", &nan[..], &nan, b"\x90."].concat();
    assert_eq!(run(&set).unwrap_err().reason(), Reason::NotPlain);
    let dict = [b"}(", &nan[..], b"N", &nan, b"Nu."].concat();
    assert_eq!(run(&dict).unwrap_err().reason(), Reason::NotPlain);
    for other in [&b"I0x10\n."[..], b"I010\n.", b"L+5L\n."] {
        assert_eq!(run(other).unwrap_err().reason(), Reason::NotPlain);
    }
    let digits = format!("L{}L\n.", "9".repeat(limits::BIG_INT_DIGITS + 1));
    assert!(load(digits.into_bytes()).unwrap().as_pickle().is_some());
    // Half of a surrogate pair is text to Python alone.
    assert_eq!(run(b"V\\ud800\n.").unwrap_err().reason(), Reason::NotPlain);
    assert_eq!(run(b"X\x03\x00\x00\x00\xed\xa0\x80.").unwrap_err().reason(), Reason::NotPlain);
    let buffer = rung::Tensor::from_vec(vec![1u8], &[1]).unwrap();
    let outside = OpaquePickle::new(b"\x80\x05\x97.".to_vec()).with_buffers(vec![buffer]).unwrap();
    assert_eq!(open(&outside).unwrap_err().reason(), Reason::NotPlain);
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
enum Shape {
    Point,
    Circle(f64),
    Line(i64, i64),
    Named { name: String, sides: Option<u8> },
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Scene {
    shapes: Vec<Shape>,
    by_name: std::collections::BTreeMap<String, (i8, u64, f32)>,
    nothing: Option<String>,
    unit: (),
    wide: Vec<f32>,
    bytes: bytes::Bytes,
}

fn scene() -> Scene {
    Scene {
        shapes: vec![
            Shape::Point,
            Shape::Circle(0.1),
            Shape::Line(i64::MIN, 3),
            Shape::Named { name: "é".into(), sides: Some(4) },
        ],
        by_name: [("a".to_owned(), (-1, u64::MAX, 0.25))].into(),
        nothing: None,
        unit: (),
        wide: (0..3000).map(|i| i as f32 / 7.0).collect(),
        bytes: vec![0, 255].into(),
    }
}

#[test]
fn any_serde_type_comes_back() {
    let pickle = to_pickle(&scene()).unwrap();
    assert_eq!(from_pickle::<Scene>(&pickle).unwrap(), scene());
    // serde-pickle reads what is written here, and what it writes is read here; but for integers past i64,
    // which it does not read.
    let options = serde_pickle::DeOptions::new();
    let back = serde_pickle::from_slice::<Scene>(&pickle.bytes().unwrap(), options.clone());
    assert!(back.unwrap_err().to_string().contains("integer too large"));
    let small = Scene { by_name: Default::default(), ..scene() };
    let pickle = to_pickle(&small).unwrap();
    let back = serde_pickle::from_slice::<Scene>(&pickle.bytes().unwrap(), options);
    assert_eq!(back.unwrap(), small);
    for scene in [small, scene()] {
        let theirs = serde_pickle::to_vec(&scene, serde_pickle::SerOptions::new()).unwrap();
        assert_eq!(from_pickle::<Scene>(&OpaquePickle::new(theirs)).unwrap(), scene);
    }
    let address: std::net::IpAddr = "::1".parse().unwrap();
    let wide = (address, i128::MIN);
    assert_eq!(from_pickle::<(std::net::IpAddr, i128)>(&to_pickle(&wide).unwrap()).unwrap(), wide);
    let wrong = from_pickle::<Shape>(&pickle).unwrap_err();
    assert_eq!(wrong.reason(), Reason::BadMetadata);
    let tensor = rung::Tensor::from_vec(vec![1u8], &[1]).unwrap();
    assert_eq!(to_pickle(&tensor).unwrap_err().reason(), Reason::OtherKind);
}

proptest! {
    #[test]
    fn what_is_dumped_is_opened(value in testkit::values::plain()) {
        prop_assert_eq!(run(&dump(&value).unwrap()).unwrap(), value);
    }

    #[test]
    fn any_bytes_are_opened_held_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        let _ = load(bytes);
    }

    /// Long programs of instructions that mean something.
    #[test]
    fn any_program_is_opened_held_or_refused(
        ops in prop::collection::vec(prop::sample::select(&b"(]}N0123tdlaseuq\x00h\x00\x85\x86\x87\x88\x8f\x90\x94K\x01."[..]), 0..60),
        call in 0usize..5,
    ) {
        let call = [&b""[..], b"c__builtin__\nset\n](NNe\x85R", b"c__builtin__\nbytes\n)R", b"L99999999999999999999L\n",
            b"c_codecs\nencode\nX\x01\x00\x00\x00xX\x06\x00\x00\x00latin1\x86R"][call];
        let program = [call, &ops[..], b"."].concat();
        if let Ok(value) = load(program)
            && value.as_pickle().is_none()
        {
            prop_assert_eq!(run(&dump(&value).unwrap()).unwrap(), value);
        }
    }
}
