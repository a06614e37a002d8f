//! The control socket: framed JSON with owned descriptors.
//!
//! # The frame
//!
//! ```text
//!   0               4       6                    6 + length
//!   ├───────────────┼───────┼────────────────────┤
//!   │ length (u32)  │ count │ JSON, UTF-8        │   big endian
//!   └───────────────┴───────┴────────────────────┘
//!   ▲
//!   all `count` descriptors ride this byte (SCM_RIGHTS, unix(7))
//! ```
//!
//! On Windows, where nothing rides a byte, the `count` handles are numbers of 8 bytes each, big endian, between the
//! prefix and the JSON (`docs/adr/0033`).
//!
//! - `length` is 1 to 64 MiB, `count` at most 253: more is a fault before a byte of it is stored.
//! - A stream socket keeps descriptors in order but not in step with read(2): the receiver queues
//!   them and takes the declared number when a frame is complete. A queue that cannot belong to the
//!   frames at hand is a fault, and so is `MSG_CTRUNC`.
//! - The end of the stream between frames is [`LinkError::Closed`]; inside one, [`LinkError::Cut`].
//! - After a fault the link is closed for good and keeps saying why.
//!
//! ```
//! use link::Link;
//!
//! let (here, there) = Link::pair()?;
//! let file = std::fs::File::open(std::env::current_exe()?)?;
//! here.send(r#"{"hello":1}"#, &[file.into()], None)?;
//! let frame = there.receive(None)?;
//! assert_eq!((frame.json.as_str(), frame.handles.len()), (r#"{"hello":1}"#, 1));
//!
//! drop(here);
//! assert!(matches!(there.receive(None), Err(link::LinkError::Closed)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it does not do
//!
//! It knows no message (`ladder` does) and starts no process (`worker`). Bulk bytes do not belong on
//! it.

mod error;
pub mod frame;
#[cfg(unix)]
pub mod outside;
mod socket;
mod sys;

pub use error::LinkError;
pub use frame::Frame;
#[cfg(unix)]
pub use outside::Listener;
pub use socket::{Link, Traffic};
pub use sys::Socket;
