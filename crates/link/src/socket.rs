//! Frames over a stream, whatever the platform has for one.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rung::{Fault, Handle, Reason};

use crate::error::LinkError;
use crate::frame::{self, Decoder, Frame};
use crate::sys::{self, NAME, Ready, Socket, Stream};

/// Frames read while this side was busy sending are kept up to so many bytes; past that the peer
/// has to wait.
const READ_AHEAD: usize = 128 << 20;

/// What a frame costs to keep besides its text, and what each of its descriptors counts for: a
/// process has far fewer descriptors than bytes.
const FRAME_COST: usize = 512;
const HANDLE_COST: usize = 256 << 10;

fn cost(frame: &Frame) -> usize {
    frame.json.len() + FRAME_COST + HANDLE_COST * frame.handles.len()
}

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
    /// By [`cost`].
    ready_cost: usize,
    ended: bool,
    /// How often it is not worth a look before waiting, since the last look found nothing.
    unlooked: u32,
}

impl Inbox {
    /// Whether something may be there already: where that was not so lately, waiting at once saves a system
    /// call. Now and then it is worth a look all the same.
    fn is_worth_a_look(&mut self) -> bool {
        let worth = self.unlooked == 0;
        self.unlooked = self.unlooked.saturating_sub(1);
        worth
    }

    fn looked(&mut self, came: bool) {
        self.unlooked = if came { 0 } else { 15 };
    }
}

/// Whether somebody writes, and what is left of a frame that was begun.
#[derive(Debug, Default)]
struct Writing {
    busy: bool,
    /// Threads that wait for their turn: waking nobody is a system call too.
    waiting: usize,
    rest: Vec<u8>,
}

/// The turn to write, given back when dropped.
struct Turn<'a> {
    link: &'a Link,
    rest: Vec<u8>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut writing = lock(&self.link.writing);
        writing.busy = false;
        writing.rest = std::mem::take(&mut self.rest);
        if writing.waiting > 0 {
            self.link.written.notify_one();
        }
    }
}

/// A connected link. All methods take `&self`: one thread may send while another receives.
///
/// A sender that has to wait keeps reading, so two sides that send large frames at the same time
/// cannot block each other.
#[derive(Debug)]
pub struct Link {
    stream: Stream,
    peer: Option<Socket>,
    /// Whose turn it is to write; its holder polls both directions.
    writing: Mutex<Writing>,
    written: Condvar,
    /// Held while the socket is read.
    inbox: Mutex<Inbox>,
    /// Once this side has closed: whether the peer had ended the stream before.
    ended_first: OnceLock<bool>,
    /// The first fault, for good.
    fault: OnceLock<Fault>,
    /// How long to look before sleeping, in nanoseconds.
    spin: AtomicU64,
    counters: Counters,
}

impl Link {
    /// Two connected links in this process.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] without descriptors.
    pub fn pair() -> Result<(Self, Self), LinkError> {
        let (here, there) =
            Stream::pair().map_err(|error| LinkError::System("socketpair", error))?;
        Ok((Self::of(here), Self::of(there)))
    }

    /// A link and the socket of its other end, to be handed to another process.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] without descriptors.
    pub fn pair_with_socket() -> Result<(Self, Socket), LinkError> {
        let (here, there) =
            Stream::pair().map_err(|error| LinkError::System("socketpair", error))?;
        Ok((Self::of(here.leaving()), there.into_socket()))
    }

    /// A link over a connected stream socket: of Unix, or on Windows of TCP.
    #[must_use]
    pub fn over(socket: Socket) -> Self {
        Self::of(Stream::over(socket))
    }

    fn of(stream: Stream) -> Self {
        Self {
            stream,
            peer: None,
            writing: Mutex::default(),
            written: Condvar::new(),
            inbox: Mutex::default(),
            ended_first: OnceLock::new(),
            fault: OnceLock::new(),
            spin: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    /// Also watches the peer's process: a child of the peer can keep the socket open after the peer has died.
    ///
    /// What is given can be read from once the process has ended: on Linux a pidfd (pidfd_open(2)), elsewhere what
    /// `worker` makes for it.
    #[must_use]
    pub fn watching(mut self, exit: Socket) -> Self {
        self.peer = Some(exit);
        self
    }

    /// Moves handles to a process that this one started, and takes them from it.
    #[cfg(windows)]
    #[must_use]
    pub fn moving_handles(mut self, process: winproc::Process) -> Self {
        self.stream = self.stream.moving(process);
        self
    }

    /// Has handles come from the process that started this one, and be taken by it.
    #[cfg(windows)]
    #[must_use]
    pub fn receiving_handles(mut self, received: winproc::Received) -> Self {
        self.stream = self.stream.coming(received);
        self
    }

    /// Has [`Self::receive`] look again and again for so long before it sleeps. It takes a whole core for
    /// that time, and saves the time that waking up takes.
    pub fn spin_for(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.spin.store(nanos, Ordering::Relaxed);
    }

    /// Takes no next frame larger than this.
    pub fn limit_next_frame(&self, bytes: usize) {
        lock(&self.inbox).decoder.limit_next(bytes);
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
        // Afterwards nobody can tell the peer's end of the stream from ours.
        let _ = self.ended_first.set(self.has_ended());
        self.stream.shut(true);
    }

    /// Ends the link in this direction: the peer sees the end of the stream, and may still send.
    pub fn close_for_sending(&self) {
        self.stream.shut(false);
    }

    /// Whether the peer has ended the stream, read to its end or not, before this side did. Waits for
    /// nothing and nobody.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        if let Some(ended) = self.ended_first.get() {
            return *ended;
        }
        self.stream.has_ended()
    }

    /// Sends one frame, with its descriptors on the first byte.
    ///
    /// The kernel duplicates the handles; the caller's may be dropped afterwards.
    ///
    /// # Errors
    ///
    /// [`LinkError::OverCap`] and [`LinkError::Deadline`] where nothing was sent,
    /// [`LinkError::Begun`] where the rest of the frame is still to go, [`LinkError::Closed`],
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
        let mut turn = self.turn(deadline)?;
        let rest = std::mem::take(&mut turn.rest);
        if let Err((sent, error)) = self.write_all(&[], &rest, &[], deadline) {
            turn.rest = rest[sent..].to_vec();
            return Err(error);
        }
        let told = self.stream.told(handles).map_err(|error| self.unnamed(error))?;
        let joined;
        let first = if told.is_empty() {
            &prefix[..]
        } else {
            joined = [&prefix, &told[..]].concat();
            &joined
        };
        match self.write_all(first, json.as_bytes(), handles, deadline) {
            Ok(()) => {}
            Err((0, error)) => {
                self.stream.take_back(&told);
                return Err(error);
            }
            Err((sent, LinkError::Deadline)) => {
                let whole = [first, json.as_bytes()].concat();
                turn.rest = whole[sent..].to_vec();
                return Err(LinkError::Begun);
            }
            Err((_, error)) => {
                // The peer would take what comes next for the rest of this frame.
                self.close();
                return Err(error);
            }
        }
        add(&self.counters.frames_sent, 1);
        Ok(())
    }

    /// Handles cannot be named to a process that has ended.
    fn unnamed(&self, error: io::Error) -> LinkError {
        let ready = self.stream.wait(self.peer.as_ref(), false, true, Some(Duration::ZERO));
        match ready {
            Ok(Ready { peer_exited: true, .. }) => LinkError::PeerExited,
            _ => LinkError::System("naming handles", error),
        }
    }

    /// Waits for the turn to write.
    fn turn(&self, deadline: Option<Instant>) -> Result<Turn<'_>, LinkError> {
        let mut writing = lock(&self.writing);
        while writing.busy {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(LinkError::Deadline);
            }
            writing.waiting += 1;
            writing = match left {
                None => self.written.wait(writing).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    let waited = self.written.wait_timeout(writing, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            writing.waiting -= 1;
        }
        writing.busy = true;
        let rest = std::mem::take(&mut writing.rest);
        Ok(Turn { link: self, rest })
    }

    /// Writes two parts; how much of them was written, where not all was.
    fn write_all(
        &self,
        first: &[u8],
        second: &[u8],
        handles: &[Handle],
        deadline: Option<Instant>,
    ) -> Result<(), (usize, LinkError)> {
        let mut sent = 0;
        while sent < first.len() + second.len() {
            let parts = match sent.checked_sub(first.len()) {
                None => [IoSlice::new(&first[sent..]), IoSlice::new(second)],
                Some(sent) => [IoSlice::new(&second[sent..]), IoSlice::new(&[])],
            };
            // All descriptors ride the first byte: any earlier write has taken them along.
            let riding = if sent == 0 { handles } else { &[] };
            match self.stream.send(&parts, riding) {
                Ok(bytes) => {
                    add(&self.counters.handles_sent, riding.len());
                    add(&self.counters.bytes_sent, bytes);
                    sent += bytes;
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => {
                        self.wait_to_write(deadline).map_err(|error| (sent, error))?;
                    }
                    _ if sys::is_gone(&error) => return Err((sent, self.gone())),
                    _ => return Err((sent, LinkError::System("sending", error))),
                },
            }
        }
        Ok(())
    }

    /// Waits until the socket takes more, and reads what comes meanwhile, so that a peer that does
    /// the same is not blocked by us. Where another thread reads, that one does.
    fn wait_to_write(&self, deadline: Option<Instant>) -> Result<(), LinkError> {
        loop {
            let may_read =
                self.try_inbox().is_some_and(|inbox| inbox.ready_cost < READ_AHEAD && !inbox.ended);
            // The inbox is not held meanwhile: whoever wants to read can.
            let ready = self.wait(true, may_read, deadline)?;
            if may_read
                && ready.readable
                && let Some(mut inbox) = self.try_inbox()
            {
                self.read_some(&mut inbox)?;
            }
            if ready.writable {
                return Ok(());
            }
            if ready.peer_exited {
                return Err(LinkError::PeerExited);
            }
        }
    }

    fn try_inbox(&self) -> Option<MutexGuard<'_, Inbox>> {
        match self.inbox.try_lock() {
            Ok(inbox) => Some(inbox),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
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
        let mut waited = false;
        loop {
            if let Some(frame) = inbox.ready.pop_front() {
                inbox.ready_cost -= cost(&frame);
                return Ok(frame);
            }
            self.check_fault()?;
            if inbox.ended {
                return Err(self.end_of(&inbox));
            }
            let spins = self.spin.load(Ordering::Relaxed) > 0;
            // Whoever has no time to wait gets what is there.
            let hurries = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            let looks = waited || spins || hurries || inbox.is_worth_a_look();
            let came = looks && self.read_some(&mut inbox)?;
            if looks && !waited {
                inbox.looked(came);
            }
            if came {
                waited = false;
                // A peer that sends one byte at a time does not put the deadline off.
                if inbox.ready.is_empty()
                    && !inbox.ended
                    && deadline.is_some_and(|deadline| Instant::now() >= deadline)
                {
                    return Err(LinkError::Deadline);
                }
                continue;
            }
            if self.spin(deadline, &mut inbox)? {
                continue;
            }
            let ready = self.wait(false, true, deadline)?;
            waited = true;
            if !ready.readable && ready.peer_exited {
                // It may have written between our read and its death.
                if let Some(last_words) = Stream::LAST_WORDS {
                    let until = Instant::now() + last_words;
                    while Instant::now() < until
                        && self
                            .stream
                            .wait(None, false, true, Some(last_words))
                            .is_ok_and(|ready| !ready.readable)
                    {}
                }
                if !self.read_some(&mut inbox)? && inbox.ready.is_empty() && !inbox.ended {
                    return Err(LinkError::PeerExited);
                }
            }
        }
    }

    /// Looks again and again for as long as this link spins; whether something came.
    fn spin(&self, deadline: Option<Instant>, inbox: &mut Inbox) -> Result<bool, LinkError> {
        let time = self.spin.load(Ordering::Relaxed);
        if time == 0 {
            return Ok(false);
        }
        let until = Instant::now().checked_add(Duration::from_nanos(time));
        let until = until.into_iter().chain(deadline).min();
        while until.is_none_or(|until| Instant::now() < until) {
            if self.read_some(inbox)? {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        Ok(false)
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
        let room = inbox.decoder.room();
        let received = loop {
            match self.stream.receive(room) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        let received = match received {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // The peer closed with something of ours unread; nothing of its own is left.
            Err(error) if sys::is_gone(&error) => {
                inbox.ended = true;
                return Ok(true);
            }
            Err(error) => return Err(LinkError::System("receiving", error)),
        };
        add(&self.counters.bytes_received, received.bytes);
        add(&self.counters.handles_received, received.handles.len());
        if received.truncated {
            // The kernel dropped descriptors (this process may be at its limit of open files):
            // which ones, nobody can tell any more.
            return Err(self.broken(Fault::new(
                Reason::NoDescriptors,
                format!("descriptors were cut off on receipt, {} came", received.handles.len()),
            )));
        }
        if received.bytes == 0 {
            inbox.ended = true;
            return Ok(true);
        }
        inbox.decoder.filled(received.bytes, received.handles);
        loop {
            match inbox.decoder.next_frame_by(|name| self.stream.named(name)) {
                Ok(Some(frame)) => {
                    add(&self.counters.frames_received, 1);
                    if NAME != 0 {
                        add(&self.counters.handles_received, frame.handles.len());
                    }
                    inbox.ready_cost += cost(&frame);
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

    /// Waits until there is something to do.
    fn wait(&self, write: bool, read: bool, deadline: Option<Instant>) -> Result<Ready, LinkError> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(LinkError::Deadline);
            }
            let ready = self.stream.wait(self.peer.as_ref(), write, read, left);
            let ready = ready.map_err(|error| LinkError::System("poll", error))?;
            // Otherwise a signal came, or the next turn sees that the deadline has passed.
            if ready.readable || ready.writable || ready.peer_exited {
                return Ok(ready);
            }
            if self.ended_first.get().is_some() {
                // This side has closed it, which ends every call on it.
                return Ok(Ready { readable: true, writable: true, peer_exited: false });
            }
        }
    }
}

/// A lock whose holder panicked guards nothing that is half done here: frames are whole or not there.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(unix)]
impl std::os::fd::AsFd for Link {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(windows)]
impl std::os::windows::io::AsSocket for Link {
    fn as_socket(&self) -> std::os::windows::io::BorrowedSocket<'_> {
        self.stream.as_socket()
    }
}
