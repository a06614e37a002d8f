//! Whether the machine has the memory that a block is about to take.
//!
//! An anonymous tmpfs file has no quota: fallocate(2) on one takes page after page until the kernel
//! kills somebody, this process or another (seen: 1 PiB asked for, the machine's shells killed). So
//! large blocks are held against what the kernel says is left. Two processes that ask at the same
//! moment can both be told yes; that cannot be excluded from here.

use rung::{Reason, Refusal};

/// Smaller blocks are not worth reading a file for.
const WORTH_ASKING: usize = 1 << 20;

/// Refuses a block that is larger than what is left.
pub(crate) fn check(len: usize) -> Result<(), Refusal> {
    if len < WORTH_ASKING {
        return Ok(());
    }
    // Without procfs nothing is known, and the kernel decides.
    let Ok(meminfo) = std::fs::read_to_string("/proc/meminfo") else {
        return Ok(());
    };
    let left = available(&meminfo);
    if left.is_some_and(|left| len as u64 > left) {
        return Err(Refusal::new(
            Reason::NoMemory,
            format!("{len} bytes asked for, {} left", left.unwrap_or(0)),
        ));
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_memory_and_swap() {
        let text = "MemTotal: 100 kB\nMemAvailable:   30 kB\nSwapFree:  4 kB\n";
        assert_eq!(available(text), Some(34 * 1024));
        assert_eq!(available("MemTotal: 100 kB\n"), None);
    }

    #[test]
    fn more_than_the_machine_has_is_a_refusal() {
        assert_eq!(check(1 << 50).unwrap_err().reason(), Reason::NoMemory);
        assert!(check(1 << 21).is_ok());
    }
}
