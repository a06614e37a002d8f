//! What fuzz targets reach that users do not: decoders of messages, and channels over any link.
//!
//! Only with the feature `failpoints`, and never in a release build.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use canary::{Finding, Verdict};
use link::Link;
use rung::{Reason, Trust, Value};

use crate::channel::{Channel, Options};
use crate::error::ConnectError;
use crate::handler::Handler;
use crate::handshake::greet;
use crate::keeper::Bounds;
use crate::ladder::Ladder;
use crate::own;
use crate::unproven::Unproven;
use crate::wire::{self, Role};

/// Reads a message; whether it is one. What was read is written and read again.
///
/// # Panics
///
/// Where what was read is not read again.
#[must_use]
pub fn message(json: &str) -> bool {
    let Ok((message, riders)) = wire::decode(json) else { return false };
    let Ok(written) = wire::encode(&message, &riders) else { return false };
    assert!(wire::decode(&written).is_ok(), "not read again: {written}");
    true
}

/// Reads what a canary brings, what is answered to one, as far as it goes without a channel.
pub fn canary(value: Value) {
    let _ = own::check_size(&value);
    let _ = own::read_answer(value);
}

/// The host's side of a channel over a link whose other end says hello; nothing is proven.
///
/// # Errors
///
/// As of a handshake.
pub fn greeted(
    link: Link,
    ladder: &Ladder,
    limit: Duration,
    handler: impl Handler + Send + Sync + 'static,
) -> Result<Unproven, ConnectError> {
    let bounds = Bounds { bytes: 64 << 20, ..Bounds::default() };
    let options = Options { handshake: limit, bounds, ..Options::default() };
    let core = greet(link, Role::Host, ladder, &Trust::none(), options, None)?;
    Ok(Unproven::new(core, Some(Arc::new(handler))))
}

impl Unproven<Channel> {
    /// A channel as if every rung had been proven both ways.
    ///
    /// # Errors
    ///
    /// Where its threads cannot be started.
    pub fn assume_proven(self) -> Result<Channel, ConnectError> {
        self.become_a_channel(|core| {
            for (rung, device) in core.sessions.at_connect(&[]) {
                let declined = Reason::Unproven.into();
                let mut finding = Finding::declined(rung.clone(), device, declined);
                (finding.sending, finding.returning) = (Verdict::Verified, Verdict::Verified);
                core.sessions.found(finding, 0);
                core.sessions.heard(&rung, device, Verdict::Verified, Verdict::Verified);
            }
            core.heard.store(true, Ordering::Release);
            core.proven.store(true, Ordering::Release);
            Ok(())
        })
    }
}
