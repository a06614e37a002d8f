//! What names a block within this process, and who wants to hear of its end.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, Weak};

/// Hears that a block is gone: a session that has told its peer of it.
pub trait Watcher: Send + Sync {
    /// The block with this number has been given back to the system, or, if it is a peer's, let go of.
    ///
    /// Called from destructors: it must neither block nor panic.
    fn ended(&self, block: u64);
}

/// The identity of a block, ours or a peer's, for as long as this process has it.
///
/// Numbers are never used twice in a process.
pub struct BlockId {
    number: u64,
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
}

impl BlockId {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { number, watchers: Mutex::default() }
    }

    /// The number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Has a watcher told, once, when the block ends; without it being kept alive for that.
    pub fn watch(&self, watcher: Weak<dyn Watcher>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        // Sessions come and go; a block may outlive many.
        watchers.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&watcher));
        watchers.push(watcher);
    }
}

impl Drop for BlockId {
    fn drop(&mut self) {
        let watchers = self.watchers.get_mut().unwrap_or_else(PoisonError::into_inner);
        for watcher in watchers.drain(..) {
            if let Some(watcher) = watcher.upgrade() {
                watcher.ended(self.number);
            }
        }
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockId({})", self.number)
    }
}
