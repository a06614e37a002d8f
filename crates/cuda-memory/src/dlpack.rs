//! Tensors of other frameworks in this process, by DLPack.

use std::sync::Arc;

use cuda::Stream;
use dlpark::versioned::Dlpack;
use rung::{Flags, Refusal, Storage, Tensor};

use crate::block::{Block, Hold};
use crate::memory::CudaMemory;
use crate::tensor::on;

/// A tensor that another framework produced, to be sent as [`share_buffer`](crate::share_buffer)'s: `order` is the stream
/// that it is ready on.
///
/// # Errors
///
/// Those of [`cuda::dlpack::import`].
pub fn from_dlpack(managed: Dlpack, order: &Stream) -> Result<Tensor, Refusal> {
    let imported = cuda::dlpack::import(managed)?;
    let (buffer, layout) = (imported.buffer, imported.layout);
    let len = buffer.len();
    buffer.used_on(order);
    let hold = Hold::new(Block::new(buffer, order.clone()));
    let storage = Arc::new(Storage::new(CudaMemory::own(hold, false, 0, len)));
    let (shape, strides) = (layout.shape(), layout.strides());
    let tensor = Tensor::new(storage, layout.dtype(), shape, strides, layout.offset())?;
    Ok(tensor.with_flags(imported.flags))
}

/// The tensor, and the stream that the consumer works on.
struct Lent {
    tensor: Tensor,
    stream: Stream,
}

impl Drop for Lent {
    fn drop(&mut self) {
        // What the consumer has enqueued by now comes before whatever the owner does next.
        if let Err(refusal) = on(&self.tensor, &self.stream).map(drop) {
            tracing::warn!("not ordered after the work of a consumer: {refusal}");
        }
    }
}

/// A tensor of these rungs for another framework, which works on it on `stream` and must not write it: what is lent is
/// not for anybody to write, and says so.
///
/// # Errors
///
/// Those of [`on`] and [`cuda::dlpack::export`].
pub fn to_dlpack(tensor: &Tensor, stream: &Stream) -> Result<Dlpack, Refusal> {
    let used = on(tensor, stream)?;
    let flags = Flags { read_only: true, ..tensor.flags() };
    let owner = Lent { tensor: tensor.clone(), stream: stream.clone() };
    cuda::dlpack::export(used.buffer(), tensor.layout(), flags, owner)
}
