//! What proving a worker costs: from both hellos to a channel, for the rungs of host memory.

use std::time::Instant;

use ladder::{Command, Worker};

use crate::cases::Helper;
use crate::report::{Report, key, median};
use crate::{Error, ROLE};

/// About what a call and its answer take on the socket.
const FRAME: usize = 200;

/// A new worker each time: it has started and said hello when the clock starts, and has every page of its
/// canaries still to touch.
fn proofs(count: usize) -> Result<Vec<f64>, Error> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let command = Command::this_executable().env(ROLE, "values");
        let unproven = Worker::builder().greet(command)?;
        let started = Instant::now();
        let worker = unproven.prove()?;
        samples.push(started.elapsed().as_nanos() as f64 / 1e3);
        drop(worker);
    }
    Ok(samples)
}

pub(crate) fn run(report: &mut Report) -> Result<(), Error> {
    let raw = Helper::start(&format!("raw {FRAME} {FRAME}"))?;
    let (proof, ping) = (key("ladder", "proof of host memory", 0), key("socket", "ping-pong", 0));
    proofs(1)?;
    let mut multiples = Vec::new();
    for _ in 0..report.rounds {
        let pings = raw.ping(FRAME, FRAME, 400)?;
        let proofs = proofs(10)?;
        multiples.push(median(&proofs) / median(&pings));
        report.add(&ping, 0, Ok(pings));
        report.add(&proof, 0, Ok(proofs));
    }
    // What is wanted is 10 ms, whatever a ping-pong takes.
    report.fact("proof vs raw ping-pong", format!("{:.0} times", median(&multiples)));
    let worker = Worker::spawn(Command::this_executable().env(ROLE, "values"))?;
    for rung in worker.report().rungs {
        for proof in rung.proofs {
            let time = format!("{:.2} ms", proof.time.as_secs_f64() * 1e3);
            report.fact(&format!("{} from here to there", rung.rung), time);
        }
    }
    Ok(())
}
