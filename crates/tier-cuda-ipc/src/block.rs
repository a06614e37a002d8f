//! Device memory of this process that peers may be shown.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};

use cuda::{Buffer, MemHandle, Stream};
use rung::{Reason, Refusal};

use crate::lock;
use crate::session::Session;

/// A number that nothing else of this process has: blocks, and imports.
pub(crate) fn serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory, and the stream that its owner orders work on it by.
///
/// Sessions may hold it longer than its users do: until a peer has unmapped it.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) serial: u64,
    pub(crate) buffer: Buffer,
    pub(crate) order: Stream,
    /// What a canary has to find in it, where it is one: told without a look at the device.
    pub(crate) contents: Option<(Arc<[u8]>, Buffer)>,
    born_for_peers: bool,
    legacy: OnceLock<Result<Legacy, Refusal>>,
    /// Whether somebody may look at it for ever, so that it must not be written again.
    spoiled: AtomicBool,
    /// Whether a peer lent it on: there are others who may have it mapped when that peer is gone.
    lent_on: AtomicBool,
    watchers: Mutex<Vec<Weak<Session>>>,
}

/// How a block crosses by a handle of the older kind.
#[derive(Debug, Clone)]
pub(crate) struct Legacy {
    pub(crate) handle: MemHandle,
    /// The driver's own number for the whole allocation: never used twice.
    pub(crate) allocation: u64,
    /// Bytes of the whole allocation, and where in it the block begins.
    pub(crate) size: usize,
    pub(crate) offset: usize,
}

impl Block {
    pub(crate) fn new(buffer: Buffer, order: Stream) -> Self {
        Self {
            serial: serial(),
            buffer,
            order,
            contents: None,
            born_for_peers: false,
            legacy: OnceLock::new(),
            spoiled: AtomicBool::new(false),
            lent_on: AtomicBool::new(false),
            watchers: Mutex::default(),
        }
    }

    /// As one that this crate allocated, and may hand out again.
    pub(crate) fn born_for_peers(self) -> Self {
        Self { born_for_peers: true, ..self }
    }

    pub(crate) fn is_born_for_peers(&self) -> bool {
        self.born_for_peers
    }

    /// As a canary, whose contents come from another buffer in time.
    pub(crate) fn with_contents(self, contents: Vec<u8>, from: Buffer) -> Self {
        Self { contents: Some((contents.into(), from)), ..self }
    }

    /// How it crosses by a handle; asked of the driver for this very memory, once.
    pub(crate) fn legacy(&self) -> Result<Legacy, Refusal> {
        self.legacy.get_or_init(|| ask(&self.buffer)).clone()
    }

    /// Whether nobody may look at it for ever.
    pub(crate) fn may_be_written(&self) -> bool {
        !self.spoiled.load(Ordering::Acquire)
    }

    /// Somebody may.
    pub(crate) fn spoil(&self) {
        self.spoiled.store(true, Ordering::Release);
    }

    /// A peer lent it on.
    pub(crate) fn note_lent_on(&self) {
        self.lent_on.store(true, Ordering::Release);
        self.spoil();
    }

    pub(crate) fn was_lent_on(&self) -> bool {
        self.lent_on.load(Ordering::Acquire)
    }

    /// A session wants to hear when its users have let go.
    pub(crate) fn watch(&self, session: &Arc<Session>) {
        watch(&self.watchers, session);
    }
}

pub(crate) fn watch(watchers: &Mutex<Vec<Weak<Session>>>, session: &Arc<Session>) {
    let mut watchers = lock(watchers);
    watchers.retain(|watcher| watcher.strong_count() > 0);
    if !watchers.iter().any(|watcher| std::ptr::eq(watcher.as_ptr(), Arc::as_ptr(session))) {
        watchers.push(Arc::downgrade(session));
    }
}

pub(crate) fn watchers(watchers: &Mutex<Vec<Weak<Session>>>) -> Vec<Arc<Session>> {
    lock(watchers).iter().filter_map(Weak::upgrade).collect()
}

fn ask(buffer: &Buffer) -> Result<Legacy, Refusal> {
    let said = buffer.attributes()?;
    let other = |what: &str| Err(Refusal::new(Reason::OtherAllocator, what));
    if said.is_managed {
        return other("managed memory");
    }
    if !said.is_device {
        return other("memory of the host");
    }
    if !said.is_legacy_ipc_capable {
        return other("not of cuMemAlloc: a pool's, stream-ordered, or mapped");
    }
    let (start, size) = said.range;
    let offset = buffer.address().checked_sub(start).and_then(|at| usize::try_from(at).ok());
    let within = |at: &usize| at.checked_add(buffer.len()).is_some_and(|end| end <= size);
    let offset = offset.filter(within).ok_or(Reason::OutOfBounds)?;
    let handle = MemHandle::of(buffer)?;
    Ok(Legacy { handle, allocation: said.buffer_id, size, offset })
}

/// The users' hold on a block: with the last of them sessions are told.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) block: Arc<Block>,
}

/// What is lent to a peer in this very process, by a secret of the lease: whoever has that was lent it. A peer elsewhere
/// that says it is here gets to name what it was lent, and no more.
static HERE: LazyLock<Mutex<HashMap<u128, Weak<Hold>>>> = LazyLock::new(Mutex::default);

/// A block that is lent to a peer in this process, until this is dropped.
#[derive(Debug)]
pub(crate) struct Token(u128);

impl Token {
    pub(crate) fn new(hold: &Arc<Hold>) -> Result<Self, Refusal> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Refusal::new(Reason::System, error.to_string()))?;
        let token = u128::from_le_bytes(bytes);
        lock(&HERE).insert(token, Arc::downgrade(hold));
        Ok(Self(token))
    }

    pub(crate) fn wire(&self) -> String {
        format!("{:032x}", self.0)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        lock(&HERE).remove(&self.0);
    }
}

impl Hold {
    pub(crate) fn new(block: Block) -> Arc<Self> {
        Arc::new(Self { block: Arc::new(block) })
    }

    /// One that is lent here.
    pub(crate) fn of_token(wire: &str) -> Option<Arc<Self>> {
        lock(&HERE).get(&u128::from_str_radix(wire, 16).ok()?)?.upgrade()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        for session in watchers(&self.block.watchers) {
            session.retire(self.block.serial);
        }
    }
}
