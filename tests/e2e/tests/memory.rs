//! Shared memory between processes: blocks that are used again, forwarded, bounded and given back.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ladder::{
    AtBound, Bounds, CallErrorKind, CallOptions, Channel, Command, DType, Failure, Methods, Tensor,
    TensorMut, Value, Worker, release, share,
};
use segment::{Limits, Pool, calls};
use testkit::census::{Census, descriptors};
use testkit::peer::kill;
use testkit::{linux, run_serially, trial};

type Outcome<T = ()> = Result<T, String>;

const MIB: usize = 1 << 20;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

/// Microseconds of a clock that all processes share.
/// Microseconds in which a block is home. Where wine is the system, each message of the four takes a millisecond.
const SOON: u64 = if cfg!(windows) { 50_000 } else { 10_000 };

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// Blocks of this process that somebody uses.
fn in_use() -> usize {
    let stats = Pool::process().stats();
    stats.blocks - stats.idle_blocks
}

fn tensor_in(value: &Value) -> Result<&Tensor, Failure> {
    value.as_tensor().ok_or_else(|| "a tensor is wanted".into())
}

/// Whether all bytes are the same, and which.
fn fill_of(tensor: &Tensor) -> Result<u8, Failure> {
    let bytes = tensor.storage().read(0..tensor.storage().len())?;
    // Whole words at a time: these tests run unoptimised too.
    let first = bytes[0];
    let word = [first; 4096];
    let (words, rest) = bytes.as_chunks::<4096>();
    let whole = words.iter().all(|chunk| *chunk == word) && *rest == word[..rest.len()];
    if whole { Ok(first) } else { Err("mixed bytes".into()) }
}

fn born(len: usize, fill: u8) -> Outcome<Tensor> {
    let mut tensor = TensorMut::new(DType::U8, &[len]).map_err(text)?;
    tensor.as_bytes_mut().fill(fill);
    tensor.share().map_err(text)
}

fn private(len: usize, fill: u8) -> Outcome<Tensor> {
    Tensor::from_vec(vec![fill; len], &[len]).map_err(text)
}

fn resident() -> Value {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0i64)
    };
    Value::from(kib("VmRSS:"))
}

/// What this binary does as a worker.
fn work(channel: &Channel) -> ExitCode {
    let held: Arc<Mutex<Vec<Value>>> = Arc::default();
    let dropped_at = Arc::new(AtomicU64::new(0));
    let child: Arc<Mutex<Option<Worker>>> = Arc::default();
    let (hold, free, later) = (Arc::clone(&held), Arc::clone(&held), Arc::clone(&held));
    let (drops, when) = (Arc::clone(&dropped_at), dropped_at);
    let to_child = move |method: &str, value: Value| -> Result<Value, Failure> {
        let mut child = child.lock().unwrap();
        if child.is_none() {
            *child = Some(Worker::spawn_self()?);
        }
        Ok(child.as_ref().unwrap().call(method, value)?.into_value())
    };
    let pass = Arc::new(to_child);
    let ask = Arc::clone(&pass);
    let methods = Methods::new()
        .on("echo", Ok)
        .on("fill", |value| Ok(Value::from(i64::from(fill_of(tensor_in(&value)?)?))))
        .on("hold", move |value| {
            hold.lock().unwrap().push(value);
            Ok(Value::Null)
        })
        .on("free", move |_| {
            free.lock().unwrap().clear();
            Ok(Value::Null)
        })
        .on("free later", move |value| {
            let (held, drops) = (Arc::clone(&later), Arc::clone(&drops));
            let wait = Duration::from_millis(value.as_i64().unwrap_or(0) as u64);
            std::thread::spawn(move || {
                std::thread::sleep(wait);
                let held = std::mem::take(&mut *held.lock().unwrap());
                drops.store(now(), Ordering::Relaxed);
                drop(held);
            });
            Ok(Value::Null)
        })
        .on("when", move |_| Ok(Value::from(when.load(Ordering::Relaxed))))
        .on("held fill", move |_| {
            let held = held.lock().unwrap();
            Ok(Value::from(i64::from(fill_of(tensor_in(held.first().ok_or("nothing")?)?)?)))
        })
        .on("give", |value| Ok(Value::from(born(MIB, value.as_i64().unwrap_or(0) as u8)?)))
        .on("in use", |_| Ok(Value::from(in_use())))
        // Answers once nothing of ours is in use any more: when that was.
        .on("home", |_| {
            let end = Instant::now() + Duration::from_secs(10);
            while in_use() > 0 && Instant::now() < end {
                std::thread::sleep(Duration::from_micros(200));
            }
            Ok(Value::from(now()))
        })
        .on("to child", move |value| pass("hold", value))
        .on("child", move |value| {
            let items = value.items().ok_or("a method and a value")?.to_vec();
            ask(items[0].as_str().ok_or("a method")?, items[1].clone())
        })
        .on("calls", |_| {
            let calls = calls();
            let counts = [calls.created, calls.allocated, calls.mapped, calls.unmapped];
            Ok(Value::list(counts.map(|count| count as i64)))
        })
        .on("sleep", |value| {
            std::thread::sleep(Duration::from_millis(value.as_i64().unwrap_or(0) as u64));
            Ok(Value::Null)
        })
        .on("idle for", |value| {
            let idle_for = Duration::from_millis(value.as_i64().unwrap_or(0) as u64);
            Pool::process().set_limits(Limits { idle_for, ..Limits::default() });
            Ok(Value::Null)
        })
        .on("slow echo", |value| {
            std::thread::sleep(Duration::from_millis(150));
            Ok(value)
        })
        .on("resident", |_| Ok(resident()));
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn worker() -> Outcome<Worker> {
    Worker::spawn_self().map_err(text)
}

fn ask(worker: &Worker, method: &str, value: impl Into<Value>) -> Outcome<Value> {
    worker.call(method, value).map(ladder::Reply::into_value).map_err(text)
}

fn until(what: &str, mut holds: impl FnMut() -> bool) -> Outcome {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        check(Instant::now() < end, what)?;
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Blocks that were used earlier stay for as long as the test looks.
fn keep_idle_blocks() {
    let idle_for = Duration::from_secs(3600);
    Pool::process().set_limits(Limits { idle_for, ..Limits::default() });
}

fn in_steady_state_nothing_is_asked_of_the_kernel() -> Outcome {
    let worker = worker()?;
    let tensor = private(64 * MIB, 7)?;
    let send = || ask(&worker, "fill", tensor.clone());
    for _ in 0..5 {
        send()?;
    }
    let state = || -> Outcome<_> {
        Ok((
            segment::Calls { copied: 0, ..calls() },
            ask(&worker, "calls", Value::Null)?,
            worker.traffic().handles_sent,
            worker.traffic().handles_received,
            descriptors("self"),
            descriptors(&worker.process().pid().to_string()),
        ))
    };
    let (before, pages) = (state()?, ask(&worker, "resident", Value::Null)?);
    for _ in 0..200 {
        check(send()? == Value::from(7), "other bytes")?;
    }
    let (after, pages_after) = (state()?, ask(&worker, "resident", Value::Null)?);
    check(before == after, (before, after))?;
    let grown = pages_after.as_i64().unwrap_or(0) - pages.as_i64().unwrap_or(0);
    check(grown < 4096, ("the worker grew by KiB", grown))?;
    // One in flight, and at most one more.
    let stats = Pool::process().stats();
    let of_this_size = stats.bytes / (64 * MIB as u64);
    check(of_this_size <= 2, stats)
}

/// As many as are in flight at a time, and no more.
fn the_pool_is_as_large_as_what_is_in_flight() -> Outcome {
    Pool::process().trim();
    let worker = worker()?;
    for _ in 0..3 {
        for fill in 0..5u8 {
            ask(&worker, "hold", private(8 * MIB, fill)?)?;
        }
        ask(&worker, "free", Value::Null)?;
        until("every lease home", || worker.lent().0 == 0)?;
    }
    let stats = Pool::process().stats();
    let blocks = stats.bytes / (8 * MIB as u64);
    check(blocks == 5 || blocks == 6, stats)
}

fn what_is_shared_once_is_copied_once() -> Outcome {
    let workers: Vec<Worker> = (0..4).map(|_| worker()).collect::<Result<_, _>>()?;
    let len = 1 << 30;
    let tensor = private(len, 3)?;
    let before = calls().copied;
    let shared = share(&tensor).map_err(text)?;
    drop(tensor);
    for _ in 0..2 {
        for worker in &workers {
            let ends = shared.slice(0, 0, 1).map_err(text)?;
            check(ask(worker, "fill", ends)? == Value::from(3), "other bytes")?;
        }
    }
    check(calls().copied - before == len as u64, calls().copied - before)?;
    // Released, it takes no memory of ours until somebody looks again.
    let of_us = || resident().as_i64().unwrap_or(0);
    let touched = fill_of(&shared).map_err(|_| "mixed bytes")?;
    let full = of_us();
    let released = release(&shared).map_err(text)?;
    check(touched == 3 && released == len, released)?;
    check(full - of_us() > 900 << 10, (full, of_us()))?;
    check(fill_of(&shared).is_ok_and(|fill| fill == 3), "lost bytes")
}

fn an_unsent_tensor_gives_its_block_back() -> Outcome {
    Pool::process().trim();
    let made = Pool::process().stats().made;
    for fill in 0..20 {
        drop(born(3 * MIB, fill)?);
    }
    check(Pool::process().stats().made - made == 1, Pool::process().stats())
}

fn a_drop_at_the_receiver_gives_the_block_back_within_10_ms() -> Outcome {
    let worker = worker()?;
    let mut took = Vec::new();
    for _ in 0..10 {
        ask(&worker, "hold", born(MIB, 1)?)?;
        ask(&worker, "free later", 30)?;
        // Not a word from us until it is home.
        until("the receipt", || worker.lent().0 == 0)?;
        let home = now();
        let dropped = ask(&worker, "when", Value::Null)?.as_i64().unwrap_or(0) as u64;
        took.push(home.saturating_sub(dropped));
    }
    took.sort_unstable();
    // The machine may be busy with others; the middle one tells.
    check(took[5] < SOON, took)
}

/// A's block goes to the host, to B, and to B's own worker C, who drops it when nobody says anything.
fn a_drop_at_the_end_of_a_chain_gives_the_block_back_within_10_ms() -> Outcome {
    let (a, b) = (worker()?, worker()?);
    let mut took = Vec::new();
    for _ in 0..10 {
        let given = ask(&a, "give", 9)?;
        ask(&b, "to child", given.clone())?;
        drop(given);
        let call = |method: &str, value: Value| {
            ask(&b, "child", Value::list([Value::from(method), value]))
        };
        call("free later", Value::from(50))?;
        let home = ask(&a, "home", Value::Null)?.as_i64().unwrap_or(0) as u64;
        let dropped = call("when", Value::Null)?.as_i64().unwrap_or(0) as u64;
        check(home >= dropped, "home before it was dropped")?;
        took.push(home - dropped);
    }
    took.sort_unstable();
    check(took[5] < SOON, took)
}

fn forwarding_neither_maps_nor_copies() -> Outcome {
    let (a, b) = (worker()?, worker()?);
    // Once, so that every block is known everywhere.
    ask(&b, "fill", ask(&a, "give", 1)?)?;
    let before = calls();
    for fill in 0..50 {
        check(ask(&b, "fill", ask(&a, "give", fill)?)? == Value::from(fill), "other bytes")?;
    }
    check(calls() == before, (before, calls()))
}

/// The worker's idle blocks go back to the system, also where the host has nothing to say or to hear.
fn an_idle_host_lets_go_of_what_is_gone() -> Outcome {
    let memfds = || descriptors("self").get("/memfd:tensor-ladder").copied().unwrap_or(0);
    let worker = worker()?;
    let before = memfds();
    drop(ask(&worker, "give", 3)?);
    check(memfds() == before + 1, (before, memfds()))?;
    ask(&worker, "idle for", 50)?;
    // With it go those of the worker's canaries.
    until("the worker's word", || memfds() <= before)
}

/// An answer that nobody waits for goes back unopened, and takes nothing away from the next: its blocks
/// come whole again.
fn what_went_back_unopened_arrives_the_next_time() -> Outcome {
    let (worker, other) = (worker()?, worker()?);
    let tensors: Vec<Tensor> = (0..40).map(|fill| born(100, fill)).collect::<Outcome<_>>()?;
    let all = || Value::list(tensors.iter().cloned().map(Value::from));
    let options = CallOptions::new().limit(Duration::from_millis(50));
    let error = worker.call_with("slow echo", all(), options).unwrap_err();
    check(error.is_deadline(), text(&error))?;
    std::thread::sleep(Duration::from_millis(300));
    let back = ask(&worker, "echo", all())?;
    check(back == all(), "another value came back")?;
    check(ask(&other, "echo", back)? == all(), "another value was forwarded")
}

fn a_block_is_not_used_again_until_the_last_receiver_is_done() -> Outcome {
    let (a, b) = (worker()?, worker()?);
    ask(&b, "hold", ask(&a, "give", 11)?)?;
    // The host has let go; A has not heard of B.
    until("B's lease alone", || a.lent().0 == 0 && b.lent().0 == 1)?;
    check(ask(&a, "in use", Value::Null)? == Value::from(1), "A's block is idle")?;
    for fill in 0..20 {
        drop(ask(&a, "give", fill)?);
    }
    check(ask(&b, "held fill", Value::Null)? == Value::from(11), "overwritten")?;
    ask(&b, "free", Value::Null)?;
    ask(&a, "home", Value::Null)?;
    check(ask(&a, "in use", Value::Null)? == Value::from(0), "A's block is still in use")
}

fn what_was_forwarded_outlives_its_producer() -> Outcome {
    let (a, b) = (worker()?, worker()?);
    ask(&b, "hold", ask(&a, "give", 12)?)?;
    kill(a.process().pid()).map_err(text)?;
    drop(a);
    check(ask(&b, "held fill", Value::Null)? == Value::from(12), "lost")?;
    ask(&b, "free", Value::Null).map(drop)
}

fn at_its_bound_a_call_waits_if_it_may() -> Outcome {
    let bounds = Bounds { leases: 2, policy: AtBound::Wait, ..Bounds::default() };
    let command = Command::this_executable();
    let worker = Worker::builder().bounds(bounds).spawn(command).map_err(text)?;
    for fill in 0..2 {
        ask(&worker, "hold", private(1000, fill)?)?;
    }
    // No room in time: the value comes back.
    let third = Value::from(private(1000, 3)?);
    let options = CallOptions::new().limit(Duration::from_millis(50));
    let error = worker.call_with("hold", third.clone(), options).unwrap_err();
    check(error.is_deadline(), text(&error))?;
    check(error.into_value() == Some(third.clone()), "the value is lost")?;
    // Room comes while it waits.
    ask(&worker, "free later", 100)?;
    let started = Instant::now();
    ask(&worker, "hold", third)?;
    check(started.elapsed() > Duration::from_millis(50), started.elapsed())?;
    // What would never fit does not wait.
    let mut parts = Vec::new();
    for fill in 0..3 {
        parts.push(Value::from(born(1000, fill)?));
    }
    let error = worker.call("hold", Value::list(parts)).unwrap_err();
    check(matches!(error.kind(), CallErrorKind::OverBound(_)), text(&error))
}

fn what_is_kept_for_long_is_an_alarm_and_nothing_else() -> Outcome {
    let bounds = Bounds { alarm: Duration::from_millis(50), ..Bounds::default() };
    let command = Command::this_executable();
    let worker = Worker::builder().bounds(bounds).spawn(command).map_err(text)?;
    ask(&worker, "hold", born(5000, 1)?)?;
    until("an alarm", || worker.alarms() == 1)?;
    let held = worker.held_for(Duration::from_millis(50));
    check(held.len() == 1 && held[0].bytes == 5000, &held)?;
    check(ask(&worker, "held fill", Value::Null)? == Value::from(1), "lost")?;
    ask(&worker, "free", Value::Null)?;
    until("the receipt", || worker.lent().0 == 0)?;
    check(worker.alarms() == 1, worker.alarms())
}

fn a_peer_that_spins_answers_as_one_that_sleeps() -> Outcome {
    let worker = worker()?;
    worker.spin_for(Duration::from_micros(200));
    for round in 0..200 {
        check(ask(&worker, "echo", round)? == Value::from(round), "another answer")?;
    }
    // A deadline holds also while it looks.
    worker.spin_for(Duration::from_secs(60));
    let options = CallOptions::new().limit(Duration::from_millis(50));
    let error = worker.call_with("sleep", 500, options).unwrap_err();
    check(error.is_deadline(), text(&error))?;
    // And so does the end of the worker.
    kill(worker.process().pid()).map_err(text)?;
    let started = Instant::now();
    let error = worker.call("echo", 1).unwrap_err();
    check(error.is_gone() && started.elapsed() < Duration::from_secs(1), text(&error))
}

/// Two threads send and drop while a third kills the worker and starts another.
fn sending_while_workers_are_killed() -> Outcome {
    let seconds = std::env::var("E2E_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(60));
    let before = Census::take();
    let current: Mutex<Arc<Worker>> = Mutex::new(Arc::new(worker()?));
    let (done, right, lost) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let sender = |seed: usize| -> Outcome {
        let mut turn = seed;
        let mut kept: Vec<Value> = Vec::new();
        while Instant::now() < end {
            turn += 2;
            let worker = Arc::clone(&current.lock().unwrap());
            let (len, fill) = (1 + turn * 7919 % (3 * MIB), turn as u8);
            let tensor =
                if turn.is_multiple_of(3) { born(len, fill)? } else { private(len, fill)? };
            let method = if turn.is_multiple_of(5) { "hold" } else { "echo" };
            match worker.call(method, tensor.clone()) {
                Ok(reply) if method == "echo" => {
                    let value = reply.into_value();
                    let fills = value.as_tensor().map(fill_of);
                    check(matches!(fills, Some(Ok(back)) if back == fill), "other bytes")?;
                    right.fetch_add(1, Ordering::Relaxed);
                    kept.push(value);
                }
                Ok(_) => {}
                Err(error) if error.is_gone() => {
                    lost.fetch_add(1, Ordering::Relaxed);
                    check(error.into_value().is_none_or(|value| value == tensor.into()), "value")?;
                }
                Err(error) => return Err(text(error)),
            }
            if kept.len() > 8 {
                kept.clear();
                // May fail with the worker.
                let _ = worker.call("free", Value::Null);
            }
        }
        Ok(())
    };
    let outcome = std::thread::scope(|scope| {
        let killer = scope.spawn(|| -> Outcome<u32> {
            let mut kills = 0;
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(150));
                let next = Arc::new(worker()?);
                let before = std::mem::replace(&mut *current.lock().unwrap(), next);
                kill(before.process().pid()).map_err(text)?;
                kills += 1;
            }
            Ok(kills)
        });
        let senders = [0, 1].map(|seed| scope.spawn(move || sender(seed)));
        let sent: Vec<Outcome> =
            senders.into_iter().map(|s| s.join().unwrap_or(Err("panicked".into()))).collect();
        done.store(true, Ordering::Relaxed);
        let kills = killer.join().unwrap_or(Err("panicked".into()))?;
        sent.into_iter().collect::<Outcome>()?;
        check(kills > 5 && right.load(Ordering::Relaxed) > 100, (kills, &right, &lost))
    });
    drop(current);
    outcome?;
    before.settle()
}

fn main() -> ExitCode {
    keep_idle_blocks();
    match Channel::from_env() {
        Ok(Some(channel)) => return work(&channel),
        Ok(None) => {}
        Err(_) => return ExitCode::FAILURE,
    }
    run_serially(vec![
        trial(
            "in_steady_state_nothing_is_asked_of_the_kernel",
            in_steady_state_nothing_is_asked_of_the_kernel,
        ),
        trial(
            "the_pool_is_as_large_as_what_is_in_flight",
            the_pool_is_as_large_as_what_is_in_flight,
        ),
        linux("what_is_shared_once_is_copied_once", what_is_shared_once_is_copied_once),
        trial("an_unsent_tensor_gives_its_block_back", an_unsent_tensor_gives_its_block_back),
        trial(
            "a_drop_at_the_receiver_gives_the_block_back_within_10_ms",
            a_drop_at_the_receiver_gives_the_block_back_within_10_ms,
        ),
        trial(
            "a_drop_at_the_end_of_a_chain_gives_the_block_back_within_10_ms",
            a_drop_at_the_end_of_a_chain_gives_the_block_back_within_10_ms,
        ),
        trial("forwarding_neither_maps_nor_copies", forwarding_neither_maps_nor_copies),
        trial(
            "a_block_is_not_used_again_until_the_last_receiver_is_done",
            a_block_is_not_used_again_until_the_last_receiver_is_done,
        ),
        linux("an_idle_host_lets_go_of_what_is_gone", an_idle_host_lets_go_of_what_is_gone),
        trial(
            "what_went_back_unopened_arrives_the_next_time",
            what_went_back_unopened_arrives_the_next_time,
        ),
        trial("what_was_forwarded_outlives_its_producer", what_was_forwarded_outlives_its_producer),
        trial("at_its_bound_a_call_waits_if_it_may", at_its_bound_a_call_waits_if_it_may),
        trial(
            "what_is_kept_for_long_is_an_alarm_and_nothing_else",
            what_is_kept_for_long_is_an_alarm_and_nothing_else,
        ),
        trial(
            "a_peer_that_spins_answers_as_one_that_sleeps",
            a_peer_that_spins_answers_as_one_that_sleeps,
        ),
        trial("sending_while_workers_are_killed", sending_while_workers_are_killed),
    ])
}
