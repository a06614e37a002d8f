//! Streams and events: what device work is ordered by, in this process and across processes.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{
    CUevent, CUevent_flags as event_flags, CUipcEventHandle, CUstream, CUstream_flags as flags,
};
use rung::{Device, Refusal};

use crate::code::{NOT_READY, SUCCESS};
use crate::context::{Context, Entered};

/// The handle of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Raw(pub(crate) CUstream);

// SAFETY: a handle; the driver's functions may be called on it from any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

/// Work of a device in order: what is enqueued on one stream runs one after the other.
///
/// A clone is the same stream.
#[derive(Clone)]
pub struct Stream {
    context: Arc<Context>,
    raw: Raw,
    /// Whatever the handle is valid for as long as it lives, beside the context.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:p} on {})", self.raw.0, self.context.device())
    }
}

/// Made by this crate, and destroyed with its last clone.
struct Own {
    context: Arc<Context>,
    raw: Raw,
}

impl Drop for Own {
    fn drop(&mut self) {
        // C3.
        if let Ok(entered) = self.context.enter() {
            destroy(&entered, self.raw);
        }
    }
}

/// Makes a stream that waits for no other unless told to.
pub(crate) fn create(entered: &Entered<'_>) -> Result<Raw, Refusal> {
    let mut raw: CUstream = std::ptr::null_mut();
    let functions = &entered.driver().functions;
    // SAFETY: C1: writes one handle. C2: whoever calls this destroys it.
    let code =
        unsafe { (functions.cuStreamCreate)(&raw mut raw, flags::CU_STREAM_NON_BLOCKING as u32) };
    entered.check("cuStreamCreate", code)?;
    Ok(Raw(raw))
}

/// Destroys what [`create`] made; what was enqueued still runs.
pub(crate) fn destroy(entered: &Entered<'_>, raw: Raw) {
    // SAFETY: C1, C2: the owner's last use of it.
    let code = unsafe { (entered.driver().functions.cuStreamDestroy_v2)(raw.0) };
    entered.gave_back("cuStreamDestroy_v2", code);
}

impl Stream {
    /// A new stream, which waits for no other unless told to.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn new(context: &Arc<Context>) -> Result<Self, Refusal> {
        let raw = create(&context.enter()?)?;
        let own = Own { context: Arc::clone(context), raw };
        Ok(Self { context: Arc::clone(context), raw, _owner: Some(Arc::new(own)) })
    }

    /// The legacy default stream, which other blocking streams wait for.
    #[must_use]
    pub fn legacy_default(context: &Arc<Context>) -> Self {
        let raw = Raw(std::ptr::null_mut());
        Self { context: Arc::clone(context), raw, _owner: None }
    }

    /// A stream that lives as long as its context.
    pub(crate) fn within(context: &Arc<Context>, raw: Raw) -> Self {
        Self { context: Arc::clone(context), raw, _owner: None }
    }

    /// A stream that somebody else made.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of this very context, and stays one for as long as `owner` lives.
    pub unsafe fn borrowed(
        context: &Arc<Context>,
        raw: CUstream,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { context: Arc::clone(context), raw: Raw(raw), _owner: Some(owner) }
    }

    /// Whether both are one stream.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.raw == other.raw && self.device() == other.device()
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

    /// The driver's handle, for whoever enqueues work.
    #[must_use]
    pub fn raw(&self) -> CUstream {
        self.raw.0
    }

    /// Waits, on this thread, until everything that was enqueued is done.
    ///
    /// # Errors
    ///
    /// What the driver answers: also what went wrong with work that was enqueued before.
    pub fn synchronize(&self) -> Result<(), Refusal> {
        let entered = self.context.enter()?;
        // SAFETY: C1, on a living stream (C2).
        let code = unsafe { (entered.driver().functions.cuStreamSynchronize)(self.raw.0) };
        entered.check("cuStreamSynchronize", code)
    }

    /// Whether everything that was enqueued is done.
    ///
    /// # Errors
    ///
    /// As [`Self::synchronize`].
    pub fn is_done(&self) -> Result<bool, Refusal> {
        let entered = self.context.enter()?;
        // SAFETY: C1, on a living stream (C2).
        match unsafe { (entered.driver().functions.cuStreamQuery)(self.raw.0) } {
            NOT_READY => Ok(false),
            code => entered.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// What is enqueued from now on runs after what the event was last recorded behind.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn wait(&self, event: &Event) -> Result<(), Refusal> {
        let entered = self.context.enter()?;
        // SAFETY: C1, with a living stream and event (C2); an event may be destroyed while it is waited for.
        let code =
            unsafe { (entered.driver().functions.cuStreamWaitEvent)(self.raw.0, event.raw, 0) };
        entered.check("cuStreamWaitEvent", code)
    }

    /// What is enqueued from now on runs after everything that is enqueued on the other stream by now.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn after(&self, other: &Self) -> Result<(), Refusal> {
        if self.is(other) {
            return Ok(());
        }
        let event = Event::local(&other.context)?;
        event.record(other)?;
        self.wait(&event)
    }
}

/// Sleeps for as many microseconds as its argument is, taken as a number.
unsafe extern "C" fn sleep(microseconds: *mut c_void) {
    std::thread::sleep(Duration::from_micros(microseconds as usize as u64));
}

impl Stream {
    /// Enqueues that nothing runs for this long: for those who want to see what others wait for.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn pause(&self, time: Duration) -> Result<(), Refusal> {
        let entered = self.context.enter()?;
        let microseconds = usize::try_from(time.as_micros()).unwrap_or(usize::MAX);
        // SAFETY: C1: a function that calls nothing of the driver's and cannot unwind, with a number in the place of
        // a pointer, which it does not follow.
        let code = unsafe {
            (entered.driver().functions.cuLaunchHostFunc)(
                self.raw.0,
                sleep,
                std::ptr::without_provenance_mut(microseconds),
            )
        };
        entered.check("cuLaunchHostFunc", code)
    }
}

/// What names an event to another process: good while the process that made it keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventHandle(pub [u8; 64]);

/// A point in the work of a stream.
pub struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: a handle that is owned; the driver's functions may be called on it from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({:p})", self.raw)
    }
}

impl Event {
    fn create(context: &Arc<Context>, flags: u32) -> Result<Self, Refusal> {
        let entered = context.enter()?;
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: C1: writes one handle. C2: destroyed when this is dropped.
        let code = unsafe { (entered.driver().functions.cuEventCreate)(&raw mut raw, flags) };
        entered.check("cuEventCreate", code)?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// For this process alone.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn local(context: &Arc<Context>) -> Result<Self, Refusal> {
        Self::create(context, event_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// One that another process can wait for.
    ///
    /// # Errors
    ///
    /// What the driver answers, also where the device has no such events.
    pub fn shared(context: &Arc<Context>) -> Result<Self, Refusal> {
        let flags =
            event_flags::CU_EVENT_DISABLE_TIMING as u32 | event_flags::CU_EVENT_INTERPROCESS as u32;
        Self::create(context, flags)
    }

    /// An event of another process, by its handle.
    ///
    /// The other process must not destroy the event before this one is dropped and what waits for it is done.
    ///
    /// # Errors
    ///
    /// What the driver answers: the other process, or its event, is gone.
    pub fn open(context: &Arc<Context>, handle: EventHandle) -> Result<Self, Refusal> {
        let entered = context.enter()?;
        let reserved = handle.0.map(u8::cast_signed);
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: C1: takes 64 bytes, which the driver checks, and writes one handle. C2: destroyed when this is
        // dropped.
        let code = unsafe {
            (entered.driver().functions.cuIpcOpenEventHandle)(
                &raw mut raw,
                CUipcEventHandle { reserved },
            )
        };
        entered.check("cuIpcOpenEventHandle", code)?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// What another process opens it by; only of an event that was made [shared](Self::shared).
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn handle(&self) -> Result<EventHandle, Refusal> {
        let entered = self.context.enter()?;
        let mut handle = CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: C1: writes 64 bytes; the event lives (C2).
        let code =
            unsafe { (entered.driver().functions.cuIpcGetEventHandle)(&raw mut handle, self.raw) };
        entered.check("cuIpcGetEventHandle", code)?;
        Ok(EventHandle(handle.reserved.map(|byte| byte.cast_unsigned())))
    }

    /// Puts it behind everything that is enqueued on a stream by now.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn record(&self, stream: &Stream) -> Result<(), Refusal> {
        let entered = self.context.enter()?;
        // SAFETY: C1, with a living event and stream (C2) of one context.
        let code = unsafe { (entered.driver().functions.cuEventRecord)(self.raw, stream.raw.0) };
        entered.check("cuEventRecord", code)
    }

    /// Whether what it was recorded behind is done; so is what it was never recorded behind.
    ///
    /// # Errors
    ///
    /// What the driver answers: also what went wrong with that work.
    pub fn is_done(&self) -> Result<bool, Refusal> {
        let entered = self.context.enter()?;
        // SAFETY: C1, on a living event (C2).
        match unsafe { (entered.driver().functions.cuEventQuery)(self.raw) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => entered.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits for it on this thread.
    ///
    /// # Errors
    ///
    /// As [`Self::is_done`].
    pub fn synchronize(&self) -> Result<(), Refusal> {
        let entered = self.context.enter()?;
        // SAFETY: C1, on a living event (C2).
        let code = unsafe { (entered.driver().functions.cuEventSynchronize)(self.raw) };
        entered.check("cuEventSynchronize", code)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // C3.
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: C1, C2: made once, destroyed once. What still waits for it is not disturbed.
        let code = unsafe { (entered.driver().functions.cuEventDestroy_v2)(self.raw) };
        entered.gave_back("cuEventDestroy_v2", code);
    }
}
