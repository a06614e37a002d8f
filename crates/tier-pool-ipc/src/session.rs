//! What one session knows: what the peer may have imported of ours, and we of the peer's.
//!
//! An allocation that the peer may keep is pinned here ([`Exported`]) until the peer says that it has freed its import
//! (`f`), which it is asked to once nobody uses the allocation any more (`x`). One that it may not keep is pinned by its
//! leases.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use cuda::{Pool, WeakPool};
use cuda_memory::block::{Block, Hold, Watcher};
use cuda_memory::events::{EventWire, Exchange, Ours};
use cuda_memory::lease::{Borrower, Ended, Unsettled};
use cuda_memory::lock;
use cuda_memory::offer::Pair;
use rung::sent::{Naming, Sent};
use rung::wake::Wake;
use rung::{Device, Fault, LeaseId, Meta, Reason};
use serde::{Deserialize, Serialize};

use crate::contract::{Dead, Exported, Freed};
use crate::import::{Import, TheirPool};
use crate::steps::Said;

/// Allocations that each side keeps of the other's, at most.
pub(crate) const KEPT: usize = 128;

/// Pools, likewise.
pub(crate) const POOLS: usize = 16;

/// Things that one notice says, at most: more is a peer that says what cannot be.
const SAID: usize = 1 << 14;

/// What a session says outside any parcel.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notice {
    /// Numbers of allocations that need not be kept (O6).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    x: Vec<u64>,
    /// Numbers of the peer's that are freed here (O6).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    f: Vec<u64>,
    /// Done-events of the peer's that are waited for, and may be used again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    w: Vec<u64>,
    /// Numbers of pools that are no more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    p: Vec<u64>,
}

/// What a receipt says.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReceiptMeta {
    /// What still runs on it there (O5).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    d: Vec<EventWire>,
    /// Its pool's number said nothing there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    u: bool,
    /// Its import could not be freed there: it is not home (O6).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    n: bool,
}

type Pinned = Exported<Arc<Block>>;

/// A lease that is out.
#[derive(Debug)]
struct Out {
    /// The peer let go.
    home: bool,
    number: u64,
    pool: u64,
    ready: Option<Ours>,
    /// Ours, where it is.
    hold: Option<Arc<Hold>>,
}

#[derive(Debug)]
struct Kept {
    pin: Pinned,
    /// The peer was told that nobody uses it any more.
    is_retired: bool,
    /// A lease on it ended without a receipt: what the peer says of it is not enough (O9).
    is_lost: bool,
}

#[derive(Debug, Default)]
struct Exports {
    out: HashMap<LeaseId, Out>,
    pools: Sent,
    /// Those that the peer was told of, and of which it is to be told that they are no more.
    told: HashMap<u64, WeakPool>,
    gone: Vec<u64>,
    /// By our number for the allocation.
    kept: HashMap<u64, Kept>,
    /// What the peer may see for as long as it lives (O9).
    quarantine: Vec<Pinned>,
    /// To be told.
    retired: Vec<u64>,
}

/// An allocation of the peer's that is kept.
#[derive(Debug)]
struct Theirs {
    import: Arc<Import>,
    leases: usize,
    is_retired: bool,
}

/// A lease that was taken, and that its owner has heard nothing of.
#[derive(Debug, Clone, Copy)]
struct Taken {
    /// The number of its allocation.
    number: u64,
    /// All who had it have let go: until then it does not go home, whoever asks.
    is_let_go: bool,
}

#[derive(Debug, Default)]
struct Imports {
    pools: HashMap<u64, Arc<TheirPool>>,
    kept: HashMap<u64, Theirs>,
    /// What is not kept, while it is there.
    once: Vec<Weak<Import>>,
    /// Leases that were taken.
    held: HashMap<LeaseId, Taken>,
    finished: HashMap<LeaseId, Unsettled<Import>>,
    unknown: HashSet<LeaseId>,
    /// To be told.
    freed: Vec<u64>,
}

impl Exports {
    /// Of a pool that is no more no memory is out either.
    fn forget_pools(&mut self) {
        let is_gone = |(number, pool): (&u64, &WeakPool)| match pool.upgrade() {
            Some(_) => None,
            None => Some(*number),
        };
        for number in self.told.iter().filter_map(is_gone).collect::<Vec<_>>() {
            self.told.remove(&number);
            if self.pools.forget(number) {
                self.gone.push(number);
            }
        }
    }
}

impl Imports {
    /// The peer is to be told.
    fn say_freed(&mut self, number: u64, _proof: Freed) {
        self.freed.push(number);
    }
}

/// How a lease ends that its owner ends.
#[derive(Debug)]
pub(crate) enum End {
    /// The peer let go.
    Home,
    /// The peer is dead for sure.
    Dead(Dead),
    /// Nobody knows.
    Unknown,
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) pair: Pair,
    pub(crate) events: Exchange,
    next_lease: AtomicU64,
    exports: Mutex<Exports>,
    imports: Mutex<Imports>,
    /// The peer is gone for sure.
    gone: AtomicBool,
    pub(crate) wake: Wake,
}

impl Session {
    pub(crate) fn new(pair: Pair) -> Self {
        Self {
            pair,
            events: Exchange::default(),
            next_lease: AtomicU64::new(1),
            exports: Mutex::default(),
            imports: Mutex::default(),
            gone: AtomicBool::new(false),
            wake: Wake::default(),
        }
    }

    pub(crate) fn next_lease(&self) -> LeaseId {
        LeaseId(self.next_lease.fetch_add(1, Ordering::Relaxed))
    }

    /// What is said of an allocation of ours, and of the peer's.
    pub(crate) fn of_ours(&self, allocation: u64) -> Said<'_> {
        let names = &self.pair.names;
        Said { owner: &names.mine, importer: &names.theirs, allocation }
    }

    pub(crate) fn of_theirs(&self, allocation: u64) -> Said<'_> {
        let names = &self.pair.names;
        Said { owner: &names.theirs, importer: &names.mine, allocation }
    }
}

/// How an allocation goes to the peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// How its pool does.
    pub(crate) pool: Naming,
    /// Whether its import is kept between leases.
    pub(crate) keep: bool,
}

/// What is lent.
impl Session {
    /// A lease goes out. What pins the memory is here, where the peer may keep it, or comes back.
    pub(crate) fn lend(
        &self,
        lease: LeaseId,
        pool: &Pool,
        hold: &Arc<Hold>,
        ready: Option<Ours>,
        pin: Pinned,
    ) -> (Terms, Option<Pinned>) {
        let number = hold.block().serial;
        let mut exports = lock(&self.exports);
        exports.forget_pools();
        exports.told.entry(pool.number()).or_insert_with(|| pool.downgrade());
        let pool = pool.number();
        // Steps are said under the lock of what they change: nothing that follows from the peer's death is said before
        // that is, nor anything that does not after.
        // Where the transport has no way to say that something is gone, the peer must not keep it.
        let has_room = exports.kept.len() < KEPT || exports.kept.contains_key(&number);
        // Of a peer that is gone no word will come: then its lease pins it, which ends by that death.
        let keep = self.wake.is_set() && has_room && !self.is_gone();
        let may_keep_pool = exports.pools.len() < POOLS;
        let terms = Terms { pool: exports.pools.name(pool, lease, may_keep_pool), keep };
        let out = Out { home: false, number, pool, ready, hold: Some(Arc::clone(hold)) };
        exports.out.insert(lease, out);
        let mut left = Some(pin);
        if keep
            && !exports.kept.contains_key(&number)
            && let Some(pin) = left.take()
        {
            exports.kept.insert(number, Kept { pin, is_retired: false, is_lost: false });
        }
        if !self.is_gone() {
            self.of_ours(number).lease("export", lease, keep);
        }
        drop(exports);
        (terms, left)
    }

    /// Whether the peer has a pool of ours by its number.
    pub(crate) fn has_pool(&self, number: u64) -> bool {
        lock(&self.exports).pools.is_held(number)
    }

    /// The peer's own goes back.
    pub(crate) fn give_back(&self, lease: LeaseId) {
        let out = Out { home: false, number: 0, pool: 0, ready: None, hold: None };
        lock(&self.exports).out.insert(lease, out);
    }

    /// What went with this lease is on its way.
    pub(crate) fn sent(&self, lease: LeaseId) {
        let mut exports = lock(&self.exports);
        let Some(pool) = exports.out.get(&lease).map(|out| out.pool) else { return };
        exports.pools.note(pool);
    }

    /// A lease came home: what its owner enqueues from now on comes after what the peer still does (O5).
    ///
    /// Of leases that are not out nothing is noted: a peer must not fill this table.
    pub(crate) fn released(&self, lease: LeaseId, said: &ReceiptMeta) {
        let exports = lock(&self.exports);
        let Some(out) = exports.out.get(&lease).filter(|out| !out.home) else { return };
        let (pool, hold) = (out.pool, out.hold.clone());
        drop(exports);
        if said.n {
            tracing::warn!("memory of a pool stays mapped in a peer");
            return;
        }
        let mut tells = false;
        if let Some(hold) = &hold {
            match self.events.wait_for(&said.d, &hold.block().order) {
                Ok(waits) => tells = waits,
                Err(fault) => {
                    // Nobody here can tell when the peer is done with it: it is not home (O9).
                    tracing::warn!("memory that a peer still works on is given up: {fault}");
                    hold.block().spoil();
                    return;
                }
            }
        }
        let mut exports = lock(&self.exports);
        if let Some(hold) = &hold
            && !self.is_gone()
        {
            self.of_ours(hold.block().serial).lease("home", lease, !said.d.is_empty());
        }
        if said.u {
            exports.pools.is_unknown_there(pool, lease);
        }
        let ready = exports.out.get_mut(&lease).and_then(|out| {
            out.home = true;
            out.ready.take()
        });
        drop(exports);
        if let Some(ready) = ready {
            self.events.give_back(ready);
        }
        if tells {
            self.wake.wake();
        }
    }

    /// The owner of a lease ends.
    pub(crate) fn end(&self, lease: LeaseId) -> End {
        let mut exports = lock(&self.exports);
        let out = exports.out.remove(&lease);
        let is_home = out.as_ref().is_some_and(|out| out.home);
        let gone = self.is_gone();
        if let Some(Out { hold: Some(hold), .. }) = &out
            && !is_home
            && !gone
        {
            let number = hold.block().serial;
            self.of_ours(number).lease("lose", lease, false);
            if let Some(kept) = exports.kept.get_mut(&number) {
                kept.is_lost = true;
            }
        }
        let is_idle = exports.out.is_empty() && exports.kept.is_empty();
        drop(exports);
        self.events.lease_ended(out.as_ref().and_then(|out| out.ready.clone()), gone);
        if is_idle {
            self.events.nothing_lent();
        }
        match (is_home, gone) {
            (true, _) => End::Home,
            (false, true) => End::Dead(Dead(())),
            (false, false) => End::Unknown,
        }
    }

    /// What the peer may see for as long as it lives.
    pub(crate) fn quarantine(&self, pin: Pinned) {
        lock(&self.exports).quarantine.push(pin);
        // It may have gone meanwhile.
        if self.is_gone() {
            let quarantine = std::mem::take(&mut lock(&self.exports).quarantine);
            reclaim(HashMap::new(), quarantine);
        }
    }

    /// The memory of ours that a number stands for, and that is out: what the peer sends back.
    pub(crate) fn own(&self, number: u64) -> Option<Arc<Hold>> {
        let exports = lock(&self.exports);
        let mut out = exports.out.values().filter(|out| !out.home && out.number == number);
        out.find_map(|out| out.hold.clone())
    }

    pub(crate) fn peer_gone(&self) {
        let (kept, quarantine, theirs) = {
            let (mut exports, imports) = (lock(&self.exports), lock(&self.imports));
            if !self.gone.swap(true, Ordering::AcqRel) {
                self.of_ours(0).step("know-dead");
                self.of_theirs(0).step("know-owner-dead");
            }
            let kept = imports.kept.values().map(|kept| Arc::clone(&kept.import));
            let theirs: Vec<Arc<Import>> =
                kept.chain(imports.once.iter().filter_map(Weak::upgrade)).collect();
            let exports = &mut *exports;
            (std::mem::take(&mut exports.kept), std::mem::take(&mut exports.quarantine), theirs)
        };
        reclaim(kept, quarantine);
        theirs.iter().for_each(|import| import.owner_is_gone());
    }
}

/// O9: with a dead peer's process went its mappings and its work.
fn reclaim(kept: HashMap<u64, Kept>, quarantine: Vec<Pinned>) {
    let pins = kept.into_values().map(|kept| kept.pin).chain(quarantine);
    pins.for_each(|pin| drop(pin.dead(Dead(())).reclaim()));
}

impl Watcher for Session {
    /// The users of an allocation have let go; told from destructors.
    fn retire(&self, number: u64) {
        let mut exports = lock(&self.exports);
        let Some(kept) = exports.kept.get_mut(&number).filter(|kept| !kept.is_retired) else {
            return;
        };
        kept.is_retired = true;
        self.of_ours(number).step("let-go");
        exports.retired.push(number);
        drop(exports);
        self.wake.wake();
    }
}

impl Borrower for Session {
    type Import = Import;

    fn events(&self) -> &Exchange {
        &self.events
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn note_used(&self, lease: LeaseId, number: u64) {
        if !crate::steps::are_heard() {
            return;
        }
        let _imports = lock(&self.imports);
        if !self.is_gone() {
            self.of_theirs(number).lease("use", lease, false);
        }
    }

    fn let_go(&self, ended: Ended<Import>) {
        let Ended { lease, number, used, once, settles } = ended;
        let is_kept = once.is_none();
        let unsettled = Unsettled { used: self.events.used(&self.pair, used, !settles), once };
        let mut imports = lock(&self.imports);
        if let Some(taken) = imports.held.get_mut(&lease) {
            taken.is_let_go = true;
        }
        let before =
            if unsettled.is_empty() { None } else { imports.finished.insert(lease, unsettled) };
        let mut gone = None;
        if let Some(kept) = imports.kept.get_mut(&number).filter(|_| is_kept) {
            kept.leases = kept.leases.saturating_sub(1);
            let is_over = kept.leases == 0 && kept.is_retired;
            gone = if is_over { imports.kept.remove(&number) } else { None };
        }
        drop(imports);
        drop(before);
        if let Some(gone) = gone {
            self.free(vec![(number, gone.import)]);
        }
    }
}

/// What was lent to this side.
impl Session {
    /// The peer's pool of this number: one that is known, or the one whose descriptor came.
    pub(crate) fn pool(
        &self,
        lease: LeaseId,
        number: u64,
        device: Device,
        descriptor: Option<rung::Handle>,
    ) -> Result<Arc<TheirPool>, Fault> {
        let mut imports = lock(&self.imports);
        if let Some(pool) = imports.pools.get(&number) {
            return Ok(Arc::clone(pool));
        }
        let Some(descriptor) = descriptor else {
            // The peer hears so with the receipt, and sends it along again.
            imports.unknown.insert(lease);
            return Err(Fault::new(Reason::UnknownBlock, format!("pool {number}")));
        };
        let key = (self.pair.names.theirs.clone(), number);
        let pool = TheirPool::of(key, device, descriptor);
        if imports.pools.len() < POOLS {
            imports.pools.insert(number, Arc::clone(&pool));
        }
        Ok(pool)
    }

    /// A lease on an import is taken; to be kept between leases, or not.
    pub(crate) fn hold(
        &self,
        lease: LeaseId,
        number: u64,
        import: &Arc<Import>,
        keep: bool,
    ) -> Result<(), Fault> {
        let mut imports = lock(&self.imports);
        if self.is_gone() {
            // O10; and so that it is not freed.
            import.owner_is_gone();
            return Err(Reason::OwnerGone.into());
        }
        if imports.held.contains_key(&lease) || imports.finished.contains_key(&lease) {
            return Err(Fault::new(Reason::BadMetadata, "a lease that is held already"));
        }
        if keep {
            if imports.kept.len() >= KEPT && !imports.kept.contains_key(&number) {
                return Err(Fault::new(Reason::OverCap, "more is to be kept than was agreed"));
            }
            let kept = imports.kept.entry(number).or_insert_with(|| Theirs {
                import: Arc::clone(import),
                leases: 0,
                is_retired: false,
            });
            if !Arc::ptr_eq(&kept.import, import) {
                return Err(Fault::new(Reason::WrongSize, "not what it was before"));
            }
            kept.leases += 1;
        } else {
            imports.once.retain(|import| import.strong_count() > 0);
            imports.once.push(Arc::downgrade(import));
        }
        imports.held.insert(lease, Taken { number, is_let_go: false });
        self.of_theirs(number).lease("import", lease, keep);
        Ok(())
    }

    /// Lets go of imports, and then tells the peer (O6).
    fn free(&self, gone: Vec<(u64, Arc<Import>)>) {
        if self.is_gone() {
            // O10: taken out of the tables before that was known.
            gone.iter().for_each(|(_, import)| import.owner_is_gone());
        }
        let mut freed = Vec::new();
        for (number, import) in gone {
            // Freed here, before the peer hears of it. Where that fails it is not said, and its owner keeps it.
            freed.extend(Import::let_go(import).map(|proof| (number, proof)));
        }
        let mut imports = lock(&self.imports);
        for (number, proof) in freed {
            if !self.is_gone() {
                self.of_theirs(number).step("free-import");
            }
            imports.say_freed(number, proof);
        }
        let is_idle = imports.kept.is_empty();
        drop(imports);
        if is_idle {
            self.events.nothing_borrowed();
        }
        self.wake.wake();
    }

    /// Whether nothing is left that its receipt would have to wait for.
    pub(crate) fn is_settled(&self, lease: LeaseId) -> bool {
        let imports = lock(&self.imports);
        if imports.held.get(&lease).is_some_and(|taken| !taken.is_let_go) {
            return false;
        }
        imports.finished.get(&lease).is_none_or(Unsettled::is_settled)
    }

    /// What the receipt of a lease says; waits where the peer cannot.
    pub(crate) fn receipt(&self, lease: LeaseId) -> Option<Meta> {
        let mut imports = lock(&self.imports);
        let mut said = ReceiptMeta { u: imports.unknown.remove(&lease), ..ReceiptMeta::default() };
        let finished = imports.finished.remove(&lease).unwrap_or_default();
        let held = imports.held.get(&lease).copied();
        drop(imports);
        said.n = finished.once.is_some_and(|import| Import::let_go(import).is_err());
        said.d.extend(finished.used.into_iter().filter_map(|used| self.events.say(used)));
        let mut imports = lock(&self.imports);
        imports.held.remove(&lease);
        if let Some(Taken { number, .. }) = held.filter(|_| !self.is_gone()) {
            self.of_theirs(number).lease("release", lease, !said.d.is_empty());
        }
        let is_idle = imports.kept.is_empty() && imports.held.is_empty();
        drop(imports);
        if is_idle {
            self.events.nothing_borrowed();
        }
        let is_empty = !said.u && !said.n && said.d.is_empty();
        if is_empty { None } else { Meta::write(&said).ok() }
    }

    pub(crate) fn unopened(&self, lease: LeaseId) {
        lock(&self.imports).unknown.insert(lease);
    }

    /// Whether anything is kept that the peer may retire, or is waited for.
    pub(crate) fn keeps(&self) -> bool {
        let waits = !lock(&self.exports).kept.is_empty();
        let keeps = !lock(&self.imports).kept.is_empty();
        waits || keeps || self.events.is_flying()
    }
}

/// What is said outside any parcel.
impl Session {
    pub(crate) fn notice(&self) -> Option<Meta> {
        let mut exports = lock(&self.exports);
        let (x, p) = (std::mem::take(&mut exports.retired), std::mem::take(&mut exports.gone));
        drop(exports);
        let f = std::mem::take(&mut lock(&self.imports).freed);
        let notice = Notice { x, f, w: self.events.take_waited(), p };
        let Notice { x, f, w, p } = &notice;
        let is_empty = x.is_empty() && f.is_empty() && w.is_empty() && p.is_empty();
        if is_empty { None } else { Meta::write(&notice).ok() }
    }

    pub(crate) fn noticed(self: &Arc<Self>, notice: &Meta) -> Result<(), Fault> {
        let Notice { x, f, w, p } = notice.read()?;
        let mut gone = Vec::new();
        let mut tells = false;
        let no_more: Vec<Arc<TheirPool>> = {
            let mut imports = lock(&self.imports);
            if imports.freed.len() + x.len() > SAID || f.len() > SAID || w.len() > SAID {
                return Err(Fault::new(Reason::OverCap, "more is said to be gone than was lent"));
            }
            for number in x {
                if !self.is_gone() {
                    self.of_theirs(number).step("retire");
                }
                match imports.kept.get_mut(&number) {
                    Some(kept) if kept.leases > 0 => kept.is_retired = true,
                    Some(_) => {
                        gone.extend(imports.kept.remove(&number).map(|kept| (number, kept.import)));
                    }
                    // It was never taken: there is nothing to free.
                    None => {
                        imports.say_freed(number, Freed(()));
                        tells = true;
                    }
                }
            }
            p.iter().take(POOLS).filter_map(|number| imports.pools.remove(number)).collect()
        };
        drop(no_more);
        self.events.waited(w);
        let mut freed = Vec::new();
        let is_idle = {
            let mut exports = lock(&self.exports);
            for number in f {
                // Of what the peer was not told to free it has nothing to say.
                let may_say = |kept: &Kept| kept.is_retired && !kept.is_lost;
                if exports.kept.get(&number).is_some_and(may_say) {
                    self.of_ours(number).step("hear-freed");
                    let pin = exports.kept.remove(&number).map(|kept| kept.pin);
                    freed.extend(pin.map(|pin| pin.freed(Freed(()))));
                }
            }
            exports.out.is_empty() && exports.kept.is_empty()
        };
        if is_idle {
            self.events.nothing_lent();
        }
        if tells {
            self.wake.wake();
        }
        if !gone.is_empty() || !freed.is_empty() {
            // Freeing an import waits for work of the device, and so may what a block of ours has besides; whoever reads
            // the socket is here. Without a thread, the closure is dropped here after all: what is gone is freed, and
            // the peer is not told.
            let session = Arc::clone(self);
            let _ = std::thread::Builder::new().name("pool-forget".into()).spawn(move || {
                if !gone.is_empty() {
                    session.free(gone);
                }
                freed.into_iter().for_each(|freed| drop(freed.reclaim()));
            });
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.is_gone() {
            // O9: what came after its death was known.
            let exports = std::mem::take(&mut *lock(&self.exports));
            reclaim(exports.kept, exports.quarantine);
        } else {
            // The peer may be there, and wait for events; what is pinned stays allocated (O9).
            self.events.leave();
            let ready = std::mem::take(&mut *lock(&self.exports)).out;
            std::mem::forget(ready.into_values().filter_map(|out| out.ready).collect::<Vec<_>>());
        }
    }
}
