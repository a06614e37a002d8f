//! `cudarc`'s slices in, and views of this crate's buffers as `cudarc`'s slices out.
#![expect(unsafe_code, reason = "handles that two libraries share")]

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use rung::{Device, Reason, Refusal};

use crate::context::Context;
use crate::memory::Buffer;
use crate::stream::Stream;

/// The device of a stream of `cudarc`'s.
fn device_of(stream: &CudaStream) -> Result<Device, Refusal> {
    let driver = crate::driver()?;
    let ordinal = i32::try_from(stream.context().ordinal()).map_err(|_| Reason::DeviceUnknown)?;
    let known = driver.devices().iter().find(|info| info.ordinal() == ordinal);
    Ok(known.ok_or(Reason::DeviceUnknown)?.device())
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

impl Stream {
    /// A stream of `cudarc`'s; both libraries use the primary context.
    ///
    /// # Errors
    ///
    /// As [`Context::of`], and [`Reason::Driver`] where `cudarc` made a context of its own.
    pub fn of_cudarc(stream: &Arc<CudaStream>) -> Result<Self, Refusal> {
        let context = Context::of(device_of(stream)?)?;
        if stream.cu_stream() as usize == PER_THREAD {
            // Another stream on each thread: whoever asks whether it is done asks about its own.
            return Err(Refusal::new(
                Reason::Driver,
                "the per-thread stream orders nothing for others",
            ));
        }
        if !context.is(stream.context().cu_ctx()) {
            return Err(Refusal::new(Reason::Driver, "not a stream of the primary context"));
        }
        // SAFETY: a stream of this very context, as was just seen; its owner is kept.
        Ok(unsafe { Self::borrowed(&context, stream.cu_stream(), Arc::clone(stream) as Arc<_>) })
    }
}

impl Buffer {
    /// A slice of `cudarc`'s, and the stream that its memory is ordered by: everything that was written into it so
    /// far comes before what is enqueued there from now on.
    ///
    /// # Errors
    ///
    /// As [`Stream::of_cudarc`].
    pub fn of_slice<T: DeviceRepr + Send + Sync + 'static>(
        slice: CudaSlice<T>,
    ) -> Result<(Self, Stream), Refusal> {
        let stream = Arc::clone(slice.stream());
        let ours = Stream::of_cudarc(&stream)?;
        let (address, len) = {
            // The stream now waits for what others wrote.
            let (address, _read) = slice.device_ptr(&stream);
            (address, slice.num_bytes())
        };
        // SAFETY: the slice's own memory, freed by its drop, which orders itself after its stream.
        let buffer = unsafe { Self::adopt(ours.context(), address, len, slice) };
        Ok((buffer, ours))
    }

    /// The elements as a slice of `cudarc`'s, for its functions; to be read, and only by work on this stream.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] where the bytes are no whole number of elements, [`Reason::Misaligned`], and
    /// [`Reason::DeviceUnknown`] where the stream is another device's.
    pub fn as_slice<T: DeviceRepr + AnyBitPattern>(
        &self,
        stream: &Arc<CudaStream>,
    ) -> Result<SliceView<'_, T>, Refusal> {
        if device_of(stream)? != self.device() {
            return Err(Refusal::new(Reason::DeviceUnknown, "the stream is another device's"));
        }
        let size = size_of::<T>().max(1);
        if !self.len().is_multiple_of(size) {
            let detail = format!("{} bytes of elements of {size}", self.len());
            return Err(Refusal::new(Reason::ShapeMismatch, detail));
        }
        if !self.address().is_multiple_of(align_of::<T>() as u64) {
            return Err(Reason::Misaligned.into());
        }
        // SAFETY: memory of this many elements, which `SliceView` keeps, and which it never lets the slice free.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(self.address(), self.len() / size) };
        self.used_on(&Stream::of_cudarc(stream)?);
        Ok(SliceView { slice: ManuallyDrop::new(slice), _buffer: PhantomData })
    }
}

/// A [`Buffer`] as `cudarc` sees it: a shared reference to a slice, and nothing that could free or write it.
#[derive(Debug)]
pub struct SliceView<'a, T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    _buffer: PhantomData<&'a Buffer>,
}

impl<T> Deref for SliceView<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> Drop for SliceView<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here; the view is not used after.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Not freed: the buffer owns it. What reads it is waited for by the slice's own stream.
        let _ = slice.leak();
    }
}
