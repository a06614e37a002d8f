//! Every rung is proven before anything of a user's moves, and heals when it breaks later.
//!
//! A worker's rungs, and what goes wrong with them, stand in its environment, in the words of [`rungs`].
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ladder::{
    CallErrorKind, CallOptions, Channel, Command, ConnectError, Device, Ladder, Methods, Output,
    Report, RungId, Tensor, TensorMut, Value, Verdict, Verify, Worker, WorkerBuilder,
};
use rung::{Reason, Rung};
use testkit::device::{self, DeviceRung};
use testkit::faulty::{Faulty, Kind, On, Trigger};
use testkit::warnings::Warnings;
use testkit::{linux, run_serially, trial};

type Outcome<T = ()> = Result<T, String>;

const ROLE: &str = "E2E_ROLE";

/// Moves memory of devices.
const NEAR: RungId = RungId::new("near");
/// So does this, one rung lower.
const FAR: RungId = RungId::new("far");

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

/// What the words of a role say.
#[derive(Debug, Clone)]
struct Rungs {
    ladder: Ladder,
    trigger: Trigger,
}

/// Rungs by words: `devices 1 2` (seen by both device rungs), `unsaid` (without their names), `idle` (not at
/// connect), `later` (nothing goes wrong yet), and one fault as `rung kind on`.
fn rungs(words: &str) -> Rungs {
    let words: Vec<&str> = words.split(' ').filter(|word| !word.is_empty()).collect();
    let has = |word: &str| words.contains(&word);
    let numbers = words.iter().filter_map(|word| word.parse().ok());
    let devices: Vec<Device> = numbers.map(device::device).collect();
    let rung =
        |id| DeviceRung { id, devices: devices.clone(), says: !has("unsaid"), ready: !has("idle") };
    let trigger = if has("later") { Trigger::never() } else { Trigger::always() };
    let mut rungs: Vec<Arc<dyn Rung>> = Vec::new();
    if !devices.is_empty() {
        rungs.extend([Arc::new(rung(NEAR)) as Arc<dyn Rung>, Arc::new(rung(FAR))]);
    }
    rungs.push(Arc::new(tier_shm::Shm));
    rungs.push(Arc::new(tier_numpy::Numpy));
    rungs.push(Arc::new(tier_pickle::Pickle));
    rungs.push(Arc::new(tier_inline::Inline));
    let wrap = |inner: Arc<dyn Rung>| -> Arc<dyn Rung> {
        let at = words.iter().position(|word| *word == inner.id().as_str());
        let Some([kind, on]) = at.and_then(|at| words.get(at + 1..at + 3)) else { return inner };
        let kind = match *kind {
            "flip" => Kind::Flip,
            "swap" => Kind::Swap,
            "stale" => Kind::Stale,
            "longer" => Kind::Longer,
            "shorter" => Kind::Shorter,
            "delay" => Kind::Delay(Duration::from_millis(30)),
            "hang" => Kind::Delay(Duration::from_secs(6)),
            _ => Kind::Fail,
        };
        let on = match *on {
            "export" => On::Export,
            "import" => On::Import,
            _ => On::Both,
        };
        Arc::new(Faulty { id: inner.id(), inner, kind, on, trigger: trigger.clone() })
    };
    let ladder = Ladder::of(rungs.into_iter().map(wrap).collect());
    Rungs { ladder, trigger }
}

fn act(role: &str) -> ExitCode {
    let Rungs { ladder, trigger } = rungs(role);
    if role == "skips" {
        // Says that all is well, of canaries that it never sent.
        let unproven = Channel::greet_from_env(&ladder, None).unwrap().unwrap();
        let by_hand = unproven.answer_by_hand().unwrap();
        let well = |rung| format!(r#"["{rung}","host",null,"",null,""]"#);
        let all = ["shm", "numpy", "pickle", "inline"].map(well).join(",");
        let said =
            format!(r#"{{"v":3,"k":"call","id":7,"n":1,"m":"$findings","p":[],"a":[{all}]}}"#);
        by_hand.link().send(&said, &[], None).unwrap();
        while by_hand.link().receive(None).is_ok() {}
        return ExitCode::SUCCESS;
    }
    let Ok(Some(channel)) = Channel::from_env_with(&ladder, None) else {
        return ExitCode::from(90);
    };
    if role.contains("slow") {
        std::thread::sleep(Duration::from_millis(400));
    }
    let (set, unset) = (trigger.clone(), trigger);
    let methods = Methods::new()
        .on("echo", Ok)
        .on("break", move |_| {
            set.set(1);
            Ok(Value::Null)
        })
        .on("mend", move |_| {
            unset.unset();
            Ok(Value::Null)
        })
        .on("empty dev shm", |_| {
            let empty = "rm -rf /dev/shm/* && umount -l /dev/shm";
            let emptied = std::process::Command::new("sh").args(["-c", empty]).status()?;
            Ok(Value::from(emptied.success()))
        })
        .on("ten", |_| {
            let tensor = |n: u8| device::tensor(device::device(1), &[n; 1000]).unwrap();
            Ok(Value::list((0..10).map(tensor)))
        })
        .on("born", |_| {
            let mut born = TensorMut::new(ladder::DType::U8, &[5000])?;
            born.as_bytes_mut().fill(7);
            Ok(born.share()?.into())
        })
        .on("on device", |value| {
            let number = value.as_i64().unwrap_or(0) as u8;
            Ok(device::tensor(device::device(number), &[number; 3000])?.into())
        })
        .on("first byte", |value| {
            let tensor = value.as_tensor().ok_or("a tensor")?;
            Ok(Value::from(i64::from(tensor.to_bytes()?[0])))
        });
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn role(words: &str) -> Command {
    Command::this_executable().env(ROLE, words).output(Output::Discard).grace(Duration::ZERO)
}

fn builder(words: &str) -> (WorkerBuilder, Trigger) {
    let Rungs { ladder, trigger } = rungs(words);
    (Worker::builder().ladder(ladder), trigger)
}

/// A host with these rungs and a worker with those.
fn connect(host: &str, worker: &str) -> Result<Worker, ConnectError> {
    builder(host).0.spawn(role(worker))
}

fn worker(words: &str) -> Outcome<Worker> {
    connect(words, words).map_err(text)
}

/// What is proven, whether the worker was let in or not.
fn report_of(connected: Result<Worker, ConnectError>) -> Outcome<(Report, bool)> {
    match connected {
        Ok(worker) => Ok((worker.report(), true)),
        Err(ConnectError::Refused(report)) => Ok((*report, false)),
        Err(error) => Err(error.to_string()),
    }
}

/// What was found wrong.
fn wrong(report: &Report) -> Vec<(String, bool, Reason)> {
    report
        .demoted()
        .map(|(rung, _, sending, why)| (rung.to_string(), sending, why.reason()))
        .collect()
}

fn all_verified(report: &Report) -> Outcome {
    for rung in &report.rungs {
        for proof in &rung.proofs {
            let fine = proof.sending == Verdict::Verified && proof.receiving == Verdict::Verified;
            check(fine, (&rung.rung, proof))?;
        }
    }
    check(!report.rungs.is_empty(), "no rungs")
}

/// Fault × rung × direction: exactly the verdict that the rules say.
fn each_fault_gives_its_verdict() -> Outcome {
    use Reason::{Corrupt, NoMemory, PeerFault, System, WrongSize};
    const THERE: &[bool] = &[true];
    const BACK: &[bool] = &[false];
    const BOTH: &[bool] = &[true, false];
    // What a fault in the host's rung shows, each in these directions: `true` for from the host to the worker.
    let carriers: &[(&str, &[bool], Option<Reason>)] = &[
        ("flip export", THERE, Some(Corrupt)),
        ("flip import", BACK, Some(Corrupt)),
        ("swap both", BOTH, Some(Corrupt)),
        ("stale export", THERE, Some(Corrupt)),
        ("stale import", BACK, Some(Corrupt)),
        ("longer export", THERE, Some(WrongSize)),
        ("longer import", BACK, Some(WrongSize)),
        ("shorter export", THERE, Some(PeerFault)),
        ("shorter import", BACK, Some(WrongSize)),
        ("fail export", THERE, Some(NoMemory)),
        ("fail import", BACK, Some(System)),
        ("delay both", BOTH, None),
    ];
    let forms: &[(&str, &[bool], Option<Reason>)] = &[
        ("flip export", THERE, Some(Corrupt)),
        ("flip import", BACK, Some(Corrupt)),
        ("swap both", BOTH, Some(Corrupt)),
        ("stale export", THERE, Some(Corrupt)),
        ("stale import", BACK, Some(Corrupt)),
        ("shorter export", THERE, Some(PeerFault)),
        ("shorter import", BACK, Some(PeerFault)),
        ("fail export", THERE, Some(System)),
        ("fail import", BACK, Some(PeerFault)),
        ("delay both", BOTH, None),
    ];
    let table = [("near", carriers), ("shm", carriers), ("numpy", forms), ("pickle", forms)];
    for (rung, faults) in table {
        for (fault, ways, reason) in faults {
            let case = format!("{rung} {fault}");
            let devices = if rung == "near" { "devices 1 " } else { "" };
            let host = format!("{devices}{case}");
            if fault.starts_with("stale") {
                // What is replayed is what this process's first session saw: right then.
                all_verified(&report_of(connect(&host, devices))?.0)
                    .map_err(|error| format!("{case}, the first: {error}"))?;
            }
            let (report, let_in) = report_of(connect(&host, devices))?;
            let found: Vec<_> = wrong(&report);
            // A pickle that is changed may be none any more, and so may a type.
            let is_form = matches!(rung, "numpy" | "pickle");
            let same = |found: Reason, expected: Reason| {
                found == expected || (is_form && found == PeerFault && expected == Corrupt)
            };
            let expected: Vec<bool> = reason.map_or(vec![], |_| ways.to_vec());
            let fine = found.len() == expected.len()
                && found.iter().zip(expected).all(|((found, sending, why), expected)| {
                    found == rung && *sending == expected && reason.is_some_and(|r| same(*why, r))
                });
            check(fine, (&case, &report.rungs))?;
            // A device is demoted and work goes on; host memory leaves nothing to fall back to.
            check(let_in == (rung == "near" || reason.is_none()), (&case, let_in))?;
            if reason.is_none() {
                all_verified(&report)?;
            }
        }
    }
    Ok(())
}

/// The same faults on the worker's side are seen in the other direction, by both.
fn a_fault_of_the_workers_is_seen_by_both() -> Outcome {
    for (fault, sending) in [("flip export", false), ("flip import", true)] {
        let (report, let_in) = report_of(connect("devices 1", &format!("devices 1 near {fault}")))?;
        check(wrong(&report) == [("near".to_owned(), sending, Reason::Corrupt)], &report.rungs)?;
        check(let_in, "refused")?;
        let (report, let_in) = report_of(connect("", &format!("shm {fault}")))?;
        check(wrong(&report) == [("shm".to_owned(), sending, Reason::Corrupt)], &report.rungs)?;
        check(!let_in, "let in")?;
    }
    Ok(())
}

/// A fault that cancels itself, and one that replays what was right once, would pass an echo.
fn a_bare_echo_would_have_passed() -> Outcome {
    let (report, _) = report_of(connect("shm swap both", ""))?;
    let (.., why) = report.demoted().next().ok_or("nothing")?;
    check(why.detail() == "the other side decoded other contents than came back", why)?;
    let (report, _) = report_of(connect("shm flip export", ""))?;
    let (.., why) = report.demoted().next().ok_or("nothing")?;
    // What differed, the first byte, and the size.
    let parts = ["$.whole: byte ", " of 2101249 is 0x", " and came as 0x", "; 1 differ"];
    check(parts.iter().all(|part| why.detail().contains(part)), why)?;
    let error = connect("shm flip export", "").err().ok_or("let in")?.to_string();
    check(error.starts_with("the peer is refused: shm, from here to there: other contents"), error)
}

fn a_demotion_is_loud_and_the_work_goes_on() -> Outcome {
    let warnings = Warnings::default();
    let worker = tracing::subscriber::with_default(warnings.clone(), || {
        connect("devices 1 near flip import", "devices 1").map_err(text)
    })?;
    let all = warnings.all();
    let said =
        all.iter().any(|words| words.contains("rung=near") && words.contains("code=corrupt"));
    check(said, &all)?;
    // From there to here it is the lower rung's, and so the answer comes on it; there it goes as ever.
    let tensor = device::tensor(device::device(1), &[9; 4000]).map_err(text)?;
    let reply = worker.call("echo", tensor.clone()).map_err(text)?;
    check(*reply.value() == Value::from(tensor), "another value")?;
    check(reply.sent().legs[0].rung == NEAR, &reply.sent().legs)?;
    check(reply.received().legs[0].rung == FAR, reply.received())
}

/// The third of ten leaves cannot be imported: nothing is lost.
fn a_result_whose_leaf_fails_is_still_right() -> Outcome {
    let (builder, trigger) = builder("devices 1 near fail import later");
    let worker = builder.spawn(role("devices 1")).map_err(text)?;
    trigger.set(3);
    let warnings = Warnings::default();
    let reply =
        tracing::subscriber::with_default(warnings.clone(), || worker.call("ten", Value::Null));
    let reply = reply.map_err(text)?;
    let items = reply.value().items().ok_or("a list")?;
    for (n, item) in (0u8..).zip(items) {
        let bytes = item.as_tensor().ok_or("a tensor")?.to_bytes().map_err(text)?;
        check(bytes == [n; 1000], (n, &bytes[..3]))?;
    }
    check(items.len() == 10, items.len())?;
    let route = reply.received();
    for leg in &route.legs {
        check(leg.rung == FAR, leg)?;
        let told: Vec<_> = leg.declined.iter().map(|(rung, why)| (rung, why.reason())).collect();
        check(told == [(&NEAR, Reason::System)], &told)?;
    }
    check(warnings.all().iter().any(|words| words.contains("rung=near")), warnings.all())?;
    let receiving =
        |worker: &Worker| worker.report().rung(&NEAR).unwrap().proofs[0].receiving.clone();
    check(receiving(&worker).is_demoted(), worker.report())?;
    // The next one goes straight to the lower rung: nothing is refused any more.
    let refused = worker.stats().refused;
    let again = worker.call("ten", Value::Null).map_err(text)?;
    check(again.received().legs.iter().all(|leg| leg.rung == FAR), again.received())?;
    check((refused, worker.stats().refused) == (1, 1), worker.stats())
}

/// A demoted rung comes back on request, if it is right now, and never by itself.
fn a_demoted_rung_is_proven_anew_on_request() -> Outcome {
    let worker = connect("devices 1", "devices 1 near fail import later").map_err(text)?;
    let tensor = device::tensor(device::device(1), &[3; 1000]).map_err(text)?;
    let rode = |worker: &Worker| -> Outcome<RungId> {
        let reply = worker.call("echo", tensor.clone()).map_err(text)?;
        check(*reply.value() == Value::from(tensor.clone()), "another value")?;
        Ok(reply.sent().legs[0].rung.clone())
    };
    check(rode(&worker)? == NEAR, "not near")?;
    worker.call("break", Value::Null).map_err(text)?;
    check(rode(&worker)? == FAR, "not healed")?;
    // Still broken: proving shows so.
    let report = worker.reprove().map_err(text)?;
    check(wrong(&report) == [("near".to_owned(), true, Reason::System)], &report.rungs)?;
    worker.call("mend", Value::Null).map_err(text)?;
    check(rode(&worker)? == FAR, "it came back by itself")?;
    all_verified(&worker.reprove().map_err(text)?)?;
    check(rode(&worker)? == NEAR, "it did not come back")
}

/// Host memory heals by a fresh block, then by an error that gives the value back.
fn what_breaks_later_is_caught_by_a_digest() -> Outcome {
    let value = Value::from(Tensor::from_vec((0..5000u32).collect(), &[50, 100]).map_err(text)?);
    // Not looked at, it passes; a device's heals one rung lower.
    for (verify, heals) in [(Verify::CanaryOnly, false), (Verify::Always, true)] {
        let (builder, _) = builder("devices 1");
        let worker = builder.verify(verify).spawn(role("devices 1 near flip import later"));
        let worker = worker.map_err(text)?;
        worker.call("break", Value::Null).map_err(text)?;
        let tensor = device::tensor(device::device(1), &[3; 1000]).map_err(text)?;
        let reply = worker.call("echo", tensor.clone()).map_err(text)?;
        check((*reply.value() == Value::from(tensor)) == heals, (verify, reply.value()))?;
        let expected = if heals { FAR } else { NEAR };
        check(reply.sent().legs[0].rung == expected, &reply.sent().legs)?;
        let story = reply.sent().legs[0].declined.first().map(|(_, why)| why.to_string());
        let told = story.is_some_and(|story| story.contains("corrupt: other contents came"));
        check(told == heals, &reply.sent().legs[0].declined)?;
    }
    let (builder, _) = builder("");
    let worker =
        builder.verify(Verify::Always).spawn(role("shm flip import later")).map_err(text)?;
    worker.call("echo", value.clone()).map_err(text)?;
    worker.call("break", Value::Null).map_err(text)?;
    let error = worker.call("echo", value.clone()).unwrap_err();
    let corrupt =
        matches!(error.kind(), CallErrorKind::NotAccepted { code, .. } if code == "corrupt");
    check(corrupt, error.kind())?;
    check(error.into_value() == Some(value.clone()), "the value is lost")?;
    worker.call("mend", Value::Null).map_err(text)?;
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    check(*reply.value() == value && reply.sent().legs[0].rung == RungId::SHM, reply.sent())?;
    // Every other leaf: of two that are wrong one is caught.
    worker.verify(Verify::Sampled(2.try_into().unwrap()));
    worker.call("break", Value::Null).map_err(text)?;
    let outcomes = [worker.call("echo", value.clone()), worker.call("echo", value)];
    check(outcomes.iter().filter(|outcome| outcome.is_err()).count() == 1, &outcomes)
}

/// Every kind of leaf goes with its digest, and views that show the same bytes many times go without.
fn every_kind_of_leaf_has_a_digest() -> Outcome {
    let worker = worker("")?;
    worker.verify(Verify::Always);
    let tensor = Tensor::from_vec((0..6000u16).collect(), &[60, 100]).map_err(text)?;
    let repeated = Tensor::new(Arc::clone(tensor.storage()), tensor.dtype(), &[1 << 40], &[0], 0);
    let big: Vec<u8> = (0..800).map(|n| n as u8).collect();
    let value = Value::map([
        ("tensor", Value::from(tensor.flip(0).map_err(text)?)),
        ("empty", Tensor::from_vec(Vec::<u8>::new(), &[0]).map_err(text)?.into()),
        (
            "array",
            ladder::Array::from_bytes(big.clone(), ">i8".parse().unwrap(), &[100]).unwrap().into(),
        ),
        ("pickle", ladder::OpaquePickle::new(big.clone()).into()),
        ("text", "é".repeat(5000).into()),
        ("bytes", Value::bytes(vec![7; 9000])),
        ("plain", Value::list((0..100_000).map(Value::from))),
    ]);
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    check(*reply.value() == value, "another value")?;
    // Born shared, so that its digest is of what the peer looks at too.
    let reply = worker.call("born", Value::Null).map_err(text)?;
    worker.call("echo", reply.into_value()).map_err(text)?;
    worker.call("echo", Value::list([repeated.map_err(text)?])).map(drop).map_err(text)
}

/// A makes a canary, the host forwards it, B says what it got: once for each pair.
fn a_first_forward_is_proven() -> Outcome {
    let (a, b) = (worker("devices 1")?, worker("devices 1")?);
    let frames = |worker: &Worker| worker.traffic().frames_sent;
    for method in ["born", "on device"] {
        let lent = a.call(method, 1).map_err(text)?.into_value();
        let before = (frames(&a), frames(&b));
        let reply = b.call("first byte", lent).map_err(text)?;
        let leg = &reply.sent().legs[0];
        check(
            leg.copies == 0 && leg.declined.iter().all(|(_, why)| why.reason() != Reason::Demoted),
            leg,
        )?;
        let with_proof = (frames(&a) - before.0, frames(&b) - before.1);
        check(with_proof.0 >= 1 && with_proof.1 >= 2, with_proof)?;
        let lent = a.call(method, 1).map_err(text)?.into_value();
        let before = frames(&b);
        b.call("first byte", lent).map_err(text)?;
        check(frames(&b) - before <= 2, frames(&b) - before)?;
    }
    Ok(())
}

/// A device that B cannot open demotes that pair alone.
fn a_device_that_one_peer_cannot_open_demotes_that_pair() -> Outcome {
    let (a, c) = (worker("devices 1 2")?, worker("devices 1 2")?);
    // B takes what the host makes, and nothing that another process made.
    let b = connect("devices 1 2", "devices 1 2 near fail import later").map_err(text)?;
    let mine = device::tensor(device::device(2), &[5; 2000]).map_err(text)?;
    check(b.call("echo", mine.clone()).map_err(text)?.sent().legs[0].rung == NEAR, "not near")?;
    b.call("break", Value::Null).map_err(text)?;
    let lent =
        |from: &Worker| Ok::<_, String>(from.call("on device", 2).map_err(text)?.into_value());
    let warnings = Warnings::default();
    let reply = tracing::subscriber::with_default(warnings.clone(), || {
        b.call("first byte", lent(&a)?).map_err(text)
    })?;
    check(reply.value().as_i64() == Some(2), reply.value())?;
    let leg = &reply.sent().legs[0];
    check(leg.rung == FAR, leg)?;
    check(
        leg.declined.iter().any(|(rung, why)| *rung == NEAR && why.reason() == Reason::Demoted),
        leg,
    )?;
    let all = warnings.all();
    check(all.iter().any(|words| words.contains("what another peer lent cannot go on")), &all)?;
    b.call("mend", Value::Null).map_err(text)?;
    // The pair of A and B is demoted; what is the host's own goes on near, and so does what C gets of A.
    check(b.call("echo", mine).map_err(text)?.sent().legs[0].rung == NEAR, "not near")?;
    check(c.call("first byte", lent(&a)?).map_err(text)?.sent().legs[0].rung == NEAR, "not near")?;
    check(b.call("first byte", lent(&c)?).map_err(text)?.sent().legs[0].rung == NEAR, "not near")?;
    check(b.call("first byte", lent(&a)?).map_err(text)?.sent().legs[0].rung == FAR, "not far")
}

/// Host memory that cannot go on as it is, because its lender is gone or fails, is copied.
fn what_cannot_be_forwarded_is_copied() -> Outcome {
    let (a, b, c) = (worker("")?, worker("")?, worker("")?);
    let born =
        |from: &Worker| Ok::<_, String>(from.call("born", Value::Null).map_err(text)?.into_value());
    let (lent, other) = (born(&a)?, born(&c)?);
    drop((a, c));
    // Of two lenders who are gone, too.
    let both = Value::list([lent.clone(), other]);
    let reply = b.call("echo", both.clone()).map_err(text)?;
    check(*reply.value() == both && reply.sent().legs.iter().all(|leg| leg.copies == 1), &reply)?;
    let reply = b.call("first byte", lent).map_err(text)?;
    check(reply.value().as_i64() == Some(7), reply.value())?;
    let leg = &reply.sent().legs[0];
    check(leg.rung == RungId::SHM && leg.copies == 1, leg)?;
    let why = leg.declined.first().map(|(_, why)| why.to_string()).unwrap_or_default();
    check(why.contains("its lender is gone"), why)
}

fn the_same_build_is_no_reason_for_a_warning() -> Outcome {
    let warnings = Warnings::default();
    let worker = tracing::subscriber::with_default(warnings.clone(), || worker("devices 1"))?;
    check(warnings.all().is_empty(), warnings.all())?;
    check(worker.report().differences().is_empty(), worker.report().differences())?;
    all_verified(&worker.report())
}

fn another_version_is_one_warning_and_costs_nothing() -> Outcome {
    let warnings = Warnings::default();
    let (builder, _) = builder("devices 1");
    let command = role("devices 1").env("LADDER_PRETEND", "library=9.9.9");
    let worker = tracing::subscriber::with_default(warnings.clone(), || builder.spawn(command));
    let worker = worker.map_err(text)?;
    let all = warnings.all();
    let here = env!("CARGO_PKG_VERSION");
    check(all.len() == 1 && all[0].contains(&format!("library: {here} here, 9.9.9 there")), &all)?;
    all_verified(&worker.report())?;
    let mut born = TensorMut::new(ladder::DType::U8, &[5000]).map_err(text)?;
    born.as_bytes_mut().fill(1);
    let reply = worker.call("echo", born.share().map_err(text)?).map_err(text)?;
    check(reply.sent().legs[0].copies == 0, &reply.sent().legs)
}

fn devices_are_matched_by_name_and_proven_one_by_one() -> Outcome {
    // A name that is not said leaves it to the canary.
    for (host, worker) in [("devices 1 unsaid", "devices 1"), ("devices 1", "devices 1 unsaid")] {
        all_verified(&connect(host, worker).map_err(text)?.report())?;
    }
    // A host that sees two, and a worker that sees one.
    let worker = connect("devices 1 2", "devices 1").map_err(text)?;
    let report = worker.report();
    for rung in [NEAR, FAR] {
        let proofs = &report.rung(&rung).ok_or("no rung")?.proofs;
        let [one, two] = &proofs[..] else { return Err(format!("{proofs:?}")) };
        check(one.device == device::device(1) && one.sending == Verdict::Verified, one)?;
        check(one.receiving == Verdict::Verified, one)?;
        let unknown = |verdict: &Verdict| matches!(verdict, Verdict::Demoted(why) if why.reason() == Reason::DeviceUnknown);
        check(two.device == device::device(2) && unknown(&two.sending), two)?;
    }
    // Unsaid, the canary finds out.
    let worker = connect("devices 1 2 unsaid", "devices 1 unsaid").map_err(text)?;
    let report = worker.report();
    let two = &report.rung(&NEAR).ok_or("no rung")?.proofs[1];
    check(
        matches!(&two.sending, Verdict::Demoted(why) if why.reason() == Reason::DeviceUnknown),
        two,
    )?;
    // What is on it is copied to the host, by name; the rest as ever.
    let two = device::tensor(device::device(2), &[1; 100]).map_err(text)?;
    let reply = worker.call("echo", two).map_err(text)?;
    let leg = &reply.sent().legs[0];
    check(leg.rung == RungId::SHM && leg.origin == Some(device::device(2)), leg)?;
    let (rung, why) = &leg.declined[0];
    check(*rung == NEAR && why.reason() == Reason::Demoted, &leg.declined)?;
    check(
        reply.value().as_tensor().is_some_and(|back| back.origin() == Some(device::device(2))),
        "origin",
    )?;
    let one = device::tensor(device::device(1), &[1; 100]).map_err(text)?;
    check(worker.call("echo", one).map_err(text)?.sent().legs[0].rung == NEAR, "not near")
}

/// A device that nothing uses yet is proven before the first leaf on it, once, or at connect where it is named.
fn an_idle_device_is_proven_before_its_first_leaf() -> Outcome {
    let words = "devices 1 2 idle";
    let (builder, _) = builder(words);
    let worker = builder.prove_on(device::device(2)).spawn(role(words)).map_err(text)?;
    let verdicts = |worker: &Worker| -> Vec<(Verdict, Verdict)> {
        let report = worker.report();
        let proofs = &report.rung(&NEAR).unwrap().proofs;
        proofs.iter().map(|proof| (proof.sending.clone(), proof.receiving.clone())).collect()
    };
    let unproven = || (Verdict::Unproven, Verdict::Unproven);
    check(
        verdicts(&worker) == [unproven(), (Verdict::Verified, Verdict::Verified)],
        verdicts(&worker),
    )?;
    let tensor = device::tensor(device::device(1), &[4; 1000]).map_err(text)?;
    let frames = worker.traffic().frames_sent;
    let reply = worker.call("echo", tensor.clone()).map_err(text)?;
    check(
        reply.sent().legs[0].rung == NEAR && *reply.value() == Value::from(tensor.clone()),
        &reply,
    )?;
    check(worker.traffic().frames_sent > frames + 3, "nothing was proven")?;
    // The worker answered on it, so it had to prove it too.
    check(verdicts(&worker)[0] == (Verdict::Verified, Verdict::Verified), verdicts(&worker))?;
    let frames = worker.traffic().frames_sent;
    worker.call("echo", tensor).map_err(text)?;
    check(worker.traffic().frames_sent <= frames + 2, "it was proven again")?;
    // One that fails then is demoted then, and the leaf rides lower.
    let worker = connect(words, "devices 1 2 idle near flip import").map_err(text)?;
    let tensor = device::tensor(device::device(1), &[4; 1000]).map_err(text)?;
    let reply = worker.call("first byte", tensor).map_err(text)?;
    check(reply.sent().legs[0].rung == FAR && reply.value().as_i64() == Some(4), &reply)
}

/// What is proven while a worker loads its model takes nothing of what users call meanwhile.
fn a_worker_that_does_not_serve_yet_answers_canaries() -> Outcome {
    let worker = connect("devices 1 idle", "devices 1 idle slow").map_err(text)?;
    all_verified_on_the_host(&worker.reprove().map_err(text)?)?;
    let tensor = device::tensor(device::device(1), &[8; 1000]).map_err(text)?;
    std::thread::scope(|scope| {
        let early = scope.spawn(|| worker.call("echo", 1).map_err(text));
        std::thread::sleep(Duration::from_millis(20));
        worker.reprove().map_err(text)?;
        let reply = worker.call("first byte", tensor).map_err(text)?;
        check(reply.value().as_i64() == Some(8) && reply.sent().legs[0].rung == NEAR, &reply)?;
        early.join().map_err(|_| "panicked")?.map(drop)
    })
}

fn all_verified_on_the_host(report: &Report) -> Outcome {
    let host = |rung: &RungId| *rung != NEAR && *rung != FAR;
    for rung in report.rungs.iter().filter(|rung| host(&rung.rung)) {
        let fine = rung.proofs[0].sending == Verdict::Verified;
        check(fine && rung.proofs[0].receiving == Verdict::Verified, rung)?;
    }
    Ok(())
}

/// The first leaves of many threads on a device that nothing used: one proof, and every one rides it.
fn many_first_leaves_are_one_proof() -> Outcome {
    let words = "devices 1 idle";
    let worker = connect(words, words).map_err(text)?;
    let start = std::sync::Barrier::new(32);
    let outcomes: Vec<Outcome<RungId>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..32u8)
            .map(|n| {
                let (worker, start) = (&worker, &start);
                scope.spawn(move || {
                    let tensor = device::tensor(device::device(1), &[n; 500]).map_err(text)?;
                    start.wait();
                    loop {
                        match worker.call("first byte", tensor.clone()) {
                            Ok(reply) => {
                                check(reply.value().as_i64() == Some(n.into()), reply.value())?;
                                break Ok(reply.sent().legs[0].rung.clone());
                            }
                            // More at once than a worker serves.
                            Err(error) if error.to_string().contains("busy") => {}
                            Err(error) => break Err(error.to_string()),
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    check(outcomes.iter().all(|rung| *rung == Ok(NEAR)), &outcomes)?;
    let report = worker.report();
    check(report.rung(&NEAR).unwrap().proofs[0].sending == Verdict::Verified, report)
}

/// What another peer lent and cannot be taken any more says nothing of what is the host's own.
fn a_forward_that_breaks_later_demotes_that_pair() -> Outcome {
    let a = worker("devices 1")?;
    let b = connect("devices 1", "devices 1 near fail import later").map_err(text)?;
    let lent = || Ok::<_, String>(a.call("on device", 1).map_err(text)?.into_value());
    check(b.call("first byte", lent()?).map_err(text)?.sent().legs[0].rung == NEAR, "not near")?;
    b.call("break", Value::Null).map_err(text)?;
    let reply = b.call("first byte", lent()?).map_err(text)?;
    check(reply.value().as_i64() == Some(1), reply.value())?;
    let leg = &reply.sent().legs[0];
    let told =
        leg.declined.iter().any(|(rung, why)| *rung == NEAR && why.to_string().contains("system"));
    check(leg.rung == FAR && told, leg)?;
    b.call("mend", Value::Null).map_err(text)?;
    let mine = device::tensor(device::device(1), &[5; 2000]).map_err(text)?;
    check(b.call("echo", mine).map_err(text)?.sent().legs[0].rung == NEAR, "not near")?;
    check(b.call("first byte", lent()?).map_err(text)?.sent().legs[0].rung == FAR, "not far")?;
    // On request the pair is proven anew.
    b.reprove().map_err(text)?;
    check(b.call("first byte", lent()?).map_err(text)?.sent().legs[0].rung == NEAR, "not near")
}

/// A device that hangs in the other process is waited for once, and costs a call with a limit half of it.
fn a_device_that_hangs_is_given_up() -> Outcome {
    let (host, worker) = ("devices 1 idle", "devices 1 idle near hang import");
    let tensor = device::tensor(device::device(1), &[6; 1000]).map_err(text)?;
    let rides_far = |worker: &Worker, options: CallOptions| -> Outcome<Duration> {
        let started = Instant::now();
        let reply = worker.call_with("first byte", tensor.clone(), options).map_err(text)?;
        check(reply.value().as_i64() == Some(6) && reply.sent().legs[0].rung == FAR, &reply)?;
        Ok(started.elapsed())
    };
    let patient = builder(host).0.handshake(Duration::from_millis(1500));
    let patient = patient.spawn(role(worker)).map_err(text)?;
    let took = rides_far(&patient, CallOptions::new())?;
    check(took > Duration::from_millis(1400) && took < Duration::from_secs(6), took)?;
    let report = patient.report();
    let near = &report.rung(&NEAR).ok_or("no rung")?.proofs[0].sending;
    check(matches!(near, Verdict::Demoted(why) if why.reason() == Reason::NoAnswer), near)?;
    check(rides_far(&patient, CallOptions::new())? < Duration::from_secs(1), "again")?;
    let hurried = connect(host, worker).map_err(text)?;
    let took = rides_far(&hurried, CallOptions::new().limit(Duration::from_secs(3)))?;
    check(took < Duration::from_secs(3), took)?;
    let report = hurried.report();
    let near = &report.rung(&NEAR).ok_or("no rung")?.proofs[0].sending;
    check(*near == Verdict::Unproven, near)
}

/// A worker that was greeted and not wanted ends by itself.
fn what_is_not_proven_is_let_go() -> Outcome {
    let started = Instant::now();
    let unproven = builder("").0.greet(Command::this_executable().env(ROLE, "")).map_err(text)?;
    check(unproven.differences().is_empty(), unproven.differences())?;
    drop(unproven);
    check(started.elapsed() < Duration::from_millis(1500), started.elapsed())
}

fn a_peer_that_proves_nothing_is_turned_away() -> Outcome {
    let error = connect("", "skips").err().ok_or("let in")?.to_string();
    check(error.contains("it has not proven shm"), error)
}

fn a_method_of_the_channels_own_is_nobodys_to_call() -> Outcome {
    let worker = worker("")?;
    let error = worker.call("$canary", 1).unwrap_err();
    check(matches!(error.kind(), CallErrorKind::ReservedMethod), text(&error))?;
    check(error.into_value() == Some(Value::from(1)), "the value is lost")
}

/// Bounds are for what users lend.
fn canaries_do_not_count_against_the_bounds() -> Outcome {
    let bounds = ladder::Bounds { bytes: 1000, leases: 1, ..ladder::Bounds::default() };
    let (builder, _) = builder("");
    let worker = builder.bounds(bounds).spawn(role("")).map_err(text)?;
    let small = Tensor::from_vec(vec![1u8; 500], &[500]).map_err(text)?;
    worker.call("echo", small).map(drop).map_err(text)
}

/// In another pid namespace, with a tiny /dev/shm, and with few descriptors it works, or is refused with the
/// right reason, and never hangs.
fn odd_surroundings_work_or_say_why() -> Outcome {
    let exe = std::env::current_exe().map_err(text)?;
    let exe = exe.to_str().ok_or("a path")?;
    let through = |program: &str, arguments: &[&str]| {
        let command = Command::new(program).args(arguments).env(ROLE, "").output(Output::Discard);
        let command = command.grace(Duration::ZERO);
        let started = Instant::now();
        let connected = builder("").0.spawn(command);
        let took = started.elapsed();
        if took > Duration::from_secs(12) { Err(format!("{took:?}")) } else { Ok(connected) }
    };
    let sent = |worker: Worker| -> Outcome {
        let value = Value::from(Tensor::from_vec(vec![5u8; 8 << 20], &[8 << 20]).map_err(text)?);
        let reply = worker.call("echo", value.clone()).map_err(text)?;
        check(*reply.value() == value, "another value")
    };
    let worker = through("unshare", &["--fork", "--pid", "--kill-child", exe])?.map_err(text)?;
    let differs: Vec<String> =
        worker.report().differences().into_iter().map(|difference| difference.fact).collect();
    check(differs == ["pid-namespace"], &differs)?;
    all_verified(&worker.report())?;
    sent(worker)?;
    let tiny = format!("mount -t tmpfs -o size=1m none /dev/shm && exec {exe}");
    let worker = through("unshare", &["--mount", "sh", "-c", &tiny])?.map_err(text)?;
    all_verified(&worker.report())?;
    sent(worker)?;
    let few = |count: u32| through("sh", &["-c", &format!("ulimit -n {count}; exec {exe}")]);
    let worker = few(16)?;
    match worker {
        // Let in, it may still have too few for a message.
        Ok(worker) => match sent(worker) {
            Err(error) if !error.contains("no descriptors left") => return Err(error),
            _ => {}
        },
        Err(ConnectError::Refused(report)) => {
            let (.., why) = report.refusal().ok_or("no reason")?;
            check(why.reason() == Reason::NoDescriptors, &report.rungs)?;
        }
        Err(error) => check(error.to_string().contains("no descriptors left"), text(error))?,
    }
    // Not enough for any block: what is plain still goes, and why nothing else does is known here.
    let worker = match few(6)? {
        Ok(worker) => worker,
        // Of those that it inherited, too many to attach at all.
        Err(error) => return check(error.to_string().contains("open files"), text(error)),
    };
    check(worker.call("echo", 1).is_ok(), "no echo")?;
    let tensor = Tensor::from_vec(vec![1u8; 100], &[100]).map_err(text)?;
    let error = worker.call("echo", tensor).unwrap_err();
    let CallErrorKind::Unsendable(why) = error.kind() else { return Err(error.to_string()) };
    let (rung, refusal) = &why.refusals[0];
    check(*rung == RungId::SHM && refusal.reason() == Reason::NoDescriptors, refusal)?;
    check(refusal.detail().starts_with("on the other side"), refusal)?;
    let report = worker.report();
    let numpy = &report.rung(&RungId::NUMPY).ok_or("no numpy")?.proofs[0];
    let lacks = |verdict: &Verdict| matches!(verdict, Verdict::NotOffered(why) if why.reason() == Reason::NoCarrier);
    check(lacks(&numpy.sending) && lacks(&numpy.receiving), numpy)
}

/// Somebody removes everything in `/dev/shm`, and the file system with it, while memory is lent both ways: none of it
/// has a name there.
fn whoever_empties_dev_shm_takes_nothing_away() -> Outcome {
    let exe = std::env::current_exe().map_err(text)?;
    let own = format!("mount -t tmpfs none /dev/shm && touch /dev/shm/x && exec {}", exe.display());
    let command = Command::new("unshare").args(["--mount", "sh", "-c", &own]).env(ROLE, "");
    let worker = builder("").0.spawn(command.output(Output::Discard)).map_err(text)?;
    let born = worker.call("born", Value::Null).map_err(text)?;
    let shared = ladder::share(&Tensor::from_vec(vec![8u8; 100_000], &[100_000]).map_err(text)?);
    let value = Value::list([born.value().clone(), shared.map_err(text)?.into()]);
    let before = worker.call("echo", value.clone()).map_err(text)?;
    let emptied = worker.call("empty dev shm", Value::Null).map_err(text)?;
    check(emptied.value().as_bool() == Some(true), emptied.value())?;
    for _ in 0..3 {
        let again = worker.call("echo", value.clone()).map_err(text)?;
        check(*again.value() == value && *before.value() == value, "another value")?;
    }
    let private = Tensor::from_vec(vec![9u8; 1 << 20], &[1 << 20]).map_err(text)?;
    let reply = worker.call("echo", private.clone()).map_err(text)?;
    check(reply.value().as_tensor() == Some(&private), "another value")?;
    drop((born, before, reply));
    let exit = worker.shutdown(Duration::from_secs(5));
    check(exit.status.success(), exit)
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return act(&role);
    }
    // Namespaces of its own are for root to make, where whatever contains this allows them.
    let unshare = ["--fork", "--pid", "--mount", "true"];
    let made = std::process::Command::new("unshare").args(unshare).stderr(Stdio::null()).status();
    let makes_namespaces = made.is_ok_and(|status| status.success());
    macro_rules! trials {
        ($($name:ident),* $(,)?) => { vec![$(trial(stringify!($name), $name)),*] };
    }
    let mut trials = trials![
        each_fault_gives_its_verdict,
        a_fault_of_the_workers_is_seen_by_both,
        a_bare_echo_would_have_passed,
        a_demotion_is_loud_and_the_work_goes_on,
        a_result_whose_leaf_fails_is_still_right,
        a_demoted_rung_is_proven_anew_on_request,
        what_breaks_later_is_caught_by_a_digest,
        every_kind_of_leaf_has_a_digest,
        a_first_forward_is_proven,
        a_device_that_one_peer_cannot_open_demotes_that_pair,
        what_cannot_be_forwarded_is_copied,
        the_same_build_is_no_reason_for_a_warning,
        another_version_is_one_warning_and_costs_nothing,
        devices_are_matched_by_name_and_proven_one_by_one,
        an_idle_device_is_proven_before_its_first_leaf,
        a_method_of_the_channels_own_is_nobodys_to_call,
        a_peer_that_proves_nothing_is_turned_away,
        a_worker_that_does_not_serve_yet_answers_canaries,
        many_first_leaves_are_one_proof,
        a_forward_that_breaks_later_demotes_that_pair,
        a_device_that_hangs_is_given_up,
        what_is_not_proven_is_let_go,
        canaries_do_not_count_against_the_bounds,
    ];
    for odd in [
        linux("odd_surroundings_work_or_say_why", odd_surroundings_work_or_say_why),
        linux(
            "whoever_empties_dev_shm_takes_nothing_away",
            whoever_empties_dev_shm_takes_nothing_away,
        ),
    ] {
        trials.push(if makes_namespaces { odd } else { odd.with_ignored_flag(true) });
    }
    run_serially(trials)
}
