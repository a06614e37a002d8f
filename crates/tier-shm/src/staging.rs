//! Blocks that device memory is copied from and to: registered with the driver, where the build knows one.

use rung::{Device, Reason, Refusal, Tensor};
use segment::Draft;

use crate::memory::{ForeignMemory, SealedMemory};

/// Below this a registration costs more than it saves.
#[cfg(feature = "cuda")]
const WORTH: usize = 1 << 20;

/// Has the driver of a device know a block that its memory is about to be copied to.
pub(crate) fn pin(device: Device, draft: &Draft) {
    // Where it cannot, the copy is slower, and as right.
    let _ = draft.attach(|start, len| register(device, start, len, false));
}

/// Has the driver of a device know the block under a tensor that came by this rung, which is about to be copied there;
/// once a block. Without it the copy is slower, and as right.
///
/// # Errors
///
/// [`Reason::OtherKind`] for a tensor that did not come by this rung, [`Reason::Platform`] where the build knows no
/// driver (feature `cuda`), and what the driver answers.
pub fn pin_received(tensor: &Tensor, device: Device) -> Result<(), Refusal> {
    let storage = tensor.storage();
    let register = |start, len| register(device, start, len, true);
    if let Some(memory) = storage.memory_as::<ForeignMemory>() {
        return memory.block.attach(register);
    }
    if let Some(memory) = storage.memory_as::<SealedMemory>() {
        return memory.block.attach(register);
    }
    Err(Reason::OtherKind.into())
}

#[cfg(feature = "cuda")]
fn register(
    device: Device,
    start: *const u8,
    len: usize,
    is_read_only: bool,
) -> Result<cuda::Registered, Refusal> {
    if len < WORTH {
        return Err(Reason::Small.into());
    }
    cuda::Registered::new(&cuda::Context::of(device)?, start, len, is_read_only)
}

#[cfg(not(feature = "cuda"))]
fn register(_: Device, _: *const u8, _: usize, _: bool) -> Result<(), Refusal> {
    Err(Reason::Platform.into())
}
