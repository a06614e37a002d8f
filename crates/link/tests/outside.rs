//! Only a peer of the same user, with the key, in time, is let in.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use link::outside::{Listener, connect};

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(20))
}

fn listener(folder: &Path) -> (Listener, String, String) {
    let listener = Listener::bind_in(folder).unwrap();
    let [(_, address), (_, key)] = listener.invitation();
    (listener, address, key)
}

fn framed(json: &str) -> Vec<u8> {
    [&(json.len() as u32).to_be_bytes()[..], &[0, 0], json.as_bytes()].concat()
}

/// Whether the other side has closed the connection, without a word.
fn is_turned_away(mut stream: UnixStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    match stream.read(&mut [0; 16]) {
        Ok(0) => true,
        // Closed with something of ours unread.
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        Ok(_) => false,
    }
}

#[test]
fn a_peer_with_the_key_is_let_in() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, address, key) = listener(folder.path());
    let mode = Path::new(&address).parent().unwrap().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let theirs = connect(Path::new(&address), &key, soon()).unwrap();
    theirs.send("[1]", &[], soon()).unwrap();
    let ours = listener.accept(soon()).unwrap();
    assert_eq!(ours.receive(soon()).unwrap().json, "[1]");
    // Large frames are taken once it is known who sends them.
    let large = "x".repeat(1 << 20);
    std::thread::scope(|scope| {
        scope.spawn(|| theirs.send(&large, &[], soon()).unwrap());
        assert_eq!(ours.receive(soon()).unwrap().json, large);
    });
    drop(listener);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_peer_without_the_key_is_turned_away_before_anything_else_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, address, key) = listener(folder.path());
    let wrong = key.replace(&key[..1], if key.starts_with('0') { "1" } else { "0" });
    let keyed = |key: &str| framed(&format!("{{\"v\":1,\"k\":\"key\",\"key\":\"{key}\"}}"));
    let hello = framed(r#"{"v":1,"k":"hello","role":"worker","p":[1,1],"lib":"0","offers":[]}"#);
    let intruders: Vec<(&str, Vec<u8>)> = vec![
        ("a wrong key", keyed(&wrong)),
        ("half a key", keyed(&key[..32])),
        ("no key", keyed("")),
        ("a hello instead", hello.clone()),
        ("a hello, then the key", [hello, keyed(&key)].concat()),
        ("garbage", vec![7; 500]),
        ("a frame over the first one's cap", framed(&"x".repeat(4096))),
        // Its prefix alone: were it believed, 64 MiB would be waited for.
        ("a huge frame's prefix", vec![4, 0, 0, 0, 0, 0]),
    ];
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept(soon()));
        for (what, bytes) in intruders {
            let mut stream = UnixStream::connect(&address).unwrap();
            // It may be closed before all is written.
            let _ = stream.write_all(&bytes);
            assert!(is_turned_away(stream), "{what}");
        }
        // Late: connected, and silent for longer than anybody has patience.
        let silent = UnixStream::connect(&address).unwrap();
        let started = Instant::now();
        assert!(is_turned_away(silent), "a late key");
        assert!(started.elapsed() < Duration::from_secs(10));
        // After all of them, whoever has it is still let in.
        let theirs = connect(Path::new(&address), &key, soon()).unwrap();
        let ours = accepted.join().unwrap().unwrap();
        theirs.send("[1]", &[], soon()).unwrap();
        assert_eq!(ours.receive(soon()).unwrap().json, "[1]");
    });
}

/// What a listener that was killed left behind is in nobody's way: every one has a folder of its own.
#[test]
fn what_a_dead_listener_left_keeps_nobody_from_listening() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let (listener, address, key) = listener(folder.path());
        drop(connect(Path::new(&address), &key, soon()).unwrap());
        std::mem::forget(listener);
    }
    let (listener, address, key) = listener(folder.path());
    let theirs = connect(Path::new(&address), &key, soon()).unwrap();
    theirs.send("[1]", &[], soon()).unwrap();
    assert_eq!(listener.accept(soon()).unwrap().receive(soon()).unwrap().json, "[1]");
}

#[test]
fn waiting_ends_at_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, address, _) = listener(folder.path());
    let _silent = UnixStream::connect(address).unwrap();
    let deadline = Instant::now() + Duration::from_millis(100);
    assert!(listener.accept(Some(deadline)).unwrap_err().is_deadline());
    assert!(Instant::now() < deadline + Duration::from_secs(5));
}

/// The socket belongs to another user; whoever comes as root is none of that user's processes.
#[test]
#[ignore = "needs root"]
fn a_peer_of_another_user_is_turned_away() {
    assert!(rustix::process::geteuid().is_root(), "run this as root");
    // Readable for all, so that the credentials alone decide.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let this = std::env::current_exe().unwrap();
    // The binary may lie where that user cannot go; so it is handed over open.
    let program = std::fs::File::open(this).unwrap();
    let mut child = std::process::Command::new("/proc/self/fd/0")
        .args(["--exact", "listens_as_another_user", "--ignored", "--nocapture"])
        .env("OUTSIDE_FOLDER", folder.path())
        .stdin(program)
        .stdout(std::process::Stdio::piped())
        .spawn_as(65534)
        .unwrap();
    let mut said = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let invitation = loop {
        said.clear();
        assert!(std::io::BufRead::read_line(&mut out, &mut said).unwrap() > 0, "it said nothing");
        if let Some((_, rest)) = said.trim().split_once("INVITATION ") {
            let (address, key) = rest.split_once(' ').unwrap();
            break (address.to_owned(), key.to_owned());
        }
    };
    let link = connect(Path::new(&invitation.0), &invitation.1, soon());
    // The right key, of the wrong user.
    let refused = link.and_then(|link| link.receive(soon()));
    assert!(refused.is_err(), "root was let in");
    let rest = std::io::read_to_string(out).unwrap();
    child.wait().unwrap();
    assert!(rest.contains("NOBODY CAME"), "{rest}");
}

trait SpawnAs {
    fn spawn_as(&mut self, user: u32) -> std::io::Result<std::process::Child>;
}

impl SpawnAs for std::process::Command {
    fn spawn_as(&mut self, user: u32) -> std::io::Result<std::process::Child> {
        use std::os::unix::process::CommandExt;
        self.uid(user).gid(user).spawn()
    }
}

/// The other process of the test above.
#[test]
#[ignore = "needs root: started by the test above"]
fn listens_as_another_user() {
    let folder = std::env::var_os("OUTSIDE_FOLDER").expect("started by the test above");
    let (listener, address, key) = listener(Path::new(&folder));
    for path in [Path::new(&address).parent().unwrap(), Path::new(&address)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mut out = std::io::stdout();
    writeln!(out, "INVITATION {address} {key}").unwrap();
    let came = listener.accept(Some(Instant::now() + Duration::from_secs(3)));
    writeln!(out, "{}", if came.is_err() { "NOBODY CAME" } else { "SOMEBODY CAME" }).unwrap();
}
