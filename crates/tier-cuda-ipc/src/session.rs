//! What one session knows: what the peer keeps of ours and we of the peer's, and what has yet to run on it.
//!
//! An allocation goes to a peer once, with a number; from then on the number alone names it, and the peer keeps it
//! mapped. When its users have let go, the peer is told (`x`), unmaps it, and says so (`c`). Memory of the older kind
//! is not freed before that: freeing what a peer has mapped is undefined behaviour of the driver's.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use cuda_memory::block::{Block, Hold, Watcher, serial};
use cuda_memory::events::{EventWire, Exchange, Ours};
use cuda_memory::lease::{Borrower, Ended, Unsettled};
use cuda_memory::lock;
use cuda_memory::offer::Pair;
use rung::sent::{Naming as How, Sent};
use rung::wake::Wake;
use rung::{Device, Fault, LeaseId, Meta, Reason, Storage};
use serde::{Deserialize, Serialize};

use crate::import::{Import, Source};
use crate::staging::Staging;

/// The peer's number for an allocation; 0 for one that is not kept.
pub(crate) type Key = u64;

/// Allocations that each side keeps of the other's, at most: each is address space, and perhaps a descriptor.
pub(crate) const KEPT: usize = 128;

/// What a session says outside any parcel.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notice {
    /// Numbers and serials of allocations that need not be kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    x: Vec<(u64, u64)>,
    /// Serials of the peer's that are not mapped here any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    c: Vec<u64>,
    /// Numbers of allocations whose owner is gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    g: Vec<u64>,
    /// Done-events of the peer's that are waited for, and may be used again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    w: Vec<u64>,
    /// Numbers of the peer's allocations that were lent on from here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    l: Vec<Key>,
}

/// Things of one kind that wait to be said, at most: more is a peer that does not listen.
const UNSAID: usize = 1 << 14;

/// Allocations that one notice says something of that takes a search, at most.
const NAMED: usize = 1 << 10;

/// What a receipt says.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReceiptMeta {
    /// What still runs on it there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    d: Vec<EventWire>,
    /// Its number said nothing there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    u: bool,
    /// It was lent on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    l: bool,
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) pair: Pair,
    /// Whether the peer can be counted on not to look at what it gave back.
    pub(crate) is_trusted: bool,
    pub(crate) staging: Staging,
    pub(crate) events: Exchange,
    next_lease: AtomicU64,
    exports: Mutex<Exports>,
    imports: Mutex<Imports>,
    /// The peer is gone for sure.
    gone: AtomicBool,
    pub(crate) wake: Wake,
}

/// A lease that is out.
#[derive(Debug)]
struct Out {
    /// The peer let go.
    home: bool,
    number: Key,
    ready: Option<Ours>,
    /// Ours, where it is: to be ordered after what the peer still does.
    hold: Option<Arc<Hold>>,
    /// A third's, where it is: what may come back.
    forwarded: Option<Weak<Storage>>,
}

#[derive(Debug, Default)]
struct Exports {
    out: HashMap<LeaseId, Out>,
    sent: Sent,
    /// The number of each serial that the peer was told of.
    numbers: HashMap<u64, Key>,
    /// The number of each allocation of the driver's: several blocks may lie in one.
    allocations: HashMap<u64, Key>,
    /// What must not be freed before the peer has unmapped it.
    kept: HashMap<u64, Arc<Block>>,
    /// What a peer works on and cannot say when it is done: until it is gone.
    given_up: Vec<Arc<Block>>,
    /// To be told.
    retired: Vec<(Key, u64)>,
    lost: Vec<Key>,
}

/// An allocation of the peer's that is kept.
#[derive(Debug)]
struct Kept {
    import: Arc<Import>,
    leases: usize,
    /// The peer's serials that are told when it is unmapped.
    retired: Vec<u64>,
}

#[derive(Debug, Default)]
struct Imports {
    kept: HashMap<Key, Kept>,
    /// What is not kept, while it is there: by the peer's numbers.
    once: Vec<(Key, Weak<Import>)>,
    finished: HashMap<LeaseId, Unsettled<Import>>,
    unknown: HashSet<LeaseId>,
    /// Leases whose memory was lent on, and what is to be told of it at once.
    lent_on: HashSet<LeaseId>,
    lent_on_now: Vec<Key>,
    /// To be told: the peer's serials that are unmapped.
    closed: Vec<u64>,
}

/// How an allocation is named to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Naming {
    /// What it is mapped by goes along.
    pub(crate) with_source: bool,
    /// To be kept.
    pub(crate) keep: bool,
}

/// Who may still look at memory whose lease has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookers {
    Nobody,
    /// Whoever a peer that is gone lent it on to.
    Heirs,
    Somebody,
}

impl Session {
    pub(crate) fn new(pair: Pair, is_trusted: bool) -> Self {
        Self {
            pair,
            is_trusted,
            staging: Staging::default(),
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
}

/// What is lent.
impl Session {
    /// The number of an allocation of the driver's, by the driver's own: never used twice, and never what anything else
    /// has.
    pub(crate) fn number_of(&self, allocation: u64) -> Key {
        *lock(&self.exports).allocations.entry(allocation).or_insert_with(serial)
    }

    /// Whether so much is kept for the peer already that more has to go without.
    fn keeps_enough(exports: &Exports) -> bool {
        exports.sent.len() >= KEPT || exports.kept.len() >= KEPT
    }

    /// A lease goes out, on an allocation with this number and serial.
    pub(crate) fn lend(
        &self,
        lease: LeaseId,
        (number, serial): (Key, u64),
        once: bool,
        (hold, forwarded): (Option<&Arc<Hold>>, Option<&Arc<Storage>>),
        ready: Option<Ours>,
    ) -> Naming {
        let mut exports = lock(&self.exports);
        let forwarded = forwarded.map(Arc::downgrade);
        let out = Out { home: false, number, ready, hold: hold.cloned(), forwarded };
        exports.out.insert(lease, out);
        if number == 0 {
            // The peer's own, going back.
            return Naming { with_source: false, keep: false };
        }
        if hold.is_none() {
            // Not ours: should its owner go, the peer is told.
            exports.numbers.insert(serial, number);
        }
        // Where the transport has no way to say that something is gone, the peer must not keep it.
        let may_keep = !Self::keeps_enough(&exports) && self.wake.is_set();
        let how = if once { How::Once } else { exports.sent.name(number, lease, may_keep) };
        if how != How::Once {
            exports.numbers.insert(serial, number);
        }
        Naming { with_source: how != How::Number, keep: how != How::Once }
    }

    /// The peer may map a block as long as it is not told otherwise: it is kept until it says that it has not.
    pub(crate) fn keep(&self, block: &Arc<Block>) {
        lock(&self.exports).kept.insert(block.serial, Arc::clone(block));
    }

    /// A lease did not go out after all.
    pub(crate) fn unlend(&self, lease: LeaseId) {
        let mut exports = lock(&self.exports);
        let Some(out) = exports.out.remove(&lease) else { return };
        exports.sent.unsend(out.number, lease);
        drop(exports);
        if let Some(ready) = out.ready.clone() {
            self.events.give_back(ready);
        }
        drop(out);
    }

    /// What went with this lease is on its way.
    pub(crate) fn sent(&self, lease: LeaseId) {
        let mut exports = lock(&self.exports);
        let Some(number) = exports.out.get(&lease).map(|out| out.number) else { return };
        exports.sent.note(number);
    }

    /// A lease came home: what its owner enqueues from now on comes after what the peer still does.
    ///
    /// Of leases that are not out nothing is noted: a peer must not fill this table.
    pub(crate) fn released(&self, lease: LeaseId, said: ReceiptMeta) {
        let mut exports = lock(&self.exports);
        let Some(out) = exports.out.get(&lease).filter(|out| !out.home) else { return };
        let (number, hold) = (out.number, out.hold.clone());
        drop(exports);
        let mut tells = false;
        if let Some(hold) = &hold {
            match self.events.wait_for(&said.d, &hold.block().order) {
                Ok(waits) => tells = waits,
                Err(fault) => {
                    // Nobody here can tell when the peer is done with it, so it is never used again; what the driver
                    // does not count is not freed either.
                    tracing::warn!("memory that a peer still works on is given up: {fault}");
                    hold.block().spoil();
                    if hold.block().buffer.as_shareable().is_none() {
                        lock(&self.exports).given_up.push(Arc::clone(hold.block()));
                    }
                }
            }
        }
        if said.l
            && let Some(hold) = &hold
        {
            hold.block().note_lent_on();
        }
        exports = lock(&self.exports);
        if said.u {
            exports.sent.is_unknown_there(number, lease);
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

    /// The owner of a lease ends: who may still look at the memory by it.
    pub(crate) fn end(&self, lease: LeaseId) -> Lookers {
        let mut exports = lock(&self.exports);
        let out = exports.out.remove(&lease);
        let home = out.as_ref().is_some_and(|out| out.home);
        let ready = out.as_ref().and_then(|out| out.ready.clone());
        let gone = self.gone.load(Ordering::Acquire);
        let is_idle = exports.is_idle();
        drop(exports);
        self.events.lease_ended(ready, gone);
        if is_idle {
            self.events.nothing_lent();
        }
        drop(out);
        match (home, gone) {
            (true, _) => Lookers::Nobody,
            (false, true) => Lookers::Heirs,
            (false, false) => Lookers::Somebody,
        }
    }

    /// The memory of ours that a number stands for, and that is out: what a peer sends back.
    pub(crate) fn own(&self, number: Key) -> Vec<Arc<Hold>> {
        let exports = lock(&self.exports);
        let out = exports.out.values().filter(|out| !out.home && out.number == number);
        out.filter_map(|out| out.hold.clone()).collect()
    }

    /// The same, of a third's.
    pub(crate) fn forwarded(&self, number: Key) -> Vec<Arc<Storage>> {
        let exports = lock(&self.exports);
        let out = exports.out.values().filter(|out| !out.home && out.number == number);
        out.filter_map(|out| out.forwarded.as_ref()?.upgrade()).collect()
    }

    /// What this side was lent goes on to another: its owner hears of it.
    pub(crate) fn note_lent_on(&self, lease: LeaseId, number: Key) {
        let mut imports = lock(&self.imports);
        if imports.lent_on.insert(lease) {
            imports.lent_on_now.push(number);
            drop(imports);
            self.wake.wake();
        }
    }

    pub(crate) fn peer_gone(&self) {
        self.gone.store(true, Ordering::Release);
        let (kept, given_up) = {
            let mut exports = lock(&self.exports);
            (std::mem::take(&mut exports.kept), std::mem::take(&mut exports.given_up))
        };
        let imports: Vec<Arc<Import>> = {
            let imports = lock(&self.imports);
            let kept = imports.kept.values().map(|kept| Arc::clone(&kept.import));
            kept.chain(imports.once.iter().filter_map(|(_, import)| import.upgrade())).collect()
        };
        // Whoever it lent it on to may have it mapped.
        for block in kept.into_values().chain(given_up) {
            if block.was_lent_on() {
                std::mem::forget(block);
            }
        }
        for import in imports {
            import.owner_is_gone();
        }
    }
}

impl Exports {
    /// Whether nothing is lent any more.
    fn is_idle(&self) -> bool {
        self.out.is_empty() && self.numbers.is_empty()
    }
}

impl Watcher for Session {
    /// The users of an allocation have let go; told from destructors.
    fn retire(&self, serial: u64) {
        let mut exports = lock(&self.exports);
        let Some(number) = exports.numbers.remove(&serial) else { return };
        exports.sent.forget(number);
        if !exports.numbers.values().any(|other| *other == number) {
            exports.allocations.retain(|_, other| *other != number);
        }
        exports.retired.push((number, serial));
        let is_idle = exports.is_idle();
        drop(exports);
        if is_idle {
            self.events.nothing_lent();
        }
        self.wake.wake();
    }

    /// The owner of what was lent on is gone.
    fn lost(&self, serial: u64) {
        let mut exports = lock(&self.exports);
        let Some(number) = exports.numbers.get(&serial).copied() else { return };
        exports.lost.push(number);
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

    fn let_go(&self, ended: Ended<Import>) {
        let Ended { lease, number, used, once, settles } = ended;
        let is_kept = once.is_none();
        let unsettled = Unsettled { used: self.events.used(&self.pair, used, !settles), once };
        let mut imports = lock(&self.imports);
        let before =
            if unsettled.is_empty() { None } else { imports.finished.insert(lease, unsettled) };
        let mut gone = None;
        if let Some(kept) = imports.kept.get_mut(&number).filter(|_| is_kept) {
            kept.leases = kept.leases.saturating_sub(1);
            if kept.leases == 0 && !kept.retired.is_empty() {
                gone = imports.kept.remove(&number);
            }
        }
        drop(imports);
        drop(before);
        if let Some(Kept { import, retired, .. }) = gone {
            self.unmap(vec![(import, retired)]);
        }
    }
}

/// What was lent to this side.
impl Session {
    /// The allocation that a parcel names: one that is kept, or a new one.
    pub(crate) fn obtain(
        &self,
        lease: LeaseId,
        number: Key,
        (device, size): (Device, usize),
        source: Option<Source>,
        keep: bool,
    ) -> Result<(Arc<Import>, Key), Fault> {
        let mut imports = lock(&self.imports);
        if let Some(kept) = imports.kept.get_mut(&number).filter(|_| keep) {
            if kept.import.device != device || kept.import.size != size {
                return Err(Fault::new(Reason::WrongSize, "not what it was before"));
            }
            kept.leases += 1;
            return Ok((Arc::clone(&kept.import), number));
        }
        let Some(source) = source else {
            // The peer hears so with the receipt, and sends what it is mapped by along again.
            imports.unknown.insert(lease);
            return Err(Fault::new(Reason::UnknownBlock, format!("allocation {number}")));
        };
        let import = Import::new(device, size, source, self.pair.is_one_namespace);
        let mut out = None;
        if keep && imports.kept.len() >= KEPT {
            let idle = imports.kept.iter().find(|(_, kept)| kept.leases == 0);
            let idle = idle.map(|(number, _)| *number);
            out = idle.and_then(|number| imports.kept.remove(&number));
        }
        let key = if keep && number != 0 && imports.kept.len() < KEPT {
            let kept = Kept { import: Arc::clone(&import), leases: 1, retired: Vec::new() };
            imports.kept.insert(number, kept);
            number
        } else {
            imports.once.retain(|(_, import)| import.strong_count() > 0);
            imports.once.push((number, Arc::downgrade(&import)));
            0
        };
        drop(imports);
        // What is unmapped is unmapped outside the lock; the peer is told where it asks.
        drop(out);
        Ok((import, key))
    }

    /// What could not be opened is not kept: sent again, it comes with all that it takes.
    pub(crate) fn discard(&self, key: Key) {
        let kept = {
            let mut imports = lock(&self.imports);
            let is_idle = imports.kept.get(&key).is_some_and(|kept| kept.leases == 0);
            if is_idle { imports.kept.remove(&key) } else { None }
        };
        if let Some(Kept { import, retired, .. }) = kept {
            self.unmap(vec![(import, retired)]);
        }
    }

    /// Lets go of mappings, and then tells the peer.
    fn unmap(&self, gone: Vec<(Arc<Import>, Vec<u64>)>) {
        let mut closed = Vec::new();
        for (import, retired) in gone {
            // Closed here, before the peer hears of it.
            drop(import);
            closed.extend(retired);
        }
        let mut imports = lock(&self.imports);
        let tells = !closed.is_empty();
        imports.closed.append(&mut closed);
        drop(imports);
        self.note_idle();
        if tells {
            self.wake.wake();
        }
    }

    /// Where nothing is borrowed any more, events hold a context for nothing.
    fn note_idle(&self) {
        let is_idle = lock(&self.imports).kept.is_empty();
        if is_idle {
            self.events.nothing_borrowed();
        }
    }

    /// Whether nothing is left that its receipt would have to wait for.
    pub(crate) fn is_settled(&self, lease: LeaseId) -> bool {
        let imports = lock(&self.imports);
        imports.finished.get(&lease).is_none_or(Unsettled::is_settled)
    }

    /// What the receipt of a lease says; waits where the peer cannot.
    pub(crate) fn receipt(&self, lease: LeaseId) -> Option<Meta> {
        let mut imports = lock(&self.imports);
        let (u, l) = (imports.unknown.remove(&lease), imports.lent_on.remove(&lease));
        let mut said = ReceiptMeta { u, l, d: Vec::new() };
        let finished = imports.finished.remove(&lease).unwrap_or_default();
        drop(imports);
        drop(finished.once);
        said.d.extend(finished.used.into_iter().filter_map(|used| self.events.say(used)));
        self.note_idle();
        let is_empty = !said.u && !said.l && said.d.is_empty();
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
        let mut notice = Notice::default();
        {
            let mut exports = lock(&self.exports);
            notice.x = std::mem::take(&mut exports.retired);
            notice.g = std::mem::take(&mut exports.lost);
        }
        notice.w = self.events.take_waited();
        {
            let mut imports = lock(&self.imports);
            notice.c = std::mem::take(&mut imports.closed);
            notice.l = std::mem::take(&mut imports.lent_on_now);
        }
        let Notice { x, c, g, w, l } = &notice;
        let is_empty = x.is_empty() && c.is_empty() && g.is_empty() && w.is_empty() && l.is_empty();
        if is_empty { None } else { Meta::write(&notice).ok() }
    }

    pub(crate) fn noticed(self: &Arc<Self>, notice: &Meta) -> Result<(), Fault> {
        let Notice { x, c, g, w, l } = notice.read()?;
        let (mut gone, mut lost) = (Vec::new(), Vec::new());
        let mut tells = false;
        {
            let mut imports = lock(&self.imports);
            let told = imports.kept.values().map(|kept| kept.retired.len()).sum::<usize>();
            if imports.closed.len() + told + x.len() > UNSAID || l.len() + g.len() > NAMED {
                return Err(Fault::new(Reason::OverCap, "more is said to be gone than was lent"));
            }
            for (number, serial) in x {
                match imports.kept.get_mut(&number) {
                    Some(kept) => {
                        kept.retired.push(serial);
                        if kept.leases == 0
                            && let Some(kept) = imports.kept.remove(&number)
                        {
                            gone.push((kept.import, kept.retired));
                        }
                    }
                    None => {
                        imports.closed.push(serial);
                        tells = true;
                    }
                }
            }
            for number in g {
                lost.extend(imports.kept.get(&number).map(|kept| Arc::clone(&kept.import)));
                let once = imports.once.iter().filter(|(known, _)| *known == number);
                lost.extend(once.filter_map(|(_, import)| import.upgrade()));
            }
        }
        self.events.waited(w);
        let freed: Vec<Arc<Block>> = {
            let mut exports = lock(&self.exports);
            for number in l {
                let out = exports.out.values().filter(|out| out.number == number);
                out.filter_map(|out| out.hold.as_ref())
                    .for_each(|hold| hold.block().note_lent_on());
            }
            // Of what the peer was not told to unmap it has nothing to say.
            let said: Vec<&u64> =
                c.iter().filter(|serial| !exports.numbers.contains_key(serial)).collect();
            said.into_iter().filter_map(|serial| exports.kept.remove(serial)).collect()
        };
        for import in lost {
            import.owner_is_gone();
        }
        if tells {
            self.wake.wake();
        }
        if !gone.is_empty() || !freed.is_empty() {
            // Unmapping and freeing wait for work of the device, and whoever reads the socket is here. Without a
            // thread, the closure is dropped here after all: what is gone is unmapped, and the peer is not told.
            let session = Arc::clone(self);
            let _ = std::thread::Builder::new().name("cuda-forget".into()).spawn(move || {
                drop(freed);
                session.unmap(gone);
            });
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.gone.load(Ordering::Acquire) {
            return;
        }
        // The peer may have it mapped, and will never say that it has not: freeing it is not to be. Nor are events that
        // it may yet wait for.
        let kept = {
            let mut exports = lock(&self.exports);
            let out: Vec<Ours> =
                exports.out.values_mut().filter_map(|out| out.ready.take()).collect();
            std::mem::forget(out);
            let mut kept: Vec<Arc<Block>> =
                std::mem::take(&mut exports.kept).into_values().collect();
            kept.append(&mut exports.given_up);
            kept
        };
        self.events.leave();
        if !kept.is_empty() {
            tracing::warn!(
                blocks = kept.len(),
                "device memory is kept for a peer that may still have it mapped"
            );
            std::mem::forget(kept);
        }
    }
}
