//! Proves each rung, in each direction, with contents that cannot pass by luck, before anything of a user's
//! moves on it.
//!
//! A version table cannot tell whether a mechanism works between these two processes, and a probe inside one
//! of them proves nothing about the pair. So random bytes go through the production path, and the sender
//! compares three things: the value that came back, the *digest* of what the receiver decoded (a fault that
//! cancels itself on the way back cannot pass), and the rung that carried each leaf. Contents are new each
//! time, so stale memory cannot pass either.
//!
//! This crate does no I/O: whatever sends values implements [`Echo`], `ladder`'s channel or a protocol of your
//! own, and there is no second serializer.
//!
//! ```
//! use canary::{Answer, Canary, Contents, Echo, Echoed, Verdict, answer, battery, prove};
//! use rung::{Device, Fill, Refusal, RungId, Storage};
//!
//! /// A protocol that sends nothing anywhere: both sides are here.
//! struct Here;
//!
//! impl Echo for Here {
//!     type Error = Refusal;
//!
//!     fn echo(&mut self, canary: &Canary, _quiet: bool) -> Result<Echoed, Refusal> {
//!         let received = canary.value.clone();
//!         let (digest, leaves) = (answer(&received)?, canary.expected());
//!         Ok(Echoed::Answered(Answer { digest, leaves, back: Ok(received) }))
//!     }
//! }
//!
//! let mut contents = Contents::random()?;
//! let make = |_, len, fill: Fill<'_>| {
//!     let mut bytes = vec![0; len];
//!     fill(&mut bytes);
//!     Ok(Storage::from_bytes(bytes))
//! };
//! for canary in battery::of_carrier(&RungId::SHM, Device::Host, 4096, make, &mut contents)? {
//!     let finding = prove(&mut Here, &canary)?;
//!     assert_eq!(finding.sending, Verdict::Verified);
//! }
//! # Ok::<(), Refusal>(())
//! ```
//!
//! # Where to read on
//!
//! | module | what |
//! |---|---|
//! | [`battery`] | what is sent: whole tensors, views, odd types and sizes, and what each form takes |
//! | [`mod@digest`] | what the receiver answers with: a digest of the logical contents, strides aside |
//! | [`echo`] | the trait, and the three comparisons |
//! | [`verdict`] | what follows: verified, demoted, not offered; when a worker is refused |
//! | [`facts`] | what both processes say of themselves, and where they differ |
//!
//! # What it does not do
//!
//! A passing canary does not cover a user's own allocator: memory is still asked about, leaf by leaf. Nor is
//! it a defence against a peer that lies: what a peer may do is held to the caps and seals all the same.

pub mod battery;
mod compare;
pub mod digest;
pub mod echo;
pub mod facts;
pub mod verdict;

pub use battery::{Canary, Contents};
pub use digest::{Digest, answer};
pub use echo::{Answer, Echo, Echoed, Finding, prove};
pub use facts::{Difference, Facts};
pub use verdict::{Proof, Report, RungReport, Verdict};
