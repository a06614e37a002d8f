//! Host memory that the driver knows: copies from and to it need no detour.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CU_MEMHOSTREGISTER_PORTABLE;
use rung::Refusal;

use crate::context::Context;

/// `CU_MEMHOSTREGISTER_READ_ONLY`, which older versions of cudarc do not name.
const READ_ONLY: c_uint = 8;

/// Host memory that is registered with the driver (pinned), until this is dropped.
pub struct Registered {
    context: Arc<Context>,
    address: Address,
}

struct Address(*mut c_void);

// SAFETY: a number that is given back to the driver, and never followed.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registered({:p})", self.address.0)
    }
}

impl Registered {
    /// Registers whole pages, for all contexts of this process.
    ///
    /// They are to stay mapped, as they are, until this is dropped (`segment` attaches it to the mapping). Pages that
    /// were mapped anew meanwhile are other pages than the driver knows: copies from and to them then move the bytes
    /// of the old ones, which nobody sees any more, and touch nothing else.
    ///
    /// # Errors
    ///
    /// What the driver answers: also where they are not mapped, or a part of them is registered already.
    pub fn new(
        context: &Arc<Context>,
        start: *const u8,
        len: usize,
        is_read_only: bool,
    ) -> Result<Self, Refusal> {
        let entered = context.enter()?;
        let address: *mut c_void = start.cast_mut().cast();
        let read_only = if is_read_only { READ_ONLY } else { 0 };
        let flags: c_uint = CU_MEMHOSTREGISTER_PORTABLE | read_only;
        // SAFETY: C1: the driver looks whether the range is mapped, and holds its pages; it writes nothing there. C2:
        // unregistered in `drop`.
        let code =
            unsafe { (entered.driver().functions.cuMemHostRegister_v2)(address, len, flags) };
        entered.check("cuMemHostRegister_v2", code)?;
        Ok(Self { context: Arc::clone(context), address: Address(address) })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // C3.
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: C1, C2: registered once, unregistered once.
        let code = unsafe { (entered.driver().functions.cuMemHostUnregister)(self.address.0) };
        entered.gave_back("cuMemHostUnregister", code);
    }
}
