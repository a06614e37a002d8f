//! What this process holds, and the most that it did.

use std::fmt;

/// Memory and descriptors at a moment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Held {
    /// MiB of memory of this process alone (`RssAnon`, proc_pid_status(5)).
    pub(crate) anonymous: u64,
    /// MiB of blocks, in use or idle.
    pub(crate) blocks: u64,
    pub(crate) descriptors: usize,
    pub(crate) threads: u64,
}

impl Held {
    pub(crate) fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| -> u64 {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_ascii_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
        };
        Self {
            anonymous: field("RssAnon:") >> 10,
            blocks: segment::Pool::process().stats().bytes >> 20,
            descriptors: testkit::census::descriptors("self").values().sum(),
            threads: field("Threads:"),
        }
    }

    /// The most of each.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            anonymous: self.anonymous.max(other.anonymous),
            blocks: self.blocks.max(other.blocks),
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
        }
    }

    /// What has grown beyond what the first part of the run took, with room for chance.
    pub(crate) fn drift_from(self, first: Self) -> Vec<String> {
        let grown = |what: &str, before: u64, now: u64, room: u64| {
            (now > before + before / 4 + room).then(|| format!("{what} from {before} to {now}"))
        };
        [
            grown("MiB of memory", first.anonymous, self.anonymous, 32),
            grown("MiB of blocks", first.blocks, self.blocks, 128),
            grown("descriptors", first.descriptors as u64, self.descriptors as u64, 64),
            grown("threads", first.threads, self.threads, 16),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { anonymous, blocks, descriptors, threads } = self;
        write!(
            f,
            "{anonymous} MiB of memory, {blocks} MiB of blocks, {descriptors} descriptors, {threads} threads"
        )
    }
}
