//! No devices on this platform.

use ladder::{Reason, Refusal, Value};

/// Refuses.
pub(crate) fn put(_: &str, _: Value) -> Result<Value, Refusal> {
    Err(Reason::Platform.into())
}
