//! What a worker does with calls.

use std::collections::HashMap;
use std::fmt;

use rung::Value;

use crate::channel::Peer;
use crate::error::{CallError, ConnectError};

/// Why a handler gives no result; it becomes the caller's error, and the worker lives on.
///
/// Made from any error, so that `?` works in handlers; or with a code that the caller can match. The caller hears
/// the error's text and its causes': what is not for it does not belong there.
#[derive(Debug)]
pub struct Failure {
    pub(crate) code: String,
    pub(crate) text: String,
}

impl Failure {
    /// With a code of the application's own.
    #[must_use]
    pub fn new(code: impl Into<String>, text: impl Into<String>) -> Self {
        Self { code: code.into(), text: text.into() }
    }

    /// There is no such method.
    #[must_use]
    pub fn unknown_method(method: &str) -> Self {
        Self::new("unknown-method", format!("the worker has no method {method:?}"))
    }
}

impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new("handler-failed", heard(&*error.into()))
    }
}

/// An error and its causes as whoever called may hear them: a third process's last words, and what was to be run,
/// are not for it.
fn heard(error: &(dyn std::error::Error + 'static)) -> String {
    if let Some(call) = error.downcast_ref::<CallError>() {
        return call.for_peer();
    }
    if let Some(connect) = error.downcast_ref::<ConnectError>() {
        return connect.for_peer();
    }
    match error.source() {
        Some(cause) => format!("{error}: {}", heard(cause)),
        None => error.to_string(),
    }
}

/// Answers calls: a closure, or [`Methods`].
///
/// Several threads may be in it at the same time.
pub trait Handler {
    /// Answers one call; `peer` is who called, to be called back.
    ///
    /// # Errors
    ///
    /// Whatever the caller should hear.
    fn call(&self, method: &str, argument: Value, peer: &Peer) -> Result<Value, Failure>;
}

impl<F: Fn(&str, Value, &Peer) -> Result<Value, Failure>> Handler for F {
    fn call(&self, method: &str, argument: Value, peer: &Peer) -> Result<Value, Failure> {
        self(method, argument, peer)
    }
}

type Method = Box<dyn Fn(Value, &Peer) -> Result<Value, Failure> + Send + Sync>;

/// Handlers by name; any other name is an error that names it.
///
/// ```no_run
/// use ladder::{Channel, Methods, Value};
///
/// let methods = Methods::new()
///     .on("echo", Ok)
///     .on("count", |value| Ok(Value::from(value.items().map_or(0, <[Value]>::len))))
///     // A method may call the caller back while it is being called.
///     .on_with("slow", |value, caller| {
///         caller.call("progress", 0.5)?;
///         Ok(value)
///     });
/// # fn serve(channel: Channel, methods: Methods) -> Result<(), ladder::Ended> {
/// channel.serve(methods)?;
/// # Ok(()) }
/// ```
#[derive(Default)]
pub struct Methods {
    by_name: HashMap<String, Method>,
}

impl Methods {
    /// With none yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one; the last one of a name counts.
    #[must_use]
    pub fn on(
        self,
        name: impl Into<String>,
        method: impl Fn(Value) -> Result<Value, Failure> + Send + Sync + 'static,
    ) -> Self {
        self.on_with(name, move |argument, _| method(argument))
    }

    /// Adds one that may call its caller back.
    #[must_use]
    pub fn on_with(
        mut self,
        name: impl Into<String>,
        method: impl Fn(Value, &Peer) -> Result<Value, Failure> + Send + Sync + 'static,
    ) -> Self {
        self.by_name.insert(name.into(), Box::new(method));
        self
    }
}

impl Handler for Methods {
    fn call(&self, method: &str, argument: Value, peer: &Peer) -> Result<Value, Failure> {
        match self.by_name.get(method) {
            Some(known) => known(argument, peer),
            None => Err(Failure::unknown_method(method)),
        }
    }
}

impl fmt::Debug for Methods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<&String> = self.by_name.keys().collect();
        names.sort();
        f.debug_tuple("Methods").field(&names).finish()
    }
}
