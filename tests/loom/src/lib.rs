//! What `segment` does without a lock, in every order that the memory model allows (loom).
//!
//! `cargo test --manifest-path tests/loom/Cargo.toml`
#![cfg(test)]

/// What the module under test is made of, here loom's.
mod atomic {
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
}

#[path = "../../../crates/segment/src/marks.rs"]
mod marks;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::mpsc::channel;
use loom::thread;

use marks::Marks;

/// A block: its bytes, and what is said of it. Dropped, it is handed on, or not.
struct Block {
    bytes: UnsafeCell<u8>,
    marks: Marks,
    handed_on: loom::sync::mpsc::Sender<bool>,
}

impl Block {
    fn read(&self) -> u8 {
        // SAFETY: loom finds any order in which somebody writes meanwhile.
        self.bytes.with(|byte| unsafe { *byte })
    }

    fn write(&mut self, byte: u8) {
        // SAFETY: as above.
        self.bytes.with_mut(|place| unsafe { *place = byte });
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let again = self.marks.may_be_used_again();
        if again {
            self.write(0);
        }
        let _ = self.handed_on.send(again);
    }
}

fn block() -> (Arc<Block>, loom::sync::mpsc::Receiver<bool>) {
    let (handed_on, came) = channel();
    let block = Block { bytes: UnsafeCell::new(7), marks: Marks::new(), handed_on };
    (Arc::new(block), came)
}

/// Whoever lets go last hears what the others said before they let go, whichever of them it is.
#[test]
fn who_has_it_last_hears_what_the_others_said() {
    loom::model(|| {
        let (block, came) = block();
        let exposes = Arc::clone(&block);
        let retires = Arc::clone(&block);
        let one = thread::spawn(move || {
            exposes.marks.expose();
            assert_eq!(exposes.read(), 7);
        });
        let two = thread::spawn(move || {
            retires.marks.retire();
            assert_eq!(retires.read(), 7);
        });
        drop(block);
        one.join().unwrap();
        two.join().unwrap();
        assert!(!came.recv().unwrap(), "it was handed on");
    });
}

/// One word is enough.
#[test]
fn one_who_goes_on_looking_is_enough() {
    for say in [Marks::expose, Marks::retire] {
        loom::model(move || {
            let (block, came) = block();
            let other = Arc::clone(&block);
            let says = thread::spawn(move || say(&other.marks));
            drop(block);
            says.join().unwrap();
            assert!(!came.recv().unwrap(), "it was handed on");
        });
    }
}

/// Of a block that nobody said anything of, the last who lets go writes: nobody looks at it any more.
#[test]
fn nobody_looks_at_what_is_handed_on() {
    loom::model(|| {
        let (block, came) = block();
        let other = Arc::clone(&block);
        let reader = thread::spawn(move || assert_eq!(other.read(), 7));
        assert_eq!(block.read(), 7);
        drop(block);
        reader.join().unwrap();
        assert!(came.recv().unwrap(), "it was not handed on");
    });
}

/// Whoever gets it back to write it again knows whether somebody said that it must not be.
#[test]
fn what_is_reclaimed_was_not_retired() {
    loom::model(|| {
        let (block, _came) = block();
        let other = Arc::clone(&block);
        let retires = thread::spawn(move || other.marks.retire());
        if let Ok(alone) = Arc::try_unwrap(block) {
            assert!(alone.marks.is_retired(), "written though a lease is not home");
        }
        retires.join().unwrap();
    });
}
