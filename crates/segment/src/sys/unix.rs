//! Mappings, on every Unix.
#![expect(unsafe_code, reason = "mapping memory")]

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use rung::Reason;

use super::Object;

/// What a failed call means.
pub(crate) fn reason(error: &io::Error) -> Reason {
    match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
        Errno::ENOMEM | Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => Reason::NoMemory,
        Errno::EMFILE | Errno::ENFILE => Reason::NoDescriptors,
        Errno::ENOSYS => Reason::Platform,
        _ => Reason::System,
    }
}

/// Its words, without a number.
pub(crate) fn words(error: &io::Error) -> String {
    Errno::from_raw(error.raw_os_error().unwrap_or(0)).desc().to_owned()
}

/// Maps the first `len` bytes of an object, shared with every other mapping of it (mmap(2)).
pub(crate) fn map(object: &Object, len: NonZeroUsize, writable: bool) -> io::Result<NonNull<u8>> {
    let write = if writable { ProtFlags::PROT_WRITE } else { ProtFlags::empty() };
    let protection = ProtFlags::PROT_READ | write;
    // SAFETY: a new mapping at an address that the kernel chooses replaces no existing one, so no
    // memory that Rust knows of changes under it (mmap(2); no MAP_FIXED).
    let start =
        unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, object.file().as_fd(), 0) }?;
    Ok(start.cast())
}

/// Unmaps what [`map`] gave.
///
/// # Safety
///
/// It is exactly what `map` gave, and nobody looks at it any more (M1).
pub(crate) unsafe fn unmap(start: NonNull<u8>, len: usize) {
    // SAFETY: M1, as the caller has it.
    let unmapped = unsafe { munmap(start.cast(), len) };
    // munmap fails only for a range that was never mapped, which M1 rules out; a drop has
    // nobody to tell, and leaking address space harms nobody.
    debug_assert_eq!(unmapped, Ok(()));
}

pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf(3) reads a number; it has no conditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}
