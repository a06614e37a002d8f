//! Workers that misbehave, byte by byte: nothing of ours makes them polite.
//!
//! Each is a name; a test binary that is started as a worker with that name calls [`act`].

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Every misbehaviour, what the host's error line must say of it, and whether a call is needed to
/// see it (otherwise the handshake fails).
pub const KINDS: &[(&str, &str, bool)] = &[
    ("exits-at-once", "the worker exited with status 5; its last words: I cannot go on", false),
    ("garbage", "exceeds a cap of the wire: a frame of 1852798056 bytes", false),
    ("over-long", "exceeds a cap of the wire: a frame of 4294967295 bytes", false),
    ("cut-frame", "cut inside a frame: 16 of 106 bytes came", false),
    ("no-json", "malformed metadata", false),
    ("no-hello", "its first message is no hello", false),
    ("echoes-hello", "the peer has our own role", false),
    ("other-version", "protocol versions [7, 9] there and [3, 3] here", false),
    ("calls-before-the-proof", "the worker exited with status 41", false),
    ("digests-nothing", "the peer is refused: shm, from here to there: other contents came", false),
    ("answers-a-canary-with-junk", "the peer broke the protocol", false),
    ("canary-of-endless-views", "the worker exited with status 43", true),
    ("canary-of-many-values", "the worker exited with status 43", true),
    ("canaries-never-given-back", "the worker exited with status 44", true),
    ("canaries-all-at-once", "the worker exited with status 45", true),
    ("frame-without-its-descriptor", "wrong number of handles: 1 declared, 0 came", true),
    (
        "descriptor-no-frame-declares",
        "wrong number of handles: 1 came that no frame declares",
        true,
    ),
    (
        "too-few-descriptors",
        "wrong number of handles: 0 descriptors came, the parcels need 1",
        true,
    ),
    (
        "too-many-descriptors",
        "wrong number of handles: 1 descriptors came, the parcels need 0",
        true,
    ),
    ("dies-in-the-call", "the worker was killed by signal 6", true),
    ("cut-answer", "cut inside a frame: 16 of 106 bytes came", true),
    ("unsealed-segment", "the segment lacks a seal", true),
    (
        "short-segment",
        "the segment is not as long as declared: 4096 bytes declared, 100 there",
        true,
    ),
    ("sparse-segment", "the segment is not fully allocated", true),
    ("no-segment", "the handle is not sealable shared memory", true),
    ("tensor-out-of-bounds", "reaches outside the storage", true),
    ("unknown-tensor-flags", "malformed metadata: tensor flags 4", true),
    ("unknown-storage", "no such storage in the message: 3 of 1", true),
    ("unknown-tag", "unknown tag: \"Q\"", true),
    ("unknown-rung", "no such rung is open: warp", true),
    ("unknown-form", "no such rung is open: warp", true),
    ("json-as-a-form", "no such rung is open: inline", true),
    ("one-pickle-read-many-times", "more bytes to read than the message has", true),
    ("leaf-of-many-views", "too many views of one leaf", true),
    ("form-of-no-views", "malformed metadata: an array of 0 views", true),
    ("array-of-another-size", "shape and elements disagree: cells of Some(4) bytes", true),
    ("array-out-of-bounds", "reaches outside the storage", true),
    ("value-that-is-no-pickle", "malformed metadata: no instruction 0x01", true),
    ("pickle-that-is-something-else", "malformed metadata: a pickle that is \"x\"", true),
    ("set-of-tensors", "a set with an item twice, or a tensor in one", true),
    ("nested-without-end", "nested too deeply", true),
    ("zeros-without-end", "more than 1000000 values in one", true),
    ("one-block-copied-many-times", "more bytes to copy than the message has", true),
    ("one-block-named-many-times", "more bytes to copy than the message has", true),
    ("refuses-everything", "the peer could not take it: I do not like it", true),
    ("floods-with-calls", "more messages than it reads", true),
];

/// Kinds that never answer: the host's deadline is what ends them.
pub const SILENT: &[&str] =
    &["hangs-at-once", "hangs-in-the-proof", "hangs-in-the-call", "chatters-in-the-call"];

const HELLO: &str = r#"{"v":3,"k":"hello","role":"worker","speaks":[3,3],"facts":{},"waits":10000,"offers":[{"r":"shm","m":2},{"r":"numpy","m":1},{"r":"pickle","m":1},{"r":"inline","m":1}]}"#;

/// What hears the host's frames, one at a time, where something else has read the socket before: what it read
/// ahead would be missed.
pub type Hear = Box<dyn FnMut() -> Option<String>>;

struct Wire {
    socket: UnixStream,
    hear: Option<Hear>,
}

impl Wire {
    fn frame(&mut self, json: &str, descriptors: &[OwnedFd]) {
        self.declared(json, descriptors.len() as u16, descriptors);
    }

    /// With a count of descriptors that need not be true.
    fn declared(&mut self, json: &str, count: u16, descriptors: &[OwnedFd]) {
        let length = (json.len() as u32).to_be_bytes();
        let bytes = [&length[..], &count.to_be_bytes(), json.as_bytes()].concat();
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        let sent =
            sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Ok(sent) => self.raw(&bytes[sent..]),
            // The host is done with us.
            Err(_) => std::process::exit(0),
        }
    }

    fn raw(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    /// Hears until the host says this, and exits.
    fn until(&mut self, what: &str, status: i32) -> ! {
        while let Some(heard) = self.hear() {
            if heard.contains(what) {
                std::process::exit(status);
            }
        }
        std::process::exit(1)
    }

    /// One frame of the host's, read as text; none at the end of the link.
    fn hear(&mut self) -> Option<String> {
        if let Some(hear) = &mut self.hear {
            return hear();
        }
        let mut prefix = [0; 6];
        self.socket.read_exact(&mut prefix).ok()?;
        let length = u32::from_be_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]);
        let mut json = vec![0; length as usize];
        self.socket.read_exact(&mut json).ok()?;
        String::from_utf8(json).ok()
    }
}

fn segment(len: u64, fill: usize, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let descriptor = memfd_create(c"hostile", flags).expect("a memfd");
    let mut file = std::fs::File::from(descriptor);
    file.write_all(&vec![1; fill]).expect("room");
    file.set_len(len).expect("room");
    fcntl_add_seals(&file, seals).expect("seals");
    file.into()
}

fn sealed(len: u64, fill: usize) -> OwnedFd {
    segment(len, fill, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)
}

/// An answer to call 1 with one parcel of 4096 bytes.
fn answer(attempt: u32, rung: &str, handles: u8, value: &str) -> String {
    format!(
        r#"{{"v":3,"k":"ret","id":1,"n":{attempt},"p":[{{"r":"{rung}","l":1,"n":4096,"h":{handles},"m":null}}],"a":{value}}}"#
    )
}

const TENSOR: &str = r#"{"$T":{"d":"u8","h":[4096],"s":0}}"#;

/// A leaf that a form took, over bytes of storage 0.
fn lowered(form: &str, meta: &str, shape: &str) -> String {
    format!(r#"{{"$L":{{"r":"{form}","m":"{meta}","p":[{{"d":"u8","h":{shape},"s":0}}]}}}}"#)
}

fn sleep_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Misbehaves, and exits. Where it is to misbehave once it is let in, `prove` does what a worker has to for
/// that, and gives what hears from then on.
pub fn act(kind: &str, prove: impl FnOnce() -> Hear) -> ! {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().expect("a standard input");
    let mut wire = Wire { socket: UnixStream::from(socket), hear: None };
    handshake(kind, &mut wire);
    wire.hear = Some(prove());
    // The call; what the host still says of its canaries may come before it.
    while wire.hear().is_some_and(|heard| !heard.contains("\"k\":\"call\"")) {}
    if kind == "refuses-everything" {
        for attempt in 1.. {
            let json = format!(
                r#"{{"v":3,"k":"nack","of":"call","id":1,"n":{attempt},"s":0,"why":"whim","text":"I do not like it"}}"#
            );
            wire.frame(&json, &[]);
            if wire.hear().is_none() {
                std::process::exit(0);
            }
        }
    }
    let accept = r#"{"v":3,"k":"more","acc":[["call",1,1]]}"#;
    wire.frame(accept, &[]);
    match kind {
        "hangs-in-the-call" => sleep_for_ever(),
        "dies-in-the-call" => std::process::abort(),
        "chatters-in-the-call" => loop {
            wire.frame(r#"{"v":3,"k":"more","rel":[]}"#, &[]);
        },
        // Never reads, so whatever is said to it waits.
        "floods-with-calls" => {
            for id in 1..1_000_000 {
                let json = format!(r#"{{"v":3,"k":"call","id":{id},"n":1,"m":"x","p":[],"a":1}}"#);
                wire.frame(&json, &[]);
            }
        }
        "canary-of-endless-views" => {
            let view = r#"{"$T":{"d":"u8","h":[4611686018427387904],"t":[0],"s":0}}"#;
            let json = format!(
                r#"{{"v":3,"k":"call","id":9,"n":1,"m":"$canary","p":[{{"r":"shm","l":1,"n":4096,"h":1,"m":null}}],"a":{{"r":"shm","d":"host","v":{{"a":{view}}}}}}}"#
            );
            wire.frame(&json, &[sealed(4096, 4096)]);
            wire.until(r#""k":"err","id":9,"#, 43);
        }
        "canary-of-many-values" => {
            let empty = r#"{"$T":{"d":"u8","h":[0]}}"#;
            let many: Vec<String> = (0..100_000).map(|n| format!("\"k{n}\":{empty}")).collect();
            let json = format!(
                r#"{{"v":3,"k":"call","id":9,"n":1,"m":"$canary","p":[],"a":{{"r":"shm","d":"host","v":{{{}}}}}}}"#,
                many.join(",")
            );
            wire.frame(&json, &[]);
            wire.until(r#""k":"err","id":9,"#, 43);
        }
        "canaries-never-given-back" => {
            for id in 100..300 {
                let json = format!(
                    r#"{{"v":3,"k":"call","id":{id},"n":1,"m":"$make","p":[],"a":{{"r":"shm","d":"host"}},"acc":[["ret",{},1]]}}"#,
                    id - 1
                );
                wire.frame(&json, &[]);
                while let Some(heard) = wire.hear() {
                    if heard.contains(r#""code":"over-bound""#) {
                        std::process::exit(44);
                    }
                    // Busy, perhaps.
                    if heard.contains("\"k\":\"ret\"") || heard.contains("\"k\":\"err\"") {
                        break;
                    }
                }
            }
            std::process::exit(1);
        }
        "canaries-all-at-once" => {
            for id in 100..200 {
                let json = format!(
                    r#"{{"v":3,"k":"call","id":{id},"n":1,"m":"$reprove","p":[],"a":null}}"#
                );
                wire.frame(&json, &[]);
            }
            wire.until(r#""code":"busy""#, 45);
        }
        "cut-answer" => wire.raw(b"\0\0\0\x64\0\0{\"half\":1,"),
        "frame-without-its-descriptor" => wire.declared(&answer(1, "shm", 1, TENSOR), 1, &[]),
        "descriptor-no-frame-declares" => {
            wire.declared(&answer(1, "shm", 0, "1"), 0, &[sealed(4096, 4096)]);
        }
        "too-few-descriptors" => wire.frame(&answer(1, "shm", 1, TENSOR), &[]),
        "too-many-descriptors" => {
            let json = r#"{"v":3,"k":"ret","id":1,"n":1,"p":[],"a":1}"#;
            wire.frame(json, &[sealed(4096, 4096)]);
        }
        _ => answers(kind, &mut wire),
    }
    // Until the host is done with us; what it says no longer matters.
    if kind != "cut-answer" {
        while wire.hear().is_some() {}
    }
    std::process::exit(0)
}

/// What goes wrong between the hello and the end of the proof.
fn proof(kind: &str, wire: &mut Wire) {
    let _ = wire.hear();
    wire.frame(HELLO, &[]);
    if kind == "hangs-in-the-proof" {
        sleep_for_ever();
    }
    if kind == "calls-before-the-proof" {
        wire.frame(r#"{"v":3,"k":"call","id":1,"n":1,"m":"secret","p":[],"a":1}"#, &[]);
    }
    while let Some(heard) = wire.hear() {
        if heard.contains(r#""k":"err","id":1,"code":"unproven""#) {
            std::process::exit(41);
        }
        if heard.contains(r#""k":"err","id":1"#) || heard.contains(r#""k":"ret","id":1,"#) {
            std::process::exit(42);
        }
        let after = heard.split_once(r#""k":"call","id":"#).map(|(_, after)| after);
        let Some(id) = after.and_then(|after| after.split(',').next()) else { continue };
        let answer =
            |value: &str| format!(r#"{{"v":3,"k":"ret","id":{id},"n":1,"p":[],"a":{value}}}"#);
        let digest = format!(r#"{{"d":"{}","l":[]}}"#, "0".repeat(64));
        if heard.contains(r#""m":"$findings""#) {
            wire.frame(&answer("null"), &[]);
            // What it found itself: that all is well.
            let well = |rung: &str| format!(r#"["{rung}","host",null,"",null,""]"#);
            let all = ["shm", "numpy", "pickle", "inline"].map(well).join(",");
            let call =
                format!(r#"{{"v":3,"k":"call","id":7,"n":1,"m":"$findings","p":[],"a":[{all}]}}"#);
            wire.frame(&call, &[]);
        } else if kind == "answers-a-canary-with-junk" {
            wire.frame(&answer("[[]]"), &[]);
        } else {
            wire.frame(&answer(&digest), &[]);
        }
    }
    std::process::exit(0)
}

/// What goes wrong before a call.
fn handshake(kind: &str, wire: &mut Wire) {
    match kind {
        "exits-at-once" => {
            let _ = std::io::stderr().write_all(b"I cannot go on\n");
            std::process::exit(5)
        }
        "hangs-at-once" => sleep_for_ever(),
        "garbage" => wire.raw(b"nothing that anybody would take for a frame"),
        "over-long" => wire.raw(&[0xff; 64]),
        "cut-frame" => wire.raw(b"\0\0\0\x64\0\0{\"half\":1,"),
        "no-json" => wire.frame("{]", &[]),
        "no-hello" => wire.frame(r#"{"v":3,"k":"more","rel":[]}"#, &[]),
        "echoes-hello" => {
            if let Some(hello) = wire.hear() {
                wire.frame(&hello, &[]);
            }
        }
        "calls-before-the-proof"
        | "digests-nothing"
        | "answers-a-canary-with-junk"
        | "hangs-in-the-proof" => proof(kind, wire),
        "other-version" => {
            wire.frame(&HELLO.replace("\"v\":3", "\"v\":9").replace("[3,3]", "[7,9]"), &[]);
        }
        _ => return,
    }
    if kind != "cut-frame" {
        while wire.hear().is_some() {}
    }
    std::process::exit(0)
}

/// Answers whose frames are in order and whose contents are not; again after each NACK.
fn answers(kind: &str, wire: &mut Wire) {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let good = || sealed(4096, 4096);
    let mut attempt = 0;
    loop {
        attempt += 1;
        let (json, descriptor) = match kind {
            "unsealed-segment" => (answer(attempt, "shm", 1, TENSOR), segment(4096, 4096, seals)),
            "short-segment" => (answer(attempt, "shm", 1, TENSOR), sealed(100, 100)),
            "sparse-segment" => (answer(attempt, "shm", 1, TENSOR), sealed(4096, 0)),
            "no-segment" => {
                let file = std::fs::File::open("/dev/null").expect("a null device");
                (answer(attempt, "shm", 1, TENSOR), file.into())
            }
            "tensor-out-of-bounds" => {
                (answer(1, "shm", 1, &TENSOR.replace("4096", "4097")), good())
            }
            // A bit that would say "conjugated": what this side does not know it must not look past.
            "unknown-tensor-flags" => {
                (answer(1, "shm", 1, &TENSOR.replace("\"s\":0", "\"s\":0,\"f\":4")), good())
            }
            "unknown-storage" => {
                (answer(1, "shm", 1, &TENSOR.replace("\"s\":0", "\"s\":3")), good())
            }
            "unknown-form" => {
                (answer(1, "shm", 1, r#"{"$L":{"r":"warp","m":null,"p":[]}}"#), good())
            }
            "json-as-a-form" => {
                (answer(1, "shm", 1, r#"{"$L":{"r":"inline","m":[0],"p":[]}}"#), good())
            }
            "one-pickle-read-many-times" => {
                // A byte string that fills the block.
                let pickle = [&b"B"[..], &4090u32.to_le_bytes(), &[7; 4090], b"."].concat();
                let mut file = std::fs::File::from(segment(0, 0, SealFlags::empty()));
                file.write_all(&pickle).expect("room");
                let seals =
                    SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
                fcntl_add_seals(&file, seals).expect("seals");
                let tag = lowered("pickle", "v", "[4096]");
                (answer(1, "shm", 1, &format!("[{tag},{tag}]")), file.into())
            }
            "leaf-of-many-views" => {
                let views = "{\"d\":\"u8\",\"h\":[0]},".repeat(5000);
                let views = views.trim_end_matches(',');
                let tag = format!(r#"{{"$L":{{"r":"pickle","m":"o","p":[{views}]}}}}"#);
                (answer(1, "shm", 1, &tag), good())
            }
            "form-of-no-views" => {
                (answer(1, "shm", 1, r#"{"$L":{"r":"numpy","m":null,"p":[]}}"#), good())
            }
            "array-of-another-size" => {
                (answer(1, "shm", 1, &lowered("numpy", "<f8", "[1024,4]")), good())
            }
            "array-out-of-bounds" => {
                (answer(1, "shm", 1, &lowered("numpy", "<f8", "[513,8]")), good())
            }
            "value-that-is-no-pickle" => {
                (answer(1, "shm", 1, &lowered("pickle", "v", "[4096]")), good())
            }
            "pickle-that-is-something-else" => {
                (answer(1, "shm", 1, &lowered("pickle", "x", "[4096]")), good())
            }
            "set-of-tensors" => {
                (answer(1, "shm", 1, &format!("{{\"$s\":[{TENSOR},{TENSOR}]}}")), good())
            }
            "nested-without-end" => {
                let value = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
                (answer(1, "shm", 1, &value), good())
            }
            "zeros-without-end" => {
                (answer(1, "shm", 1, &format!("[0{}]", ",0".repeat(1_500_000))), good())
            }
            "one-block-copied-many-times" => {
                let tag = r#"{"$S":{"s":0,"n":4096}}"#;
                (answer(1, "shm", 1, &format!("[{tag}{}]", format!(",{tag}").repeat(50))), good())
            }
            "one-block-named-many-times" => {
                let json = r#"{"v":3,"k":"ret","id":1,"n":1,"p":[{"r":"shm","l":1,"n":4096,"h":1,"m":{"b":1}},{"r":"shm","l":2,"n":4096,"m":{"b":1}}],"a":[{"$S":{"s":0,"n":4096}},{"$S":{"s":1,"n":4096}}]}"#;
                (json.to_owned(), good())
            }
            "unknown-tag" => (answer(1, "shm", 1, r#"{"$Q":1}"#), good()),
            "unknown-rung" => (answer(attempt, "warp", 1, TENSOR), good()),
            _ => std::process::exit(99),
        };
        wire.frame(&json, &[descriptor]);
        loop {
            match wire.hear() {
                Some(heard) if heard.contains("\"k\":\"nack\"") => break,
                Some(heard) if heard.contains("[\"ret\",1,") => return,
                Some(_) => {}
                None => return,
            }
        }
    }
}
