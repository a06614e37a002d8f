//! Whether this is still the process that made something, or a fork of it (L9).
#![cfg_attr(unix, expect(unsafe_code, reason = "asking to be told of forks"))]

#[cfg(unix)]
use std::sync::{
    Once,
    atomic::{AtomicU32, Ordering},
};

#[cfg(unix)]
use nix::libc;

/// How many forks lie between this process and its first ancestor that asked.
#[cfg(unix)]
static FORKS: AtomicU32 = AtomicU32::new(0);

#[cfg(unix)]
extern "C" fn in_the_child() {
    // Signal-safe, as this must be: one atomic addition.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A number that is another one after a fork(2) by the C library; far cheaper than getpid(2). Where there are no
/// forks, always the same.
///
/// ```
/// let home = segment::generation();
/// // … and in whatever may run in a fork of this process:
/// assert_eq!(segment::generation(), home);
/// ```
#[must_use]
pub fn generation() -> u32 {
    #[cfg(unix)]
    {
        static ASKED: Once = Once::new();
        ASKED.call_once(|| {
            // SAFETY: the handler takes nothing, does nothing but an atomic addition, and is never unloaded
            // (pthread_atfork(3)). Where it cannot be registered, for want of memory, forks go unnoticed.
            unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
        });
        FORKS.load(Ordering::Relaxed)
    }
    #[cfg(not(unix))]
    0
}
