//! Where memory lives.

use std::fmt;

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

#[cfg(test)]
mod tests {
    use super::Device;

    #[test]
    fn a_device_prints_its_uuid() {
        let mut uuid = [0u8; 16];
        uuid[0] = 0xab;
        assert_eq!(Device::Cuda(uuid).to_string(), "cuda:ab000000000000000000000000000000");
        assert_eq!(Device::Host.to_string(), "host");
    }
}
