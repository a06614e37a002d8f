//! Everything that the library knows, under one lock.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::memory::{Backing, Range};
use crate::work::{EventState, StreamState};

pub(crate) type Code = u32;

pub(crate) const OK: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const PEER_ACCESS_UNSUPPORTED: Code = 217;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const ALREADY_REGISTERED: Code = 712;
pub(crate) const NOT_REGISTERED: Code = 713;
pub(crate) const NOT_SUPPORTED: Code = 801;

/// Physical devices: what numbers name depends on `CUDA_VISIBLE_DEVICES`.
pub(crate) const PHYSICAL: usize = 2;

/// What sizes of shareable memory are multiples of.
pub(crate) const GRANULARITY: usize = 2 << 20;

/// A handle of shareable memory.
pub(crate) struct Physical {
    pub(crate) backing: Arc<Backing>,
    pub(crate) exportable: bool,
}

/// A pool of stream-ordered memory.
pub(crate) struct Pool {
    pub(crate) device: usize,
    /// Stands for the pool in every process that has it.
    pub(crate) backing: Arc<Backing>,
    pub(crate) is_exportable: bool,
    pub(crate) was_exported: bool,
    pub(crate) is_imported: bool,
    pub(crate) is_accessible: bool,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) process: u32,
    /// The physical device of each number here.
    pub(crate) visible: Vec<usize>,
    /// How often the primary context of each is retained.
    pub(crate) retained: Vec<u32>,
    pub(crate) ranges: BTreeMap<u64, Range>,
    pub(crate) streams: HashMap<u64, StreamState>,
    pub(crate) events: HashMap<u64, EventState>,
    pub(crate) physical: HashMap<u64, Physical>,
    pub(crate) pools: HashMap<u64, Pool>,
    pub(crate) registered: BTreeMap<usize, usize>,
    pub(crate) next: u64,
    /// Work ran into memory that was not there any more: nothing works from then on.
    pub(crate) is_broken: bool,
    pub(crate) counts: [u64; 16],
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

thread_local! {
    /// The contexts of this thread, the current one last; a context is one more than its device's number.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn fault(name: &str) -> bool {
    let Ok(faults) = std::env::var("CUDA_CPU_STANDIN_FAULTS") else { return false };
    // In a file, they may change while the process runs.
    let faults = match faults.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path).unwrap_or_default(),
        None => faults,
    };
    faults.trim().split(',').any(|fault| fault == name)
}

pub(crate) fn is_deferred() -> bool {
    std::env::var("CUDA_CPU_STANDIN_DEFER").is_ok_and(|value| value == "1")
}

pub(crate) fn push(context: usize) {
    CURRENT.with_borrow_mut(|all| all.push(context));
}

pub(crate) fn pop() -> Option<usize> {
    CURRENT.with_borrow_mut(Vec::pop)
}

pub(crate) fn set(context: usize) {
    CURRENT.with_borrow_mut(|all| {
        all.pop();
        if context != 0 {
            all.push(context);
        }
    });
}

pub(crate) fn current() -> usize {
    CURRENT.with_borrow(|all| all.last().copied().unwrap_or(0))
}

impl State {
    /// The state of a process that was initialized here.
    pub(crate) fn here() -> Result<MutexGuard<'static, Self>, Code> {
        let mut state = lock();
        // A fork's copy is as good as none.
        if state.process != std::process::id() {
            return Err(NOT_INITIALIZED);
        }
        state.counts[crate::Count::Calls as usize] += 1;
        if state.is_broken {
            return Err(ILLEGAL_ADDRESS);
        }
        Ok(state)
    }

    /// The same, and the number of the current context's device.
    pub(crate) fn in_context() -> Result<(MutexGuard<'static, Self>, usize), Code> {
        let state = Self::here()?;
        let device = current().checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if state.retained.get(device).is_none_or(|retained| *retained == 0) {
            return Err(INVALID_CONTEXT);
        }
        Ok((state, device))
    }

    pub(crate) fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn add(&mut self, what: crate::Count, number: u64) {
        self.counts[what as usize] += number;
    }
}
