//! Shareable memory that other memory is copied into, used again and again for one peer.
//!
//! For one peer alone: what the new contents do not cover may show that peer what it was sent before, and nothing
//! else (L8).

use std::sync::{Arc, Mutex};

use cuda::{Buffer, Context, Stream};
use cuda_memory::block::{Block, Hold};
use cuda_memory::lock;
use rung::{Device, Reason, Refusal};

/// Idle blocks that are kept.
const IDLE: usize = 8;

/// Bytes of them.
const IDLE_BYTES: usize = 1 << 30;

/// What sizes are multiples of, at least.
const STEP: usize = 2 << 20;

#[derive(Debug, Default)]
pub(crate) struct Staging {
    idle: Mutex<Vec<Arc<Hold>>>,
}

/// Few sizes, so that blocks fit again: eight of them between one power of two and the next.
fn class(len: usize) -> usize {
    let step = (len.checked_next_power_of_two().unwrap_or(len) / 16).max(STEP);
    len.checked_next_multiple_of(step).unwrap_or(len)
}

impl Staging {
    /// A block of a device for so many bytes.
    pub(crate) fn take(&self, device: Device, len: usize) -> Result<Arc<Hold>, Refusal> {
        let fits = |hold: &Arc<Hold>| {
            let buffer = &hold.block().buffer;
            // A peer that is not done with it keeps nobody waiting.
            buffer.device() == device
                && buffer.len() >= len
                && buffer.len() / 2 <= class(len)
                && hold.block().order.is_done().unwrap_or(false)
        };
        {
            let mut idle = lock(&self.idle);
            let best = idle.iter().enumerate().filter(|(_, hold)| fits(hold));
            let best = best.min_by_key(|(_, hold)| hold.block().buffer.len()).map(|(at, _)| at);
            if let Some(at) = best {
                return Ok(idle.swap_remove(at));
            }
        }
        let context = Context::of(device)?;
        let buffer = match Buffer::shareable(&context, class(len)) {
            Err(refusal) if refusal.reason() == Reason::NoMemory => {
                // What waits here idle may be what is missing.
                let idle = std::mem::take(&mut *lock(&self.idle));
                drop(idle);
                Buffer::shareable(&context, class(len))?
            }
            made => made?,
        };
        // Of its own: a peer that is not done with one holds up no other.
        Ok(Hold::new(Block::new(buffer, Stream::new(&context)?)))
    }

    /// Its lease is home.
    pub(crate) fn give(&self, hold: Arc<Hold>) {
        // Somebody may still look at it, or it came back and is held, or lent on.
        if !hold.block().may_be_written() || Arc::strong_count(&hold) > 1 {
            return forget(hold);
        }
        let mut idle = lock(&self.idle);
        idle.push(hold);
        let mut over = Vec::new();
        let bytes = |idle: &[Arc<Hold>]| -> usize {
            idle.iter().map(|hold| hold.block().buffer.len()).sum()
        };
        while idle.len() > IDLE || bytes(&idle) > IDLE_BYTES {
            over.push(idle.remove(0));
        }
        drop(idle);
        over.into_iter().for_each(forget);
    }
}

/// Unmapping waits for the device, and whoever reads the socket is here. Without a thread, it is dropped here after all.
pub(crate) fn forget(kept: impl Send + 'static) {
    let _ = std::thread::Builder::new().name("cuda-forget".into()).spawn(move || drop(kept));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_wastes_an_eighth_at_most() {
        for len in [1, STEP, STEP + 1, 17 * STEP, (1 << 30) + 1, 3 << 30] {
            let class = class(len);
            assert!(class >= len && class - len <= (len / 8).max(STEP), "{len}: {class}");
        }
        assert_eq!(super::class(usize::MAX - 1), usize::MAX - 1);
    }
}
