//! A whole channel, whose peer says anything at any time: from its hello on, or once everything is taken for proven.
//! Whatever comes, the channel's calls end, nothing panics, and its descriptors are closed.
#![no_main]

use std::sync::Arc;
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use fuzz::{BYTES, Descriptor, descriptors, look_at};
use ladder::{CallOptions, Ladder, Methods, Tensor, Value, fuzzing};
use libfuzzer_sys::fuzz_target;
use link::Link;
use rung::{Handle, Rung};

#[derive(Debug, Arbitrary)]
struct Conversation {
    /// Whether the peer is taken for proven.
    proven: bool,
    hello: Option<String>,
    steps: Vec<Step>,
}

#[derive(Debug, Arbitrary)]
enum Step {
    Call { id: u8, method: Method, root: Option<String>, parcels: Vec<Parcel>, value: Body, riders: Riders },
    Return { id: u8, attempt: u8, parcels: Vec<Parcel>, value: Body, riders: Riders },
    Error { id: u8, code: String, text: String },
    Refuse { call: bool, id: u8, attempt: u8, storage: u8, code: Code },
    More(Riders),
    /// Any message.
    Text(String, Vec<Descriptor>),
    /// Bytes that need be no frame.
    Raw(Vec<u8>),
    /// Waits for the other side to say something, and may send back what came with it.
    Hear { back: bool },
}

#[derive(Debug, Arbitrary)]
enum Method {
    Echo,
    Canary,
    Make,
    Findings,
    Reprove,
    Named(String),
}

#[derive(Debug, Arbitrary)]
enum Code {
    UnknownBlock,
    Unsealed,
    NoMemory,
    Any(String),
}

#[derive(Debug, Arbitrary)]
struct Parcel {
    lease: u8,
    bytes: Option<u64>,
    /// The block's number, where it is to be kept.
    number: Option<u8>,
    descriptor: Option<Descriptor>,
    rung: u8,
}

#[derive(Debug, Arbitrary)]
enum Body {
    Number(i64),
    Tensor { shape: Vec<u32>, strides: Option<Vec<i32>>, offset: u32, storage: u8, dtype: u8 },
    Bytes { storage: u8, offset: u32, len: u32 },
    Lowered { form: u8, meta: String, extent: u32, storage: u8 },
    Several(Vec<Self>),
    Canary { rung: u8, leaf: Box<Self> },
    Finding { rung: u8, sending: Option<String>, returning: Option<String> },
    Any(String),
}

#[derive(Debug, Arbitrary)]
struct Riders {
    released: Vec<(u8, u8)>,
    accepted: Vec<(bool, u8, u8)>,
    said: Option<Vec<u64>>,
}

const RUNGS: [&str; 4] = ["shm", "numpy", "pickle", "inline"];

fn rung(number: u8) -> &'static str {
    RUNGS[usize::from(number) % RUNGS.len()]
}

fn text(text: &str) -> String {
    serde_json::to_string(text).expect("a text is written")
}

impl Body {
    fn json(&self, depth: usize) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Tensor { shape, strides, offset, storage, dtype } => {
                let dtype = ["u8", "f32", "bool", "bf16", "f64"][usize::from(*dtype) % 5];
                let strides = strides.as_ref().map_or(String::new(), |strides| format!(",\"t\":{strides:?}"));
                format!("{{\"$T\":{{\"d\":\"{dtype}\",\"h\":{shape:?}{strides},\"o\":{offset},\"s\":{storage}}}}}")
            }
            Self::Bytes { storage, offset, len } => {
                format!("{{\"$B\":{{\"s\":{storage},\"o\":{offset},\"n\":{len}}}}}")
            }
            Self::Lowered { form, meta, extent, storage } => format!(
                "{{\"$L\":{{\"r\":\"{}\",\"m\":{},\"p\":[{{\"d\":\"u8\",\"h\":[{extent}],\"s\":{storage}}}]}}}}",
                rung(*form),
                text(meta)
            ),
            Self::Several(items) if depth < 4 => {
                let items: Vec<String> = items.iter().take(8).map(|item| item.json(depth + 1)).collect();
                format!("[{}]", items.join(","))
            }
            Self::Canary { rung: name, leaf } if depth < 4 => format!(
                "{{\"r\":\"{}\",\"d\":\"host\",\"v\":{{\"a\":{}}}}}",
                rung(*name),
                leaf.json(depth + 1)
            ),
            Self::Finding { rung: name, sending, returning } => {
                let code = |code: &Option<String>| code.as_ref().map_or("null".into(), |code| text(code));
                format!("[[\"{}\",\"host\",{},\"\",{},\"\"]]", rung(*name), code(sending), code(returning))
            }
            Self::Any(text) => text.clone(),
            _ => "null".into(),
        }
    }
}

impl Riders {
    fn json(&self) -> String {
        let mut out = String::new();
        if !self.released.is_empty() {
            let one = |(name, lease): &(u8, u8)| format!("{{\"r\":\"{}\",\"l\":{lease}}}", rung(*name));
            let all: Vec<String> = self.released.iter().map(one).collect();
            out += &format!(",\"rel\":[{}]", all.join(","));
        }
        if !self.accepted.is_empty() {
            let one = |(call, id, attempt): &(bool, u8, u8)| {
                let of = if *call { "call" } else { "ret" };
                format!("[\"{of}\",{id},{attempt}]")
            };
            let all: Vec<String> = self.accepted.iter().map(one).collect();
            out += &format!(",\"acc\":[{}]", all.join(","));
        }
        if let Some(numbers) = &self.said {
            out += &format!(",\"say\":[[\"shm\",{{\"x\":{numbers:?}}}]]");
        }
        out
    }
}

fn parcels(parcels: &[Parcel], handles: &mut Vec<Handle>) -> String {
    let one = |parcel: &Parcel| {
        let count = handles.len();
        handles.extend(parcel.descriptor.and_then(Descriptor::open));
        let count = handles.len() - count;
        let meta = parcel.number.map_or("null".into(), |number| format!("{{\"b\":{number}}}"));
        let bytes = parcel.bytes.unwrap_or(BYTES as u64);
        let (name, lease) = (rung(parcel.rung), parcel.lease);
        format!("{{\"r\":\"{name}\",\"l\":{lease},\"n\":{bytes},\"h\":{count},\"m\":{meta}}}")
    };
    let all: Vec<String> = parcels.iter().take(6).map(one).collect();
    all.join(",")
}

/// A frame and its descriptors.
fn frame(step: &Step) -> Option<(String, Vec<Handle>)> {
    let mut handles = Vec::new();
    let json = match step {
        Step::Call { id, method, root, parcels: some, value, riders } => {
            let method = match method {
                Method::Echo => "echo",
                Method::Canary => "$canary",
                Method::Make => "$make",
                Method::Findings => "$findings",
                Method::Reprove => "$reprove",
                Method::Named(name) => name,
            };
            let root = root.as_ref().map_or(String::new(), |root| format!(",\"t\":{}", text(root)));
            format!(
                "{{\"v\":3,\"k\":\"call\",\"id\":{id},\"n\":1{root},\"m\":{},\"p\":[{}],\"a\":{}{}}}",
                text(method),
                parcels(some, &mut handles),
                value.json(0),
                riders.json()
            )
        }
        Step::Return { id, attempt, parcels: some, value, riders } => format!(
            "{{\"v\":3,\"k\":\"ret\",\"id\":{id},\"n\":{attempt},\"p\":[{}],\"a\":{}{}}}",
            parcels(some, &mut handles),
            value.json(0),
            riders.json()
        ),
        Step::Error { id, code, text: why } => {
            format!("{{\"v\":3,\"k\":\"err\",\"id\":{id},\"code\":{},\"text\":{}}}", text(code), text(why))
        }
        Step::Refuse { call, id, attempt, storage, code } => {
            let code = match code {
                Code::UnknownBlock => "unknown-block",
                Code::Unsealed => "unsealed",
                Code::NoMemory => "no-memory",
                Code::Any(code) => code,
            };
            let (of, code) = (if *call { "call" } else { "ret" }, text(code));
            format!(
                "{{\"v\":3,\"k\":\"nack\",\"of\":\"{of}\",\"id\":{id},\"n\":{attempt},\"s\":{storage},\"why\":{code},\"text\":\"\"}}"
            )
        }
        Step::More(riders) => format!("{{\"v\":3,\"k\":\"more\"{}}}", riders.json()),
        Step::Text(text, descriptors) => {
            handles.extend(descriptors.iter().take(4).filter_map(|descriptor| descriptor.open()));
            text.clone()
        }
        Step::Raw(_) | Step::Hear { .. } => return None,
    };
    Some((json, handles))
}

fn soon(milliseconds: u64) -> Option<Instant> {
    Instant::now().checked_add(Duration::from_millis(milliseconds))
}

const HELLO: &str = r#"{"v":3,"k":"hello","role":"worker","speaks":[3,3],"facts":{"page":"4096"},"waits":50,"offers":[{"r":"shm","m":2},{"r":"numpy","m":1},{"r":"pickle","m":1},{"r":"inline","m":1}]}"#;

fn ladder_of_the_host() -> Ladder {
    let rungs: Vec<Arc<dyn Rung>> = vec![
        Arc::new(tier_shm::Shm),
        Arc::new(tier_numpy::Numpy),
        Arc::new(tier_pickle::Pickle),
        Arc::new(tier_inline::Inline),
    ];
    Ladder::of(rungs)
}

/// The peer.
fn talk(link: &Link, raw: &std::os::fd::OwnedFd, conversation: &Conversation) {
    let mut came: Vec<Handle> = Vec::new();
    for step in conversation.steps.iter().take(24) {
        match step {
            Step::Raw(bytes) => {
                let _ = rustix::net::send(raw, bytes, rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT);
            }
            Step::Hear { back } => {
                if let Ok(heard) = link.receive(soon(3))
                    && *back
                {
                    came.extend(heard.handles);
                }
            }
            step => {
                let Some((json, mut handles)) = frame(step) else { continue };
                handles.append(&mut came);
                if json.is_empty() || link.send(&json, &handles, soon(20)).is_err() {
                    return;
                }
            }
        }
    }
    // What is said meanwhile is heard, so that the host can go on.
    while link.receive(soon(2)).is_ok() {}
}

fuzz_target!(|conversation: Conversation| {
    segment::Pool::process().trim();
    let before = descriptors();
    {
        let Ok((mine, socket)) = Link::pair_with_socket() else { return };
        let Ok(raw) = socket.try_clone() else { return };
        let peer = Link::over(socket);
        let hello = conversation.hello.as_deref().filter(|_| !conversation.proven).unwrap_or(HELLO);
        if hello.is_empty() || peer.send(hello, &[], soon(20)).is_err() {
            return;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                talk(&peer, &raw, &conversation);
                peer.close();
                drop(rustix::net::shutdown(&raw, rustix::net::Shutdown::Both));
            });
            let handler = Methods::new().on("echo", |value| {
                look_at(&value);
                Ok(value)
            });
            let limit = Duration::from_millis(30);
            let Ok(greeted) = fuzzing::greeted(mine, &ladder_of_the_host(), limit, handler) else { return };
            let channel = if conversation.proven { greeted.assume_proven() } else { greeted.prove() };
            let Ok(channel) = channel else { return };
            for bytes in [10usize, 9000] {
                let tensor = Tensor::from_vec(vec![3u8; bytes], &[bytes]).expect("a tensor");
                let options = CallOptions::new().limit(limit);
                if let Ok(reply) = channel.call_with("any", Value::list([Value::from(tensor), Value::from(1)]), options) {
                    look_at(reply.value());
                    let _ = (reply.received(), reply.sent().bytes());
                }
            }
            drop(channel);
        });
    }
    segment::Pool::process().trim();
    // A handler that runs may hold something for a moment.
    for _ in 0..200 {
        if descriptors() <= before {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
        segment::Pool::process().trim();
    }
    panic!("descriptors: {before} before, {} after", descriptors());
});
