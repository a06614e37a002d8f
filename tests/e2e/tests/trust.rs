//! Peers who are not trusted, played by plain Python: what they can still write is copied out or not taken at all, and
//! no helper of ours makes them polite. Of Linux alone, with a `python3` of the standard library.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ladder::{
    Access, CallOptions, Channel, Command, DType, Device, Failure, Ladder, Methods, Output, Peer,
    RungId, Tensor, TensorMut, Untrusted, Value, Worker, WorkerBuilder,
};
use rung::{
    Carrier, Fault, Fill, LeaseId, Offer, Packed, Parcel, Reach, Reason, Receipt, Refusal, Rung,
    Session, Storage, Trust,
};
use testkit::census::Census;
use testkit::{run_serially, trial};

type Outcome<T = ()> = Result<T, String>;

const ROLE: &str = "E2E_ROLE";
const LIMIT: Duration = Duration::from_secs(5);

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn interpreter() -> String {
    std::env::var("LADDER_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// A worker in Python that behaves in a manner.
fn python(kind: &str, builder: WorkerBuilder) -> Outcome<Worker> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/peer.py");
    let command = Command::new(interpreter()).arg(script).arg(kind).grace(Duration::ZERO);
    builder.spawn(command).map_err(text)
}

/// One of ours, of this very executable.
fn ours(builder: WorkerBuilder) -> Outcome<Worker> {
    let command = Command::this_executable().env(ROLE, "ours").output(Output::Discard);
    builder.spawn(command).map_err(text)
}

fn sealed() -> WorkerBuilder {
    Worker::builder().untrusted(Untrusted::Sealed)
}

fn image() -> Tensor {
    Tensor::from_vec((0..60_000u32).collect(), &[200, 300]).unwrap()
}

fn bytes() -> Tensor {
    Tensor::from_vec(vec![7u8; 1 << 16], &[1 << 16]).unwrap()
}

fn born(fill: u8) -> Outcome<Tensor> {
    let mut tensor = TensorMut::new(DType::U8, &[1 << 16]).map_err(text)?;
    tensor.as_bytes_mut().fill(fill);
    tensor.share().map_err(text)
}

fn is_refused_in_place(tensor: &Tensor) -> bool {
    tensor.as_slice::<u8>().is_err_and(|why| why.reason() == Reason::PeerNotTrusted)
}

fn a_worker_in_another_language_does_the_whole_handshake() -> Outcome {
    let before = Census::take();
    for builder in [Worker::builder(), sealed()] {
        let worker = python("honest", builder)?;
        let value = Value::list([image().into(), Value::from("text"), Value::from(0.1)]);
        for _ in 0..3 {
            let reply = worker.call("echo", value.clone()).map_err(text)?;
            check(*reply.value() == value, reply.value())?;
            // Sealed for good, on both ways: nothing needs to be trusted.
            let (there, back) = (reply.sent().at("$[0]"), reply.received());
            check(there.is_some_and(|leg| leg.access == Access::Sealed), there)?;
            check(back.at("$[0]").is_some_and(|leg| leg.access == Access::Sealed), &back)?;
            check(
                reply.value().items().unwrap()[0].as_tensor().unwrap().as_slice::<u32>().is_ok(),
                "not lent",
            )?;
        }
        drop(worker);
    }
    before.settle()
}

fn what_its_owner_still_writes_is_copied_out() -> Outcome {
    let worker = python("writes-what-it-lent", Worker::builder())?;
    let reply = worker.call("lend", image()).map_err(text)?;
    let tensor = reply.value().as_tensor().unwrap();
    check(is_refused_in_place(tensor), tensor)?;
    let received = reply.received();
    check(received.at("$").is_some_and(|leg| leg.access == Access::CopiedOut), &received)?;
    // What was copied out is this process's own, of whatever was there meanwhile.
    let mine = tensor.to_vec::<u8>().map_err(text)?;
    check(mine.iter().all(|byte| matches!(byte, 1 | 2)), &mine[..8])
}

/// A peer has the descriptors of what it is lent, and of what it lent: it can neither change nor take away any of it.
fn what_a_peer_holds_it_cannot_change() -> Outcome {
    let worker = python("tells-what-it-changed", Worker::builder())?;
    let shared = born(8)?;
    for _ in 0..3 {
        let value = Value::list([shared.clone(), bytes()]);
        let reply = worker.call("any", value).map_err(text)?;
        check(reply.value().items().is_some_and(<[Value]>::is_empty), reply.value())?;
        check(shared.as_slice::<u8>().map_err(text)?.iter().all(|byte| *byte == 8), "changed")?;
    }
    let worker = python("cuts-off-what-it-sent", Worker::builder())?;
    let reply = worker.call("any", image()).map_err(text)?;
    std::thread::sleep(Duration::from_millis(50));
    let tensor = reply.value().as_tensor().unwrap();
    check(tensor.as_slice::<u8>().map_err(text)?.iter().all(|byte| *byte == 0), "changed")
}

fn nothing_is_taken_that_is_not_sealed() -> Outcome {
    let before = Census::take();
    let worker = python("lends-what-it-can-write", sealed())?;
    let options = CallOptions::new().limit(LIMIT);
    let error = worker.call_with("lend", image(), options).unwrap_err();
    check(error.to_string().contains("the segment lacks a seal"), text(&error))?;
    drop((worker, error));
    before.settle()
}

/// Of workers that our library runs in: what each policy makes of one and the same worker.
fn the_route_tells_the_policies_apart() -> Outcome {
    let cases = [
        (Worker::builder(), Access::Lent, true, 0),
        (Worker::builder().untrusted(Untrusted::CopiedOut), Access::CopiedOut, false, 0),
        (sealed(), Access::Sealed, true, 1),
    ];
    for (builder, access, in_place, copies) in cases {
        let worker = ours(builder)?;
        for _ in 0..3 {
            // Born shared over there: without a copy, where that is taken.
            let reply = worker.call("born", 5).map_err(text)?;
            let received = reply.received();
            let leg = received.at("$").ok_or("no leg")?;
            check(leg.access == access && leg.copies == copies, leg)?;
            // At the first attempt: nothing that is not taken was sent.
            check(leg.declined.is_empty(), leg)?;
            let tensor = reply.value().as_tensor().unwrap();
            check(tensor.as_slice::<u8>().is_ok() == in_place, leg)?;
            check(tensor.to_vec::<u8>().map_err(text)? == vec![5; 1 << 16], "other bytes")?;
        }
        // And a part of something large goes alone where it has to be copied.
        let reply = worker.call("part", 5).map_err(text)?;
        let (tensor, whole) = (reply.value().as_tensor().unwrap(), 1 << 16);
        let is_alone = tensor.storage().len() < whole;
        check(is_alone == (access == Access::Sealed), tensor.storage().len())?;
        check(tensor.to_vec::<u8>().map_err(text)? == vec![5; 100], "other bytes")?;
    }
    Ok(())
}

/// What goes to whom is not trusted is never written again; what it seals goes on to others as it is.
fn what_was_sealed_is_forwarded_without_a_copy() -> Outcome {
    let (first, second) = (ours(sealed())?, ours(Worker::builder())?);
    let reply = first.call("born", 6).map_err(text)?;
    let reply = second.call("echo", reply.value().clone()).map_err(text)?;
    let sent = reply.sent().at("$").ok_or("no leg")?.clone();
    check(sent.copies == 0 && sent.access == Access::Sealed, &sent)?;
    // The other way round it has to be copied: what is lent is not taken.
    let lent = second.call("born", 7).map_err(text)?;
    let untrusting = ours(sealed())?;
    let reply = untrusting.call("echo", lent.value().clone()).map_err(text)?;
    // To the worker, who trusts its host, it went as it was, and back in a sealed block.
    check(reply.sent().at("$").is_some_and(|leg| leg.copies == 0), reply.sent())?;
    let tensor = reply.value().as_tensor().unwrap();
    check(tensor.as_slice::<u8>().map_err(text)?.iter().all(|byte| *byte == 7), "other bytes")
}

/// A path of the host's, in every text of its own.
const SECRET: &str = "/home/host/secret";

/// A rung for a device that is not there, and that says where it looked: when it is asked at all, or when it is to be
/// used.
#[derive(Debug, Clone)]
struct Talkative {
    id: RungId,
    offers: bool,
    says: &'static str,
}

impl Rung for Talkative {
    fn id(&self) -> RungId {
        self.id.clone()
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        if !self.offers {
            return Err(Refusal::new(Reason::NoDriver, self.says));
        }
        Ok(Offer::of_version(self.id(), 1)?)
    }

    fn open(&self, _: &Offer, _: &Offer, _: Trust) -> Result<Session, Refusal> {
        Ok(Session::Carrier(Box::new(self.clone())))
    }
}

impl Carrier for Talkative {
    fn export(&self, _: &Arc<Storage>) -> Result<Packed, Refusal> {
        Err(Refusal::new(Reason::System, self.says))
    }

    fn devices(&self) -> Vec<(Device, Reach)> {
        vec![(Device::Cuda([7; 16]), Reach::Ready)]
    }

    fn specimen(&self, _: Device, _: usize, _: Fill<'_>) -> Result<Storage, Refusal> {
        Err(Refusal::new(Reason::System, self.says))
    }

    fn import(&self, _: Parcel) -> Result<Storage, Fault> {
        Err(Fault::new(Reason::System, self.says))
    }

    fn receipt(&self, lease: LeaseId) -> Receipt {
        Receipt { rung: self.id(), lease, meta: None, handles: Vec::new() }
    }

    fn released(&self, _: Receipt) {}

    fn peer_gone(&self) {}
}

fn talkative(says: &'static str, offers: bool) -> Ladder {
    let rung = |id, offers| Arc::new(Talkative { id: RungId::new(id), offers, says });
    Ladder::of(vec![
        rung("talks", offers),
        rung("fails", true),
        Arc::new(tier_shm::Shm),
        Arc::new(tier_inline::Inline),
    ])
}

/// What a host says of itself when something goes wrong is that it did, and not where, with what, or to whom.
fn nothing_that_a_peer_hears_is_of_this_process() -> Outcome {
    let handler = Methods::new()
        .on("panic", |_| -> Result<Value, Failure> { panic!("{SECRET}") })
        .on("ask another", |_| {
            // A third process, whose last words are not the caller's to hear.
            let command = Command::this_executable().env(ROLE, "last words");
            let worker = Worker::spawn(command)?;
            Ok(worker.call("die", Value::Null)?.into_value())
        })
        .on("say", |_| Err::<Value, _>(Failure::new("no", "said on purpose")))
        .on("start nothing", |_| {
            Worker::spawn(Command::new(SECRET))?;
            Ok(Value::Null)
        });
    let command = Command::this_executable().env(ROLE, "listens").output(Output::Discard);
    let builder = Worker::builder().ladder(talkative(SECRET, false)).handler(handler);
    let worker = builder.spawn(command).map_err(text)?;
    let reply = worker.call("heard", Value::Null).map_err(text)?;
    let heard = reply.value().as_str().ok_or("no text")?.to_owned();
    // It heard of all that went wrong, and of nothing else.
    for what in
        ["NoDriver", "a system call failed", "panicked", "the handler failed", "said on purpose"]
    {
        check(heard.contains(what), (what, &heard))?;
    }
    check(!heard.contains("secret"), &heard)?;
    // The host itself knows where.
    check(format!("{:?}", worker.report()).contains(SECRET), worker.report())
}

/// The worker's side: everything that it hears of the host.
fn heard(host: &Peer) -> String {
    let mut heard = format!("{:#?}", host.report());
    for rung in host.report().rungs {
        for proof in &rung.proofs {
            heard += &format!(
                "{} {:?} {:?}; ",
                rung.rung,
                proof.sending.usable(),
                proof.receiving.usable()
            );
        }
    }
    for method in ["panic", "ask another", "start nothing", "say"] {
        heard += &format!("{:?}; ", host.call(method, Value::Null).map_err(text));
    }
    heard
}

/// What each misbehaviour is told, or that it does not matter.
const MISCHIEF: &[(&str, Option<&str>)] = &[
    ("no-seal", Some("the segment lacks a seal")),
    ("shorter-than-it-says", Some("not as long as declared: 65536 bytes declared, 100 there")),
    ("holes", Some("the segment is not fully allocated")),
    ("pipe", Some("the handle is not sealable shared memory")),
    ("file-on-disk", Some("the handle is not sealable shared memory")),
    ("socket-itself", Some("the handle is not sealable shared memory")),
    ("huge", Some("declared")),
    ("a-block-by-no-number", Some("no such block is held")),
    ("unknown-metadata", Some("malformed metadata")),
    ("counts-that-overflow", Some("reaches outside the storage")),
    ("many-descriptors", Some("wrong number of handles: 250 descriptors came")),
    ("forks-and-goes", Some("the worker exited with status 9")),
    ("closes-everything", Some("the peer closed the channel")),
    ("drips", None),
    ("receipts-for-what-was-never-lent", None),
];

fn misbehaves(kind: &str, says: Option<&str>) -> Outcome {
    let before = Census::take();
    let shared = born(3)?;
    {
        // Another worker at the same time, to which nothing must happen.
        let other = ours(Worker::builder())?;
        let worker = python(kind, Worker::builder())?;
        let started = Instant::now();
        let value = Value::list([shared.clone(), bytes()]);
        let outcome = worker.call_with("any", value, CallOptions::new().limit(LIMIT));
        check(started.elapsed() < LIMIT + Duration::from_secs(2), started.elapsed())?;
        match (outcome, says) {
            (Ok(_), None) => {}
            (Err(error), Some(says)) => {
                let whole = error.to_string();
                check(whole.contains(says) && !whole.contains('\n'), whole)?;
            }
            (Ok(reply), Some(_)) => return Err(format!("it was answered: {:?}", reply.value())),
            (Err(error), None) => return Err(error.to_string()),
        }
        let reply = other.call("echo", shared.clone()).map_err(text)?;
        check(reply.value().as_tensor() == Some(&shared), "the other worker's echo")?;
    }
    drop(shared);
    before.settle()
}

fn act(role: &str) -> ExitCode {
    let ladder = if role == "listens" { talkative("", true) } else { Ladder::standard() };
    let Ok(Some(channel)) = Channel::from_env_with(&ladder, None) else {
        return ExitCode::from(90);
    };
    let filled = |value: &Value| born(u8::try_from(value.as_i64().unwrap_or(0)).unwrap_or(0));
    let methods = Methods::new()
        .on("echo", Ok)
        .on("die", |_| {
            let _ = std::io::Write::write_all(&mut std::io::stderr(), SECRET.as_bytes());
            std::process::exit(7)
        })
        .on_with("heard", |_, host: &Peer| Ok(Value::from(heard(host))))
        .on("born", move |value| Ok(Value::from(filled(&value)?)))
        .on("part", move |value| Ok(Value::from(filled(&value)?.slice(0, 10, 110)?)));
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return act(&role);
    }
    let python =
        |name: &str, test: fn() -> Outcome| trial(name, test).with_ignored_flag(!has_python());
    let mut trials = vec![
        python(
            "a_worker_in_another_language_does_the_whole_handshake",
            a_worker_in_another_language_does_the_whole_handshake,
        ),
        python(
            "what_its_owner_still_writes_is_copied_out",
            what_its_owner_still_writes_is_copied_out,
        ),
        python("what_a_peer_holds_it_cannot_change", what_a_peer_holds_it_cannot_change),
        python("nothing_is_taken_that_is_not_sealed", nothing_is_taken_that_is_not_sealed),
        trial(
            "nothing_that_a_peer_hears_is_of_this_process",
            nothing_that_a_peer_hears_is_of_this_process,
        ),
        trial("the_route_tells_the_policies_apart", the_route_tells_the_policies_apart),
        trial(
            "what_was_sealed_is_forwarded_without_a_copy",
            what_was_sealed_is_forwarded_without_a_copy,
        ),
    ];
    for &(kind, says) in MISCHIEF {
        let test = trial(format!("a_python_worker_that::{kind}"), move || misbehaves(kind, says));
        trials.push(test.with_ignored_flag(!has_python()));
    }
    run_serially(trials)
}

/// Whether the script can be run; what needs it is ignored otherwise, and `cargo xtask test-env` fails.
fn has_python() -> bool {
    static HAS: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
        std::process::Command::new(interpreter())
            .arg("--version")
            .output()
            .is_ok_and(|output| output.status.success())
    });
    *HAS
}
