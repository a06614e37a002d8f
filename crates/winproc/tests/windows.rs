//! Handles, sockets and processes, between two processes.
#![cfg(windows)]
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::windows::io::{AsHandle, AsRawHandle, OwnedHandle};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use winproc::{Job, Process};

const ROLE: &str = "WINPROC_ROLE";

/// This binary again, in the role of the test `acts`.
fn other(role: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "acts", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// What this binary does as the other process.
#[test]
fn acts() {
    match std::env::var(ROLE).as_deref() {
        // Takes its socket, and sends back each handle that it is given.
        Ok("echo") => {
            let mut told = [0; winproc::SHARED];
            std::io::stdin().read_exact(&mut told).unwrap();
            let (mut socket, received) = winproc::take_socket(&told).unwrap();
            let mut number = [0; 8];
            while socket.read_exact(&mut number).is_ok() {
                let handle = received.adopt(u64::from_be_bytes(number)).unwrap();
                let offered = received.offer(handle.as_handle()).unwrap();
                socket.write_all(&offered.to_be_bytes()).unwrap();
            }
        }
        // Starts another, and says its number.
        Ok("parent") => {
            // Once it is told to.
            std::io::stdin().read_to_string(&mut String::new()).unwrap();
            let child = other("sleep");
            let said = std::env::temp_dir().join(format!("winproc-{}", std::process::id()));
            std::fs::write(said, child.id().to_string()).unwrap();
            std::thread::sleep(Duration::from_secs(60));
        }
        Ok("child") => {
            let (pid, _) = winproc::parent().unwrap();
            let mut said = String::new();
            std::io::stdin().read_to_string(&mut said).unwrap();
            std::process::exit(if said == pid.to_string() { 7 } else { 8 });
        }
        Ok(_) => std::thread::sleep(Duration::from_secs(60)),
        Err(_) => {}
    }
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn handles_go_there_and_back() {
    let mut child = other("echo");
    let [mut here, there] = winproc::pair().unwrap();
    let told = winproc::share_socket(&there, child.id()).unwrap();
    child.stdin.take().unwrap().write_all(&told).unwrap();
    // As the other's end counts: ours may go.
    drop(there);
    let process = Process::of(&child).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"some bytes").unwrap();
    let given = process.give(file.as_handle()).unwrap();
    here.write_all(&given.to_be_bytes()).unwrap();
    let mut number = [0; 8];
    here.read_exact(&mut number).unwrap();
    let number = u64::from_be_bytes(number);
    let mut back = std::fs::File::from(process.take(number).unwrap());
    back.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    back.read_to_string(&mut text).unwrap();
    assert_eq!(text, "some bytes");
    kill(child);
    // And a process that has ended has nothing.
    assert!(process.give(file.as_handle()).is_err());
}

/// A number that means a process itself would be every right to it.
#[test]
fn what_is_no_handle_is_not_taken() {
    let child = other("sleep");
    let process = Process::of(&child).unwrap();
    for number in [0, u64::MAX, -2i64 as u64, 1 << 63, 0x7654_3210] {
        let error = process.take(number).unwrap_err();
        assert!(number == 0x7654_3210 || error.kind() == ErrorKind::InvalidData, "{number:x}");
    }
    kill(child);
}

#[test]
fn an_end_is_seen_and_waited_for() {
    let child = other("sleep");
    let process = Process::open(child.id()).unwrap();
    let started = Instant::now();
    assert!(!process.wait(Some(Duration::from_millis(30))).unwrap());
    assert!(started.elapsed() >= Duration::from_millis(30));
    kill(child);
    assert!(process.wait(None).unwrap());
    assert!(process.wait(Some(Duration::ZERO)).unwrap());
}

#[test]
fn a_child_knows_its_parent() {
    let mut child = other("child");
    let me = std::process::id().to_string();
    child.stdin.take().unwrap().write_all(me.as_bytes()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

#[test]
fn the_same_program_is_told_from_another() {
    let child = other("sleep");
    assert!(winproc::runs_this_executable(child.id()).unwrap());
    kill(child);
    assert!(winproc::runs_this_executable(std::process::id()).unwrap());
    // The same bytes under another name are another file.
    let copy = tempfile::tempdir().unwrap();
    let this = std::env::current_exe().unwrap();
    std::fs::copy(&this, copy.path().join("another.exe")).unwrap();
    // The library is there where wine lacks it, and nowhere else.
    let library = this.with_file_name("bcryptprimitives.dll");
    if library.exists() {
        std::fs::copy(library, copy.path().join("bcryptprimitives.dll")).unwrap();
    }
    let child = Command::new(copy.path().join("another.exe"))
        .args(["--exact", "acts"])
        .env(ROLE, "sleep")
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert!(!winproc::runs_this_executable(child.id()).unwrap());
    kill(child);
}

#[test]
fn whoever_is_in_a_job_ends_with_it() {
    let mut child = other("parent");
    let job = Job::new().unwrap();
    job.add(&child).unwrap();
    drop(child.stdin.take());
    let said = std::env::temp_dir().join(format!("winproc-{}", child.id()));
    let end = Instant::now() + Duration::from_secs(20);
    let grandchild = loop {
        match std::fs::read_to_string(&said).ok().and_then(|text| text.parse().ok()) {
            Some(pid) => break pid,
            None => assert!(Instant::now() < end, "it says nothing"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    std::fs::remove_file(said).unwrap();
    let grandchild = Process::open(grandchild).unwrap();
    drop(job);
    assert!(grandchild.wait(Some(Duration::from_secs(10))).unwrap());
    child.wait().unwrap();
}

#[test]
fn what_is_held_is_counted() {
    let before = winproc::handle_count().unwrap();
    let file = tempfile::tempfile().unwrap();
    let more: Vec<OwnedHandle> =
        (0..50).map(|_| file.as_handle().try_clone_to_owned().unwrap()).collect();
    // Wine 8 has no such count.
    let is_wine = std::env::var_os("WINEPREFIX").is_some();
    assert!(winproc::handle_count().unwrap() >= before + 50 || is_wine);
    assert!(more.iter().all(|handle| !handle.as_raw_handle().is_null()));
    assert!(winproc::available_memory().unwrap() > 1 << 20);
}

/// What one process is told of by its socket, another that it starts must not have.
#[test]
fn no_child_inherits_a_connection() {
    let [mut here, there] = winproc::pair().unwrap();
    let child = other("sleep");
    std::thread::sleep(Duration::from_millis(200));
    drop(there);
    here.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // Were it open in the child, no end would come.
    assert_eq!(here.read(&mut [0; 1]).unwrap(), 0);
    kill(child);
}
