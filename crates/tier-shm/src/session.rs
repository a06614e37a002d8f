//! What one session knows: which blocks the peer holds of ours, and we of the peer's.
//!
//! A block's descriptor goes to a peer once, with a number; from then on the number alone names it, and
//! both sides keep their mappings. What is known of the peer is what the order of the transport shows:
//! a descriptor that was sent comes before whatever is sent later.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rung::sent::{Naming, Sent};
use rung::wake::Wake;
use rung::{Fault, LeaseId, Reason, Storage};
use segment::{BlockId, Foreign, Sealed, Watcher};

use crate::memory::{self, Block};

/// Blocks that each side keeps of the other's, at most: each is a descriptor and a mapping. Further ones
/// go with a descriptor each time.
pub(crate) const KEPT: usize = 128;

pub(crate) struct Session {
    next_lease: AtomicU64,
    exports: Mutex<Exports>,
    imports: Mutex<Imports>,
    /// The peer is gone for sure.
    gone: AtomicBool,
    pub(crate) wake: Wake,
}

impl Default for Session {
    fn default() -> Self {
        Self {
            next_lease: AtomicU64::new(1),
            exports: Mutex::default(),
            imports: Mutex::default(),
            gone: AtomicBool::new(false),
            wake: Wake::default(),
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

/// A lease of a block that could be written again.
#[derive(Debug)]
struct Out {
    /// The peer let go.
    home: bool,
    /// And says that somebody sees it whom it does not trust.
    exposed: bool,
    block: u64,
}

#[derive(Debug, Default)]
struct Exports {
    out: HashMap<LeaseId, Out>,
    /// By our number.
    sent: Sent,
    /// Blocks that are gone, and of which the peer has not been told.
    retired: Vec<u64>,
}

/// A block of the peer's that we keep.
#[derive(Debug, Clone)]
pub(crate) enum Theirs {
    Sealed(Arc<Sealed>),
    Foreign(Arc<Foreign>),
    /// One of ours, come back: its inode.
    Own(u64),
}

impl Theirs {
    /// Whether nothing but the table holds it.
    fn is_idle(&self) -> bool {
        match self {
            Self::Sealed(block) => Arc::strong_count(block) == 1,
            Self::Foreign(block) => Arc::strong_count(block) == 1,
            Self::Own(_) => true,
        }
    }
}

/// What a receipt has to say besides that its lease is home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remark {
    /// The block's number said nothing here.
    Unknown,
    /// Somebody may go on looking at the block: a stranger it was lent on to, or a peer who was lent it
    /// on and is lost.
    Exposed,
}

#[derive(Debug, Default)]
struct Imports {
    /// By the peer's number.
    theirs: HashMap<u64, Theirs>,
    remarks: HashMap<LeaseId, Remark>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks is half done when somebody panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub(crate) fn next_lease(&self) -> LeaseId {
        LeaseId(self.next_lease.fetch_add(1, Ordering::Relaxed))
    }

    /// A lease of a block goes out.
    pub(crate) fn lend(self: &Arc<Self>, block: &BlockId, once: bool, lease: LeaseId) -> Naming {
        let number = block.number();
        let mut exports = lock(&self.exports);
        exports.out.insert(lease, Out { home: false, exposed: false, block: number });
        // Where the transport has no way to say that a block is gone, the peer must not keep it.
        let may_keep = !once && exports.sent.len() < KEPT && self.wake.is_set();
        let naming = exports.sent.name(number, lease, may_keep);
        drop(exports);
        if naming == Naming::First {
            let watcher: Arc<dyn Watcher> = Arc::<Self>::clone(self);
            block.watch(Arc::downgrade(&watcher));
        }
        naming
    }

    /// A lease did not go out after all.
    pub(crate) fn unlend(&self, lease: LeaseId) {
        let mut exports = lock(&self.exports);
        if let Some(out) = exports.out.remove(&lease) {
            exports.sent.unsend(out.block, lease);
        }
    }

    /// What went with this lease is on its way.
    pub(crate) fn sent(&self, lease: LeaseId) {
        let mut exports = lock(&self.exports);
        let Some(block) = exports.out.get(&lease).map(|out| out.block) else {
            // Home already: the next one takes the descriptor along again, which harms nobody.
            return;
        };
        exports.sent.note(block);
    }

    /// A lease came home. Of leases that are not out nothing is noted: a peer must not fill this table.
    pub(crate) fn released(&self, lease: LeaseId, remark: Option<Remark>) {
        let mut exports = lock(&self.exports);
        let Some(out) = exports.out.get_mut(&lease) else { return };
        out.home = true;
        let block = out.block;
        match remark {
            None => {}
            Some(Remark::Exposed) => out.exposed = true,
            Some(Remark::Unknown) => exports.sent.is_unknown_there(block, lease),
        }
    }

    pub(crate) fn peer_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// The owner of a lease ends: who may still look at the block by it.
    fn end(&self, lease: LeaseId) -> Lookers {
        let out = lock(&self.exports).out.remove(&lease);
        match out {
            Some(Out { exposed: true, .. }) => Lookers::Somebody,
            Some(Out { home: true, .. }) => Lookers::Nobody,
            _ if self.gone.load(Ordering::Acquire) => Lookers::Heirs,
            _ => Lookers::Somebody,
        }
    }

    /// Blocks that the peer need not keep any more.
    pub(crate) fn take_retired(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.exports).retired)
    }

    /// A block of the peer's by its number.
    pub(crate) fn theirs(&self, number: u64) -> Option<Theirs> {
        lock(&self.imports).theirs.get(&number).cloned()
    }

    /// Keeps a block of the peer's under its number.
    pub(crate) fn keep(&self, number: u64, block: Theirs) -> Theirs {
        let mut imports = lock(&self.imports);
        let mut out = None;
        if imports.theirs.len() >= KEPT {
            // The peer is told when it names it again.
            let idle = imports.theirs.iter().find(|(_, kept)| kept.is_idle());
            let idle = idle.map(|(number, _)| *number);
            out = idle.and_then(|number| imports.theirs.remove(&number));
        }
        if imports.theirs.len() < KEPT {
            let before = imports.theirs.insert(number, block.clone());
            drop(imports);
            drop(before);
        }
        // What is unmapped is unmapped outside the lock.
        drop(out);
        block
    }

    /// The peer has these no more.
    pub(crate) fn forget(&self, numbers: &[u64]) {
        let mut imports = lock(&self.imports);
        let gone: Vec<_> =
            numbers.iter().filter_map(|number| imports.theirs.remove(number)).collect();
        drop(imports);
        // Unmapping takes a third of a millisecond a megabyte, and whoever reads the socket is here. Without
        // a thread, the closure is dropped here after all, and the blocks with it.
        let _ = std::thread::Builder::new().name("shm-forget".into()).spawn(move || drop(gone));
    }

    /// Whether anything is kept that the peer may retire.
    pub(crate) fn keeps(&self) -> bool {
        !lock(&self.imports).theirs.is_empty()
    }

    pub(crate) fn remark(&self, lease: LeaseId, remark: Remark) {
        lock(&self.imports).remarks.insert(lease, remark);
    }

    pub(crate) fn take_remark(&self, lease: LeaseId) -> Option<Remark> {
        lock(&self.imports).remarks.remove(&lease)
    }
}

impl Watcher for Session {
    fn ended(&self, block: u64) {
        let mut exports = lock(&self.exports);
        if !exports.sent.forget(block) {
            return;
        }
        exports.retired.push(block);
        drop(exports);
        self.wake.wake();
    }
}

/// Who may still look at a block when a lease on it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lookers {
    Nobody,
    /// The peer is gone for sure; but it may have lent the block on, and had no time to say to whom. What
    /// is copied out there is of no use to anybody any more, and nobody was lent it in place (trust is not
    /// handed on), so it may be written; but not for others to see (L8).
    Heirs,
    /// Somebody who was not told that it may change.
    Somebody,
}

/// Which lease a storage was imported under.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) session: Weak<Session>,
    pub(crate) lease: LeaseId,
}

impl Import {
    /// A stranger is about to see it: its owner will hear so with the receipt.
    pub(crate) fn expose(&self) {
        if let Some(session) = self.session.upgrade() {
            session.remark(self.lease, Remark::Exposed);
        }
    }
}

/// The owner of a block that could be written again (L4).
///
/// Dropping it is not enough for that: unless the receipt came, or the peer is known to be gone, the
/// peer may still look at the block, so it is retired: never written again, and given back to the system
/// rather than to the pool.
pub(crate) struct Lent {
    // Dropped last, when it is known whether the block may be used again.
    pub(crate) storage: Arc<Storage>,
    pub(crate) lease: LeaseId,
    pub(crate) session: Arc<Session>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let lookers = self.session.end(self.lease);
        let Some(block) = Block::of(&self.storage) else { return };
        match lookers {
            Lookers::Nobody => {}
            Lookers::Heirs => block.expose(None),
            Lookers::Somebody => block.retire(),
        }
    }
}

/// The storage of ours that a block which came back holds.
pub(crate) fn own(inode: u64) -> Result<Arc<Storage>, Fault> {
    memory::own_storage(inode).ok_or_else(|| {
        Fault::new(Reason::UnknownLease, "a block of this process that is not lent out")
    })
}
