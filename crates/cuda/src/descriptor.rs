//! What leaves this process for another, as the driver gives and takes it: POSIX file descriptors, and so on Linux alone.

use std::ffi::c_void;

use rung::{Handle, Refusal};

/// A descriptor that a call writes to the place that it is given.
#[cfg(unix)]
#[expect(unsafe_code, reason = "owning what the driver made")]
pub(crate) fn exported(
    export: impl FnOnce(*mut c_void) -> Result<(), Refusal>,
) -> Result<Handle, Refusal> {
    use rung::Reason;
    use std::ffi::c_int;
    use std::os::fd::{FromRawFd, OwnedFd};

    // For this kind of handle, one `int` is written.
    let mut descriptor: c_int = -1;
    export((&raw mut descriptor).cast())?;
    if descriptor < 0 {
        return Err(Refusal::new(Reason::Driver, "no descriptor came"));
    }
    // SAFETY: the driver made it for the caller, who alone has it and closes it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // Not for programs that are started meanwhile.
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
        .map_err(|errno| Refusal::new(Reason::System, errno.to_string()))?;
    Ok(descriptor)
}

/// What the driver takes in the place of a pointer: the descriptor's number. It stays ours.
#[cfg(unix)]
pub(crate) fn argument(descriptor: &Handle) -> Result<*mut c_void, Refusal> {
    use std::os::fd::AsRawFd;
    Ok(descriptor.as_raw_fd() as usize as *mut c_void)
}

#[cfg(not(unix))]
pub(crate) fn exported(
    _export: impl FnOnce(*mut c_void) -> Result<(), Refusal>,
) -> Result<Handle, Refusal> {
    Err(rung::Reason::Platform.into())
}

#[cfg(not(unix))]
pub(crate) fn argument(_descriptor: &Handle) -> Result<*mut c_void, Refusal> {
    Err(rung::Reason::Platform.into())
}
