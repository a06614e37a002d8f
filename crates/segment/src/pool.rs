//! Blocks of ours that are kept, with their mappings, for the next use.
//!
//! Making a block and faulting its pages in costs many times what copying into it does, so a block
//! that nobody holds any more waits here, mapped, for the next [`Draft`](crate::Draft) of its size.
//!
//! - **P1** A block gets here by the end of its [`Draft`](crate::Draft) or [`Shared`](crate::Shared)
//!   alone, so nobody in this process can look at it, and every lease on it is home (L4).
//! - **P2** What is not overwritten by the next contents is zeroed before anybody sees it (L8):
//!   [`Own::dirty`] bounds what can be other than zero.
//! - **P3** A block that a peer who is not trusted has seen is never used again, nor one of which a lease
//!   will never be home: nobody can take the peer's mapping from it
//!   ([`Shared::expose`](crate::Shared::expose), [`Shared::retire`](crate::Shared::retire)).
//! - **P4** After a fork the child begins with an empty pool (L9): it has none of the mappings.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rung::{Reason, Refusal};

use crate::file::{nonzero, refused};
use crate::fork::generation;
use crate::headroom;
use crate::id::BlockId;
use crate::mapping::Writer;
use crate::marks::Marks;
use crate::sys::{Identity, Object};

/// The least that a block has.
const PAGE: usize = 4096;

/// A block that this process made.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) object: Object,
    pub(crate) number: u64,
    pub(crate) writer: Writer,
    pub(crate) id: Arc<BlockId>,
    /// Whether a peer has seen it: its seals are then final.
    pub(crate) was_shared: bool,
    /// What is said of it by those who hold it.
    pub(crate) marks: Marks,
    /// From here on all bytes are zero (P2).
    pub(crate) dirty: usize,
    /// Whether its pages were faulted in.
    pub(crate) populated: bool,
}

/// The blocks that this process made and still has, by their number.
static OWN: LazyLock<Mutex<HashMap<u64, Identity>>> = LazyLock::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks is half done when somebody panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a block with this number was made by this process, and still exists.
pub(crate) fn is_own(number: u64) -> bool {
    lock(&OWN).contains_key(&number)
}

/// The number of the block of this process's of which something holds.
#[cfg(windows)]
pub(crate) fn own_number(is_it: impl Fn(&Identity) -> bool) -> Option<u64> {
    // Each look is a call of the system: not under the lock.
    let own: Vec<(u64, Identity)> =
        lock(&OWN).iter().map(|(number, identity)| (*number, identity.clone())).collect();
    own.iter().find(|(_, identity)| is_it(identity)).map(|(number, _)| *number)
}

impl Own {
    /// Over an object of this size that keeps S1, of which no writable mapping exists but this, if any.
    pub(crate) fn new(
        object: Object,
        writer: Option<Writer>,
        capacity: usize,
    ) -> Result<Self, Refusal> {
        let mapped = nonzero(capacity)?;
        let writer = match writer {
            Some(writer) => writer,
            None => Writer::new(&object, mapped).map_err(|error| refused(&error, "mmap"))?,
        };
        let number = object.number();
        lock(&OWN).insert(number, object.identity());
        Ok(Self {
            object,
            number,
            writer,
            id: Arc::new(BlockId::new()),
            was_shared: false,
            marks: Marks::new(),
            dirty: 0,
            populated: false,
        })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.writer.len()
    }

    /// The object alone, once the writable mapping is gone.
    pub(crate) fn into_object(self) -> Result<Object, Refusal> {
        // `self` has a destructor, so the object cannot be moved out of it.
        let object = self.object.try_clone();
        drop(self);
        object.map_err(|error| refused(&error, "duplicating a descriptor"))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        lock(&OWN).remove(&self.number);
    }
}

/// The size of the blocks that contents of `len` bytes go into: at most an eighth more, or a page.
pub(crate) fn size_class(len: usize) -> Result<usize, Refusal> {
    let len = nonzero(len)?.get();
    let step = (1 << len.ilog2() >> 3).max(PAGE);
    len.checked_next_multiple_of(step).ok_or_else(|| Reason::NoMemory.into())
}

/// What a pool may keep that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of idle blocks; the one idle for longest goes first. 2 GiB unless said otherwise.
    pub idle_bytes: u64,
    /// Idle blocks, each a descriptor: 128 unless said otherwise.
    pub idle_blocks: usize,
    /// How long a block may be idle: 30 s unless said otherwise.
    pub idle_for: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { idle_bytes: 2 << 30, idle_blocks: 128, idle_for: Duration::from_secs(30) }
    }
}

/// What a pool holds, and did since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks that exist, in use or idle.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks that nobody uses.
    pub idle_blocks: usize,
    /// Their bytes.
    pub idle_bytes: u64,
    /// The most bytes that existed at a time.
    pub peak_bytes: u64,
    /// Blocks made.
    pub made: u64,
    /// Times that an idle block was used again.
    pub reused: u64,
    /// Blocks given back to the system.
    pub freed: u64,
}

#[derive(Debug)]
struct Idle {
    own: Own,
    since: Instant,
}

#[derive(Debug, Default)]
struct State {
    limits: Limits,
    stats: PoolStats,
    /// By capacity; the one used last is the last.
    idle: HashMap<usize, Vec<Idle>>,
    /// To be given back by the thread that has the time.
    doomed: Vec<Own>,
    /// Whether that thread runs.
    trimming: bool,
    /// The process whose blocks these are.
    home: u32,
}

impl State {
    fn take(&mut self, capacity: usize) -> Option<Own> {
        let idle = self.idle.get_mut(&capacity)?.pop()?;
        self.stats.idle_blocks -= 1;
        self.stats.idle_bytes -= capacity as u64;
        Some(idle.own)
    }

    /// The capacity of the blocks among which the one idle for longest is, and since when.
    fn oldest(&self) -> Option<(usize, Instant)> {
        let firsts = self.idle.iter().filter_map(|(size, idle)| Some((*size, idle.first()?.since)));
        firsts.min_by_key(|(_, since)| *since)
    }

    /// Takes the block that is idle for longest out, to be given back.
    fn retire_oldest(&mut self) -> Option<Own> {
        let (capacity, _) = self.oldest()?;
        let of_size = self.idle.get_mut(&capacity)?;
        let own = of_size.remove(0).own;
        if of_size.is_empty() {
            self.idle.remove(&capacity);
        }
        self.stats.idle_blocks -= 1;
        self.stats.idle_bytes -= capacity as u64;
        self.forget(capacity);
        self.stats.freed += 1;
        Some(own)
    }

    /// A block is no longer the pool's.
    fn forget(&mut self, capacity: usize) {
        self.stats.blocks -= 1;
        self.stats.bytes -= capacity as u64;
    }

    fn is_too_much(&self) -> bool {
        self.stats.idle_bytes > self.limits.idle_bytes
            || self.stats.idle_blocks > self.limits.idle_blocks
    }

    /// What is idle beyond the limits.
    fn surplus(&mut self, now: Instant) -> Vec<Own> {
        let mut surplus = Vec::new();
        while let Some((_, since)) = self.oldest() {
            let too_long = now.saturating_duration_since(since) >= self.limits.idle_for;
            if !too_long && !self.is_too_much() {
                break;
            }
            surplus.extend(self.retire_oldest());
        }
        surplus
    }
}

/// Idle blocks, by size.
///
/// A process has one ([`Self::process`]), which everything uses that is not told otherwise: shared
/// memory belongs to the process, not to a channel.
#[derive(Debug)]
pub struct Pool {
    state: Mutex<State>,
    /// Wakes the thread that gives blocks back.
    doom: Condvar,
}

impl Pool {
    /// An empty one.
    #[must_use]
    pub fn new(limits: Limits) -> Arc<Self> {
        let state = State { limits, home: generation(), ..State::default() };
        Arc::new(Self { state: Mutex::new(state), doom: Condvar::new() })
    }

    /// The state, which a forked child begins anew: its parent's blocks are not its own (P4).
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        let here = generation();
        if state.home != here {
            // Their mappings are not here, so dropping them closes descriptors and nothing else.
            *state = State { limits: state.limits, home: here, ..State::default() };
        }
        state
    }

    /// The one of this process.
    #[must_use]
    pub fn process() -> &'static Arc<Self> {
        static PROCESS: LazyLock<Arc<Pool>> = LazyLock::new(|| Pool::new(Limits::default()));
        &PROCESS
    }

    /// What it holds.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.state().stats
    }

    /// Changes what it may keep; what is idle beyond that goes.
    pub fn set_limits(self: &Arc<Self>, limits: Limits) {
        let mut state = self.state();
        state.limits = limits;
        let surplus = state.surplus(Instant::now());
        drop(state);
        drop(surplus);
        self.doom.notify_one();
    }

    /// Gives every idle block back to the system, now.
    pub fn trim(&self) {
        let mut state = self.state();
        let mut idle = std::mem::take(&mut state.doomed);
        while let Some(own) = state.retire_oldest() {
            idle.push(own);
        }
        drop(state);
        drop(idle);
    }

    /// A block that waits, with whatever is in it.
    pub(crate) fn take(&self, capacity: usize) -> Option<Own> {
        let mut state = self.state();
        let own = state.take(capacity)?;
        state.stats.reused += 1;
        Some(own)
    }

    /// Sees that a new block has the memory, giving idle ones back where it has not.
    pub(crate) fn make_room(&self, capacity: usize) -> Result<(), Refusal> {
        if headroom::check(capacity).is_ok() {
            return Ok(());
        }
        self.trim();
        // Peers have them mapped too, and hear within milliseconds that they need not.
        for _ in 0..10 {
            if headroom::check(capacity).is_ok() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        headroom::check(capacity)
    }

    /// A new object; where descriptors have run out, those of idle blocks make room.
    pub(crate) fn new_object(&self, capacity: usize) -> Result<Object, Refusal> {
        Object::new(capacity).or_else(|refusal| {
            let has_memory_at_once = cfg!(not(target_os = "linux"));
            match refusal.reason() {
                Reason::NoDescriptors => {}
                Reason::NoMemory if has_memory_at_once => {}
                _ => return Err(refusal),
            }
            self.trim();
            Object::new(capacity)
        })
    }

    /// A block was made.
    pub(crate) fn note_made(&self, capacity: usize) {
        let mut state = self.state();
        let stats = &mut state.stats;
        stats.made += 1;
        stats.blocks += 1;
        stats.bytes += capacity as u64;
        stats.peak_bytes = stats.peak_bytes.max(stats.bytes);
    }

    /// A block was sealed for good and is not the pool's any more.
    pub(crate) fn note_left(&self, capacity: usize) {
        self.state().forget(capacity);
    }

    /// A block that nobody holds any more (P1).
    ///
    /// From destructors: what has to be unmapped is left to a thread, since that takes a third of a
    /// millisecond a megabyte.
    pub(crate) fn put(self: &Arc<Self>, own: Own) {
        if !own.writer.is_here() {
            // The parent's (P4).
            return;
        }
        let mut state = self.state();
        let capacity = own.capacity();
        if !own.marks.may_be_used_again() {
            state.forget(capacity);
            state.stats.freed += 1;
            state.doomed.push(own);
        } else {
            let now = Instant::now();
            state.idle.entry(capacity).or_default().push(Idle { own, since: now });
            state.stats.idle_blocks += 1;
            state.stats.idle_bytes += capacity as u64;
            if state.is_too_much() {
                let surplus = state.surplus(now);
                state.doomed.extend(surplus);
            }
        }
        let doomed = !state.doomed.is_empty();
        if state.trimming {
            drop(state);
            if doomed {
                self.doom.notify_one();
            }
            return;
        }
        state.trimming = true;
        drop(state);
        let pool = Arc::clone(self);
        let thread = std::thread::Builder::new().name("segment-pool".into());
        if thread.spawn(move || pool.give_back()).is_err() {
            // The next block tries again; until then idle ones stay.
            lock(&self.state).trimming = false;
        }
    }

    /// Gives back what is doomed, and what was idle for too long; until nothing has been idle for so
    /// long. In steady traffic every block may be in use whenever it looks, and it stays all the same.
    fn give_back(&self) {
        let mut state = lock(&self.state);
        let mut empty_since = None;
        loop {
            let now = Instant::now();
            let mut surplus = std::mem::take(&mut state.doomed);
            surplus.extend(state.surplus(now));
            if !surplus.is_empty() {
                drop(state);
                drop(surplus);
                state = lock(&self.state);
                continue;
            }
            let since = match state.oldest() {
                Some((_, since)) => {
                    empty_since = None;
                    since
                }
                None => *empty_since.get_or_insert(now),
            };
            let left = state.limits.idle_for.saturating_sub(now.saturating_duration_since(since));
            if empty_since.is_some() && left.is_zero() {
                state.trimming = false;
                return;
            }
            let waited = self.doom.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draft, Filling};
    use proptest::prelude::*;

    fn keeping(idle_bytes: u64) -> Arc<Pool> {
        let idle_for = Duration::from_secs(3600);
        Pool::new(Limits { idle_bytes, idle_for, ..Limits::default() })
    }

    fn filled(pool: &Arc<Pool>, len: usize, byte: u8) -> Draft {
        Draft::build_in(pool, len, |filling: &mut Filling<'_>| filling.write(&vec![byte; len]))
            .unwrap()
    }

    proptest! {
        #[test]
        fn a_class_wastes_an_eighth_or_a_page(len in 1usize..1 << 40) {
            let class = size_class(len).unwrap();
            prop_assert!(class >= len);
            prop_assert!(class - len < (len / 8).max(PAGE));
            prop_assert_eq!(size_class(class).unwrap(), class);
        }
    }

    #[test]
    fn lengths_that_no_block_has_are_refused() {
        assert_eq!(size_class(0).unwrap_err().reason(), Reason::Empty);
        assert_eq!(size_class(usize::MAX).unwrap_err().reason(), Reason::NoMemory);
    }

    #[test]
    fn a_block_comes_back_with_its_mapping() {
        let pool = keeping(u64::MAX);
        let first = filled(&pool, 100_000, 1);
        let address = first.bytes().as_ptr();
        drop(first);
        assert_eq!(pool.stats().idle_blocks, 1);
        // Another length of the same class.
        let second = filled(&pool, 99_000, 2);
        assert_eq!(second.bytes().as_ptr(), address);
        let stats = pool.stats();
        assert_eq!((stats.made, stats.reused, stats.blocks, stats.idle_blocks), (1, 1, 1, 0));
    }

    /// L8: what an earlier use left shows nowhere, in the contents or past them.
    #[test]
    fn nothing_of_an_earlier_use_is_seen() {
        let pool = keeping(u64::MAX);
        drop(filled(&pool, 100_000, 0xAA));
        let again = filled(&pool, 99_000, 0xBB);
        let shared = again.share().unwrap();
        let received = crate::receive(shared.descriptor().unwrap(), 99_000).unwrap();
        let crate::Received::Foreign(block) = received else { panic!("nobody writes it?") };
        let mut whole = vec![0; block.len()];
        block.read_at(0, &mut whole).unwrap();
        assert!(whole.len() > 99_000);
        assert!(whole[..99_000].iter().all(|byte| *byte == 0xBB));
        assert!(whole[99_000..].iter().all(|byte| *byte == 0));
        drop(shared);
        let zeros = Draft::new_in(&pool, 100_001).unwrap();
        assert!(zeros.bytes().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_failed_fill_leaves_nothing_behind() {
        let pool = keeping(u64::MAX);
        drop(filled(&pool, 8192, 7));
        let failed = Draft::build_in(&pool, 8192, |filling| {
            filling.write(&[9; 100])?;
            Err(Reason::OtherKind.into())
        });
        assert_eq!(failed.unwrap_err().reason(), Reason::OtherKind);
        let zeros = Draft::new_in(&pool, 8192).unwrap();
        assert!(zeros.bytes().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_a_stranger_has_seen_is_not_used_again() {
        let pool = keeping(u64::MAX);
        let shared = filled(&pool, 5000, 1).share().unwrap();
        shared.expose();
        drop(shared);
        let stats = pool.stats();
        assert_eq!((stats.blocks, stats.idle_blocks, stats.freed), (0, 0, 1));
    }

    #[test]
    fn the_bound_on_idle_bytes_holds_and_the_oldest_goes() {
        let pool = keeping(3 << 20);
        let blocks: Vec<Draft> = (1..=4).map(|byte| filled(&pool, 1 << 20, byte)).collect();
        let addresses: Vec<_> = blocks.iter().map(|block| block.bytes().as_ptr()).collect();
        drop(blocks);
        let stats = pool.stats();
        assert_eq!((stats.idle_blocks, stats.idle_bytes, stats.peak_bytes), (3, 3 << 20, 4 << 20));
        let kept: Vec<_> = (0..3).map(|_| filled(&pool, 1 << 20, 9)).collect();
        assert!(kept.iter().all(|block| addresses[1..].contains(&block.bytes().as_ptr())));
        drop(kept);
        pool.set_limits(Limits { idle_bytes: 0, ..Limits::default() });
        assert_eq!(pool.stats().blocks, 0);
    }

    /// Descriptors run out long before memory does.
    #[test]
    fn the_bound_on_idle_blocks_holds() {
        let pool = Pool::new(Limits { idle_blocks: 2, ..Limits::default() });
        drop((1..=5).map(|byte| filled(&pool, 4096 * usize::from(byte), byte)).collect::<Vec<_>>());
        assert_eq!(pool.stats().idle_blocks, 2);
    }

    #[test]
    fn what_is_idle_for_too_long_goes_by_itself() {
        let pool = Pool::new(Limits { idle_for: Duration::from_millis(50), ..Limits::default() });
        let id = {
            let draft = filled(&pool, 5000, 1);
            Arc::clone(draft.id())
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        // Counted as gone first, and gone a moment later.
        while pool.stats().blocks > 0 || Arc::strong_count(&id) > 1 {
            assert!(Instant::now() < deadline, "still there: {:?}", pool.stats());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn watchers_hear_of_the_end_once() {
        struct Hears(Mutex<Vec<u64>>);
        impl crate::Watcher for Hears {
            fn ended(&self, block: u64) {
                lock(&self.0).push(block);
            }
        }
        let pool = keeping(u64::MAX);
        let hears = Arc::new(Hears(Mutex::default()));
        let draft = filled(&pool, 5000, 1);
        let number = draft.id().number();
        for _ in 0..3 {
            let watcher: Arc<dyn crate::Watcher> = Arc::<Hears>::clone(&hears);
            draft.id().watch(Arc::downgrade(&watcher));
        }
        drop(draft);
        assert!(lock(&hears.0).is_empty());
        pool.trim();
        assert_eq!(*lock(&hears.0), [number]);
    }
}
