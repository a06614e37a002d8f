//! Windows: sections of the page file, without a name (CreateFileMappingW).
//!
//! A section is never resized, and its memory is committed when it is made: no access to a view of it can fault (S1).
//! A peer gets a handle for reading alone. A handle can be duplicated into one that is for more, unless the section
//! says to whom it allows that: it allows it to nobody, not even to change what it allows, and its owner needs no
//! permission, having the first handle. (A process of the same user that may take handles out of this one needs none of
//! this: see SECURITY.md.)
#![expect(unsafe_code, reason = "sections and views of them have no safe form")]

use std::io;
use std::num::NonZeroUsize;
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle, RawHandle};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rung::{Fault, Handle, Reason, Refusal};
use windows_sys::Win32::Foundation::{
    CompareObjectHandles, DuplicateHandle, ERROR_COMMITMENT_LIMIT, ERROR_NO_SYSTEM_RESOURCES,
    ERROR_NOT_ENOUGH_MEMORY, ERROR_OUTOFMEMORY, ERROR_TOO_MANY_OPEN_FILES, INVALID_HANDLE_VALUE,
};
use windows_sys::Win32::Security::{
    ACL, ACL_REVISION, AddAccessAllowedAce, InitializeAcl, InitializeSecurityDescriptor,
    SECURITY_ATTRIBUTES, SECURITY_CREATOR_SID_AUTHORITY, SECURITY_DESCRIPTOR, SID,
    SetSecurityDescriptorDacl,
};
use windows_sys::Win32::Storage::FileSystem::READ_CONTROL;
use windows_sys::Win32::System::Memory::{
    CreateFileMappingW, FILE_MAP_READ, FILE_MAP_WRITE, MEM_COMMIT, MEM_MAPPED,
    MEMORY_BASIC_INFORMATION, MEMORY_MAPPED_VIEW_ADDRESS, MapViewOfFile, PAGE_READWRITE,
    UnmapViewOfFile, VirtualQuery,
};
use windows_sys::Win32::System::ProcessStatus::K32GetMappedFileNameW;
use windows_sys::Win32::System::SystemInformation::{GetSystemInfo, SYSTEM_INFO};
use windows_sys::Win32::System::SystemServices::SECURITY_DESCRIPTOR_REVISION;
use windows_sys::Win32::System::Threading::GetCurrentProcess;

use crate::counters::{COUNTERS, count};
use crate::file::{nonzero, refused};
use crate::filling::Filling;
use crate::mapping::Writer;
use crate::pool::own_number;

/// A section: the owner's handle of it, or what a peer was given.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    section: Arc<OwnedHandle>,
    /// In this process: of what is ours, and of what came, each time it came.
    number: u64,
}

/// A section of this process's, to be compared with what comes.
#[derive(Debug, Clone)]
pub(crate) struct Identity(Arc<OwnedHandle>);

fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn succeeded(answer: i32) -> io::Result<()> {
    if answer == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Room for a list of access rights with one entry, where the system wants it.
#[repr(align(8))]
#[derive(Default)]
struct Rights([u64; 8]);

/// S-1-3-4: whoever owns an object.
const OWNER_RIGHTS: u32 = 4;

/// A section that allows nobody anything but what its first handle can do; its owner, to read who may.
fn section(capacity: usize) -> io::Result<OwnedHandle> {
    let mut list = Rights::default();
    let acl = list.0.as_mut_ptr().cast::<ACL>();
    // SAFETY: room for a list, at a multiple of 8, as long as is said.
    succeeded(unsafe { InitializeAcl(acl, size_of::<Rights>() as u32, ACL_REVISION) })?;
    // Whoever owns an object may change the list, unless the list says what owners may.
    let owners = SID {
        Revision: 1,
        SubAuthorityCount: 1,
        IdentifierAuthority: SECURITY_CREATOR_SID_AUTHORITY,
        SubAuthority: [OWNER_RIGHTS],
    };
    let owners: *const SID = &raw const owners;
    // SAFETY: a list that was just begun, and an identifier that outlives the call.
    succeeded(unsafe {
        AddAccessAllowedAce(acl, ACL_REVISION, READ_CONTROL, owners.cast_mut().cast())
    })?;
    let mut descriptor = SECURITY_DESCRIPTOR::default();
    let described = (&raw mut descriptor).cast();
    // SAFETY: a place for a descriptor of this revision.
    succeeded(unsafe { InitializeSecurityDescriptor(described, SECURITY_DESCRIPTOR_REVISION) })?;
    // SAFETY: both were just begun, and outlive the call below that reads them.
    succeeded(unsafe { SetSecurityDescriptorDacl(described, 1, acl, 0) })?;
    let attributes = SECURITY_ATTRIBUTES {
        nLength: size_of::<SECURITY_ATTRIBUTES>() as u32,
        lpSecurityDescriptor: described,
        bInheritHandle: 0,
    };
    let size = capacity as u64;
    // SAFETY: no file, no name; the attributes and what they point to live until the call is over.
    let made = unsafe {
        CreateFileMappingW(
            INVALID_HANDLE_VALUE,
            &raw const attributes,
            PAGE_READWRITE,
            (size >> 32) as u32,
            size as u32,
            null(),
        )
    };
    if made.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call gave it, it is not null, and nobody else has it.
    Ok(unsafe { OwnedHandle::from_raw_handle(made) })
}

impl Object {
    pub(crate) fn new(capacity: usize) -> Result<Self, Refusal> {
        count(&COUNTERS.created, 1);
        let section = section(capacity).map_err(|error| refused(&error, "CreateFileMapping"))?;
        Ok(Self { section: Arc::new(section), number: next_number() })
    }

    /// Nothing to do: it has its memory from the start.
    pub(crate) fn allocate(&self, _capacity: usize) -> Result<(), Refusal> {
        Ok(())
    }

    pub(crate) fn fill(
        &self,
        capacity: usize,
        len: usize,
        fill: impl FnOnce(&mut Filling<'_>) -> Result<(), Refusal>,
        _is_final: bool,
    ) -> Result<Option<Writer>, Refusal> {
        Writer::filled(self, nonzero(capacity)?, len, fill).map(Some)
    }

    /// Nothing to do: no peer has a handle to write it with, and the owner's view is gone.
    pub(crate) fn close(&self) -> Result<(), Refusal> {
        Ok(())
    }

    /// Nothing to do: peers get handles for reading.
    pub(crate) fn lend(&self) -> Result<(), Refusal> {
        Ok(())
    }

    pub(crate) fn handle(&self) -> io::Result<Handle> {
        let mut given: RawHandle = null_mut();
        // SAFETY: the section is borrowed for the call, the pseudo-handle of this process is always there, and
        // `given` is a place for the answer.
        let answer = unsafe {
            DuplicateHandle(
                GetCurrentProcess(),
                self.section.as_raw_handle(),
                GetCurrentProcess(),
                &raw mut given,
                FILE_MAP_READ,
                0,
                0,
            )
        };
        succeeded(answer)?;
        // SAFETY: the call succeeded, and nobody else has it.
        Ok(unsafe { OwnedHandle::from_raw_handle(given) })
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn identity(&self) -> Identity {
        Identity(Arc::clone(&self.section))
    }

    /// Sections are looked at through views alone.
    pub(crate) fn read_at(&self, _offset: usize, _into: &mut [u8]) -> Option<io::Result<()>> {
        None
    }
}

impl Identity {
    /// Whether this handle means the same section.
    fn is(&self, handle: &OwnedHandle) -> bool {
        // SAFETY: both are borrowed for the call.
        unsafe { CompareObjectHandles(self.0.as_raw_handle(), handle.as_raw_handle()) != 0 }
    }
}

/// What a peer's handle is: the section and its bytes. Its owner can always write it.
///
/// Believes only the system: that it can be mapped, that its memory is there, and that it is no file, which could
/// fail to be read in.
pub(crate) fn receive(handle: OwnedHandle, least: usize) -> Result<(Object, usize, bool), Fault> {
    let section = Arc::new(handle);
    let view = View::whole(&section).map_err(|error| {
        let what = Fault::new(Reason::NotSharedMemory, words(&error));
        if reason(&error) == Reason::NoMemory {
            refused(&error, "MapViewOfFile").into()
        } else {
            what
        }
    })?;
    let about = view.about();
    let mut name = [0u16; 2];
    // SAFETY: the view is here, and there is room for as many characters as is said.
    let file = unsafe {
        K32GetMappedFileNameW(GetCurrentProcess(), view.0.cast().as_ptr(), name.as_mut_ptr(), 2)
    };
    // One whose name is too long for this has a name all the same.
    let anonymous =
        file == 0 && io::Error::last_os_error().raw_os_error() == Some(ERROR_FILE_INVALID);
    if !anonymous || about.Type != MEM_MAPPED {
        return Err(Fault::new(Reason::NotSharedMemory, "a file, or a program"));
    }
    // Of memory that is reserved alone, the part that is there: it stays there, for as long as the section does.
    let there = if about.State == MEM_COMMIT { about.RegionSize } else { 0 };
    if there == 0 {
        return Err(Fault::new(Reason::Sparse, "no memory is committed"));
    }
    if there < least {
        let detail = format!("{least} bytes declared, {there} there");
        return Err(Fault::new(Reason::WrongSize, detail));
    }
    drop(view);
    let number = own_number(|own| own.is(&section)).unwrap_or_else(next_number);
    Ok((Object { section, number }, there, false))
}

const ERROR_FILE_INVALID: i32 = windows_sys::Win32::Foundation::ERROR_FILE_INVALID as i32;

/// A view for a moment, to be asked about.
struct View(NonNull<u8>);

impl View {
    fn whole(section: &OwnedHandle) -> io::Result<Self> {
        view(section.as_raw_handle(), 0, false).map(Self)
    }

    fn about(&self) -> MEMORY_BASIC_INFORMATION {
        let mut about = MEMORY_BASIC_INFORMATION::default();
        let size = size_of_val(&about);
        // SAFETY: an address, which is only looked up, and a structure as long as is said; where nothing is found
        // it stays zero.
        unsafe { VirtualQuery(self.0.as_ptr().cast(), &raw mut about, size) };
        about
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: made by `view`, and only asked about.
        unsafe { unmap(self.0, 0) };
    }
}

/// A view of the first bytes of a section, of all for 0; nothing that Rust knows of is where it comes to lie.
fn view(section: RawHandle, len: usize, writable: bool) -> io::Result<NonNull<u8>> {
    let access = if writable { FILE_MAP_READ | FILE_MAP_WRITE } else { FILE_MAP_READ };
    // SAFETY: the section is borrowed by the caller; the system chooses where free room is.
    let view = unsafe { MapViewOfFile(section, access, 0, 0, len) };
    NonNull::new(view.Value.cast()).ok_or_else(io::Error::last_os_error)
}

/// Maps the first `len` bytes of an object, shared with every other mapping of it (MapViewOfFile).
pub(crate) fn map(object: &Object, len: NonZeroUsize, writable: bool) -> io::Result<NonNull<u8>> {
    view(object.section.as_raw_handle(), len.get(), writable)
}

/// Unmaps what [`map`] gave.
///
/// # Safety
///
/// It is exactly what `map` gave, and nobody looks at it any more (M1).
pub(crate) unsafe fn unmap(start: NonNull<u8>, _len: usize) {
    let address = MEMORY_MAPPED_VIEW_ADDRESS { Value: start.as_ptr().cast() };
    // SAFETY: M1, as the caller has it.
    let unmapped = unsafe { UnmapViewOfFile(address) };
    debug_assert_ne!(unmapped, 0);
}

/// There are no forks here.
///
/// # Safety
///
/// None.
pub(crate) unsafe fn keep_from_forks(_start: NonNull<u8>, _len: usize) -> io::Result<()> {
    Ok(())
}

/// Pages fault as they are written.
///
/// # Safety
///
/// None.
pub(crate) unsafe fn populate(_start: NonNull<u8>, _len: usize) {}

/// Nothing is given back: pages of a view leave a working set when the system wants them.
///
/// # Safety
///
/// None.
pub(crate) unsafe fn release(_start: NonNull<u8>, _len: usize) -> io::Result<usize> {
    Ok(0)
}

pub(crate) fn page_size() -> usize {
    let mut info = SYSTEM_INFO::default();
    // SAFETY: a place for the answer.
    unsafe { GetSystemInfo(&raw mut info) };
    usize::try_from(info.dwPageSize).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

/// What a failed call means.
pub(crate) fn reason(error: &io::Error) -> Reason {
    match error.raw_os_error().map(|code| code as u32) {
        Some(
            ERROR_COMMITMENT_LIMIT
            | ERROR_NO_SYSTEM_RESOURCES
            | ERROR_NOT_ENOUGH_MEMORY
            | ERROR_OUTOFMEMORY,
        ) => Reason::NoMemory,
        Some(ERROR_TOO_MANY_OPEN_FILES) => Reason::NoDescriptors,
        _ => Reason::System,
    }
}

/// Its words.
pub(crate) fn words(error: &io::Error) -> String {
    error.to_string()
}

/// What may still be committed.
pub(crate) fn left() -> Option<u64> {
    winproc::available_memory().ok()
}
