//! What whoever holds a block says of it, without a lock; `tests/loom` goes through every order of it.

use crate::atomic::{AtomicBool, Ordering};

/// Of one block of ours. Nothing takes a mark back.
#[derive(Debug)]
pub(crate) struct Marks {
    /// A peer who is not trusted has seen it (P3).
    exposed: AtomicBool,
    /// A lease on it will never be home (L3).
    retired: AtomicBool,
}

impl Marks {
    /// Of a block that nobody has seen.
    pub(crate) fn new() -> Self {
        Self { exposed: AtomicBool::new(false), retired: AtomicBool::new(false) }
    }

    /// Somebody sees it who may go on looking.
    pub(crate) fn expose(&self) {
        self.exposed.store(true, Ordering::Release);
    }

    /// It is not written again.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Whether it is not to be written again.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Whether whoever has it last may hand it on to be used for something else.
    pub(crate) fn may_be_used_again(&self) -> bool {
        !self.exposed.load(Ordering::Acquire) && !self.retired.load(Ordering::Acquire)
    }
}
