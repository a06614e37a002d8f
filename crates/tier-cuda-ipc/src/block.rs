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
    legacy: OnceLock<Result<Legacy, Refusal>>,
    /// Whether somebody may look at it for ever, so that it must not be written again.
    spoiled: AtomicBool,
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
            legacy: OnceLock::new(),
            spoiled: AtomicBool::new(false),
            watchers: Mutex::default(),
        }
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

/// Blocks that are lent out, by serial: known again when they come back.
static OWN: LazyLock<Mutex<HashMap<u64, Weak<Hold>>>> = LazyLock::new(Mutex::default);

impl Hold {
    pub(crate) fn new(block: Block) -> Arc<Self> {
        let hold = Arc::new(Self { block: Arc::new(block) });
        lock(&OWN).insert(hold.block.serial, Arc::downgrade(&hold));
        hold
    }

    /// One of this process's.
    pub(crate) fn find(serial: u64) -> Option<Arc<Self>> {
        lock(&OWN).get(&serial)?.upgrade()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        lock(&OWN).remove(&self.block.serial);
        for session in watchers(&self.block.watchers) {
            session.retire(self.block.serial);
        }
    }
}
