//! What keeps lent memory alive, and how leases come home.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rung::{LeaseId, Owner, RungId};

use crate::wire::Message;

/// How long a receipt may wait for a frame to ride on.
const RIDE: Duration = Duration::from_millis(2);

/// Messages that may wait to be sent on behalf of readers.
const POSTED: usize = 1024;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks is half done when somebody panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Kept {
    bytes: u64,
    owner: Owner,
}

/// How much one peer may be lent at a time (L5): at the bound, a call is an error and its value comes
/// back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of all blocks: no bound unless said otherwise.
    pub bytes: u64,
    /// Blocks, each a descriptor: 512 unless said otherwise.
    pub leases: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { bytes: u64::MAX, leases: 512 }
    }
}

/// An owner with its rung, lease and bytes.
pub(crate) type Exported = (RungId, LeaseId, u64, Owner);

/// The owners of everything lent to one peer, one entry a lease (L1).
///
/// An entry ends by the peer's receipt, or with the channel; no timer ends one.
#[derive(Default)]
pub(crate) struct Keeper {
    table: Mutex<Table>,
    /// Entries of the table, for a look without its lock; changed under it.
    lent: AtomicUsize,
}

#[derive(Default)]
struct Table {
    kept: HashMap<(RungId, LeaseId), Kept>,
    /// Of all entries.
    bytes: u64,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (leases, bytes) = self.out();
        f.debug_struct("Keeper").field("leases", &leases).field("bytes", &bytes).finish()
    }
}

impl Keeper {
    /// Keeps all of these owners, or, where the bounds would be passed, gives all of them back (L5).
    pub(crate) fn keep_all(
        &self,
        owners: Vec<Exported>,
        bounds: Bounds,
    ) -> Result<(), (String, Vec<Exported>)> {
        let more: u64 = owners.iter().map(|(_, _, bytes, _)| bytes).sum();
        let mut table = lock(&self.table);
        let (held, leases) = (table.bytes, table.kept.len());
        if held.saturating_add(more) > bounds.bytes || leases + owners.len() > bounds.leases {
            drop(table);
            let text = format!(
                "the peer holds {held} bytes in {leases} blocks, and {more} bytes in {} more would \
                 pass the bound of {} bytes and {} blocks",
                owners.len(),
                bounds.bytes,
                bounds.leases
            );
            return Err((text, owners));
        }
        for (rung, lease, bytes, owner) in owners {
            // A session mints each lease once, so nothing is replaced.
            table.kept.insert((rung, lease), Kept { bytes, owner });
        }
        table.bytes += more;
        self.lent.store(table.kept.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Ends a lease and gives back what it kept, for the caller to drop outside all locks (L7);
    /// none where no such lease is out.
    #[must_use]
    pub(crate) fn release(&self, rung: &RungId, lease: LeaseId) -> Option<Owner> {
        let mut table = lock(&self.table);
        let Kept { bytes, owner } = table.kept.remove(&(rung.clone(), lease))?;
        table.bytes -= bytes;
        self.lent.store(table.kept.len(), Ordering::Relaxed);
        Some(owner)
    }

    /// Whether any lease is out; takes no lock.
    pub(crate) fn has_lent(&self) -> bool {
        self.lent.load(Ordering::Relaxed) > 0
    }

    /// Leases out, and their bytes.
    pub(crate) fn out(&self) -> (usize, u64) {
        let table = lock(&self.table);
        (table.kept.len(), table.bytes)
    }
}

/// Leases that this side has let go of and not yet told the peer.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    queue: Mutex<Queue>,
    pushed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<(RungId, LeaseId)>,
    posted: Vec<Message>,
    closed: bool,
}

impl Returns {
    /// From a destructor: never blocks for longer than a push takes, and never panics.
    fn push(&self, rung: RungId, lease: LeaseId) {
        let mut queue = lock(&self.queue);
        if !queue.closed {
            queue.waiting.push((rung, lease));
            self.pushed.notify_one();
        }
    }

    /// Everything that waits, to ride the next frame.
    pub(crate) fn take(&self) -> Vec<(RungId, LeaseId)> {
        std::mem::take(&mut lock(&self.queue).waiting)
    }

    /// Back into the queue: the frame that they rode was not sent.
    pub(crate) fn untake(&self, leases: Vec<(RungId, LeaseId)>) {
        let mut queue = lock(&self.queue);
        if !queue.closed {
            queue.waiting.extend(leases);
            self.pushed.notify_one();
        }
    }

    /// A message for the thread that sends receipts to send, and leases that go home with it; false
    /// where so many wait that the peer must have stopped reading.
    #[must_use]
    pub(crate) fn post(&self, message: Message, leases: Vec<(RungId, LeaseId)>) -> bool {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return true;
        }
        queue.waiting.extend(leases);
        if queue.posted.len() >= POSTED {
            return false;
        }
        queue.posted.push(message);
        self.pushed.notify_one();
        true
    }

    /// Waits until some leases have waited long enough for a frame to ride on, or messages were
    /// posted, and gives those; none once closed.
    pub(crate) fn overdue(&self) -> Option<Vec<Message>> {
        let mut queue = lock(&self.queue);
        while queue.waiting.is_empty() && queue.posted.is_empty() && !queue.closed {
            queue = self.pushed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.closed {
            return None;
        }
        let posted = std::mem::take(&mut queue.posted);
        drop(queue);
        if posted.is_empty() {
            std::thread::sleep(RIDE);
        }
        Some(posted)
    }

    /// Nothing is told any more: the peer is gone.
    pub(crate) fn close(&self) {
        let mut queue = lock(&self.queue);
        queue.closed = true;
        queue.waiting.clear();
        queue.posted.clear();
        self.pushed.notify_all();
    }
}

/// Part of every imported storage: tells the exporter, once the memory is gone.
#[derive(Debug)]
pub(crate) struct LeaseGuard {
    returns: Arc<Returns>,
    rung: RungId,
    lease: LeaseId,
}

impl LeaseGuard {
    pub(crate) fn new(returns: &Arc<Returns>, rung: RungId, lease: LeaseId) -> Self {
        Self { returns: Arc::clone(returns), rung, lease }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.returns.push(self.rung.clone(), self.lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Clone)]
    enum Step {
        Keep(u64),
        Release(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![(0u64..20).prop_map(Step::Keep), (0u64..25).prop_map(Step::Release)];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        /// The table against a plain map: each owner lives exactly as long as its lease is out.
        #[test]
        fn an_owner_lives_as_long_as_its_lease(steps in steps()) {
            let (keeper, mut model) = (Keeper::default(), BTreeMap::new());
            for step in steps {
                match step {
                    Step::Keep(lease) if !model.contains_key(&lease) => {
                        let owner = Arc::new(lease);
                        model.insert(lease, Arc::downgrade(&owner));
                        let owner = (RungId::SHM, LeaseId(lease), 10, Box::new(owner) as Owner);
                        prop_assert!(keeper.keep_all(vec![owner], Bounds::default()).is_ok());
                    }
                    Step::Keep(_) => {}
                    Step::Release(lease) => {
                        let owner = keeper.release(&RungId::SHM, LeaseId(lease));
                        prop_assert_eq!(owner.is_some(), model.contains_key(&lease));
                        drop(owner);
                        if let Some(gone) = model.remove(&lease) {
                            prop_assert!(gone.upgrade().is_none());
                        }
                    }
                }
                prop_assert!(model.values().all(|owner| owner.upgrade().is_some()));
                prop_assert_eq!(keeper.out(), (model.len(), model.len() as u64 * 10));
            }
        }
    }

    #[test]
    fn at_the_bound_nothing_is_kept() {
        let keeper = Keeper::default();
        let owner = |lease, bytes| (RungId::SHM, LeaseId(lease), bytes, Box::new(()) as Owner);
        let bounds = Bounds { bytes: 100, leases: 3 };
        let keeps = |owners| keeper.keep_all(owners, bounds).is_ok();
        assert!(keeps(vec![owner(1, 60)]));
        assert!(!keeps(vec![owner(2, 10), owner(3, 31)]));
        assert_eq!(keeper.out(), (1, 60));
        assert!(keeps(vec![owner(2, 10), owner(3, 30)]));
        assert!(!keeps(vec![owner(4, 0)]));
        drop(keeper.release(&RungId::SHM, LeaseId(1)));
        assert!(keeps(vec![owner(4, 60)]));
    }

    /// An owner may hold anything, a channel too: its end must be able to look at the table (L7).
    #[test]
    fn owners_go_outside_the_lock() {
        struct Looks(Arc<Keeper>);
        impl Drop for Looks {
            fn drop(&mut self) {
                assert_eq!(self.0.out().0, 0);
            }
        }
        let _dog = testkit::Watchdog::new("owners_go_outside_the_lock", Duration::from_secs(20));
        let keeper = Arc::new(Keeper::default());
        let owner: Owner = Box::new(Looks(Arc::clone(&keeper)));
        assert!(
            keeper.keep_all(vec![(RungId::SHM, LeaseId(1), 1, owner)], Bounds::default()).is_ok()
        );
        drop(keeper.release(&RungId::SHM, LeaseId(1)));
    }

    #[test]
    fn a_guard_tells_once_and_never_after_the_end() {
        let returns = Arc::new(Returns::default());
        drop(LeaseGuard::new(&returns, RungId::SHM, LeaseId(1)));
        assert_eq!(returns.take(), [(RungId::SHM, LeaseId(1))]);
        assert_eq!(returns.take(), []);
        let late = LeaseGuard::new(&returns, RungId::SHM, LeaseId(2));
        returns.close();
        drop(late);
        assert_eq!(returns.take(), []);
        assert!(returns.overdue().is_none());
    }
}
