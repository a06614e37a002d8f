//! Device memory end to end: what each kind rides, what becomes of it when something is missing or somebody dies, and
//! that nothing piles up. On the stand-in, or, where it is told to, on a real driver.
//!
//! What a worker does is in its methods; what its driver lacks stands in its environment.

mod common;
mod kinds;

use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use common::{Outcome, as_text, check, digest, eventually, held, is_because, leg, sent, text};
use kinds::{KINDS, pattern, tensor_of};
use ladder::tier_cuda_ipc::cuda::{self, Context, Stream};
use ladder::tier_cuda_ipc::{self, DeviceTensorMut, alloc_on};
use ladder::{
    AtBound, Bounds, CallErrorKind, CallOptions, Channel, Command, Device, Ladder, Leg, Methods,
    Output, Reason, RungId, Tensor, Value, Verdict, Worker, WorkerBuilder,
};
use libtest_mimic::Trial;
use testkit::census::descriptors;
use testkit::stand_in::{self, Count, count};
use testkit::{run_serially, trial};

const ROLE: &str = "E2E_GPU_WORKER";

fn device(number: usize) -> Outcome<Device> {
    let devices = cuda::driver().map_err(text)?.devices();
    Ok(devices.get(number).ok_or("fewer devices than the test needs")?.device())
}

/// What it computed meanwhile.
static LATER: Mutex<Option<(Tensor, Stream)>> = Mutex::new(None);

/// A copy of a tensor, by work that has something else to do first and that nobody waits for here.
fn copy_later(tensor: &Tensor) -> Result<(), ladder::Failure> {
    let context = Context::of(tensor.device())?;
    let stream = Stream::new(&context)?;
    let mut copy = alloc_on(tensor.device(), tensor.dtype(), tensor.shape())?;
    let used = tier_cuda_ipc::on(tensor, &stream)?;
    stream.pause(Duration::from_millis(30))?;
    copy.on(&stream)?.copy_from(&used)?;
    drop(used);
    *LATER.lock().unwrap_or_else(PoisonError::into_inner) = Some((copy.share(), stream));
    Ok(())
}

fn act() -> ExitCode {
    let Ok(Some(channel)) = Channel::from_env() else { return ExitCode::from(90) };
    let methods = Methods::new()
        .on("echo", Ok)
        .on("digest", |value| digest(&value))
        .on("origin", |value| {
            let tensor = value.as_tensor().ok_or("a tensor")?;
            let (device, origin) = (tensor.device(), tensor.origin());
            let name = |device: Device| Value::from(device.to_string());
            Ok(Value::list([name(device), origin.map_or(Value::Null, name)]))
        })
        .on("make", |value| {
            let kind = value.get("kind").and_then(Value::as_str).ok_or("a kind")?.to_owned();
            let len = value.get("len").and_then(Value::as_i64).ok_or("a length")?;
            let device = device(0)?;
            Ok(tensor_of(&kind, device, &pattern(usize::try_from(len)?, 3))?.into())
        })
        .on("hold", |value| {
            held().push(value);
            Ok(Value::Null)
        })
        .on("held", |_| digest(held().last().ok_or("nothing is held")?))
        .on("open", |_| {
            // What is read has its context for as long as it is held.
            held().iter().try_for_each(|value| digest(value).map(drop))?;
            Ok(Value::Null)
        })
        .on("let go", |_| {
            let held = std::mem::take(&mut *held());
            Ok(Value::from(held.len()))
        })
        .on("copy later", |value| {
            copy_later(value.as_tensor().ok_or("a tensor")?)?;
            Ok(Value::Null)
        })
        .on("copied", |_| {
            let later = LATER.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (copy, stream) = later.ok_or("nothing was copied")?;
            stream.synchronize()?;
            digest(&copy.into())
        })
        .on("counts", |_| {
            let of = |what| Value::from(count(what).unwrap_or(0));
            Ok(Value::map([
                ("contexts made", of(Count::ContextsMade)),
                ("ranges", of(Count::Ranges)),
                ("open imports", of(Count::OpenImports)),
                ("imports made", of(Count::ImportsMade)),
                ("handles", of(Count::Handles)),
                ("events", of(Count::Events)),
                ("pinned", of(Count::CopiedPinned)),
                ("descriptors", Value::from(descriptors("self").values().sum::<usize>())),
            ]))
        })
        .on("restore", |value| {
            let tensor = value.as_tensor().ok_or("a tensor")?;
            let device = tensor.origin().ok_or("no origin")?;
            ladder::tier_shm::pin_received(tensor, device)?;
            Ok(tier_cuda_ipc::copy_to(device, tensor)?.into())
        });
    match channel.serve(methods) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn command(faults: &str) -> Command {
    let command = Command::this_executable().env(ROLE, "1").output(Output::Discard);
    command.env("CUDA_CPU_STANDIN_FAULTS", faults).grace(Duration::ZERO)
}

fn worker_with(faults: &str) -> Outcome<Worker> {
    Worker::spawn(command(faults)).map_err(text)
}

fn worker() -> Outcome<Worker> {
    worker_with("")
}

fn counts(worker: &Worker) -> Outcome<Value> {
    Ok(worker.call("counts", Value::Null).map_err(text)?.into_value())
}

fn counted(counts: &Value, what: &str) -> i64 {
    counts.get(what).and_then(Value::as_i64).unwrap_or(-1)
}

fn make(worker: &Worker, kind: &str, len: i64) -> Outcome<(Tensor, Leg)> {
    let argument = Value::map([("kind", Value::from(kind)), ("len", Value::from(len))]);
    let reply = worker.call("make", argument).map_err(text)?;
    let leg = reply.received().legs.first().cloned().ok_or("no leg")?;
    let tensor = reply.into_value().as_tensor().cloned().ok_or("no tensor")?;
    Ok((tensor, leg))
}

/// Each kind of memory rides its rung, with so many copies, in both directions, and is what it was.
fn each_kind_rides_its_rung() -> Outcome {
    let worker = worker()?;
    for kind in KINDS {
        for len in [1000, (3 << 20) + 5] {
            let bytes = pattern(len, 9);
            let tensor = tensor_of(kind.name, device(0)?, &bytes).map_err(text)?;
            let reply = sent(&worker, "digest", &tensor)?;
            let leg = leg(&reply)?;
            check((leg.rung.as_str(), leg.copies) == (kind.rung, kind.copies), (kind.name, &leg))?;
            check(as_text(&reply)? == testkit::sha256(&bytes), (kind.name, "to the worker"))?;
            let (back, leg) = make(&worker, kind.name, len as i64)?;
            check((leg.rung.as_str(), leg.copies) == (kind.rung, kind.copies), (kind.name, &leg))?;
            check(back.device() == device(0)?, back.device())?;
            let right = back.to_bytes().map_err(text)? == pattern(len, 3);
            check(right, (kind.name, "to the host"))?;
        }
    }
    Ok(())
}

/// What a user of cudaMallocAsync gets: one copy on the device, and the reason beside it. So does cudarc's own slice.
fn stream_ordered_memory_takes_one_copy_on_the_device() -> Outcome {
    let worker = worker()?;
    let theirs =
        cudarc::driver::CudaContext::new(0).map_err(|error| format!("{}", error.0 as u32))?;
    let stream = theirs.new_stream().map_err(|error| format!("{}", error.0 as u32))?;
    let numbers: Vec<f32> = (0..5000u16).map(f32::from).collect();
    let slice = stream.clone_htod(&numbers).map_err(|error| format!("{}", error.0 as u32))?;
    let tensor = tier_cuda_ipc::share_slice(slice, &[50, 100]).map_err(text)?;
    // The first time it is proven, with contents from the host.
    sent(&worker, "echo", &tensor)?;
    let before = count(Count::CopiedToHost);
    let reply = sent(&worker, "echo", &tensor)?;
    let leg = leg(&reply)?;
    check(leg.rung == RungId::CUDA_VMM && leg.copies == 1, &leg)?;
    let why = leg.declined.iter().find(|(rung, _)| *rung == RungId::CUDA_IPC);
    check(why.is_some_and(|(_, why)| why.reason() == Reason::OtherAllocator), &leg.declined)?;
    check(count(Count::CopiedToHost) == before, "a trip through the host")?;
    let back = reply.value().as_tensor().ok_or("no tensor")?;
    check(back.to_vec::<f32>().map_err(text)? == numbers, "other numbers")
}

/// Indices mean nothing between processes that see devices in another order: the UUID does.
fn other_indices_are_the_same_device() -> Outcome {
    let tensor = tensor_of("plain", device(1)?, &pattern(5000, 1)).map_err(text)?;
    let swapped = command("").env("CUDA_VISIBLE_DEVICES", "1,0");
    let worker = Worker::spawn(swapped).map_err(text)?;
    let reply = sent(&worker, "origin", &tensor)?;
    let name = Value::from(device(1)?.to_string());
    check(reply.value() == &Value::list([name, Value::Null]), reply.value())?;
    check(leg(&reply)?.rung == RungId::CUDA_IPC, leg(&reply)?)?;
    check(
        as_text(&sent(&worker, "digest", &tensor)?)? == testkit::sha256(&pattern(5000, 1)),
        "bytes",
    )
}

/// A device that the other process does not see: a refusal, a demotion that is told, and the host's memory.
fn a_device_that_is_not_seen_is_refused() -> Outcome {
    let tensor = tensor_of("plain", device(1)?, &pattern(5000, 1)).map_err(text)?;
    let one = command("").env("CUDA_VISIBLE_DEVICES", "0");
    let worker = Worker::spawn(one).map_err(text)?;
    let reply = sent(&worker, "origin", &tensor)?;
    let name = Value::from(device(1)?.to_string());
    check(reply.value() == &Value::list([Value::from("host"), name]), reply.value())?;
    let leg = leg(&reply)?;
    check(leg.rung == RungId::SHM && leg.copies == 1 && leg.origin == Some(device(1)?), &leg)?;
    for rung in [RungId::CUDA_IPC, RungId::CUDA_VMM] {
        let why = leg.declined.iter().find(|(declined, _)| *declined == rung);
        check(why.is_some_and(|(_, why)| is_because(why, Reason::DeviceUnknown)), &leg.declined)?;
    }
    check(!leg.declined.iter().any(|(rung, _)| *rung == RungId::SHM), &leg.declined)
}

/// What one side's driver lacks or does wrong: what a tensor of that kind rides then, and why not higher.
fn what_the_driver_lacks_is_told() -> Outcome {
    // (faults of the worker's driver, kind, rung, copies, the rung above, why not)
    type Case = (&'static str, &'static str, RungId, u8, RungId, Reason);
    let cases: &[Case] = &[
        ("no-open", "plain", RungId::CUDA_VMM, 1, RungId::CUDA_IPC, Reason::Driver),
        ("unknown-code", "plain", RungId::CUDA_VMM, 1, RungId::CUDA_IPC, Reason::Driver),
        ("corrupt", "plain", RungId::CUDA_VMM, 1, RungId::CUDA_IPC, Reason::Corrupt),
        ("corrupt-import", "shareable", RungId::SHM, 1, RungId::CUDA_VMM, Reason::Corrupt),
        ("no-import", "shareable", RungId::SHM, 1, RungId::CUDA_VMM, Reason::Driver),
        ("no-vmm", "stream ordered", RungId::SHM, 1, RungId::CUDA_VMM, Reason::Platform),
        ("wrong-uuid", "plain", RungId::SHM, 1, RungId::CUDA_IPC, Reason::DeviceUnknown),
        ("no-device", "plain", RungId::SHM, 1, RungId::CUDA_IPC, Reason::NoDevice),
        ("old", "plain", RungId::SHM, 1, RungId::CUDA_IPC, Reason::OldDriver),
        ("no-events", "plain", RungId::CUDA_IPC, 0, RungId::SHM, Reason::Driver),
    ];
    for (faults, kind, rung, copies, above, reason) in cases {
        let worker = worker_with(faults)?;
        let bytes = pattern(70_000, 5);
        let tensor = tensor_of(kind, device(0)?, &bytes).map_err(text)?;
        let reply = sent(&worker, "digest", &tensor)?;
        let leg = leg(&reply)?;
        check((&leg.rung, leg.copies) == (rung, *copies), (faults, &leg))?;
        check(as_text(&reply)? == testkit::sha256(&bytes), (faults, "bytes"))?;
        let why = leg.declined.iter().find(|(declined, _)| declined == above);
        let expected = *rung == RungId::CUDA_IPC;
        let told = why.map_or(expected, |(_, why)| is_because(why, *reason));
        check(told, (faults, &leg.declined))?;
    }
    Ok(())
}

/// Nothing that a user's allocator cannot do follows from what a canary could: asked for each tensor.
fn an_allocator_that_forbids_it_is_asked_each_time() -> Outcome {
    let worker = worker()?;
    let plain = tensor_of("plain", device(0)?, &pattern(100, 1)).map_err(text)?;
    let managed = tensor_of("managed", device(0)?, &pattern(100, 2)).map_err(text)?;
    for _ in 0..3 {
        check(leg(&sent(&worker, "digest", &plain)?)?.rung == RungId::CUDA_IPC, "plain")?;
        check(leg(&sent(&worker, "digest", &managed)?)?.rung == RungId::CUDA_VMM, "managed")?;
    }
    Ok(())
}

/// A session that moves host memory alone makes no context of a device, on either side.
fn a_host_only_session_makes_no_context() -> Outcome {
    cuda::driver().map_err(text)?;
    let before = count(Count::ContextsMade);
    let worker = worker()?;
    let tensor = Tensor::from_vec(vec![1.5f32; 1000], &[1000]).map_err(text)?;
    for _ in 0..3 {
        let reply = sent(&worker, "echo", &tensor)?;
        check(reply.value().as_tensor() == Some(&tensor), "other numbers")?;
    }
    check(counted(&counts(&worker)?, "contexts made") == 0, "the worker made one")?;
    check(count(Count::ContextsMade) == before, "the host made one")?;
    let proofs = worker.report().rung(&RungId::CUDA_IPC).ok_or("no cuda-ipc")?.proofs.clone();
    let unproven = proofs.iter().all(|proof| proof.sending == Verdict::Unproven);
    check(unproven && proofs.len() == cuda::driver().map_err(text)?.devices().len(), &proofs)
}

/// What is read of memory whose owner is no more: what was in it, or that its owner is gone, as either may be.
fn is_whole_or_gone(kind: &str, tensor: &Tensor, may_live: bool, may_be_gone: bool) -> Outcome {
    match tensor.to_bytes() {
        Ok(bytes) if may_live => check(bytes == pattern(100_000, 3), kind),
        Err(refusal) if may_be_gone => {
            check(refusal.reason() == Reason::OwnerGone, (kind, refusal))
        }
        other => Err(format!("{kind}: {:?}", other.map(|bytes| bytes.len()))),
    }
}

/// Its owner dies: memory of the older kind is an error from then on, shareable memory stays.
fn the_owner_is_killed_while_its_memory_is_held() -> Outcome {
    for (kind, survives) in [("plain", false), ("shareable", true), ("stream ordered", true)] {
        let worker = worker()?;
        // The host has a context, so it maps what comes at once.
        let context = Context::of(device(0)?).map_err(text)?;
        let (tensor, _) = make(&worker, kind, 100_000)?;
        check(tensor.to_bytes().map_err(text)? == pattern(100_000, 3), kind)?;
        worker.process().kill();
        eventually("the end is seen", || Ok(worker.call("echo", Value::Null).is_err()))?;
        drop(worker);
        // Twice: of an owner that is gone nothing is waited for.
        let _ = tensor.to_bytes();
        is_whole_or_gone(kind, &tensor, survives, !survives)?;
        drop(context);
    }
    Ok(())
}

/// The owner comes to an orderly end while its memory is held: what outlives it is the bytes, and what does not is an
/// error, never something stale.
fn the_owner_ends_while_its_memory_is_held() -> Outcome {
    for (kind, survives) in [("plain", false), ("shareable", true), ("stream ordered", true)] {
        let worker = worker()?;
        let context = Context::of(device(0)?).map_err(text)?;
        let (tensor, _) = make(&worker, kind, 100_000)?;
        let exit = worker.shutdown(Duration::from_secs(5));
        check(exit.status.success(), &exit)?;
        // What it had copied for the way it may not have done yet.
        let staged = kind == "stream ordered";
        is_whole_or_gone(kind, &tensor, survives, !survives || staged)?;
        drop(context);
    }
    Ok(())
}

/// Counts of both sides, and the resident memory of neither, after many sends: nothing grows.
fn many_sends_leave_nothing() -> Outcome {
    let sends = if stand_in::is_deferred() { 2_000 } else { 10_000 };
    let worker = worker()?;
    let here = || {
        let of = [Count::Ranges, Count::OpenImports, Count::Handles, Count::Events].map(count);
        let mappings = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        (of, descriptors("self").values().sum::<usize>(), mappings.lines().count())
    };
    for kind in ["plain", "shareable", "stream ordered"] {
        let tensor = tensor_of(kind, device(0)?, &pattern(10_000, 1)).map_err(text)?;
        let turn = |times: usize| -> Outcome {
            for _ in 0..times {
                let reply = sent(&worker, "echo", &tensor)?;
                check(
                    reply.value().as_tensor().is_some_and(|back| !back.device().is_host()),
                    kind,
                )?;
            }
            Ok(())
        };
        turn(50)?;
        // What is put off is done, and holds nothing any more.
        tensor.to_bytes().map_err(text)?;
        std::thread::sleep(Duration::from_millis(50));
        let (mine, theirs) = (here(), counts(&worker)?);
        turn(sends)?;
        tensor.to_bytes().map_err(text)?;
        eventually("as many as before", || {
            let now = counts(&worker)?;
            let few = ["ranges", "open imports", "imports made", "handles", "descriptors"];
            let same = |what: &&str| counted(&now, what) <= counted(&theirs, what) + 1;
            let ((before, fds, maps), (after, fds_now, maps_now)) = (mine, here());
            // Events are made until there are as many as are under way at once.
            let grown = before.iter().zip(&after).all(|(one, two)| two <= &one.map(|one| one + 3));
            Ok(few.iter().all(same) && grown && fds_now <= fds + 2 && maps_now <= maps + 8)
        })
        .map_err(|error| {
            format!("{kind}: {error}: {theirs:?} {:?}; {mine:?} {:?}", counts(&worker), here())
        })?;
    }
    Ok(())
}

/// More than a thousand sends that nobody gives back: the bound says no, and the driver is not asked for more.
fn unreleased_sends_hit_the_bound() -> Outcome {
    let bounds = Bounds { leases: 1_100, policy: AtBound::Refuse, ..Bounds::default() };
    let worker = Worker::builder().bounds(bounds).spawn(command("")).map_err(text)?;
    let tensor = tensor_of("plain", device(0)?, &pattern(1000, 1)).map_err(text)?;
    for turn in 0..1_100 {
        sent(&worker, "hold", &tensor).map_err(|error| format!("send {turn}: {error}"))?;
    }
    let error = worker.call("hold", tensor.clone()).err().ok_or("beyond the bound")?;
    check(matches!(error.kind(), CallErrorKind::OverBound(_)), &error)?;
    check(
        as_text(&worker.call("held", Value::Null).map_err(text)?)?
            == testkit::sha256(&pattern(1000, 1)),
        "held",
    )?;
    let let_go = worker.call("let go", Value::Null).map_err(text)?;
    check(let_go.value().as_i64() == Some(1_100), let_go.value())?;
    eventually("all home", || Ok(worker.lent().0 == 0))?;
    sent(&worker, "digest", &tensor).map(drop)
}

/// What a user drops while a peer has it mapped is freed when the peer has unmapped it, and then it is.
fn what_is_dropped_is_freed_after_the_peer_unmapped_it() -> Outcome {
    let worker = worker()?;
    let _context = Context::of(device(0)?).map_err(text)?;
    let before = count(Count::Ranges);
    let tensor = tensor_of("plain", device(0)?, &pattern(5000, 1)).map_err(text)?;
    sent(&worker, "hold", &tensor)?;
    sent(&worker, "digest", &tensor)?;
    drop(tensor);
    std::thread::sleep(Duration::from_millis(50));
    // Its lease is out still: the worker reads what it was sent.
    let digest = as_text(&worker.call("held", Value::Null).map_err(text)?)?;
    check(digest == testkit::sha256(&pattern(5000, 1)), "not what was sent")?;
    worker.call("let go", Value::Null).map_err(text)?;
    eventually("unmapped there", || Ok(counted(&counts(&worker)?, "open imports") == 0))?;
    eventually("freed here", || Ok(count(Count::Ranges) == before))
}

/// Tensors in one allocation are one import, however often its handle was asked for: handles differ in bytes that mean
/// nothing.
fn pieces_of_one_allocation_are_opened_once() -> Outcome {
    let worker = worker()?;
    let context = Context::of(device(0)?).map_err(text)?;
    let stream = Stream::new(&context).map_err(text)?;
    let whole = cuda::Buffer::plain(&context, 1 << 20).map_err(text)?;
    whole.fill(9, &stream).map_err(text)?;
    for at in [0, 4096, 65_536, 200_000] {
        let part = whole.part(at..at + 1000).map_err(text)?;
        let tensor = tier_cuda_ipc::share_buffer(part, &stream, ladder::DType::U8, &[1000]);
        let tensor = tensor.map_err(text)?;
        sent(&worker, "hold", &tensor)?;
        check(as_text(&sent(&worker, "digest", &tensor)?)? == testkit::sha256(&[9; 1000]), at)?;
    }
    let now = counts(&worker)?;
    check(counted(&now, "open imports") <= 2, now)
}

/// A → host → B: no copy, no mapping and no context in the host; B reads what A sent, and after A's end what can be.
fn memory_goes_on_without_a_copy() -> Outcome {
    for (kind, rung) in [("plain", RungId::CUDA_IPC), ("shareable", RungId::CUDA_VMM)] {
        let (a, b) = (worker()?, worker()?);
        let (tensor, _) = make(&a, kind, 300_000)?;
        // The first time it is proven between A and B.
        sent(&b, "digest", &tensor)?;
        drop(tensor);
        let info = cuda::driver().map_err(text)?.device(device(0)?).map_err(text)?;
        eventually("the host has no context", || {
            Ok(!cuda::driver().map_err(text)?.has_context(info))
        })?;
        let (made, copied) = (count(Count::ContextsMade), count(Count::CopiedOnDevice));
        let (tensor, _) = make(&a, kind, 300_000)?;
        let reply = sent(&b, "hold", &tensor)?;
        let leg = leg(&reply)?;
        check(leg.rung == rung && leg.copies == 0, &leg)?;
        let digest = as_text(&b.call("held", Value::Null).map_err(text)?)?;
        check(digest == testkit::sha256(&pattern(300_000, 3)), (kind, "bytes"))?;
        check(count(Count::ContextsMade) == made, (kind, "a context in the host"))?;
        check(count(Count::CopiedOnDevice) == copied, (kind, "a copy in the host"))?;
        // B still holds it when its owner dies.
        a.process().kill();
        eventually("the end is seen", || Ok(a.call("echo", Value::Null).is_err()))?;
        drop((a, tensor));
        let read = || b.call("held", Value::Null);
        if rung == RungId::CUDA_VMM {
            check(
                as_text(&read().map_err(text)?)? == testkit::sha256(&pattern(300_000, 3)),
                "kept",
            )?;
        } else {
            eventually("an error, and no stale read", || {
                Ok(read().is_err_and(|error| text(error).contains(Reason::OwnerGone.text())))
            })?;
        }
    }
    Ok(())
}

/// What was lent on and comes back is what was lent on: it can go home from there.
fn what_was_lent_on_comes_back() -> Outcome {
    for kind in ["plain", "shareable", "stream ordered"] {
        let (a, b) = (worker()?, worker()?);
        let (tensor, _) = make(&a, kind, 40_000)?;
        let part = tensor.slice(0, 100, 20_000).map_err(text)?;
        for _ in 0..2 {
            let reply = sent(&b, "echo", &part)?;
            let back = reply.value().as_tensor().ok_or("no tensor")?.clone();
            check(reply.received().legs[0].copies == 0, (kind, &reply.received().legs[0]))?;
            check(back.to_bytes().map_err(text)? == pattern(40_000, 3)[100..20_000], kind)?;
            let home = as_text(&sent(&a, "digest", &back)?)?;
            check(home == testkit::sha256(&pattern(40_000, 3)[100..20_000]), (kind, "at home"))?;
        }
    }
    Ok(())
}

/// What a driver refuses after all was proven heals in the same call: one rung lower, and at last through the host.
fn what_breaks_later_goes_through_the_host() -> Outcome {
    let folder = std::env::temp_dir().join(format!("standin-faults-{}", std::process::id()));
    std::fs::write(&folder, "").map_err(text)?;
    let outcome = (|| {
        let worker = worker_with(&format!("@{}", folder.display()))?;
        for (kind, rung) in [("shareable", RungId::CUDA_VMM), ("plain", RungId::CUDA_IPC)] {
            let good = tensor_of(kind, device(0)?, &pattern(3000, 1)).map_err(text)?;
            sent(&worker, "hold", &good)?;
            check(
                as_text(&sent(&worker, "digest", &good)?)? == testkit::sha256(&pattern(3000, 1)),
                kind,
            )?;
            check(leg(&sent(&worker, "digest", &good)?)?.rung == rung, kind)?;
        }
        // The worker holds what it has open, so it has a context, and opens what comes at once.
        worker.call("open", Value::Null).map_err(text)?;
        std::fs::write(&folder, "no-import,no-open").map_err(text)?;
        let fresh = tensor_of("plain", device(0)?, &pattern(9000, 2)).map_err(text)?;
        let reply = sent(&worker, "digest", &fresh)?;
        check(as_text(&reply)? == testkit::sha256(&pattern(9000, 2)), "bytes")?;
        let leg = leg(&reply)?;
        check(leg.rung == RungId::SHM && leg.origin == Some(device(0)?), &leg)
    })();
    let _ = std::fs::remove_file(&folder);
    outcome
}

/// A worker that is another program, as far as anybody can tell: it is shown what is sent to it, and nothing beside it.
fn a_stranger_is_shown_no_more_than_it_is_sent() -> Outcome {
    let folder = std::env::temp_dir().join(format!("stranger-{}", std::process::id()));
    let exe = std::env::current_exe().map_err(text)?;
    std::fs::copy(exe, &folder).map_err(text)?;
    let stranger = |faults: &str| {
        let command = Command::new(&folder).env(ROLE, "1").output(Output::Discard);
        let command = command.env("CUDA_CPU_STANDIN_FAULTS", faults).grace(Duration::ZERO);
        Worker::spawn(command).map_err(text)
    };
    let outcome = (|| {
        let (friend, other) = (worker()?, stranger("")?);
        let expect = |worker: &Worker, tensor: &Tensor, rung: &RungId, copies: u8| -> Outcome {
            let bytes = tensor.to_bytes().map_err(text)?;
            let reply = sent(worker, "digest", tensor)?;
            check(as_text(&reply)? == testkit::sha256(&bytes), "bytes")?;
            let leg = leg(&reply)?;
            check((&leg.rung, leg.copies) == (rung, copies), &leg)
        };
        let (ipc, vmm) = (RungId::CUDA_IPC, RungId::CUDA_VMM);
        let of = |kind, len| tensor_of(kind, device(0)?, &pattern(len, 7)).map_err(text);
        expect(&friend, &of("plain", 4096)?, &ipc, 0)?;
        expect(&other, &of("plain", 4096)?, &vmm, 1)?;
        expect(&other, &of("plain", 2 << 20)?, &ipc, 0)?;
        expect(&other, &of("shareable", 4096)?, &vmm, 0)?;
        // What a friend lent goes on to it as a copy.
        let (lent, _) = make(&friend, "plain", 4096)?;
        expect(&other, &lent, &vmm, 1)?;
        // Seen by a stranger, it is not written again.
        let born = alloc_on(device(0)?, ladder::DType::U8, &[4096]).map_err(text)?.share();
        sent(&other, "digest", &born)?;
        eventually("home", || Ok(other.lent().0 == 0))?;
        check(DeviceTensorMut::reclaim(born).is_err(), "written again")?;
        // Through the host, whatever was in the pool's blocks before.
        let poor = stranger("no-vmm,no-legacy")?;
        for len in [100, 4096, 70_000, 3 << 20] {
            expect(&poor, &of("stream ordered", len)?, &RungId::SHM, 1)?;
        }
        Ok(())
    })();
    let _ = std::fs::remove_file(&folder);
    outcome
}

/// What goes back to its owner is its own memory: nothing is opened in the process that made it.
fn what_comes_back_is_the_same_memory() -> Outcome {
    let worker = worker()?;
    for kind in ["plain", "shareable", "piece"] {
        let tensor = tensor_of(kind, device(0)?, &pattern(9000, 4)).map_err(text)?;
        let part = tensor.slice(0, 100, 5000).map_err(text)?;
        let reply = sent(&worker, "echo", &part)?;
        let back = reply.value().as_tensor().ok_or("no tensor")?.clone();
        check(reply.received().legs[0].copies == 0, (kind, &reply.received().legs[0]))?;
        check(back.to_bytes().map_err(text)? == pattern(9000, 4)[100..5000], kind)?;
        check(back.storage().memory().block() == tensor.storage().memory().block(), kind)?;
        // Of canaries there may be some.
        let before = [Count::ImportsMade, Count::HandlesImported].map(count);
        sent(&worker, "echo", &part)?;
        check([Count::ImportsMade, Count::HandlesImported].map(count) == before, "an import")?;
    }
    Ok(())
}

/// What the peer still does to memory comes before what its owner does next: written again, it is not what a peer
/// that has let go, but is not done, gets to see.
fn the_owner_writes_after_the_peer_is_done() -> Outcome {
    let worker = worker()?;
    let mut tensor = alloc_on(device(0)?, ladder::DType::U8, &[200_000]).map_err(text)?;
    for turn in 0..5u8 {
        let bytes = pattern(200_000, turn);
        tensor.write(&bytes).map_err(text)?;
        let shared = tensor.share();
        sent(&worker, "copy later", &shared)?;
        let mut waiting = Some(shared);
        let mut again = None;
        eventually("every lease home", || {
            let shared = waiting.take().ok_or("gone")?;
            match DeviceTensorMut::reclaim(shared) {
                Ok(reclaimed) => again = Some(reclaimed),
                Err(shared) => waiting = Some(shared),
            }
            Ok(again.is_some())
        })?;
        tensor = again.ok_or("not reclaimed")?;
        // Ordered after what the worker has enqueued, without a word.
        let stream = Stream::new(&Context::of(device(0)?).map_err(text)?).map_err(text)?;
        tensor.on(&stream).map_err(text)?.fill(0x77).map_err(text)?;
        stream.synchronize().map_err(text)?;
        let digest = as_text(&worker.call("copied", Value::Null).map_err(text)?)?;
        check(
            digest == testkit::sha256(&bytes),
            format!("turn {turn}: overwritten under the peer"),
        )?;
    }
    Ok(())
}

/// The same with memory that is copied on the device: the copy's block is not used again before the peer is done.
fn a_staged_copy_is_used_again_after_the_peer_is_done() -> Outcome {
    let worker = worker()?;
    for turn in 0..5u8 {
        let bytes = pattern(200_000, turn);
        let tensor = tensor_of("stream ordered", device(0)?, &bytes).map_err(text)?;
        let other = tensor_of("stream ordered", device(0)?, &pattern(200_000, 99)).map_err(text)?;
        sent(&worker, "copy later", &tensor)?;
        // Idle blocks are used in turn, and one is idle a moment after its lease is home: the first send may find another.
        for _ in 0..8 {
            eventually("home", || Ok(worker.lent().0 == 0))?;
            sent(&worker, "digest", &other)?;
        }
        let digest = as_text(&worker.call("copied", Value::Null).map_err(text)?)?;
        check(
            digest == testkit::sha256(&bytes),
            format!("turn {turn}: overwritten under the peer"),
        )?;
    }
    Ok(())
}

/// Without a rung of devices: straight into a block that the driver knows, registered once, and back where it was.
fn a_trip_through_the_host_is_pinned_and_goes_back() -> Outcome {
    let worker = worker_with("no-vmm,no-open")?;
    let bytes = pattern(5 << 20, 6);
    let tensor = tensor_of("plain", device(0)?, &bytes).map_err(text)?;
    let before = count(Count::CopiedPinned).unwrap_or(0);
    for _ in 0..3 {
        let reply = sent(&worker, "digest", &tensor)?;
        let leg = leg(&reply)?;
        check(leg.rung == RungId::SHM && leg.copies == 1, &leg)?;
        check(as_text(&reply)? == testkit::sha256(&bytes), "bytes")?;
        eventually("home", || Ok(worker.lent().0 == 0))?;
    }
    check(count(Count::Registered) == Some(1), count(Count::Registered))?;
    let there = counted(&counts(&worker)?, "pinned");
    let pinned = count(Count::CopiedPinned).unwrap_or(0) - before;
    check(pinned == 3 * (5 << 20), pinned)?;
    // Put back where it was over there, it is a tensor of a device again.
    let reply = sent(&worker, "restore", &tensor)?;
    let back = reply.value().as_tensor().ok_or("no tensor")?;
    check(back.device() == device(0)?, back.device())?;
    check(back.to_bytes().map_err(text)? == bytes, "restored")?;
    let pinned = counted(&counts(&worker)?, "pinned") - there;
    check(pinned == 5 << 20, (pinned, "bytes were copied pinned by the receiver"))?;
    // The other way round.
    let (back, leg) = make(&worker_with("no-vmm,no-legacy")?, "plain", 5 << 20)?;
    check(leg.rung == RungId::SHM && leg.origin == Some(device(0)?), &leg)?;
    check(back.origin() == Some(device(0)?) && back.device().is_host(), back.origin())?;
    check(back.to_bytes().map_err(text)? == pattern(5 << 20, 3), "from the worker")?;
    // Where the driver registers nothing it is slower, and as right.
    let worker = worker_with("no-vmm,no-open,no-register")?;
    let reply = sent(&worker, "restore", &tensor).err().unwrap_or_default();
    check(reply.contains(Reason::Driver.text()), reply)
}

/// A silent slowdown is an error, where that was asked for.
fn a_trip_through_the_host_can_be_refused() -> Outcome {
    let worker = worker_with("no-vmm,no-open")?;
    let tensor = tensor_of("plain", device(0)?, &pattern(1000, 6)).map_err(text)?;
    let least = CallOptions::new().require_at_least(RungId::CUDA_VMM);
    let error = worker.call_with("digest", tensor, least).err().ok_or("it was sent")?;
    check(matches!(error.kind(), CallErrorKind::BelowRequired(_)), &error)
}

/// In another pid namespace handles that go by process numbers mean nothing; descriptors do.
fn another_pid_namespace_costs_handles_alone() -> Outcome {
    let exe = std::env::current_exe().map_err(text)?;
    let command = Command::new("unshare").args(["--fork", "--pid", "--kill-child"]);
    let command = command.args([exe]).env(ROLE, "1").output(Output::Discard);
    let worker = WorkerBuilder::default()
        .prove_on(device(0)?)
        .spawn(command.grace(Duration::ZERO))
        .map_err(text)?;
    let report = worker.report();
    let verdict = |rung: &RungId| {
        let proofs = &report.rung(rung)?.proofs;
        proofs.iter().find(|proof| Some(proof.device) == device(0).ok()).cloned()
    };
    let ipc = verdict(&RungId::CUDA_IPC).ok_or("no cuda-ipc")?;
    match &ipc.sending {
        Verdict::Demoted(why) => check(why.reason() == Reason::Namespace, why)?,
        other => return Err(format!("{other:?}")),
    }
    let vmm = verdict(&RungId::CUDA_VMM).ok_or("no cuda-vmm")?;
    check(vmm.sending == Verdict::Verified && vmm.receiving == Verdict::Verified, &vmm)?;
    let tensor = tensor_of("plain", device(0)?, &pattern(1000, 6)).map_err(text)?;
    let reply = sent(&worker, "digest", &tensor)?;
    check(leg(&reply)?.rung == RungId::CUDA_VMM, leg(&reply)?)?;
    check(as_text(&reply)? == testkit::sha256(&pattern(1000, 6)), "bytes")
}

/// One ladder, both rungs named: proven at connect, on each device, both ways.
fn both_rungs_are_proven_on_each_device() -> Outcome {
    let devices = cuda::driver().map_err(text)?.devices();
    let builder = Worker::builder().ladder(Ladder::standard());
    let builder = devices.iter().fold(builder, |builder, info| builder.prove_on(info.device()));
    let worker = builder.spawn(command("")).map_err(text)?;
    let report = worker.report();
    for rung in [RungId::CUDA_IPC, RungId::CUDA_VMM] {
        let proofs = &report.rung(&rung).ok_or("no such rung")?.proofs;
        check(proofs.len() == devices.len(), proofs)?;
        for proof in proofs {
            let verified =
                proof.sending == Verdict::Verified && proof.receiving == Verdict::Verified;
            check(verified, proof)?;
        }
    }
    Ok(())
}

fn trials() -> Vec<Trial> {
    type Test = (&'static str, fn() -> Outcome);
    // What any driver has to do.
    let all: &[Test] = &[
        ("each_kind_rides_its_rung", each_kind_rides_its_rung),
        (
            "stream_ordered_memory_takes_one_copy",
            stream_ordered_memory_takes_one_copy_on_the_device,
        ),
        ("an_allocator_that_forbids_it_is_asked", an_allocator_that_forbids_it_is_asked_each_time),
        ("both_rungs_are_proven_on_each_device", both_rungs_are_proven_on_each_device),
        ("unreleased_sends_hit_the_bound", unreleased_sends_hit_the_bound),
        ("the_owner_is_killed", the_owner_is_killed_while_its_memory_is_held),
        ("the_owner_ends", the_owner_ends_while_its_memory_is_held),
        ("memory_goes_on_without_a_copy", memory_goes_on_without_a_copy),
        ("what_comes_back_is_the_same_memory", what_comes_back_is_the_same_memory),
        ("what_was_lent_on_comes_back", what_was_lent_on_comes_back),
        ("the_owner_writes_after_the_peer_is_done", the_owner_writes_after_the_peer_is_done),
        ("a_staged_copy_is_used_again_after", a_staged_copy_is_used_again_after_the_peer_is_done),
    ];
    // What takes a driver that can be told what to lack, or that counts.
    let on_stand_in: &[Test] = &[
        ("other_indices_are_the_same_device", other_indices_are_the_same_device),
        ("a_device_that_is_not_seen_is_refused", a_device_that_is_not_seen_is_refused),
        ("what_the_driver_lacks_is_told", what_the_driver_lacks_is_told),
        ("a_host_only_session_makes_no_context", a_host_only_session_makes_no_context),
        ("many_sends_leave_nothing", many_sends_leave_nothing),
        ("what_breaks_later_goes_through_the_host", what_breaks_later_goes_through_the_host),
        ("a_stranger_is_shown_no_more", a_stranger_is_shown_no_more_than_it_is_sent),
        ("pieces_of_one_allocation_are_opened_once", pieces_of_one_allocation_are_opened_once),
        ("what_is_dropped_is_freed_after", what_is_dropped_is_freed_after_the_peer_unmapped_it),
        ("a_trip_through_the_host_is_pinned", a_trip_through_the_host_is_pinned_and_goes_back),
        ("a_trip_through_the_host_can_be_refused", a_trip_through_the_host_can_be_refused),
        ("another_pid_namespace", another_pid_namespace_costs_handles_alone),
    ];
    let real = stand_in::is_real();
    let all = all.iter().map(|(name, test)| trial(*name, *test));
    let rest = on_stand_in.iter().map(|(name, test)| trial(*name, *test).with_ignored_flag(real));
    all.chain(rest).collect()
}

/// Runs it, with the stand-in's work put off or not.
pub(crate) fn run(deferred: bool) -> ExitCode {
    stand_in::main(deferred, || {
        if std::env::var_os(ROLE).is_some() { act() } else { run_serially(trials()) }
    })
}
