//! A Unix stream socket, which carries descriptors (unix(7)).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rung::limits::FRAME_HANDLES;
use rung::{Fault, Handle};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
};

use super::{Came, Ready};

/// A connected Unix stream socket; or what can be read once a process has ended.
pub type Socket = OwnedFd;

/// Bytes of a handle's name in a frame: descriptors ride it instead.
pub(crate) const NAME: usize = 0;

#[derive(Debug)]
pub(crate) struct Stream(OwnedFd);

impl Stream {
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        #[cfg(target_os = "linux")]
        let flags = SocketFlags::CLOEXEC;
        #[cfg(not(target_os = "linux"))]
        let flags = SocketFlags::empty();
        let (here, there) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        #[cfg(not(target_os = "linux"))]
        for socket in [&here, &there] {
            // There is no flag for each call that all of them keep to.
            rustix::io::ioctl_fionbio(socket, true)?;
            // A process that starts another between the two calls gives it the socket along.
            rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC)?;
            #[cfg(target_vendor = "apple")]
            rustix::net::sockopt::set_socket_nosigpipe(socket, true)?;
        }
        Ok((Self(here), Self(there)))
    }

    pub(crate) fn over(socket: Socket) -> Self {
        #[cfg(not(target_os = "linux"))]
        let _ = rustix::io::ioctl_fionbio(&socket, true);
        Self(socket)
    }

    pub(crate) fn leaving(self) -> Self {
        self
    }

    /// What was written before its writer ended can be read when its end is seen.
    pub(crate) const LAST_WORDS: Option<Duration> = None;

    pub(crate) fn into_socket(self) -> Socket {
        self.0
    }

    /// Nothing: they ride the first byte.
    pub(crate) fn told(&self, _handles: &[Handle]) -> io::Result<Vec<u8>> {
        Ok(Vec::new())
    }

    pub(crate) fn take_back(&self, _told: &[u8]) {}

    pub(crate) fn named(&self, _name: u64) -> Result<Handle, Fault> {
        Err(rung::Reason::WrongHandles.into())
    }

    pub(crate) fn send(&self, parts: &[IoSlice<'_>], handles: &[Handle]) -> io::Result<usize> {
        let borrowed: Vec<BorrowedFd<'_>> = handles.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_HANDLES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(Errno::INVAL.into());
        }
        #[cfg(not(target_vendor = "apple"))]
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        #[cfg(target_vendor = "apple")]
        let flags = SendFlags::DONTWAIT;
        Ok(rustix::net::sendmsg(&self.0, parts, &mut control, flags)?)
    }

    pub(crate) fn receive(&self, room: &mut [u8]) -> io::Result<Came> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_HANDLES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        #[cfg(target_os = "linux")]
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        #[cfg(not(target_os = "linux"))]
        let flags = RecvFlags::DONTWAIT;
        let mut room = [IoSliceMut::new(room)];
        let received = rustix::net::recvmsg(&self.0, &mut room, &mut control, flags)?;
        let mut handles: Vec<Handle> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                handles.extend(descriptors);
            }
        }
        #[cfg(not(target_os = "linux"))]
        for handle in &handles {
            rustix::io::fcntl_setfd(handle, rustix::io::FdFlags::CLOEXEC)?;
        }
        let truncated = received.flags.contains(ReturnFlags::CTRUNC);
        Ok(Came { bytes: received.bytes, handles, truncated })
    }

    pub(crate) fn shut(&self, for_receiving_too: bool) {
        let how = if for_receiving_too { Shutdown::Both } else { Shutdown::Write };
        // It fails only where the stream is over already.
        let _ = rustix::net::shutdown(&self.0, how);
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn has_ended(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut waiting = [PollFd::new(&self.0, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut waiting, Some(&now)) {
                Err(Errno::INTR) => {}
                Err(_) => return false,
                Ok(_) => return waiting[0].revents().intersects(PollFlags::RDHUP),
            }
        }
    }

    /// Where it is not known because something is left to be read, it counts as not ended.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn has_ended(&self) -> bool {
        let mut byte = [0; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.0, &mut byte[..], flags) {
            Ok((count, _)) => count == 0,
            Err(errno) => errno == Errno::CONNRESET,
        }
    }

    pub(crate) fn wait(
        &self,
        peer: Option<&Socket>,
        write: bool,
        read: bool,
        limit: Option<Duration>,
    ) -> io::Result<Ready> {
        super::wait(&self.0, peer.map(AsFd::as_fd), write, read, limit)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
