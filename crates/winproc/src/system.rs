//! What this process and the machine have.
#![expect(unsafe_code, reason = "counting handles has no safe form in std")]

use std::io;

use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};
use windows_sys::Win32::System::Threading::{GetCurrentProcess, GetProcessHandleCount};

use crate::process::running;
use crate::succeeded;

/// Handles that this process has open.
///
/// # Errors
///
/// What GetProcessHandleCount gives.
pub fn handle_count() -> io::Result<u32> {
    let mut count = 0;
    // SAFETY: N1: the pseudo-handle of this process is always there, and `count` a place for the answer.
    succeeded(unsafe { GetProcessHandleCount(GetCurrentProcess(), &raw mut count) })?;
    Ok(count)
}

/// The processes that this one started and that still run, by number.
///
/// # Errors
///
/// What the tool help library gives.
pub fn children() -> io::Result<Vec<u32>> {
    let me = std::process::id();
    Ok(running()?.into_iter().filter(|(_, parent)| *parent == me).map(|(pid, _)| pid).collect())
}

/// Bytes that this process may still have committed.
///
/// # Errors
///
/// What GlobalMemoryStatusEx gives.
pub fn available_memory() -> io::Result<u64> {
    let size = size_of::<MEMORYSTATUSEX>() as u32;
    let mut status = MEMORYSTATUSEX { dwLength: size, ..Default::default() };
    // SAFETY: N1: the structure says its size.
    succeeded(unsafe { GlobalMemoryStatusEx(&raw mut status) })?;
    Ok(status.ullAvailPageFile)
}
