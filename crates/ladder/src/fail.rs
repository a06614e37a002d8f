//! Named points at which a test can end, stop or delay this process.
//!
//! `LADDER_FAILPOINT=POINT=ACTION`, with the actions `kill`, `stop`, `abort` and `delay:MILLISECONDS`.
//! Only with the feature `failpoints`, and never in a release build: there, [`reached`] is nothing.

/// Every point, in the order of a conversation.
#[cfg(all(feature = "failpoints", debug_assertions))]
pub const ALL: &[&str] = &[
    "hello-sent",
    "hello-received",
    "canary-answered",
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
    use std::sync::LazyLock;

    static ARMED: LazyLock<Option<(String, String)>> = LazyLock::new(|| {
        let armed = std::env::var("LADDER_FAILPOINT").ok()?;
        let (point, action) = armed.split_once('=')?;
        Some((point.to_owned(), action.to_owned()))
    });
    debug_assert!(ALL.contains(&point), "{point} is not listed");
    let Some((armed, action)) = &*ARMED else { return };
    if armed != point {
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
