//! What a process says of itself, for a person who looks for the reason.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a process says of itself: names and values, as many as it knows.
///
/// No fact opens or closes a rung: a table of what works with what would be wrong the day after. Where facts
/// differ that is warned of, and the canary shows what works all the same.
///
/// ```
/// use canary::Facts;
///
/// let mine: Facts = [("library", "0.1.0"), ("page", "4096")].into_iter().collect();
/// let theirs: Facts = [("library", "0.2.0"), ("uid", "0")].into_iter().collect();
/// let [difference] = &*mine.differences(&theirs) else { panic!() };
/// assert_eq!(difference.to_string(), "library: 0.1.0 here, 0.2.0 there");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Facts(BTreeMap<String, String>);

/// Facts that a process may state, at most.
const FACTS: usize = 64;

/// Bytes of a fact's name and of its value, at most.
const FACT: usize = 256;

impl Facts {
    /// States one; the last one of a name counts. What is longer than 256 bytes is cut, and of more than 64 the
    /// rest is left out, so that nobody is turned away for it.
    pub fn state(&mut self, name: impl Into<String>, value: impl Into<String>) {
        let cut = |mut text: String| {
            while text.len() > FACT {
                text.pop();
            }
            text
        };
        let name = cut(name.into());
        if self.0.len() < FACTS || self.0.contains_key(&name) {
            self.0.insert(name, cut(value.into()));
        }
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Whether there are no more, and no longer ones, than a process may state.
    #[must_use]
    pub fn are_few(&self) -> bool {
        let short = |text: &String| text.len() <= FACT;
        self.0.len() <= FACTS && self.0.iter().all(|(name, value)| short(name) && short(value))
    }

    /// Facts that both state, and differ in. What one side does not know is no difference.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let differs = |(name, mine): (&String, &String)| {
            let theirs = other.0.get(name).filter(|theirs| *theirs != mine)?;
            Some(Difference { fact: name.clone(), mine: mine.clone(), theirs: theirs.clone() })
        };
        self.0.iter().filter_map(differs).collect()
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Facts {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(facts: I) -> Self {
        let mut all = Self::default();
        facts.into_iter().for_each(|(name, value)| all.state(name, value));
        all
    }
}

/// A fact in which two processes differ.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// Which.
    pub fact: String,
    /// What this process says.
    pub mine: String,
    /// What the other says.
    pub theirs: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} here, {} there", self.fact, self.mine, self.theirs)
    }
}
