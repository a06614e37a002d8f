//! Machines that have too little of something: descriptors, address space, memory, threads' patience. An error says
//! which, or the sender waits; and once there is enough again, all goes on. Of Linux alone.
//!
//! What is limited is a process of its own: the limit of a host is that of a child of the test.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ladder::{
    AtBound, Bounds, CallErrorKind, CallOptions, Channel, Command, DType, Methods, Output, Reason,
    Tensor, TensorMut, Value, Worker, WorkerBuilder,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use testkit::census::Census;
use testkit::{run_serially, trial};

type Outcome<T = ()> = Result<T, String>;

const ROLE: &str = "E2E_ROLE";
const MIB: usize = 1 << 20;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn born(len: usize, fill: u8) -> Result<Tensor, ladder::Refusal> {
    let mut tensor = TensorMut::new(DType::U8, &[len])?;
    tensor.as_bytes_mut().fill(fill);
    tensor.share()
}

fn command() -> Command {
    Command::this_executable().env(ROLE, "worker").output(Output::Discard).grace(Duration::ZERO)
}

fn worker() -> Outcome<Worker> {
    Worker::spawn(command()).map_err(text)
}

/// This binary as a worker, started by a shell that says something first.
fn worker_after(shell: &str) -> Command {
    let this = std::env::current_exe().unwrap();
    let command = Command::new("sh").args(["-c", &format!("{shell}; exec {}", this.display())]);
    command.env(ROLE, "worker").output(Output::Discard).grace(Duration::ZERO)
}

fn echoes(worker: &Worker, len: usize) -> Outcome {
    let value = Value::from(born(len, 4).map_err(text)?);
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    check(*reply.value() == value, "another value")
}

/// Lowers a limit of this process; gives what sets it back.
fn lower(resource: Resource, to: u64) -> Outcome<impl FnOnce() -> Outcome> {
    let before = getrlimit(resource);
    let lowered = Rlimit { current: Some(to), maximum: before.maximum };
    setrlimit(resource, lowered).map_err(text)?;
    Ok(move || setrlimit(resource, before).map_err(text))
}

/// Whether an error is for want of something, and gives the value back.
fn is_for_want_of(error: &ladder::CallError, reason: Reason) -> bool {
    let is = match error.kind() {
        CallErrorKind::Unsendable(why) => {
            why.refusals.iter().any(|(_, refusal)| refusal.reason() == reason)
        }
        CallErrorKind::NotAccepted { code, .. } => code == reason.code(),
        CallErrorKind::OverCap(text) => text.contains("Too many") || text.contains(reason.text()),
        _ => false,
    };
    is && error.value().is_some()
}

// What a host does that has too little: each in a process of its own.

/// Tensors that are shared and held, until there are no descriptors left.
fn few_descriptors(count: u64) -> Outcome {
    let worker = worker()?;
    let restore = lower(Resource::Nofile, count)?;
    let mut held = Vec::new();
    let why = loop {
        match born(5000, 1) {
            Ok(tensor) => match worker.call("hold", tensor.clone()) {
                Ok(_) => held.push(tensor),
                Err(error) => {
                    break check(is_for_want_of(&error, Reason::NoDescriptors), text(&error));
                }
            },
            Err(refusal) => break check(refusal.reason() == Reason::NoDescriptors, refusal),
        }
        if held.len() as u64 > count {
            return Err(format!("{} descriptors of {count}", held.len()));
        }
    };
    why?;
    // What needs none still goes.
    check(worker.call("echo", 1).is_ok(), "a number")?;
    // Nobody is let in halfway.
    match Worker::spawn(command()) {
        Ok(_) => return Err("a worker without a descriptor".into()),
        Err(error) => check(
            text(&error).contains("open files") || text(&error).contains("descriptors"),
            text(&error),
        )?,
    }
    drop(held);
    // Where even then a message's descriptors found no room here, the channel is at its end, and says so.
    let again =
        || worker.call("let go", Value::Null).map_err(text).and_then(|_| echoes(&worker, 5000));
    if let Err(error) = again() {
        check(error.contains(Reason::NoDescriptors.text()), error)?;
    }
    restore()?;
    echoes(&self::worker()?, 5000)
}

fn eventually(mut holds: impl FnMut() -> Outcome) -> Outcome {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        match holds() {
            Err(error) if Instant::now() > end => return Err(format!("not in time: {error}")),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
            Ok(()) => return Ok(()),
        }
    }
}

fn address_space() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmSize:")).unwrap_or_default();
    line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// No room in the address space: for a block of its own, and for one that comes.
fn little_address_space() -> Outcome {
    let worker = worker()?;
    echoes(&worker, MIB)?;
    let restore = lower(Resource::As, address_space() + 64 * MIB as u64)?;
    let refusal = born(200 * MIB, 1).unwrap_err();
    check(refusal.reason() == Reason::NoMemory, &refusal)?;
    // It is taken, and cannot be looked at in place; a part of it can be copied out.
    let large = worker.call("born", 200).map_err(text)?;
    let tensor = large.value().as_tensor().unwrap().clone();
    let refusal = tensor.as_slice::<u8>().unwrap_err();
    check(refusal.reason() == Reason::NoMemory, &refusal)?;
    let part = tensor.slice(0, 100 * MIB, 100 * MIB + 10).map_err(text)?;
    check(part.to_vec::<u8>().map_err(text)? == [200; 10], "a part")?;
    echoes(&worker, MIB)?;
    restore()?;
    check(tensor.as_slice::<u8>().map_err(text)?.iter().all(|byte| *byte == 200), "the bytes")?;
    drop(born(200 * MIB, 1).map_err(text)?);
    Ok(())
}

/// No room for files: what the kernel says when a segment cannot be made as long as is asked.
fn little_room() -> Outcome {
    let worker = worker()?;
    let before = segment::calls();
    let restore = lower(Resource::Fsize, 4 * MIB as u64)?;
    let refusal = born(16 * MIB, 1).unwrap_err();
    check(refusal.reason() == Reason::NoMemory, &refusal)?;
    check(segment::calls().mapped == before.mapped, "mapped before there was room")?;
    // And of a tensor that is private, and would be copied: nothing is sent, and the value is given back.
    let value = Tensor::from_vec(vec![3u8; 16 * MIB], &[16 * MIB]).map_err(text)?;
    let error = worker.call("echo", value).unwrap_err();
    check(is_for_want_of(&error, Reason::NoMemory), text(&error))?;
    echoes(&worker, MIB)?;
    restore()?;
    let value = error.into_value().ok_or("no value")?;
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    check(*reply.value() == value, "another value")
}

fn act(role: &str) -> ExitCode {
    let outcome = match role.split_once(' ') {
        Some(("few-descriptors", count)) => few_descriptors(count.parse().unwrap()),
        _ if role == "little-address-space" => little_address_space(),
        _ if role == "little-room" => little_room(),
        _ => return serve(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

/// What this worker was given to hold.
static HELD: Mutex<Vec<Value>> = Mutex::new(Vec::new());

fn serve() -> ExitCode {
    let Ok(Some(channel)) = Channel::from_env() else { return ExitCode::from(90) };
    let held = || HELD.lock().unwrap_or_else(PoisonError::into_inner);
    let methods = Methods::new()
        .on("echo", Ok)
        .on("born", |value| {
            let mebibytes = usize::try_from(value.as_i64().ok_or("a length")?)?;
            Ok(born(mebibytes * MIB, 200)?.into())
        })
        .on("hold", move |value| {
            held().push(value);
            Ok(Value::Null)
        })
        .on("let go", move |_| Ok(Value::from(std::mem::take(&mut *held()).len())));
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

// The tests.

/// A host of a process of its own that does this.
fn host(role: &str, shell: &str) -> Outcome {
    let this = std::env::current_exe().map_err(text)?;
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("{shell} exec {}", this.display())]);
    command.env(ROLE, role).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = command.output().map_err(text)?;
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{role}: {}: {says}", output.status)) }
}

fn a_host_runs_out_of_descriptors() -> Outcome {
    for count in [16, 20, 24, 32, 48, 64] {
        host(&format!("few-descriptors {count}"), "")?;
    }
    Ok(())
}

fn a_host_runs_out_of_address_space() -> Outcome {
    host("little-address-space", "")
}

fn a_block_for_which_there_is_no_room_is_never_mapped() -> Outcome {
    // The kernel asks with a signal first.
    host("little-room", "trap '' XFSZ;")
}

/// A worker that holds what it is sent until it has no descriptor left: an error that says so, and the value back; or
/// what came with a message was cut off, which ends the channel, and says so.
fn a_worker_runs_out_of_descriptors() -> Outcome {
    let before = Census::take();
    for count in [24, 32, 48, 64] {
        let worker = Worker::spawn(worker_after(&format!("ulimit -n {count}"))).map_err(text)?;
        let mut sent = Vec::new();
        let error = loop {
            let tensor = born(5000, 1).map_err(text)?;
            sent.push(tensor.clone());
            match worker.call_with("hold", tensor, CallOptions::new().limit(Duration::from_secs(5)))
            {
                Ok(_) if sent.len() > count => return Err("more than it may have".into()),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        if error.is_gone() {
            let whole = text(&error);
            check(whole.contains("exited"), whole)?;
            continue;
        }
        check(is_for_want_of(&error, Reason::NoDescriptors), text(&error))?;
        check(worker.call("echo", 1).is_ok(), "a number")?;
        drop((sent, error));
        worker.call("let go", Value::Null).map_err(text)?;
        eventually(|| echoes(&worker, 5000))?;
    }
    before.settle()
}

fn a_worker_runs_out_of_address_space() -> Outcome {
    // Of kibibytes, with some room beside what the program takes.
    let worker = Worker::spawn(worker_after("ulimit -v 500000")).map_err(text)?;
    let error = worker.call("born", 600).unwrap_err();
    check(text(&error).contains(Reason::NoMemory.text()), text(&error))?;
    // What it need not look into it can take, and send back.
    echoes(&worker, 600 * MIB)?;
    worker.call("born", 20).map_err(text)?;
    Ok(())
}

/// A memory group of this test's, where it can be made: the first version, or the second.
fn group(bytes: usize) -> Option<Group> {
    let name = format!("tensor-ladder-{}", std::process::id());
    for (root, limit) in
        [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
    {
        let folder = Path::new(root).join(&name);
        if std::fs::create_dir(&folder).is_err() {
            continue;
        }
        let group = Group(folder);
        if group.0.join("cgroup.procs").exists()
            && std::fs::write(group.0.join(limit), bytes.to_string()).is_ok()
        {
            return Some(group);
        }
    }
    None
}

struct Group(PathBuf);

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// In a group with a limit of memory the answer is an error that says so, and not the killer's.
fn a_worker_in_a_small_group_is_not_killed() -> Outcome {
    let group = group(96 * MIB).ok_or("no group could be made")?;
    let enter = format!("echo $$ > {}/cgroup.procs", group.0.display());
    let worker = Worker::spawn(worker_after(&enter)).map_err(text)?;
    let error = worker.call("born", 200).unwrap_err();
    check(text(&error).contains(Reason::NoMemory.text()), text(&error))?;
    echoes(&worker, MIB)?;
    worker.call("born", 16).map_err(text)?;
    drop(worker);
    Ok(())
}

/// A worker that stands still and reads nothing: calls end by their deadlines, what is kept for it is bounded, and once
/// it reads again, all goes on.
fn a_receiver_that_never_reads_is_waited_for_no_longer_than_asked() -> Outcome {
    let before = Census::take();
    {
        let worker = worker()?;
        let pid = Pid::from_raw(i32::try_from(worker.process().pid()).map_err(text)?).unwrap();
        let shared = born(MIB, 2).map_err(text)?;
        echoes(&worker, MIB)?;
        kill_process(pid, Signal::STOP).map_err(text)?;
        let limit = Duration::from_millis(100);
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| -> Outcome {
                        for _ in 0..20 {
                            // A long text too, so that the socket is full soon.
                            let value = Value::list([
                                Value::from(shared.clone()),
                                Value::from("x".repeat(4000)),
                            ]);
                            let started = Instant::now();
                            let options = CallOptions::new().limit(limit);
                            let error = worker.call_with("echo", value, options).unwrap_err();
                            let in_time = started.elapsed() < limit + Duration::from_secs(1);
                            let bounded = matches!(
                                error.kind(),
                                CallErrorKind::Deadline | CallErrorKind::OverBound(_)
                            );
                            check(in_time && bounded, (text(&error), started.elapsed()))?;
                        }
                        Ok(())
                    })
                })
                .collect();
            callers.into_iter().try_for_each(|caller| caller.join().unwrap())
        })?;
        kill_process(pid, Signal::CONT).map_err(text)?;
        eventually(|| echoes(&worker, MIB))?;
    }
    before.settle()
}

/// A worker that keeps everything it is lent: the bound is an error that gives the value back, and ends with the cause.
fn a_receiver_that_never_releases_meets_the_bound() -> Outcome {
    let before = Census::take();
    {
        let bounds =
            Bounds { bytes: 20 * MIB as u64, policy: AtBound::Refuse, ..Bounds::default() };
        let builder: WorkerBuilder = Worker::builder().bounds(bounds);
        let worker = builder.spawn(command()).map_err(text)?;
        let mut count = 0;
        let error = loop {
            match worker.call("hold", born(MIB, 1).map_err(text)?) {
                Ok(_) => count += 1,
                Err(error) => break error,
            }
        };
        check(matches!(error.kind(), CallErrorKind::OverBound(_)), text(&error))?;
        check((15..=20).contains(&count) && error.value().is_some(), count)?;
        worker.call("let go", Value::Null).map_err(text)?;
        eventually(|| echoes(&worker, MIB))?;
    }
    before.settle()
}

/// Sixty-four workers at a time, each of which answers; and nothing is left of them.
fn a_host_of_64_workers() -> Outcome {
    let before = Census::take();
    {
        let workers: Vec<Worker> = (0..64).map(|_| worker()).collect::<Outcome<_>>()?;
        let shared = Value::from(born(MIB, 9).map_err(text)?);
        std::thread::scope(|scope| {
            let calls: Vec<_> = workers
                .iter()
                .map(|worker| {
                    let shared = &shared;
                    scope.spawn(move || -> Outcome {
                        for _ in 0..5 {
                            let reply = worker.call("echo", shared.clone()).map_err(text)?;
                            check(reply.value() == shared, "another value")?;
                        }
                        Ok(())
                    })
                })
                .collect();
            calls.into_iter().try_for_each(|call| call.join().unwrap())
        })?;
    }
    before.settle()
}

/// Each block is a descriptor on both sides; those that are let go of are closed.
fn many_tensors_are_no_more_descriptors_than_are_held() -> Outcome {
    let worker = worker()?;
    let open = || Census::take().descriptors.values().sum::<usize>();
    echoes(&worker, 5000)?;
    let before = open();
    for _ in 0..2000 {
        echoes(&worker, 5000)?;
    }
    check(open() < before + 20, (before, open()))
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return act(&role);
    }
    macro_rules! trials {
        ($($name:ident),* $(,)?) => { vec![$(trial(stringify!($name), $name)),*] };
    }
    let mut trials = trials![
        a_host_runs_out_of_descriptors,
        a_host_runs_out_of_address_space,
        a_block_for_which_there_is_no_room_is_never_mapped,
        a_worker_runs_out_of_descriptors,
        a_worker_runs_out_of_address_space,
        a_receiver_that_never_reads_is_waited_for_no_longer_than_asked,
        a_receiver_that_never_releases_meets_the_bound,
        a_host_of_64_workers,
        many_tensors_are_no_more_descriptors_than_are_held,
    ];
    // A group is for root to make, where whatever contains this allows it.
    let small =
        trial("a_worker_in_a_small_group_is_not_killed", a_worker_in_a_small_group_is_not_killed);
    trials.push(small.with_ignored_flag(group(96 * MIB).is_none()));
    run_serially(trials)
}
