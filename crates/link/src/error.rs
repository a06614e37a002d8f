//! Why nothing was sent or received.

use std::io;

use rung::Fault;

/// Why nothing was sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The peer closed the link between two frames.
    #[error("the peer closed the link")]
    Closed,
    /// The stream ended inside a frame.
    #[error("the link was cut inside a frame: {have} of {want} bytes came")]
    Cut {
        /// Bytes that came, the frame's prefix included.
        have: usize,
        /// Bytes that the frame should have; 6 where its prefix is not complete.
        want: usize,
    },
    /// The watched process exited, and nothing it had written is left to read.
    #[error("the peer process exited")]
    PeerExited,
    /// The deadline passed.
    #[error("the deadline passed")]
    Deadline,
    /// The deadline passed when a part of the frame was out. The rest of it goes before whatever is
    /// sent next: to the peer it is a frame like any other, only late.
    #[error("the deadline passed in the middle of the frame")]
    Begun,
    /// The peer broke the framing. The link is closed.
    #[error("the peer broke the protocol: {0}")]
    Fault(Fault),
    /// The frame is over a cap; nothing of it was sent.
    #[error("the frame is over a cap: {0}")]
    OverCap(String),
    /// A system call failed.
    #[error("{0} failed")]
    System(&'static str, #[source] io::Error),
}

impl LinkError {
    /// Whether the peer is gone, in whatever manner.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Closed | Self::Cut { .. } | Self::PeerExited)
    }

    /// Whether the deadline passed.
    #[must_use]
    pub fn is_deadline(&self) -> bool {
        matches!(self, Self::Deadline | Self::Begun)
    }
}
