//! Descriptors, seals and holes.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, SealFlag, fallocate};

use super::*;
use crate::sys::SIZE_SEALS;

fn new_file() -> File {
    Object::new(0).unwrap().into_file()
}

/// What mapping a file for writing fails with.
fn unwritable(file: &File) -> Option<i32> {
    let object = Object::over(file.try_clone().unwrap());
    Writer::new(&object, NonZeroUsize::MIN).unwrap_err().raw_os_error()
}

fn add_seals(file: &File, seals: SealFlag) {
    Object::over(file.try_clone().unwrap()).add_seals(seals).unwrap();
}

/// A memfd as a careless or hostile peer might make it.
fn memfd(len: u64, seals: SealFlag) -> OwnedFd {
    let file = new_file();
    file.set_len(len).unwrap();
    add_seals(&file, seals);
    file.into()
}

#[test]
fn a_sealed_block_cannot_be_written_by_anyone() {
    let mut draft = Draft::new(5000).unwrap();
    draft.bytes_mut()[4999] = 7;
    let sealed = draft.seal().unwrap();
    let file = File::from(sealed.descriptor().unwrap());
    assert_eq!(file.write_all_at(b"x", 0).unwrap_err().raw_os_error(), Some(Errno::EPERM as i32));
    assert!(file.set_len(0).is_err());
    assert_eq!(unwritable(&file), Some(Errno::EPERM as i32));
    let Received::Sealed(received) = receive(file.into(), 5000).unwrap() else {
        panic!("not seen as sealed")
    };
    assert_eq!(received.bytes().unwrap()[4998..5000], [0, 7]);
}

#[test]
fn a_shared_block_is_written_by_its_owner_alone() {
    let mut draft = Draft::new(64).unwrap();
    draft.bytes_mut().fill(1);
    let shared = draft.share().unwrap();
    let file = File::from(shared.descriptor().unwrap());
    assert!(file.write_all_at(b"x", 0).is_err());
    assert_eq!(unwritable(&file), Some(Errno::EPERM as i32));
    let punched = fallocate(
        &file,
        FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE,
        0,
        64,
    );
    assert_eq!(punched, Err(Errno::EPERM));
    let Received::Foreign(foreign) = receive(file.into(), 64).unwrap() else {
        panic!("not seen as writable by its owner")
    };
    assert_eq!(foreign.bytes(None).unwrap_err().reason(), Reason::PeerNotTrusted);
    let mut copied = [0; 64];
    foreign.read_at(0, &mut copied).unwrap();
    assert_eq!(copied, [1; 64]);
    let trust = PeerTrust::same_executable(std::process::id()).unwrap();
    assert!(foreign.len() >= 64);
    assert_eq!(foreign.bytes(Some(&trust)).unwrap()[..64], [1; 64]);

    let mut again = shared.reclaim().unwrap();
    again.bytes_mut().fill(2);
    assert_eq!(again.seal().unwrap_err().reason(), Reason::StillLent);
}

#[test]
fn an_unsealed_segment_is_refused() {
    let all = [
        SealFlag::F_SEAL_SHRINK,
        SealFlag::F_SEAL_GROW,
        SealFlag::F_SEAL_WRITE,
        SealFlag::F_SEAL_SEAL,
    ];
    for missing in all {
        let seals = all
            .into_iter()
            .filter(|seal| *seal != missing)
            .fold(SealFlag::empty(), SealFlag::union);
        // Allocated, so that the seals alone decide.
        let file = new_file();
        file.write_all_at(&[1; 4096], 0).unwrap();
        add_seals(&file, seals);
        assert_eq!(reason(receive(file.into(), 4096)), Reason::Unsealed, "{missing:?}");
    }
}

#[test]
fn the_kernels_size_counts_not_the_peers() {
    let descriptor = || Sealed::copy_from(&[1; 4096]).unwrap().descriptor().unwrap();
    for said in [4097, usize::MAX] {
        assert_eq!(reason(receive(descriptor(), said)), Reason::WrongSize, "{said}");
    }
    // A block may be longer than what is in it, and is what the kernel says it is.
    let Received::Sealed(whole) = receive(descriptor(), 1).unwrap() else { panic!() };
    assert_eq!(whole.len(), 4096);
    let descriptor = Sealed::copy_from(&[1]).unwrap().descriptor().unwrap();
    assert_eq!(reason(receive(descriptor, 0)), Reason::Empty);
}

#[test]
fn a_segment_with_holes_is_refused() {
    let seals = SIZE_SEALS | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    assert_eq!(reason(receive(memfd(8 << 20, seals), 8 << 20)), Reason::Sparse);
}

/// Blocks beyond the end of the file count as blocks; the pages before it must be there all the same.
#[test]
fn blocks_beyond_the_end_do_not_hide_holes() {
    let len = 1 << 20;
    let file = new_file();
    file.set_len(len as u64).unwrap();
    fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, len, len).unwrap();
    let seals = SIZE_SEALS | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    add_seals(&file, seals);
    let watched = file.try_clone().unwrap();
    let Received::Sealed(received) = receive(file.into(), len as usize).unwrap() else {
        panic!("not seen as sealed")
    };
    // Whatever was accepted is allocated: as many blocks again as the file has bytes.
    let blocks = std::os::unix::fs::MetadataExt::blocks(&watched.metadata().unwrap());
    assert!(blocks * 512 >= 2 * len as u64, "{blocks}");
    assert!(received.bytes().unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn what_is_no_shared_memory_is_refused() {
    let null = File::open("/dev/null").unwrap();
    assert_eq!(reason(receive(null.into(), 4096)), Reason::NotSharedMemory);
    let (pipe, _) = std::io::pipe().unwrap();
    assert_eq!(reason(receive(pipe.into(), 4096)), Reason::NotSharedMemory);
}

#[test]
fn a_segment_of_no_bytes_is_never_mapped() {
    let empty = || memfd(0, SIZE_SEALS | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL);
    assert_eq!(reason(receive(empty(), 1)), Reason::WrongSize);
    assert_eq!(reason(receive(empty(), 0)), Reason::Empty);
}

#[test]
fn a_new_block_is_zero_and_its_size_is_fixed() {
    let draft = Draft::new(12_345).unwrap();
    assert!(draft.bytes().iter().all(|byte| *byte == 0));
    let file = File::from(draft.share().unwrap().descriptor().unwrap());
    assert!(file.set_len(1).is_err());
    assert!(file.set_len(1 << 20).is_err());
}

#[test]
fn released_pages_leave_the_bytes_as_they_are() {
    const MIB: usize = 1 << 20;
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let line = status.lines().find(|line| line.starts_with("Pss_Shmem:")).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    };
    let mut draft = Draft::new_in(&Pool::new(Limits::default()), 64 * MIB).unwrap();
    draft.bytes_mut().fill(7);
    let shared = draft.share().unwrap();
    let before = resident();
    // Rounded inward: half a page at either end stays.
    assert_eq!(shared.release(2048..32 * MIB + 2048).unwrap(), 32 * MIB - 4096);
    assert!(before - resident() > 24 * MIB, "{before} before, {} after", resident());
    assert!(shared.bytes().iter().all(|byte| *byte == 7));
    assert_eq!(shared.release(100..200).unwrap(), 0);
}
