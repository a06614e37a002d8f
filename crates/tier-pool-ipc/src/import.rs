//! Pools of other processes, and memory of them, each imported once in this process (O8).
//!
//! The driver must not import one pointer twice: freeing either import would unmap both. Whoever wants it while it is
//! being freed waits until that is done.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, OnceLock, PoisonError, Weak};

use cuda::{Buffer, Context, PointerHandle, Pool, Stream, WeakPool};
use cuda_memory::block::serial;
use cuda_memory::events::Streams;
use cuda_memory::lease::Mapped;
use cuda_memory::lock;
use rung::{Device, Fault, Handle, Reason, Refusal};

use crate::contract::{Freed, Imported};

/// A pool by its owner's name, and that process's number for it.
pub(crate) type PoolKey = (String, u64);

/// A pool of another process: imported when memory of it is first looked at.
#[derive(Debug)]
pub(crate) struct TheirPool {
    key: PoolKey,
    device: Device,
    descriptor: Handle,
    /// While memory of it is mapped, which keeps it.
    open: Mutex<WeakPool>,
}

static POOLS: LazyLock<Mutex<HashMap<PoolKey, Weak<TheirPool>>>> = LazyLock::new(Mutex::default);

impl TheirPool {
    /// One that is known in this process, or a new one.
    pub(crate) fn of(key: PoolKey, device: Device, descriptor: Handle) -> Arc<Self> {
        let mut pools = lock(&POOLS);
        if let Some(known) = pools.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        let pool = Arc::new(Self { key: key.clone(), device, descriptor, open: Mutex::default() });
        pools.insert(key, Arc::downgrade(&pool));
        pool
    }

    fn open(&self, context: &Arc<Context>) -> Result<Pool, Fault> {
        let mut open = lock(&self.open);
        if let Some(pool) = open.upgrade() {
            return Ok(pool);
        }
        let descriptor = self
            .descriptor
            .try_clone()
            .map_err(|error| Fault::new(Reason::NoDescriptors, error.to_string()))?;
        let pool = Pool::import(context, descriptor)?;
        *open = pool.downgrade();
        Ok(pool)
    }
}

impl Drop for TheirPool {
    fn drop(&mut self) {
        let mut pools = lock(&POOLS);
        if pools.get(&self.key).is_some_and(|known| known.strong_count() == 0) {
            pools.remove(&self.key);
        }
    }
}

/// What a pointer is known by: its owner's name, and that process's number for the allocation, which it never uses
/// again. The bytes of its handle need not be the same twice.
type PointerKey = (String, u64);

/// Where one pointer is imported, if it is.
#[derive(Debug, Default)]
struct Place {
    import: Weak<Import>,
    /// Mapped, also while the last who had it frees it.
    is_mapped: bool,
}

#[derive(Debug, Default)]
struct Cell {
    place: Mutex<Place>,
    freed: Condvar,
}

/// What could not be freed, or was left mapped when its owner died: nobody may import it again, in this process's life.
static STUCK: LazyLock<Mutex<HashSet<PointerKey>>> = LazyLock::new(Mutex::default);

static CELLS: LazyLock<Mutex<HashMap<PointerKey, Weak<Cell>>>> = LazyLock::new(Mutex::default);

fn cell(key: &PointerKey) -> Arc<Cell> {
    let mut cells = lock(&CELLS);
    if let Some(cell) = cells.get(key).and_then(Weak::upgrade) {
        return cell;
    }
    cells.retain(|_, cell| cell.strong_count() > 0);
    let cell = Arc::new(Cell::default());
    cells.insert(key.clone(), Arc::downgrade(&cell));
    cell
}

/// Memory of another process's pool.
#[derive(Debug)]
pub(crate) struct Import {
    /// A number of this process's own.
    pub(crate) serial: u64,
    pub(crate) device: Device,
    /// Bytes of the allocation, as its owner says; held to what the driver says when it is opened.
    pub(crate) size: usize,
    handle: PointerHandle,
    pool: Arc<TheirPool>,
    key: PointerKey,
    cell: Arc<Cell>,
    /// Opened when somebody looks, with the stream that it is freed on.
    open: Mutex<Option<(Imported<Buffer>, Stream)>>,
    /// For copies to the host: its own, so that an owner who is never done holds up nobody else's.
    reads: OnceLock<Stream>,
    /// What still has to run before it is freed.
    streams: Streams,
    owner_gone: AtomicBool,
}

impl Import {
    /// What is imported already, or is to be. Waits for whoever is freeing it.
    pub(crate) fn of(
        pool: Arc<TheirPool>,
        number: u64,
        size: usize,
        handle: PointerHandle,
    ) -> Result<Arc<Self>, Fault> {
        let key = (pool.key.0.clone(), number);
        let cell = cell(&key);
        let mut place = lock(&cell.place);
        loop {
            if lock(&STUCK).contains(&key) {
                return Err(Fault::new(Reason::Driver, "an earlier import of it was never freed"));
            }
            if let Some(known) = place.import.upgrade() {
                // It may be the last one by now, whose end takes this lock.
                drop(place);
                let is_same = known.size == size && known.device == pool.device;
                return if is_same {
                    Ok(known)
                } else {
                    Err(Fault::new(Reason::WrongSize, "not what it was before"))
                };
            }
            if !place.is_mapped {
                break;
            }
            place = cell.freed.wait(place).unwrap_or_else(PoisonError::into_inner);
        }
        let import = Arc::new(Self {
            serial: serial(),
            device: pool.device,
            size,
            handle,
            pool,
            key,
            cell: Arc::clone(&cell),
            open: Mutex::new(None),
            reads: OnceLock::new(),
            streams: Streams::default(),
            owner_gone: AtomicBool::new(false),
        });
        place.import = Arc::downgrade(&import);
        drop(place);
        Ok(import)
    }

    /// The memory: opened on the first call, which makes a context of its device where there is none.
    pub(crate) fn open(&self) -> Result<Buffer, Fault> {
        if self.is_lost() {
            return Err(Reason::OwnerGone.into());
        }
        let mut open = lock(&self.open);
        if let Some((imported, _)) = &*open
            && let Some(buffer) = imported.mapped()
        {
            return Ok(buffer.clone());
        }
        let context = Context::of(self.device)?;
        let pool = self.pool.open(&context)?;
        let stream = Stream::new(&context)?;
        // O8: nobody else has it: this cell is ours as long as we live.
        lock(&self.cell.place).is_mapped = true;
        let opened = match pool.open(self.handle, &stream) {
            Ok(opened) => opened,
            Err(fault) => {
                self.is_unmapped();
                return Err(fault);
            }
        };
        if opened.len() < self.size {
            let detail = format!("{} bytes declared, {} there", self.size, opened.len());
            match free(opened, &stream) {
                Ok(()) => self.is_unmapped(),
                Err(refusal) => self.is_stuck(&refusal),
            }
            return Err(Fault::new(Reason::WrongSize, detail));
        }
        // What the driver maps beside it is nobody's business.
        let buffer = opened.part(0..self.size)?;
        *open = Some((Imported::new(buffer.clone()), stream));
        Ok(buffer)
    }

    /// Whoever waits for the place may have it.
    fn is_unmapped(&self) {
        lock(&self.cell.place).is_mapped = false;
        self.cell.freed.notify_all();
    }

    /// It stays mapped for good.
    fn is_stuck(&self, why: &Refusal) {
        tracing::warn!("an import of a pool stays mapped: {why}");
        lock(&STUCK).insert(self.key.clone());
        self.is_unmapped();
    }

    /// A stream for copies to the host.
    pub(crate) fn reads(&self) -> Result<Stream, Fault> {
        if let Some(stream) = self.reads.get() {
            return Ok(stream.clone());
        }
        let stream = Stream::new(self.open()?.context())?;
        Ok(self.reads.get_or_init(|| stream).clone())
    }

    /// Its owner is gone for sure: an error from now on, not a stale read, and nothing is freed (O10).
    pub(crate) fn owner_is_gone(&self) {
        self.owner_gone.store(true, Ordering::Release);
    }

    fn is_lost(&self) -> bool {
        self.owner_gone.load(Ordering::Acquire)
    }
}

impl Import {
    /// Lets go of it: the last who does frees it, after all work on it (O6). What is said to its owner then, since for
    /// others in this process it is for them to say.
    pub(crate) fn let_go(import: Arc<Self>) -> Result<Freed, Refusal> {
        match Arc::into_inner(import) {
            Some(mut last) => last.free(),
            None => Ok(Freed(())),
        }
    }

    fn free(&mut self) -> Result<Freed, Refusal> {
        let open = lock(&self.open).take();
        let Some((imported, stream)) = open else {
            // Never opened; somebody else may have the place by now.
            return Ok(Freed(()));
        };
        if self.is_lost() {
            // O10: abandoned, and nothing is waited for: what it waits for itself may never come (D9).
            drop((imported, self.streams.take()));
            self.is_stuck(&Reason::OwnerGone.into());
            return Ok(Freed(()));
        }
        let freed = imported.idle(|_| self.streams.wait()).free(|buffer| free(buffer, &stream));
        match &freed {
            Ok(_) => self.is_unmapped(),
            Err(refusal) => self.is_stuck(refusal),
        }
        freed
    }
}

/// Frees an import, and waits until that is done; its pool stays until then.
fn free(buffer: Buffer, stream: &Stream) -> Result<(), Refusal> {
    let pool = buffer.pool().cloned();
    buffer.free()?;
    let freed = stream.synchronize();
    drop(pool);
    freed
}

impl Mapped for Import {
    fn device(&self) -> Device {
        self.device
    }

    fn serial(&self) -> u64 {
        self.serial
    }

    fn open(&self) -> Result<Buffer, Fault> {
        Self::open(self)
    }

    fn reads(&self) -> Result<Stream, Fault> {
        Self::reads(self)
    }

    fn streams(&self) -> &Streams {
        &self.streams
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // Where nobody asked what became of it.
        let _ = self.free();
    }
}
