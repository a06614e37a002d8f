//! Whether there is the memory that a block is about to take.
//!
//! What cannot be excluded from here: two processes that ask at the same moment can both be told yes,
//! memory that others take between the look and the allocation, and a limit that is lowered later.

use rung::{Reason, Refusal};

use crate::sys;

/// Smaller blocks are not worth asking for.
const WORTH_ASKING: usize = 1 << 20;

/// Refuses a block that is larger than what is left.
pub(crate) fn check(len: usize) -> Result<(), Refusal> {
    if len < WORTH_ASKING {
        return Ok(());
    }
    // Where nothing is known, the system decides.
    match sys::left() {
        Some(left) if len as u64 > left => {
            let detail = format!("{len} bytes asked for, {left} left");
            Err(Refusal::new(Reason::NoMemory, detail))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_machine_has_is_a_refusal() {
        assert_eq!(check(1 << 50).unwrap_err().reason(), Reason::NoMemory);
        assert!(check(1 << 21).is_ok());
    }
}
