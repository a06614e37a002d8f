//! What pools do where both sides ask for them, where one does, and where processes are killed.

#[path = "../devices/common.rs"]
mod common;
#[path = "../devices/kinds.rs"]
mod kinds;
mod traces;

use std::process::ExitCode;
use std::time::Duration;

use common::{Outcome, as_text, check, digest, eventually, held, is_because, leg, sent, text};
use kinds::{KINDS, pattern, tensor_of};
use ladder::tier_cuda_ipc::cuda;
use ladder::{
    Channel, Command, Contract, DType, Device, Ladder, Methods, Output, Reason, RungId, Tensor,
    Value, Verdict, Worker, WorkerBuilder, tier_pool_ipc,
};
use testkit::census::descriptors;
use testkit::stand_in::{self, Count, count};
use testkit::warnings::Warnings;
use testkit::{run_serially, trial};

/// `asks`, or not.
const ROLE: &str = "E2E_POOL_WORKER";

fn device() -> Outcome<Device> {
    Ok(cuda::driver().map_err(text)?.devices()[0].device())
}

fn act(role: &str) -> ExitCode {
    traces::say_steps();
    let ladder = match role {
        "asks" => Ladder::standard().experimental_pool_ipc(Contract::V1),
        _ => Ladder::standard(),
    };
    let Ok(Some(channel)) = Channel::from_env_with(&ladder, None) else {
        return ExitCode::from(90);
    };
    let methods = Methods::new()
        .on("echo", Ok)
        .on("digest", |value| digest(&value))
        .on("head", |value| {
            let tensor = value.as_tensor().ok_or("a tensor")?;
            let first = tensor.slice(0, 0, 64)?.to_bytes()?;
            Ok(Value::from(testkit::sha256(&first)))
        })
        .on("make", |value| {
            let len = usize::try_from(value.as_i64().ok_or("a length")?)?;
            let device = cuda::driver()?.devices()[0].device();
            Ok(tensor_of("pool", device, &pattern(len, 3))?.into())
        })
        .on("hold", |value| {
            held().push(value);
            Ok(Value::Null)
        })
        .on("held", |_| digest(held().last().ok_or("nothing is held")?))
        .on("let go", |_| {
            let let_go = std::mem::take(&mut *held());
            Ok(Value::from(let_go.len()))
        })
        .on("counts", |_| {
            let of = |what| Value::from(count(what).unwrap_or(0));
            let files: usize = descriptors("self").values().sum();
            Ok(Value::map([("ranges", of(Count::Ranges)), ("files", Value::from(files))]))
        });
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn command(role: &str, faults: &str) -> Command {
    let command = Command::this_executable().env(ROLE, role).output(Output::Discard);
    command.env("CUDA_CPU_STANDIN_FAULTS", faults).grace(Duration::ZERO)
}

/// The host's side of one that asks.
fn asking() -> WorkerBuilder {
    Worker::builder().experimental_pool_ipc(Contract::V1)
}

fn worker() -> Outcome<Worker> {
    asking().spawn(command("asks", "")).map_err(text)
}

/// Ranges of this process, once what an earlier test let go of is freed: others do that, in a while.
fn ranges() -> Option<u64> {
    let mut same = (count(Count::Ranges), 0);
    while same.1 < 20 {
        std::thread::sleep(Duration::from_millis(10));
        let now = count(Count::Ranges);
        same = if now == same.0 { (now, same.1 + 1) } else { (now, 0) };
    }
    same.0
}

/// Device ranges and descriptors of a worker.
fn counts(worker: &Worker) -> Outcome<(i64, i64)> {
    let counts = worker.call("counts", Value::Null).map_err(text)?.into_value();
    let of = |what: &str| counts.get(what).and_then(Value::as_i64).unwrap_or(-1);
    Ok((of("ranges"), of("files")))
}

fn pooled(len: usize, seed: u8) -> Outcome<Tensor> {
    tensor_of("pool", device()?, &pattern(len, seed)).map_err(text)
}

/// It is proven as every other rung, carries memory of pools both ways without a copy, and says what it is; all other
/// memory goes as it did.
fn both_sides_ask() -> Outcome {
    let warnings = Warnings::default();
    let worker = tracing::subscriber::with_default(warnings.clone(), || {
        asking().prove_on(device()?).spawn(command("asks", "")).map_err(text)
    })?;
    let is_said = |words: &String| words.contains("pool-ipc is experimental");
    check(warnings.all().iter().any(is_said), warnings.all())?;
    let report = worker.report();
    let proofs = &report.rung(&RungId::POOL_IPC).ok_or("no pool-ipc")?.proofs;
    let proof =
        proofs.iter().find(|proof| Some(proof.device) == device().ok()).ok_or("unproven")?;
    check((&proof.sending, &proof.receiving) == (&Verdict::Verified, &Verdict::Verified), proof)?;
    for len in [1000, (3 << 20) + 5] {
        let reply = sent(&worker, "digest", &pooled(len, 9)?)?;
        let leg = leg(&reply)?;
        check((&leg.rung, leg.copies) == (&RungId::POOL_IPC, 0), &leg)?;
        check(leg.is_experimental(), &leg)?;
        check(as_text(&reply)? == testkit::sha256(&pattern(len, 9)), "to the worker")?;
        let reply = worker.call("make", len as i64).map_err(text)?;
        let leg = reply.received().legs.first().cloned().ok_or("no leg")?;
        check((&leg.rung, leg.copies) == (&RungId::POOL_IPC, 0), &leg)?;
        let back = reply.value().as_tensor().ok_or("no tensor")?;
        check(back.to_bytes().map_err(text)? == pattern(len, 3), "to the host")?;
    }
    for kind in KINDS.iter().filter(|kind| kind.name != "pool") {
        let tensor = tensor_of(kind.name, device()?, &pattern(5000, 4)).map_err(text)?;
        let leg = leg(&sent(&worker, "digest", &tensor)?)?;
        check((leg.rung.as_str(), leg.copies) == (kind.rung, kind.copies), (kind.name, &leg))?;
        check(!leg.is_experimental(), &leg)?;
    }
    Ok(())
}

/// What comes back is the same memory; what goes on to a third is copied, by another rung.
fn what_comes_back_is_the_same_memory() -> Outcome {
    let (worker, other) = (worker()?, worker()?);
    let tensor = pooled(100_000, 5)?;
    let reply = sent(&worker, "echo", &tensor)?;
    let received = reply.received().legs.first().cloned().ok_or("no leg")?;
    check((&received.rung, received.copies) == (&RungId::POOL_IPC, 0), &received)?;
    let back = reply.value().as_tensor().ok_or("no tensor")?.clone();
    check(back.storage().memory().block() == tensor.storage().memory().block(), "another block")?;
    check(back.to_bytes().map_err(text)? == pattern(100_000, 5), "bytes")?;
    drop((back, reply));
    let theirs = worker.call("make", 5000).map_err(text)?.into_value();
    let theirs = theirs.as_tensor().ok_or("no tensor")?;
    let reply = sent(&other, "digest", theirs)?;
    let leg = leg(&reply)?;
    check((&leg.rung, leg.copies) == (&RungId::CUDA_VMM, 1), &leg)?;
    let why = leg.declined.iter().find(|(rung, _)| *rung == RungId::POOL_IPC);
    let is_told = |why: &ladder::Refusal| why.to_string().contains("goes no further");
    check(why.is_some_and(|(_, why)| is_told(why)), &leg.declined)?;
    check(as_text(&reply)? == testkit::sha256(&pattern(5000, 3)), "to the other")
}

/// One side alone leaves it off, and says so; memory of a pool takes one copy on the device, as ever.
fn one_side_alone_leaves_it_off() -> Outcome {
    let alone = |host: WorkerBuilder, role: &str| host.spawn(command(role, "")).map_err(text);
    for (worker, is_told) in
        [(alone(asking(), "silent")?, true), (alone(Worker::builder(), "asks")?, false)]
    {
        let report = worker.report();
        match report.rung(&RungId::POOL_IPC).map(|rung| &rung.proofs[0].sending) {
            Some(Verdict::NotOffered(why)) if is_told => {
                check(why.to_string().contains("did not ask"), why)?;
            }
            None if !is_told => {}
            other => return Err(format!("{other:?}")),
        }
        let reply = sent(&worker, "digest", &pooled(5000, 2)?)?;
        let leg = leg(&reply)?;
        check((&leg.rung, leg.copies) == (&RungId::CUDA_VMM, 1), &leg)?;
        let declined = leg.declined.iter().any(|(rung, _)| *rung == RungId::POOL_IPC);
        check(declined == is_told, &leg.declined)?;
        check(as_text(&reply)? == testkit::sha256(&pattern(5000, 2)), "bytes")?;
    }
    // Whoever does not ask hears that the other one does.
    let warnings = Warnings::default();
    let worker =
        tracing::subscriber::with_default(warnings.clone(), || alone(Worker::builder(), "asks"))?;
    drop(worker);
    check(warnings.all().iter().any(|words| words.contains("left off")), warnings.all())
}

/// Too large for a pool, by what is known of drivers: it is of memory that leaves by descriptor, and the route says why.
fn five_gib_take_another_rung() -> Outcome {
    let worker = worker()?;
    let tensor = tier_pool_ipc::alloc_on(device()?, DType::U8, &[5 << 30]).map_err(text)?.share();
    let reply = sent(&worker, "head", &tensor)?;
    let leg = leg(&reply)?;
    check((&leg.rung, leg.copies) == (&RungId::CUDA_VMM, 0), &leg)?;
    let why = leg.declined.iter().find(|(rung, _)| *rung == RungId::POOL_IPC);
    let (_, why) = why.ok_or("no reason")?;
    check(why.reason() == Reason::OverCap && why.to_string().contains("4064 MiB"), why)?;
    check(as_text(&reply)? == testkit::sha256(&[0; 64]), "bytes")
}

/// What a driver lacks or does wrong, on either side: what memory of a pool rides then, and why not higher.
fn what_the_driver_lacks_is_told() -> Outcome {
    for (faults, reason) in [
        ("no-pool-handles", Reason::Platform),
        ("corrupt-pool", Reason::Corrupt),
        ("no-device", Reason::NoDevice),
    ] {
        let worker = asking().spawn(command("asks", faults)).map_err(text)?;
        let reply = sent(&worker, "digest", &pooled(70_000, 5)?)?;
        let leg = leg(&reply)?;
        let rung = if faults == "no-device" { RungId::SHM } else { RungId::CUDA_VMM };
        check((&leg.rung, leg.copies) == (&rung, 1), (faults, &leg))?;
        let why = leg.declined.iter().find(|(rung, _)| *rung == RungId::POOL_IPC);
        let is_told = why.is_some_and(|(_, why)| is_because(why, reason));
        check(is_told, (faults, &leg.declined))?;
        check(as_text(&reply)? == testkit::sha256(&pattern(70_000, 5)), (faults, "bytes"))?;
    }
    Ok(())
}

/// What is dropped here while a worker has it imported is freed when the worker has freed its import, and then it is.
fn what_is_dropped_is_freed_after_the_importer() -> Outcome {
    let worker = worker()?;
    let _context = cuda::Context::of(device()?).map_err(text)?;
    let before = ranges();
    sent(&worker, "digest", &pooled(100, 1)?)?;
    eventually("nothing is lent", || Ok(counts(&worker)?.0 == 0 && worker.lent().0 == 0))?;
    eventually("nothing is left", || Ok(count(Count::Ranges) == before))?;
    let tensor = pooled(5000, 1)?;
    sent(&worker, "hold", &tensor)?;
    sent(&worker, "digest", &tensor)?;
    drop(tensor);
    std::thread::sleep(Duration::from_millis(50));
    // Its lease is out still: the worker reads what it was sent.
    let digest = as_text(&worker.call("held", Value::Null).map_err(text)?)?;
    check(digest == testkit::sha256(&pattern(5000, 1)), "not what was sent")?;
    worker.call("let go", Value::Null).map_err(text)?;
    eventually("freed there", || Ok(counts(&worker)?.0 == 0))?;
    eventually("freed here", || Ok(count(Count::Ranges) == before))
}

/// An importer is killed while it has memory of ours: it is freed when its death is sure. An owner is: its memory is an
/// error from then on, and nobody frees it.
fn either_side_is_killed() -> Outcome {
    let _context = cuda::Context::of(device()?).map_err(text)?;
    let before = ranges();
    let dies = worker()?;
    sent(&dies, "hold", &pooled(5000, 1)?)?;
    dies.process().kill();
    eventually("the end is seen", || Ok(dies.call("echo", Value::Null).is_err()))?;
    drop(dies);
    eventually("freed here", || Ok(count(Count::Ranges) == before))?;
    let owner = worker()?;
    let tensor = owner.call("make", 5000).map_err(text)?.into_value();
    let tensor = tensor.as_tensor().ok_or("no tensor")?.clone();
    check(tensor.to_bytes().map_err(text)? == pattern(5000, 3), "bytes")?;
    owner.process().kill();
    eventually("the end is seen", || Ok(owner.call("echo", Value::Null).is_err()))?;
    drop(owner);
    let refusal = tensor.to_bytes().err().ok_or("it was read")?;
    check(refusal.reason() == Reason::OwnerGone, refusal)
}

/// An importer that cannot free does not say that it has: its memory stays, until that importer is dead.
fn a_free_that_fails_is_not_said_to_be_done() -> Outcome {
    let _context = cuda::Context::of(device()?).map_err(text)?;
    let before = ranges();
    let worker = asking().spawn(command("asks", "no-free")).map_err(text)?;
    let reply = sent(&worker, "digest", &pooled(5000, 1)?)?;
    check(leg(&reply)?.rung == RungId::POOL_IPC, leg(&reply)?)?;
    eventually("home", || Ok(worker.lent().0 == 0))?;
    std::thread::sleep(Duration::from_millis(200));
    check(count(Count::Ranges) > before, "freed under an import")?;
    drop(worker);
    eventually("freed here", || Ok(count(Count::Ranges) == before))
}

/// Pools come and go with the memory of them; what each side keeps of them does not grow.
fn pools_come_and_go() -> Outcome {
    let worker = worker()?;
    let turn = || -> Outcome {
        // Each of a pool of its own: nobody has memory of the one before.
        let reply = sent(&worker, "digest", &pooled(100, 1)?)?;
        check(leg(&reply)?.rung == RungId::POOL_IPC, leg(&reply)?)?;
        eventually("home", || Ok(worker.lent().0 == 0 && counts(&worker)?.0 == 0))
    };
    (0..3).try_for_each(|_| turn())?;
    let before = (descriptors("self").values().sum::<usize>(), counts(&worker)?.1);
    (0..40).try_for_each(|_| turn())?;
    let after = (descriptors("self").values().sum::<usize>(), counts(&worker)?.1);
    check(after.0 <= before.0 + 3 && after.1 <= before.1 + 3, (before, after))
}

/// Counts of both sides after many sends: nothing grows.
fn many_sends_leave_nothing() -> Outcome {
    let worker = worker()?;
    let tensor = pooled(10_000, 1)?;
    let turn = |times: usize| -> Outcome {
        for at in 0..times {
            sent(&worker, "echo", &tensor)?;
            if at % 50 == 0 {
                sent(&worker, "echo", &pooled(100, 7)?)?;
            }
        }
        Ok(())
    };
    let here = || (count(Count::Ranges), descriptors("self").values().sum::<usize>());
    let settled = || eventually("settled", || Ok(worker.lent().0 == 0 && counts(&worker)?.0 <= 1));
    turn(60)?;
    settled()?;
    let (mine, theirs) = (here(), counts(&worker)?);
    turn(if stand_in::is_deferred() { 500 } else { 3_000 })?;
    settled()?;
    eventually("as many as before", || {
        let (now, there) = (here(), counts(&worker)?);
        let is_flat = now.0 <= mine.0 && now.1 <= mine.1 + 2;
        Ok(is_flat && there.0 <= theirs.0 && there.1 <= theirs.1 + 2)
    })
    .map_err(|error| format!("{error}: {mine:?} {:?}, {theirs:?} {:?}", here(), counts(&worker)))
}

/// Runs the tests; in a worker's process, the worker.
pub(crate) fn run(deferred: bool) -> ExitCode {
    stand_in::main(deferred, || {
        if let Ok(role) = std::env::var(ROLE) {
            return act(&role);
        }
        traces::say_steps();
        let five = trial("five_gib_take_another_rung", five_gib_take_another_rung);
        let lacks = trial("what_the_driver_lacks_is_told", what_the_driver_lacks_is_told);
        let fails = trial("a_free_that_fails", a_free_that_fails_is_not_said_to_be_done);
        let on_stand_in = [five, lacks, fails];
        let mut trials = vec![
            trial("both_sides_ask", both_sides_ask),
            trial("what_comes_back_is_the_same_memory", what_comes_back_is_the_same_memory),
            trial("one_side_alone_leaves_it_off", one_side_alone_leaves_it_off),
            trial("what_is_dropped_is_freed_after", what_is_dropped_is_freed_after_the_importer),
            trial("either_side_is_killed", either_side_is_killed),
            trial("many_sends_leave_nothing", many_sends_leave_nothing),
            trial("pools_come_and_go", pools_come_and_go),
            trial("traces_are_by_the_contract", traces::traces_are_by_the_contract),
        ];
        let is_real = stand_in::is_real();
        trials.extend(on_stand_in.map(|trial| trial.with_ignored_flag(is_real)));
        run_serially(trials)
    })
}
