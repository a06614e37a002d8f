//! Private storages, or the parts of them that are looked at, as one storage to be copied once.

use std::ops::Range;
use std::sync::Arc;

use rung::{Memory, Reason, Refusal, Storage, Tensor};

/// Members begin on this: enough for any element type and a cache line.
pub(crate) const ALIGN: usize = 64;

/// One member: what its bytes are.
#[derive(Debug)]
pub(crate) enum Member {
    /// A range of a storage.
    Range(Arc<Storage>, Range<usize>),
    /// The elements of a tensor in C order: a sparse view of something large.
    Elements(Tensor),
}

impl Member {
    fn len(&self) -> usize {
        match self {
            Self::Range(_, range) => range.len(),
            Self::Elements(tensor) => tensor.byte_count(),
        }
    }

    fn for_each_piece(
        &self,
        piece: &mut dyn FnMut(&[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        match self {
            Self::Range(storage, range) => {
                storage.window(range.clone())?.memory().for_each_piece(piece)
            }
            Self::Elements(tensor) => tensor.for_each_piece(piece),
        }
    }
}

/// Members side by side, each aligned; the gaps are zero.
#[derive(Debug, Default)]
pub(crate) struct Bundle {
    members: Vec<(usize, Member)>,
    len: usize,
    /// Whether it must go in memory that was used for nothing before.
    fresh: bool,
}

impl Bundle {
    pub(crate) fn new(fresh: bool) -> Self {
        Self { fresh, ..Self::default() }
    }

    /// A whole storage, for a copy of it in memory that was used for nothing before.
    pub(crate) fn copy_of(storage: &Arc<Storage>) -> Self {
        let mut bundle = Self::new(true);
        bundle.push(Member::Range(Arc::clone(storage), 0..storage.len()));
        bundle
    }

    /// Adds a member, and says where it begins.
    pub(crate) fn push(&mut self, member: Member) -> usize {
        let at = self.len.next_multiple_of(ALIGN);
        self.len = at + member.len();
        self.members.push((at, member));
        at
    }
}

impl Memory for Bundle {
    fn len(&self) -> usize {
        self.len
    }

    /// Its bytes lie in many places.
    fn bytes(&self) -> Result<&[u8], Refusal> {
        Err(Reason::NotContiguous.into())
    }

    fn needs_fresh_memory(&self) -> bool {
        self.fresh
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        let end = offset.checked_add(into.len()).filter(|&end| end <= self.len);
        let end = end.ok_or(Reason::OutOfBounds)?;
        let mut at = 0;
        self.for_each_piece(&mut |piece| {
            let (from, to) = (offset.max(at), end.min(at + piece.len()));
            if from < to {
                into[from - offset..to - offset].copy_from_slice(&piece[from - at..to - at]);
            }
            at += piece.len();
            Ok(())
        })
    }

    fn for_each_piece(
        &self,
        piece: &mut dyn FnMut(&[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut end = 0;
        for (at, member) in &self.members {
            piece(&[0; ALIGN][..at - end])?;
            member.for_each_piece(piece)?;
            end = at + member.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_lie_side_by_side_and_the_gaps_are_zero() {
        let whole = Arc::new(Storage::from_vec((0..100u8).collect::<Vec<_>>()));
        let view = Tensor::contiguous(Arc::clone(&whole), rung::DType::U8, &[10, 10]).unwrap();
        let mut bundle = Bundle::default();
        assert_eq!(bundle.push(Member::Range(whole, 5..10)), 0);
        assert_eq!(bundle.push(Member::Elements(view.select(1, 3).unwrap())), 64);
        let mut all = vec![9; bundle.len()];
        bundle.read_at(0, &mut all).unwrap();
        assert_eq!(all[..5], [5, 6, 7, 8, 9]);
        assert!(all[5..64].iter().all(|byte| *byte == 0));
        assert_eq!(all[64..], [3, 13, 23, 33, 43, 53, 63, 73, 83, 93]);
        let mut middle = [9; 3];
        bundle.read_at(63, &mut middle).unwrap();
        assert_eq!(middle, [0, 3, 13]);
        assert_eq!(bundle.read_at(72, &mut middle).unwrap_err().reason(), Reason::OutOfBounds);
    }
}
