//! What several targets make of their input: descriptors of every kind, and what a process holds.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

use arbitrary::Arbitrary;
use rung::{Handle, Tensor, Value};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// A descriptor that a peer may send.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Descriptor {
    /// As it should be.
    Sealed,
    /// Its owner can still write it.
    Lent,
    /// Nothing holds its size.
    Unsealed,
    /// With holes.
    Sparse,
    /// Shorter than is likely to be said.
    Short,
    /// Of no bytes.
    Empty,
    Null,
    Pipe,
}

/// As many bytes as most blocks have.
pub const BYTES: usize = 8192;

impl Descriptor {
    #[must_use]
    pub fn open(self) -> Option<Handle> {
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let segment = |fill: usize, len: u64, seals: SealFlags| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let mut file = File::from(memfd_create(c"fuzz", flags).ok()?);
            file.write_all(&[7; BYTES][..fill]).ok()?;
            file.set_len(len).ok()?;
            fcntl_add_seals(&file, seals).ok()?;
            Some(OwnedFd::from(file).into())
        };
        match self {
            Self::Sealed => segment(BYTES, BYTES as u64, all | SealFlags::WRITE),
            Self::Lent => segment(BYTES, BYTES as u64, all | SealFlags::FUTURE_WRITE),
            Self::Unsealed => segment(BYTES, BYTES as u64, SealFlags::empty()),
            Self::Sparse => segment(0, 1 << 40, all | SealFlags::WRITE),
            Self::Short => segment(10, 10, all | SealFlags::WRITE),
            Self::Empty => segment(0, 0, all | SealFlags::WRITE),
            Self::Null => File::open("/dev/null").ok().map(Into::into),
            Self::Pipe => std::io::pipe().ok().map(|(read, _)| OwnedFd::from(read).into()),
        }
    }
}

/// Descriptors that this process holds.
#[must_use]
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Looks at everything that a value has, as a user might.
pub fn look_at(value: &Value) {
    match value {
        Value::Tensor(tensor) => look_into(tensor),
        Value::Array(array) => look_into(array.cells()),
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => items.iter().for_each(look_at),
        Value::Map(map) => map.iter().for_each(|(key, item)| {
            look_at(key);
            look_at(item);
        }),
        _ => {}
    }
}

fn look_into(tensor: &Tensor) {
    // A view may show one byte for ever.
    if tensor.byte_count() <= 1 << 20 {
        let _ = tensor.to_bytes();
    }
    let _ = tensor.as_slice::<u8>().map(|bytes| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>());
}
