//! A socket on its way to another process.
#![expect(unsafe_code, reason = "duplicating sockets has no safe form in std")]

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::windows::io::{AsRawSocket, AsSocket, FromRawSocket, OwnedSocket};

use windows_sys::Win32::Networking::WinSock::{
    FROM_PROTOCOL_INFO, INVALID_SOCKET, WSA_FLAG_NO_HANDLE_INHERIT, WSA_FLAG_OVERLAPPED, WSADATA,
    WSADuplicateSocketW, WSAPROTOCOL_INFOW, WSASocketW, WSAStartup,
};

use crate::process::Received;

/// Bytes of what [`share_socket`] says of a socket.
pub const SHARED: usize = size_of::<WSAPROTOCOL_INFOW>();

/// Two sockets of this process that are connected with each other, over the loopback device; nobody listens any more
/// when they are made, and whoever else connected meanwhile is turned away.
///
/// # Errors
///
/// What making sockets gives.
pub fn pair() -> io::Result<[(TcpStream, Received); 2]> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let here = TcpStream::connect(listener.local_addr()?)?;
    let expected = here.local_addr()?;
    // As many strangers as there are places in the queue, and a few.
    for _ in 0..1000 {
        let (there, from) = listener.accept()?;
        if from == expected {
            for socket in [&here, &there] {
                // Frames are written whole, and answered.
                socket.set_nodelay(true)?;
            }
            return Ok([(here, Received(())), (there, Received(()))]);
        }
    }
    Err(io::Error::other("strangers connect faster than this process"))
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
