//! What this process has asked of the kernel for shared memory: in steady state these stand still.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the process began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// Blocks made: memfd_create(2).
    pub created: u64,
    /// Allocations: fallocate(2) and ftruncate(2).
    pub allocated: u64,
    /// Mappings made: mmap(2).
    pub mapped: u64,
    /// Mappings ended: munmap(2).
    pub unmapped: u64,
    /// Descriptors made for peers: dup(2).
    pub duplicated: u64,
    /// Bytes copied into shared memory.
    pub copied: u64,
}

pub(crate) struct Counters {
    pub(crate) created: AtomicU64,
    pub(crate) allocated: AtomicU64,
    pub(crate) mapped: AtomicU64,
    pub(crate) unmapped: AtomicU64,
    pub(crate) duplicated: AtomicU64,
    pub(crate) copied: AtomicU64,
}

pub(crate) static COUNTERS: Counters = Counters {
    created: AtomicU64::new(0),
    allocated: AtomicU64::new(0),
    mapped: AtomicU64::new(0),
    unmapped: AtomicU64::new(0),
    duplicated: AtomicU64::new(0),
    copied: AtomicU64::new(0),
};

pub(crate) fn count(counter: &AtomicU64, number: usize) {
    counter.fetch_add(number as u64, Ordering::Relaxed);
}

/// What was asked of the kernel so far.
#[must_use]
pub fn calls() -> Calls {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Calls {
        created: read(&COUNTERS.created),
        allocated: read(&COUNTERS.allocated),
        mapped: read(&COUNTERS.mapped),
        unmapped: read(&COUNTERS.unmapped),
        duplicated: read(&COUNTERS.duplicated),
        copied: read(&COUNTERS.copied),
    }
}
