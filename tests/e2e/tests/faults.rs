//! Peers that misbehave, and rungs that break in the middle of work.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ladder::{
    CallErrorKind, CallOptions, Channel, Command, Ladder, Methods, Output, RungId, Tensor, Value,
    Worker,
};
use rung::{Reason, Refusal, Rung};
use testkit::census::Census;
use testkit::faulty::{Faulty, Kind, On, Trigger};
use testkit::{hostile, run_serially, trial};

type Outcome = Result<(), String>;

const ROLE: &str = "E2E_ROLE";
const BRITTLE: RungId = RungId::new("brittle");

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

/// A carrier that is in order, until what comes on it cannot be imported here any more.
fn brittle() -> (Faulty, Trigger) {
    let (inner, trigger) = (Arc::new(tier_shm::Shm), Trigger::never());
    let faulty =
        Faulty { inner, id: BRITTLE, kind: Kind::Fail, on: On::Import, trigger: trigger.clone() };
    (faulty, trigger)
}

/// Rungs with the brittle one on top, and with or without anything below it.
fn ladder(with_shm: bool) -> (Ladder, Trigger) {
    let (faulty, trigger) = brittle();
    let mut rungs: Vec<Arc<dyn Rung>> = vec![Arc::new(faulty)];
    if with_shm {
        rungs.push(Arc::new(tier_shm::Shm));
    }
    rungs.push(Arc::new(tier_inline::Inline));
    (Ladder::of(rungs), trigger)
}

fn act(role: &str) -> ExitCode {
    if hostile::KINDS.iter().any(|(kind, ..)| *kind == role) || hostile::SILENT.contains(&role) {
        hostile::act(role, || {
            let unproven = Channel::greet_from_env(&Ladder::standard(), None);
            let by_hand = unproven.unwrap().unwrap().prove_by_hand().unwrap();
            Box::new(move || by_hand.link().receive(None).ok().map(|frame| frame.json))
        });
    }
    let (ladder, trigger) = match role {
        "brittle" => ladder(true),
        "only-brittle" => ladder(false),
        _ => (Ladder::standard(), Trigger::never()),
    };
    let Ok(Some(channel)) = Channel::from_env_with(&ladder, None) else {
        return ExitCode::from(90);
    };
    let methods = Methods::new()
        .on("echo", Ok)
        .on("break", move |_| {
            trigger.set(1);
            Ok(Value::Null)
        })
        .on("make", |_| Ok(Value::from(Tensor::from_vec(vec![7u8; 10_000], &[100, 100])?)));
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn role(role: &str) -> Command {
    Command::this_executable().env(ROLE, role).output(Output::Discard).grace(Duration::ZERO)
}

fn tensor() -> Tensor {
    Tensor::from_vec((0..40_000u32).collect(), &[200, 200]).unwrap()
}

fn misbehaves(kind: &str, says: &str, in_a_call: bool) -> Outcome {
    let before = Census::take();
    let connected = Worker::builder().spawn(role(kind));
    let error = match (connected, in_a_call) {
        (Err(error), false) => text(error),
        (Ok(worker), true) => {
            let value = Value::from(tensor());
            let error = worker.call("echo", value).unwrap_err();
            let whole = error.to_string();
            check(!whole.contains('\n'), &whole)?;
            whole
        }
        (Ok(_), false) => return Err("the handshake was done".into()),
        (Err(error), true) => return Err(format!("no handshake: {error}")),
    };
    check(error.contains(says), &error)?;
    before.settle()
}

fn is_silent(kind: &str) -> Outcome {
    let before = Census::take();
    let short = Duration::from_millis(100);
    let started = Instant::now();
    let at_once = matches!(kind, "hangs-at-once" | "hangs-in-the-proof");
    let handshake = if at_once { short } else { Duration::from_secs(10) };
    match Worker::builder().handshake(handshake).spawn(role(kind)) {
        Err(error) if at_once => {
            check(error.to_string().contains("no handshake within"), text(error))?;
        }
        Err(error) => return Err(error.to_string()),
        Ok(worker) => {
            let value = Value::from(tensor());
            let options = CallOptions::new().limit(short);
            let error = worker.call_with("echo", value.clone(), options).unwrap_err();
            check(error.is_deadline(), text(&error))?;
        }
    }
    check(started.elapsed() < Duration::from_secs(20), started.elapsed())?;
    before.settle()
}

fn a_rung_that_breaks_on_the_way_there_is_demoted() -> Outcome {
    let (ladder, _) = ladder(true);
    let worker = Worker::builder().ladder(ladder).spawn(role("brittle")).map_err(text)?;
    worker.call("break", Value::Null).map_err(text)?;
    let value = Value::list([tensor(), tensor()]);
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    check(*reply.value() == value, "another value")?;
    let leg = &reply.sent().legs[0];
    check(leg.rung == RungId::SHM, &leg.rung)?;
    let declined: Vec<_> =
        leg.declined.iter().map(|(id, refusal)| (id, refusal.reason())).collect();
    check(declined == [(&BRITTLE, Reason::Demoted)], &declined)?;
    let story = leg.declined[0].1.to_string();
    check(story.ends_with("demoted: system: a system call failed"), story)?;
    let report = worker.rungs();
    check(
        matches!(&report[0], (id, Err(refusal)) if *id == BRITTLE && refusal.reason() == Reason::Demoted),
        &report,
    )?;
    // Every lease of the refused attempt is home.
    drop(reply);
    worker.call("echo", 1).map_err(text)?;
    check(worker.lent().0 <= 1, worker.lent())
}

/// The answer was computed; that a rung fails on the way back must not lose it.
fn a_rung_that_breaks_on_the_way_back_loses_no_answer() -> Outcome {
    let (ladder, trigger) = ladder(true);
    let worker = Worker::builder().ladder(ladder).spawn(role("brittle")).map_err(text)?;
    trigger.set(1);
    let reply = worker.call("make", Value::Null).map_err(text)?;
    let expected = Tensor::from_vec(vec![7u8; 10_000], &[100, 100]).unwrap();
    check(*reply.value() == Value::from(expected), "another answer")?;
    let leg = &reply.received().legs[0];
    check(leg.rung == RungId::SHM, leg)?;
    check(leg.declined[..] == [(BRITTLE, Refusal::new(Reason::System, "it broke"))], leg)
}

fn the_last_rung_gives_the_value_back() -> Outcome {
    let (ladder, trigger) = ladder(false);
    let worker = Worker::builder().ladder(ladder).spawn(role("only-brittle")).map_err(text)?;
    worker.call("break", Value::Null).map_err(text)?;
    trigger.set(1);
    let value = Value::from(tensor());
    let error = worker.call("echo", value.clone()).unwrap_err();
    check(
        matches!(error.kind(), CallErrorKind::NotAccepted { code, .. } if code == "system"),
        text(&error),
    )?;
    check(error.into_value() == Some(value), "the value is lost")?;
    let error = worker.call("make", Value::Null).unwrap_err();
    check(
        matches!(error.kind(), CallErrorKind::AnswerNotTaken(fault) if fault.reason() == Reason::System),
        text(&error),
    )?;
    // The worker lives, and nothing stays lent.
    check(worker.call("echo", 1).is_ok(), "no echo")?;
    check(worker.lent() == (0, 0), worker.lent())
}

/// Another executable is not trusted: what it gets of ours is copied out or sealed.
fn no_carrier_at_all_is_an_error_by_path() -> Outcome {
    let rungs: Vec<Arc<dyn Rung>> = vec![Arc::new(tier_inline::Inline)];
    let worker = Worker::builder().ladder(Ladder::of(rungs)).spawn(role("plain")).map_err(text)?;
    let value = Value::map([("image", Value::from(tensor()))]);
    let error = worker.call("echo", value).unwrap_err();
    check(error.to_string().contains("no rung takes the u32 tensor at $.image"), text(&error))?;
    check(worker.call("echo", 1).is_ok(), "no echo")
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return act(&role);
    }
    let mut trials: Vec<_> = hostile::KINDS
        .iter()
        .map(|&(kind, says, in_a_call)| {
            trial(format!("a_worker_that::{kind}"), move || misbehaves(kind, says, in_a_call))
        })
        .collect();
    for kind in hostile::SILENT {
        trials.push(trial(format!("a_worker_that::{kind}"), move || is_silent(kind)));
    }
    trials.extend([
        trial(
            "a_rung_that_breaks_on_the_way_there_is_demoted",
            a_rung_that_breaks_on_the_way_there_is_demoted,
        ),
        trial(
            "a_rung_that_breaks_on_the_way_back_loses_no_answer",
            a_rung_that_breaks_on_the_way_back_loses_no_answer,
        ),
        trial("the_last_rung_gives_the_value_back", the_last_rung_gives_the_value_back),
        trial("no_carrier_at_all_is_an_error_by_path", no_carrier_at_all_is_an_error_by_path),
    ]);
    run_serially(trials)
}
