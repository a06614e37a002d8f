//! What a process holds: taken before and after, to see that nothing is left behind.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// Descriptors, child processes, mapped segments and named segments at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census {
    /// Open descriptors of this process, by what they are.
    pub descriptors: BTreeMap<String, usize>,
    /// Children of this process, zombies included.
    pub children: usize,
    /// Mappings of anonymous segments in this process.
    pub mappings: usize,
    /// Entries of `/dev/shm`.
    pub named_segments: usize,
}

impl Census {
    /// Counts now. Blocks that wait idle for their next use are given back first: they are not left
    /// behind, they are kept.
    #[must_use]
    pub fn take() -> Self {
        segment::Pool::process().trim();
        Self {
            descriptors: descriptors("self"),
            children: children(),
            mappings: mappings(),
            named_segments: fs::read_dir("/dev/shm").map_or(0, Iterator::count),
        }
    }

    /// Waits until the counts are these again: other threads may still be closing what they had.
    ///
    /// # Errors
    ///
    /// The difference, once 5 seconds have passed.
    pub fn settle(&self) -> Result<(), String> {
        self.settle_within(Duration::from_secs(5), Self::take)
    }

    /// As [`settle`](Self::settle), within another time, of counts that are taken in another way.
    ///
    /// # Errors
    ///
    /// The difference, once the time has passed.
    pub fn settle_within(&self, limit: Duration, take: impl Fn() -> Self) -> Result<(), String> {
        let end = Instant::now() + limit;
        loop {
            let now = take();
            if now == *self {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("left behind: before {self:?}, after {now:?}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(target_os = "linux")]
fn mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter(|line| line.contains("/memfd:")).count()
}

/// As many as were made and not ended: there is no list.
#[cfg(not(target_os = "linux"))]
fn mappings() -> usize {
    let calls = segment::calls();
    calls.mapped.saturating_sub(calls.unmapped) as usize
}

/// Open handles, under no names; those of other processes are not known.
#[cfg(not(target_os = "linux"))]
#[must_use]
pub fn descriptors(process: &str) -> BTreeMap<String, usize> {
    let count = if process == "self" { handles() } else { 0 };
    BTreeMap::from([("handle".to_owned(), count)])
}

#[cfg(windows)]
fn handles() -> usize {
    winproc::handle_count().unwrap_or(0) as usize
}

#[cfg(not(any(target_os = "linux", windows)))]
fn handles() -> usize {
    fs::read_dir("/dev/fd").map_or(0, Iterator::count)
}

#[cfg(windows)]
fn children() -> usize {
    winproc::children().map_or(0, |children| children.len())
}

#[cfg(not(any(target_os = "linux", windows)))]
fn children() -> usize {
    0
}

/// Open descriptors of a process, by what they are, numbers left out.
#[cfg(target_os = "linux")]
#[must_use]
pub fn descriptors(process: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        // The directory that is being read is a descriptor too.
        if target.contains("/fd") && target.starts_with("/proc/") {
            continue;
        }
        let kind = target.split(['[', ' ']).next().unwrap_or_default().to_owned();
        *counts.entry(kind).or_insert(0) += 1;
    }
    counts
}

#[cfg(target_os = "linux")]
fn children() -> usize {
    let me = std::process::id().to_string();
    let parent_of = |stat: String| {
        // pid (comm) state ppid …; comm may hold anything but the last parenthesis ends it.
        let after = stat.rsplit_once(") ")?.1.to_owned();
        after.split(' ').nth(1).map(str::to_owned)
    };
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
        .filter(|stat| parent_of(stat.clone()).as_deref() == Some(&me))
        .count()
}
