//! Tensors on a device: born shareable, or made of memory that somebody else allocated.

use std::sync::Arc;

use cuda::{Buffer, Context, Stream};
use cudarc::driver::{CudaSlice, DeviceRepr};
use rung::{DType, Device, Element, Layout, Reason, Refusal, Storage, Tensor};

use crate::block::{Block, Hold};
use crate::memory::{CudaMemory, Source, Use, or_wait};

fn storage(hold: Arc<Hold>, len: usize) -> Arc<Storage> {
    Arc::new(Storage::new(CudaMemory::own(hold, false, 0, len)))
}

/// A tensor on a device that is being filled, of memory that goes to peers without a copy.
#[derive(Debug)]
pub struct DeviceTensorMut {
    hold: Arc<Hold>,
    layout: Layout,
}

/// A tensor of a device's memory that peers are shown as it is; its bytes are zero.
///
/// It leaves as a descriptor; where the device has no such memory, it is plain, and leaves by handle.
///
/// # Errors
///
/// As [`cuda::driver()`] and [`cuda::Buffer::shareable`], and those of [`Layout::contiguous`].
pub fn alloc_on(device: Device, dtype: DType, shape: &[usize]) -> Result<DeviceTensorMut, Refusal> {
    let layout = Layout::contiguous(dtype, shape)?;
    let context = Context::of(device)?;
    let buffer = Buffer::for_peers(&context, layout.byte_count().max(1))?;
    Ok(DeviceTensorMut::of(buffer, Stream::new(&context)?, layout))
}

/// A copy of a tensor on a device, shareable.
///
/// # Errors
///
/// As [`alloc_on`], or a refusal where its memory cannot be read here.
pub fn copy_to(device: Device, tensor: &Tensor) -> Result<Tensor, Refusal> {
    let mut copy = alloc_on(device, tensor.dtype(), tensor.shape())?;
    if tensor.layout().is_contiguous() {
        // From where it lies: what the driver knows is copied without a detour.
        copy.write(&tensor.storage().read(tensor.layout().span())?)?;
    } else {
        copy.write(&tensor.to_bytes()?)?;
    }
    Ok(copy.share())
}

impl DeviceTensorMut {
    /// Of memory that a rung allocated for peers: at least as many bytes as the layout has, for nobody else to see.
    #[must_use]
    pub fn of(buffer: Buffer, order: Stream, layout: Layout) -> Self {
        Self { hold: Hold::new(Block::new(buffer, order).born_for_peers()), layout }
    }

    /// Elements in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.hold.block().buffer.device()
    }

    /// Bytes from the host into all of it, in C order and little-endian.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] for another number of bytes, or what the driver answers.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        if bytes.len() != self.layout.byte_count() {
            let detail = format!("{} bytes into {}", bytes.len(), self.layout.byte_count());
            return Err(Refusal::new(Reason::ShapeMismatch, detail));
        }
        self.hold.block().buffer.write_at(0, bytes, &self.hold.block().order)
    }

    /// Its memory, for work that writes it on a stream; enqueued before the guard is dropped.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn on(&mut self, stream: &Stream) -> Result<UseMut<'_>, Refusal> {
        stream.after(&self.hold.block().order)?;
        Ok(UseMut { tensor: self, stream: stream.clone() })
    }

    /// To be sent: nobody writes it from now on.
    #[must_use]
    pub fn share(self) -> Tensor {
        let len = self.layout.byte_count();
        let storage = storage(self.hold, len);
        // A storage of exactly as many bytes as the layout has.
        let (dtype, shape) = (self.layout.dtype(), self.layout.shape());
        Tensor::contiguous(Arc::clone(&storage), dtype, shape)
            .unwrap_or_else(|_| Tensor::all_bytes(storage))
    }

    /// The tensor to be written again, once every lease is home and nobody else holds it.
    ///
    /// # Errors
    ///
    /// The tensor, unchanged: it is still lent or held, is not of [`alloc_on`], or was seen by a peer who is not
    /// trusted, and might go on looking.
    pub fn reclaim(tensor: Tensor) -> Result<Self, Tensor> {
        let may = |memory: &CudaMemory| match memory.source() {
            Source::Own(hold, false) => {
                Arc::strong_count(hold) == 1
                    && hold.block().may_be_written()
                    && hold.block().is_born_for_peers()
            }
            _ => false,
        };
        let (memory, layout) = tensor.try_into_memory::<CudaMemory>(may)?;
        match memory.source().clone() {
            Source::Own(hold, _) => Ok(Self { hold, layout }),
            Source::Theirs(_) => Err(Tensor::all_bytes(Arc::new(Storage::new(memory)))),
        }
    }
}

/// Device memory that work on a stream may write, until this is dropped.
#[derive(Debug)]
pub struct UseMut<'a> {
    tensor: &'a mut DeviceTensorMut,
    stream: Stream,
}

impl UseMut<'_> {
    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.tensor.hold.block().buffer.address()
    }

    /// Enqueues a copy of other memory of this device to the beginning of this, which is at least as long.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`], or what the driver answers.
    pub fn copy_from(&self, from: &Use<'_>) -> Result<(), Refusal> {
        self.stream.after(from.stream())?;
        self.tensor.hold.block().buffer.copy_from(from.buffer(), &self.stream)?;
        from.stream().after(&self.stream)
    }

    /// Enqueues that every byte become this one.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn fill(&self, byte: u8) -> Result<(), Refusal> {
        self.tensor.hold.block().buffer.fill(byte, &self.stream)
    }

    /// The stream that it may be written on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for UseMut<'_> {
    fn drop(&mut self) {
        or_wait(&self.stream, self.tensor.hold.block().order.after(&self.stream));
    }
}

/// A tensor of memory that somebody else allocated, and the stream that its owner orders work on it by.
///
/// What becomes of it is asked of the driver when it is sent: `cuMemAlloc`'s goes by handle (`cuda-ipc`), what was
/// created shareable by descriptor, all else is copied once on the device. Until every lease is home nobody may write
/// it: work that its owner enqueues on `order` comes after what peers still do to it, work elsewhere does not.
///
/// # Errors
///
/// [`Reason::ShapeMismatch`] where the buffer has another number of bytes, and those of [`Layout::contiguous`].
pub fn share_buffer(
    buffer: Buffer,
    order: &Stream,
    dtype: DType,
    shape: &[usize],
) -> Result<Tensor, Refusal> {
    let len = buffer.len();
    buffer.used_on(order);
    let hold = Hold::new(Block::new(buffer, order.clone()));
    Tensor::contiguous(storage(hold, len), dtype, shape)
}

/// A tensor of a slice of `cudarc`'s, as [`share_buffer`].
///
/// # Errors
///
/// As [`share_buffer`] and [`cuda::Buffer::of_slice`].
pub fn share_slice<T: Element + DeviceRepr + Send + Sync>(
    slice: CudaSlice<T>,
    shape: &[usize],
) -> Result<Tensor, Refusal> {
    let (buffer, order) = Buffer::of_slice(slice)?;
    share_buffer(buffer, &order, T::DTYPE, shape)
}

/// A tensor's memory for work on a stream, which may read it: [`CudaMemory::on`].
///
/// The first element lies [`Tensor::offset`] bytes after the address.
///
/// # Errors
///
/// [`Reason::OtherKind`] for a tensor of other memory, and those of [`CudaMemory::on`].
pub fn on<'a>(tensor: &'a Tensor, stream: &Stream) -> Result<Use<'a>, Refusal> {
    CudaMemory::of(tensor.storage())?.on(stream)
}
