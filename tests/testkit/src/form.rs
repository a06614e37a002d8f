//! The conformance suite of forms: values, two processes, both directions.

use std::process::ExitCode;

use libtest_mimic::Trial;
use link::Link;
use rung::{
    DType, Form, Leaf, Lowered, Map, Meta, Offer, OfferWire, Reason, Room, Rung, Session, Tensor,
    Trust, Value,
};

use crate::peer::{self, Peer};
use crate::{run, trial};

/// A rung that is a form.
#[derive(Debug, Clone, Copy)]
pub struct Suite {
    /// The rung.
    pub rung: fn() -> Box<dyn Rung>,
    /// What it takes, by name.
    pub cases: fn() -> Vec<(&'static str, Value)>,
    /// A leaf that is none of its business.
    pub refused: fn() -> Value,
}

type Outcome<T = ()> = Result<T, String>;

/// Every primitive and every small container.
#[must_use]
pub fn plain_cases() -> Vec<(&'static str, Value)> {
    let float = |bits: u64| Value::from(f64::from_bits(bits));
    let deep = (0..100).fold(Value::Null, |inner, _| Value::list([inner]));
    vec![
        ("null", Value::Null),
        ("true", Value::from(true)),
        ("false", Value::from(false)),
        ("zero", Value::from(0)),
        ("i64_min", Value::from(i64::MIN)),
        ("i64_max", Value::from(i64::MAX)),
        ("u64_max", Value::from(u64::MAX)),
        ("i128_min", Value::from(i128::MIN)),
        ("u128_max", Value::from(u128::MAX)),
        ("one_as_a_float", Value::from(1.0)),
        ("minus_zero", Value::from(-0.0)),
        ("subnormal", Value::from(5e-324)),
        ("largest_double", Value::from(f64::MAX)),
        ("infinities", Value::list([f64::INFINITY, f64::NEG_INFINITY])),
        ("nan_payloads", Value::list([float(0x7ff8_dead_beef_0001), float(0xfff0_0000_0000_0001)])),
        ("empty_string", Value::from("")),
        ("string", Value::from("naïve 火箭 \u{0} \" \\ \u{1f680}")),
        ("no_bytes", Value::bytes(Vec::new())),
        ("bytes_that_are_no_text", Value::bytes(vec![0, 0xff, 0xfe, b'"'])),
        ("empty_list", Value::List(vec![])),
        ("empty_tuple", Value::Tuple(vec![])),
        ("empty_set", Value::Set(vec![])),
        ("empty_map", Value::Map(Map::new())),
        ("list", Value::list([Value::Null, Value::from(1), Value::from("x")])),
        ("tuple_in_tuple", Value::tuple([Value::tuple([1]), Value::from("a")])),
        ("set", Value::set([3, 1, 2])),
        ("map_with_string_keys", Value::map([("a", 1), ("", 2)])),
        ("map_with_the_wires_own_words", Value::map([("$t", 1), ("$", 2), ("$$m", 3), ("a", 4)])),
        ("map_with_other_keys", Value::map([(Value::from(7), 1), (Value::Null, 2)])),
        ("map_with_a_map_for_a_key", Value::map([(Value::map([("k", 1)]), Value::tuple([2]))])),
        ("hundred_levels", deep),
    ]
}

fn open(suite: &Suite, link: &Link) -> Outcome<Box<dyn Form>> {
    let rung = (suite.rung)();
    let offer = rung.probe().map_err(|refusal| refusal.to_string())?;
    let copy = Offer { rung: offer.rung.clone(), meta: offer.meta.clone(), handles: Vec::new() };
    let (wire, _) = copy.split().map_err(|fault| fault.to_string())?;
    say(link, &serde_json::to_string(&wire).map_err(|error| error.to_string())?)?;
    let wire: OfferWire = serde_json::from_str(&hear(link)?).map_err(|error| error.to_string())?;
    let theirs = Offer::join(wire, &mut Default::default()).map_err(|fault| fault.to_string())?;
    match rung.open(&offer, &theirs, Trust::none()) {
        Ok(Session::Form(form)) => Ok(form),
        other => Err(format!("{other:?}")),
    }
}

fn say(link: &Link, json: &str) -> Outcome {
    link.send(json, &[], None).map_err(|error| error.to_string())
}

fn hear(link: &Link) -> Outcome<String> {
    link.receive(None).map(|frame| frame.json).map_err(|error| error.to_string())
}

/// A value as the leaf that forms are asked about.
#[must_use]
pub fn leaf(value: &Value) -> Leaf<'_> {
    match value {
        Value::Tensor(tensor) => Leaf::Tensor(tensor),
        Value::Array(array) => Leaf::Array(array),
        Value::Pickle(pickle) => Leaf::Pickle(pickle),
        plain => Leaf::Plain(plain),
    }
}

/// A lowered leaf on the link of a test: what carriers would move goes as numbers.
#[derive(serde::Serialize, serde::Deserialize)]
struct Moved {
    meta: Meta,
    views: Vec<(DType, Vec<usize>, Vec<u8>)>,
}

fn lower(form: &dyn Form, value: &Value) -> Outcome<String> {
    let lowered = form.lower(leaf(value)).map_err(|refusal| refusal.to_string())?;
    let view = |view: &Tensor| {
        let bytes = view.to_bytes().map_err(|refusal| refusal.to_string())?;
        Ok((view.dtype(), view.shape().to_vec(), bytes))
    };
    let views = lowered.views.iter().map(view).collect::<Outcome<_>>()?;
    serde_json::to_string(&Moved { meta: lowered.meta, views }).map_err(|error| error.to_string())
}

fn raise(form: &dyn Form, json: &str) -> Outcome<Value> {
    let moved: Moved = serde_json::from_str(json).map_err(|error| error.to_string())?;
    let views = moved.views.into_iter().map(|(dtype, shape, bytes)| {
        Tensor::from_bytes(bytes, dtype, &shape).map_err(|refusal| refusal.to_string())
    });
    let views = views.collect::<Outcome<_>>()?;
    form.raise(Lowered { meta: moved.meta, views }, &mut Room::of(json.len()))
        .map_err(|fault| fault.to_string())
}

/// The other process: raises what comes and lowers it again. A name instead asks for that case.
fn serve(suite: &Suite, link: &Link) -> Outcome {
    let form = open(suite, link)?;
    while let Ok(command) = hear(link) {
        let value = match command.strip_prefix("make ") {
            Some(case) => find(suite, case)?,
            None => raise(&*form, &command)?,
        };
        say(link, &lower(&*form, &value)?)?;
    }
    Ok(())
}

fn find(suite: &Suite, case: &str) -> Outcome<Value> {
    let known = (suite.cases)().into_iter().find(|(name, _)| *name == case);
    known.map(|(_, value)| value).ok_or_else(|| "no such case".into())
}

fn exchange(suite: Suite, case: &str, ask: bool) -> Outcome {
    let peer = Peer::start("form").map_err(|error| error.to_string())?;
    let form = open(&suite, &peer.link)?;
    let value = find(&suite, case)?;
    let request = if ask { format!("make {case}") } else { lower(&*form, &value)? };
    say(&peer.link, &request)?;
    let back = raise(&*form, &hear(&peer.link)?)?;
    if back == value { Ok(()) } else { Err(format!("{back:?} came back")) }
}

fn garbage(suite: &Suite) -> Outcome {
    let rung = (suite.rung)();
    let offer = rung.probe().map_err(|refusal| refusal.to_string())?;
    let Ok(Session::Form(form)) = rung.open(&offer, &offer, Trust::none()) else {
        return Err("not a form".into());
    };
    let meta =
        Meta::from_json(r#"{"$no such tag":0}"#.into()).map_err(|fault| fault.to_string())?;
    match form.raise(Lowered { meta, views: Vec::new() }, &mut Room::of(0)) {
        Err(fault) if matches!(fault.reason(), Reason::UnknownTag | Reason::BadMetadata) => {}
        other => return Err(format!("{other:?}")),
    }
    let other = (suite.refused)();
    match form.lower(leaf(&other)) {
        Err(refusal) if refusal.reason() == Reason::OtherKind => Ok(()),
        taken => Err(format!("{taken:?}")),
    }
}

/// What a form says it takes it takes, in other words each time.
fn specimens(suite: &Suite) -> Outcome {
    let rung = (suite.rung)();
    let offer = rung.probe().map_err(|refusal| refusal.to_string())?;
    let Ok(Session::Form(form)) = rung.open(&offer, &offer, Trust::none()) else {
        return Err("not a form".into());
    };
    let mut next = 1u8;
    let mut count_up = |bytes: &mut [u8]| {
        for byte in bytes {
            next = next.wrapping_mul(5).wrapping_add(3);
            *byte = next;
        }
    };
    let mut twice = Vec::new();
    for _ in 0..2 {
        let specimens = form.specimens(&mut count_up).map_err(|refusal| refusal.to_string())?;
        for value in &specimens {
            let lowered = lower(&*form, value)?;
            let back = raise(&*form, &lowered)?;
            if back != *value {
                return Err(format!("{back:?} came back"));
            }
        }
        twice.push(specimens);
    }
    if twice[0].is_empty() || twice[0] == twice[1] { Err("the same again".into()) } else { Ok(()) }
}

/// Runs the suite; the `main` of a test binary with `harness = false`.
#[must_use]
pub fn main(suite: &'static Suite, more: Vec<Trial>) -> ExitCode {
    if let Some((_, link)) = peer::role() {
        return match serve(suite, &link) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let mut trials = more;
    for (case, _) in (suite.cases)() {
        trials.push(trial(format!("to_peer::{case}"), move || exchange(*suite, case, false)));
        trials.push(trial(format!("from_peer::{case}"), move || exchange(*suite, case, true)));
    }
    trials.push(trial("what_is_not_its_own_is_refused", || garbage(suite)));
    trials.push(trial("its_specimens_come_back_and_are_others_each_time", || specimens(suite)));
    run(trials)
}
