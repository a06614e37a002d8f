//! The primary context of a device: held while something needs it.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::CUcontext;
use rung::{Device, Reason, Refusal};

use crate::driver::{Driver, driver};
use crate::stream::Stream;

/// The primary context of a device, which all libraries of a process share.
///
/// Everything of this crate that lies on the device holds it; with the last of them it is let go.
pub struct Context {
    driver: &'static Driver,
    device: Device,
    ordinal: i32,
    raw: Raw,
    stream: OnceLock<crate::stream::Raw>,
}

#[derive(Clone, Copy)]
struct Raw(CUcontext);

// SAFETY: the handle of a context may be used from any thread (the driver API is thread-safe); it is made current
// for the thread that calls.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.device)
    }
}

/// By the device's number in this process.
type Contexts = Mutex<HashMap<i32, Weak<Context>>>;

impl Context {
    /// The primary context of a device; made, which takes a while, where nothing in this process has it.
    ///
    /// # Errors
    ///
    /// As [`driver`] and [`Driver::device`], and what the driver answers.
    pub fn of(device: Device) -> Result<Arc<Self>, Refusal> {
        static CONTEXTS: OnceLock<Contexts> = OnceLock::new();
        let driver = driver()?;
        let ordinal = driver.device(device)?.ordinal;
        let contexts = CONTEXTS.get_or_init(Mutex::default);
        // Held while one is made: two would be the same.
        let mut contexts = contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(context);
        }
        let mut raw: CUcontext = std::ptr::null_mut();
        // SAFETY: C1: writes one handle. C2: released when this is dropped.
        let code = unsafe { (driver.functions.cuDevicePrimaryCtxRetain)(&raw mut raw, ordinal) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        let context =
            Arc::new(Self { driver, device, ordinal, raw: Raw(raw), stream: OnceLock::new() });
        contexts.insert(ordinal, Arc::downgrade(&context));
        Ok(context)
    }

    /// Whether something in this process has the primary context of a device; makes none.
    #[must_use]
    pub fn exists(device: Device) -> bool {
        driver().and_then(|driver| Ok(driver.has_context(driver.device(device)?))).unwrap_or(false)
    }

    /// Of which device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Its number in this process.
    pub(crate) fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Whether this is that handle.
    pub(crate) fn is(&self, raw: CUcontext) -> bool {
        self.raw.0 == raw
    }

    /// A stream of this crate's own, one a context: for copies that nobody names a stream for.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn stream(self: &Arc<Self>) -> Result<Stream, Refusal> {
        if let Some(raw) = self.stream.get() {
            return Ok(Stream::within(self, *raw));
        }
        let made = crate::stream::create(&self.enter()?)?;
        let raw = *self.stream.get_or_init(|| made);
        if raw != made {
            crate::stream::destroy(&self.enter()?, made);
        }
        Ok(Stream::within(self, raw))
    }

    /// Waits, on this thread, until everything that was enqueued on the device is done.
    ///
    /// # Errors
    ///
    /// What the driver answers: also what went wrong with work that was enqueued before.
    pub fn synchronize(&self) -> Result<(), Refusal> {
        let entered = self.enter()?;
        // SAFETY: C1, with this context current.
        let code = unsafe { (entered.driver().functions.cuCtxSynchronize)() };
        entered.check("cuCtxSynchronize", code)
    }

    /// Makes it current for this thread, until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, Refusal> {
        if self.driver.is_inherited() {
            return Err(Reason::Forked.into());
        }
        // SAFETY: C1, with a context that is retained (C2).
        let code = unsafe { (self.driver.functions.cuCtxPushCurrent_v2)(self.raw.0) };
        self.driver.check("cuCtxPushCurrent_v2", code)?;
        Ok(Entered { context: self, _here: std::marker::PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // C3: a fork's copy is not the driver's business.
        let Ok(entered) = self.enter() else { return };
        if let Some(stream) = self.stream.get() {
            crate::stream::destroy(&entered, *stream);
        }
        drop(entered);
        // SAFETY: C1, C2: retained once by `of`.
        let code = unsafe { (self.driver.functions.cuDevicePrimaryCtxRelease_v2)(self.ordinal) };
        if let Err(failed) = self.driver.check("cuDevicePrimaryCtxRelease_v2", code) {
            tracing::warn!("not given back: {failed}");
        }
    }
}

/// The context is current for this thread.
pub(crate) struct Entered<'a> {
    context: &'a Context,
    /// Of this thread alone.
    _here: std::marker::PhantomData<*const ()>,
}

impl Entered<'_> {
    /// The driver, and the check of what it answers.
    pub(crate) fn driver(&self) -> &'static Driver {
        self.context.driver
    }

    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<(), Refusal> {
        Ok(self.context.driver.check(call, code)?)
    }

    /// Something was given back: a drop has nobody to tell that it was not, but it is said.
    pub(crate) fn gave_back(&self, call: &'static str, code: u32) {
        if let Err(refusal) = self.check(call, code) {
            tracing::warn!("not given back: {refusal}");
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut before: CUcontext = std::ptr::null_mut();
        // SAFETY: C1: pops what `enter` pushed, on the same thread.
        unsafe { (self.context.driver.functions.cuCtxPopCurrent_v2)(&raw mut before) };
    }
}
