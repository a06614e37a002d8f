//! What keeps lent memory alive, and how leases come home.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rung::{Handle, LeaseId, Owner, RungId};

use crate::core::Core;
use crate::wire::{Accepted, Message, Of, Riders};

/// How long a receipt may wait for a frame to ride on.
const RIDE: Duration = Duration::from_millis(2);

/// Messages that may wait to be sent on behalf of readers.
const POSTED: usize = 1024;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks is half done when somebody panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Kept {
    /// Whether it is a canary's: not what a user lent, and bounded apart.
    own: bool,
    bytes: u64,
    owner: Owner,
    since: Instant,
    /// Whether it was warned of.
    alarmed: bool,
}

/// How much one peer may be lent at a time (L5).
///
/// Canaries come on top: 64 blocks and 64 MiB of them at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of all blocks: no bound unless said otherwise.
    pub bytes: u64,
    /// Blocks, each perhaps a descriptor: 512 unless said otherwise.
    pub leases: usize,
    /// What happens at the bound.
    pub policy: AtBound,
    /// How long the peer may keep a lease before that is warned of (a `tracing` warning, once a lease,
    /// and [`Peer::alarms`](crate::Peer::alarms)): 2 minutes unless said otherwise. Nothing ends by it.
    pub alarm: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            bytes: u64::MAX,
            leases: 512,
            policy: AtBound::Refuse,
            alarm: Duration::from_secs(120),
        }
    }
}

impl Bounds {
    fn allow(&self, leases: usize, bytes: u64) -> bool {
        leases <= self.leases && bytes <= self.bytes
    }
}

/// What a call does that would lend the peer more than the bounds allow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AtBound {
    /// It is an error at once, and its value comes back.
    #[default]
    Refuse,
    /// It waits until enough is given back, or its deadline passes; meanwhile what the peer sends is
    /// read. A value that would never fit is an error at once.
    Wait,
}

/// A lease that the peer has kept for long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldLease {
    /// The rung.
    pub rung: RungId,
    /// Its number there.
    pub lease: LeaseId,
    /// Since it was lent.
    pub age: Duration,
    /// What is kept for it.
    pub bytes: u64,
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
    /// Leases that were warned of.
    alarms: AtomicU64,
}

#[derive(Default)]
struct Table {
    kept: HashMap<(RungId, LeaseId), Kept>,
    /// Of users' entries, and of canaries'.
    held: [Held; 2],
}

#[derive(Debug, Default, Clone, Copy)]
struct Held {
    leases: usize,
    bytes: u64,
}

/// What canaries may be lent out at a time: more is a peer that asks for them and gives none back.
const CANARIES: Bounds = Bounds {
    bytes: 64 << 20,
    leases: 64,
    policy: AtBound::Refuse,
    alarm: Duration::from_secs(120),
};

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
        own: bool,
        bounds: Bounds,
    ) -> Result<(), (String, Vec<Exported>)> {
        let bounds = if own { CANARIES } else { bounds };
        let more: u64 = owners.iter().map(|(_, _, bytes, _)| bytes).sum();
        let mut table = lock(&self.table);
        let Held { leases, bytes: held } = table.held[usize::from(own)];
        if !bounds.allow(leases + owners.len(), held.saturating_add(more)) {
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
        let since = Instant::now();
        for (rung, lease, bytes, owner) in owners {
            // A session mints each lease once, so nothing is replaced.
            table.kept.insert((rung, lease), Kept { own, bytes, owner, since, alarmed: false });
            table.held[usize::from(own)].leases += 1;
        }
        table.held[usize::from(own)].bytes += more;
        self.lent.store(table.kept.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Ends a lease and gives back what it kept, for the caller to drop outside all locks (L7);
    /// none where no such lease is out.
    #[must_use]
    pub(crate) fn release(&self, rung: &RungId, lease: LeaseId) -> Option<Owner> {
        let mut table = lock(&self.table);
        let Kept { own, bytes, owner, .. } = table.kept.remove(&(rung.clone(), lease))?;
        let held = &mut table.held[usize::from(own)];
        (held.leases, held.bytes) = (held.leases - 1, held.bytes - bytes);
        self.lent.store(table.kept.len(), Ordering::Relaxed);
        Some(owner)
    }

    /// Whether any lease is out; takes no lock.
    pub(crate) fn has_lent(&self) -> bool {
        self.lent.load(Ordering::Relaxed) > 0
    }

    /// Whether so much more would fit: now, and if nothing else were lent.
    pub(crate) fn has_room(&self, leases: usize, bytes: u64, bounds: Bounds) -> (bool, bool) {
        let [held, _] = lock(&self.table).held;
        let now = bounds.allow(held.leases + leases, held.bytes.saturating_add(bytes));
        (now, bounds.allow(leases, bytes))
    }

    /// What the peer has kept for at least so long, the oldest first.
    pub(crate) fn held(&self, at_least: Duration) -> Vec<HeldLease> {
        let now = Instant::now();
        let table = lock(&self.table);
        let mut held: Vec<HeldLease> = table
            .kept
            .iter()
            .map(|((rung, lease), kept)| HeldLease {
                rung: rung.clone(),
                lease: *lease,
                age: now.saturating_duration_since(kept.since),
                bytes: kept.bytes,
            })
            .filter(|held| held.age >= at_least)
            .collect();
        drop(table);
        held.sort_by_key(|held| std::cmp::Reverse(held.age));
        held
    }

    /// Warns of what the peer keeps for longer than the window, once each; nothing ends by it.
    pub(crate) fn sound_alarms(&self, window: Duration) {
        for HeldLease { rung, lease, age, bytes } in self.held(window) {
            let mut table = lock(&self.table);
            let Some(kept) = table.kept.get_mut(&(rung.clone(), lease)) else { continue };
            if std::mem::replace(&mut kept.alarmed, true) {
                continue;
            }
            drop(table);
            self.alarms.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%rung, %lease, ?age, bytes, "the peer keeps a lease for long");
        }
    }

    /// Leases that were warned of so far.
    pub(crate) fn alarms(&self) -> u64 {
        self.alarms.load(Ordering::Relaxed)
    }

    /// Users' leases out, and their bytes.
    pub(crate) fn out(&self) -> (usize, u64) {
        let [held, _] = lock(&self.table).held;
        (held.leases, held.bytes)
    }
}

/// What rides the next frame: leases that came home, messages that were accepted.
#[derive(Debug, Default)]
pub(crate) struct Due {
    pub(crate) leases: Vec<(RungId, LeaseId)>,
    /// Whether a rung has something to say.
    pub(crate) notices: bool,
    /// What was accepted; and what was written out already, for a frame that was not sent.
    pub(crate) riders: Riders,
    /// Of the receipts among the riders.
    pub(crate) handles: Vec<Handle>,
}

impl Due {
    pub(crate) fn is_empty(&self) -> bool {
        let Riders { receipts, accepted, notices } = &self.riders;
        let written = !(receipts.is_empty() && accepted.is_empty() && notices.is_empty());
        self.leases.is_empty() && !self.notices && !written
    }
}

/// What this side has to tell the peer, and has not yet.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    /// The number of the channel in this process, and the channel.
    pub(crate) channel: OnceLock<(u64, Weak<Core>)>,
    queue: Mutex<Queue>,
    pushed: Condvar,
    /// Whether anything waits, for a look without the lock; changed under it.
    waits: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    due: Due,
    /// When the first of it was pushed.
    since: Option<Instant>,
    posted: Vec<Message>,
    /// Whether the thread that flushes waits for something to be pushed.
    idle: bool,
    closed: bool,
}

impl Returns {
    /// From destructors: never blocks for longer than a push takes, and never panics. The thread that
    /// flushes is woken once, and then looks at the clock: in steady traffic everything rides a frame
    /// before it does.
    fn push(&self, push: impl FnOnce(&mut Due)) {
        let mut queue = lock(&self.queue);
        if queue.closed {
            return;
        }
        push(&mut queue.due);
        if queue.since.is_none() {
            queue.since = Some(Instant::now());
        }
        self.waits.store(true, Ordering::Relaxed);
        if queue.idle {
            queue.idle = false;
            self.pushed.notify_one();
        }
    }

    /// A lease goes home.
    fn push_lease(&self, rung: RungId, lease: LeaseId) {
        self.push(|due| due.leases.push((rung, lease)));
    }

    /// A message was taken; false where so many wait that the peer must have stopped reading.
    #[must_use]
    pub(crate) fn accept(&self, accepted: Accepted, leases: Vec<(RungId, LeaseId)>) -> bool {
        let mut room = true;
        self.push(|due| {
            due.leases.extend(leases);
            room = due.riders.accepted.len() < POSTED;
            if room {
                due.riders.accepted.push(accepted);
            }
        });
        room
    }

    /// A rung has something to say.
    pub(crate) fn wake(&self) {
        self.push(|due| due.notices = true);
    }

    /// Everything that waits, to ride the next frame. An answer says by itself that its call was taken.
    pub(crate) fn take(&self, answers: Option<u64>) -> Due {
        if !self.waits.load(Ordering::Relaxed) {
            return Due::default();
        }
        let mut queue = lock(&self.queue);
        self.waits.store(false, Ordering::Relaxed);
        queue.since = None;
        let mut due = std::mem::take(&mut queue.due);
        drop(queue);
        if let Some(id) = answers {
            due.riders.accepted.retain(|accepted| accepted.of != Of::Call || accepted.id != id);
        }
        due
    }

    /// Back into the queue: the frame that they rode was not sent.
    pub(crate) fn untake(&self, due: Due) {
        if due.is_empty() {
            return;
        }
        self.push(|queued| {
            queued.leases.extend(due.leases);
            queued.notices |= due.notices;
            queued.riders.receipts.extend(due.riders.receipts);
            queued.riders.accepted.extend(due.riders.accepted);
            queued.riders.notices.extend(due.riders.notices);
            queued.handles.extend(due.handles);
        });
    }

    /// A message for the thread that flushes to send, and leases that go home with it; false where so
    /// many wait that the peer must have stopped reading.
    #[must_use]
    pub(crate) fn post(&self, message: Message, leases: Vec<(RungId, LeaseId)>) -> bool {
        self.push(|due| due.leases.extend(leases));
        let mut queue = lock(&self.queue);
        if queue.closed {
            return true;
        }
        if queue.posted.len() >= POSTED {
            return false;
        }
        queue.posted.push(message);
        queue.idle = false;
        self.pushed.notify_one();
        true
    }

    /// Waits until something has waited long enough for a frame to ride on, or messages were posted, or
    /// so long that it is time to look around; gives the messages; none once closed.
    pub(crate) fn overdue(&self, look_around: Duration) -> Option<Vec<Message>> {
        let mut queue = lock(&self.queue);
        // In steady traffic something is pushed again at once: this thread then looks every few milliseconds,
        // and is not woken for each. It goes to sleep where nothing was there twice.
        let mut lingers = true;
        loop {
            if queue.closed {
                return None;
            }
            if !queue.posted.is_empty() {
                return Some(std::mem::take(&mut queue.posted));
            }
            let wait = match queue.since {
                None if lingers => {
                    lingers = false;
                    2 * RIDE
                }
                None => {
                    queue.idle = true;
                    look_around
                }
                Some(since) => match RIDE.checked_sub(since.elapsed()) {
                    Some(left) if !left.is_zero() => {
                        lingers = true;
                        left
                    }
                    _ => return Some(Vec::new()),
                },
            };
            let waited = self.pushed.wait_timeout(queue, wait);
            let timed_out;
            (queue, timed_out) = waited.map_or_else(
                |poisoned| {
                    let (queue, result) = poisoned.into_inner();
                    (queue, result.timed_out())
                },
                |(queue, result)| (queue, result.timed_out()),
            );
            if timed_out && queue.idle {
                queue.idle = false;
                return Some(Vec::new());
            }
        }
    }

    /// Nothing is told any more: the peer is gone.
    pub(crate) fn close(&self) {
        let mut queue = lock(&self.queue);
        queue.closed = true;
        queue.due = Due::default();
        queue.posted.clear();
        self.waits.store(false, Ordering::Relaxed);
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

    /// The channel that the memory came by.
    pub(crate) fn channel(&self) -> Option<(u64, Weak<Core>)> {
        self.returns.channel.get().cloned()
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.returns.push_lease(self.rung.clone(), self.lease);
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
                        prop_assert!(keeper.keep_all(vec![owner], false, Bounds::default()).is_ok());
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
        let bounds = Bounds { bytes: 100, leases: 3, ..Bounds::default() };
        let keeps = |owners| keeper.keep_all(owners, false, bounds).is_ok();
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
            keeper
                .keep_all(vec![(RungId::SHM, LeaseId(1), 1, owner)], false, Bounds::default())
                .is_ok()
        );
        drop(keeper.release(&RungId::SHM, LeaseId(1)));
    }

    #[test]
    fn a_guard_tells_once_and_never_after_the_end() {
        let returns = Arc::new(Returns::default());
        drop(LeaseGuard::new(&returns, RungId::SHM, LeaseId(1)));
        assert_eq!(returns.take(None).leases, [(RungId::SHM, LeaseId(1))]);
        assert!(returns.take(None).is_empty());
        let late = LeaseGuard::new(&returns, RungId::SHM, LeaseId(2));
        returns.close();
        drop(late);
        assert!(returns.take(None).is_empty());
        assert!(returns.overdue(Duration::from_secs(60)).is_none());
    }

    #[test]
    fn a_lease_that_is_kept_for_long_is_warned_of_once_and_lives_on() {
        let keeper = Keeper::default();
        let owner: Owner = Box::new(());
        let kept =
            keeper.keep_all(vec![(RungId::SHM, LeaseId(7), 42, owner)], false, Bounds::default());
        assert!(kept.is_ok());
        keeper.sound_alarms(Duration::from_secs(60));
        assert_eq!(keeper.alarms(), 0);
        keeper.sound_alarms(Duration::ZERO);
        keeper.sound_alarms(Duration::ZERO);
        assert_eq!(keeper.alarms(), 1);
        let held = keeper.held(Duration::ZERO);
        assert_eq!((held[0].lease, held[0].bytes), (LeaseId(7), 42));
        assert!(keeper.release(&RungId::SHM, LeaseId(7)).is_some());
    }

    /// What nothing takes along is due soon; what a frame takes along is not due any more.
    #[test]
    fn what_waits_is_due_within_its_ride() {
        let returns = Arc::new(Returns::default());
        drop(LeaseGuard::new(&returns, RungId::SHM, LeaseId(1)));
        let started = Instant::now();
        assert!(returns.overdue(Duration::from_secs(60)).unwrap().is_empty());
        assert!(started.elapsed() < Duration::from_secs(10));
        let taken = returns.take(None);
        returns.untake(taken);
        assert!(returns.accept(Accepted { of: Of::Call, id: 3, attempt: 1 }, Vec::new()));
        assert!(returns.accept(Accepted { of: Of::Return, id: 3, attempt: 1 }, Vec::new()));
        let due = returns.take(Some(3));
        assert_eq!((due.leases.len(), due.riders.accepted.len()), (1, 1));
        assert_eq!(due.riders.accepted[0].of, Of::Return);
        assert!(returns.post(Message::More, Vec::new()));
        assert_eq!(returns.overdue(Duration::from_secs(60)).unwrap().len(), 1);
    }
}
