//! The memory that the machine, and this process's control groups, have left.
//!
//! An anonymous tmpfs file has no quota: fallocate(2) on one takes page after page until the kernel
//! kills somebody, this process or another (seen: 1 PiB asked for, the machine's shells killed). Under a
//! control group's limit the same happens earlier. So large blocks are held against what is left.

use std::fs;
use std::path::Path;

/// What is left of both; without procfs nothing is known.
pub(crate) fn left() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let group = fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| left_in_groups(&text, Path::new("/sys/fs/cgroup")));
    machine.into_iter().chain(group).min()
}

/// Bytes that can still be taken: `MemAvailable` plus free swap (proc_meminfo(5)).
fn available(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = meminfo.lines().find(|line| line.starts_with(name))?;
        let kib: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
        kib.checked_mul(1024)
    };
    Some(field("MemAvailable:")?.saturating_add(field("SwapFree:").unwrap_or(0)))
}

/// The files of one version of the memory controller.
struct Controller {
    limit: &'static str,
    usage: &'static str,
    /// In `memory.stat`: pages of files that can be dropped.
    reclaimable: &'static str,
}

const V2: Controller =
    Controller { limit: "memory.max", usage: "memory.current", reclaimable: "inactive_file" };

const V1: Controller = Controller {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

/// Bytes left in the tightest of this process's groups, of either version (cgroups(7)); none where no
/// group has a limit.
///
/// `membership` is the text of `/proc/self/cgroup`; `root` is where the hierarchies are mounted.
fn left_in_groups(membership: &str, root: &Path) -> Option<u64> {
    let lefts = membership.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (hierarchy, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        if hierarchy == "0" && controllers.is_empty() {
            // Mounted alone, or beside the first version.
            let alone = left_up_to(root, path, &V2);
            return alone.or_else(|| left_up_to(&root.join("unified"), path, &V2));
        }
        controllers
            .split(',')
            .any(|name| name == "memory")
            .then(|| left_up_to(&root.join("memory"), path, &V1))
            .flatten()
    });
    lefts.min()
}

/// The least that is left in a group and those it lies in: each of them has a limit of its own.
fn left_up_to(root: &Path, path: &str, controller: &Controller) -> Option<u64> {
    let mut folder = root.join(path.trim_start_matches('/'));
    let mut least = None;
    loop {
        let left = left_in(&folder, controller);
        least = least.into_iter().chain(left).min();
        // A path that is not visible from here (a container's, seen from inside) ends at the root too.
        if folder == root || !folder.pop() || !folder.starts_with(root) {
            return least;
        }
    }
}

fn left_in(folder: &Path, controller: &Controller) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    // "max" is no number, and no limit.
    let (limit, usage) = (number(controller.limit)?, number(controller.usage)?);
    let reclaimable = read("memory.stat").and_then(|stat| {
        let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(name, _)| *name == controller.reclaimable)?.1.trim().parse::<u64>().ok()
    });
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hierarchy of groups: folders, and what their files say.
    fn groups(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn what_is_left_is_memory_and_swap() {
        let text = "MemTotal: 100 kB\nMemAvailable:   30 kB\nSwapFree:  4 kB\n";
        assert_eq!(available(text), Some(34 * 1024));
        assert_eq!(available("MemTotal: 100 kB\n"), None);
    }

    #[test]
    fn the_tightest_group_of_the_second_version_counts() {
        let root = groups(&[
            ("a/memory.max", "1000\n"),
            ("a/memory.current", "900\n"),
            ("a/memory.stat", "anon 850\ninactive_file 50\n"),
            ("a/b/memory.max", "max\n"),
            ("a/b/memory.current", "10\n"),
            ("a/d/memory.max", "90000\n"),
            ("a/d/memory.current", "0\n"),
            ("a/c/memory.max", "500\n"),
            ("a/c/memory.current", "450\n"),
        ]);
        let left = |membership| left_in_groups(membership, root.path());
        assert_eq!(left("0::/a\n"), Some(150));
        // A group without a limit lies in one with.
        assert_eq!(left("0::/a/b\n"), Some(150));
        assert_eq!(left("0::/a/c\n"), Some(50));
        // One that has more than the group around it has no more than that.
        assert_eq!(left("0::/a/d\n"), Some(150));
        assert_eq!(left("0::/\n"), None);
        // Over its limit is nothing left, not very much.
        fs::write(root.path().join("a/c/memory.current"), "600\n").unwrap();
        assert_eq!(left("0::/a/c\n"), Some(0));
    }

    #[test]
    fn the_first_version_counts_also_beside_the_second() {
        let root = groups(&[
            ("memory/a/memory.limit_in_bytes", "2000\n"),
            ("memory/a/memory.usage_in_bytes", "1500\n"),
            ("memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 100\n"),
            ("unified/a/memory.max", "700\n"),
            ("unified/a/memory.current", "300\n"),
        ]);
        let left = |membership| left_in_groups(membership, root.path());
        assert_eq!(left("4:memory:/a\n3:cpuset:/\n"), Some(600));
        assert_eq!(left("4:cpu,memory:/a\n0::/a\n"), Some(400));
        // A container's own path, not visible inside: its root is what counts.
        fs::write(root.path().join("memory/memory.limit_in_bytes"), "300\n").unwrap();
        fs::write(root.path().join("memory/memory.usage_in_bytes"), "100\n").unwrap();
        assert_eq!(left("4:memory:/docker/0123\n"), Some(200));
    }

    #[test]
    fn nonsense_says_nothing() {
        let root = groups(&[("a/memory.max", "lots\n"), ("a/memory.current", "\n")]);
        for membership in ["", "0\n", "::\n", "0::/a\n", "x:memory:/../..\n"] {
            assert_eq!(left_in_groups(membership, root.path()), None, "{membership:?}");
        }
    }
}
