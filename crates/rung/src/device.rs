//! Where memory lives.

use std::fmt;
use std::str::FromStr;

use crate::reason::{Fault, Reason};

/// Where a storage's memory lives.
///
/// A device is named by its UUID, never by its index: indices differ between processes that see
/// different sets of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// Memory that the CPU reads directly.
    Host,
    /// Memory of the CUDA device with this UUID (`cuDeviceGetUuid`, 16 bytes).
    Cuda([u8; 16]),
}

impl Device {
    /// Whether this is host memory.
    #[must_use]
    pub fn is_host(&self) -> bool {
        matches!(self, Self::Host)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(uuid) => {
                f.write_str("cuda:")?;
                uuid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

impl FromStr for Device {
    type Err = Fault;

    /// As [`Display`](fmt::Display) writes it: `host`, or `cuda:` and 32 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, Fault> {
        let bad = || Fault::new(Reason::BadMetadata, "no name of a device");
        if text == "host" {
            return Ok(Self::Host);
        }
        let digits = text.strip_prefix("cuda:").ok_or_else(bad)?.as_bytes();
        let nibble = |digit: u8| match digit {
            b'0'..=b'9' => Ok(digit - b'0'),
            b'a'..=b'f' => Ok(digit - b'a' + 10),
            _ => Err(bad()),
        };
        let mut uuid = [0; 16];
        if digits.len() != 2 * uuid.len() {
            return Err(bad());
        }
        for (byte, pair) in uuid.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Ok(Self::Cuda(uuid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_prints_its_uuid() {
        let mut uuid = [0u8; 16];
        uuid[0] = 0xab;
        assert_eq!(Device::Cuda(uuid).to_string(), "cuda:ab000000000000000000000000000000");
        assert_eq!(Device::Host.to_string(), "host");
        for device in [Device::Host, Device::Cuda(uuid)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for bad in ["", "cuda:", "cuda:ab", &format!("cuda:{}", "G".repeat(32)), "cuda:é"] {
            assert_eq!(Device::from_str(bad).map_err(|f| f.reason()), Err(Reason::BadMetadata));
        }
    }
}
