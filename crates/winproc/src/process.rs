//! A process, and handles on their way to it and from it.
#![expect(unsafe_code, reason = "handles of processes have no safe form in std")]

use std::ffi::OsString;
use std::io;
use std::os::windows::ffi::OsStringExt;
use std::os::windows::io::{
    AsHandle, AsRawHandle, BorrowedHandle, FromRawHandle, IntoRawHandle, OwnedHandle,
};
use std::process::Child;
use std::time::{Duration, Instant};

use windows_sys::Win32::Foundation::{
    DUPLICATE_CLOSE_SOURCE, DUPLICATE_SAME_ACCESS, DuplicateHandle, FILETIME, HANDLE,
    INVALID_HANDLE_VALUE, WAIT_OBJECT_0, WAIT_TIMEOUT,
};
use windows_sys::Win32::System::Diagnostics::ToolHelp::{
    CreateToolhelp32Snapshot, PROCESSENTRY32W, Process32FirstW, Process32NextW, TH32CS_SNAPPROCESS,
    TH32CS_SNAPTHREAD, THREADENTRY32, Thread32First, Thread32Next,
};
use windows_sys::Win32::System::LibraryLoader::GetModuleHandleW;
use windows_sys::Win32::System::ProcessStatus::{
    K32GetMappedFileNameW, K32GetProcessImageFileNameW,
};
use windows_sys::Win32::System::Threading::{
    GetCurrentProcess, GetProcessTimes, INFINITE, OpenProcess, OpenThread, PROCESS_NAME_WIN32,
    PROCESS_QUERY_LIMITED_INFORMATION, PROCESS_SYNCHRONIZE, QueryFullProcessImageNameW,
    ResumeThread, THREAD_SUSPEND_RESUME, WaitForSingleObject,
};

use crate::{last, succeeded};

/// Long enough for every path that Windows has.
const PATH: usize = 32_768;

/// A process, kept from being forgotten: its number means it for as long as this exists.
#[derive(Debug)]
pub struct Process(OwnedHandle);

impl Process {
    /// A process that this one started, with every right to it.
    ///
    /// # Errors
    ///
    /// What DuplicateHandle gives.
    pub fn of(child: &Child) -> io::Result<Self> {
        child.as_handle().try_clone_to_owned().map(Self)
    }

    /// A process by its number, to be waited for and asked for its name.
    ///
    /// # Errors
    ///
    /// What OpenProcess gives: there is none, or this user may not look at it.
    pub fn open(pid: u32) -> io::Result<Self> {
        let rights = PROCESS_SYNCHRONIZE | PROCESS_QUERY_LIMITED_INFORMATION;
        // SAFETY: N1: numbers alone.
        let opened = unsafe { OpenProcess(rights, 0, pid) };
        if opened.is_null() {
            return Err(last());
        }
        // SAFETY: N2: OpenProcess gave it, and it is not null.
        Ok(Self(unsafe { OwnedHandle::from_raw_handle(opened) }))
    }

    /// The same process, once more.
    ///
    /// # Errors
    ///
    /// What DuplicateHandle gives.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Waits until it has ended, or up to a limit; whether it has.
    ///
    /// # Errors
    ///
    /// What WaitForSingleObject gives.
    pub fn wait(&self, limit: Option<Duration>) -> io::Result<bool> {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            // Rounded up, so that it does not spin for the last millisecond; in pieces, where it is longer than the
            // call can be told.
            let millis = left.map_or(INFINITE, |left| {
                u32::try_from(left.as_micros().div_ceil(1000))
                    .map_or(INFINITE - 1, |millis| millis.min(INFINITE - 1))
            });
            // SAFETY: N1: borrowed from `self`.
            match unsafe { WaitForSingleObject(self.raw(), millis) } {
                WAIT_OBJECT_0 => return Ok(true),
                WAIT_TIMEOUT if left.is_none_or(|left| !left.is_zero()) => {}
                WAIT_TIMEOUT => return Ok(false),
                _ => return Err(last()),
            }
        }
    }

    /// Gives it a handle of ours, with the rights that ours has; the number that it has there.
    ///
    /// It is the other's from here on: it ends with that process, if nothing closes it before.
    ///
    /// # Errors
    ///
    /// What DuplicateHandle gives: the process has ended, or this one has no right to its handles.
    pub fn give(&self, handle: BorrowedHandle<'_>) -> io::Result<u64> {
        let mut given: HANDLE = std::ptr::null_mut();
        // SAFETY: N1: both processes and the handle are borrowed for the call, and `given` is a place for the answer;
        // the pseudo-handle of this process is always there.
        let answer = unsafe {
            DuplicateHandle(
                GetCurrentProcess(),
                handle.as_raw_handle(),
                self.raw(),
                &raw mut given,
                0,
                0,
                DUPLICATE_SAME_ACCESS,
            )
        };
        succeeded(answer)?;
        Ok(given as u64)
    }

    /// Takes a handle from it by its number there: it has it no more.
    ///
    /// Whatever number it names is one of its own, so a wrong one harms nobody else. The numbers that mean a process
    /// or a thread itself are refused.
    ///
    /// # Errors
    ///
    /// What DuplicateHandle gives, and [`io::ErrorKind::InvalidData`] for a number that is no handle.
    pub fn take(&self, number: u64) -> io::Result<OwnedHandle> {
        let number = checked(number)?;
        let mut taken: HANDLE = std::ptr::null_mut();
        // SAFETY: N1: as in `give`; `number` is a number of the other process, whose handles are not this one's.
        let answer = unsafe {
            DuplicateHandle(
                self.raw(),
                number,
                GetCurrentProcess(),
                &raw mut taken,
                0,
                0,
                DUPLICATE_SAME_ACCESS | DUPLICATE_CLOSE_SOURCE,
            )
        };
        succeeded(answer)?;
        if taken.is_null() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: N2: the call succeeded, so it is a handle of this process that nobody else knows.
        Ok(unsafe { OwnedHandle::from_raw_handle(taken) })
    }

    fn raw(&self) -> HANDLE {
        self.0.as_raw_handle()
    }

    /// When it began, in hundreds of nanoseconds since 1601.
    fn began(&self) -> io::Result<u64> {
        began(self.raw())
    }
}

impl AsHandle for Process {
    fn as_handle(&self) -> BorrowedHandle<'_> {
        self.0.as_handle()
    }
}

/// A number that can be a handle: not none, and none of the pseudo-handles, which are small negative numbers.
fn checked(number: u64) -> io::Result<HANDLE> {
    let number = isize::try_from(number).map_err(|_| io::ErrorKind::InvalidData)?;
    if number <= 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(number as HANDLE)
}

fn began(process: HANDLE) -> io::Result<u64> {
    let none = FILETIME { dwLowDateTime: 0, dwHighDateTime: 0 };
    let (mut began, mut ended, mut kernel, mut user) = (none, none, none, none);
    // SAFETY: N1: the handle is borrowed by whoever calls this, and the four are places for the answers.
    let answer = unsafe {
        GetProcessTimes(process, &raw mut began, &raw mut ended, &raw mut kernel, &raw mut user)
    };
    succeeded(answer)?;
    Ok(u64::from(began.dwHighDateTime) << 32 | u64::from(began.dwLowDateTime))
}

/// Shows that numbers which come over one socket are handles that were given to this process (N3): there is one with
/// each socket of [`take_socket`](crate::take_socket).
#[derive(Debug)]
pub struct Received(pub(crate) ());

impl Received {
    /// The handle that the other side gave this process, by its number.
    ///
    /// Each number may be adopted once, and only if it came over the socket that this belongs to: the other side
    /// started this process, and is believed as whoever does that has to be (it could write its memory as well).
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] for a number that is no handle.
    pub fn adopt(&self, number: u64) -> io::Result<OwnedHandle> {
        let handle = checked(number)?;
        // SAFETY: N3: the other side made it for this process and has no other use of it.
        Ok(unsafe { OwnedHandle::from_raw_handle(handle) })
    }

    /// The number of a handle that the other side may [take](Process::take), a duplicate of this one.
    ///
    /// Where it does not, it ends with this process.
    ///
    /// # Errors
    ///
    /// What DuplicateHandle gives.
    pub fn offer(&self, handle: BorrowedHandle<'_>) -> io::Result<u64> {
        Ok(handle.try_clone_to_owned()?.into_raw_handle() as u64)
    }
}

/// Lets a process that was started suspended run.
///
/// # Errors
///
/// What the tool help library, OpenThread and ResumeThread give.
pub fn resume(pid: u32) -> io::Result<()> {
    // SAFETY: N1: numbers alone.
    let snapshot = unsafe { CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0) };
    if snapshot == INVALID_HANDLE_VALUE {
        return Err(last());
    }
    // SAFETY: N2: the call gave it.
    let snapshot = unsafe { OwnedHandle::from_raw_handle(snapshot) };
    let size = size_of::<THREADENTRY32>() as u32;
    let mut entry = THREADENTRY32 { dwSize: size, ..Default::default() };
    // SAFETY: N1: the snapshot is owned here, and the entry says its size.
    let mut more = unsafe { Thread32First(snapshot.as_raw_handle(), &raw mut entry) };
    let mut resumed = false;
    while more != 0 {
        if entry.th32OwnerProcessID == pid {
            // SAFETY: N1: numbers alone.
            let thread = unsafe { OpenThread(THREAD_SUSPEND_RESUME, 0, entry.th32ThreadID) };
            if thread.is_null() {
                return Err(last());
            }
            // SAFETY: N2: OpenThread gave it, and it is not null.
            let thread = unsafe { OwnedHandle::from_raw_handle(thread) };
            // SAFETY: N1: owned here.
            if unsafe { ResumeThread(thread.as_raw_handle()) } == u32::MAX {
                return Err(last());
            }
            resumed = true;
        }
        // SAFETY: N1: as above.
        more = unsafe { Thread32Next(snapshot.as_raw_handle(), &raw mut entry) };
    }
    if resumed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// The process that started this one, and its number, if it still runs.
///
/// Windows keeps the number of a parent for ever, and gives it to others after its end: only a process that began
/// before this one is meant.
#[must_use]
pub fn parent() -> Option<(u32, Process)> {
    let me = std::process::id();
    let (_, parent) = running().ok()?.into_iter().find(|(pid, _)| *pid == me)?;
    let process = Process::open(parent).ok()?;
    // SAFETY: N1: the pseudo-handle of this process is always there.
    let here = unsafe { GetCurrentProcess() };
    (process.began().ok()? <= began(here).ok()?).then_some((parent, process))
}

/// Every process and its parent, by number.
pub(crate) fn running() -> io::Result<Vec<(u32, u32)>> {
    // SAFETY: N1: numbers alone.
    let snapshot = unsafe { CreateToolhelp32Snapshot(TH32CS_SNAPPROCESS, 0) };
    if snapshot == INVALID_HANDLE_VALUE {
        return Err(last());
    }
    // SAFETY: N2: the call gave it.
    let snapshot = unsafe { OwnedHandle::from_raw_handle(snapshot) };
    let size = size_of::<PROCESSENTRY32W>() as u32;
    let mut entry = PROCESSENTRY32W { dwSize: size, ..Default::default() };
    let mut all = Vec::new();
    // SAFETY: N1: the snapshot is owned here, and the entry says its size.
    let mut more = unsafe { Process32FirstW(snapshot.as_raw_handle(), &raw mut entry) };
    while more != 0 {
        all.push((entry.th32ProcessID, entry.th32ParentProcessID));
        // SAFETY: N1: as above.
        more = unsafe { Process32NextW(snapshot.as_raw_handle(), &raw mut entry) };
    }
    Ok(all)
}

/// Whether a process runs the very file that this process runs.
///
/// What is compared is what the system says: the file that this process's image is mapped from, under the name that
/// the file has now, and the file that the other one was started from. A running image's file can be neither written
/// nor deleted, only renamed; then the names differ, and it is not the same.
///
/// # Errors
///
/// Where one of the two cannot be looked at.
pub fn runs_this_executable(pid: u32) -> io::Result<bool> {
    let other = Process::open(pid)?;
    let mine = name(|text, room| {
        // SAFETY: the name of this process's main module needs no argument (null).
        let image = unsafe { GetModuleHandleW(std::ptr::null()) };
        // SAFETY: N1: an address in this process, which is only looked up, and `room` characters of text.
        unsafe { K32GetMappedFileNameW(GetCurrentProcess(), image, text, room) }
    })?;
    let theirs = name(|text, room| {
        // SAFETY: N1: the process is owned here; `room` characters of text.
        unsafe { K32GetProcessImageFileNameW(other.raw(), text, room) }
    })?;
    if mine == theirs {
        return Ok(true);
    }
    // Wine names the mapped file by its path instead of by its volume.
    let path = name(|text, mut room| {
        // SAFETY: N1: as above, and `room` says how much there is, then how much was written.
        let answer = unsafe {
            QueryFullProcessImageNameW(other.raw(), PROCESS_NAME_WIN32, text, &raw mut room)
        };
        if answer == 0 { 0 } else { room }
    })?;
    let mut by_path = OsString::from(r"\??\");
    by_path.push(path);
    Ok(mine == by_path)
}

/// A text that a call writes, which answers how long it is.
fn name(write: impl FnOnce(*mut u16, u32) -> u32) -> io::Result<OsString> {
    let mut text = vec![0u16; PATH];
    match write(text.as_mut_ptr(), PATH as u32) as usize {
        0 => Err(last()),
        len => Ok(OsString::from_wide(text.get(..len).unwrap_or(&text))),
    }
}
