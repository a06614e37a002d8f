//! How a session asks that what it has to say be sent.

use std::fmt;
use std::sync::{Arc, OnceLock};

/// What a transport gave a session to wake it by ([`Carrier::wake_with`](crate::Carrier::wake_with)), if it gave any.
#[derive(Default)]
pub struct Wake(OnceLock<Arc<dyn Fn() + Send + Sync>>);

impl Wake {
    /// What the transport gives. The first one counts: a session has one transport.
    pub fn set(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        let _ = self.0.set(wake);
    }

    /// Whether there is a way to say anything outside parcels.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    /// Asks.
    pub fn wake(&self) {
        if let Some(wake) = self.0.get() {
            wake();
        }
    }
}

impl fmt::Debug for Wake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Wake").field(&self.is_set()).finish()
    }
}
