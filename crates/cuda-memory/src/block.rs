//! Device memory of this process that peers may be shown.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};
use std::time::Duration;

use cuda::{Buffer, MemHandle, Stream};
use rung::{Reason, Refusal, Storage};

use crate::lock;
use crate::memory::CudaMemory;

/// A number that nothing else of this process has: blocks, and imports.
#[must_use]
pub fn serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory, and the stream that its owner orders work on it by.
///
/// Sessions may hold it longer than its users do: until a peer has unmapped it.
pub struct Block {
    /// Dropped before the memory is.
    at_end: OnceLock<Box<dyn Any + Send + Sync>>,
    /// A number of this process's own.
    pub serial: u64,
    /// The memory.
    pub buffer: Buffer,
    /// Whoever works on it is ordered by this.
    pub order: Stream,
    /// What a canary has to find in it, where it is one: told without a look at the device.
    pub(crate) contents: Option<(Arc<[u8]>, Buffer)>,
    born_for_peers: bool,
    legacy: OnceLock<Result<Legacy, Refusal>>,
    /// Whether somebody may look at it for ever, so that it must not be written again.
    spoiled: AtomicBool,
    /// Whether a peer lent it on: there are others who may have it mapped when that peer is gone.
    lent_on: AtomicBool,
    watchers: Watchers,
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({}, {:?})", self.serial, self.buffer)
    }
}

/// How long a canary's stream has something else to do first.
const BUSY: Duration = Duration::from_millis(10);

/// How a block crosses by a handle of the older kind.
#[derive(Debug, Clone)]
pub struct Legacy {
    /// The handle, of the whole allocation.
    pub handle: MemHandle,
    /// The driver's own number for the whole allocation: never used twice.
    pub allocation: u64,
    /// Bytes of the whole allocation.
    pub size: usize,
    /// Where in it the block begins.
    pub offset: usize,
}

impl Block {
    /// Memory that work on `order` comes before and after.
    #[must_use]
    pub fn new(buffer: Buffer, order: Stream) -> Self {
        Self {
            at_end: OnceLock::new(),
            serial: serial(),
            buffer,
            order,
            contents: None,
            born_for_peers: false,
            legacy: OnceLock::new(),
            spoiled: AtomicBool::new(false),
            lent_on: AtomicBool::new(false),
            watchers: Watchers::default(),
        }
    }

    /// As one that this crate allocated, and may hand out again.
    #[must_use]
    pub fn born_for_peers(self) -> Self {
        Self { born_for_peers: true, ..self }
    }

    pub(crate) fn is_born_for_peers(&self) -> bool {
        self.born_for_peers
    }

    /// A canary's memory: its contents come by work that has yet to run when it is sent, so that whoever waits for nothing
    /// reads something else.
    ///
    /// # Errors
    ///
    /// What the driver answers.
    pub fn written_late(
        buffer: Buffer,
        stream: Stream,
        contents: Vec<u8>,
    ) -> Result<Storage, Refusal> {
        let len = contents.len();
        let written = Buffer::plain(stream.context(), len)?;
        written.write_at(0, &contents, &stream)?;
        buffer.fill(0xC5, &stream)?;
        stream.synchronize()?;
        stream.pause(BUSY)?;
        buffer.copy_from(&written, &stream)?;
        let contents = Some((contents.into(), written));
        let block = Self { contents, ..Self::new(buffer, stream) };
        Ok(Storage::new(CudaMemory::own(Hold::new(block), false, 0, len)))
    }

    /// How it crosses by a handle; asked of the driver for this very memory, once.
    ///
    /// # Errors
    ///
    /// [`Reason::OtherAllocator`] for memory that has none, or what the driver answers.
    pub fn legacy(&self) -> Result<Legacy, Refusal> {
        self.legacy.get_or_init(|| ask(&self.buffer)).clone()
    }

    /// Whether nobody may look at it for ever.
    #[must_use]
    pub fn may_be_written(&self) -> bool {
        !self.spoiled.load(Ordering::Acquire)
    }

    /// Somebody may.
    pub fn spoil(&self) {
        self.spoiled.store(true, Ordering::Release);
    }

    /// A peer lent it on.
    pub fn note_lent_on(&self) {
        self.lent_on.store(true, Ordering::Release);
        self.spoil();
    }

    /// Whether one did.
    #[must_use]
    pub fn was_lent_on(&self) -> bool {
        self.lent_on.load(Ordering::Acquire)
    }

    /// Something whose end comes just before the memory's; the first one counts.
    pub fn at_end(&self, what: impl FnOnce() -> Box<dyn Any + Send + Sync>) {
        self.at_end.get_or_init(what);
    }

    /// A session wants to hear when its users have let go.
    pub fn watch<W: Watcher>(&self, session: &Arc<W>) {
        self.watchers.add(session);
    }
}

/// What hears that the users of memory have let go.
pub trait Watcher: std::fmt::Debug + Send + Sync + 'static {
    /// Memory of this serial has no users any more.
    fn retire(&self, serial: u64);

    /// Its owner is gone, and it with its owner.
    fn lost(&self, _serial: u64) {}
}

/// Who wants to hear of memory.
#[derive(Debug, Default)]
pub struct Watchers(Mutex<Vec<Weak<dyn Watcher>>>);

impl Watchers {
    /// Adds one, once.
    pub fn add<W: Watcher>(&self, watcher: &Arc<W>) {
        let mut watchers = lock(&self.0);
        watchers.retain(|known| known.strong_count() > 0);
        let at: *const () = Arc::as_ptr(watcher).cast();
        if !watchers.iter().any(|known| std::ptr::eq(known.as_ptr().cast::<()>(), at)) {
            let watcher: Weak<W> = Arc::downgrade(watcher);
            watchers.push(watcher);
        }
    }

    /// Those that are there.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<dyn Watcher>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }
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
pub struct Hold {
    block: Arc<Block>,
}

/// What is lent to a peer in this very process, by a secret of the lease: whoever has that was lent it. A peer elsewhere
/// that says it is here gets to name what it was lent, and no more.
static HERE: LazyLock<Mutex<HashMap<u128, Weak<Hold>>>> = LazyLock::new(Mutex::default);

/// A block that is lent to a peer in this process, until this is dropped.
#[derive(Debug)]
pub struct Token(u128);

impl Token {
    /// A secret for a block.
    ///
    /// # Errors
    ///
    /// [`Reason::System`] where the system has no random bytes.
    pub fn new(hold: &Arc<Hold>) -> Result<Self, Refusal> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Refusal::new(Reason::System, error.to_string()))?;
        let token = u128::from_le_bytes(bytes);
        lock(&HERE).insert(token, Arc::downgrade(hold));
        Ok(Self(token))
    }

    /// As in a parcel.
    #[must_use]
    pub fn wire(&self) -> String {
        format!("{:032x}", self.0)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        lock(&HERE).remove(&self.0);
    }
}

impl Hold {
    /// The first of a block's users.
    #[must_use]
    pub fn new(block: Block) -> Arc<Self> {
        Arc::new(Self { block: Arc::new(block) })
    }

    /// Which.
    #[must_use]
    pub fn block(&self) -> &Arc<Block> {
        &self.block
    }

    /// One that is lent here.
    #[must_use]
    pub fn of_token(wire: &str) -> Option<Arc<Self>> {
        lock(&HERE).get(&u128::from_str_radix(wire, 16).ok()?)?.upgrade()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        for session in self.block.watchers.all() {
            session.retire(self.block.serial);
        }
    }
}
