//! What goes to a peer once, with a number, and by that number alone from then on.
//!
//! A descriptor, or a handle, costs something to pass and to map, so both sides keep what it stands for. What is known
//! of the peer is what the order of the transport shows: what was sent comes before whatever is sent later.

use std::collections::HashMap;

use crate::parcel::LeaseId;

/// What the peer has of something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// On its way, under this lease; or never sent after all.
    Sending(LeaseId),
    Held,
}

/// How something is named to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// By its number alone: the peer has it.
    Number,
    /// By its number, and what it stands for goes along, to be kept.
    First,
    /// What it stands for goes along, and is not to be kept.
    Once,
}

/// What one peer has, by our numbers.
///
/// ```
/// use rung::LeaseId;
/// use rung::sent::{Naming, Sent};
///
/// let mut sent = Sent::default();
/// let lease = LeaseId(1);
/// assert_eq!(sent.name(7, lease, true), Naming::First);
/// sent.note(7); // it is on its way
/// assert_eq!(sent.name(7, LeaseId(2), true), Naming::Number);
/// assert!(sent.forget(7)); // the peer is to be told
/// assert_eq!(sent.name(7, LeaseId(3), false), Naming::Once);
/// ```
#[derive(Debug, Default)]
pub struct Sent(HashMap<u64, Known>);

impl Sent {
    /// How many things the peer has, or is being sent.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the peer has it for sure.
    #[must_use]
    pub fn is_held(&self, number: u64) -> bool {
        self.0.get(&number) == Some(&Known::Held)
    }

    /// A lease on something goes out; `may_keep`: whether the peer may keep one thing more.
    pub fn name(&mut self, number: u64, lease: LeaseId, may_keep: bool) -> Naming {
        match self.0.get(&number) {
            Some(Known::Held) => Naming::Number,
            Some(Known::Sending(_)) => Naming::First,
            None if may_keep => {
                self.0.insert(number, Known::Sending(lease));
                Naming::First
            }
            None => Naming::Once,
        }
    }

    /// What went along is on its way.
    pub fn note(&mut self, number: u64) {
        if let Some(known) = self.0.get_mut(&number) {
            *known = Known::Held;
        }
    }

    /// The lease that it first went with did not go out after all.
    pub fn unsend(&mut self, number: u64, lease: LeaseId) {
        if self.0.get(&number) == Some(&Known::Sending(lease)) {
            self.0.remove(&number);
        }
    }

    /// Its number said nothing there: it goes along again. The peer is still to be told of its end, since another
    /// parcel may have brought it.
    pub fn is_unknown_there(&mut self, number: u64, lease: LeaseId) {
        if let Some(known) = self.0.get_mut(&number) {
            *known = Known::Sending(lease);
        }
    }

    /// It is gone. Whether the peer may have it, and is to be told.
    pub fn forget(&mut self, number: u64) -> bool {
        self.0.remove(&number).is_some()
    }
}
