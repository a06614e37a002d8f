//! No devices on this platform.

use ladder::{Ladder, Reason, Refusal, Value};

/// Refuses.
pub(crate) fn put(_: &str, _: Value) -> Result<Value, Refusal> {
    Err(Reason::Platform.into())
}

/// The rungs: there is no experimental one.
pub(crate) fn rungs(_: bool) -> Ladder {
    Ladder::standard()
}
