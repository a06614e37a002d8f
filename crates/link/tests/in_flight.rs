//! Descriptors that were sent and not received yet count against their sender's user (unix(7), `ETOOMANYREFS`), unless
//! it is root. The one test of its binary, since the limit is the process's.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use link::{Link, LinkError};
use rung::Handle;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(20))
}

fn handles(count: usize) -> Vec<Handle> {
    let null = File::open("/dev/null").unwrap();
    (0..count).map(|_| null.try_clone().unwrap().into()).collect()
}

#[test]
#[ignore = "needs root, to become somebody who is not"]
fn too_many_descriptors_on_their_way_are_an_error_until_some_arrive() {
    assert!(rustix::process::geteuid().is_root(), "run this as root");
    let program = File::open(std::env::current_exe().unwrap()).unwrap();
    let output = std::process::Command::new("/proc/self/fd/0")
        .args(["--exact", "sends_more_than_arrive", "--ignored", "--nocapture"])
        .stdin(program)
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// The other process of the test above.
#[test]
#[ignore = "needs another user: started by the test above"]
fn sends_more_than_arrive() {
    assert!(!rustix::process::geteuid().is_root(), "started by the test above");
    let limit = Rlimit { current: Some(40), maximum: getrlimit(Resource::Nofile).maximum };
    setrlimit(Resource::Nofile, limit).unwrap();
    let (here, there) = Link::pair().unwrap();
    let mut sent = 0;
    let error = loop {
        match here.send(&format!("[{sent}]"), &handles(10), soon()) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 20, "{sent} frames with 10 descriptors each are on their way");
    };
    let LinkError::System(call, error) = error else { panic!("{error}") };
    assert_eq!((call, error.raw_os_error()), ("sending", Some(109)), "{error}");
    // Nothing of it is out, and what is without descriptors still goes.
    here.send("\"none\"", &[], soon()).unwrap();
    for number in 0..sent {
        let frame = there.receive(soon()).unwrap();
        assert_eq!((frame.json, frame.handles.len()), (format!("[{number}]"), 10));
    }
    assert_eq!(there.receive(soon()).unwrap().json, "\"none\"");
    // Once they have arrived, there is room again.
    here.send("[1]", &handles(10), soon()).unwrap();
    assert_eq!(there.receive(soon()).unwrap().handles.len(), 10);
}
