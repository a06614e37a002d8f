//! A stand-in of the CUDA driver on the CPU, for tests alone: **no device is there**, and nothing that is measured on
//! it says anything of one.
//!
//! It is a library of the driver's functions (those that are called, no more), put in the driver's place by a path of
//! the loader that tests set for the processes they start. It is as strict as the driver: what the driver refuses it
//! refuses, with the driver's codes as far as they are known (`docs/gpu.md` says which were seen on a real one).
//!
//! | what | how |
//! |---|---|
//! | device memory | a file in memory with a second mapping for copies; its address is a range that the CPU cannot touch |
//! | legacy handles, events | looked up in the exporting process (`/proc/PID/fd/N`), so they die with it |
//! | shareable allocations | real descriptors |
//! | streams | in order, at once; or, **deferred**, only when somebody waits: a missing wait then reads what was there before |
//!
//! | variable | what |
//! |---|---|
//! | `CUDA_CPU_STANDIN=1` | without it there is no device |
//! | `CUDA_CPU_STANDIN_DEFER=1` | deferred mode |
//! | `CUDA_CPU_STANDIN_FAULTS=a,b` | fails on request, see [`FAULTS`]; `@FILE` for a file with them, looked at each time |
//! | `CUDA_VISIBLE_DEVICES=1,0` | as with the driver, by number |
//!
//! It cannot be taken for a driver: its devices are named [`NAME`], their UUIDs spell `CPU-STAND-IN-`, and it exports
//! [`MARKER`].
#![cfg(target_os = "linux")]
#![allow(non_snake_case, clippy::missing_safety_doc, missing_docs)]

mod api;
mod memory;
mod state;
mod work;

/// What devices are called.
pub const NAME: &str = "CPU stand-in (NOT A GPU)";

/// The symbol that no driver has.
pub const MARKER: &str = "cuda_cpu_standin_marker";

/// What it fails at on request.
pub const FAULTS: &[&str] = &[
    "no-device",       // cuInit finds none
    "old",             // a driver of CUDA 11.0
    "no-legacy",       // no memory is legacy-IPC capable
    "no-open",         // cuIpcOpenMemHandle: invalid device context, as in another pid namespace
    "unknown-code",    // cuIpcOpenMemHandle: a code that nobody knows
    "no-events",       // no events for other processes
    "no-vmm",          // no shareable allocations
    "no-import",       // descriptors are refused
    "wrong-uuid",      // other UUIDs than everywhere else
    "corrupt",         // imported legacy memory is not the exporter's
    "corrupt-import",  // imported shareable memory is not the exporter's
    "no-pool-handles", // pools do not leave as descriptors
    "corrupt-pool",    // imported memory of a pool is not the exporter's
    "no-free",         // imported memory of a pool cannot be freed
    "no-memory",       // nothing can be allocated
    "no-register",     // host memory cannot be registered
];

/// What the library that is loaded in this process counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Count {
    /// Primary contexts made so far.
    ContextsMade,
    /// Allocations, reservations and imports there are.
    Ranges,
    /// Legacy imports there are, each as often as it is open.
    OpenImports,
    /// Legacy imports opened so far, not counting those that were open.
    ImportsMade,
    /// Events there are.
    Events,
    /// Streams there are.
    Streams,
    /// Handles of shareable memory there are.
    Handles,
    /// Shareable memory imported so far.
    HandlesImported,
    /// Bytes copied on devices so far.
    CopiedOnDevice,
    /// Bytes copied between hosts and devices so far.
    CopiedToHost,
    /// Ranges of host memory registered.
    Registered,
    /// Bytes copied from or to host memory that was registered.
    CopiedPinned,
    /// Functions of the driver called so far.
    Calls,
}

/// A count of the stand-in that is loaded in this process; none where it is not.
#[must_use]
pub fn count(what: Count) -> Option<u64> {
    // SAFETY: looks for a library that is loaded, by a constant name.
    let library =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    // SAFETY: a library that stays loaded, and a constant name.
    let symbol = unsafe { libc::dlsym(library, c"cuda_cpu_standin_count".as_ptr()) };
    // SAFETY: opened above.
    unsafe { libc::dlclose(library) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the function of this name below, of this very type.
    let function: unsafe extern "C" fn(u32) -> u64 = unsafe { std::mem::transmute(symbol) };
    // SAFETY: takes a number.
    Some(unsafe { function(what as u32) })
}
