//! What can go wrong, for a caller.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use canary::Report;
use link::LinkError;
use rung::{BridgeError, Fault, Unsendable, Value};
use worker::{Exit, SpawnError};

use crate::route::BelowRequired;

/// Why a channel is at its end.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Ended {
    /// The peer closed it.
    #[error("the peer closed the channel")]
    Closed,
    /// The stream ended inside a frame.
    #[error("the channel was cut inside a frame: {have} of {want} bytes came")]
    Cut {
        /// Bytes that came.
        have: usize,
        /// Bytes that should have come.
        want: usize,
    },
    /// The peer's process exited.
    #[error("the peer's process exited")]
    Exited,
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Broken(Fault),
    /// This process is a fork of the one that the channel belongs to.
    #[error("the channel belongs to the process that this one was forked from")]
    Forked,
    /// A system call failed.
    #[error("{0} failed: {1}")]
    System(&'static str, Arc<std::io::Error>),
}

impl From<LinkError> for Ended {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Closed => Self::Closed,
            LinkError::Cut { have, want } => Self::Cut { have, want },
            LinkError::PeerExited => Self::Exited,
            LinkError::Fault(fault) => Self::Broken(fault),
            LinkError::System(call, error) => Self::System(call, Arc::new(error)),
            // Deadlines and caps end no channel; whoever meets them there handles them first.
            other => Self::System("the link", Arc::new(std::io::Error::other(other.to_string()))),
        }
    }
}

/// Why there is no channel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The worker could not be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// The peer was gone before the handshake was over.
    #[error("no handshake: {}", with_exit(.0, .1.as_ref()))]
    Ended(Ended, Option<Exit>),
    /// The peer did not answer in time.
    #[error("no handshake within {0:?}: the peer is not a worker, or it hangs")]
    Deadline(Duration),
    /// The two sides speak no common version.
    #[error("protocol versions {theirs:?} there and {mine:?} here have none in common")]
    Version {
        /// What this side speaks, lowest and highest.
        mine: [u32; 2],
        /// What the peer speaks.
        theirs: [u32; 2],
    },
    /// Host memory, or what writes plain values, gets contents wrong between these two processes, and there is
    /// nothing below it to fall back to.
    #[error("the peer is refused: {}", why_refused(.0))]
    Refused(Box<Report>),
    /// A system call failed in this process.
    #[error("attaching to the host failed")]
    System(#[from] std::io::Error),
}

fn why_refused(report: &Report) -> String {
    match report.refusal() {
        Some((rung, true, why)) => format!("{rung}, from here to there: {why}"),
        Some((rung, false, why)) => format!("{rung}, from there to here: {why}"),
        None => "nothing is wrong".into(),
    }
}

fn with_exit(ended: &Ended, exit: Option<&Exit>) -> String {
    match exit {
        // What the process did says more than what the socket did, unless it broke the protocol.
        Some(exit) if !matches!(ended, Ended::Broken(_) | Ended::Cut { .. }) => exit.to_string(),
        Some(exit) => format!("{ended}; {exit}"),
        None => ended.to_string(),
    }
}

/// A call that gave no result.
///
/// Where the value was not delivered, it is still here: [`Self::into_value`].
#[derive(Debug)]
pub struct CallError {
    method: String,
    kind: Box<CallErrorKind>,
    value: Option<Box<Value>>,
}

/// What went wrong with a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallErrorKind {
    /// A leaf that no rung takes; nothing was sent.
    #[error(transparent)]
    Unsendable(Unsendable),
    /// The argument's type has something in it that no value can be; nothing was sent.
    #[error("the argument: {0}")]
    BadArgument(BridgeError),
    /// The answer is not of the type that was asked for.
    #[error("the answer: {0}")]
    WrongAnswer(BridgeError),
    /// A leaf would have ridden less than the caller requires; nothing was sent.
    #[error(transparent)]
    BelowRequired(Box<BelowRequired>),
    /// More metadata than a frame holds, or more than the system could send; nothing was sent.
    #[error("{0}")]
    OverCap(String),
    /// The method's name begins with `$`, as those of the channel's own calls do; nothing was sent.
    #[error("a method's name that begins with $ is the channel's own")]
    ReservedMethod,
    /// The peer would be lent more than the channel's bounds allow; nothing was sent.
    #[error("{0}")]
    OverBound(String),
    /// The peer could not take a storage, and not a fresh copy of it either.
    #[error("the peer could not take it: {text} ({code})")]
    NotAccepted {
        /// The reason's stable code.
        code: String,
        /// What the peer says.
        text: String,
    },
    /// The deadline passed.
    #[error("the deadline passed")]
    Deadline,
    /// The peer answered with an error; it lives on.
    #[error("{text}")]
    Remote {
        /// The stable code: `unknown-method`, `no-handler`, `busy`, `handler-failed`,
        /// `handler-panicked`, `bad-argument`, `malformed`, `unsendable`, `over-bound`, `undelivered`, `abandoned`,
        /// `unproven`, or
        /// one of the handler's own.
        code: String,
        /// What the peer says.
        text: String,
    },
    /// The answer is not what the wire says it is; the channel lives on.
    #[error("the answer is malformed: {0}")]
    Malformed(Fault),
    /// The answer's memory could not be taken, and no other came.
    #[error("the answer could not be taken: {0}")]
    AnswerNotTaken(Fault),
    /// The channel is at its end.
    #[error("{}", with_exit(.0, .1.as_ref()))]
    Gone(Ended, Option<Exit>),
}

impl CallError {
    pub(crate) fn new(method: &str, kind: CallErrorKind, value: Option<Value>) -> Self {
        Self { method: method.to_owned(), kind: Box::new(kind), value: value.map(Box::new) }
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> &CallErrorKind {
        &self.kind
    }

    /// The value, unless the peer had accepted it.
    #[must_use]
    pub fn into_value(self) -> Option<Value> {
        self.value.map(|value| *value)
    }

    /// The value, unless the peer had accepted it.
    #[must_use]
    pub fn value(&self) -> Option<&Value> {
        self.value.as_deref()
    }

    /// Whether the deadline passed.
    #[must_use]
    pub fn is_deadline(&self) -> bool {
        matches!(*self.kind, CallErrorKind::Deadline)
    }

    /// Whether the channel is at its end; no further call will succeed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(*self.kind, CallErrorKind::Gone(..))
    }

    /// Whether the peer has no such method.
    #[must_use]
    pub fn is_unknown_method(&self) -> bool {
        matches!(&*self.kind, CallErrorKind::Remote { code, .. } if code == "unknown-method")
    }

    /// Whether a leaf was refused by every rung, on the way there or on the way back.
    #[must_use]
    pub fn is_unsendable(&self) -> bool {
        match &*self.kind {
            CallErrorKind::Unsendable(_) => true,
            CallErrorKind::Remote { code, .. } => code == "unsendable",
            _ => false,
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "calling {:?}: {}", self.method, self.kind)
    }
}

impl std::error::Error for CallError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.kind {
            CallErrorKind::Unsendable(unsendable) => Some(unsendable),
            CallErrorKind::BadArgument(error) | CallErrorKind::WrongAnswer(error) => Some(error),
            CallErrorKind::BelowRequired(below) => Some(&**below),
            CallErrorKind::Malformed(fault) | CallErrorKind::AnswerNotTaken(fault) => Some(fault),
            CallErrorKind::Gone(ended, _) => Some(ended),
            _ => None,
        }
    }
}
