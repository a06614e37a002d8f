//! Pools of stream-ordered memory that another process can see into.
//!
//! Their contract is the driver's, and a hard one: whoever imported a pointer frees it before its exporter does, and a
//! pool is exported before any pointer of it. These types give back what they own, once, and in a stream's order; they
//! do not know what the other process does.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::sys::{CUdeviceptr, CUmemPoolPtrExportData, CUmemoryPool};
use rung::{Fault, Handle, Reason, Refusal};

use crate::context::Context;
use crate::descriptor;
use crate::functions::{MemAccessDesc, MemLocation, MemPoolProps};
use crate::ipc::{ON_DEVICE, PINNED, POSIX_DESCRIPTOR, READ_WRITE};
use crate::keeps::{Keeps, Pooled};
use crate::memory::Buffer;
use crate::stream::Stream;

/// A pool, ours or another process's; a clone is the same pool, and memory of it keeps it.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    context: Arc<Context>,
    raw: Raw,
    is_imported: bool,
    number: u64,
    /// What other processes import it by, once it was exported.
    exported: OnceLock<Handle>,
}

impl Owned {
    fn new(context: &Arc<Context>, raw: CUmemoryPool, is_imported: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let context = Arc::clone(context);
        Self { context, raw: Raw(raw), is_imported, number, exported: OnceLock::new() }
    }
}

#[derive(Debug, Clone, Copy)]
struct Raw(CUmemoryPool);

// SAFETY: a handle; the driver's functions may be called on it from any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Drop for Owned {
    fn drop(&mut self) {
        // C3.
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: C1, C2: made or imported once, destroyed once; memory of it keeps it until then.
        let code = unsafe { (entered.driver().functions.cuMemPoolDestroy)(self.raw.0) };
        entered.gave_back("cuMemPoolDestroy", code);
    }
}

/// What names memory of a pool to another process that has the pool: good while its exporter keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PointerHandle(pub [u8; 64]);

impl Pool {
    /// A pool whose memory another process can see (`cuMemPoolCreate` with a POSIX descriptor).
    ///
    /// # Errors
    ///
    /// What the driver answers, also where the device has no such pools.
    pub fn shareable(context: &Arc<Context>) -> Result<Self, Refusal> {
        let entered = context.enter()?;
        let props = MemPoolProps {
            kind: PINNED,
            handle_types: POSIX_DESCRIPTOR,
            location: MemLocation { kind: ON_DEVICE, id: context.ordinal() },
            win32_attributes: std::ptr::null_mut(),
            max_size: 0,
            // All of it zero: fields come to be there in newer drivers.
            reserved: [0; 56],
        };
        let mut raw: CUmemoryPool = std::ptr::null_mut();
        // SAFETY: C1: reads the properties and writes a handle. C2: destroyed by its owner.
        let code =
            unsafe { (entered.driver().functions.cuMemPoolCreate)(&raw mut raw, &raw const props) };
        entered.check("cuMemPoolCreate", code)?;
        Ok(Self(Arc::new(Owned::new(context, raw, false))))
    }

    /// Something that is this pool for as long as anybody else has it.
    #[must_use]
    pub fn downgrade(&self) -> WeakPool {
        WeakPool(Arc::downgrade(&self.0))
    }

    /// A number that no other pool of this process has.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Whether it is another process's.
    #[must_use]
    pub fn is_imported(&self) -> bool {
        self.0.is_imported
    }

    /// The pool as other processes get it: what its pointers are exported by, since the driver wants the pool exported
    /// before any of them.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn exported(&self) -> Result<ExportedPool<'_>, Refusal> {
        let descriptor = match self.0.exported.get() {
            Some(descriptor) => descriptor,
            None => {
                let descriptor = self.export()?;
                self.0.exported.get_or_init(|| descriptor)
            }
        };
        Ok(ExportedPool { pool: self, descriptor })
    }

    fn export(&self) -> Result<Handle, Refusal> {
        let entered = self.0.context.enter()?;
        descriptor::exported(|place| {
            // SAFETY: C1: for this kind of handle, one `int` is written, and there is room for one.
            let code = unsafe {
                (entered.driver().functions.cuMemPoolExportToShareableHandle)(
                    place,
                    self.0.raw.0,
                    POSIX_DESCRIPTOR,
                    0,
                )
            };
            entered.check("cuMemPoolExportToShareableHandle", code)
        })
    }

    /// Another process's pool, by its descriptor. Nothing can be allocated from it.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn import(context: &Arc<Context>, descriptor: Handle) -> Result<Self, Fault> {
        let entered = context.enter()?;
        let mut raw: CUmemoryPool = std::ptr::null_mut();
        let number = descriptor::argument(&descriptor)?;
        // SAFETY: C1: writes a handle; the descriptor is open, and stays ours. C2: destroyed by its owner.
        let code = unsafe {
            (entered.driver().functions.cuMemPoolImportFromShareableHandle)(
                &raw mut raw,
                number,
                POSIX_DESCRIPTOR,
                0,
            )
        };
        entered.check("cuMemPoolImportFromShareableHandle", code)?;
        let owned = Owned::new(context, raw, true);
        let access = MemAccessDesc {
            location: MemLocation { kind: ON_DEVICE, id: context.ordinal() },
            flags: READ_WRITE,
        };
        // SAFETY: C1: a living pool and one description.
        let code =
            unsafe { (entered.driver().functions.cuMemPoolSetAccess)(raw, &raw const access, 1) };
        entered.check("cuMemPoolSetAccess", code)?;
        Ok(Self(Arc::new(owned)))
    }

    /// Memory of the pool, in the order of a stream, and freed in it.
    ///
    /// # Errors
    ///
    /// [`Reason::OtherKind`] for an imported pool, [`Reason::NoMemory`], or what else the driver answers.
    pub fn allocate(&self, len: usize, stream: &Stream) -> Result<Buffer, Refusal> {
        if self.0.is_imported {
            return Err(Refusal::new(Reason::OtherKind, "an imported pool allocates nothing"));
        }
        let entered = self.0.context.enter()?;
        let mut address: CUdeviceptr = 0;
        // SAFETY: C1: writes one address, on a living stream and pool. C2: freed by its owner.
        let code = unsafe {
            (entered.driver().functions.cuMemAllocFromPoolAsync)(
                &raw mut address,
                len,
                self.0.raw.0,
                stream.raw(),
            )
        };
        entered.check("cuMemAllocFromPoolAsync", code)?;
        Ok(self.kept(address, len, stream))
    }

    fn kept(&self, address: CUdeviceptr, len: usize, stream: &Stream) -> Buffer {
        let owner: Arc<dyn Keeps> = Arc::new(Pooled::new(address, stream, self.clone()));
        Buffer::kept(&self.0.context, address, len, owner)
    }

    /// Opens memory of an imported pool, to be let go in the order of a stream. Its exporter must not free it before the
    /// buffer that this gives is dropped and what its stream had to do then is done.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn open(&self, handle: PointerHandle, stream: &Stream) -> Result<Buffer, Fault> {
        let entered = self.0.context.enter()?;
        let mut data = CUmemPoolPtrExportData { reserved: handle.0 };
        let mut address: CUdeviceptr = 0;
        // SAFETY: C1: reads 64 bytes, which the driver checks, and writes an address. C2: freed by its owner.
        let code = unsafe {
            (entered.driver().functions.cuMemPoolImportPointer)(
                &raw mut address,
                self.0.raw.0,
                &raw mut data,
            )
        };
        entered.check("cuMemPoolImportPointer", code)?;
        let buffer = self.kept(address, 0, stream);
        let (base, size) = Buffer::bounds(&entered, address)?;
        let before = address.checked_sub(base).and_then(|before| usize::try_from(before).ok());
        let len = before.and_then(|before| size.checked_sub(before)).ok_or(Reason::OutOfBounds)?;
        Ok(buffer.with_len(len))
    }
}

/// A pool that others keep, or nobody does any more.
#[derive(Debug, Clone, Default)]
pub struct WeakPool(Weak<Owned>);

impl WeakPool {
    /// The pool, if it is still there.
    #[must_use]
    pub fn upgrade(&self) -> Option<Pool> {
        self.0.upgrade().map(Pool)
    }
}

/// A pool that was exported.
#[derive(Debug, Clone, Copy)]
pub struct ExportedPool<'p> {
    pool: &'p Pool,
    descriptor: &'p Handle,
}

impl ExportedPool<'_> {
    /// What another process imports the pool by.
    ///
    /// # Errors
    ///
    /// [`Reason::NoDescriptors`].
    pub fn descriptor(&self) -> Result<Handle, Refusal> {
        self.descriptor
            .try_clone()
            .map_err(|error| Refusal::new(Reason::NoDescriptors, error.to_string()))
    }

    /// What another process that has the pool opens memory of it by: all of the allocation that it lies in.
    ///
    /// # Errors
    ///
    /// [`Reason::OtherAllocator`] for memory that is not of this pool, or what the driver answers.
    pub fn pointer(&self, buffer: &Buffer) -> Result<PointerHandle, Refusal> {
        if buffer.pool().is_none_or(|pool| pool.number() != self.pool.number()) {
            return Err(Refusal::new(Reason::OtherAllocator, "memory of another pool, or of none"));
        }
        let entered = buffer.context().enter()?;
        let (base, _) = Buffer::bounds(&entered, buffer.address())?;
        let mut data = CUmemPoolPtrExportData { reserved: [0; 64] };
        // SAFETY: C1: writes 64 bytes; the address is looked up, not followed.
        let code =
            unsafe { (entered.driver().functions.cuMemPoolExportPointer)(&raw mut data, base) };
        entered.check("cuMemPoolExportPointer", code)?;
        Ok(PointerHandle(data.reserved))
    }
}
