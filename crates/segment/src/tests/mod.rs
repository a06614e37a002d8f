//! Blocks as their owners, and hostile peers, make and receive them.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(windows)]
mod windows;

use std::num::NonZeroUsize;

use rung::{Fault, Reason};

use crate::mapping::{Reader, Writer};
use crate::sys::Object;
use crate::*;

fn reason(received: Result<Received, Fault>) -> Reason {
    received.unwrap_err().reason()
}

#[test]
fn a_block_is_filled_from_pieces_of_any_size() {
    // Around what is gathered for a file.
    const GATHER: usize = 256 << 10;
    let sizes = [1, 100, GATHER - 1, GATHER, GATHER + 1, 7, 3 * GATHER, GATHER / 2, 1];
    let pieces: Vec<Vec<u8>> =
        sizes.iter().enumerate().map(|(index, &size)| vec![index as u8 + 1; size]).collect();
    let whole = pieces.concat();
    let fill = |filling: &mut Filling<'_>| pieces.iter().try_for_each(|piece| filling.write(piece));
    let sealed = Sealed::build(whole.len(), fill).unwrap();
    assert!(sealed.bytes().unwrap() == whole);
    for wrong in [whole.len() - 1, whole.len() + 1] {
        let refusal = Sealed::build(wrong, fill).unwrap_err();
        assert_eq!(refusal.reason(), Reason::ShapeMismatch);
    }
}

#[test]
fn more_than_the_machine_has_is_a_refusal() {
    // More than any machine's memory: refused before the kernel starts to look for pages.
    let refusal = Draft::new(1 << 50).unwrap_err();
    assert_eq!(refusal.reason(), Reason::NoMemory, "{refusal}");
    assert_eq!(Draft::new(0).unwrap_err().reason(), Reason::Empty);
}

/// Whatever its alignment and length, what is copied out of what another process may write is what is there.
#[test]
fn what_is_copied_out_is_what_is_there() {
    let len = NonZeroUsize::new(4096).unwrap();
    let object = Object::new(4096).unwrap();
    object.allocate(4096).unwrap();
    let mut writer = Writer::new(&object, len).unwrap();
    let reader = Reader::new(&object, len).unwrap();
    let bytes: Vec<u8> = (0..4096).map(|at| (at % 251) as u8).collect();
    writer.bytes_mut().copy_from_slice(&bytes);
    for offset in 0..17 {
        for len in [0, 1, 7, 8, 9, 63, 64, 65, 1000, 4096 - offset] {
            let mut into = vec![0xFF; len];
            reader.copy_out(offset, &mut into).unwrap();
            assert!(into == bytes[offset..offset + len], "{len} bytes from {offset}");
        }
    }
    for (offset, len) in [(4096, 1), (1, 4096), (usize::MAX, 2)] {
        let refusal = reader.copy_out(offset, &mut vec![0; len]).unwrap_err();
        assert_eq!(refusal.reason(), Reason::OutOfBounds);
    }
}

/// What a stranger lends is copied out, and lent in place to nobody.
#[test]
fn a_block_comes_back_as_it_was_sent() {
    let mut draft = Draft::new(70_000).unwrap();
    draft.bytes_mut().fill(3);
    let shared = draft.share().unwrap();
    let received = receive(shared.descriptor().unwrap(), 70_000).unwrap();
    let Received::Foreign(foreign) = received else { panic!("nobody writes it any more?") };
    assert!(foreign.is_own() && foreign.number() == shared.number());
    assert_eq!(foreign.bytes(None).unwrap_err().reason(), Reason::PeerNotTrusted);
    let mut some = vec![0; 69_999];
    foreign.read_at(1, &mut some).unwrap();
    assert!(some.iter().all(|byte| *byte == 3));
    let past = foreign.read_at(foreign.len() - 1, &mut [0; 2]).unwrap_err();
    assert_eq!(past.reason(), Reason::OutOfBounds);
    let trust = PeerTrust::same_executable(std::process::id()).unwrap();
    assert_eq!(foreign.bytes(Some(&trust)).unwrap()[..70_000], *shared.bytes());
    let other = Draft::new(70_000).unwrap().share().unwrap();
    assert_ne!(other.number(), shared.number());
}
