//! Contents on their way into a block, from first to last.

#[cfg(target_os = "linux")]
use std::{fs::File, os::unix::fs::FileExt};

use rung::{Reason, Refusal};

use crate::copy::copy;
use crate::counters::{COUNTERS, count};
#[cfg(target_os = "linux")]
use crate::file::refused;

/// Small pieces are gathered up to this size before they go into a file: a system call a row of a
/// narrow view would cost more than the copy.
#[cfg(target_os = "linux")]
pub(crate) const GATHER: usize = 256 << 10;

#[derive(Debug)]
enum Target<'a> {
    /// By pwrite(2), which saves both the mapping and the zeroing of pages that are overwritten at once.
    #[cfg(target_os = "linux")]
    File(&'a File, Vec<u8>),
    /// A mapping that is there already.
    Memory(&'a mut [u8]),
}

/// A block that is being filled.
#[derive(Debug)]
pub struct Filling<'a> {
    target: Target<'a>,
    len: usize,
    /// Bytes in their place; what is gathered comes after them.
    written: usize,
}

impl<'a> Filling<'a> {
    #[cfg(target_os = "linux")]
    pub(crate) fn file(file: &'a File, len: usize) -> Self {
        Self { target: Target::File(file, Vec::new()), len, written: 0 }
    }

    pub(crate) fn memory(bytes: &'a mut [u8]) -> Self {
        let len = bytes.len();
        Self { target: Target::Memory(bytes), len, written: 0 }
    }

    /// Has somebody write everything.
    pub(crate) fn fill(
        mut self,
        fill: impl FnOnce(&mut Self) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        fill(&mut self)?;
        self.flush()?;
        if self.written != self.len {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("{} bytes written to a block of {}", self.written, self.len),
            ));
        }
        count(&COUNTERS.copied, self.len);
        Ok(())
    }

    fn gathered(&self) -> usize {
        match &self.target {
            #[cfg(target_os = "linux")]
            Target::File(_, gathered) => gathered.len(),
            Target::Memory(_) => 0,
        }
    }

    /// Appends bytes.
    ///
    /// # Errors
    ///
    /// [`Reason::ShapeMismatch`] past the block's length, [`Reason::NoMemory`], [`Reason::System`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let end = (self.written + self.gathered()).checked_add(bytes.len());
        if end.is_none_or(|end| end > self.len) {
            return Err(Refusal::new(
                Reason::ShapeMismatch,
                format!("more than the {} bytes of the block", self.len),
            ));
        }
        match &mut self.target {
            Target::Memory(memory) => {
                copy(&mut memory[self.written..], bytes);
                self.written += bytes.len();
            }
            #[cfg(target_os = "linux")]
            Target::File(file, gathered) => {
                if gathered.len() + bytes.len() > GATHER {
                    put(file, gathered, &mut self.written)?;
                    gathered.clear();
                }
                if bytes.len() <= GATHER / 2 || gathered.len() + bytes.len() <= GATHER {
                    gathered.extend_from_slice(bytes);
                } else {
                    put(file, bytes, &mut self.written)?;
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Refusal> {
        match &mut self.target {
            Target::Memory(_) => {}
            #[cfg(target_os = "linux")]
            Target::File(file, gathered) => {
                put(file, gathered, &mut self.written)?;
                gathered.clear();
            }
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
fn put(file: &File, bytes: &[u8], written: &mut usize) -> Result<(), Refusal> {
    file.write_all_at(bytes, *written as u64)
        .map_err(|error| refused(&error, "writing shared memory"))?;
    *written += bytes.len();
    Ok(())
}
