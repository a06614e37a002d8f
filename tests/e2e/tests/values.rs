//! Everything a value can be, between processes: arrays, pickles, objects, and types of the user's own.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::collections::HashMap;
use std::process::ExitCode;

use ladder::{
    Array, CallErrorKind, CallOptions, Channel, Command, DType, Methods, Object, OpaquePickle,
    Registry, RungId, Tensor, TensorMut, Value, What, Worker,
};
use rung::{Flags, Reason, Refusal};
use serde::{Deserialize, Serialize};
use testkit::warnings::Warnings;
use testkit::{run_serially, sha256, trial};

type Outcome = Result<(), String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn worker() -> Result<Worker, String> {
    Worker::spawn_self().map_err(text)
}

fn data(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data/");
    std::fs::read(format!("{folder}{name}")).unwrap()
}

// A type of the user's own, with a part that is a type of its own.

#[derive(Debug, Clone, PartialEq)]
struct Mesh {
    name: String,
    vertices: Tensor,
    faces: Tensor,
    material: Material,
}

#[derive(Debug, Clone, PartialEq)]
struct Material {
    colour: [f32; 3],
    texture: Option<Tensor>,
}

fn mesh() -> Mesh {
    let vertices = (0..30_000u32).map(|i| i as f32).collect();
    Mesh {
        name: "naïve 火箭".into(),
        vertices: Tensor::from_vec(vertices, &[10_000, 3]).unwrap(),
        faces: Tensor::from_vec(vec![0u32, 1, 2], &[1, 3]).unwrap(),
        material: Material {
            colour: [0.1, 0.2, 0.3],
            texture: Some(Tensor::from_vec(vec![9u8; 5000], &[50, 100]).unwrap()),
        },
    }
}

/// The version of meshes that this process writes, and which it reads.
fn registry(version: u32, reads: std::ops::RangeInclusive<u32>) -> Registry {
    let schema = |error: rung::BridgeError| Refusal::new(Reason::BadMetadata, error.to_string());
    Registry::builder()
        .register::<Material>(
            "tests/material",
            1,
            move |material, _| {
                let parts = material.texture.iter().cloned().map(Value::from).collect();
                Ok((rung::to_value(&material.colour).map_err(schema)?, parts))
            },
            |mut parts| {
                let colour = parts.schema_as()?;
                let texture = if parts.left() > 0 { Some(parts.next_as()?) } else { None };
                Ok(Material { colour, texture })
            },
        )
        .unwrap()
        .register_reading::<Mesh>(
            "tests/mesh",
            version,
            reads,
            |mesh, decomposer| {
                let schema = Value::map([("name", mesh.name.as_str())]);
                let material = decomposer.decompose(&mesh.material)?;
                Ok((
                    schema,
                    vec![mesh.vertices.clone().into(), mesh.faces.clone().into(), material.into()],
                ))
            },
            |mut parts| {
                let schema = parts.schema()?;
                let mut name = schema.get("name").and_then(Value::as_str).unwrap_or("").to_owned();
                if parts.version() != parts.registered() {
                    name += &format!(" (of {} read by {})", parts.version(), parts.registered());
                }
                Ok(Mesh {
                    name,
                    vertices: parts.next_as()?,
                    faces: parts.next_as()?,
                    material: parts.compose_next()?,
                })
            },
        )
        .unwrap()
        .build()
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Job {
    image: Tensor,
    radius: f32,
    more: Vec<Tensor>,
    named: HashMap<String, Array>,
    mode: Mode,
    weights: Vec<f32>,
    note: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Mode {
    Fast,
    Masked(Tensor),
    Tiled { size: (u32, u32) },
}

/// What this binary does as a worker.
fn work(channel: &Channel) -> ExitCode {
    let version = std::env::var("MESH_VERSION").ok().and_then(|v| v.parse().ok()).unwrap_or(1);
    let reads = std::env::var("MESH_READS").ok().and_then(|v| v.parse().ok()).unwrap_or(version);
    let registry = registry(version, reads..=version);
    let making = registry.clone();
    let methods = Methods::new()
        .on("echo", Ok)
        .on("make", move |_| Ok(making.decompose(&mesh())?.into()))
        .on("open", move |object| {
            let opened: Mesh = registry.compose(&object)?;
            let name = opened.name.clone();
            let same = Mesh { name: mesh().name, ..opened } == mesh();
            Ok(Value::map([("name", Value::from(name)), ("same", same.into())]))
        })
        .on("unpickle", |value| {
            let pickle = value.as_pickle().ok_or("a pickle")?;
            Ok(tier_pickle::open(pickle).unwrap_or_else(|why| why.reason().code().into()))
        })
        .on("class", |_| Ok(OpaquePickle::new(data("unknown_class_p5.pickle")).into()))
        .on("unsendable", |_| {
            let tensor = Tensor::from_vec(vec![1u8; 5000], &[5000])?;
            let deep = (0..200).fold(Value::Null, |inner, _| Value::list([inner]));
            Ok(Value::map([("fine", Value::from(tensor)), ("deep", deep)]))
        })
        .on_as("job", |job: Job| Ok(job))
        .on_as("sum", |(a, b): (i64, i64)| Ok(a + b));
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// There and back, in the worker's hands: the same value.
fn echo(worker: &Worker, value: &Value) -> Result<ladder::Reply, String> {
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    check(reply.value() == value, ("another value came back", value.kind()))?;
    Ok(reply)
}

fn every_file_crosses_and_is_what_it_should_be() -> Outcome {
    let worker = worker()?;
    let expected: serde_json::Value = serde_json::from_slice(&data("expected.json")).unwrap();
    let mut seen = 0;
    for (name, expected) in expected.as_object().unwrap() {
        let Some(name) = name.strip_suffix(".npy") else { continue };
        seen += 1;
        let array = tier_numpy::npy::read(data(&format!("{name}.npy"))).map_err(text)?;
        let descr = serde_json::to_value(array.descr()).unwrap();
        check(descr == expected["descr"], (name, &descr))?;
        let shape = serde_json::to_value(array.shape()).unwrap();
        check(shape == expected["shape"], (name, &shape))?;
        let reply = echo(&worker, &Value::from(array.clone()))?;
        let back = reply.value().as_array().ok_or("no array came back")?;
        check(back.descr() == array.descr() && back.shape() == array.shape(), name)?;
        let digest = sha256(&back.to_bytes().map_err(text)?);
        check(digest == expected["c_order_sha256"].as_str().unwrap(), (name, "digest"))?;
        let leg = &reply.sent().legs[0];
        let plain = array.descr().dtype().is_some();
        let rung = match (array.byte_count(), plain) {
            (0, _) => "inline",
            (_, true) => "shm",
            _ => "numpy",
        };
        check(leg.rung.as_str() == rung, (name, leg))?;
        let over = (rung == "numpy").then_some(RungId::SHM);
        check(leg.over == over, (name, leg))?;
    }
    check(seen == 14, seen)
}

fn pickles_cross_opened_held_or_not_at_all() -> Outcome {
    let worker = worker()?;
    for protocol in 0..6 {
        for name in ["plain", "shared_twice"] {
            let value = tier_pickle::load(data(&format!("{name}_p{protocol}.pickle")));
            let value = value.map_err(text)?;
            check(value.as_map().is_some(), (name, protocol))?;
            let reply = echo(&worker, &value)?;
            check(reply.sent().legs[0].rung == RungId::INLINE, reply.sent())?;
        }
        for name in ["unknown_class", "ndarray"] {
            let bytes = data(&format!("{name}_p{protocol}.pickle"));
            let value = tier_pickle::load(bytes.clone()).map_err(text)?;
            let reply = echo(&worker, &value)?;
            let back = reply.value().as_pickle().ok_or("no pickle came back")?;
            check(*back.bytes().map_err(text)? == *bytes, (name, protocol))?;
            check(reply.sent().legs[0].rung == RungId::PICKLE, reply.sent())?;
        }
    }
    let bytes = data("executes_p2.pickle");
    let evil = tier_pickle::load(bytes.clone()).map_err(text)?;
    let reply = echo(&worker, &evil)?;
    let back = reply.value().as_pickle().ok_or("not held")?;
    check(*back.bytes().map_err(text)? == *bytes, "other bytes")?;
    let reply = worker.call("unpickle", evil).map_err(text)?;
    check(reply.value().as_str() == Some("not-plain"), reply.value())?;
    let refusal = tier_pickle::load(data("deep_20000_p2.pickle")).unwrap_err();
    check(refusal.reason() == Reason::TooDeep, refusal)?;
    // Who sends it all the same gets the same answer over there, and the worker lives.
    let deep = OpaquePickle::new(data("deep_20000_p2.pickle"));
    let reply = worker.call("unpickle", deep).map_err(text)?;
    check(reply.value().as_str() == Some("too-deep"), reply.value())?;
    echo(&worker, &Value::from(1)).map(drop)
}

fn a_pickle_keeps_its_buffers_and_outlives_its_producer() -> Outcome {
    let (producer, consumer) = (worker()?, worker()?);
    let buffer = Tensor::from_vec(vec![3u8; 100_000], &[100_000]).unwrap();
    let pickle = OpaquePickle::new(b"\x80\x05\x97.".to_vec()).with_buffers(vec![buffer]).unwrap();
    let reply = echo(&producer, &Value::from(pickle))?;
    let held = reply.into_value();
    let class = producer.call("class", Value::Null).map_err(text)?.into_value();
    let _ = producer.shutdown(std::time::Duration::ZERO);
    echo(&consumer, &held)?;
    let reply = echo(&consumer, &class)?;
    let back = reply.value().as_pickle().ok_or("no pickle came back")?;
    check(*back.bytes().map_err(text)? == *data("unknown_class_p5.pickle"), "other bytes")
}

fn a_type_of_ones_own_known_on_both_sides() -> Outcome {
    let worker = worker()?;
    let registry = registry(1, 1..=1);
    let made = worker.call("make", Value::Null).map_err(text)?;
    let legs: Vec<String> = made.received().legs.iter().map(|leg| leg.path.to_string()).collect();
    check(legs.contains(&"$[2][0]".to_owned()), &legs)?;
    let opened: Mesh = registry.compose(made.value()).map_err(text)?;
    check(opened == mesh(), "another mesh")?;
    let object = registry.decompose(&mesh()).map_err(text)?;
    let reply = worker.call("open", object).map_err(text)?;
    check(reply.value().get("same") == Some(&true.into()), reply.value())?;
    // Its tensors ride rung 3; what is plain about it stays in the JSON.
    let rungs: Vec<&str> = reply.sent().legs.iter().map(|leg| leg.rung.as_str()).collect();
    check(rungs == ["inline", "inline", "shm", "shm", "inline", "inline", "shm"], rungs)?;
    let object = &reply.sent().legs[0].what;
    check(*object == What::Object("tests/mesh".into(), 1), object)
}

/// A → host → B: the host has never heard of meshes, and A is dead before B opens one.
fn an_unknown_type_is_forwarded_unopened() -> Outcome {
    let (a, b) = (worker()?, worker()?);
    let object = a.call("make", Value::Null).map_err(text)?.into_value();
    check(!a.process().kill().status.success(), "not killed")?;
    check(!a.shutdown(std::time::Duration::from_secs(5)).to_string().is_empty(), "alive")?;
    let nothing = Registry::default();
    let refusal = nothing.compose::<Mesh>(&object).unwrap_err();
    check(refusal.reason() == Reason::UnknownTag, refusal)?;
    let held = object.as_object().ok_or("no object")?;
    check((held.tag(), held.version()) == ("tests/mesh", 1), held.tag())?;
    let reply = b.call("open", object).map_err(text)?;
    check(reply.value().get("same") == Some(&true.into()), reply.value())
}

fn versions_that_differ_are_told_or_refused() -> Outcome {
    let command = |version: &str, reads: &str| {
        Command::this_executable().env("MESH_VERSION", version).env("MESH_READS", reads)
    };
    let old = registry(1, 1..=1);
    let object = || old.decompose(&mesh()).map_err(text);
    let reads_old = Worker::spawn(command("2", "1")).map_err(text)?;
    let reply = reads_old.call("open", object()?).map_err(text)?;
    let name = reply.value().get("name").and_then(Value::as_str).unwrap_or("").to_owned();
    check(name.ends_with("(of 1 read by 2)"), name)?;
    let strict = Worker::spawn(command("2", "2")).map_err(text)?;
    let error = strict.call("open", object()?).unwrap_err().to_string();
    check(error.contains("\"tests/mesh\" of version 1, here 2"), error)?;
    // And the other way round: a new one from there.
    let new = strict.call("make", Value::Null).map_err(text)?.into_value();
    let refusal = old.compose::<Mesh>(&new).unwrap_err();
    check(refusal.detail() == "\"tests/mesh\" of version 2, here 1", refusal)
}

fn job() -> Job {
    let mut image = TensorMut::new(DType::F32, &[100, 100]).unwrap();
    image.as_bytes_mut().fill(0);
    let times = Array::from_bytes(vec![0; 16], "<M8[ns]".parse().unwrap(), &[2]).unwrap();
    Job {
        image: image.share().unwrap(),
        radius: 2.5,
        more: vec![Tensor::from_vec(vec![1u8; 3], &[3]).unwrap()],
        named: [("when".to_owned(), times)].into(),
        mode: Mode::Masked(Tensor::from_vec(vec![true, false], &[2]).unwrap()),
        weights: (0..1_000_000u32).map(|i| i as f32).collect(),
        note: None,
    }
}

fn structs_are_arguments_and_answers() -> Outcome {
    let worker = worker()?;
    let job = job();
    let answer = worker.call_as_with::<Job>("job", &job, CallOptions::new()).map_err(text)?;
    check(answer.value == job, "another job came back")?;
    let leg = |path: &str| answer.sent.at(path).ok_or_else(|| format!("no leg at {path}"));
    let image = leg("$.image")?;
    check(image.rung == RungId::SHM && image.copies == 0, image)?;
    check(leg("$.named.when")?.rung == RungId::NUMPY, "when")?;
    let weights = leg("$.weights")?;
    check(weights.rung == RungId::PICKLE && weights.over == Some(RungId::SHM), weights)?;
    let hosts = weights.declined.iter().filter(|(rung, _)| !rung.as_str().starts_with("cuda"));
    check(hosts.count() == 2, &weights.declined)?;
    check(leg("$.radius")?.rung == RungId::INLINE, "radius")?;
    // What is borrowed goes without a copy too.
    #[derive(Serialize)]
    struct Borrowed<'a> {
        image: &'a Tensor,
        name: &'a str,
    }
    let borrowed = Borrowed { image: &job.image, name: "x" };
    let back = worker.call_as_with::<HashMap<String, Value>>("echo", &borrowed, CallOptions::new());
    let back = back.map_err(text)?;
    check(back.value["image"] == Value::from(job.image.clone()), "another image")?;
    let copies = back.sent.at("$.image").map(|leg| leg.copies);
    check(copies == Some(0), copies)?;
    let sum: i64 = worker.call_as("sum", &(2, 3)).map_err(text)?;
    check(sum == 5, sum)?;

    let error = worker.call_as::<i64>("sum", &("two", 3)).unwrap_err();
    match error.kind() {
        CallErrorKind::Remote { code, text } if code == "bad-argument" => {
            check(text.contains("at $[0]"), text)?;
        }
        other => return Err(format!("{other:?}")),
    }
    let error = worker.call_as::<Tensor>("sum", &(2, 3)).unwrap_err();
    check(matches!(error.kind(), CallErrorKind::WrongAnswer(_)), error.kind())?;
    let twice = [("a", 1), ("a", 2)];
    struct Twice([(&'static str, i32); 2]);
    impl Serialize for Twice {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_map(self.0)
        }
    }
    let error = worker.call_as::<i64>("sum", &Twice(twice)).unwrap_err();
    check(matches!(error.kind(), CallErrorKind::BadArgument(_)), error.kind())
}

fn a_reply_that_no_rung_takes_is_an_error_at_the_caller() -> Outcome {
    let worker = worker()?;
    let error = worker.call("unsendable", Value::Null).unwrap_err();
    check(error.is_unsendable(), error.kind())?;
    let text = error.to_string();
    for part in ["list at $.deep[0][0]", "nested too deeply", "(flatten the value)"] {
        check(text.contains(part), (part, &text))?;
    }
    check(worker.lent() == (0, 0), worker.lent())?;
    let buffers = vec![Tensor::from_vec(vec![1u8], &[1]).unwrap(); 5000];
    let pickle = OpaquePickle::new(vec![b'.']).with_buffers(buffers).unwrap();
    let error = worker.call("echo", pickle).unwrap_err();
    check(error.is_unsendable(), error.kind())?;
    check(error.to_string().contains("5001 views of one leaf"), &error)?;
    let set = Value::Set(vec![Value::from(Tensor::from_vec(vec![1u8], &[1]).unwrap())]);
    let error = worker.call("echo", set).unwrap_err();
    check(error.is_unsendable() && error.value().is_some(), error.kind())?;
    echo(&worker, &Value::from(1)).map(drop)
}

fn what_is_required_is_met_or_nothing_is_sent() -> Outcome {
    let worker = worker()?;
    let private = || Tensor::from_vec(vec![1u8; 5000], &[5000]).unwrap();
    let shared = ladder::share(&private()).map_err(text)?;
    let none = CallOptions::new().require_max_copies(0);
    worker.call_with("echo", shared.clone(), none.clone()).map_err(text)?;
    let frames = worker.traffic().frames_sent;
    let value = Value::map([("fine", Value::from(shared)), ("private", private().into())]);
    let error = worker.call_with("echo", value.clone(), none).unwrap_err();
    let CallErrorKind::BelowRequired(below) = error.kind() else {
        return Err(format!("{error}"));
    };
    check(below.leg.path == "$.private" && below.leg.copies == 1, below)?;
    check(error.to_string().contains("put it into shared memory first"), text(&error))?;
    check(error.into_value() == Some(value), "the value is lost")?;
    check(worker.traffic().frames_sent == frames, "something was sent")?;
    check(worker.lent().0 <= 1, worker.lent())?;

    let shm = CallOptions::new().require_at_least(RungId::SHM);
    worker.call_with("echo", Value::map([("a", private())]), shm.clone()).map_err(text)?;
    worker.call_with("echo", 7, shm.clone()).map_err(text)?;
    let list = Value::list((0..100_000).map(f64::from));
    let error = worker.call_with("echo", list.clone(), shm).unwrap_err();
    check(error.to_string().contains("shm or higher is required"), text(error))?;
    let pickle = CallOptions::new().require_at_least(RungId::PICKLE);
    worker.call_with("echo", list, pickle).map_err(text)?;
    let nowhere = CallOptions::new().require_at_least(RungId::new("warp"));
    check(worker.call_with("echo", private(), nowhere).is_err(), "an unknown rung is met")
}

fn stats_count_what_was_moved() -> Outcome {
    let worker = worker()?;
    let tensor = Tensor::from_vec(vec![1u8; 5000], &[5000]).unwrap();
    let times = Array::from_bytes(vec![0; 800], "<M8[ns]".parse().unwrap(), &[100]).unwrap();
    let value = Value::map([
        ("a", Value::from(tensor.clone())),
        ("b", tensor.into()),
        ("when", times.into()),
        ("n", 1.into()),
    ]);
    for _ in 0..3 {
        echo(&worker, &value)?;
    }
    let stats = worker.stats();
    check((stats.sent, stats.received, stats.refused) == (3, 3, 0), &stats)?;
    let shm = stats.sent_on(&RungId::SHM).ok_or("no shm")?;
    check((shm.leaves, shm.bytes, shm.copied) == (6, 30_000, 30_000), shm)?;
    let numpy = stats.received_on(&RungId::NUMPY).ok_or("no numpy")?;
    check((numpy.leaves, numpy.bytes) == (3, 2400), numpy)?;
    let inline = stats.sent_on(&RungId::INLINE).ok_or("no inline")?;
    check((inline.leaves, inline.bytes, inline.copied) == (3, 3, 0), inline)?;
    let declined = stats.declined.iter().find(|declined| declined.rung == RungId::SHM);
    let declined = declined.ok_or("no declined")?;
    check((declined.reason, declined.leaves) == (Reason::OtherKind, 3), declined)
}

fn a_large_leaf_on_a_low_rung_is_worth_a_warning() -> Outcome {
    let worker = worker()?;
    let warnings = Warnings::default();
    let list = Value::list((0..50_000).map(f64::from));
    tracing::subscriber::with_default(warnings.clone(), || -> Outcome {
        echo(&worker, &list)?;
        check(warnings.all().is_empty(), "warned of less than a megabyte")?;
        worker.warn_over(100_000);
        echo(&worker, &Value::map([("weights", list)]))?;
        let all = warnings.all();
        let [words] = &all[..] else { return Err(format!("{all:?}")) };
        for part in ["path=\"$\"", "rung=pickle", "send it as a tensor"] {
            check(words.contains(part), (part, words))?;
        }
        Ok(())
    })
}

/// Of private and of shared memory, alone and in a list; and nobody writes what was only lent to him, flag or not.
fn flags_cross_and_what_came_is_not_ones_own_to_write() -> Outcome {
    let worker = worker()?;
    for (read_only, requires_grad) in [(false, false), (true, false), (false, true), (true, true)] {
        let flags = Flags { read_only, requires_grad };
        let private = Tensor::from_vec(vec![1.5f32; 600], &[20, 30]).map_err(text)?;
        let shared = ladder::share(&private).map_err(text)?.with_flags(flags);
        let value = Value::list([private.with_flags(flags), shared]);
        let reply = echo(&worker, &value)?;
        for item in reply.value().items().unwrap_or_default() {
            let tensor = item.as_tensor().ok_or("no tensor")?;
            check(tensor.flags() == flags, tensor.flags())?;
            check(TensorMut::reclaim(tensor.clone()).is_err(), "it was lent")?;
        }
    }
    Ok(())
}

fn objects_in_objects_of_objects_are_bounded() -> Outcome {
    let worker = worker()?;
    let nest = |levels: usize| {
        (1..levels).fold(Value::Null, |inner, _| {
            Object::new("tests/box", 1, Value::Null, vec![inner]).unwrap().into()
        })
    };
    echo(&worker, &nest(rung::limits::VALUE_DEPTH))?;
    let error = worker.call("echo", nest(rung::limits::VALUE_DEPTH + 1)).unwrap_err();
    check(error.to_string().contains("nested too deeply"), text(error))
}

fn main() -> ExitCode {
    match Channel::from_env() {
        Ok(Some(channel)) => return work(&channel),
        Ok(None) => {}
        Err(_) => return ExitCode::FAILURE,
    }
    run_serially(vec![
        trial(
            "every_file_crosses_and_is_what_it_should_be",
            every_file_crosses_and_is_what_it_should_be,
        ),
        trial("pickles_cross_opened_held_or_not_at_all", pickles_cross_opened_held_or_not_at_all),
        trial(
            "a_pickle_keeps_its_buffers_and_outlives_its_producer",
            a_pickle_keeps_its_buffers_and_outlives_its_producer,
        ),
        trial("a_type_of_ones_own_known_on_both_sides", a_type_of_ones_own_known_on_both_sides),
        trial("an_unknown_type_is_forwarded_unopened", an_unknown_type_is_forwarded_unopened),
        trial("versions_that_differ_are_told_or_refused", versions_that_differ_are_told_or_refused),
        trial("structs_are_arguments_and_answers", structs_are_arguments_and_answers),
        trial(
            "a_reply_that_no_rung_takes_is_an_error_at_the_caller",
            a_reply_that_no_rung_takes_is_an_error_at_the_caller,
        ),
        trial(
            "what_is_required_is_met_or_nothing_is_sent",
            what_is_required_is_met_or_nothing_is_sent,
        ),
        trial("stats_count_what_was_moved", stats_count_what_was_moved),
        trial(
            "a_large_leaf_on_a_low_rung_is_worth_a_warning",
            a_large_leaf_on_a_low_rung_is_worth_a_warning,
        ),
        trial(
            "flags_cross_and_what_came_is_not_ones_own_to_write",
            flags_cross_and_what_came_is_not_ones_own_to_write,
        ),
        trial(
            "objects_in_objects_of_objects_are_bounded",
            objects_in_objects_of_objects_are_bounded,
        ),
    ])
}
