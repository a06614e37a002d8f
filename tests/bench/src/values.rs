//! Small values of many parts: a struct of thirty fields, three of them tensors of a kilobyte.

use std::path::Path;
use std::time::Instant;

use ladder::{Command, Tensor, Value, Worker, from_value, to_value};
use serde::{Deserialize, Serialize};

use crate::peers::Driver;
use crate::report::{Report, key};
use crate::{Error, ROLE};

/// As in the peers' program.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Mixed {
    n0: i64,
    n1: i64,
    n2: i64,
    n3: i64,
    n4: i64,
    n5: i64,
    n6: i64,
    n7: i64,
    n8: i64,
    n9: i64,
    scale: f64,
    shift: f64,
    radius: f64,
    gain: f64,
    lower: f64,
    upper: f64,
    decay: f64,
    rate: f64,
    name: String,
    model: String,
    device: String,
    user: String,
    note: String,
    train: bool,
    verbose: bool,
    sizes: Vec<i64>,
    seed: Option<i64>,
    image: Tensor,
    mask: Tensor,
    weights: Tensor,
}

fn mixed() -> Result<Mixed, Error> {
    let elements: Vec<u8> = (0..1024usize).map(|at| (at % 251) as u8).collect();
    let tensor = || Tensor::from_bytes(elements.clone(), ladder::DType::F32, &[16, 16]);
    Ok(Mixed {
        n0: 0,
        n1: 1000,
        n2: 2000,
        n3: 3000,
        n4: 4000,
        n5: 5000,
        n6: 6000,
        n7: 7000,
        n8: 8000,
        n9: 9000,
        scale: 0.5,
        shift: 1.25,
        radius: 2.5,
        gain: 1e-3,
        lower: -1.0,
        upper: 1.0,
        decay: 0.99,
        rate: 1e-4,
        name: "job 17".into(),
        model: "resnet-50".into(),
        device: "cpu:0".into(),
        user: "somebody".into(),
        note: "a line of text, as people write them".into(),
        train: true,
        verbose: false,
        sizes: vec![640, 480, 3],
        seed: Some(42),
        image: tensor()?,
        mask: tensor()?,
        weights: tensor()?,
    })
}

fn right(tensor: &Tensor) -> Result<bool, Error> {
    let bytes = tensor.storage().read(tensor.layout().span())?;
    Ok(bytes[0] == 0 && bytes[1023] == (1023 % 251) as u8)
}

/// A worker that answers with what it got, as a value and as the struct.
pub(crate) fn methods() -> ladder::Methods {
    ladder::Methods::new().on("value", Ok).on_as("struct", |mixed: Mixed| Ok(mixed))
}

fn batch(worker: &Worker, typed: bool, count: usize) -> Result<Vec<f64>, Error> {
    let mut samples = Vec::with_capacity(count);
    for turn in 0..=count {
        let mixed = mixed()?;
        let value = to_value(&mixed)?;
        let started = Instant::now();
        let fine = if typed {
            let back: Mixed = worker.call_as("struct", &mixed)?;
            right(&back.weights)? && back.n9 == 9000
        } else {
            let reply = worker.call("value", value)?;
            let weights = reply.value().get("weights").and_then(Value::as_tensor);
            right(weights.ok_or("no tensor came back")?)?
        };
        let took = started.elapsed().as_nanos() as f64 / 1e3;
        if !fine {
            return Err("another value came back".into());
        }
        // The first is to warm up.
        if turn > 0 {
            samples.push(took);
        }
    }
    Ok(samples)
}

fn worker() -> Result<Worker, Error> {
    Ok(Worker::spawn(Command::this_executable().env(ROLE, "values"))?)
}

/// So many calls, and nothing else: for a profiler.
pub(crate) fn calls(count: usize) -> Result<(), Error> {
    let worker = worker()?;
    batch(&worker, false, count).map(drop)
}

/// Ten thousand calls of each, in rounds.
pub(crate) fn run(report: &mut Report, quick: bool, peers: Option<&Path>) -> Result<(), Error> {
    let count = if quick { 200 } else { 10_000 / report.rounds };
    let worker = worker()?;
    let mut driver = peers.map(Driver::start).transpose()?;
    let (value, typed) = (key("ladder", "value, echo", 3072), key("ladder", "struct, echo", 3072));
    let inline = key("ipc-channel", "struct, tensors in the message", 3072);
    let shared = key("ipc-channel", "struct, tensors in shared memory", 3072);
    for _ in 0..report.rounds {
        report.add(&value, 1, batch(&worker, false, count).map_err(|error| error.to_string()));
        report.add(&typed, 1, batch(&worker, true, count).map_err(|error| error.to_string()));
        if let Some(driver) = &mut driver {
            for (key, case) in [(&inline, "values"), (&shared, "values-in-shared-memory")] {
                let outcome = driver.batch("ipc-channel", case, 3072, count);
                report.add(key, 1, outcome.map_err(|error| error.to_string()));
            }
        }
    }
    let value_of = "value vs ipc-channel, tensors in shared memory";
    report.ratio(value_of, &value, &shared, 1.0);
    report.ratio("struct vs ipc-channel, tensors in shared memory", &typed, &shared, 1.0);
    report.ratio("value vs ipc-channel, tensors in the message", &value, &inline, 1.0);
    report.ratio("struct vs ipc-channel, tensors in the message", &typed, &inline, 1.0);
    let mixed = mixed()?;
    let started = Instant::now();
    for _ in 0..10_000 {
        let back: Mixed = from_value(to_value(&mixed)?)?;
        std::hint::black_box(back);
    }
    let each = started.elapsed().as_nanos() as f64 / 1e7;
    report.fact("struct to value and back, in this process", format!("{each:.1} µs"));
    Ok(())
}
