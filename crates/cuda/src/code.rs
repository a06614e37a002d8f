//! What the driver answers: a number, and our own name for it.
//!
//! `cudarc`'s errors are not used: formatting one asks the driver for a text, and panics where there is none.

use rung::{Reason, Refusal};

/// A driver's function and the code that it gave, which was not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) call: &'static str,
    pub(crate) code: u32,
}

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const NOT_READY: u32 = 600;
const OUT_OF_MEMORY: u32 = 2;
const NO_DEVICE: u32 = 100;

/// The name of a code as in `cuda.h` without its prefix, where this build knows it.
#[must_use]
pub fn name(code: u32) -> Option<&'static str> {
    Some(match code {
        0 => "SUCCESS",
        1 => "INVALID_VALUE",
        2 => "OUT_OF_MEMORY",
        3 => "NOT_INITIALIZED",
        4 => "DEINITIALIZED",
        34 => "STUB_LIBRARY",
        46 => "DEVICE_UNAVAILABLE",
        100 => "NO_DEVICE",
        101 => "INVALID_DEVICE",
        201 => "INVALID_CONTEXT",
        205 => "MAP_FAILED",
        206 => "UNMAP_FAILED",
        208 => "ALREADY_MAPPED",
        211 => "NOT_MAPPED",
        214 => "ECC_UNCORRECTABLE",
        217 => "PEER_ACCESS_UNSUPPORTED",
        304 => "OPERATING_SYSTEM",
        400 => "INVALID_HANDLE",
        401 => "ILLEGAL_STATE",
        500 => "NOT_FOUND",
        600 => "NOT_READY",
        700 => "ILLEGAL_ADDRESS",
        709 => "CONTEXT_IS_DESTROYED",
        712 => "HOST_MEMORY_ALREADY_REGISTERED",
        713 => "HOST_MEMORY_NOT_REGISTERED",
        719 => "LAUNCH_FAILED",
        800 => "NOT_PERMITTED",
        801 => "NOT_SUPPORTED",
        802 => "SYSTEM_NOT_READY",
        803 => "SYSTEM_DRIVER_MISMATCH",
        804 => "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        999 => "UNKNOWN",
        _ => return None,
    })
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} gave {}", self.call, self.code)?;
        name(self.code).map_or(Ok(()), |name| write!(f, " ({name})"))
    }
}

impl From<Failed> for Refusal {
    fn from(failed: Failed) -> Self {
        let reason = match failed.code {
            OUT_OF_MEMORY => Reason::NoMemory,
            NO_DEVICE => Reason::NoDevice,
            _ => Reason::Driver,
        };
        Self::new(reason, failed.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_that_nobody_knows_is_a_number() {
        let failed = Failed { call: "cuInit", code: 4242 };
        assert_eq!(failed.to_string(), "cuInit gave 4242");
        let failed = Failed { call: "cuMemAlloc_v2", code: 2 };
        assert_eq!(Refusal::from(failed).reason(), Reason::NoMemory);
        assert_eq!(failed.to_string(), "cuMemAlloc_v2 gave 2 (OUT_OF_MEMORY)");
    }
}
