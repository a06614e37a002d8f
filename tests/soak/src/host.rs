//! The host: a thread for each worker that asks things of it, and one that kills.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ladder::{CallError, Command, DType, Output, Value, Worker};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use testkit::census::Census;
use testkit::faulty::Trigger;

use crate::watermark::Held;
use crate::worker::{device, give, ladder};

const WORKERS: usize = 4;

type Outcome<T = ()> = Result<T, String>;

/// What was done.
#[derive(Debug, Default)]
struct Counts {
    values: AtomicU64,
    tensors: AtomicU64,
    bytes: AtomicU64,
    forwards: AtomicU64,
    held: AtomicU64,
    demotions: AtomicU64,
    kills: AtomicU64,
    /// Calls that ended with their worker.
    lost: AtomicU64,
}

fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

impl Counts {
    fn line(&self) -> String {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        format!(
            "{} values, {} tensors of {} MiB, {} forwards, {} held, {} demotions; {} kills, {} calls lost with their worker",
            read(&self.values),
            read(&self.tensors),
            read(&self.bytes) >> 20,
            read(&self.forwards),
            read(&self.held),
            read(&self.demotions),
            read(&self.kills),
            read(&self.lost)
        )
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Soak {
    workers: [Mutex<Arc<Worker>>; WORKERS],
    counts: Counts,
    done: AtomicBool,
}

fn worker() -> Outcome<Arc<Worker>> {
    let command =
        Command::this_executable().output(Output::Discard).grace(Duration::from_millis(500));
    let builder = Worker::builder().ladder(ladder(&Trigger::never()));
    builder.spawn(command).map(Arc::new).map_err(|error| error.to_string())
}

pub(crate) fn run(time: Duration, seed: u64) -> Outcome {
    // What a process has once it has done everything before.
    drop(worker()?);
    let before = Census::take();
    let started = Instant::now();
    let soak = Soak {
        workers: [worker()?.into(), worker()?.into(), worker()?.into(), worker()?.into()],
        counts: Counts::default(),
        done: AtomicBool::new(false),
    };
    let watched = std::thread::scope(|scope| -> Outcome<(Held, Held)> {
        let mut threads = Vec::new();
        for own in 0..WORKERS {
            let soak = &soak;
            threads.push(scope.spawn(move || soak.ask(own, seed + own as u64)));
        }
        let killer = scope.spawn(|| soak.kill(seed + 100));
        let held = soak.watch(started, time, &threads);
        soak.done.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        killer.join().map_err(|_| "the killer panicked")??;
        Ok(held)
    });
    let line = soak.counts.line();
    drop(soak);
    let (first, all) = watched.map_err(|error| format!("{error}; after {line}"))?;
    println!("{line}");
    println!("at most in the first quarter: {first}\nat most: {all}");
    before.settle()?;
    let drift = all.drift_from(first);
    if !drift.is_empty() {
        return Err(format!("it grew: {}", drift.join(", ")));
    }
    println!("nothing is left, and nothing grew, in {} s", started.elapsed().as_secs());
    Ok(())
}

impl Soak {
    fn worker(&self, number: usize) -> Arc<Worker> {
        Arc::clone(&lock(&self.workers[number]))
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    /// Looks at what is held until the time is over, or a thread has ended; the most in the first quarter, and in all.
    fn watch<T>(
        &self,
        started: Instant,
        time: Duration,
        threads: &[std::thread::ScopedJoinHandle<'_, T>],
    ) -> (Held, Held) {
        let (mut first, mut all) = (Held::default(), Held::default());
        let mut told = Instant::now();
        while started.elapsed() < time && threads.iter().all(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(100));
            let now = Held::now();
            all = all.max(now);
            if started.elapsed() < time / 4 {
                first = all;
            }
            if told.elapsed() > Duration::from_secs(15) {
                told = Instant::now();
                println!("{:5} s: {}; {now}", started.elapsed().as_secs(), self.counts.line());
            }
        }
        (first, all)
    }

    /// Ends workers at any moment, and starts others in their place.
    fn kill(&self, seed: u64) -> Outcome {
        let mut random = fastrand::Rng::with_seed(seed);
        while !self.is_done() {
            std::thread::sleep(Duration::from_millis(random.u64(50..1500)));
            let next = worker()?;
            let place = &self.workers[random.usize(..WORKERS)];
            let before = std::mem::replace(&mut *lock(place), next);
            testkit::peer::kill(before.process().pid()).map_err(|error| error.to_string())?;
            add(&self.counts.kills, 1);
        }
        Ok(())
    }

    /// Asks one thing after another of a worker, whoever that is.
    fn ask(&self, own: usize, seed: u64) -> Outcome {
        let mut random = fastrand::Rng::with_seed(seed);
        let config = Config { failure_persistence: None, ..Config::default() };
        let mut bytes = [0; 32];
        random.fill(&mut bytes);
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(config, rng);
        let any = testkit::values::any_value();
        while !self.is_done() {
            let worker = self.worker(own);
            let asked = match random.u32(..100) {
                0..40 => {
                    let value = any.new_tree(&mut runner).map_err(|why| why.to_string())?.current();
                    self.echo(&worker, value, &self.counts.values)
                }
                40..70 => {
                    let tensor = give(random.u64(..1 << 62)).map_err(|why| why.to_string())?;
                    add(&self.counts.bytes, tensor.count() as u64);
                    self.echo(&worker, tensor.into(), &self.counts.tensors)
                }
                70..85 => self.forward(&worker, &self.worker(random.usize(..WORKERS)), &mut random),
                85..98 => {
                    let tensor = give(random.u64(..1 << 62)).map_err(|why| why.to_string())?;
                    add(&self.counts.held, 1);
                    worker.call("hold", tensor).map(drop).map_err(Failed::Call)
                }
                _ => self.demote(&worker, random.u64(..1 << 62)),
            };
            match asked {
                Ok(()) => {}
                Err(Failed::Call(error)) if error.is_gone() => add(&self.counts.lost, 1),
                Err(Failed::Call(error)) => return Err(error.to_string()),
                Err(Failed::Wrong(what)) => return Err(what),
            }
        }
        Ok(())
    }

    fn echo(&self, worker: &Worker, value: Value, counter: &AtomicU64) -> Asked {
        let reply = worker.call("echo", value.clone())?;
        add(counter, 1);
        if *reply.value() == value {
            Ok(())
        } else {
            Err(Failed::Wrong(format!("{value:?} came back as another")))
        }
    }

    /// From one worker to another, unopened here.
    fn forward(&self, from: &Worker, to: &Worker, random: &mut fastrand::Rng) -> Asked {
        let seed = random.u64(..1 << 62) as i64;
        let given = from.call("give", seed)?.into_value();
        let reply = to.call("is", Value::list([Value::from(seed), given]))?;
        add(&self.counts.forwards, 1);
        if *reply.value() == Value::from(true) {
            Ok(())
        } else {
            Err(Failed::Wrong(format!("{seed} is another there")))
        }
    }

    /// The worker's highest rung breaks: the same call goes by a lower one, and so does what follows.
    fn demote(&self, worker: &Worker, seed: u64) -> Asked {
        worker.call("break", Value::Null)?;
        for turn in 0..2 {
            let bytes = testkit::values::contents(seed + turn, 5000, DType::U8);
            let tensor = testkit::device::tensor(device(), &bytes);
            let reply =
                worker.call("bytes", tensor.map_err(|why| Failed::Wrong(why.to_string()))?)?;
            let rode = reply.sent().legs[0].rung.clone();
            if rode.as_str() != "far" || *reply.value() != Value::Bytes(bytes.into()) {
                return Err(Failed::Wrong(format!("{rode} after near broke, or other bytes")));
            }
        }
        add(&self.counts.demotions, 1);
        Ok(())
    }
}

type Asked = Result<(), Failed>;

enum Failed {
    Call(CallError),
    Wrong(String),
}

impl From<CallError> for Failed {
    fn from(error: CallError) -> Self {
        Self::Call(error)
    }
}
