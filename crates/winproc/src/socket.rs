//! A socket on its way to another process.
#![expect(unsafe_code, reason = "duplicating sockets has no safe form in std")]

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::windows::io::{AsRawSocket, AsSocket, FromRawSocket, OwnedSocket};
use std::time::{Duration, Instant};

use windows_sys::Win32::Foundation::{HANDLE, HANDLE_FLAG_INHERIT, SetHandleInformation};
use windows_sys::Win32::Networking::WinSock::{
    FROM_PROTOCOL_INFO, INVALID_SOCKET, WSA_FLAG_NO_HANDLE_INHERIT, WSA_FLAG_OVERLAPPED, WSADATA,
    WSADuplicateSocketW, WSAPROTOCOL_INFOW, WSASocketW, WSAStartup,
};

use crate::process::Received;
use crate::succeeded;

/// How long a connection within this machine may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of what [`share_socket`] says of a socket.
pub const SHARED: usize = size_of::<WSAPROTOCOL_INFOW>();

/// Two sockets of this process that are connected with each other, over the loopback device; nobody listens any more
/// when they are made, and whoever else connected meanwhile is turned away.
///
/// # Errors
///
/// What making sockets gives.
pub fn pair() -> io::Result<[TcpStream; 2]> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let here = TcpStream::connect(listener.local_addr()?)?;
    let expected = here.local_addr()?;
    // Whoever else has the port may have been connected to instead: then nobody comes here.
    listener.set_nonblocking(true)?;
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        match listener.accept() {
            Ok((there, from)) if from == expected => {
                // It has what the listener has of this.
                there.set_nonblocking(false)?;
                for socket in [&here, &there] {
                    keep_from_children(socket)?;
                    // Frames are written whole, and answered.
                    socket.set_nodelay(true)?;
                }
                return Ok([here, there]);
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("a connection of this process with itself did not arrive"))
}

/// Has no process inherit a socket: those that are accepted are not made for that by std.
fn keep_from_children(socket: &TcpStream) -> io::Result<()> {
    let handle = socket.as_raw_socket() as usize as HANDLE;
    // SAFETY: N1: borrowed; a socket is a handle, as this call takes it.
    succeeded(unsafe { SetHandleInformation(handle, HANDLE_FLAG_INHERIT, 0) })
}

/// Makes a socket known to a process, once: what has to be told it. Afterwards ours may be closed.
///
/// # Errors
///
/// What WSADuplicateSocketW gives.
pub fn share_socket(socket: &impl AsSocket, pid: u32) -> io::Result<[u8; SHARED]> {
    let mut info = WSAPROTOCOL_INFOW::default();
    // SAFETY: N1: the socket is borrowed, and `info` a place for the answer.
    let answer = unsafe {
        WSADuplicateSocketW(socket.as_socket().as_raw_socket() as usize, pid, &raw mut info)
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a structure of numbers and arrays of them, all of it written: `default` wrote every byte, and it has
    // no padding (its size is the sum of its members).
    Ok(unsafe { std::mem::transmute::<WSAPROTOCOL_INFOW, [u8; SHARED]>(info) })
}

/// The socket that [`share_socket`] made known to this process, told by whoever started it.
///
/// # Errors
///
/// What WSASocketW gives: for what is no socket of this process, among others.
pub fn take_socket(told: &[u8; SHARED]) -> io::Result<(TcpStream, Received)> {
    start()?;
    // SAFETY: a structure of numbers and arrays of them: any bytes are one.
    let info = unsafe { std::mem::transmute_copy::<[u8; SHARED], WSAPROTOCOL_INFOW>(told) };
    // SAFETY: N1: the structure is read alone. Winsock sees for itself whether it means a socket.
    let socket = unsafe {
        WSASocketW(
            FROM_PROTOCOL_INFO,
            FROM_PROTOCOL_INFO,
            FROM_PROTOCOL_INFO,
            &raw const info,
            0,
            WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT,
        )
    };
    if socket == INVALID_SOCKET {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: N2: the call gave it, and it is a socket.
    let socket = unsafe { OwnedSocket::from_raw_socket(socket as u64) };
    Ok((socket.into(), Received(())))
}

/// Winsock wants to be begun with, as often as one likes.
fn start() -> io::Result<()> {
    let mut data = WSADATA::default();
    // SAFETY: N1: a version, and a place for what is there.
    match unsafe { WSAStartup(0x0202, &raw mut data) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
