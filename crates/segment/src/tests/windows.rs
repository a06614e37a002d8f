//! Sections, and handles of them.
#![expect(unsafe_code, reason = "what a hostile peer does with a handle")]

use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle, RawHandle};
use std::ptr::{null, null_mut};

use windows_sys::Win32::Foundation::{DuplicateHandle, INVALID_HANDLE_VALUE};
use windows_sys::Win32::System::Memory::{
    CreateFileMappingW, FILE_MAP_READ, FILE_MAP_WRITE, MapViewOfFile, PAGE_READWRITE, SEC_COMMIT,
    SEC_RESERVE,
};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

use super::*;

/// A section as a careless or hostile peer might make it.
fn section(file: RawHandle, kind: u32, len: u32) -> OwnedHandle {
    // SAFETY: no name, no attributes; a file of the caller's or none.
    let made = unsafe { CreateFileMappingW(file, null(), PAGE_READWRITE | kind, 0, len, null()) };
    assert!(!made.is_null());
    // SAFETY: the call gave it.
    unsafe { OwnedHandle::from_raw_handle(made) }
}

/// Whether a view for writing can be made by this handle.
fn writes(handle: &OwnedHandle) -> bool {
    // SAFETY: a new view, never looked at.
    let view = unsafe { MapViewOfFile(handle.as_raw_handle(), FILE_MAP_WRITE, 0, 0, 0) };
    !view.Value.is_null()
}

#[test]
fn a_shared_block_is_written_by_its_owner_alone() {
    let shared = Draft::new(5000).unwrap().share().unwrap();
    let given = shared.descriptor().unwrap();
    assert!(!writes(&given));
    // Nor by a handle that is made from it.
    let mut more: RawHandle = null_mut();
    let access = FILE_MAP_READ | FILE_MAP_WRITE;
    // SAFETY: this process, always.
    let here = unsafe { GetCurrentProcess() };
    // SAFETY: a handle that is borrowed, and a place for another.
    let made =
        unsafe { DuplicateHandle(here, given.as_raw_handle(), here, &raw mut more, access, 0, 0) };
    assert_eq!((made, more), (0, null_mut()));
    let sealed = Sealed::copy_from(&[1; 100]).unwrap();
    assert!(!writes(&sealed.descriptor().unwrap()));
}

#[test]
fn what_is_no_shared_memory_is_refused() {
    let file = tempfile::tempfile().unwrap();
    assert_eq!(reason(receive(file.try_clone().unwrap().into(), 1)), Reason::NotSharedMemory);
    // A file can fail to be read in when it is looked at.
    let mapped = section(file.as_raw_handle(), SEC_COMMIT, 8192);
    assert_eq!(reason(receive(mapped, 8192)), Reason::NotSharedMemory);
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let reserved = section(INVALID_HANDLE_VALUE, SEC_RESERVE, 1 << 20);
    assert_eq!(reason(receive(reserved, 1 << 20)), Reason::Sparse);
}

#[test]
fn the_systems_size_counts_not_the_peers() {
    let handle = || Sealed::copy_from(&[1; 4096]).unwrap().descriptor().unwrap();
    for said in [4097, usize::MAX] {
        assert_eq!(reason(receive(handle(), said)), Reason::WrongSize, "{said}");
    }
    assert_eq!(reason(receive(handle(), 0)), Reason::Empty);
    let Received::Foreign(whole) = receive(handle(), 1).unwrap() else { panic!("sealed?") };
    assert_eq!(whole.len(), 4096);
}
