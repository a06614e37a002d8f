//! Whole conversations, frame by frame, against committed files: a change of the wire shows.
//!
//! In a transcript `>` is what the host sends and `<` what the worker sends, with the number of
//! descriptors. The test plays one side from the file and holds the other, real side to it.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ladder::{
    Array, Channel, Command, DType, Ladder, Methods, Object, OpaquePickle, Tensor, TensorMut,
    Value, Worker,
};
use link::Link;
use rung::Handle;
use testkit::{run_serially, trial};

type Outcome<T = ()> = Result<T, String>;

const ROLE: &str = "E2E_ROLE";

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// One line of a transcript.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    from_host: bool,
    descriptors: usize,
    json: String,
}

fn parse(transcript: &str) -> Outcome<Vec<Line>> {
    let lines = transcript.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let mut parts = line.splitn(3, ' ');
            let from_host = parts.next() == Some(">");
            let descriptors = parts.next().and_then(|n| n.parse().ok()).ok_or("a count")?;
            let json = parts.next().ok_or("a frame")?.to_owned();
            Ok(Line { from_host, descriptors, json })
        })
        .collect()
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(30))
}

/// A sealed segment of these bytes, as the played side of a transcript sends it.
fn segment() -> Outcome<Handle> {
    let bytes: Vec<u8> = (0..6u8).flat_map(|n| f32::from(n).to_le_bytes()).collect();
    let sealed = segment::Sealed::copy_from(&bytes).map_err(text)?;
    sealed.descriptor().map_err(text)
}

fn image() -> Outcome<Tensor> {
    Tensor::from_vec((0..6u8).map(f32::from).collect(), &[2, 3]).map_err(text)
}

/// The real side's numbers of leases and blocks, which go on from where its canaries left off: in the file
/// they begin at 1.
#[derive(Debug, Default)]
struct Numbers {
    leases: Option<u64>,
    blocks: Option<u64>,
}

impl Numbers {
    /// With every number after `key` in the list `list` changed.
    fn each(json: &str, list: &str, key: &str, mut change: impl FnMut(u64) -> u64) -> String {
        let Some(begins) = json.find(list) else { return json.to_owned() };
        let (before, rest) = json.split_at(begins);
        let (inside, after) = rest.split_at(rest.find(']').unwrap_or(rest.len()));
        let mut parts = inside.split(key);
        let mut out = format!("{before}{}", parts.next().unwrap_or_default());
        for part in parts {
            let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            let number = part[..end].parse().map_or(0, &mut change);
            out += &format!("{key}{number}{}", &part[end..]);
        }
        out + after
    }

    fn of_the_file(&mut self, json: &str) -> String {
        let Self { leases, blocks } = self;
        let lease = |n| n - *leases.get_or_insert(n - 1);
        let json = Self::each(json, "\"p\":[{\"r\":\"shm\"", "\"l\":", lease);
        let block = |n| n - *blocks.get_or_insert(n - 1);
        Self::each(&json, "\"p\":[{\"r\":\"shm\"", "\"b\":", block)
    }

    fn of_the_peer(&self, json: &str) -> String {
        Self::each(json, "\"rel\":[", "\"l\":", |n| n + self.leases.unwrap_or(0))
    }
}

/// Whether a frame is the line: what stands for `…` may be anything.
fn is_like(json: &str, line: &str) -> bool {
    let Some((first, others)) = line.split_once('…') else { return json == line };
    let (middle, last) = others.rsplit_once('…').unwrap_or(("", others));
    let inside = json.strip_prefix(first).and_then(|rest| rest.strip_suffix(last));
    let mut parts = middle.split('…');
    inside.is_some_and(|inside| {
        let after = |rest: &str, part: &str| rest.find(part).map(|at| at + part.len());
        parts.try_fold(inside, |rest, part| Some(&rest[after(rest, part)?..])).is_some()
    })
}

/// What the canaries left to be said comes first, until it is quiet.
fn settle(link: &Link) {
    while link.receive(Some(Instant::now() + Duration::from_millis(150))).is_ok() {}
}

/// Plays one side: sends its lines, and compares what the other side sends.
///
/// Where it plays from the hello on, what was accepted may go alone at any time, and is passed over.
fn play(link: &Link, lines: &[Line], host: bool, raw: bool) -> Outcome {
    let mut numbers = Numbers::default();
    for line in lines {
        if line.from_host == host {
            // A receipt that comes before the sender has noted that its descriptor went makes it go again, which
            // harms nobody, and would show.
            std::thread::sleep(Duration::from_millis(20));
            let handles: Vec<Handle> =
                (0..line.descriptors).map(|_| segment()).collect::<Result<_, _>>()?;
            link.send(&numbers.of_the_peer(&line.json), &handles, soon()).map_err(text)?;
            continue;
        }
        let frame = loop {
            let frame = link.receive(soon()).map_err(text)?;
            if !(raw && frame.json.contains("\"k\":\"more\"")) {
                break frame;
            }
        };
        let json = numbers.of_the_file(&frame.json);
        if !is_like(&json, &line.json) || frame.handles.len() != line.descriptors {
            return Err(format!(
                "the transcript has\n{} {}\nand what came is\n{} {json}",
                line.descriptors,
                line.json,
                frame.handles.len()
            ));
        }
    }
    Ok(())
}

/// Holds what the canaries left in the pool, so that whatever is sent goes in new blocks.
fn take_from_the_pool() -> Outcome<Vec<TensorMut>> {
    let take = |_| TensorMut::new(DType::U8, &[24]).map_err(text);
    (0..16).map(take).collect()
}

/// The real host, whose worker is played from the file by this binary in another process.
fn host(name: &'static str, calls: fn(&Worker) -> Outcome) -> Outcome {
    let command = Command::this_executable().env(ROLE, format!("play {name}"));
    let worker = Worker::builder().ladder(rungs()).spawn(command).map_err(text)?;
    std::thread::sleep(Duration::from_millis(400));
    let _taken = take_from_the_pool()?;
    let outcome = calls(&worker);
    let exit = worker.shutdown(Duration::from_secs(30));
    match (outcome, exit.status.success()) {
        (Ok(()), true) => Ok(()),
        (outcome, _) => Err(format!("{outcome:?}; {exit}: {}", exit.last_lines.join("\n"))),
    }
}

/// Of the host's memory alone: what is said of a driver is another matter on every machine.
fn rungs() -> Ladder {
    Ladder::of(vec![
        Arc::new(tier_shm::Shm),
        Arc::new(tier_numpy::Numpy),
        Arc::new(tier_pickle::Pickle),
        Arc::new(tier_inline::Inline),
    ])
}

/// The real host, whose worker is played from its hello on: it answers no canary, and is refused.
fn host_that_refuses(name: &'static str, says: &'static str) -> Outcome {
    let command = Command::this_executable().env(ROLE, format!("play {name}"));
    let error = Worker::builder().ladder(rungs()).spawn(command).err().ok_or("let in")?.to_string();
    if error.contains(says) { Ok(()) } else { Err(error) }
}

/// The real worker, whose host is played from the file.
fn worker(name: &'static str) -> Outcome {
    let lines = parse(&std::fs::read_to_string(path(name)).map_err(text)?)?;
    let command = Command::this_executable().env(ROLE, "serve");
    let by_hand = Worker::builder()
        .ladder(rungs())
        .greet(command)
        .map_err(text)?
        .prove_by_hand()
        .map_err(text)?;
    settle(by_hand.link());
    let outcome = play(by_hand.link(), &lines, true, false);
    by_hand.link().close();
    let exit = by_hand.process().ok_or("no worker")?.end(Duration::from_secs(30));
    match (outcome, exit.status.success()) {
        (Ok(()), true) => Ok(()),
        (outcome, _) => Err(format!("{}; {exit}", outcome.err().unwrap_or_default())),
    }
}

fn serve() -> ExitCode {
    let Ok(Some(channel)) = Channel::from_env_with(&rungs(), None) else {
        return ExitCode::from(90);
    };
    let Ok(_taken) = take_from_the_pool() else {
        return ExitCode::from(91);
    };
    let methods =
        Methods::new().on("echo", Ok).on("make", |_| Ok(Value::map([("image", image()?)])));
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn played(name: &str) -> Outcome {
    let lines = parse(&std::fs::read_to_string(path(name)).map_err(text)?)?;
    if name.starts_with("raw") {
        let socket = io::stdin().as_fd().try_clone_to_owned().map_err(text)?;
        return play(&Link::over(socket), &lines, false, true);
    }
    let unproven = Channel::greet_from_env(&rungs(), None).map_err(text)?;
    let by_hand = unproven.ok_or("no host")?.prove_by_hand().map_err(text)?;
    settle(by_hand.link());
    play(by_hand.link(), &lines, false, false)
}

fn calls_and_answers(worker: &Worker) -> Outcome {
    let value = Value::map([("image", Value::from(image()?)), ("radius", Value::from(2.5))]);
    let reply = worker.call("blur", value).map_err(text)?;
    let back = reply.value().get("image").and_then(Value::as_tensor);
    let back = back.ok_or("a tensor")?.to_vec::<f32>().map_err(text)?;
    if back != [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] {
        return Err(format!("{back:?}"));
    }
    drop(reply);
    // Its receipt goes before anything else does.
    std::thread::sleep(Duration::from_millis(200));
    worker.call("nothing", Value::Null).err().ok_or("an error")?;
    Ok(())
}

fn refusals(worker: &Worker) -> Outcome {
    let value = Value::from(image()?);
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    if *reply.value() == value { Ok(()) } else { Err("another value".into()) }
}

/// One of each kind that is neither a tensor nor plain, over the 24 bytes that transcripts have.
fn every_kind() -> Outcome<Value> {
    let bytes = image()?.to_bytes().map_err(text)?;
    let swapped = Array::from_bytes(bytes.clone(), ">i4".parse().map_err(text)?, &[3, 2]);
    let plain = Array::from_tensor(&image()?).map_err(text)?;
    let schema = Value::map([("n", 1)]);
    let mesh = Object::new("tests/mesh", 2, schema, vec![image()?.into()]).map_err(text)?;
    Ok(Value::map([
        ("swapped", Value::from(swapped.map_err(text)?)),
        ("plain", plain.into()),
        ("mesh", mesh.into()),
        ("pickle", OpaquePickle::new(bytes).into()),
    ]))
}

fn kinds(worker: &Worker) -> Outcome {
    let value = every_kind()?;
    let reply = worker.call("echo", value.clone()).map_err(text)?;
    if *reply.value() == value { Ok(()) } else { Err(format!("{:?}", reply.value())) }
}

fn a_block_again(worker: &Worker) -> Outcome {
    let shared = ladder::share(&image()?).map_err(text)?;
    for _ in 0..2 {
        let reply = worker.call("take", shared.clone()).map_err(text)?;
        if *reply.value() != Value::Null {
            return Err(format!("{:?}", reply.value()));
        }
        // What nothing takes along goes alone.
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

fn main() -> ExitCode {
    match std::env::var(ROLE).as_deref() {
        Ok("serve") => return serve(),
        Ok(role) => {
            return match played(role.trim_start_matches("play ")) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    let _ = io::Write::write_all(&mut io::stderr(), error.as_bytes());
                    ExitCode::FAILURE
                }
            };
        }
        Err(_) => {}
    }
    run_serially(vec![
        trial("a_host_that_calls", || host("host-calls.txt", calls_and_answers)),
        trial("a_host_whose_storage_is_refused", || host("host-refused.txt", refusals)),
        trial("a_host_whose_block_is_not_known", || host("host-unknown-block.txt", a_block_again)),
        trial("a_host_that_calls_with_every_kind", || host("host-kinds.txt", kinds)),
        trial("a_host_that_proves", || {
            host_that_refuses(
                "raw-canaries.txt",
                "refused: shm, from here to there: the system has no memory",
            )
        }),
        trial("a_worker_that_serves_every_kind", || worker("worker-kinds.txt")),
        trial("a_worker_that_serves", || worker("worker-serves.txt")),
        trial("a_worker_whose_answer_is_refused", || worker("worker-refused.txt")),
    ])
}
