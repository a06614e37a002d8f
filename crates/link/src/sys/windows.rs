//! A loopback TCP connection, made within one process and handed over; handles are moved by the process that started
//! the other, and their numbers go in the frame (`winproc`).

use std::collections::HashMap;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::windows::io::{AsHandle, AsSocket, BorrowedSocket, OwnedSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rung::{Fault, Handle, Reason};
use winproc::{Process, Received};

use super::{Came, Ready};

/// A connected socket; or what can be read once a process has ended.
pub type Socket = OwnedSocket;

/// Bytes of a handle's name in a frame: its number, big endian.
pub(crate) const NAME: usize = size_of::<u64>();

/// How handles get from here to there and back.
#[derive(Debug)]
enum Handles {
    /// Not at all.
    Stay,
    /// This process gives its own, and takes the other's.
    Moved(Process),
    /// The other process does both.
    Come(Received),
    /// Both ends are in this process: what is on its way, by a number of its own.
    Here(Arc<Mutex<OnTheirWay>>),
}

#[derive(Debug, Default)]
struct OnTheirWay {
    next: u64,
    handles: HashMap<u64, Handle>,
}

#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    handles: Handles,
}

impl Stream {
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let sockets = winproc::pair()?;
        let handles: Arc<Mutex<OnTheirWay>> = Arc::default();
        let [here, there] = sockets.map(|socket| {
            let stream = Self::over(socket.into());
            Self { handles: Handles::Here(Arc::clone(&handles)), ..stream }
        });
        Ok((here, there))
    }

    pub(crate) fn over(socket: Socket) -> Self {
        let socket = TcpStream::from(socket);
        // Where it cannot be told, calls wait, and deadlines are not kept; nothing else goes wrong.
        let _ = socket.set_nonblocking(true);
        Self { socket, handles: Handles::Stay }
    }

    /// The other end is for another process: nothing of what is in this one is named to it.
    pub(crate) fn leaving(mut self) -> Self {
        self.handles = Handles::Stay;
        self
    }

    /// What was written before its writer ended is on its way for a moment yet.
    pub(crate) const LAST_WORDS: Option<Duration> = Some(Duration::from_secs(1));

    pub(crate) fn into_socket(self) -> Socket {
        self.socket.into()
    }

    pub(crate) fn moving(mut self, process: Process) -> Self {
        self.handles = Handles::Moved(process);
        self
    }

    pub(crate) fn coming(mut self, received: Received) -> Self {
        self.handles = Handles::Come(received);
        self
    }

    /// The numbers by which the other side will have them.
    pub(crate) fn told(&self, handles: &[Handle]) -> io::Result<Vec<u8>> {
        let mut told = Vec::with_capacity(handles.len() * NAME);
        for handle in handles {
            let number = match &self.handles {
                Handles::Stay => Err(io::ErrorKind::Unsupported.into()),
                Handles::Moved(process) => process.give(handle.as_handle()),
                Handles::Come(received) => received.offer(handle.as_handle()),
                Handles::Here(on_their_way) => handle.try_clone().map(|handle| {
                    let mut on_their_way = lock(on_their_way);
                    on_their_way.next += 1;
                    let number = on_their_way.next;
                    on_their_way.handles.insert(number, handle);
                    number
                }),
            };
            match number {
                Ok(number) => told.extend_from_slice(&number.to_be_bytes()),
                Err(error) => {
                    self.take_back(&told);
                    return Err(error);
                }
            }
        }
        Ok(told)
    }

    /// Nobody was told of these after all.
    pub(crate) fn take_back(&self, told: &[u8]) {
        for number in told.chunks_exact(NAME).filter_map(|name| name.try_into().ok()) {
            let number = u64::from_be_bytes(number);
            drop(match &self.handles {
                Handles::Stay => return,
                Handles::Moved(process) => process.take(number),
                Handles::Come(received) => received.adopt(number),
                Handles::Here(on_their_way) => taken(on_their_way, number),
            });
        }
    }

    /// The handle that the other side means.
    pub(crate) fn named(&self, name: u64) -> Result<Handle, Fault> {
        let taken = match &self.handles {
            Handles::Stay => Err(io::ErrorKind::Unsupported.into()),
            Handles::Moved(process) => process.take(name),
            Handles::Come(received) => received.adopt(name),
            Handles::Here(on_their_way) => taken(on_their_way, name),
        };
        taken.map_err(|error| Fault::new(Reason::WrongHandles, error.to_string()))
    }

    pub(crate) fn send(&self, parts: &[IoSlice<'_>], _riding: &[Handle]) -> io::Result<usize> {
        (&self.socket).write_vectored(parts)
    }

    pub(crate) fn receive(&self, room: &mut [u8]) -> io::Result<Came> {
        let bytes = (&self.socket).read(room)?;
        Ok(Came { bytes, handles: Vec::new(), truncated: false })
    }

    pub(crate) fn shut(&self, for_receiving_too: bool) {
        let how = if for_receiving_too { Shutdown::Both } else { Shutdown::Write };
        // It fails only where the stream is over already.
        let _ = self.socket.shutdown(how);
    }

    /// Where it is not known because something is left to be read, it counts as not ended.
    pub(crate) fn has_ended(&self) -> bool {
        match self.socket.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => super::is_gone(&error),
        }
    }

    pub(crate) fn wait(
        &self,
        peer: Option<&Socket>,
        write: bool,
        read: bool,
        limit: Option<Duration>,
    ) -> io::Result<Ready> {
        super::wait(&self.socket, peer.map(AsSocket::as_socket), write, read, limit)
    }
}

fn lock(on_their_way: &Mutex<OnTheirWay>) -> MutexGuard<'_, OnTheirWay> {
    on_their_way.lock().unwrap_or_else(PoisonError::into_inner)
}

fn taken(on_their_way: &Mutex<OnTheirWay>, number: u64) -> io::Result<Handle> {
    lock(on_their_way).handles.remove(&number).ok_or_else(|| io::ErrorKind::NotFound.into())
}

impl AsSocket for Stream {
    fn as_socket(&self) -> BorrowedSocket<'_> {
        self.socket.as_socket()
    }
}
