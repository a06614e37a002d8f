//! Values go from the host to a worker and back.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ladder::{
    Array, CallErrorKind, CallOptions, Channel, Command, DType, Failure, Ladder, Methods, Object,
    OpaquePickle, Tensor, TensorMut, Value, Worker,
};
use proptest::test_runner::{Config, TestRunner};
use rung::{Reason, Storage};
use testkit::census::Census;
use testkit::{run_serially, trial};

type Outcome = Result<(), String>;

/// What this binary does where it is no worker.
const OTHER: &str = "E2E_OTHER";

const LONG: Duration = Duration::from_secs(30);

/// What this binary does as a worker.
fn work(channel: &Channel) -> ExitCode {
    let held = Arc::new(Mutex::new(None));
    let (keep, free) = (Arc::clone(&held), held);
    let methods = Methods::new()
        .on("echo", Ok)
        .on("describe", |value| {
            // What the worker sees: which tensors share a storage, and how large that is.
            let items = value.items().ok_or("a list")?.to_vec();
            let tensors: Vec<&Tensor> = items.iter().filter_map(Value::as_tensor).collect();
            let first = tensors.first().ok_or("a tensor")?;
            let shared = tensors.iter().all(|t| Arc::ptr_eq(t.storage(), first.storage()));
            Ok(Value::map([
                ("shared", Value::from(shared)),
                ("storage", Value::from(first.storage().len())),
                ("in_place", Value::from(first.storage().host_bytes().is_ok())),
            ]))
        })
        .on("fail", |_| Err(Failure::new("out-of-cheese", "no cheese left")))
        .on("error", |_| Err("file not found".into()))
        .on("panic", |_| panic!("at the disco"))
        .on("sleep", |value| {
            let millis = value.as_i64().unwrap_or(0);
            std::thread::sleep(Duration::from_millis(millis as u64));
            // So that one answer can be told from another.
            Ok(Value::from(Tensor::from_vec(vec![millis as u8; 10_000], &[10_000])?))
        })
        .on("exit", |_| std::process::exit(3))
        .on("abort", |_| std::process::abort())
        .on("too much", |_| Ok(Value::map([("numbers", Value::list(0..100_000))])))
        .on("hold", move |value| {
            *keep.lock().unwrap() = Some(value);
            Ok(Value::Null)
        })
        .on("free", move |_| {
            drop(free.lock().unwrap().take());
            Ok(Value::Null)
        })
        .on("pool", |_| {
            let stats = segment::Pool::process().stats();
            Ok(Value::from(stats.blocks - stats.idle_blocks))
        })
        .on("no answer", |_| Ok(Value::from("")));
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn worker() -> Result<Worker, String> {
    Worker::spawn_self().map_err(text)
}

fn any_value_comes_back() -> Outcome {
    let worker = worker()?;
    let mut runner =
        TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    runner
        .run(&testkit::values::any_value(), |value| {
            let reply = worker.call("echo", value.clone()).unwrap();
            let received = reply.received();
            // The same leaves on the same rungs both ways; only the answer's copies differ.
            let legs = |route: &ladder::Route| -> Vec<_> {
                let key = |leg: &ladder::Leg| {
                    (leg.path.clone(), leg.what.clone(), leg.rung.clone(), leg.bytes)
                };
                route.legs.iter().map(key).collect()
            };
            proptest::prop_assert_eq!(legs(reply.sent()), legs(&received));
            proptest::prop_assert_eq!(reply.into_value(), value);
            Ok(())
        })
        .map_err(text)
}

fn routes_tell_what_happened() -> Outcome {
    let worker = worker()?;
    let mut born = TensorMut::new(DType::F32, &[100, 10]).map_err(text)?;
    born.as_mut_slice::<f32>().map_err(text)?.fill(1.5);
    let value = Value::map([
        ("private", Value::from(Tensor::from_vec(vec![1u16; 500], &[5, 100]).map_err(text)?)),
        ("born shared", Value::from(born.share().map_err(text)?)),
        ("empty", Value::from(Tensor::from_vec(Vec::<f64>::new(), &[0, 3]).map_err(text)?)),
        ("text", Value::from("é".repeat(3000))),
        ("blob", Value::bytes(vec![7; 5000])),
        ("settings", Value::map([("depth", Value::from(3)), ("name", Value::from("x"))])),
    ]);
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    check(*reply.value() == value, "another value came back")?;
    let expected = [
        ("$.private", "shm", 1, 1000),
        ("$[\"born shared\"]", "shm", 0, 4000),
        ("$.empty", "inline", 0, 0),
        ("$.text", "shm", 2, 6000),
        ("$.blob", "shm", 1, 5000),
        ("$.settings", "inline", 0, 22),
    ];
    let seen: Vec<_> = reply
        .sent()
        .legs
        .iter()
        .map(|leg| (&*leg.path, leg.rung.as_str(), leg.copies, leg.bytes))
        .collect();
    check(seen == expected, seen)?;
    // What came to the worker in a block goes back in the same block.
    let back = reply.received();
    let copies = back.at("$.private").map(|leg| leg.copies);
    check(copies == Some(0), copies)
}

fn storages_stay_shared() -> Outcome {
    let worker = worker()?;
    let before = worker.traffic().handles_sent;
    let whole = Tensor::from_vec((0..60_000u32).collect(), &[300, 200]).map_err(text)?;
    let views = [whole.flip(0), whole.select(1, 7), whole.slice(0, 10, 20)];
    let views: Vec<Tensor> = views.into_iter().collect::<Result<_, _>>().map_err(text)?;
    let reply = worker.call("echo", Value::list(views.clone())).map_err(text)?;
    let back: Vec<&Tensor> =
        reply.value().items().unwrap().iter().filter_map(Value::as_tensor).collect();
    check(back.iter().zip(&views).all(|(a, b)| **a == *b), "other elements")?;
    check(back.iter().all(|t| Arc::ptr_eq(t.storage(), back[0].storage())), "not shared")?;
    check(worker.traffic().handles_sent == before + 1, worker.traffic())
}

fn a_small_view_of_something_huge_is_sent_alone() -> Outcome {
    let worker = worker()?;
    let huge = Tensor::from_vec(vec![7u8; 50 << 20], &[50, 1 << 20]).map_err(text)?;
    for (view, most) in [
        (huge.select(0, 30), (1 << 20) + 64),
        (huge.slice(1, 1000, 1010), 500),
        (huge.slice(0, 3, 4), (1 << 20) + 64),
    ] {
        let view = view.map_err(text)?;
        let reply = worker.call("describe", Value::list([view.clone()])).map_err(text)?;
        let storage = reply.value().get("storage").and_then(Value::as_i64);
        check(storage.is_some_and(|len| len <= most), (view.shape(), storage))?;
        let echo = worker.call("echo", view.clone()).map_err(text)?;
        check(*echo.value() == Value::from(view), "other elements")?;
    }
    Ok(())
}

fn thousands_of_tensors_go_in_one_message() -> Outcome {
    let worker = worker()?;
    let tensor =
        |index: usize| Tensor::from_vec(vec![index as u32; 1 + index % 100], &[1 + index % 100]);
    let private: Vec<Tensor> = (0..5000).map(tensor).collect::<Result<_, _>>().map_err(text)?;
    let reply = worker.call("echo", Value::list(private.clone())).map_err(text)?;
    check(*reply.value() == Value::list(private), "other tensors")?;
    let mut shared = Vec::new();
    for index in 0..300u32 {
        let mut tensor = TensorMut::new(DType::U32, &[10]).map_err(text)?;
        tensor.as_mut_slice::<u32>().map_err(text)?.fill(index);
        shared.push(tensor.share().map_err(text)?);
    }
    let reply = worker.call("echo", Value::list(shared.clone())).map_err(text)?;
    check(*reply.value() == Value::list(shared), "other tensors")?;
    // A frame has 253 descriptors at most: some of them had to be copied, and the route says so.
    let copied = reply.sent().legs.iter().filter(|leg| leg.copies > 0).count();
    check((1..300).contains(&copied), copied)
}

fn a_worker_of_the_same_executable_is_trusted() -> Outcome {
    let worker = worker()?;
    let mut born = TensorMut::new(DType::U8, &[5000]).map_err(text)?;
    born.as_bytes_mut().fill(3);
    let tensor = born.share().map_err(text)?;
    let reply = worker.call("describe", Value::list([tensor])).map_err(text)?;
    check(reply.value().get("in_place") == Some(&Value::from(true)), reply.value())
}

fn errors_of_the_handler_are_errors_of_the_call() -> Outcome {
    let worker = worker()?;
    let remote = |method: &str, code: &str, says: &str| {
        let error = worker.call(method, 1).unwrap_err();
        let fits = matches!(error.kind(), CallErrorKind::Remote { code: c, text } if c == code && text.contains(says));
        check(fits, error.kind())?;
        // It was taken: whoever tries again with what came back does not do it twice.
        check(error.into_value().is_none(), "the value came back")
    };
    remote("no such method", "unknown-method", "no such method")?;
    remote("fail", "out-of-cheese", "no cheese left")?;
    remote("error", "handler-failed", "file not found")?;
    remote("panic", "handler-panicked", "at the disco")?;
    check(worker.call("no such method", 1).unwrap_err().is_unknown_method(), "not known as such")?;
    // And the worker lives.
    check(worker.call("echo", 1).map_err(text)?.into_value() == Value::from(1), "no echo")
}

fn what_no_rung_takes_is_named_and_comes_back() -> Outcome {
    // Without the rungs that take what is large or has no tensor's type.
    let ladder = Ladder::of(vec![Arc::new(tier_shm::Shm), Arc::new(tier_inline::Inline)]);
    let worker =
        Worker::builder().ladder(ladder).spawn(Command::this_executable()).map_err(text)?;
    let mut born = TensorMut::new(DType::U8, &[5000]).map_err(text)?;
    born.as_bytes_mut().fill(1);
    let tensor = born.share().map_err(text)?;
    let value = Value::map([
        ("image", Value::from(tensor.clone())),
        ("weights", Value::map([("layer", Value::list(0..100_000))])),
    ]);
    let frames = worker.traffic().frames_sent;
    let error = worker.call("echo", value.clone()).unwrap_err();
    let CallErrorKind::Unsendable(unsendable) = error.kind() else {
        return Err(format!("{error}"));
    };
    check(unsendable.path == "$.weights", &unsendable.path)?;
    check(unsendable.kind == "map", &unsendable.kind)?;
    let reasons: Vec<_> =
        unsendable.refusals.iter().map(|(rung, why)| (rung.as_str(), why.reason())).collect();
    let expected = [("shm", Reason::OtherKind), ("inline", Reason::TooLarge)];
    check(reasons == expected, &unsendable.refusals)?;
    check(unsendable.remedy().is_some(), "no remedy")?;
    check(error.into_value() == Some(value), "the value is lost")?;
    // What was exported for it before the list was met is ours again.
    check(TensorMut::reclaim(tensor).is_ok(), "memory that was never sent is not ours")?;
    // Nothing is half-sent: nothing at all is.
    check(worker.traffic().frames_sent == frames, worker.traffic())?;
    check(worker.lent() == (0, 0), worker.lent())?;

    let error = worker.call("too much", Value::Null).unwrap_err();
    check(error.is_unsendable(), error.kind())?;
    check(error.to_string().contains("the map at $"), text(&error))?;
    let why = "pickle: the peer does not offer this rung";
    check(error.to_string().contains(why), text(&error))?;

    let times = Array::from_bytes(vec![0; 8], "<M8[ns]".parse().map_err(text)?, &[1]);
    let value = Value::map([("when", times.map_err(text)?)]);
    let error = worker.call("echo", value).unwrap_err();
    let CallErrorKind::Unsendable(unsendable) = error.kind() else {
        return Err(format!("{error}"));
    };
    check(unsendable.path == "$.when" && unsendable.kind == "array of <M8[ns]", unsendable)?;
    check(worker.call("echo", 1).is_ok(), "the worker is gone")
}

fn a_late_answer_is_dropped_and_the_next_call_gets_its_own() -> Outcome {
    let worker = worker()?;
    let options = CallOptions::new().limit(Duration::from_millis(50));
    let tensor = Tensor::from_vec(vec![5u8; 100_000], &[100_000]).map_err(text)?;
    for _ in 0..3 {
        let error = worker.call_with("sleep", 200, options.clone()).unwrap_err();
        check(error.is_deadline(), error.kind())?;
        let reply = worker.call("echo", tensor.clone()).map_err(text)?;
        check(*reply.value() == Value::from(tensor.clone()), "another call's answer")?;
        // This one waits when the late answer comes.
        let reply = worker.call("sleep", 250).map_err(text)?;
        let fill = reply.value().as_tensor().ok_or("a tensor")?.to_vec::<u8>().map_err(text)?[0];
        check(fill == 250, ("another call's answer", fill))?;
    }
    let error = worker.call_with("sleep", 200, options.clone()).unwrap_err();
    check(error.is_deadline(), error.kind())?;
    // The last late answer comes while nobody calls. Its memory goes back all the same: the worker
    // keeps nothing for us, and we nothing for it.
    std::thread::sleep(Duration::from_millis(250));
    settle(|| worker.lent().0 == 0, &worker)?;
    // And what the worker sent us is idle there.
    let idle = worker.call("pool", Value::Null).map_err(text)?.into_value();
    check(idle == Value::from(0), ("blocks in use", idle))
}

/// Waits until something holds, without a word to the worker.
fn settle(holds: impl Fn() -> bool, worker: &Worker) -> Outcome {
    let end = Instant::now() + Duration::from_secs(5);
    while !holds() {
        check(Instant::now() < end, worker.lent())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn memory_is_kept_until_its_receipt() -> Outcome {
    let worker = worker()?;
    let mut born = TensorMut::new(DType::U8, &[1 << 20]).map_err(text)?;
    born.as_bytes_mut().fill(9);
    let tensor = born.share().map_err(text)?;
    worker.call("hold", tensor.clone()).map_err(text)?;
    check(worker.lent() == (1, 1 << 20), worker.lent())?;
    let tensor = TensorMut::reclaim(tensor).err().ok_or("reclaimed while it is held")?;
    worker.call("free", Value::Null).map_err(text)?;
    settle(|| worker.lent() == (0, 0), &worker)?;
    check(TensorMut::reclaim(tensor).is_ok(), "not reclaimed after the receipt")
}

fn a_dead_worker_is_an_error_that_says_how() -> Outcome {
    let before = Census::take();
    for (method, says) in [
        ("exit", "the worker exited with status 3"),
        // There are no signals on Windows.
        ("abort", if cfg!(windows) { "the worker exited with" } else { "killed by signal 6" }),
    ] {
        let worker = worker()?;
        let tensor = Tensor::from_vec(vec![1u8; 100_000], &[100_000]).map_err(text)?;
        let error = worker.call(method, tensor).unwrap_err();
        check(error.is_gone() && error.to_string().contains(says), text(&error))?;
        let error = worker.call("echo", 1).unwrap_err();
        check(error.is_gone(), text(&error))?;
        check(error.into_value() == Some(Value::from(1)), "the value is lost")?;
    }
    before.settle()
}

fn nothing_is_left_behind() -> Outcome {
    let before = Census::take();
    for _ in 0..20 {
        let worker = worker()?;
        let tensor = Tensor::from_vec(vec![1u8; 1 << 20], &[1 << 20]).map_err(text)?;
        let reply = worker.call("echo", Value::list([tensor.clone(), tensor])).map_err(text)?;
        drop(reply);
        let exit = worker.shutdown(LONG);
        check(exit.status.success(), text(exit))?;
    }
    before.settle()
}

fn an_answer_outlives_its_worker() -> Outcome {
    let worker = worker()?;
    let tensor = worker.call("sleep", 0).map_err(text)?.into_value();
    let exit = worker.shutdown(LONG);
    check(exit.status.success(), text(exit))?;
    let tensor = tensor.as_tensor().cloned().ok_or("a tensor")?;
    check(tensor.as_slice::<u8>().map_err(text)? == [0; 10_000], "other elements")
}

fn bulk_never_crosses_the_socket() -> Outcome {
    let worker = worker()?;
    let leaves = |count: usize, bytes: usize| -> Result<Value, String> {
        let tensor = || {
            let storage = Arc::new(Storage::from_vec(vec![1u8; bytes]));
            Tensor::contiguous(storage, DType::U8, &[bytes]).map_err(text)
        };
        (0..count).map(|_| tensor()).collect::<Result<Vec<_>, _>>().map(Value::list)
    };
    let record = || serde_json::from_str(r#"[["f0","<i4"],["f1",">f4"]]"#).map_err(text);
    let records = || Array::from_bytes(vec![7; 8000], record()?, &[1000]).map_err(text);
    let object = |index: u32| -> Result<Value, String> {
        let schema = Value::map([("index", Value::from(index)), ("name", "x".repeat(90).into())]);
        Object::new("tests/mesh", 1, schema, vec![records()?.into()]).map(Value::from).map_err(text)
    };
    let fields = |count: usize| {
        let field = |i| rung::Field::new(format!("a field {i}"), ">f8".parse().unwrap());
        let descr = ladder::Descr::record((0..count).map(field).collect()).unwrap();
        Array::from_bytes(vec![1; 8 * count], descr, &[1]).unwrap()
    };
    // Nothing here is bulk by itself, and all of it is too much for the JSON.
    let many = |items: &dyn Fn() -> Value| Value::list((0..100).map(|_| items()));
    let beside = |value: Value| Ok::<_, String>(Value::list([leaves(1, 10)?, value]));
    let values = [
        (1, leaves(1, 1 << 10)?),
        (1, leaves(1, 64 << 20)?),
        (2000, leaves(2000, 1000)?),
        (1, leaves(1, 1 << 30)?),
        (200, Value::List((0..100).map(object).collect::<Result<_, _>>()?)),
        (200, Value::List((0..200).map(|_| records().map(Value::from)).collect::<Result<_, _>>()?)),
        (1, Value::list((0..2_000_000).map(f64::from))),
        (1, Value::map((0..10_000).map(|i| (format!("key {i}"), "some text or other")))),
        (100, Value::list([leaves(1, 10)?, many(&|| "x".repeat(4000).into())])),
        (101, {
            let text = |_| Ok::<_, String>(Value::map([("t", Value::from("y".repeat(4000)))]));
            let mut items = (0..100).map(text).collect::<Result<Vec<_>, _>>()?;
            items.push(leaves(1, 10)?);
            Value::List(items)
        }),
        (2, beside(many(&|| Value::bytes(vec![1; 3000])))?),
        (100, Value::list((0..100).map(|_| OpaquePickle::new(vec![b'.'; 3000])))),
        // Long texts among many other things, keys as long as texts, and types of many fields.
        (
            1,
            Value::list((0..1_500_000).map(|i| match i {
                7 => Value::from("z".repeat(5000)),
                _ => Value::from(0.5),
            })),
        ),
        (
            2000,
            Value::map(
                (0..1000).map(|i| ("k".repeat(4000) + &i.to_string(), leaves(1, 8).unwrap())),
            ),
        ),
        (1000, Value::list((0..1000).map(|_| fields(60)))),
    ];
    for (index, (count, value)) in values.into_iter().enumerate() {
        let before = worker.traffic();
        let reply = worker.call("echo", value.clone()).map_err(text)?;
        check(*reply.value() == value, ("another value came back", index))?;
        let after = worker.traffic();
        let most = (64 << 10) + 512 * count as u64;
        for (name, crossed) in [
            ("sent", after.bytes_sent - before.bytes_sent),
            ("received", after.bytes_received - before.bytes_received),
        ] {
            check(crossed <= most, (index, count, name, crossed, most))?;
        }
    }
    Ok(())
}

fn threads_may_call_at_the_same_time() -> Outcome {
    let worker = worker()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let worker = &worker;
                scope.spawn(move || -> Outcome {
                    for round in 0..200u64 {
                        let value = Value::list([thread, round]);
                        let reply = worker.call("echo", value.clone()).map_err(text)?;
                        check(*reply.value() == value, "another call's answer")?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "panicked")?)
    })
}

fn a_program_that_is_no_worker_is_an_error() -> Outcome {
    let before = Census::take();
    let error = Worker::spawn(Command::new("/no/such/program")).unwrap_err();
    check(error.to_string().contains("/no/such/program"), text(error))?;
    let other = |does: &str| Command::this_executable().env(OTHER, does);
    let error = Worker::spawn(other("ends")).unwrap_err();
    check(error.to_string().contains("the worker exited with status 0"), text(error))?;
    let started = Instant::now();
    let error = Worker::builder()
        .handshake(Duration::from_millis(100))
        .spawn(other("sleeps").grace(Duration::ZERO))
        .unwrap_err();
    check(error.to_string().contains("no handshake within 100ms"), text(error))?;
    check(started.elapsed() < LONG, started.elapsed())?;
    before.settle()
}

fn main() -> ExitCode {
    // A program that knows nothing of channels.
    match std::env::var(OTHER).as_deref() {
        Ok("ends") => return ExitCode::SUCCESS,
        Ok(_) => std::thread::sleep(LONG * 3),
        Err(_) => {}
    }
    match Channel::from_env() {
        Ok(Some(channel)) => return work(&channel),
        Ok(None) => {}
        Err(_) => return ExitCode::FAILURE,
    }
    run_serially(vec![
        trial("any_value_comes_back", any_value_comes_back),
        trial("routes_tell_what_happened", routes_tell_what_happened),
        trial("storages_stay_shared", storages_stay_shared),
        trial(
            "a_small_view_of_something_huge_is_sent_alone",
            a_small_view_of_something_huge_is_sent_alone,
        ),
        trial("thousands_of_tensors_go_in_one_message", thousands_of_tensors_go_in_one_message),
        trial(
            "a_worker_of_the_same_executable_is_trusted",
            a_worker_of_the_same_executable_is_trusted,
        ),
        trial(
            "errors_of_the_handler_are_errors_of_the_call",
            errors_of_the_handler_are_errors_of_the_call,
        ),
        trial(
            "what_no_rung_takes_is_named_and_comes_back",
            what_no_rung_takes_is_named_and_comes_back,
        ),
        trial(
            "a_late_answer_is_dropped_and_the_next_call_gets_its_own",
            a_late_answer_is_dropped_and_the_next_call_gets_its_own,
        ),
        trial("memory_is_kept_until_its_receipt", memory_is_kept_until_its_receipt),
        trial("a_dead_worker_is_an_error_that_says_how", a_dead_worker_is_an_error_that_says_how),
        trial("nothing_is_left_behind", nothing_is_left_behind),
        trial("an_answer_outlives_its_worker", an_answer_outlives_its_worker),
        trial("bulk_never_crosses_the_socket", bulk_never_crosses_the_socket),
        trial("threads_may_call_at_the_same_time", threads_may_call_at_the_same_time),
        trial("a_program_that_is_no_worker_is_an_error", a_program_that_is_no_worker_is_an_error),
    ])
}
