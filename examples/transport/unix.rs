//! Messages with descriptors, over a Unix socket (unix(7)).

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read, Write, stdin};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::Outcome;

/// Not for programs that are started meanwhile; elsewhere that takes a call for each.
#[cfg(target_os = "linux")]
const RECEIVING: RecvFlags = RecvFlags::CMSG_CLOEXEC;
#[cfg(not(target_os = "linux"))]
const RECEIVING: RecvFlags = RecvFlags::empty();

pub(crate) struct Socket(UnixStream);

impl Socket {
    /// To a new process, which has the other end as its standard input.
    pub(crate) fn to(command: &mut Command) -> Outcome<(Self, Child)> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn()?;
        Ok((Self(ours), child))
    }

    pub(crate) fn of_parent() -> Outcome<Self> {
        Ok(Self(UnixStream::from(stdin().as_fd().try_clone_to_owned()?)))
    }

    /// A length and bytes, with descriptors on the first byte.
    pub(crate) fn send(&self, bytes: &[u8], descriptors: &[OwnedFd]) -> Outcome {
        let bytes = [&u32::try_from(bytes.len())?.to_be_bytes(), bytes].concat();
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err("more descriptors than this protocol has room for".into());
        }
        // Broken pipes are errors: Rust programs ignore SIGPIPE.
        let sent = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty())?;
        Ok((&self.0).write_all(&bytes[sent..])?)
    }

    pub(crate) fn receive(&self) -> Outcome<(Vec<u8>, VecDeque<OwnedFd>)> {
        let mut length = [0; 4];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut first = [IoSliceMut::new(&mut length)];
        let received = recvmsg(&self.0, &mut first, &mut control, RECEIVING)?;
        if received.bytes < 4 || received.flags.contains(ReturnFlags::CTRUNC) {
            return Err("the other side is gone, or descriptors were cut off".into());
        }
        let mut descriptors = VecDeque::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                descriptors.extend(some);
            }
        }
        let mut bytes = vec![0; u32::from_be_bytes(length) as usize];
        (&self.0).read_exact(&mut bytes)?;
        Ok((bytes, descriptors))
    }
}
