//! Why a peer may be believed not to write what it lent.
#![expect(unsafe_code, reason = "the assertion that a peer is trusted is an unsafe function")]

use std::io;

use rung::{Reason, Refusal};

/// The token that lets a receiver read a peer's [`Foreign`](crate::Foreign) block as a plain slice.
///
/// The peer still has a writable mapping of such a block (S3, S4). Were it to write while a `&[u8]`
/// of it exists here, the behaviour would be undefined, so somebody has to vouch for it: this very
/// executable does by its own types ([`Self::same_executable`]), or a person does
/// ([`Self::assume`]).
///
/// The same executable means the same code only where the code is in the executable: an interpreter
/// runs whatever script it is given, and then vouches for nothing.
///
/// Whoever is trusted is also counted on not to look at a block that it gave back: such a block is written
/// again for others (L8), and nobody can take a mapping from a process.
///
/// A token is for the peer it was made for: hand it only to sessions that are fed with nothing but
/// what that peer sent (SAFETY.md, "What types cannot hold").
#[derive(Debug, Clone)]
pub struct PeerTrust(());

impl PeerTrust {
    /// The user says so.
    ///
    /// # Safety
    ///
    /// Until the receipt for it has been sent, the peer must not write a block that it sent. Any
    /// peer that uses this workspace's crates without unsafe code of its own keeps to that; so does
    /// any program that writes a block only before it sends it and after it got the receipt.
    #[must_use]
    pub unsafe fn assume() -> Self {
        Self(())
    }

    /// The process runs the very file that this process runs: on Linux the same device and inode behind
    /// `/proc/PID/exe` (proc_pid_exe(5)), on Windows the file that both images are mapped from.
    ///
    /// `pid` must be known to be the peer's: a child not yet reaped.
    ///
    /// # Errors
    ///
    /// [`Reason::PeerNotTrusted`] where it runs another file or cannot be looked at, [`Reason::Platform`] where there
    /// is no way to tell (macOS).
    pub fn same_executable(pid: u32) -> Result<Self, Refusal> {
        match runs_this_executable(pid) {
            Ok(true) => Ok(Self(())),
            Ok(false) => Err(Refusal::new(Reason::PeerNotTrusted, "it runs another executable")),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                Err(Reason::Platform.into())
            }
            Err(error) => Err(Refusal::new(Reason::PeerNotTrusted, error.to_string())),
        }
    }
}

#[cfg(target_os = "linux")]
fn runs_this_executable(pid: u32) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let file = |process: &str| {
        std::fs::metadata(format!("/proc/{process}/exe"))
            .map(|metadata| (metadata.dev(), metadata.ino()))
    };
    Ok(file(&pid.to_string())? == file("self")?)
}

#[cfg(windows)]
use winproc::runs_this_executable;

#[cfg(not(any(target_os = "linux", windows)))]
fn runs_this_executable(_pid: u32) -> io::Result<bool> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_file_is_trusted() {
        assert!(PeerTrust::same_executable(std::process::id()).is_ok());
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let refusal = PeerTrust::same_executable(other.id()).unwrap_err();
        assert_eq!(refusal.reason(), Reason::PeerNotTrusted);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
