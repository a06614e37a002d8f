//! The pool ownership contract (docs/pool-ownership-contract.md) as a state machine.
//!
//! One process that owns memory of a pool, some that import it, messages between them that may be delayed and overtake
//! each other, work of the device that runs whenever it may, and an end of any process at any step.
//!
//! [`State::apply`] is the rules. A checker ([`Bounds`] is a model for stateright) goes through everything that can
//! happen within some bounds; [`trace`] holds what real processes did to the same rules.
//!
//! | module | what |
//! |---|---|
//! | [`state`] | the state, the steps, what each may do, and what would be wrong |
//! | [`check`] | what is enabled, for the checker, and what has to hold |
//! | [`trace`] | what `tier-pool-ipc` says that it did |

#![expect(missing_docs, reason = "most fields and steps are their names")]

pub mod check;
pub mod state;
pub mod trace;

pub use check::Bounds;
pub use state::{Rules, State, Step};
