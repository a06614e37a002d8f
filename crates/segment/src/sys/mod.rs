//! Shared memory as the platform has it; each file has the same items.
//!
//! | | memory | cannot be resized since | a peer cannot write since | a peer sees that |
//! |---|---|---|---|---|
//! | Linux | memfd_create(2) | seals | seals | yes |
//! | Windows | a section of the page file | sections are not | its handle is for reading | no |
//! | macOS | shm_open(2), unlinked at once | ftruncate(2) works once | its descriptor is for reading | no |
//!
//! - `Object`: one piece of shared memory. `allocate` has all of its memory there (S1), `fill` the contents too, for good or not, and
//!   gives the mapping that wrote them, if one did; `close` is for the moment before nobody writes it any more
//!   (S2), `lend` for that before a peer sees it (S3); `handle` is what a peer gets.
//! - `Identity` tells an object of this process's from others when it comes back; `receive` takes one from a peer.
//! - `map`, `unmap` and what else is done with mappings: called by `crate::mapping` alone.
//! - `left` is how much memory there is, where the platform itself would not refuse what it has not.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(all(unix, not(target_os = "linux")))]
mod macos;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(all(unix, not(target_os = "linux")))]
pub(crate) use macos::*;
#[cfg(unix)]
pub(crate) use unix::*;
#[cfg(windows)]
pub(crate) use windows::*;
