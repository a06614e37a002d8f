//! At its limit of open files a process is given fewer descriptors than were sent. The one test of
//! its binary, since the limit is the process's.

#![cfg(unix)]

use std::fs::File;
use std::time::{Duration, Instant};

use link::{Link, LinkError};
use rung::{Handle, Reason};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn descriptors_that_were_cut_off_on_receipt_are_a_fault() {
    let (here, there) = Link::pair().unwrap();
    let handles: Vec<Handle> = (0..10).map(|_| File::open("/dev/null").unwrap().into()).collect();
    here.send("[1]", &handles, None).unwrap();
    // Room for three more.
    let next = File::open("/dev/null").unwrap();
    let lowest = std::os::fd::AsRawFd::as_raw_fd(&next) as u64;
    drop(next);
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(lowest + 3), maximum: before.maximum })
        .unwrap();
    let received = there.receive(Some(Instant::now() + Duration::from_secs(5)));
    setrlimit(Resource::Nofile, before).unwrap();
    let Err(LinkError::Fault(fault)) = received else { panic!("{received:?}") };
    assert_eq!(fault.reason(), Reason::NoDescriptors, "{fault}");
    // Which ones were lost nobody can tell: the link is closed for good.
    assert!(matches!(there.receive(None), Err(LinkError::Fault(_))));
    assert!(here.send("[2]", &[], None).is_err());
}
