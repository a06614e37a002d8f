//! Host memory that the driver knows: copies from and to it need no detour.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CU_MEMHOSTREGISTER_PORTABLE;
use rung::Refusal;

use crate::context::Context;

/// Host memory that is registered with the driver (pinned), until this is dropped; its owner lives as long.
pub struct Registered {
    context: Arc<Context>,
    address: Address,
    /// Declared last, so dropped after the registration.
    _owner: Box<dyn Any + Send + Sync>,
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
    /// # Errors
    ///
    /// What the driver answers: also where a part of them is registered already.
    ///
    /// # Safety
    ///
    /// `len` bytes from `start` on stay mapped, as they are, for as long as `owner` lives.
    pub unsafe fn new(
        context: &Arc<Context>,
        start: *const u8,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, Refusal> {
        let entered = context.enter()?;
        let address: *mut c_void = start.cast_mut().cast();
        let flags: c_uint = CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: C1; the caller says that they are mapped. C2: unregistered in `drop`.
        let code =
            unsafe { (entered.driver().functions.cuMemHostRegister_v2)(address, len, flags) };
        entered.check("cuMemHostRegister_v2", code)?;
        let (context, owner) = (Arc::clone(context), Box::new(owner));
        Ok(Self { context, address: Address(address), _owner: owner })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // C3.
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: C1, C2: registered once, unregistered once, while it is still mapped.
        unsafe { (entered.driver().functions.cuMemHostUnregister)(self.address.0) };
    }
}
