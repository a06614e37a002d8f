//! Processes that end together.
#![expect(unsafe_code, reason = "job objects have no safe form in std")]

use std::io;
use std::os::windows::io::{AsHandle, AsRawHandle, FromRawHandle, OwnedHandle};

use windows_sys::Win32::System::JobObjects::{
    AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE,
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation,
    SetInformationJobObject, TerminateJobObject,
};

use crate::{last, succeeded};

/// A process and whatever it starts: all of them end when this does, and so when this process does, however it ends.
#[derive(Debug)]
pub struct Job(OwnedHandle);

impl Job {
    /// With nobody in it.
    ///
    /// # Errors
    ///
    /// What CreateJobObjectW and SetInformationJobObject give.
    pub fn new() -> io::Result<Self> {
        // SAFETY: N1: neither a name nor attributes.
        let made = unsafe { CreateJobObjectW(std::ptr::null(), std::ptr::null()) };
        if made.is_null() {
            return Err(last());
        }
        // SAFETY: N2: the call gave it, and it is not null.
        let job = Self(unsafe { OwnedHandle::from_raw_handle(made) });
        let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
        limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
        // SAFETY: N1: the job is owned here; the structure is the one of this class, and as long as is said.
        let answer = unsafe {
            SetInformationJobObject(
                job.0.as_raw_handle(),
                JobObjectExtendedLimitInformation,
                (&raw const limits).cast(),
                size_of_val(&limits) as u32,
            )
        };
        succeeded(answer)?;
        Ok(job)
    }

    /// Has a process be in it, and whatever it starts from here on.
    ///
    /// # Errors
    ///
    /// What AssignProcessToJobObject gives.
    pub fn add(&self, process: &impl AsHandle) -> io::Result<()> {
        let process = process.as_handle().as_raw_handle();
        // SAFETY: N1: both are borrowed.
        succeeded(unsafe { AssignProcessToJobObject(self.0.as_raw_handle(), process) })
    }

    /// Ends everybody in it, now.
    pub fn end(&self) {
        // SAFETY: N1: borrowed. It fails where nobody is left.
        unsafe { TerminateJobObject(self.0.as_raw_handle(), 1) };
    }
}
