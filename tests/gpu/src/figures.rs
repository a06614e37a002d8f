//! The figures: ratios within one run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::{Buffer, Context, Registered, Stream};
use ladder::{DType, RungId, Tensor, Worker, alloc_on};
use tier_cuda_ipc::share_buffer;

use crate::{Error, Row};

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The median of calls with this tensor, which are answered with nothing; and that it rode this rung.
fn hop(worker: &Worker, tensor: &Tensor, rung: &RungId, turns: usize) -> Result<Duration, Error> {
    let mut times = Vec::new();
    for _ in 0..turns {
        let started = Instant::now();
        let reply = worker.call("take", tensor.clone())?;
        times.push(started.elapsed());
        let rode = &reply.sent().legs[0].rung;
        if rode != rung {
            return Err(format!("rode {rode}, not {rung}").into());
        }
    }
    Ok(median(times))
}

fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// The best of some: what a link or a memory can do.
fn best(turns: usize, mut once: impl FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
    let mut best = Duration::MAX;
    for _ in 0..turns {
        let started = Instant::now();
        once()?;
        best = best.min(started.elapsed());
    }
    Ok(best)
}

fn plain(context: &Arc<Context>, len: usize) -> Result<Tensor, Error> {
    let stream = Stream::new(context)?;
    let buffer = Buffer::plain(context, len)?;
    Ok(share_buffer(buffer, &stream, DType::U8, &[len])?)
}

/// Bytes of what is large, and of what is copied: as much as a stand-in can bear where it is one.
fn sizes(on_stand_in: bool) -> Result<(usize, usize), Error> {
    let info = &cuda::driver()?.devices()[0];
    let large = (8usize << 30).min(info.bytes() / 4);
    Ok(if on_stand_in { (64 << 20, 32 << 20) } else { (large, 1 << 30) })
}

fn first() -> Result<Arc<Context>, Error> {
    Ok(Context::of(cuda::driver()?.devices()[0].device())?)
}

/// What a send costs once its memory is mapped, whatever its size.
pub(crate) fn hops(on_stand_in: bool) -> Result<Vec<Row>, Error> {
    let info = &cuda::driver()?.devices()[0];
    let (context, worker) = (first()?, Worker::spawn_self()?);
    let (large, _) = sizes(on_stand_in)?;
    let mut rows = Vec::new();
    for (name, rung) in [("cuda-ipc", RungId::CUDA_IPC), ("cuda-vmm", RungId::CUDA_VMM)] {
        let make = |len: usize| -> Result<Tensor, Error> {
            if rung == RungId::CUDA_IPC {
                return plain(&context, len);
            }
            Ok(alloc_on(info.device(), DType::U8, &[len])?.share())
        };
        let (small, huge) = (make(1 << 10)?, make(large)?);
        hop(&worker, &small, &rung, 20)?;
        let started = Instant::now();
        hop(&worker, &huge, &rung, 1)?;
        let first = started.elapsed();
        // In turns, so that both see the same machine.
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            a.push(hop(&worker, &small, &rung, 50)?);
            b.push(hop(&worker, &huge, &rung, 50)?);
        }
        let (a, b) = (median(a), median(b));
        let ratio = b.as_secs_f64() / a.as_secs_f64();
        let found = format!("{:.1} µs and {:.1} µs, {ratio:.2}×", microseconds(a), microseconds(b));
        let sizes = format!("{name}: cached hop of 1 KiB and of {} MiB", large >> 20);
        rows.push(Row::figure(sizes, found, "1.2×", (0.83..=1.2).contains(&ratio)));
        let open = microseconds(first.saturating_sub(b)) / 1000.0;
        let found =
            format!("{:.0} µs once, {open:.2} µs a send over a thousand", microseconds(first));
        rows.push(Row::figure(format!("{name}: opening"), found, "under 5 µs", open < 5.0));
    }

    Ok(rows)
}

/// A copy on the device, on the way to a peer, beside the plain one.
pub(crate) fn copies(on_stand_in: bool) -> Result<Vec<Row>, Error> {
    let (context, worker) = (first()?, Worker::spawn_self()?);
    let (_, bulk) = sizes(on_stand_in)?;
    let stream = Stream::new(&context)?;
    let (from, to) = (Buffer::plain(&context, bulk)?, Buffer::plain(&context, bulk)?);
    let plainly = best(10, || {
        to.copy_from(&from, &stream)?;
        Ok(stream.synchronize()?)
    })?;
    drop((from, to));
    let ordered = Buffer::stream_ordered(&stream, bulk)?;
    let tensor = share_buffer(ordered, &stream, DType::U8, &[bulk])?;
    hop(&worker, &tensor, &RungId::CUDA_VMM, 5)?;
    let staged = best(10, || {
        hop(&worker, &tensor, &RungId::CUDA_VMM, 1)?;
        // The copy is ordered before whatever comes next on the owner's stream.
        Ok(stream.synchronize()?)
    })?;
    let share = plainly.as_secs_f64() / staged.as_secs_f64();
    let found = format!(
        "{:.0} of {:.0} GB/s, {:.0} %",
        rate(bulk, staged),
        rate(bulk, plainly),
        share * 100.0
    );
    Ok(vec![Row::figure(
        "copied on the device, and sent",
        found,
        "80 % of the plain copy",
        share >= 0.8,
    )])
}

/// To the host: pageable, registered, and registered straight into a block.
pub(crate) fn to_the_host(on_stand_in: bool) -> Result<Vec<Row>, Error> {
    let context = first()?;
    let (_, bulk) = sizes(on_stand_in)?;
    let stream = Stream::new(&context)?;
    let from = Buffer::plain(&context, bulk)?;
    let mut host = vec![1u8; bulk];
    let pageable = best(3, || Ok(from.read_at(0, &mut host, &stream)?))?;
    let pinned = {
        let _registered = Registered::new(&context, host.as_ptr(), host.len(), false)?;
        best(5, || Ok(from.read_at(0, &mut host, &stream)?))?
    };
    drop(from);
    let block = block(&context, bulk)?;
    let (to_pinned, over) =
        (pinned.as_secs_f64() / block.as_secs_f64(), pageable.as_secs_f64() / block.as_secs_f64());
    let found = format!(
        "{:.1} GB/s; {:.1} into registered memory, {:.1} pageable: {:.0} %, {over:.1}×",
        rate(bulk, block),
        rate(bulk, pinned),
        rate(bulk, pageable),
        to_pinned * 100.0
    );
    let holds = to_pinned >= 0.8 && over >= 1.8;
    Ok(vec![Row::figure(
        "to the host, into a block",
        found,
        "80 % of pinned, 1.8× pageable",
        holds,
    )])
}

/// What a copy into a block takes that the driver knows: the second use of it, as in steady state.
fn block(context: &Arc<Context>, bulk: usize) -> Result<Duration, Error> {
    use ladder::tier_shm::Shm;
    use rung::{Rung, Session, Trust};
    let tensor = plain(context, bulk)?;
    let offer = || Shm.probe();
    let trust = Trust::carrying(ladder::PeerTrust::same_executable(std::process::id())?);
    let Session::Carrier(carrier) = Shm.open(&offer()?, &offer()?, trust)? else {
        return Err("no carrier".into());
    };
    best(5, || {
        let packed = carrier.export(tensor.storage())?;
        let lease = packed.parcel.lease;
        carrier.released(carrier.receipt(lease));
        drop(packed);
        Ok(())
    })
}
