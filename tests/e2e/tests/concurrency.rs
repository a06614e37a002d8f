//! Many calls at once, both ways, and processes that leave in odd manners.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::process::ExitCode;
#[cfg(unix)]
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use ladder::{
    Bounds, CallError, CallErrorKind, Channel, Command, DType, Failure, Ladder, Methods, Output,
    Peer, Tensor, TensorMut, Value, Worker,
};
use testkit::census::Census;
use testkit::{linux, run_serially, trial};

type Outcome = Result<(), String>;

const ROLE: &str = "E2E_ROLE";
const LONG: Duration = Duration::from_secs(30);

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

/// Calls the other side with one level less, and adds what it is; at the bottom, the argument itself.
fn nest(argument: Value, peer: &Peer) -> Result<Value, Failure> {
    let level = argument.get("level").and_then(Value::as_i64).ok_or("a level")?;
    let load = argument.get("load").cloned().ok_or("a load")?;
    let trace = argument.get("trace").and_then(Value::as_str).ok_or("a trace")?;
    if level == 0 {
        return Ok(Value::map([("trace", Value::from(trace)), ("load", load)]));
    }
    let next = Value::map([
        ("level", Value::from(level - 1)),
        ("trace", Value::from(format!("{trace}/{level}"))),
        ("load", load),
    ]);
    // Said on purpose: what a host's handler fails with by `?` is not told to its worker.
    let nested = peer.call("nest", next).map_err(|error| Failure::new("nested", text(error)))?;
    Ok(nested.into_value())
}

fn methods() -> Methods {
    let held = Arc::new(Mutex::new(Vec::new()));
    Methods::new()
        .on("echo", Ok)
        .on_with("nest", nest)
        .on("sleep", |value| {
            std::thread::sleep(Duration::from_millis(value.as_i64().unwrap_or(0) as u64));
            Ok(value)
        })
        .on("megabyte", |_| {
            std::thread::sleep(Duration::from_millis(100));
            Ok(megabyte())
        })
        .on("exit", |_| std::process::exit(3))
        .on("hold", move |value| {
            held.lock().unwrap().push(value);
            Ok(Value::Null)
        })
}

fn work(channel: Channel) -> ExitCode {
    match channel.serve(methods()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn act(role: &str) -> ExitCode {
    match role {
        "serve" => match Channel::from_env() {
            Ok(Some(channel)) => work(channel),
            _ => ExitCode::from(90),
        },
        // Calls the host by itself, when nothing else goes on.
        "calls" => {
            let Ok(Some(channel)) = Channel::from_env() else { return ExitCode::from(90) };
            std::thread::sleep(Duration::from_millis(300));
            let called = channel.call("hello", std::process::id());
            let unknown = channel.call("no such method", 1).is_err_and(|e| e.is_unknown_method());
            match called {
                Ok(reply) if reply.value().as_str() == Some("welcome") && unknown => work(channel),
                _ => ExitCode::from(91),
            }
        }
        // Leaves a child that keeps the socket open.
        #[cfg(unix)]
        "forks" => {
            use std::os::fd::AsFd;
            let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
            let child = std::process::Command::new("sleep")
                .arg("30")
                .stdin(Stdio::from(socket))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            let Ok(Some(channel)) = Channel::from_env() else { return ExitCode::from(90) };
            let pid = child.map_or(0, |child| child.id());
            let methods = methods().on("child", move |_| Ok(Value::from(pid)));
            match channel.serve(methods) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        // Accepts one call, closes its socket, and lives on.
        "leaves" => {
            let unproven = Channel::greet_from_env(&Ladder::standard(), None).unwrap().unwrap();
            let by_hand = unproven.prove_by_hand().unwrap();
            let link = by_hand.link();
            while !link.receive(None).unwrap().json.contains("\"hold\"") {}
            let _ = link.send(r#"{"v":3,"k":"more","acc":[["call",1,1]]}"#, &[], None);
            link.close();
            loop {
                std::thread::sleep(LONG);
            }
        }
        _ => ExitCode::from(92),
    }
}

fn role(role: &str) -> Command {
    Command::this_executable().env(ROLE, role).output(Output::Discard)
}

fn worker() -> Result<Worker, String> {
    Worker::builder().handler(methods()).spawn(role("serve")).map_err(text)
}

/// Thousands of leaves: a frame of a megabyte, far larger than a socket's buffer.
fn megabyte() -> Value {
    let tensor = Tensor::from_vec(vec![1u8; 64], &[64]).unwrap();
    let leaf = |number: usize| {
        Value::map([("tensor", Value::from(tensor.clone())), ("n", Value::from(number))])
    };
    Value::list((0..20_000).map(leaf))
}

/// Four levels deep, from two threads, in both directions, with frames of a megabyte among them and
/// the bound reached: every reply its own.
fn nesting(rounds: usize, heavy_every: usize) -> Outcome {
    // A nest of four levels lends three blocks at a time, and receipts are on their way for a while.
    let bounds = Bounds { leases: 7, ..Bounds::default() };
    let worker =
        Worker::builder().handler(methods()).bounds(bounds).spawn(role("serve")).map_err(text)?;
    let heavy = megabyte();
    let frame = worker.traffic().bytes_sent;
    worker.call("echo", heavy.clone()).map_err(text)?;
    check(worker.traffic().bytes_sent - frame > 1 << 20, worker.traffic())?;
    let bounced = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (worker, heavy, bounced) = (&worker, &heavy, &bounced);
        let threads: Vec<_> = (0..2)
            .map(|thread| {
                scope.spawn(move || -> Outcome {
                    for round in 0..rounds {
                        let load = if round % heavy_every == 0 {
                            heavy.clone()
                        } else {
                            Tensor::from_vec(vec![round as u8; 100], &[100]).map_err(text)?.into()
                        };
                        let trace = format!("{thread}:{round}");
                        let argument = Value::map([
                            ("level", Value::from(4)),
                            ("trace", Value::from(trace.as_str())),
                            ("load", load.clone()),
                        ]);
                        let reply = loop {
                            match worker.call("nest", argument.clone()) {
                                Ok(reply) => break reply,
                                // The bound: again, once some memory is home.
                                Err(error) if is_bound(&error) => {
                                    bounced.fetch_add(1, Ordering::Relaxed);
                                    std::thread::sleep(Duration::from_millis(1));
                                }
                                Err(error) => return Err(error.to_string()),
                            }
                        };
                        let expected = format!("{trace}/4/3/2/1");
                        let got = reply.value().get("trace").and_then(Value::as_str);
                        check(got == Some(&expected), (got, expected))?;
                        check(reply.value().get("load") == Some(&load), "another load")?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "panicked")?)
    })?;
    check(bounced.load(Ordering::Relaxed) > 0, "the bound was never reached")
}

/// Deeper than any pool: each call runs on the thread that waits in its root.
fn forty_levels_need_no_more_threads_than_one() -> Outcome {
    let worker = worker()?;
    let argument =
        Value::map([("level", Value::from(40)), ("trace", "".into()), ("load", Value::Null)]);
    let reply = worker.call("nest", argument).map_err(text)?;
    let trace = reply.value().get("trace").and_then(Value::as_str).unwrap_or_default();
    check(trace.split('/').count() == 41, trace)
}

/// Each level is a part of one thread's stack, so a peer must not have us nest for ever.
fn nesting_without_end_is_refused() -> Outcome {
    let worker = worker()?;
    let argument =
        Value::map([("level", Value::from(400)), ("trace", "".into()), ("load", Value::Null)]);
    let error = worker.call("nest", argument).unwrap_err();
    check(error.to_string().contains("calls are nested more than 64 deep"), text(&error))?;
    check(worker.call("echo", 1).is_ok(), "no echo")
}

/// A server that is quick as a rule reads by itself, and nobody is woken to read in its place; once it is slow,
/// somebody has to.
fn a_slow_call_after_quick_ones_keeps_nobody_waiting() -> Outcome {
    let worker = worker()?;
    // Two servers, of which one is spare from then on.
    std::thread::scope(|scope| {
        let both = [0, 1].map(|_| scope.spawn(|| worker.call("sleep", 50).map_err(text)));
        both.into_iter().try_for_each(|thread| thread.join().unwrap().map(drop))
    })?;
    for round in 0..20u64 {
        for _ in 0..50 {
            worker.call("echo", 1).map_err(text)?;
        }
        let took = std::thread::scope(|scope| -> Result<Duration, String> {
            let slow = scope.spawn(|| worker.call("sleep", 400).map_err(text));
            // With the looks of the parked thread in all manners.
            std::thread::sleep(Duration::from_micros(200 * round));
            let started = Instant::now();
            worker.call("echo", 2).map_err(text)?;
            let took = started.elapsed();
            slow.join().unwrap()?;
            Ok(took)
        })?;
        check(took < Duration::from_millis(200), (round, took))?;
    }
    Ok(())
}

/// A worker that is writing an answer nobody wants, larger than the socket holds, ends by itself.
fn a_goodbye_waits_for_what_is_being_said() -> Outcome {
    let worker = worker()?;
    let options = ladder::CallOptions::new().limit(Duration::from_millis(20));
    let error = worker.call_with("megabyte", Value::Null, options).unwrap_err();
    check(error.is_deadline(), text(error))?;
    std::thread::sleep(Duration::from_millis(50));
    let exit = worker.shutdown(LONG);
    check(exit.status.success(), text(exit))
}

fn is_bound(error: &CallError) -> bool {
    match error.kind() {
        CallErrorKind::OverBound(_) => true,
        CallErrorKind::Remote { text, .. } => text.contains("pass the bound"),
        _ => false,
    }
}

fn a_worker_calls_an_idle_host() -> Outcome {
    let called = Arc::new(Mutex::new(None));
    let noted = Arc::clone(&called);
    let methods = Methods::new().on("hello", move |value| {
        *noted.lock().unwrap() = value.as_i64();
        Ok(Value::from("welcome"))
    });
    let worker = Worker::builder().handler(methods).spawn(role("calls")).map_err(text)?;
    let end = Instant::now() + LONG;
    while called.lock().unwrap().is_none() {
        check(Instant::now() < end, "it was never called")?;
        std::thread::sleep(Duration::from_millis(5));
    }
    check(*called.lock().unwrap() == Some(i64::from(worker.process().pid())), "another's call")?;
    // It went on to serve, so it was answered.
    check(worker.call("echo", 1).is_ok(), "no echo")
}

fn a_host_without_a_handler_says_so() -> Outcome {
    let worker = Worker::builder().spawn(role("serve")).map_err(text)?;
    let argument =
        Value::map([("level", Value::from(1)), ("trace", "".into()), ("load", Value::Null)]);
    let error = worker.call("nest", argument).unwrap_err();
    check(error.to_string().contains("this side takes no calls"), text(&error))
}

/// Calls of another thread go on while some are slow, however many there are, up to the pool's cap.
fn a_slow_call_delays_no_other() -> Outcome {
    let worker = worker()?;
    let slow_ones = AtomicUsize::new(3);
    let (quick, longest) = std::thread::scope(|scope| {
        let slow: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let outcome = worker.call("sleep", 2000).map(drop).map_err(text);
                    slow_ones.fetch_sub(1, Ordering::Relaxed);
                    outcome
                })
            })
            .collect();
        let (mut quick, mut longest) = (0, Duration::ZERO);
        while slow_ones.load(Ordering::Relaxed) > 0 {
            let started = Instant::now();
            worker.call("sleep", 1).map_err(text)?;
            longest = longest.max(started.elapsed());
            quick += 1;
        }
        slow.into_iter().try_for_each(|thread| thread.join().map_err(|_| "panicked")?)?;
        Ok::<_, String>((quick, longest))
    })?;
    check(quick > 50 && longest < Duration::from_millis(1000), (quick, longest))
}

fn a_large_copy_delays_no_small_call() -> Outcome {
    let worker = worker()?;
    let large = Tensor::from_vec(vec![1u8; 1 << 30], &[1 << 30]).map_err(text)?;
    let done = AtomicBool::new(false);
    let quick = std::thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let outcome = worker.call("echo", large).map(drop).map_err(text);
            done.store(true, Ordering::Relaxed);
            outcome
        });
        let mut quick = 0;
        while !done.load(Ordering::Relaxed) {
            worker.call("echo", quick).map_err(text)?;
            quick += 1;
        }
        copying.join().map_err(|_| "panicked")??;
        Ok::<_, String>(quick)
    })?;
    // The copy takes most of a second: were the small calls to wait for it, there would be one or two.
    check(quick > 20, quick)
}

fn the_pools_exhaustion_is_an_error() -> Outcome {
    let worker = worker()?;
    let start = Barrier::new(40);
    let outcomes: Vec<Result<(), CallError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..40)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    worker.call("sleep", 500).map(drop)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (served, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    let is_busy = |outcome: &Result<(), CallError>| {
        outcome.as_ref().is_err_and(
            |error| matches!(error.kind(), CallErrorKind::Remote { code, .. } if code == "busy"),
        )
    };
    check(served.len() == 16 && refused.iter().all(is_busy), (served.len(), refused.len()))?;
    check(worker.call("echo", 1).is_ok(), "no echo")
}

fn the_bound_gives_the_value_back() -> Outcome {
    let bounds = Bounds { bytes: 1 << 20, leases: 4, ..Bounds::default() };
    let worker = Worker::builder().bounds(bounds).spawn(role("serve")).map_err(text)?;
    let tensor = |len: usize| Tensor::from_vec(vec![1u8; len], &[len]).map_err(text);
    let large = Value::from(tensor((1 << 20) + 1)?);
    let error = worker.call("hold", large.clone()).unwrap_err();
    check(matches!(error.kind(), CallErrorKind::OverBound(_)), text(&error))?;
    check(error.into_value() == Some(large), "the value is lost")?;
    for _ in 0..4 {
        worker.call("hold", tensor(100)?).map_err(text)?;
    }
    let error = worker.call("hold", tensor(100)?).unwrap_err();
    check(matches!(error.kind(), CallErrorKind::OverBound(_)), text(&error))?;
    // Plain values need no memory.
    check(worker.call("echo", 1).is_ok(), "no echo")
}

fn shared() -> Result<Tensor, String> {
    let mut born = TensorMut::new(DType::U8, &[5000]).map_err(text)?;
    born.as_bytes_mut().fill(7);
    born.share().map_err(text)
}

/// The process is gone and its socket is not: the channel closes by the first sign, and memory is
/// retired for want of the second.
fn a_child_that_keeps_the_socket_keeps_nothing_alive() -> Outcome {
    let tensor = shared()?;
    let worker = Worker::spawn(role("forks")).map_err(text)?;
    worker.call("hold", tensor.clone()).map_err(text)?;
    let child = worker.call("child", Value::Null).map_err(text)?.into_value();
    let started = Instant::now();
    let error = worker.call("exit", Value::Null).unwrap_err();
    check(error.is_gone() && error.to_string().contains("status 3"), text(&error))?;
    check(started.elapsed() < Duration::from_secs(1), started.elapsed())?;
    let started = Instant::now();
    drop(worker);
    check(started.elapsed() < Duration::from_secs(1), started.elapsed())?;
    let retired = TensorMut::reclaim(tensor).is_err();
    let pid = child.as_i64().unwrap_or(0).to_string();
    let _ = std::process::Command::new("kill").arg(pid).status();
    check(retired, "memory that a child of the worker may still look at was given back")
}

/// The socket is closed and the process is not: as long as it lives, nothing is given back.
fn a_worker_that_closes_its_socket_is_gone() -> Outcome {
    let before = Census::take();
    let tensor = shared()?;
    let worker = Worker::spawn(role("leaves").grace(Duration::ZERO)).map_err(text)?;
    let started = Instant::now();
    let error = worker.call("hold", tensor.clone()).unwrap_err();
    check(error.is_gone() && error.to_string().contains("closed the channel"), text(&error))?;
    check(started.elapsed() < Duration::from_secs(3), started.elapsed())?;
    check(worker.process().is_running(), "it was killed for it")?;
    let tensor = TensorMut::reclaim(tensor).err().ok_or("given back while it lives")?;
    drop(worker);
    // Now both signs are in.
    check(TensorMut::reclaim(tensor).is_ok(), "not given back when it was dead")?;
    before.settle()
}

fn a_drip_of_receipts_puts_no_deadline_off() -> Outcome {
    let worker = worker()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Every echo brings messages for the waiting thread to read on its behalf.
        let chatter = scope.spawn(|| -> Outcome {
            while !stop.load(Ordering::Relaxed) {
                worker.call("echo", 1).map_err(text)?;
            }
            Ok(())
        });
        let started = Instant::now();
        let options = ladder::CallOptions::new().limit(Duration::from_millis(100));
        let error = worker.call_with("sleep", 3000, options).unwrap_err();
        let took = started.elapsed();
        stop.store(true, Ordering::Relaxed);
        chatter.join().map_err(|_| "panicked")??;
        check(error.is_deadline() && took < Duration::from_secs(1), (text(&error), took))
    })
}

#[cfg(not(unix))]
fn an_invited_worker_serves() -> Outcome {
    Err("nobody is invited here".into())
}

/// A worker that somebody else starts, with the invitation in its environment and nowhere else.
#[cfg(unix)]
fn an_invited_worker_serves() -> Outcome {
    let listener = ladder::Listener::bind().map_err(text)?;
    let invitation = listener.invitation();
    let mut child = std::process::Command::new("/proc/self/exe")
        .env(ROLE, "serve")
        .envs(invitation.clone())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(text)?;
    let outcome = (|| {
        let channel = listener.accept(LONG).map_err(text)?;
        let tensor = shared()?;
        let value = Value::list([tensor.clone(), tensor]);
        let reply = channel.call("echo", value.clone()).map_err(text)?;
        check(*reply.value() == value, "another value")?;
        check(reply.sent().legs.iter().all(|leg| leg.copies == 0), reply.sent())?;
        // Neither the key nor the address is there for every user to read.
        let line = std::fs::read(format!("/proc/{}/cmdline", child.id())).map_err(text)?;
        let line = String::from_utf8_lossy(&line).into_owned();
        check(invitation.iter().all(|(_, secret)| !line.contains(secret.as_str())), line)
    })();
    let ended = child.wait().map_err(text)?;
    outcome?;
    check(ended.success(), ended)
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return act(&role);
    }
    run_serially(vec![
        trial("two_threads_nest_calls_both_ways", || nesting(5_000, 2_500)),
        trial(
            "forty_levels_need_no_more_threads_than_one",
            forty_levels_need_no_more_threads_than_one,
        ),
        trial("nesting_without_end_is_refused", nesting_without_end_is_refused),
        trial(
            "a_slow_call_after_quick_ones_keeps_nobody_waiting",
            a_slow_call_after_quick_ones_keeps_nobody_waiting,
        ),
        trial("a_goodbye_waits_for_what_is_being_said", a_goodbye_waits_for_what_is_being_said),
        trial("a_worker_calls_an_idle_host", a_worker_calls_an_idle_host),
        trial("a_host_without_a_handler_says_so", a_host_without_a_handler_says_so),
        trial("a_slow_call_delays_no_other", a_slow_call_delays_no_other),
        trial("a_large_copy_delays_no_small_call", a_large_copy_delays_no_small_call),
        trial("the_pools_exhaustion_is_an_error", the_pools_exhaustion_is_an_error),
        trial("the_bound_gives_the_value_back", the_bound_gives_the_value_back),
        linux(
            "a_child_that_keeps_the_socket_keeps_nothing_alive",
            a_child_that_keeps_the_socket_keeps_nothing_alive,
        ),
        trial("a_worker_that_closes_its_socket_is_gone", a_worker_that_closes_its_socket_is_gone),
        linux("an_invited_worker_serves", an_invited_worker_serves),
        trial("a_drip_of_receipts_puts_no_deadline_off", a_drip_of_receipts_puts_no_deadline_off),
    ])
}
