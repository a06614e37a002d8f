//! Memory of pools, written by work that has yet to run when it is sent.

use std::process::ExitCode;
use std::sync::Arc;

use cuda::{Buffer, Context, Pool, Stream};
use cuda_memory::share_buffer;
use rung::{DType, Refusal, Rung, Storage, Trust};
use segment::PeerTrust;
use testkit::carrier::{Maker, Suite, main as suite};
use testkit::stand_in;
use tier_pool_ipc::{Contract, PoolIpc, STEP, alloc_on};

fn context() -> Result<Arc<Context>, Refusal> {
    Context::of(cuda::driver()?.devices()[0].device())
}

/// Contents, by a copy that nobody has waited for.
fn contents(bytes: &[u8], stream: &Stream) -> Result<Buffer, Refusal> {
    let contents = Buffer::stream_ordered(stream, bytes.len())?;
    contents.write_at(0, bytes, stream)?;
    stream.synchronize()?;
    Ok(contents)
}

/// Of this process's pool.
fn born(bytes: &[u8]) -> Arc<Storage> {
    let make = || {
        let context = context()?;
        let stream = Stream::new(&context)?;
        let contents = share_buffer(contents(bytes, &stream)?, &stream, DType::U8, &[bytes.len()])?;
        let mut born = alloc_on(context.device(), DType::U8, &[bytes.len()])?;
        let written = born.on(&stream)?;
        written.copy_from(&cuda_memory::on(&contents, &stream)?)?;
        drop(written);
        Ok::<_, Refusal>(born.share().into_storage())
    };
    make().expect("memory of a pool")
}

/// Of a pool of somebody else's in this process, and not at the beginning of its allocation.
fn adopted(bytes: &[u8]) -> Arc<Storage> {
    let make = || {
        let context = context()?;
        let stream = Stream::new(&context)?;
        let contents = contents(bytes, &stream)?;
        let size = (bytes.len() + 512).next_multiple_of(STEP);
        let all = Pool::shareable(&context)?.allocate(size, &stream)?;
        all.fill(0xEE, &stream)?;
        let part = all.part(512..512 + bytes.len())?;
        part.copy_from(&contents, &stream)?;
        Ok::<_, Refusal>(share_buffer(part, &stream, DType::U8, &[bytes.len()])?.into_storage())
    };
    make().expect("memory of another pool")
}

const POOLED: &[(&str, Maker)] = &[("born", born), ("adopted", adopted)];

static POOL: Suite = Suite {
    rung: || Box::new(PoolIpc::experimental(Contract::V1)) as Box<dyn Rung>,
    native: POOLED,
    copied: &[],
    trust: |pid| PeerTrust::same_executable(pid).map_or(Trust::none(), Trust::carrying),
};

/// Runs the suite on the driver there is, or the stand-in.
pub(crate) fn run(deferred: bool) -> ExitCode {
    stand_in::main(deferred, || suite(&POOL))
}
