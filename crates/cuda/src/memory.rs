//! Device memory with an owner, and what a pointer says of itself.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdeviceptr, CUmemAttach_flags as attach, CUmemorytype as memory_type,
    CUpointer_attribute as attribute,
};
use rung::{Device, Reason, Refusal};

use crate::context::{Context, Entered};
use crate::ipc::Shareable;
use crate::keeps::{Allocation, Foreign, Keeps};
use crate::pool::Pool;
use crate::stream::Stream;

/// Device memory and whatever keeps it; a clone, or a [part](Self::part), is the same memory.
///
/// It lends no references: the CPU does not see it, and work that reads or writes it may be under way. What it has
/// is an address, for work on a stream that is ordered against others by whoever enqueues it.
#[derive(Clone)]
pub struct Buffer {
    context: Arc<Context>,
    address: CUdeviceptr,
    len: usize,
    owner: Arc<dyn Keeps>,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes at {:#x} on {})", self.len, self.address, self.context.device())
    }
}

/// What a pointer says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attributes {
    /// Whether it is memory of a device, as the driver calls it: not the host's.
    pub is_device: bool,
    /// The device's number in this process.
    pub ordinal: i32,
    /// Memory that moves between host and devices.
    pub is_managed: bool,
    /// Whether a handle of the older kind can be made of it (`cuIpcGetMemHandle`).
    pub is_legacy_ipc_capable: bool,
    /// The address and the bytes of the whole allocation.
    pub range: (u64, usize),
    /// A number that no other allocation of this process ever has.
    pub buffer_id: u64,
}

/// Asks about an address; one that the driver does not know is refused by it.
pub(crate) fn attributes(
    entered: &Entered<'_>,
    address: CUdeviceptr,
) -> Result<Attributes, Refusal> {
    fn ask<T: Copy>(
        entered: &Entered<'_>,
        what: attribute,
        address: CUdeviceptr,
        zero: T,
    ) -> Result<T, Refusal> {
        let mut value = zero;
        let into: *mut c_void = (&raw mut value).cast();
        // SAFETY: C1: each of the attributes asked for below is written as the type that stands there. The address
        // is looked up by the driver, not followed.
        let code = unsafe {
            (entered.driver().functions.cuPointerGetAttribute)(into, what as c_uint, address)
        };
        entered.check("cuPointerGetAttribute", code)?;
        Ok(value)
    }
    // Eight bytes for what is four in some drivers' eyes: zeroed before, so right in little-endian order.
    let flag = |what| ask::<u64>(entered, what, address, 0).map(|value| value != 0);
    let kind = ask::<c_uint>(entered, attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address, 0)?;
    let start = ask::<u64>(entered, attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address, 0)?;
    let size = ask::<usize>(entered, attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address, 0)?;
    Ok(Attributes {
        is_device: kind == memory_type::CU_MEMORYTYPE_DEVICE as c_uint,
        ordinal: ask::<c_int>(
            entered,
            attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
            -1,
        )?,
        is_managed: flag(attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED)?,
        is_legacy_ipc_capable: flag(attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)?,
        range: (start, size),
        buffer_id: ask::<u64>(entered, attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address, 0)?,
    })
}

impl Buffer {
    pub(crate) fn kept(
        context: &Arc<Context>,
        address: CUdeviceptr,
        len: usize,
        owner: Arc<dyn Keeps>,
    ) -> Self {
        Self { context: Arc::clone(context), address, len, owner }
    }

    /// The same, of so many bytes: what the driver says of it.
    pub(crate) fn with_len(self, len: usize) -> Self {
        Self { len, ..self }
    }

    fn allocated(
        context: &Arc<Context>,
        len: usize,
        stream: Option<&Stream>,
        call: &'static str,
        allocate: impl FnOnce(&Entered<'_>, &mut CUdeviceptr) -> u32,
    ) -> Result<Self, Refusal> {
        let entered = context.enter()?;
        let mut address = 0;
        let code = allocate(&entered, &mut address);
        entered.check(call, code)?;
        let owner = Allocation::new(context, address, stream.cloned());
        Ok(Self::kept(context, address, len, Arc::new(owner)))
    }

    /// As `cuMemAlloc`: what handles of the older kind can be made of.
    ///
    /// # Errors
    ///
    /// [`Reason::NoMemory`], or what else the driver answers: 0 bytes are refused.
    pub fn plain(context: &Arc<Context>, len: usize) -> Result<Self, Refusal> {
        Self::allocated(context, len, None, "cuMemAlloc_v2", |entered, address| {
            // SAFETY: C1: writes one address. C2: freed by its owner.
            unsafe { (entered.driver().functions.cuMemAlloc_v2)(address, len) }
        })
    }

    /// As `cuMemAllocAsync`, in the order of a stream: what most frameworks and `cudarc` use.
    ///
    /// # Errors
    ///
    /// As [`Self::plain`].
    pub fn stream_ordered(stream: &Stream, len: usize) -> Result<Self, Refusal> {
        let call = "cuMemAllocAsync";
        Self::allocated(stream.context(), len, Some(stream), call, |entered, address| {
            // SAFETY: C1: writes one address, on a living stream. C2: freed by its owner.
            unsafe { (entered.driver().functions.cuMemAllocAsync)(address, len, stream.raw()) }
        })
    }

    /// As `cuMemAllocManaged`: memory that moves between host and devices.
    ///
    /// # Errors
    ///
    /// As [`Self::plain`].
    pub fn managed(context: &Arc<Context>, len: usize) -> Result<Self, Refusal> {
        let flags = attach::CU_MEM_ATTACH_GLOBAL as c_uint;
        Self::allocated(context, len, None, "cuMemAllocManaged", |entered, address| {
            // SAFETY: C1: writes one address. C2: freed by its owner.
            unsafe { (entered.driver().functions.cuMemAllocManaged)(address, len, flags) }
        })
    }

    /// Memory that can leave as a descriptor (`cuMemCreate`), mapped for its device; at least so many bytes, and
    /// all that the device rounds them up to are zero until somebody writes them.
    ///
    /// # Errors
    ///
    /// As [`Self::plain`].
    pub fn shareable(context: &Arc<Context>, len: usize) -> Result<Self, Refusal> {
        let owner = Shareable::create(context, len)?;
        let (address, mapped) = (owner.address(), owner.len());
        let whole = Self::kept(context, address, mapped, Arc::new(owner));
        // What was in it before is nobody's to see (L8).
        let stream = context.stream()?;
        whole.fill(0, &stream)?;
        stream.synchronize()?;
        whole.part(0..len)
    }

    /// Memory that somebody else owns.
    ///
    /// # Safety
    ///
    /// `address` and `len` are memory of this context's device that stays allocated for as long as `owner` lives,
    /// and until the work that was enqueued on it by then is done.
    pub unsafe fn adopt(
        context: &Arc<Context>,
        address: u64,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Self {
        let owner = Foreign::new(context, owner);
        Self::kept(context, address, len, Arc::new(owner))
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins, for work that is enqueued on a stream. Whoever follows it keeps this buffer until that
    /// work is done.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.context.device()
    }

    /// What the driver says of it.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn attributes(&self) -> Result<Attributes, Refusal> {
        attributes(&self.context.enter()?, self.address)
    }

    /// Frees it, as dropping it does, and says what the driver answered; by its only user.
    ///
    /// # Errors
    ///
    /// [`Reason::OtherKind`] where somebody else has it too, or it is not of one of the driver's allocators, or what the
    /// driver answers.
    pub fn free(self) -> Result<(), Refusal> {
        if Arc::strong_count(&self.owner) > 1 {
            return Err(Refusal::new(Reason::OtherKind, "somebody else has it too"));
        }
        self.owner.free()
    }

    /// Work was enqueued on it, on a stream that this crate did not see it on: it comes before its end.
    pub fn used_on(&self, stream: &Stream) {
        self.owner.used_on(stream);
    }

    /// A range of it, which keeps the whole.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`].
    pub fn part(&self, range: Range<usize>) -> Result<Self, Refusal> {
        if range.start > range.end || range.end > self.len {
            let detail = format!("{range:?} of {} bytes", self.len);
            return Err(Refusal::new(Reason::OutOfBounds, detail));
        }
        let address = self.address + range.start as u64;
        Ok(Self { address, len: range.len(), ..self.clone() })
    }

    /// All that its allocation has, where it is one that can leave as a descriptor.
    #[must_use]
    pub fn as_shareable(&self) -> Option<&Shareable> {
        self.owner.shareable()
    }

    /// The pool that it is of, where that is a [`Pool`] of this process or an import.
    #[must_use]
    pub fn pool(&self) -> Option<&Pool> {
        self.owner.pool()
    }

    /// Where in its shareable allocation it begins.
    #[must_use]
    pub fn offset_in(&self, shareable: &Shareable) -> Option<usize> {
        usize::try_from(self.address.checked_sub(shareable.address())?).ok()
    }

    fn checked(&self, offset: usize, len: usize) -> Result<CUdeviceptr, Refusal> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address + offset as u64),
            _ => {
                let detail = format!("{len} bytes from {offset} on, of {}", self.len);
                Err(Refusal::new(Reason::OutOfBounds, detail))
            }
        }
    }

    /// Copies bytes to the host, after what is enqueued on a stream; done when it returns.
    ///
    /// # Errors
    ///
    /// [`Reason::OutOfBounds`], or what the driver answers.
    pub fn read_at(&self, offset: usize, into: &mut [u8], stream: &Stream) -> Result<(), Refusal> {
        let from = self.checked(offset, into.len())?;
        if into.is_empty() {
            return Ok(());
        }
        let entered = self.context.enter()?;
        let functions = &entered.driver().functions;
        // SAFETY: C1; C4: a range of this buffer, which is borrowed; C5: `into` is borrowed until the wait below.
        let code = unsafe {
            (functions.cuMemcpyDtoHAsync_v2)(
                into.as_mut_ptr().cast(),
                from,
                into.len(),
                stream.raw(),
            )
        };
        let copied = entered.check("cuMemcpyDtoHAsync_v2", code);
        // Also where it failed: nothing may write there any more (C5).
        stream.synchronize().and(copied)
    }

    /// Copies bytes from the host, after what is enqueued on a stream; done when it returns.
    ///
    /// # Errors
    ///
    /// As [`Self::read_at`].
    pub fn write_at(&self, offset: usize, from: &[u8], stream: &Stream) -> Result<(), Refusal> {
        let to = self.checked(offset, from.len())?;
        if from.is_empty() {
            return Ok(());
        }
        let entered = self.context.enter()?;
        let functions = &entered.driver().functions;
        // SAFETY: C1; C4: a range of this buffer, which is borrowed; C5: `from` is borrowed until the wait below.
        let code = unsafe {
            (functions.cuMemcpyHtoDAsync_v2)(to, from.as_ptr().cast(), from.len(), stream.raw())
        };
        let copied = entered.check("cuMemcpyHtoDAsync_v2", code);
        stream.synchronize().and(copied)
    }

    /// Enqueues a copy of all of another buffer of this device to the beginning of this one. Whoever drops either
    /// before it is done has ordered what ends them after it.
    ///
    /// # Errors
    ///
    /// As [`Self::read_at`].
    pub fn copy_from(&self, from: &Self, stream: &Stream) -> Result<(), Refusal> {
        let to = self.checked(0, from.len)?;
        if from.is_empty() {
            return Ok(());
        }
        let entered = self.context.enter()?;
        self.used_on(stream);
        from.used_on(stream);
        let functions = &entered.driver().functions;
        // SAFETY: C1; C4: two buffers whose allocators wait for, or order themselves after, what is enqueued.
        let code =
            unsafe { (functions.cuMemcpyDtoDAsync_v2)(to, from.address, from.len, stream.raw()) };
        entered.check("cuMemcpyDtoDAsync_v2", code)
    }

    /// Enqueues that every byte become this one.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<(), Refusal> {
        let entered = self.context.enter()?;
        self.used_on(stream);
        let functions = &entered.driver().functions;
        // SAFETY: C1; C4: this buffer, whose allocator waits for what is enqueued.
        let code =
            unsafe { (functions.cuMemsetD8Async)(self.address, byte, self.len, stream.raw()) };
        entered.check("cuMemsetD8Async", code)
    }

    /// Memory that peers can be shown as it is: shareable where the device has such, else plain.
    ///
    /// # Errors
    ///
    /// As [`Self::plain`].
    pub fn for_peers(context: &Arc<Context>, len: usize) -> Result<Self, Refusal> {
        let info = crate::driver()?.device(context.device())?;
        if info.can().share_descriptors {
            return Self::shareable(context, len);
        }
        // Alone in what a handle stands for.
        let whole = len.checked_next_multiple_of(2 << 20).ok_or(Reason::NoMemory)?;
        let buffer = Self::plain(context, whole)?;
        let stream = context.stream()?;
        buffer.fill(0, &stream)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// The bounds of the allocation that an address lies in, as the driver knows them.
    pub(crate) fn bounds(
        entered: &Entered<'_>,
        address: CUdeviceptr,
    ) -> Result<(u64, usize), Refusal> {
        let (mut base, mut size) = (0, 0);
        let functions = &entered.driver().functions;
        // SAFETY: C1: writes an address and a size; the address is looked up, not followed.
        let code =
            unsafe { (functions.cuMemGetAddressRange_v2)(&raw mut base, &raw mut size, address) };
        entered.check("cuMemGetAddressRange_v2", code)?;
        Ok((base, size))
    }
}

const _: () = assert!(size_of::<c_int>() == 4, "as everywhere that there is a driver");
