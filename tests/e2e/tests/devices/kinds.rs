//! Device memory of every kind, written by work that nobody has waited for.

use ladder::tier_cuda_ipc::cuda::{Buffer, Context, Stream};
use ladder::tier_cuda_ipc::{on, share_buffer};
use ladder::{DType, Device, Refusal, Tensor};

/// A kind of memory, what it rides where all is well, and with how many copies.
#[derive(Debug)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) rung: &'static str,
    pub(crate) copies: u8,
}

pub(crate) const KINDS: &[Kind] = &[
    Kind { name: "plain", rung: "cuda-ipc", copies: 0 },
    Kind { name: "piece", rung: "cuda-ipc", copies: 0 },
    Kind { name: "shareable", rung: "cuda-vmm", copies: 0 },
    Kind { name: "stream ordered", rung: "cuda-vmm", copies: 1 },
    Kind { name: "managed", rung: "cuda-vmm", copies: 1 },
    // Where nobody asked for pools.
    Kind { name: "pool", rung: "cuda-vmm", copies: 1 },
];

/// So many bytes that are others for each seed.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8 ^ seed.wrapping_mul(41)).collect()
}

/// A tensor of a kind of memory.
pub(crate) fn tensor_of(kind: &str, device: Device, bytes: &[u8]) -> Result<Tensor, Refusal> {
    let context = Context::of(device)?;
    let stream = Stream::new(&context)?;
    let len = bytes.len();
    let contents = Buffer::stream_ordered(&stream, len)?;
    contents.write_at(0, bytes, &stream)?;
    if kind == "pool" {
        let contents = share_buffer(contents, &stream, DType::U8, &[len])?;
        let mut tensor = ladder::tier_pool_ipc::alloc_on(device, DType::U8, &[len])?;
        {
            let written = tensor.on(&stream)?;
            written.fill(0xEE)?;
            written.copy_from(&on(&contents, &stream)?)?;
        }
        return Ok(tensor.share());
    }
    let buffer = match kind {
        "piece" => Buffer::plain(&context, len + 10_000)?.part(512..512 + len)?,
        "shareable" => Buffer::shareable(&context, len)?,
        "stream ordered" => Buffer::stream_ordered(&stream, len)?,
        "managed" => Buffer::managed(&context, len)?,
        _ => Buffer::plain(&context, len)?,
    };
    buffer.fill(0xEE, &stream)?;
    stream.synchronize()?;
    buffer.copy_from(&contents, &stream)?;
    share_buffer(buffer, &stream, DType::U8, &[len])
}
