//! Messages with handles, over a connection of this machine: the process that started the other one moves all handles,
//! and their numbers go along (DuplicateHandle).

use std::collections::VecDeque;
use std::io::{Read, Write, stdin};
use std::net::TcpStream;
use std::os::windows::io::{AsHandle, OwnedHandle};
use std::process::{Child, Command, Stdio};

use winproc::{Process, Received};

use crate::Outcome;

enum Handles {
    Moved(Process),
    Come(Received),
}

pub(crate) struct Socket(TcpStream, Handles);

impl Socket {
    /// To a new process, which is told of the other end by its standard input.
    pub(crate) fn to(command: &mut Command) -> Outcome<(Self, Child)> {
        let [ours, theirs] = winproc::pair()?;
        let mut child = command.stdin(Stdio::piped()).spawn()?;
        let told = winproc::share_socket(&theirs, child.id())?;
        child.stdin.take().ok_or("no standard input")?.write_all(&told)?;
        let process = Process::of(&child)?;
        Ok((Self(ours, Handles::Moved(process)), child))
    }

    pub(crate) fn of_parent() -> Outcome<Self> {
        let mut told = [0; winproc::SHARED];
        stdin().read_exact(&mut told)?;
        let (socket, received) = winproc::take_socket(&told)?;
        Ok(Self(socket, Handles::Come(received)))
    }

    /// Lengths, numbers of handles, and bytes.
    pub(crate) fn send(&self, bytes: &[u8], handles: &[OwnedHandle]) -> Outcome {
        let mut all = u32::try_from(bytes.len())?.to_be_bytes().to_vec();
        all.extend(u32::try_from(handles.len())?.to_be_bytes());
        for handle in handles {
            let number = match &self.1 {
                Handles::Moved(process) => process.give(handle.as_handle())?,
                Handles::Come(received) => received.offer(handle.as_handle())?,
            };
            all.extend(number.to_be_bytes());
        }
        all.extend(bytes);
        Ok((&self.0).write_all(&all)?)
    }

    pub(crate) fn receive(&self) -> Outcome<(Vec<u8>, VecDeque<OwnedHandle>)> {
        let mut socket = &self.0;
        let (mut length, mut count) = ([0; 4], [0; 4]);
        socket.read_exact(&mut length)?;
        socket.read_exact(&mut count)?;
        let mut handles = VecDeque::new();
        for _ in 0..u32::from_be_bytes(count) {
            let mut number = [0; 8];
            socket.read_exact(&mut number)?;
            let number = u64::from_be_bytes(number);
            handles.push_back(match &self.1 {
                Handles::Moved(process) => process.take(number)?,
                Handles::Come(received) => received.adopt(number)?,
            });
        }
        let mut bytes = vec![0; u32::from_be_bytes(length) as usize];
        socket.read_exact(&mut bytes)?;
        Ok((bytes, handles))
    }
}
