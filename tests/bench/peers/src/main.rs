//! ipc-channel and iceoryx2 on the work of `cargo xtask bench host`.
//!
//! The driver reads lines `PEER CASE BYTES COUNT` and answers each with the microseconds of COUNT round
//! trips, separated by spaces, or with `error: …`. It runs on CPU 0, the processes it starts on CPU 1.

use std::error::Error;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use iceoryx2::prelude::*;
use ipc_channel::ipc::{self as ipcc, IpcOneShotServer, IpcReceiver, IpcSender, IpcSharedMemory};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const META: &str = r#"{"id":17,"method":"run","dtype":"u8","shape":[1024],"offset":0,"name":"x"}"#;

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // On a machine with one CPU everything runs there.
    let _ = sched_setaffinity(None, &set);
}

fn source(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// Both ends, and whether they are right.
fn touch(bytes: &[u8]) -> bool {
    bytes[0] == 0 && bytes[bytes.len() - 1] == ((bytes.len() - 1) % 251) as u8
}

fn us(since: Instant) -> f64 {
    since.elapsed().as_nanos() as f64 / 1e3
}

fn start(arguments: &[String]) -> Outcome<Child> {
    Ok(Command::new(std::env::current_exe()?).args(arguments).stdout(Stdio::piped()).spawn()?)
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[derive(Serialize, Deserialize)]
struct Message {
    meta: String,
    memory: Option<IpcSharedMemory>,
    mixed: Option<Box<Mixed<Vec<u8>>>>,
    mixed_shared: Option<Box<Mixed<IpcSharedMemory>>>,
}

/// The struct of `cargo xtask bench values`.
#[derive(Serialize, Deserialize)]
struct Mixed<T> {
    n0: i64, n1: i64, n2: i64, n3: i64, n4: i64, n5: i64, n6: i64, n7: i64, n8: i64, n9: i64,
    scale: f64, shift: f64, radius: f64, gain: f64, lower: f64, upper: f64, decay: f64, rate: f64,
    name: String, model: String, device: String, user: String, note: String,
    train: bool, verbose: bool,
    sizes: Vec<i64>,
    seed: Option<i64>,
    image: Tensor<T>, mask: Tensor<T>, weights: Tensor<T>,
}

#[derive(Serialize, Deserialize)]
struct Tensor<T> {
    dtype: String,
    shape: Vec<usize>,
    elements: T,
}

fn mixed<T>(make: impl Fn(&[u8]) -> T) -> Mixed<T> {
    let tensor = || Tensor { dtype: "f32".into(), shape: vec![16, 16], elements: make(&source(1024)) };
    let text = |text: &str| text.to_owned();
    Mixed {
        n0: 0, n1: 1000, n2: 2000, n3: 3000, n4: 4000, n5: 5000, n6: 6000, n7: 7000, n8: 8000, n9: 9000,
        scale: 0.5, shift: 1.25, radius: 2.5, gain: 1e-3, lower: -1.0, upper: 1.0, decay: 0.99, rate: 1e-4,
        name: text("job 17"), model: text("resnet-50"), device: text("cpu:0"), user: text("somebody"),
        note: text("a line of text, as people write them"),
        train: true, verbose: false,
        sizes: vec![640, 480, 3],
        seed: Some(42),
        image: tensor(), mask: tensor(), weights: tensor(),
    }
}

impl Message {
    fn of(meta: &str) -> Self {
        Self { meta: meta.into(), memory: None, mixed: None, mixed_shared: None }
    }
}

type Ends = (IpcSender<Message>, IpcReceiver<Message>);

fn ipc_child(name: String) -> Outcome {
    pin(1);
    let (to_child, from_parent) = ipcc::channel::<Message>()?;
    let (to_parent, from_child) = ipcc::channel::<Message>()?;
    let boot: IpcSender<Ends> = IpcSender::connect(name)?;
    boot.send((to_child, from_child))?;
    while let Ok(message) = from_parent.recv() {
        if let Some(memory) = &message.memory {
            black_box(touch(memory));
        }
        if let Some(mixed) = &message.mixed {
            black_box(touch(&mixed.image.elements));
        }
        if let Some(mixed) = &message.mixed_shared {
            black_box(touch(&mixed.image.elements));
        }
        to_parent.send(message)?;
    }
    Ok(())
}

struct IpcChannel {
    ends: Ends,
    _child: Killed,
}

impl IpcChannel {
    fn start() -> Outcome<Self> {
        let (server, name) = IpcOneShotServer::<Ends>::new()?;
        let child = Killed(start(&["ipc-child".into(), name])?);
        Ok(Self { ends: server.accept()?.1, _child: child })
    }

    /// A value of many parts there and back, its tensors in the message or each in shared memory.
    fn values(&self, shared: bool, count: usize) -> Outcome<Vec<f64>> {
        let (to, from) = &self.ends;
        let mut samples = Vec::new();
        for turn in 0..=count {
            // The struct is there, as the caller has it; sending it is what is measured.
            let mut message = Message::of("");
            let private = mixed(<[u8]>::to_vec);
            let started = Instant::now();
            if shared {
                message.mixed_shared = Some(Box::new(mixed(IpcSharedMemory::from_bytes)));
            } else {
                message.mixed = Some(Box::new(private));
            }
            to.send(message)?;
            let back = from.recv()?;
            let right = match (&back.mixed, &back.mixed_shared) {
                (Some(mixed), None) => touch(&mixed.weights.elements) && mixed.n9 == 9000,
                (None, Some(mixed)) => touch(&mixed.weights.elements) && mixed.n9 == 9000,
                _ => false,
            };
            let took = us(started);
            if !right {
                return Err("another value came back".into());
            }
            if turn > 0 {
                samples.push(took);
            }
        }
        Ok(samples)
    }

    fn run(&self, case: &str, bytes: usize, count: usize) -> Outcome<Vec<f64>> {
        let (to, from) = &self.ends;
        if case.starts_with("values") {
            return self.values(case == "values-in-shared-memory", count);
        }
        let source = source(bytes);
        let kept = (case == "shared").then(|| IpcSharedMemory::from_bytes(&source));
        let mut samples = Vec::new();
        for turn in 0..=count {
            let started = Instant::now();
            let memory = kept.clone().unwrap_or_else(|| IpcSharedMemory::from_bytes(&source));
            let message = Message { memory: Some(memory), ..Message::of(META) };
            to.send(message)?;
            let back = from.recv()?;
            let right = back.memory.as_ref().is_some_and(|memory| touch(memory));
            let took = us(started);
            if !right {
                return Err("other bytes came back".into());
            }
            // The first is to warm up.
            if turn > 0 {
                samples.push(took);
            }
        }
        Ok(samples)
    }
}

/// One batch over a service of its own: the worker answers 8 bytes.
fn iceoryx(
    len: usize,
    is_child: bool,
    events: bool,
    case: &str,
    count: usize,
    tag: &str,
) -> Outcome<Vec<f64>> {
    set_log_level(LogLevel::Error);
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service = node
        .service_builder(&tag.try_into()?)
        .request_response::<[u8], [u8]>()
        .max_servers(1)
        .max_clients(1)
        .max_active_requests_per_client(1)
        .max_loaned_requests(1)
        .max_response_buffer_size(1)
        .max_borrowed_responses_per_pending_response(1)
        .open_or_create()?;
    let event = |name: &str| -> Outcome<_> {
        Ok(node
            .service_builder(&format!("{tag}_{name}").as_str().try_into()?)
            .event()
            .open_or_create()?)
    };
    let (requests, responses) = (event("request")?, event("response")?);
    if is_child {
        pin(1);
        let server = service.server_builder().initial_max_slice_len(8).create()?;
        let listener = requests.listener_builder().create()?;
        let notifier = responses.notifier_builder().create()?;
        println!("ready");
        loop {
            let request = loop {
                if let Some(request) = server.receive()? {
                    break request;
                }
                if events {
                    listener.blocking_wait(|_| {})?;
                } else {
                    std::hint::spin_loop();
                }
            };
            let right = touch(request.payload());
            request.loan_slice_uninit(8)?.write_from_slice(&[u8::from(right); 8]).send()?;
            drop(request);
            if events {
                notifier.notify()?;
            }
        }
    }
    let kind = if events { "1" } else { "0" };
    let mut child =
        Killed(start(&["ice-child".into(), len.to_string(), kind.into(), tag.into()])?);
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let client = service.client_builder().initial_max_slice_len(len).create()?;
    let listener = responses.listener_builder().create()?;
    let notifier = requests.notifier_builder().create()?;
    let source = source(len);
    let private = case == "private";
    let mut samples = Vec::new();
    // The first turns fault the pages in, and put the contents there: the service is new each time.
    let warm = if private { 2 } else { 20 };
    for turn in 0..count + warm {
        let started = Instant::now();
        let request = client.loan_slice_uninit(len)?;
        let request = if private || turn < 2 {
            request.write_from_slice(&source)
        } else {
            // SAFETY: there is one loan at a time, so it is the memory that was written in the first
            // turns; the worker checks both ends of it.
            unsafe { request.assume_init() }
        };
        let pending = request.send()?;
        if events {
            notifier.notify()?;
        }
        let response = loop {
            if let Some(response) = pending.receive()? {
                break response;
            }
            if events {
                listener.blocking_wait(|_| {})?;
            } else {
                std::hint::spin_loop();
            }
        };
        let right = response.payload()[0] == 1;
        let took = us(started);
        if !right && private {
            return Err("the worker saw other bytes".into());
        }
        if turn >= warm {
            samples.push(took);
        }
    }
    Ok(samples)
}

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("ipc-child") => return ipc_child(arguments[1].clone()),
        Some("ice-child") => {
            let (len, events) = (arguments[1].parse()?, arguments[2] == "1");
            return iceoryx(len, true, events, "", 0, &arguments[3]).map(drop);
        }
        _ => {}
    }
    pin(0);
    let mut ipc = None;
    let mut number = 0;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let [peer, case, bytes, count] = words[..] else { return Err("not a command".into()) };
        let (bytes, count) = (bytes.parse()?, count.parse()?);
        number += 1;
        let tag = format!("bench_{}_{number}", std::process::id());
        let outcome = match peer {
            "ipc-channel" => {
                if ipc.is_none() {
                    ipc = Some(IpcChannel::start()?);
                }
                ipc.as_ref().ok_or("no channel")?.run(case, bytes, count)
            }
            "iceoryx2-event" => iceoryx(bytes, false, true, case, count, &tag),
            "iceoryx2-busy" => iceoryx(bytes, false, false, case, count, &tag),
            _ => return Err("no such peer".into()),
        };
        let answer = match outcome {
            Ok(samples) => {
                samples.iter().map(|sample| format!("{sample:.3}")).collect::<Vec<_>>().join(" ")
            }
            Err(error) => format!("error: {error}"),
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
