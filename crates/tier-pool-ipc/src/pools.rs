//! This process's own shareable pools, and tensors in them.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use cuda::{Buffer, Context, Pool, Stream, WeakPool};
use cuda_memory::{DeviceTensorMut, lock};
use rung::{DType, Device, Layout, Reason, Refusal};

/// Bytes of one allocation, at most (D3): drivers map something else from 4,096 MiB on, without a word, and end the
/// importer from 5,248 MiB on.
pub const MAX_BYTES: usize = 4064 << 20;

/// What sizes of allocations are multiples of (D3).
pub const STEP: usize = 32 << 20;

/// One pool a device, for as long as anybody has memory of it: it holds a context, and its memory does not go back to the
/// system while it is there. Whoever allocates again and again keeps one tensor of it.
static MINE: LazyLock<Mutex<HashMap<Device, WeakPool>>> = LazyLock::new(Mutex::default);

fn pool_of(context: &std::sync::Arc<Context>) -> Result<Pool, Refusal> {
    let known = || lock(&MINE).get(&context.device()).and_then(WeakPool::upgrade);
    if let Some(pool) = known() {
        return Ok(pool);
    }
    let pool = Pool::shareable(context)?;
    // Two who make one at once have two: both are good.
    lock(&MINE).insert(context.device(), pool.downgrade());
    Ok(pool)
}

/// Memory of this process's pool of a device, in the order of a stream: at least so many bytes, and all that they are
/// rounded up to are zero.
pub(crate) fn allocate(stream: &Stream, len: usize) -> Result<Buffer, Refusal> {
    let size = len.max(1).checked_next_multiple_of(STEP).filter(|size| *size <= MAX_BYTES);
    let size = size.ok_or_else(|| too_large(len))?;
    let buffer = pool_of(stream.context())?.allocate(size, stream)?;
    // What was in it before is nobody's to see (L8).
    buffer.fill(0, stream)?;
    buffer.part(0..len)
}

pub(crate) fn too_large(len: usize) -> Refusal {
    let detail = format!(
        "{len} bytes: an allocation of a pool may have {} MiB at most (D3)",
        MAX_BYTES >> 20
    );
    Refusal::new(Reason::OverCap, detail)
}

/// A tensor of memory that peers are shown as it is, of a pool of this process's; its bytes are zero.
///
/// It takes a multiple of 32 MiB. One that is too large for a pool is of memory that leaves by descriptor
/// (`cuda-vmm`), and its route says why.
///
/// # Errors
///
/// As [`cuda::driver()`] and [`Pool::shareable`], and those of [`Layout::contiguous`].
pub fn alloc_on(device: Device, dtype: DType, shape: &[usize]) -> Result<DeviceTensorMut, Refusal> {
    let layout = Layout::contiguous(dtype, shape)?;
    let len = layout.byte_count();
    if len > MAX_BYTES {
        return cuda_memory::alloc_on(device, dtype, shape);
    }
    let stream = Stream::new(&Context::of(device)?)?;
    Ok(DeviceTensorMut::of(allocate(&stream, len)?, stream, layout))
}
