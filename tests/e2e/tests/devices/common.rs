//! What tests of devices have in common, on both sides.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ladder::{Leg, Reason, Tensor, Value, Worker};

pub(crate) type Outcome<T = ()> = Result<T, String>;

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub(crate) fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

/// What this worker was given to hold.
static HELD: Mutex<Vec<Value>> = Mutex::new(Vec::new());

pub(crate) fn held() -> MutexGuard<'static, Vec<Value>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn digest(value: &Value) -> Result<Value, ladder::Failure> {
    let bytes = value.as_tensor().ok_or("a tensor")?.to_bytes()?;
    Ok(Value::from(testkit::sha256(&bytes)))
}

pub(crate) fn leg(reply: &ladder::Reply) -> Outcome<Leg> {
    reply.sent().legs.first().cloned().ok_or_else(|| "no leg".into())
}

/// Whether something was refused for this reason, now or when it was demoted.
pub(crate) fn is_because(why: &ladder::Refusal, reason: Reason) -> bool {
    why.reason() == reason
        || why.reason() == Reason::Demoted && why.detail().starts_with(reason.code())
}

pub(crate) fn as_text(reply: &ladder::Reply) -> Outcome<String> {
    reply.value().as_str().map(str::to_owned).ok_or_else(|| format!("{:?}", reply.value()))
}

pub(crate) fn sent(worker: &Worker, method: &str, value: &Tensor) -> Outcome<ladder::Reply> {
    worker.call(method, value.clone()).map_err(text)
}

/// Waits until something holds: what is let go is let go by other threads and processes.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> Outcome<bool>) -> Outcome {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds()? {
        if Instant::now() > end {
            return Err(format!("not in time: {what}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
