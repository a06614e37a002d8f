//! What keeps device memory, and ends it: once, in its order.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdeviceptr;
use rung::{Reason, Refusal};

use crate::context::Context;
use crate::ipc::Shareable;
use crate::pool::Pool;
use crate::stream::Stream;

/// What keeps memory.
pub(crate) trait Keeps: Any + Send + Sync {
    /// Where it is one that can leave as a descriptor.
    fn shareable(&self) -> Option<&Shareable> {
        None
    }

    /// Ends it now, and says how that went.
    fn free(&self) -> Result<(), Refusal> {
        Err(Refusal::new(Reason::OtherKind, "its owner ends it"))
    }

    /// The pool that it is of, where a pool of this crate's keeps it.
    fn pool(&self) -> Option<&Pool> {
        None
    }

    /// Work was enqueued on it there, which comes before its end.
    fn used_on(&self, _stream: &Stream) {}
}

/// Anything that keeps memory of its own.
pub(crate) struct Foreign<O> {
    context: Arc<Context>,
    owner: Option<O>,
}

impl<O> Foreign<O> {
    pub(crate) fn new(context: &Arc<Context>, owner: O) -> Self {
        Self { context: Arc::clone(context), owner: Some(owner) }
    }
}

impl<O: Any + Send + Sync> Keeps for Foreign<O> {}

impl<O> Drop for Foreign<O> {
    fn drop(&mut self) {
        let owner = self.owner.take();
        match self.context.enter() {
            // It may call the driver, and counts on a context.
            Ok(_entered) => drop(owner),
            // C3: nor may it in a fork.
            Err(_) => std::mem::forget(owner),
        }
    }
}

/// An allocation of one of the driver's allocators.
pub(crate) struct Allocation {
    context: Arc<Context>,
    address: CUdeviceptr,
    /// Where it was allocated in a stream's order, and is freed so.
    stream: Option<Stream>,
    /// Other streams that it was used on (C4).
    used: Mutex<Vec<Stream>>,
    is_freed: AtomicBool,
}

impl Keeps for Allocation {
    fn free(&self) -> Result<(), Refusal> {
        self.give_back()
    }

    fn used_on(&self, stream: &Stream) {
        // What is not freed in a stream's order waits for everything.
        let Some(own) = &self.stream else { return };
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if !own.is(stream) && !used.iter().any(|known| known.is(stream)) {
            used.push(stream.clone());
        }
    }
}

impl Allocation {
    pub(crate) fn new(
        context: &Arc<Context>,
        address: CUdeviceptr,
        stream: Option<Stream>,
    ) -> Self {
        let (context, is_freed) = (Arc::clone(context), AtomicBool::new(false));
        Self { context, address, stream, used: Mutex::default(), is_freed }
    }

    /// Frees it, if nobody did.
    fn give_back(&self) -> Result<(), Refusal> {
        if self.is_freed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // C3.
        let entered = self.context.enter()?;
        let functions = &entered.driver().functions;
        let (call, code) = match &self.stream {
            // SAFETY: C1, C2: allocated once, freed once. `cuMemFree` waits for all work that is under way.
            None => ("cuMemFree_v2", unsafe { (functions.cuMemFree_v2)(self.address) }),
            Some(stream) => {
                for used in self.used.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                    if let Err(refusal) = stream.after(&used).or_else(|_| used.synchronize()) {
                        tracing::warn!("memory is freed after work that failed: {refusal}");
                    }
                }
                // SAFETY: C1, C2: likewise, after what is enqueued on its stream, which is after all other work on it.
                let code = unsafe { (functions.cuMemFreeAsync)(self.address, stream.raw()) };
                ("cuMemFreeAsync", code)
            }
        };
        entered.check(call, code)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self.give_back() {
            Err(refusal) if refusal.reason() != Reason::Forked => {
                tracing::warn!("not given back: {refusal}");
            }
            _ => {}
        }
    }
}

/// Memory of a pool, which it keeps: ours, or another process's.
pub(crate) struct Pooled {
    // Declared first, so freed first.
    memory: Allocation,
    pool: Pool,
}

impl Pooled {
    pub(crate) fn new(address: CUdeviceptr, stream: &Stream, pool: Pool) -> Self {
        let memory = Allocation::new(stream.context(), address, Some(stream.clone()));
        Self { memory, pool }
    }
}

impl Keeps for Pooled {
    fn free(&self) -> Result<(), Refusal> {
        self.memory.give_back()
    }

    fn pool(&self) -> Option<&Pool> {
        Some(&self.pool)
    }

    fn used_on(&self, stream: &Stream) {
        self.memory.used_on(stream);
    }
}
