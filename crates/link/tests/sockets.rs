//! Frames over real sockets: order, ends, deadlines, faults, dead peers.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::io::Write;
#[cfg(windows)]
use std::net::TcpStream as Raw;
#[cfg(unix)]
use std::os::unix::net::UnixStream as Raw;
use std::time::{Duration, Instant};

use link::{Link, LinkError};
use rung::{Handle, Reason};

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(10))
}

fn raw() -> (Link, Raw) {
    let (link, socket) = Link::pair_with_socket().unwrap();
    (link, socket.into())
}

fn null() -> Handle {
    let null = if cfg!(windows) { "NUL" } else { "/dev/null" };
    std::fs::File::open(null).unwrap().into()
}

#[test]
fn frames_and_descriptors_arrive_in_order() {
    let (here, there) = Link::pair().unwrap();
    here.send("1", &[], None).unwrap();
    here.send("2", &[null(), null()], None).unwrap();
    here.send("3", &[], None).unwrap();
    for (json, handles) in [("1", 0), ("2", 2), ("3", 0)] {
        let frame = there.receive(soon()).unwrap();
        assert_eq!((frame.json.as_str(), frame.handles.len()), (json, handles));
    }
    assert!(there.try_receive().unwrap().is_none());
    assert_eq!(here.traffic().bytes_sent, there.traffic().bytes_received);
    assert_eq!(there.traffic().handles_received, 2);
}

#[test]
fn two_sides_that_send_large_frames_do_not_block_each_other() {
    let (here, there) = Link::pair().unwrap();
    let large = "x".repeat(8 << 20);
    std::thread::scope(|scope| {
        for link in [&here, &there] {
            let large = &large;
            scope.spawn(move || {
                link.send(large, &[null()], soon()).unwrap();
                link.send("end", &[], soon()).unwrap();
                assert_eq!(link.receive(soon()).unwrap().json, *large);
                assert_eq!(link.receive(soon()).unwrap().json, "end");
            });
        }
    });
}

#[test]
fn the_end_of_the_stream_is_told_from_a_cut_frame() {
    let (link, peer) = raw();
    drop(peer);
    assert!(matches!(link.receive(soon()), Err(LinkError::Closed)));
    let (link, mut peer) = raw();
    peer.write_all(&[0, 0, 0, 9, 0, 0, b'{']).unwrap();
    drop(peer);
    let error = link.receive(soon()).unwrap_err();
    assert!(matches!(error, LinkError::Cut { have: 7, want: 15 }), "{error}");
    // Over TCP nobody can know before something was sent.
    if cfg!(windows) {
        let _ = link.send("1", &[], soon());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(matches!(link.send("1", &[], soon()), Err(LinkError::Closed)));
}

#[test]
fn a_silent_peer_runs_into_the_deadline() {
    let (here, there) = Link::pair().unwrap();
    let deadline = Instant::now() + Duration::from_millis(30);
    assert!(here.receive(Some(deadline)).unwrap_err().is_deadline());
    // Nobody reads: the socket fills up, and the part of a frame that is out ends the link.
    let large = "x".repeat(8 << 20);
    let deadline = Instant::now() + Duration::from_millis(30);
    let error = here.send(&large, &[null()], Some(deadline)).unwrap_err();
    assert!(matches!(error, LinkError::Begun), "{error}");
    // While the rest waits, nothing else is sent before it.
    let deadline = Instant::now() + Duration::from_millis(30);
    let error = here.send("2", &[], Some(deadline)).unwrap_err();
    assert!(matches!(error, LinkError::Deadline), "{error}");
    std::thread::scope(|scope| {
        scope.spawn(|| here.send("3", &[], soon()).unwrap());
        let late = there.receive(soon()).unwrap();
        assert_eq!((late.json, late.handles.len()), (large, 1));
        assert_eq!(there.receive(soon()).unwrap().json, "3");
    });
}

/// Nobody waits for ever behind a writer that is stuck, and a drip of bytes puts no deadline off.
#[test]
fn deadlines_hold_behind_other_threads_and_slow_peers() {
    let (here, there) = Link::pair().unwrap();
    let large = "x".repeat(8 << 20);
    std::thread::scope(|scope| {
        scope.spawn(|| here.send(&large, &[], soon()).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let deadline = Instant::now() + Duration::from_millis(50);
        assert!(here.send("2", &[], Some(deadline)).unwrap_err().is_deadline());
        let deadline = Instant::now() + Duration::from_millis(50);
        assert!(here.receive(Some(deadline)).unwrap_err().is_deadline());
        assert_eq!(there.receive(soon()).unwrap().json, large);
    });
    let (link, mut peer) = raw();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            peer.write_all(&[0, 1, 0, 0, 0, 0]).unwrap();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                peer.write_all(b" ").unwrap();
            }
        });
        let deadline = Instant::now() + Duration::from_millis(50);
        assert!(link.receive(Some(deadline)).unwrap_err().is_deadline());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_fault_closes_the_link_and_is_remembered() {
    let (link, mut peer) = raw();
    peer.write_all(&[0xff; 6]).unwrap();
    for _ in 0..2 {
        let Err(LinkError::Fault(fault)) = link.receive(soon()) else { panic!("no fault") };
        assert_eq!(fault.reason(), Reason::OverCap);
    }
    assert!(matches!(link.send("1", &[], None), Err(LinkError::Fault(_))));
}

#[test]
fn what_is_over_a_cap_is_not_sent() {
    let (here, there) = Link::pair().unwrap();
    let many: Vec<Handle> = (0..254).map(|_| null()).collect();
    assert!(matches!(here.send("1", &many, None), Err(LinkError::OverCap(_))));
    assert!(matches!(here.send("", &[], None), Err(LinkError::OverCap(_))));
    here.send("2", &many[..253], None).unwrap();
    assert_eq!(there.receive(soon()).unwrap().handles.len(), 253);
}

#[cfg(target_os = "linux")]
#[test]
fn a_dead_peer_is_noticed_though_its_socket_lives_on() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let (link, socket) = Link::pair_with_socket().unwrap();
    let link = link.watching(pidfd);
    let other = Link::over(socket);
    other.send("last words", &[], None).unwrap();
    child.kill().unwrap();
    assert_eq!(link.receive(soon()).unwrap().json, "last words");
    assert!(matches!(link.receive(soon()), Err(LinkError::PeerExited)));
    child.wait().unwrap();
}

/// Whatever was opened on one side is the same on the other, and nobody has it twice.
#[test]
fn what_arrives_is_what_was_sent() {
    use std::io::{Read, Seek, SeekFrom};
    let (here, there) = Link::pair().unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"some bytes").unwrap();
    here.send("1", &[file.into()], None).unwrap();
    let handle = there.receive(soon()).unwrap().handles.pop_front().unwrap();
    there.send("2", &[handle], None).unwrap();
    let mut file = std::fs::File::from(here.receive(soon()).unwrap().handles.pop_front().unwrap());
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "some bytes");
}
