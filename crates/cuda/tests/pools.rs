//! Pools that two processes see into: the order in which things are exported, opened and freed.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::{Buffer, Context, PointerHandle, Pool, Stream};
use rung::{Fault, Reason, Refusal};
use testkit::peer::{self, Link, Peer};
use testkit::{run_serially, stand_in, trial};

type Outcome<T = ()> = Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn first() -> Outcome<(Arc<Context>, Stream)> {
    let device = cuda::driver().map_err(text)?.devices()[0].device();
    let context = Context::of(device).map_err(text)?;
    let stream = Stream::new(&context).map_err(text)?;
    Ok((context, stream))
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(30))
}

fn hex(handle: PointerHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<PointerHandle> {
    let pairs = text.as_bytes().chunks_exact(2);
    let bytes = pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    Some(PointerHandle(bytes.collect::<Option<Vec<u8>>>()?.try_into().ok()?))
}

fn reason<T>(result: Result<T, Refusal>) -> Option<Reason> {
    result.err().map(|refusal| refusal.reason())
}

/// The other process: what it is sent, it opens, reads, and lets go when it is told to.
fn serve(link: &Link) -> Outcome {
    let (context, stream) = first()?;
    let mut frame = link.receive(soon()).map_err(text)?;
    let descriptor = frame.handles.pop_front().ok_or("no descriptor")?;
    let pool = Pool::import(&context, descriptor).map_err(text)?;
    let handle = serde_json_text(&frame.json).and_then(from_hex).ok_or("no handle")?;
    check(reason(pool.allocate(100, &stream)) == Some(Reason::OtherKind), "it allocates")?;
    let buffer = pool.open(handle, &stream).map_err(text)?;
    let again = pool.open(handle, &stream).map_err(|fault: Fault| fault.reason());
    check(matches!(again, Err(Reason::Driver)), "opened twice")?;
    let mut bytes = vec![0; buffer.len()];
    buffer.read_at(0, &mut bytes, &stream).map_err(text)?;
    let is_right = bytes.iter().all(|byte| *byte == 7);
    link.send(&format!("\"{} {is_right}\"", bytes.len()), &[], soon()).map_err(text)?;
    link.receive(soon()).map_err(text)?;
    drop(buffer);
    stream.synchronize().map_err(text)?;
    link.send("\"freed\"", &[], soon()).map_err(text)?;
    let _ = link.receive(soon());
    Ok(())
}

/// A JSON string without anything that is escaped in it.
fn serde_json_text(json: &str) -> Option<&str> {
    json.strip_prefix('"')?.strip_suffix('"')
}

fn lent() -> Outcome<(Pool, Buffer, Stream, Peer)> {
    let (context, stream) = first()?;
    let pool = Pool::shareable(&context).map_err(text)?;
    let buffer = pool.allocate(5000, &stream).map_err(text)?;
    buffer.fill(7, &stream).map_err(text)?;
    stream.synchronize().map_err(text)?;
    // A pointer means nothing before its pool was exported: there is no way to ask for one.
    let exported = pool.exported().map_err(text)?;
    let descriptor = exported.descriptor().map_err(text)?;
    let handle = exported.pointer(&buffer).map_err(text)?;
    let peer = Peer::start("pools").map_err(text)?;
    peer.link.send(&format!("\"{}\"", hex(handle)), &[descriptor], soon()).map_err(text)?;
    let answer = peer.link.receive(soon()).map_err(text)?;
    check(answer.json.contains("5000 true"), &answer.json)?;
    Ok((pool, buffer, stream, peer))
}

fn memory_of_a_pool_is_seen_and_freed_in_order() -> Outcome {
    let (pool, buffer, stream, peer) = lent()?;
    peer.link.send("\"free\"", &[], soon()).map_err(text)?;
    peer.link.receive(soon()).map_err(text)?;
    drop(buffer);
    stream.synchronize().map_err(text)?;
    drop(pool);
    Ok(())
}

/// Undefined behaviour of the driver's; the stand-in ends whoever does it.
fn freeing_before_the_importer_is_seen() -> Outcome {
    let exe = std::env::current_exe().map_err(text)?;
    let output = Command::new(exe).env(EARLY, "1").output().map_err(text)?;
    check(output.status.signal() == Some(6), output.status)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    check(said.contains("has it mapped"), said)
}

fn other_memory_is_of_no_pool() -> Outcome {
    let (context, stream) = first()?;
    let (pool, other) = (Pool::shareable(&context), Pool::shareable(&context));
    let (pool, other) = (pool.map_err(text)?, other.map_err(text)?);
    let exported = pool.exported().map_err(text)?;
    for buffer in [
        other.allocate(4096, &stream),
        Buffer::plain(&context, 4096),
        Buffer::stream_ordered(&stream, 4096),
        Buffer::shareable(&context, 4096),
    ] {
        let buffer = buffer.map_err(text)?;
        check(reason(exported.pointer(&buffer)) == Some(Reason::OtherAllocator), buffer)?;
    }
    let file = std::fs::File::open("/dev/zero").map_err(text)?;
    let strange = Pool::import(&context, file.into()).map_err(|fault| fault.reason());
    check(matches!(strange, Err(Reason::Driver)), "a pool of nothing")
}

const EARLY: &str = "CUDA_POOLS_EARLY";

fn main() -> ExitCode {
    stand_in::main(false, || {
        if let Some((_, link)) = peer::role() {
            return if serve(&link).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        if std::env::var_os(EARLY).is_some() {
            let lent = lent().map(|(_pool, buffer, stream, peer)| {
                drop(buffer);
                let _ = stream.synchronize();
                drop(peer);
            });
            return if lent.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        let early =
            trial("freeing_before_the_importer_is_seen", freeing_before_the_importer_is_seen);
        run_serially(vec![
            trial("memory_of_a_pool_is_seen", memory_of_a_pool_is_seen_and_freed_in_order),
            trial("other_memory_is_of_no_pool", other_memory_is_of_no_pool),
            early.with_ignored_flag(stand_in::is_real()),
        ])
    })
}
