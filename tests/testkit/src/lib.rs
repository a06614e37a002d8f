//! What the tests share; nothing here ships, and nothing here names a tier.
//!
//! - [`peer`]: the other process of a test is the test binary itself, started again.
//! - [`carrier`], [`form`]: one conformance suite for each kind of rung, in three lines a rung.
//! - [`hostile`]: workers that misbehave.
//! - [`faulty`]: rungs that go wrong; [`device`]: memory of devices that there are none of.
//! - [`census`]: descriptors, processes and segments before and after.
//! - [`stand_in`]: test binaries on the stand-in of the CUDA driver, or on a real one.
//! - [`values`]: arbitrary values for property tests.
//! - [`warnings`]: what a library warned of.
//! - [`watchdog`]: a hung test is aborted, under plain `cargo test` too.
//!
//! Suites that need a second process are binaries with `harness = false`: their `main` first asks
//! [`peer::role`] whether it is that second process.

pub mod carrier;
pub mod census;
pub mod device;
pub mod faulty;
pub mod form;
#[cfg(target_os = "linux")]
pub mod hostile;
pub mod peer;
#[cfg(target_os = "linux")]
pub mod stand_in;
pub mod steps;
pub mod trial;
pub mod values;
pub mod warnings;
pub mod watchdog;

pub use trial::{linux, run, run_serially, trial};
pub use watchdog::Watchdog;

/// The SHA-256 of some bytes, in hex.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    use std::fmt::Write;
    sha2::Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
