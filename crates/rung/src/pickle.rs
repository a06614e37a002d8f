//! Pickles, held unopened.

use std::borrow::Cow;
use std::sync::Arc;

use crate::dtype::DType;
use crate::reason::{Reason, Refusal};
use crate::storage::Storage;
use crate::tensor::Tensor;

/// A pickle that this side does not open: a stream of bytes, and the buffers that its producer kept out
/// of it (PEP 574), byte for byte as they were made.
///
/// It can be held, compared and forwarded, and outlives its producer. `tier-pickle` makes pickles of any
/// `serde` type, and opens those that hold plain data; nothing here or there executes one.
#[derive(Debug, Clone, PartialEq)]
pub struct OpaquePickle {
    stream: Tensor,
    buffers: Vec<Tensor>,
}

impl OpaquePickle {
    /// From the bytes that a pickler wrote.
    #[must_use]
    pub fn new(stream: impl Into<bytes::Bytes>) -> Self {
        let stream = Tensor::all_bytes(Arc::new(Storage::from_bytes(stream)));
        Self { stream, buffers: Vec::new() }
    }

    /// With the buffers that were kept out of the stream, in their order.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongDType`] for anything but bytes in one dimension.
    pub fn with_buffers(mut self, buffers: Vec<Tensor>) -> Result<Self, Refusal> {
        for buffer in &buffers {
            bytes_in_a_row(buffer)?;
        }
        self.buffers = buffers;
        Ok(self)
    }

    /// From memory that holds the stream.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongDType`] for anything but bytes in one dimension.
    pub fn from_tensors(stream: Tensor, buffers: Vec<Tensor>) -> Result<Self, Refusal> {
        bytes_in_a_row(&stream)?;
        let empty = Self { stream, buffers: Vec::new() };
        empty.with_buffers(buffers)
    }

    /// The stream as memory.
    #[must_use]
    pub fn stream(&self) -> &Tensor {
        &self.stream
    }

    /// The buffers that were kept out of the stream.
    #[must_use]
    pub fn buffers(&self) -> &[Tensor] {
        &self.buffers
    }

    /// The stream: lent where it may be, else copied out.
    ///
    /// # Errors
    ///
    /// A refusal where the CPU cannot read the memory.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>, Refusal> {
        self.stream.storage().read(self.stream.layout().span())
    }

    /// Bytes of the stream and the buffers.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        let buffers = self.buffers.iter().map(Tensor::byte_count);
        buffers.fold(self.stream.byte_count(), usize::saturating_add)
    }
}

fn bytes_in_a_row(tensor: &Tensor) -> Result<(), Refusal> {
    let plain =
        tensor.dtype() == DType::U8 && tensor.shape().len() == 1 && tensor.layout().is_contiguous();
    if plain {
        return Ok(());
    }
    let detail = format!("{} of shape {:?}, not bytes in a row", tensor.dtype(), tensor.shape());
    Err(Refusal::new(Reason::WrongDType, detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pickle_is_its_bytes() {
        let pickle = OpaquePickle::new(vec![0x80, 2, b'N', b'.']);
        assert_eq!(*pickle.bytes().unwrap(), [0x80, 2, b'N', b'.']);
        assert_eq!(pickle, OpaquePickle::new(vec![0x80, 2, b'N', b'.']));
        let buffer = Tensor::from_vec(vec![1u8, 2], &[2]).unwrap();
        let more = pickle.clone().with_buffers(vec![buffer.clone()]).unwrap();
        assert_ne!(more, pickle);
        assert_eq!(more.byte_count(), 6);
        let grid = Tensor::from_vec(vec![1u8, 2], &[1, 2]).unwrap();
        assert_eq!(pickle.with_buffers(vec![grid]).unwrap_err().reason(), Reason::WrongDType);
        assert!(OpaquePickle::from_tensors(buffer.flip(0).unwrap(), vec![]).is_err());
    }
}
