//! Named points at which a test can end, stop or delay this process.
//!
//! `LADDER_FAILPOINT=POINT=ACTION`, or `POINT#N=ACTION` for the Nth time that it is reached, with the actions `kill`,
//! `stop`, `abort`, `exit` and `delay:MILLISECONDS`. Only with the feature `failpoints`, and never in a release build:
//! there, [`reached`] is nothing.
//!
//! A step that calls of users' and the channel's own have in common is two points, the channel's own with `canary-`
//! before it: a canary comes first, and a user's call would never be met.

/// Every point, in the order of a conversation.
#[cfg(all(feature = "failpoints", debug_assertions))]
pub const ALL: &[&str] = &[
    "hello-sent",
    "hello-received",
    "canary-call-packed",
    "canary-call-sent",
    "canary-descriptors-received",
    "canary-call-received",
    "canary-call-imported",
    "canary-accept-sent",
    "canary-accept-received",
    "canary-answer-packed",
    "canary-answer-sent",
    "canary-answer-received",
    "canary-answer-imported",
    "canary-answered",
    "canary-receipt-received",
    "proven",
    "call-packed",
    "call-sent",
    "descriptors-received",
    "call-received",
    "call-imported",
    "accept-sent",
    "accept-received",
    "handled",
    "answer-packed",
    "answer-sent",
    "answer-received",
    "answer-imported",
    "receipts-sent",
    "receipt-received",
    "closing",
];

/// This thread is at a point.
#[cfg(all(feature = "failpoints", debug_assertions))]
pub(crate) fn reached(point: &str) {
    reached_of(|| false, point);
}

/// This thread is at a point of a call, perhaps of the channel's own: asked only where there are such points.
#[cfg(all(feature = "failpoints", debug_assertions))]
pub(crate) fn reached_of(own: impl FnOnce() -> bool, point: &str) {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    let own = own();

    /// The point, how often it was reached before, and what happens there.
    static ARMED: LazyLock<Option<(String, u64, String)>> = LazyLock::new(|| {
        let armed = std::env::var("LADDER_FAILPOINT").ok()?;
        let (point, action) = armed.split_once('=')?;
        let (point, nth) = point.split_once('#').unwrap_or((point, "1"));
        Some((point.to_owned(), nth.parse().ok()?, action.to_owned()))
    });
    static TIMES: AtomicU64 = AtomicU64::new(0);
    let is = |name: &str| match name.strip_prefix("canary-") {
        Some(rest) if own => rest == point,
        _ => !own && name == point,
    };
    debug_assert!(ALL.iter().any(|name| is(name)), "{point} is not listed");
    let Some((armed, nth, action)) = &*ARMED else { return };
    if !is(armed) || TIMES.fetch_add(1, Ordering::SeqCst) + 1 != *nth {
        return;
    }
    match action.as_str() {
        #[cfg(unix)]
        "kill" | "stop" => {
            use rustix::process::{Signal, getpid, kill_process};
            let signal = if action == "kill" { Signal::KILL } else { Signal::STOP };
            let _ = kill_process(getpid(), signal);
        }
        "abort" => std::process::abort(),
        "exit" => std::process::exit(3),
        action => {
            let wait = action.strip_prefix("delay:").and_then(|ms| ms.parse().ok()).unwrap_or(0);
            std::thread::sleep(std::time::Duration::from_millis(wait));
        }
    }
}

/// Nothing.
#[cfg(not(all(feature = "failpoints", debug_assertions)))]
#[inline(always)]
pub(crate) fn reached(_point: &str) {}

/// Nothing.
#[cfg(not(all(feature = "failpoints", debug_assertions)))]
#[inline(always)]
pub(crate) fn reached_of(_own: impl FnOnce() -> bool, _point: &str) {}
