//! Frames over a Unix stream socket.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use rung::limits::FRAME_HANDLES;
use rung::{Fault, Handle, Reason};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
};

use crate::error::LinkError;
use crate::frame::{self, Decoder, Frame};

/// Frames read while this side was busy sending are kept up to so many bytes; past that the peer
/// has to wait.
const READ_AHEAD: usize = 128 << 20;

/// What crossed a link since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes written, prefixes included.
    pub bytes_sent: u64,
    /// Bytes read, prefixes included.
    pub bytes_received: u64,
    /// Frames written.
    pub frames_sent: u64,
    /// Frames read.
    pub frames_received: u64,
    /// Descriptors written.
    pub handles_sent: u64,
    /// Descriptors read.
    pub handles_received: u64,
}

#[derive(Debug, Default)]
struct Counters {
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    frames_sent: AtomicU64,
    frames_received: AtomicU64,
    handles_sent: AtomicU64,
    handles_received: AtomicU64,
}

fn add(counter: &AtomicU64, number: usize) {
    counter.fetch_add(number as u64, Ordering::Relaxed);
}

/// What was read and not yet taken.
#[derive(Debug, Default)]
struct Inbox {
    decoder: Decoder,
    ready: VecDeque<Frame>,
    ready_bytes: usize,
    ended: bool,
}

/// A connected link. All methods take `&self`: one thread may send while another receives.
///
/// A sender that has to wait keeps reading, so two sides that send large frames at the same time
/// cannot block each other.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    peer: Option<OwnedFd>,
    /// Held while a frame is written; its holder polls both directions.
    writing: Mutex<()>,
    /// Held while the socket is read.
    inbox: Mutex<Inbox>,
    /// The first fault, for good.
    fault: OnceLock<Fault>,
    counters: Counters,
}

impl Link {
    /// Two connected links in this process.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] without descriptors.
    pub fn pair() -> Result<(Self, Self), LinkError> {
        let (here, there) = Self::pair_with_socket()?;
        Ok((here, Self::over(there)))
    }

    /// A link and the socket of its other end, to be handed to another process.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] without descriptors.
    pub fn pair_with_socket() -> Result<(Self, OwnedFd), LinkError> {
        let (here, there) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|errno| LinkError::System("socketpair", errno.into()))?;
        Ok((Self::over(here), there))
    }

    /// A link over a connected Unix stream socket.
    #[must_use]
    pub fn over(socket: OwnedFd) -> Self {
        Self {
            socket,
            peer: None,
            writing: Mutex::default(),
            inbox: Mutex::default(),
            fault: OnceLock::new(),
            counters: Counters::default(),
        }
    }

    /// Also watches the peer's process (pidfd_open(2)): a child of the peer can keep the socket open
    /// after the peer has died.
    #[must_use]
    pub fn watching(mut self, pidfd: OwnedFd) -> Self {
        self.peer = Some(pidfd);
        self
    }

    /// The process that made the socket pair or connected the socket, as the kernel noted it
    /// (`SO_PEERCRED`, unix(7)).
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] where it is no Unix socket.
    #[cfg(target_os = "linux")]
    pub fn peer_pid(&self) -> Result<u32, LinkError> {
        rustix::net::sockopt::socket_peercred(&self.socket)
            .map(|credentials| credentials.pid.as_raw_nonzero().get().unsigned_abs())
            .map_err(|errno| LinkError::System("SO_PEERCRED", errno.into()))
    }

    /// What crossed so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            bytes_sent: read(&self.counters.bytes_sent),
            bytes_received: read(&self.counters.bytes_received),
            frames_sent: read(&self.counters.frames_sent),
            frames_received: read(&self.counters.frames_received),
            handles_sent: read(&self.counters.handles_sent),
            handles_received: read(&self.counters.handles_received),
        }
    }

    /// Ends the link in both directions; whoever waits on it hears so.
    pub fn close(&self) {
        // It fails only where the link is ended already.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    /// Sends one frame, with its descriptors on the first byte.
    ///
    /// The handles are consumed: they are closed here once the kernel has them.
    ///
    /// # Errors
    ///
    /// [`LinkError::OverCap`] before anything is sent; [`LinkError::Deadline`], after which the link
    /// is closed if a part of the frame was already out; [`LinkError::Closed`],
    /// [`LinkError::PeerExited`], [`LinkError::Fault`], [`LinkError::System`].
    pub fn send(
        &self,
        json: &str,
        handles: &[Handle],
        deadline: Option<Instant>,
    ) -> Result<(), LinkError> {
        self.check_fault()?;
        let prefix = frame::prefix(json, handles.len())
            .map_err(|fault| LinkError::OverCap(fault.to_string()))?;
        let total = prefix.len() + json.len();
        let _writing = lock(&self.writing);
        let mut sent = 0;
        while sent < total {
            let parts = if sent < prefix.len() {
                [IoSlice::new(&prefix[sent..]), IoSlice::new(json.as_bytes())]
            } else {
                [IoSlice::new(&json.as_bytes()[sent - prefix.len()..]), IoSlice::new(&[])]
            };
            // All descriptors ride the first byte: any earlier write has taken them along.
            let riding = if sent == 0 { handles } else { &[] };
            match self.write_some(&parts, riding) {
                Ok(bytes) => {
                    add(&self.counters.handles_sent, riding.len());
                    sent += bytes;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if let Err(error) = self.wait_to_write(deadline) {
                        if sent > 0 {
                            // The peer would take what comes next for the rest of this frame.
                            self.close();
                        }
                        return Err(error);
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(self.gone()),
                Err(errno) => {
                    if sent > 0 {
                        self.close();
                    }
                    return Err(LinkError::System("sendmsg", errno.into()));
                }
            }
        }
        add(&self.counters.bytes_sent, total);
        add(&self.counters.frames_sent, 1);
        Ok(())
    }

    fn write_some(&self, parts: &[IoSlice<'_>], handles: &[Handle]) -> Result<usize, Errno> {
        let borrowed: Vec<BorrowedFd<'_>> = handles.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_HANDLES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(Errno::INVAL);
        }
        rustix::net::sendmsg(
            &self.socket,
            parts,
            &mut control,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        )
    }

    /// Waits until the socket takes more, and reads what comes meanwhile.
    fn wait_to_write(&self, deadline: Option<Instant>) -> Result<(), LinkError> {
        loop {
            // Another thread may be reading; then that one keeps the peer going.
            let reading = match self.inbox.try_lock() {
                Ok(inbox) => Some(inbox),
                Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(std::sync::TryLockError::WouldBlock) => None,
            };
            let reading = reading.filter(|inbox| inbox.ready_bytes < READ_AHEAD && !inbox.ended);
            let interest =
                if reading.is_some() { PollFlags::OUT | PollFlags::IN } else { PollFlags::OUT };
            let ready = self.poll(interest, deadline)?;
            if let Some(mut inbox) = reading.filter(|_| ready.socket.intersects(PollFlags::IN)) {
                self.read_some(&mut inbox)?;
            }
            if ready.socket.intersects(PollFlags::OUT | PollFlags::ERR | PollFlags::HUP) {
                return Ok(());
            }
            if ready.peer_exited {
                return Err(LinkError::PeerExited);
            }
        }
    }

    /// The next frame.
    ///
    /// # Errors
    ///
    /// [`LinkError::Closed`], [`LinkError::Cut`], [`LinkError::PeerExited`] once nothing is left to
    /// read, [`LinkError::Deadline`], [`LinkError::Fault`], [`LinkError::System`].
    pub fn receive(&self, deadline: Option<Instant>) -> Result<Frame, LinkError> {
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(frame) = inbox.ready.pop_front() {
                inbox.ready_bytes -= frame.json.len();
                return Ok(frame);
            }
            self.check_fault()?;
            if inbox.ended {
                return Err(self.end_of(&inbox));
            }
            if self.read_some(&mut inbox)? {
                continue;
            }
            let ready = self.poll(PollFlags::IN, deadline)?;
            if ready.socket.is_empty() && ready.peer_exited {
                // It may have written between our read and its death.
                if !self.read_some(&mut inbox)? && inbox.ready.is_empty() && !inbox.ended {
                    return Err(LinkError::PeerExited);
                }
            }
        }
    }

    /// A frame that has already come, without waiting.
    ///
    /// # Errors
    ///
    /// As [`Self::receive`], but never a deadline.
    pub fn try_receive(&self) -> Result<Option<Frame>, LinkError> {
        match self.receive(Some(Instant::now())) {
            Ok(frame) => Ok(Some(frame)),
            Err(LinkError::Deadline) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads what is there, without waiting; whether there was anything (the end counts).
    fn read_some(&self, inbox: &mut Inbox) -> Result<bool, LinkError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_HANDLES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let room = inbox.decoder.room();
        let received = loop {
            match rustix::net::recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(room)],
                &mut control,
                RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
            ) {
                Err(Errno::INTR) => {}
                other => break other,
            }
        };
        let received = match received {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(false),
            // The peer closed with something of ours unread; nothing of its own is left.
            Err(Errno::CONNRESET) => {
                inbox.ended = true;
                return Ok(true);
            }
            Err(errno) => return Err(LinkError::System("recvmsg", errno.into())),
        };
        let mut handles: Vec<Handle> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                handles.extend(descriptors);
            }
        }
        add(&self.counters.bytes_received, received.bytes);
        add(&self.counters.handles_received, handles.len());
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // The kernel dropped descriptors (this process may be at its limit of open files):
            // which ones, nobody can tell any more.
            return Err(self.broken(Fault::new(
                Reason::NoDescriptors,
                format!("descriptors were cut off on receipt, {} came", handles.len()),
            )));
        }
        if received.bytes == 0 {
            inbox.ended = true;
            return Ok(true);
        }
        inbox.decoder.filled(received.bytes, handles);
        loop {
            match inbox.decoder.next_frame() {
                Ok(Some(frame)) => {
                    add(&self.counters.frames_received, 1);
                    inbox.ready_bytes += frame.json.len();
                    inbox.ready.push_back(frame);
                }
                Ok(None) => return Ok(true),
                Err(fault) => return Err(self.broken(fault)),
            }
        }
    }

    fn end_of(&self, inbox: &Inbox) -> LinkError {
        match inbox.decoder.cut() {
            Some((have, want)) => LinkError::Cut { have, want },
            None => LinkError::Closed,
        }
    }

    /// The socket takes nothing more: because of what the peer did, if we know it.
    fn gone(&self) -> LinkError {
        match self.check_fault() {
            Err(error) => error,
            Ok(()) => LinkError::Closed,
        }
    }

    fn check_fault(&self) -> Result<(), LinkError> {
        match self.fault.get() {
            Some(fault) => Err(LinkError::Fault(fault.clone())),
            None => Ok(()),
        }
    }

    fn broken(&self, fault: Fault) -> LinkError {
        let fault = self.fault.get_or_init(|| fault).clone();
        self.close();
        LinkError::Fault(fault)
    }

    fn poll(&self, interest: PollFlags, deadline: Option<Instant>) -> Result<Ready, LinkError> {
        loop {
            let timeout = match deadline {
                None => None,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(LinkError::Deadline);
                    }
                    // Past what a timespec holds is for ever.
                    Timespec::try_from(left).ok()
                }
            };
            let mut waiting = vec![PollFd::new(&self.socket, interest)];
            if let Some(peer) = &self.peer {
                waiting.push(PollFd::new(peer, PollFlags::IN));
            }
            match poll(&mut waiting, timeout.as_ref()) {
                // The next turn sees that the deadline has passed.
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => {
                    return Ok(Ready {
                        socket: waiting[0].revents(),
                        peer_exited: waiting.get(1).is_some_and(|peer| !peer.revents().is_empty()),
                    });
                }
                Err(errno) => return Err(LinkError::System("poll", errno.into())),
            }
        }
    }
}

struct Ready {
    socket: PollFlags,
    peer_exited: bool,
}

/// A lock whose holder panicked guards nothing that is half done here: frames are whole or not there.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
