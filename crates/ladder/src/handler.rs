//! What a worker does with calls.

use std::collections::HashMap;
use std::fmt;

use rung::Value;

use crate::channel::Peer;
use crate::wire::Role;

/// Why a handler gives no result; it becomes the caller's error, and the worker lives on.
///
/// Made from any error, so that `?` works in handlers; or with a code that the caller can match.
///
/// What a worker's handler fails with goes to its host as it is, with its causes. Of what a host's fails with by `?`, the
/// worker hears that it did, and no more: the text of an error may be of files, or of another worker. What the worker is
/// to hear is said with [`Self::new`].
#[derive(Debug)]
pub struct Failure {
    pub(crate) code: String,
    pub(crate) text: String,
    /// Whether the text is some error's own.
    is_inner: bool,
}

impl Failure {
    /// With a code of the application's own.
    #[must_use]
    pub fn new(code: impl Into<String>, text: impl Into<String>) -> Self {
        Self { code: code.into(), text: text.into(), is_inner: false }
    }

    /// There is no such method.
    #[must_use]
    pub fn unknown_method(method: &str) -> Self {
        Self::new("unknown-method", format!("the worker has no method {method:?}"))
    }

    /// As the peer of this side hears it.
    pub(crate) fn told_by(mut self, role: Role) -> Self {
        if self.is_inner && role == Role::Host {
            tracing::warn!("the handler failed: {}", self.text);
            self.text = "the handler failed".to_owned();
        }
        self
    }
}

impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        Self { code: "handler-failed".to_owned(), text, is_inner: true }
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
