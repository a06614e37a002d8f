//! Either side is killed, stopped, aborted or exits at every step: the other errs in time, nothing stays, and nothing
//! happens to other peers.
//!
//! Three processes or more: the test starts a host, the host its workers, and one of them all is armed. Of devices there
//! is the stand-in of the driver.

#[path = "devices/kinds.rs"]
#[expect(dead_code, reason = "what each kind rides is for another test to see")]
mod kinds;

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ladder::tier_cuda_ipc::cuda;
use ladder::{
    CallOptions, Channel, Command, Contract, DType, FAILPOINTS, Failure, Ladder, Methods, Output,
    Peer, Tensor, TensorMut, Value, Worker, WorkerBuilder,
};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use testkit::census::Census;
use testkit::{run_serially, stand_in, trial};

type Outcome<T = ()> = Result<T, String>;

const ROLE: &str = "E2E_ROLE";
const ARMED: &str = "LADDER_FAILPOINT";
/// Armed for a worker alone: its host hands it on as [`ARMED`].
const ARM_WORKER: &str = "E2E_ARM_WORKER";
/// Armed for the worker whose memory the host forwards.
const ARM_LENDER: &str = "E2E_ARM_LENDER";
/// What is talked of.
const TOPIC: &str = "E2E_TOPIC";
/// Names a cycle, in the environment of all its processes.
const CYCLE: &str = "E2E_CYCLE";

/// How long a death may go unnoticed.
const NOTICED: Duration = Duration::from_secs(1);
/// How long a call may take where the peer does not die, but stops.
const LIMIT: Duration = Duration::from_millis(700);
/// How long until nothing is left of a peer.
const SETTLED: Duration = Duration::from_secs(2);
/// How many cycles go on at a time: most of their time they wait.
const AT_A_TIME: usize = 3;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn topic() -> String {
    std::env::var(TOPIC).unwrap_or_else(|_| "plain".into())
}

fn options() -> CallOptions {
    CallOptions::new().limit(LIMIT)
}

fn born(fill: u8) -> Outcome<Tensor> {
    let mut born = TensorMut::new(DType::U8, &[100_000]).map_err(text)?;
    born.as_bytes_mut().fill(fill);
    born.share().map_err(text)
}

/// Memory of the kinds that a topic is about.
fn value(topic: &str) -> Outcome<Value> {
    let private = Tensor::from_vec(vec![7u8; 100_000], &[100_000]).map_err(text)?;
    let mut items = vec![Value::from(private), born(9)?.into()];
    let kinds: &[&str] = match topic {
        "device" => &["plain", "shareable", "managed"],
        "pool" => &["pool"],
        _ => &[],
    };
    for kind in kinds {
        let device = cuda::driver().map_err(text)?.devices()[0].device();
        let bytes = kinds::pattern(50_000, 5);
        items.push(kinds::tensor_of(kind, device, &bytes).map_err(text)?.into());
    }
    Ok(Value::list(items))
}

/// The bytes of all tensors, wherever they are.
fn bytes(value: &Value) -> Outcome<Vec<Vec<u8>>> {
    let tensors = value.items().unwrap_or_default().iter().filter_map(Value::as_tensor);
    tensors.map(|tensor| tensor.to_bytes().map_err(text)).collect()
}

fn methods() -> Methods {
    Methods::new()
        .on("echo", Ok)
        .on_with("back", |value: Value, peer: &Peer| {
            Ok::<_, Failure>(peer.call_with("echo", value, options())?.into_value())
        })
        .on_with("make", |_, peer: &Peer| {
            let made = value("plain")?;
            let _ = peer.call_with("echo", made.clone(), options())?;
            Ok::<_, Failure>(made)
        })
}

fn builder() -> WorkerBuilder {
    let builder = Worker::builder().handler(methods()).handshake(LIMIT * 2);
    if topic() == "pool" { builder.experimental_pool_ipc(Contract::V1) } else { builder }
}

fn command(armed: &str) -> Command {
    Command::this_executable()
        .env(ROLE, "worker")
        .env(ARMED, std::env::var(armed).unwrap_or_default())
        .output(Output::Discard)
        .grace(Duration::from_millis(300))
}

fn in_time(started: Instant, step: &str) -> Outcome {
    let took = started.elapsed();
    if took > NOTICED + LIMIT * 2 { Err(format!("{step} took {took:?}")) } else { Ok(()) }
}

/// A call that may end in any way, but in time, and not with other bytes.
fn call(worker: &Worker, method: &str, value: &Value) -> Outcome<Option<Value>> {
    let started = Instant::now();
    let answer = match worker.call_with(method, value.clone(), options()) {
        // Over device memory of a peer that is gone there is nothing to be read any more.
        Ok(reply) => match bytes(reply.value()) {
            Ok(there) if method != "make" && there != bytes(value)? => {
                return Err("other bytes came back".into());
            }
            _ => Some(reply.into_value()),
        },
        Err(_) => None,
    };
    in_time(started, method)?;
    Ok(answer)
}

/// What this process holds. What a dead worker's pool lent is never freed, by the contract (O10): the canary that came
/// from it, at most.
fn census(topic: &str) -> Census {
    let mut census = Census::take();
    if topic == "pool" {
        let of_pools = census.descriptors.remove("/memfd:device").unwrap_or(0);
        if of_pools <= 2 {
            census.mappings = census.mappings.saturating_sub(of_pools);
        }
    }
    census
}

/// The host: a whole conversation, each step of which ends in time, well or not; how the armed worker ended.
fn host() -> Outcome<String> {
    let topic = topic();
    // Whatever is set up once.
    drop(value(&topic)?);
    let before = census(&topic);
    let end = {
        let bystander = builder().spawn(command("")).map_err(text)?;
        let theirs = born(77)?;
        let held = bystander.call("echo", Value::list([theirs.clone()])).map_err(text)?;
        let end = converse(&topic)?;
        // Nothing happened to another peer and its memory.
        let again = bystander.call("echo", held.value().clone()).map_err(text)?;
        if bytes(again.value())? != [vec![77; 100_000]]
            || bytes(held.value())? != [vec![77; 100_000]]
        {
            return Err("the other peer's memory is not what it was".into());
        }
        end
    };
    before.settle_within(SETTLED, || census(&topic))?;
    Ok(end)
}

fn converse(topic: &str) -> Outcome<String> {
    let started = Instant::now();
    let lender = match topic {
        "forward" => match builder().spawn(command(ARM_LENDER)) {
            Ok(lender) => Some(lender),
            Err(error) => return Ok(error.to_string()),
        },
        _ => None,
    };
    let spawned = builder().spawn(command(ARM_WORKER));
    in_time(started, "the handshake")?;
    let worker = match spawned {
        Ok(worker) => worker,
        Err(error) => return Ok(error.to_string()),
    };
    let mut value = value(topic)?;
    if let Some(lender) = &lender
        && let Some(made) = call(lender, "make", &value)?
    {
        value = made;
    }
    for method in ["echo", "back", "echo"] {
        let _ = call(&worker, method, &value)?;
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(value);
    if let Some(lender) = &lender {
        let _ = call(lender, "echo", &Value::list([born(3)?]))?;
    }
    std::thread::sleep(Duration::from_millis(5));
    let mut ends = Vec::new();
    for worker in [Some(worker), lender].into_iter().flatten() {
        let started = Instant::now();
        ends.push(worker.shutdown(Duration::from_millis(300)).to_string());
        in_time(started, "the end")?;
    }
    Ok(ends.join("; "))
}

fn act(role: &str) -> ExitCode {
    if role == "host" {
        return match host() {
            Ok(end) => {
                let _ = writeln!(std::io::stderr(), "{end}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "{error}");
                ExitCode::FAILURE
            }
        };
    }
    let ladder = match topic().as_str() {
        "pool" => Ladder::standard().experimental_pool_ipc(Contract::V1),
        _ => Ladder::standard(),
    };
    match Channel::from_env_with(&ladder, None) {
        Ok(Some(channel)) => drop(channel.serve(methods())),
        Ok(None) => return ExitCode::from(90),
        Err(_) => return ExitCode::from(91),
    }
    ExitCode::SUCCESS
}

/// Processes of a cycle that are alive.
fn alive(cycle: &str) -> Vec<String> {
    let marker = format!("{CYCLE}={cycle}");
    let ours = |process: &std::fs::DirEntry| {
        let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|pair| pair == marker.as_bytes())
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter(ours).map(|process| process.path().display().to_string()).collect()
}

/// Waits until no process of a cycle is alive.
fn all_end(cycle: &str, limit: Duration) -> Outcome {
    let started = Instant::now();
    while !alive(cycle).is_empty() {
        if started.elapsed() > limit {
            return Err(format!("{:?} is still there", alive(cycle)));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Waits until the host has exited or was stopped.
fn exited_or_stopped(host: &mut Child) -> Outcome<Option<std::process::ExitStatus>> {
    let pid = Pid::from_child(host);
    let options = WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(pid), options).map_err(text)? {
        Some(status) if status.stopped() => Ok(None),
        _ => host.wait().map(Some).map_err(text),
    }
}

/// A conversation in which one side is armed.
#[derive(Debug, Clone)]
struct Cycle {
    topic: &'static str,
    side: &'static str,
    armed: String,
}

impl Cycle {
    fn run(&self, number: usize) -> Outcome {
        let Self { topic, side, armed } = self;
        let action = armed.split_once('=').map_or("", |(_, action)| action);
        let name = format!("{}-{topic}-{number}", std::process::id());
        let this = std::env::current_exe().map_err(text)?;
        let mut command = std::process::Command::new(this);
        command.env(ROLE, "host").env(CYCLE, &name).env(TOPIC, topic).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let variable = match *side {
            "host" => ARMED,
            "lender" => ARM_LENDER,
            _ => ARM_WORKER,
        };
        let mut host = command.env(variable, armed).spawn().map_err(text)?;
        let status = exited_or_stopped(&mut host)?;
        if status.is_none() {
            // A host that stands still for ever is the user's to kill; then its workers end.
            host.kill().map_err(text)?;
            host.wait().map_err(text)?;
        }
        let says = host.stderr.take().map(std::io::read_to_string);
        let says = says.and_then(Result::ok).unwrap_or_default();
        // A worker whose host is gone may be in the middle of work for two seconds.
        all_end(&name, SETTLED * 2).map_err(|error| format!("{self:?}: {error}"))?;
        // The armed side did end there, so the point was reached; the other came to an orderly end.
        let signal = status.and_then(|status| status.signal());
        let code = status.and_then(|status| status.code());
        let as_it_must = match (*side, action) {
            ("host", "kill") => signal == Some(9),
            ("host", "abort") => signal == Some(6),
            ("host", "exit") => code == Some(3),
            ("host", "stop") => status.is_none(),
            (_, action) if action.starts_with("delay") => code == Some(0),
            // One that stands still is killed by its host in the end.
            (_, "kill" | "stop") => {
                says.contains("killed by signal 9") || says.contains("no handshake")
            }
            (_, "exit") => says.contains("exited with status 3"),
            _ => says.contains("killed by signal 6"),
        };
        let orderly = *side == "host" || code == Some(0);
        if as_it_must && orderly { Ok(()) } else { Err(format!("{self:?}: {status:?}: {says}")) }
    }
}

fn shared_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find(|line| line.starts_with("Shmem:")).unwrap_or_default();
    line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

/// Whatever was done, this process holds what it held, and the machine's shared memory is free again.
fn leaves_nothing(what: impl FnOnce() -> Outcome) -> Outcome {
    let (before, shmem) = (Census::take(), shared_memory());
    what()?;
    before.settle()?;
    let left = shared_memory().saturating_sub(shmem);
    // In KiB; other programs of the machine have shared memory too.
    if left > 4096 { Err(format!("{left} KiB of shared memory left behind")) } else { Ok(()) }
}

/// Every point in each of these manners, on one side, with one topic.
fn every_point(topic: &'static str, side: &'static str, actions: &[&str]) -> Outcome {
    // Of a host that forwards, the call that does: the first has the value made.
    let second = ["call-packed", "call-sent", "answer-received", "answer-imported"];
    let nth = |point: &str| match (topic, side) {
        ("forward", "host") if second.contains(&point) => "#3",
        _ => "",
    };
    let mut cycles = Vec::new();
    for action in actions {
        for point in FAILPOINTS {
            let armed = format!("{point}{}={action}", nth(point));
            cycles.push(Cycle { topic, side, armed });
        }
    }
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cycle) = cycles.get(number) else { return };
                    if let Err(error) = cycle.run(number) {
                        wrong.lock().unwrap_or_else(|poison| poison.into_inner()).push(error);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap_or_default();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// Host and workers are killed at the same time, in the middle of a conversation: nobody is left to tidy up, and nothing
/// is left.
fn killed_together() -> Outcome {
    for turn in 0..20u64 {
        let name = format!("{}-together-{turn}", std::process::id());
        let this = std::env::current_exe().map_err(text)?;
        let mut command = std::process::Command::new(this);
        command.env(ROLE, "host").env(CYCLE, &name).env(TOPIC, "forward");
        // Long enough for every turn.
        command.env(ARM_WORKER, "answer-packed#3=delay:2000");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut host = command.spawn().map_err(text)?;
        std::thread::sleep(Duration::from_millis(60 + 20 * turn));
        for process in alive(&name) {
            let pid = process.rsplit('/').next().and_then(|pid| pid.parse().ok());
            if let Some(pid) = pid.and_then(Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        host.wait().map_err(text)?;
        all_end(&name, SETTLED)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    stand_in::main(false, || {
        if let Ok(role) = std::env::var(ROLE) {
            return act(&role);
        }
        const ALL: &[&str] = &["kill", "abort", "exit", "stop", "delay:30"];
        const SOME: &[&str] = &["kill", "stop"];
        let ends = |name: &str, topic, side, actions| {
            trial(name, move || leaves_nothing(|| every_point(topic, side, actions)))
        };
        run_serially(vec![
            ends("a_worker_that_ends_anywhere_takes_nothing_along", "plain", "worker", ALL),
            ends("a_host_that_ends_anywhere_leaves_nothing_behind", "plain", "host", ALL),
            ends("a_worker_that_ends_over_device_memory", "device", "worker", SOME),
            ends("a_host_that_ends_over_device_memory", "device", "host", SOME),
            ends("a_worker_that_ends_over_memory_of_pools", "pool", "worker", SOME),
            ends("a_host_that_ends_over_memory_of_pools", "pool", "host", SOME),
            ends("a_worker_that_ends_while_it_is_forwarded_to", "forward", "worker", SOME),
            ends("a_worker_that_ends_while_its_memory_is_forwarded", "forward", "lender", SOME),
            trial("host_and_workers_killed_together_leave_nothing", || {
                leaves_nothing(killed_together)
            }),
            ends("a_host_that_ends_while_it_forwards", "forward", "host", SOME),
        ])
    })
}
