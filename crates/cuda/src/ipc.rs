//! Both ways in which device memory crosses to another process.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdeviceptr, CUipcMem_flags as ipc_flags, CUipcMemHandle, CUmemGenericAllocationHandle,
};
use rung::{Fault, Handle, Reason, Refusal};

use crate::context::{Context, Entered};
use crate::descriptor;
use crate::functions::{MemAccessDesc, MemAllocationProp, MemLocation};
use crate::keeps::Keeps;
use crate::memory::Buffer;

/// What names an allocation to another process, in the older way: good while this process keeps it.
///
/// It stands for the whole allocation, whatever address in it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemHandle(pub [u8; 64]);

impl MemHandle {
    /// Of the allocation that a buffer lies in.
    ///
    /// # Errors
    ///
    /// What the driver answers: memory of most allocators has none ([`crate::Attributes`]).
    pub fn of(buffer: &Buffer) -> Result<Self, Refusal> {
        let entered = buffer.context().enter()?;
        let (base, _) = Buffer::bounds(&entered, buffer.address())?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: C1: writes 64 bytes; the address is looked up, not followed.
        let code = unsafe { (entered.driver().functions.cuIpcGetMemHandle)(&raw mut handle, base) };
        entered.check("cuIpcGetMemHandle", code)?;
        Ok(Self(handle.reserved.map(|byte| byte.cast_unsigned())))
    }

    /// Maps the whole allocation here. Its owner must not free it before the buffer that this gives is dropped.
    ///
    /// # Errors
    ///
    /// What the driver answers: also in the process that made it, and where that process is gone.
    pub fn open(self, context: &Arc<Context>) -> Result<Buffer, Refusal> {
        let entered = context.enter()?;
        let reserved = self.0.map(u8::cast_signed);
        let flags = ipc_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        let mut address: CUdeviceptr = 0;
        // SAFETY: C1: takes 64 bytes, which the driver checks, and writes an address. C2: closed by its owner.
        let code = unsafe {
            (entered.driver().functions.cuIpcOpenMemHandle_v2)(
                &raw mut address,
                CUipcMemHandle { reserved },
                flags,
            )
        };
        entered.check("cuIpcOpenMemHandle_v2", code)?;
        let owner = Opened { context: Arc::clone(context), address };
        // The driver may have put it into a larger block: what counts is from its own start on.
        let (base, size) = Buffer::bounds(&entered, address)?;
        let before = address.checked_sub(base).and_then(|before| usize::try_from(before).ok());
        let len = before.and_then(|before| size.checked_sub(before)).ok_or(Reason::OutOfBounds)?;
        Ok(Buffer::kept(context, address, len, Arc::new(owner)))
    }
}

/// An allocation of another process, mapped here.
struct Opened {
    context: Arc<Context>,
    address: CUdeviceptr,
}

impl Keeps for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // C3.
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: C1, C2: opened once, closed once; the driver counts where it was opened more often.
        let code = unsafe { (entered.driver().functions.cuIpcCloseMemHandle)(self.address) };
        entered.gave_back("cuIpcCloseMemHandle", code);
    }
}

pub(crate) const POSIX_DESCRIPTOR: c_uint = 1;
pub(crate) const PINNED: c_uint = 1;
pub(crate) const ON_DEVICE: c_uint = 1;
pub(crate) const READ_WRITE: c_uint = 3;
const MINIMUM: c_uint = 0;

const _: () = {
    use cudarc::driver::sys;
    use sys::CUmemAccess_flags as access;
    use sys::CUmemAllocationGranularity_flags as granularity;
    use sys::CUmemLocationType as location;
    assert!(ON_DEVICE == location::CU_MEM_LOCATION_TYPE_DEVICE as c_uint);
    assert!(READ_WRITE == access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint);
    assert!(MINIMUM == granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM as c_uint);
};

/// Physical memory that can leave as a descriptor, ours or another process's, mapped here.
///
/// The driver counts who has it, across processes: it lives until the last of them has let go.
pub struct Shareable {
    context: Arc<Context>,
    handle: CUmemGenericAllocationHandle,
    address: CUdeviceptr,
    len: usize,
    mapped: bool,
}

impl std::fmt::Debug for Shareable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shareable({} bytes at {:#x})", self.len, self.address)
    }
}

impl Keeps for Shareable {
    fn shareable(&self) -> Option<&Shareable> {
        Some(self)
    }
}

impl Shareable {
    fn props(context: &Context) -> MemAllocationProp {
        MemAllocationProp {
            kind: PINNED,
            requested_handle_types: POSIX_DESCRIPTOR,
            location: MemLocation { kind: ON_DEVICE, id: context.ordinal() },
            win32_metadata: std::ptr::null_mut(),
            flags: [0; 8],
        }
    }

    /// What sizes are multiples of.
    fn granularity(entered: &Entered<'_>, context: &Context) -> Result<usize, Refusal> {
        let (mut granularity, props) = (0, Self::props(context));
        // SAFETY: C1: reads the properties and writes a size.
        let code = unsafe {
            (entered.driver().functions.cuMemGetAllocationGranularity)(
                &raw mut granularity,
                &raw const props,
                MINIMUM,
            )
        };
        entered.check("cuMemGetAllocationGranularity", code)?;
        Ok(granularity.max(1))
    }

    pub(crate) fn create(context: &Arc<Context>, len: usize) -> Result<Self, Refusal> {
        let entered = context.enter()?;
        let granularity = Self::granularity(&entered, context)?;
        let len = len.max(1).checked_next_multiple_of(granularity).ok_or(Reason::NoMemory)?;
        let (mut handle, props) = (0, Self::props(context));
        // SAFETY: C1: reads the properties and writes a handle. C2: released by what is made of it below.
        let code = unsafe {
            (entered.driver().functions.cuMemCreate)(&raw mut handle, len, &raw const props, 0)
        };
        entered.check("cuMemCreate", code)?;
        Self::map(context, handle, len)
    }

    /// Takes a handle over, and maps it for its device.
    fn map(
        context: &Arc<Context>,
        handle: CUmemGenericAllocationHandle,
        len: usize,
    ) -> Result<Self, Refusal> {
        let context = Arc::clone(context);
        // From here on whatever is there goes when this is dropped (C2).
        let mut this = Self { context, handle, address: 0, len, mapped: false };
        let context = Arc::clone(&this.context);
        let entered = context.enter()?;
        let functions = &entered.driver().functions;
        // SAFETY: C1: writes an address. C2: given back in `drop`.
        let code = unsafe { (functions.cuMemAddressReserve)(&raw mut this.address, len, 0, 0, 0) };
        entered.check("cuMemAddressReserve", code)?;
        // SAFETY: C1: the whole of a reservation of this length, and a handle of at least it, which the driver
        // checks. C2: undone in `drop`.
        let code = unsafe { (functions.cuMemMap)(this.address, len, 0, handle, 0) };
        entered.check("cuMemMap", code)?;
        this.mapped = true;
        let access = MemAccessDesc {
            location: MemLocation { kind: ON_DEVICE, id: context.ordinal() },
            flags: READ_WRITE,
        };
        // SAFETY: C1: a mapped range and one description.
        let code = unsafe { (functions.cuMemSetAccess)(this.address, len, &raw const access, 1) };
        entered.check("cuMemSetAccess", code)?;
        Ok(this)
    }

    /// Where it is mapped.
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Bytes, a multiple of what the device rounds to.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A descriptor that another process maps it by; as many as are asked for.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn descriptor(&self) -> Result<Handle, Refusal> {
        let entered = self.context.enter()?;
        descriptor::exported(|place| {
            // SAFETY: C1: for this kind of handle, one `int` is written, and there is room for one.
            let code = unsafe {
                (entered.driver().functions.cuMemExportToShareableHandle)(
                    place,
                    self.handle,
                    POSIX_DESCRIPTOR,
                    0,
                )
            };
            entered.check("cuMemExportToShareableHandle", code)
        })
    }

    /// Maps what another process's descriptor stands for: `len` bytes, as that process says.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongSize`] for a length that no allocation of the device has, and what the driver answers: it
    /// checks the descriptor, its device and its length.
    pub fn import(context: &Arc<Context>, descriptor: Handle, len: usize) -> Result<Buffer, Fault> {
        let entered = context.enter()?;
        let granularity = Self::granularity(&entered, context)?;
        if len == 0 || !len.is_multiple_of(granularity) {
            let detail = format!("{len} bytes, not a multiple of {granularity}");
            return Err(Fault::new(Reason::WrongSize, detail));
        }
        let mut handle = 0;
        let number = descriptor::argument(&descriptor)?;
        // SAFETY: C1: writes a handle. The descriptor is open, and stays ours: the driver takes none of it over.
        // C2: released by what is made of it below.
        let code = unsafe {
            (entered.driver().functions.cuMemImportFromShareableHandle)(
                &raw mut handle,
                number,
                POSIX_DESCRIPTOR,
            )
        };
        entered.check("cuMemImportFromShareableHandle", code)?;
        let owner = Self::map(context, handle, len)?;
        owner.expect_device(&entered)?;
        let address = owner.address;
        Ok(Buffer::kept(context, address, len, Arc::new(owner)))
    }

    /// That it lies on the device that it is said to lie on.
    fn expect_device(&self, entered: &Entered<'_>) -> Result<(), Fault> {
        let mut props = Self::props(&self.context);
        // SAFETY: C1: writes the properties of a living handle.
        let code = unsafe {
            (entered.driver().functions.cuMemGetAllocationPropertiesFromHandle)(
                &raw mut props,
                self.handle,
            )
        };
        entered.check("cuMemGetAllocationPropertiesFromHandle", code)?;
        let (kind, id) = (props.location.kind, props.location.id);
        if (kind, id) == (ON_DEVICE, self.context.ordinal()) {
            return Ok(());
        }
        Err(Fault::new(Reason::DeviceUnknown, "the memory lies on another device than was said"))
    }
}

impl Drop for Shareable {
    fn drop(&mut self) {
        // C3.
        let Ok(entered) = self.context.enter() else { return };
        let functions = &entered.driver().functions;
        if self.mapped {
            // C4: unmapping waits for nothing by itself, and whatever is under way would run into nothing.
            if let Err(refusal) = self.context.synchronize() {
                tracing::warn!(
                    "work on a device failed before memory of it was given back: {refusal}"
                );
            }
            // SAFETY: C1, C2: the whole of what was mapped, once.
            let code = unsafe { (functions.cuMemUnmap)(self.address, self.len) };
            entered.gave_back("cuMemUnmap", code);
        }
        if self.address != 0 {
            // SAFETY: C1, C2: the whole of what was reserved, once.
            let code = unsafe { (functions.cuMemAddressFree)(self.address, self.len) };
            entered.gave_back("cuMemAddressFree", code);
        }
        // SAFETY: C1, C2: taken over once, released once.
        let code = unsafe { (functions.cuMemRelease)(self.handle) };
        entered.gave_back("cuMemRelease", code);
    }
}
