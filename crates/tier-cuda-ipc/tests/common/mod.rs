//! Device memory of every kind, written by work that has yet to run when it is sent.

use std::process::ExitCode;
use std::sync::Arc;

use cuda::{Buffer, Context, Stream};
use rung::{DType, Refusal, Rung, Storage, Trust};
use segment::PeerTrust;
use testkit::carrier::{Maker, Suite, main as suite};
use testkit::stand_in;
use tier_cuda_ipc::{CudaIpc, CudaVmm, cuda, share_buffer};

/// Memory of a kind with these contents: poison at first, and the contents by a copy that nobody has waited for.
fn made(
    bytes: &[u8],
    make: fn(&Arc<Context>, &Stream, usize) -> Result<Buffer, Refusal>,
) -> Result<Arc<Storage>, Refusal> {
    let device = cuda::driver()?.devices()[0].device();
    let context = Context::of(device)?;
    let stream = Stream::new(&context)?;
    let contents = Buffer::stream_ordered(&stream, bytes.len())?;
    contents.write_at(0, bytes, &stream)?;
    let buffer = make(&context, &stream, bytes.len())?;
    buffer.fill(0xEE, &stream)?;
    stream.synchronize()?;
    buffer.copy_from(&contents, &stream)?;
    Ok(share_buffer(buffer, &stream, DType::U8, &[bytes.len()])?.into_storage())
}

fn plain(bytes: &[u8]) -> Arc<Storage> {
    made(bytes, |context, _, len| Buffer::plain(context, len)).expect("plain memory")
}

/// A part of a larger allocation: as of an allocator that hands out pieces.
fn piece(bytes: &[u8]) -> Arc<Storage> {
    let make = |context: &Arc<Context>, _: &Stream, len: usize| {
        Buffer::plain(context, len + 10_000)?.part(512..512 + len)
    };
    made(bytes, make).expect("a piece of plain memory")
}

fn shareable(bytes: &[u8]) -> Arc<Storage> {
    made(bytes, |context, _, len| Buffer::shareable(context, len)).expect("shareable memory")
}

fn stream_ordered(bytes: &[u8]) -> Arc<Storage> {
    made(bytes, |_, stream, len| Buffer::stream_ordered(stream, len)).expect("memory of a pool")
}

fn managed(bytes: &[u8]) -> Arc<Storage> {
    made(bytes, |context, _, len| Buffer::managed(context, len)).expect("managed memory")
}

const LEGACY: &[(&str, Maker)] = &[("plain", plain), ("piece", piece)];
const SHAREABLE: &[(&str, Maker)] = &[("shareable", shareable)];
const COPIED: &[(&str, Maker)] =
    &[("stream_ordered", stream_ordered), ("managed", managed), ("plain", plain)];

static IPC: Suite = Suite {
    rung: || Box::new(CudaIpc) as Box<dyn Rung>,
    native: LEGACY,
    copied: &[],
    trust: |pid| PeerTrust::same_executable(pid).map_or(Trust::none(), Trust::carrying),
};

static VMM: Suite = Suite {
    rung: || Box::new(CudaVmm) as Box<dyn Rung>,
    native: SHAREABLE,
    copied: COPIED,
    trust: |pid| PeerTrust::same_executable(pid).map_or(Trust::none(), Trust::carrying),
};

/// Runs the suite of a rung on the driver there is, or the stand-in.
pub(crate) fn run(rung: &str, deferred: bool) -> ExitCode {
    let chosen = if rung == "cuda-ipc" { &IPC } else { &VMM };
    stand_in::main(deferred, || suite(chosen))
}
