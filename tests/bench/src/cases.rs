//! The cases that this program runs itself, and the roles of the processes it starts.

use std::hint::{black_box, spin_loop};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ladder::{Channel, Command, DType, Failure, Methods, Peer, Tensor, TensorMut, Value, Worker};
use segment::Draft;

use crate::hop::Loop;
use crate::peers::Driver;
use crate::report::{Key, Report, key, median};
use crate::{Error, ROLE, pin};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

fn contents(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// Looks at both ends, in place or not.
fn touch(tensor: &Tensor) -> Result<(), Failure> {
    let len = tensor.storage().len();
    let ends = (tensor.storage().read(0..1)?[0], tensor.storage().read(len - 1..len)?[0]);
    if ends == (0, ((len - 1) % 251) as u8) { Ok(()) } else { Err("other bytes".into()) }
}

fn tensor_of(value: &Value) -> Result<&Tensor, Failure> {
    value.as_tensor().ok_or_else(|| "a tensor is wanted".into())
}

fn born(len: usize) -> Result<Tensor, Error> {
    let mut tensor = TensorMut::new(DType::U8, &[len])?;
    tensor.as_bytes_mut().copy_from_slice(&contents(len));
    Ok(tensor.share()?)
}

fn serve() -> Result<(), Error> {
    let channel = Channel::from_env()?.ok_or("to be started by the benchmark")?;
    let own: Mutex<Option<Tensor>> = Mutex::default();
    let methods = Methods::new()
        .on("echo", |value| {
            touch(tensor_of(&value)?)?;
            Ok(value)
        })
        .on("take", |value| {
            touch(tensor_of(&value)?)?;
            Ok(Value::Null)
        })
        .on("check", |value| {
            let tensor = tensor_of(&value)?;
            let bytes = tensor.storage().read(0..tensor.storage().len())?;
            let right = bytes.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8);
            Ok(Value::from(right))
        })
        .on("give", move |value| {
            let len = value.as_i64().unwrap_or(0) as usize;
            let mut own = own.lock().map_err(|_| "poisoned")?;
            let tensor = match &*own {
                Some(tensor) if tensor.storage().len() >= len => tensor.clone(),
                _ => born(len).map_err(|error| error.to_string())?,
            };
            Ok(Value::from(own.insert(tensor).clone()))
        })
        .on("counts", |_| {
            let calls = segment::calls();
            Ok(Value::from((calls.mapped + calls.copied) as i64))
        })
        .on_with("spin", |value, peer: &Peer| {
            peer.spin_for(Duration::from_micros(value.as_i64().unwrap_or(0) as u64));
            Ok(Value::Null)
        });
    Ok(channel.serve(methods)?)
}

/// What a process started by this program does.
pub(crate) fn act(role: &str) -> Result<(), Error> {
    pin(1);
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["serve"] => serve(),
        ["values"] => {
            let channel = Channel::from_env()?.ok_or("to be started by the benchmark")?;
            Ok(channel.serve(crate::values::methods())?)
        }
        ["raw", request, answer] => {
            let mut socket = stdin()?;
            let (mut request, answer) = (vec![0; request.parse()?], vec![1; answer.parse()?]);
            while socket.read_exact(&mut request).is_ok() {
                socket.write_all(&answer)?;
            }
            Ok(())
        }
        ["busy", request, answer] => {
            let mut socket = stdin()?;
            socket.set_nonblocking(true)?;
            let (mut request, answer) = (vec![0; request.parse()?], vec![1; answer.parse()?]);
            while read_busily(&mut socket, &mut request).is_ok() {
                socket.write_all(&answer)?;
            }
            Ok(())
        }
        ["hop"] => Loop::answer(stdin()?.into()),
        _ => Err("no such role".into()),
    }
}

fn stdin() -> Result<UnixStream, Error> {
    Ok(UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?))
}

fn read_busily(socket: &mut UnixStream, into: &mut [u8]) -> std::io::Result<()> {
    let mut at = 0;
    while at < into.len() {
        match socket.read(&mut into[at..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(some) => at += some,
            Err(error) if error.kind() == ErrorKind::WouldBlock => spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A process of this program in a role, and a socket to it.
pub(crate) struct Helper {
    child: Child,
    socket: Option<UnixStream>,
}

impl Helper {
    pub(crate) fn start(role: &str) -> Result<Self, Error> {
        let (here, there) = UnixStream::pair()?;
        let mut command = std::process::Command::new(std::env::current_exe()?);
        command.env(ROLE, role).stdin(Stdio::from(OwnedFd::from(there)));
        Ok(Self { child: command.spawn()?, socket: Some(here) })
    }

    /// Ping-pong with one that answers raw frames.
    pub(crate) fn ping(
        &self,
        request: usize,
        answer: usize,
        count: usize,
    ) -> Result<Vec<f64>, Error> {
        let mut socket = self.socket.as_ref().ok_or("no socket")?;
        let (out, mut back) = (vec![2; request], vec![0; answer]);
        timed(count, || {
            socket.write_all(&out)?;
            Ok(socket.read_exact(&mut back)?)
        })
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.socket.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn timed(count: usize, mut once: impl FnMut() -> Result<(), Error>) -> Result<Vec<f64>, Error> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let started = Instant::now();
        once()?;
        samples.push(started.elapsed().as_nanos() as f64 / 1e3);
    }
    Ok(samples)
}

/// One case: its name, how many samples a batch has, and how to take them.
struct Case<'a> {
    key: Key,
    copies: u32,
    count: usize,
    /// Samples that are thrown away first, in the first round and in later ones.
    warm: (usize, usize),
    batch: Box<dyn FnMut(usize) -> Result<Vec<f64>, Error> + 'a>,
}

fn run_rounds(report: &mut Report, mut cases: Vec<Case<'_>>) {
    for round in 0..report.rounds {
        for case in &mut cases {
            let warm = if round == 0 { case.warm.0 } else { case.warm.1 };
            let outcome = (case.batch)(warm + case.count);
            let outcome = outcome.map(|mut samples| samples.split_off(warm.min(samples.len())));
            report.add(&case.key, case.copies, outcome.map_err(|error| error.to_string()));
        }
    }
}

fn echo(worker: &Worker, tensor: &Tensor, count: usize) -> Result<Vec<f64>, Error> {
    timed(count, || {
        let reply = worker.call("echo", tensor.clone())?;
        touch(tensor_of(reply.value()).map_err(|_| "no tensor")?).map_err(|_| "other bytes")?;
        Ok(())
    })
}

/// The bytes of a frame each way, of a call that was made before.
fn frames(worker: &Worker, tensor: &Tensor) -> Result<(usize, usize), Error> {
    echo(worker, tensor, 100)?;
    let before = worker.traffic();
    echo(worker, tensor, 100)?;
    let after = worker.traffic();
    Ok((
        (after.bytes_sent - before.bytes_sent) as usize / 100,
        (after.bytes_received - before.bytes_received) as usize / 100,
    ))
}

/// Echoes alone, both sides spinning.
pub(crate) fn echoes(count: usize) -> Result<(), Error> {
    let worker = Worker::spawn(Command::this_executable().env(ROLE, "serve"))?;
    worker.spin_for(Duration::from_millis(1));
    worker.call("spin", 1000)?;
    let samples = echo(&worker, &born(64 * MIB)?, count)?;
    println!("{:.2} µs", median(&samples));
    Ok(())
}

/// Sends of private memory alone; what they asked of the kernel once the first were done.
pub(crate) fn sends(count: usize) -> Result<(), Error> {
    let worker = Worker::spawn(Command::this_executable().env(ROLE, "serve"))?;
    let tensor = Tensor::from_vec(contents(64 * MIB), &[64 * MIB])?;
    let send = |_| worker.call("take", tensor.clone()).map(drop);
    (0..10).try_for_each(send)?;
    let (calls, handles) = (segment::calls(), worker.traffic().handles_sent);
    (0..count).try_for_each(send)?;
    let sent = worker.traffic().handles_sent - handles;
    println!("before {calls:?}\nafter  {:?}\n{sent} descriptors", segment::calls());
    println!("{:?}", segment::Pool::process().stats());
    Ok(())
}

/// All cases, and their ratios.
pub(crate) fn run(report: &mut Report, quick: bool, peers: Option<&Path>) -> Result<(), Error> {
    let worker = Worker::spawn(Command::this_executable().env(ROLE, "serve"))?;
    let driver = peers.map(Driver::start).transpose()?.map(Mutex::new);
    small(report, &worker, driver.as_ref())?;
    private(report, &worker, 64 * MIB, driver.as_ref(), quick)?;
    forward(report, &worker)?;
    if !quick {
        private(report, &worker, GIB, driver.as_ref(), quick)?;
    }
    Ok(())
}

fn small(
    report: &mut Report,
    worker: &Worker,
    driver: Option<&Mutex<Driver>>,
) -> Result<(), Error> {
    let sizes = [KIB, MIB, 64 * MIB, GIB];
    let tensors: Vec<Tensor> = sizes.iter().map(|len| born(*len)).collect::<Result<_, _>>()?;
    for tensor in &tensors {
        let right = worker.call("check", tensor.clone())?;
        if *right.value() != Value::from(true) {
            return Err("the worker sees other bytes".into());
        }
    }
    let middle = &tensors[2];
    let (request, answer) = frames(worker, middle)?;
    report.fact("frame bytes, call and answer", format!("{request} and {answer}"));
    let raw = Helper::start(&format!("raw {request} {answer}"))?;
    let hop = Helper::start("hop")?;
    let mut bare = Loop::over(hop.socket.as_ref().ok_or("no socket")?.try_clone()?.into())?;
    let case = |key, batch| Case { key, copies: 0, count: 400, warm: (200, 20), batch };
    let mut cases = Vec::new();
    let ping = |count: usize| raw.ping(request, answer, count);
    let raw_key = key("socket", "ping-pong of frames as large", 0);
    cases.push(case(raw_key.clone(), Box::new(ping) as Box<dyn FnMut(usize) -> _>));
    let bare_key = key("socket", "the same frame and codec, no channel", 0);
    cases.push(case(bare_key.clone(), Box::new(|count| timed(count, || bare.once()))));
    for (len, tensor) in sizes.iter().zip(&tensors) {
        let key = key("ladder", "born shared, echo", *len);
        cases.push(case(key, Box::new(move |count| echo(worker, tensor, count))));
    }
    let spinning = key("ladder", "born shared, echo, both sides spin", 64 * MIB);
    let spin = |micros: u64| -> Result<(), Error> {
        worker.spin_for(Duration::from_micros(micros));
        worker.call("spin", micros as i64)?;
        Ok(())
    };
    cases.push(case(
        spinning.clone(),
        Box::new(|count| {
            spin(1000)?;
            let samples = echo(worker, middle, count);
            spin(0)?;
            samples
        }),
    ));
    let busy_key = key("socket", "the same, both ends busy-poll", 0);
    cases.push(case(
        busy_key.clone(),
        Box::new(|count| {
            // Started for the batch alone: it would take the CPU from all others.
            let busy = Helper::start(&format!("busy {request} {answer}"))?;
            let mut socket = busy.socket.as_ref().ok_or("no socket")?.try_clone()?;
            socket.set_nonblocking(true)?;
            let (out, mut back) = (vec![2; request], vec![0; answer]);
            timed(count, || {
                socket.write_all(&out)?;
                Ok(read_busily(&mut socket, &mut back)?)
            })
        }),
    ));
    let mut theirs = Vec::new();
    if let Some(driver) = driver {
        for (peer, case_name) in
            [("iceoryx2-event", "shared"), ("iceoryx2-busy", "shared"), ("ipc-channel", "shared")]
        {
            let key = key(peer, case_name, 64 * MIB);
            theirs.push(key.clone());
            cases.push(case(
                key,
                Box::new(move |count| {
                    let mut driver = driver.lock().map_err(|_| "poisoned")?;
                    driver.batch(peer, case_name, 64 * MIB, count)
                }),
            ));
        }
    }
    run_rounds(report, cases);
    let ours = key("ladder", "born shared, echo", 64 * MIB);
    report.ratio("born shared 64 MiB vs raw ping-pong", &ours, &raw_key, 1.6);
    report.ratio("born shared 64 MiB vs frame and codec alone", &ours, &bare_key, 1.15);
    if let [event, busy, ipc] = &theirs[..] {
        report.ratio("born shared 64 MiB vs iceoryx2 event wake", &ours, event, 1.3);
        report.ratio("born shared 64 MiB vs ipc-channel (no target)", &ours, ipc, f64::INFINITY);
        report.ratio("spinning vs iceoryx2 busy poll (no target)", &spinning, busy, f64::INFINITY);
    }
    report.ratio("spinning vs busy-poll ping-pong", &spinning, &busy_key, 2.0);
    let (kib, gib) =
        (key("ladder", "born shared, echo", KIB), key("ladder", "born shared, echo", GIB));
    report.ratio("born shared 1 GiB vs 1 KiB", &gib, &kib, 1.1);
    Ok(())
}

/// Private memory, one way: a copy into a warm block, and an acknowledgement.
fn private(
    report: &mut Report,
    worker: &Worker,
    len: usize,
    driver: Option<&Mutex<Driver>>,
    quick: bool,
) -> Result<(), Error> {
    let large = len > 64 * MIB;
    let count = if large { 1 } else { 5 };
    let warm = if large { (2, 1) } else { (4, 1) };
    let source = contents(len);
    let tensor = Tensor::from_vec(source.clone(), &[len])?;
    let right = worker.call("check", tensor.clone())?;
    if *right.value() != Value::from(true) {
        return Err("the worker sees other bytes".into());
    }
    let mut block = Draft::new(len)?;
    let case = |key, copies, batch| Case { key, copies, count, warm, batch };
    let copy_key = key("memory", "memcpy into a warm shared block", len);
    let ours = key("ladder", "private, one way + ack", len);
    let mut cases = vec![
        case(
            copy_key.clone(),
            1,
            Box::new(|count| {
                timed(count, || {
                    block.bytes_mut().copy_from_slice(black_box(&source));
                    black_box(block.bytes());
                    Ok(())
                })
            }) as Box<dyn FnMut(usize) -> _>,
        ),
        case(
            ours.clone(),
            1,
            Box::new(|count| {
                timed(count, || {
                    worker.call("take", tensor.clone())?;
                    Ok(())
                })
            }),
        ),
    ];
    let mut theirs = Vec::new();
    if let Some(driver) = driver {
        let mut names = vec![("iceoryx2-event", "private", 0.95), ("ipc-channel", "private", 0.2)];
        if large {
            names.retain(|_| !quick);
        }
        for (peer, name, target) in names {
            let key = key(peer, name, len);
            theirs.push((key.clone(), target));
            cases.push(case(
                key,
                1,
                Box::new(move |count| {
                    let mut driver = driver.lock().map_err(|_| "poisoned")?;
                    driver.batch(peer, name, len, count)
                }),
            ));
        }
    }
    run_rounds(report, cases);
    let name = if large { "private 1 GiB" } else { "private 64 MiB" };
    let target = if large { 1.05 } else { 0.95 };
    report.ratio(&format!("{name} vs memcpy into a warm block"), &ours, &copy_key, target);
    for (key, target) in theirs {
        report.ratio(&format!("{name} vs {}", key.peer), &ours, &key, target);
    }
    report.fact(
        &format!("{name}: median µs"),
        format!("{:.0}", {
            let samples =
                timed(3, || worker.call("take", tensor.clone()).map(drop).map_err(Into::into))?;
            median(&samples)
        }),
    );
    Ok(())
}

/// From one worker through this process to another, against one hop.
fn forward(report: &mut Report, worker: &Worker) -> Result<(), Error> {
    let other = Worker::spawn(Command::this_executable().env(ROLE, "serve"))?;
    let len = 64 * MIB;
    let give = || -> Result<Value, Error> { Ok(worker.call("give", len as i64)?.into_value()) };
    let right = other.call("check", give()?)?;
    if *right.value() != Value::from(true) {
        return Err("the other worker sees other bytes".into());
    }
    other.call("take", give()?)?;
    let before = segment::calls();
    let one_key = key("ladder", "one hop: worker gives", len);
    let two_key = key("ladder", "forward: worker gives, host hands on, worker takes", len);
    let case = |key, batch| Case { key, copies: 0, count: 300, warm: (100, 20), batch };
    let cases = vec![
        case(
            one_key.clone(),
            Box::new(|count| timed(count, || give().map(drop))) as Box<dyn FnMut(usize) -> _>,
        ),
        case(
            two_key.clone(),
            Box::new(|count| {
                timed(count, || {
                    other.call("take", give()?)?;
                    Ok(())
                })
            }),
        ),
    ];
    run_rounds(report, cases);
    let after = segment::calls();
    let touched = (after.mapped - before.mapped) + (after.copied - before.copied);
    report.fact("mappings made and bytes copied by the host while forwarding", touched.to_string());
    report.ratio("forward A → host → B vs one hop", &two_key, &one_key, 2.3);
    Ok(())
}
