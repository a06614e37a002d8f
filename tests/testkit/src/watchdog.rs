//! Ends a hung test.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Aborts the process unless it is dropped in time.
///
/// Plain `cargo test` waits for ever; a test that may wait for another process holds one of these.
/// Aborting ends the other tests of the binary too, which is better than hiding that one hangs.
#[derive(Debug)]
pub struct Watchdog(
    #[expect(dead_code, reason = "dropping it is what the dog waits for")] Sender<()>,
);

impl Watchdog {
    /// For a test of this name.
    #[must_use]
    pub fn new(name: &str, limit: Duration) -> Self {
        let (fed, dog) = channel();
        let name = name.to_owned();
        std::thread::spawn(move || {
            if dog.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                #[expect(clippy::print_stderr, reason = "the last words of a process that aborts")]
                {
                    eprintln!("watchdog: {name} did not end within {limit:?}; aborting");
                }
                std::process::abort();
            }
        });
        Self(fed)
    }
}
