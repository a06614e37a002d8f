//! The messages of a channel, as JSON.
//!
//! ```text
//! {"v":3,"k":"hello","role":"host","speaks":[3,3],"facts":{"library":"0.1.0",…},"waits":10000,"offers":[{"r":"shm","m":2},…]}
//! {"v":3,"k":"call","id":1,"n":1,"m":"invert","p":[parcel,…],"a":value}
//! {"v":3,"k":"call","id":1,"n":1,"t":"h1","m":"progress","p":[],"a":value}
//! {"v":3,"k":"ret","id":1,"n":1,"p":[parcel,…],"a":value}
//! {"v":3,"k":"err","id":1,"code":"unknown-method","text":"…"}
//! {"v":3,"k":"nack","of":"ret","id":1,"n":1,"s":0,"why":"unsealed","text":"…"}
//! {"v":3,"k":"more","rel":[{"r":"shm","l":7},…],"acc":[["call",1,1],…],"say":[["shm",{"x":[7]}],…]}
//! ```
//!
//! A hello has `lacks` too where a side has a rung that it cannot offer: a list of its name, the reason's code,
//! and what exactly.
//!
//! `v` is the protocol version, `id` the caller's number of the call, `n` the attempt at sending it,
//! `t` the root that a call is nested in (`h` the host's or `w` the worker's, and its number there),
//! `of` what was refused (`call` or `ret`), `s` an index into the parcels. Three lists may stand in any
//! message but hello, and go alone where no other is sent soon: `rel`, leases that come home; `acc`, what
//! was accepted (of what, its id and its attempt; an answer accepts its call); and `say`, what a rung's
//! session has to say to the peer's. A parcel is
//! `{"r":rung,"l":lease,"n":bytes,"c":copies,"h":handles,"m":the rung's own}`, with `c` and `h` left
//! out where they are 0. Of `shm`, `m` is null or an object: `b` the block's number, by which alone it is
//! named once its descriptor has gone, and `f` (true) where the block is not the sender's own; its `say`
//! lists blocks that need not be kept any more, and the `m` of its receipts is `"unknown"` (a number said
//! nothing) or `"exposed"` (the block was lent on to a stranger). The frame's descriptors are those of the parcels in order, then those of the
//! receipts; a hello's are those of its offers.
//!
//! In a value (the grammar of `tier_inline::codec`), leaves that ride a rung are
//!
//! ```text
//! {"$T":{"d":"f32","h":[2,3],"t":[3,1],"o":64,"s":0,"f":1}}   tensor: dtype, shape, strides, offset,
//!                                                             storage, flags (1 read-only, 2 grad)
//! {"$S":{"s":0,"o":0,"n":5000}}                               string: storage, offset, bytes
//! {"$B":{"s":0,"o":0,"n":5000}}                               byte string
//! {"$L":{"r":"numpy","m":">f4","p":[{"d":"u8","h":[3,4],"s":0}]}}
//!                                                             what a form took: the form, its own
//!                                                             metadata, and views as of a tensor
//! ```
//!
//! Of `numpy`, `m` is null for an array that is its view, or the NumPy type (`rung::Descr`) for one whose
//! view is the bytes of its elements, an element's in the last dimension; or 1, where that type is long, and
//! stands as JSON in a second view. Of `pickle`, it is `"v"` for a
//! subtree that was pickled for the way (one view, the pickle), or `"o"` for a pickle of the user's (the
//! stream, then the buffers that were kept out of it). Nobody opens an `"o"` on the way.
//!
//! `t` is left out for C order, `o` and `f` for 0, and `s` for a tensor without elements. A view and a text have `x`
//! too where their sender wants them checked: the digest of their bytes (`canary::digest`). The channel's own calls
//! are listed in `own`.

use std::borrow::Cow;
use std::fmt::Write;

use canary::Facts;
use rung::{Fault, Meta, OfferWire, ParcelWire, Reason, ReceiptWire, RungId, limits};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// The version of the protocol that every message carries.
pub(crate) const VERSION: u32 = 3;

/// Which side of a channel a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    Host,
    Worker,
}

impl Role {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Host => Self::Worker,
            Self::Worker => Self::Host,
        }
    }
}

/// The call that others are nested in: whose it is, and its number there. On the wire `h12` or `w3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Root {
    pub(crate) side: Role,
    pub(crate) id: u64,
}

impl Root {
    fn print(self) -> String {
        let side = match self.side {
            Role::Host => 'h',
            Role::Worker => 'w',
        };
        format!("\"{side}{}\"", self.id)
    }

    fn parse(text: &str) -> Option<Self> {
        let (side, id) = text.split_at_checked(1)?;
        let side = match side {
            "h" => Role::Host,
            "w" => Role::Worker,
            _ => return None,
        };
        let plain = id.bytes().all(|byte| byte.is_ascii_digit());
        Some(Self { side, id: id.parse().ok().filter(|_| plain)? })
    }
}

/// What is accepted or refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Of {
    #[serde(rename = "call")]
    Call,
    #[serde(rename = "ret")]
    Return,
}

/// The first message of each side.
#[derive(Debug)]
pub(crate) struct Hello {
    pub(crate) role: Role,
    pub(crate) protocol: [u32; 2],
    /// What the process says of itself.
    pub(crate) facts: Facts,
    pub(crate) offers: Vec<OfferWire>,
    /// Rungs that it has and cannot offer, with the reason's code and what exactly.
    pub(crate) lacks: Vec<(RungId, String, String)>,
    /// How many milliseconds it waits for the other side to prove something.
    pub(crate) waits: u64,
}

#[derive(Debug)]
pub(crate) enum Message {
    Hello(Hello),
    Call {
        id: u64,
        attempt: u32,
        root: Option<Root>,
        method: String,
        parcels: Vec<ParcelWire>,
        value: String,
    },
    Return {
        id: u64,
        attempt: u32,
        parcels: Vec<ParcelWire>,
        value: String,
    },
    Error {
        id: u64,
        code: String,
        text: String,
    },
    Refuse {
        of: Of,
        id: u64,
        attempt: u32,
        storage: usize,
        reason: String,
        text: String,
    },
    /// Nothing but what rides any message.
    More,
}

/// A message that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accepted {
    pub(crate) of: Of,
    pub(crate) id: u64,
    pub(crate) attempt: u32,
}

impl Serialize for Accepted {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.of, self.id, self.attempt).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Accepted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (of, id, attempt) = Deserialize::deserialize(deserializer)?;
        Ok(Self { of, id, attempt })
    }
}

/// What rides a message.
#[derive(Debug, Default)]
pub(crate) struct Riders {
    pub(crate) receipts: Vec<ReceiptWire>,
    pub(crate) accepted: Vec<Accepted>,
    pub(crate) notices: Vec<(RungId, Meta)>,
}

/// Texts of an error frame are cut to this many characters.
const TEXT: usize = 2_000;

/// Writes a message.
///
/// # Errors
///
/// What serde gives for the rungs' own metadata, which was JSON before.
pub(crate) fn encode(message: &Message, riders: &Riders) -> Result<String, Fault> {
    let mut out = String::with_capacity(256);
    let mut field = |name: &str, json: &str| {
        out.push_str(if out.is_empty() { "{\"" } else { ",\"" });
        out.push_str(name);
        out.push_str("\":");
        out.push_str(json);
    };
    field("v", &VERSION.to_string());
    match message {
        Message::Hello(hello) => {
            field("k", "\"hello\"");
            field("role", &json(&hello.role)?);
            field("speaks", &json(&hello.protocol)?);
            field("facts", &json(&hello.facts)?);
            field("waits", &hello.waits.to_string());
            field("offers", &json(&hello.offers)?);
            if !hello.lacks.is_empty() {
                field("lacks", &json(&hello.lacks)?);
            }
        }
        Message::Call { id, attempt, root, method, parcels, value } => {
            field("k", "\"call\"");
            field("id", &id.to_string());
            field("n", &attempt.to_string());
            if let Some(root) = root {
                field("t", &root.print());
            }
            field("m", &json(method)?);
            field("p", &json(parcels)?);
            field("a", value);
        }
        Message::Return { id, attempt, parcels, value } => {
            field("k", "\"ret\"");
            field("id", &id.to_string());
            field("n", &attempt.to_string());
            field("p", &json(parcels)?);
            field("a", value);
        }
        Message::Error { id, code, text } => {
            field("k", "\"err\"");
            field("id", &id.to_string());
            field("code", &json(code)?);
            field("text", &json(&cut(text))?);
        }
        Message::Refuse { of, id, attempt, storage, reason, text } => {
            field("k", "\"nack\"");
            field("of", &json(of)?);
            field("id", &id.to_string());
            field("n", &attempt.to_string());
            field("s", &storage.to_string());
            field("why", &json(reason)?);
            field("text", &json(&cut(text))?);
        }
        Message::More => field("k", "\"more\""),
    }
    if !riders.receipts.is_empty() {
        field("rel", &json(&riders.receipts)?);
    }
    if !riders.accepted.is_empty() {
        field("acc", &json(&riders.accepted)?);
    }
    if !riders.notices.is_empty() {
        field("say", &json(&riders.notices)?);
    }
    let _ = out.write_char('}');
    Ok(out)
}

/// What went wrong stands at either end of a long text: what was done first, and the cause last.
fn cut(text: &str) -> String {
    let length = text.chars().count();
    if length <= TEXT {
        return text.to_owned();
    }
    let (half, last) = (TEXT / 2, length - TEXT / 2);
    let ends = |(index, _): &(usize, char)| *index < half || *index >= last;
    let kept: Vec<char> = text.chars().enumerate().filter(ends).map(|(_, c)| c).collect();
    kept[..half].iter().chain(&[' ', '…', ' ']).chain(&kept[half..]).collect()
}

fn json(part: &(impl Serialize + ?Sized)) -> Result<String, Fault> {
    serde_json::to_string(part).map_err(|error| Fault::new(Reason::BadMetadata, error.to_string()))
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Hello,
    Call,
    Ret,
    Err,
    Nack,
    More,
}

/// Every key that any message has; which of them a kind needs is checked after.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw<'a> {
    v: u32,
    k: Kind,
    id: Option<u64>,
    n: Option<u32>,
    of: Option<Of>,
    #[serde(borrow)]
    t: Option<Cow<'a, str>>,
    #[serde(borrow)]
    m: Option<Cow<'a, str>>,
    p: Option<Vec<ParcelWire>>,
    speaks: Option<[u32; 2]>,
    /// A value may be null, which an `Option` would take for absent.
    #[serde(borrow, default, deserialize_with = "present")]
    a: Option<&'a RawValue>,
    s: Option<usize>,
    #[serde(borrow)]
    why: Option<Cow<'a, str>>,
    #[serde(borrow)]
    code: Option<Cow<'a, str>>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    role: Option<Role>,
    facts: Option<Facts>,
    waits: Option<u64>,
    offers: Option<Vec<OfferWire>>,
    #[serde(default)]
    lacks: Vec<(RungId, String, String)>,
    #[serde(default)]
    rel: Vec<ReceiptWire>,
    #[serde(default)]
    acc: Vec<Accepted>,
    #[serde(default)]
    say: Vec<(RungId, Meta)>,
}

fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

fn bad(detail: impl Into<String>) -> Fault {
    Fault::new(Reason::BadMetadata, detail)
}

fn need<T>(part: Option<T>, name: &str) -> Result<T, Fault> {
    part.ok_or_else(|| bad(format!("a message without {name:?}")))
}

fn text(part: Option<Cow<'_, str>>, name: &str, most: usize) -> Result<String, Fault> {
    let text = need(part, name)?;
    if text.len() > most {
        return Err(Fault::new(Reason::OverCap, format!("{name:?} of {} bytes", text.len())));
    }
    Ok(text.into_owned())
}

fn facts(part: Option<Facts>) -> Result<Facts, Fault> {
    let facts = need(part, "facts")?;
    if facts.are_few() { Ok(facts) } else { Err(Fault::new(Reason::OverCap, "too many facts")) }
}

fn parcels(part: Option<Vec<ParcelWire>>) -> Result<Vec<ParcelWire>, Fault> {
    let parcels = need(part, "p")?;
    if parcels.len() > limits::STORAGES {
        let detail = format!("{} storages in a message", parcels.len());
        return Err(Fault::new(Reason::OverCap, detail));
    }
    Ok(parcels)
}

/// Reads a message; what it holds of values stays text.
///
/// # Errors
///
/// [`Reason::BadMetadata`] for anything but one of the messages above, [`Reason::OverCap`].
pub(crate) fn decode(json: &str) -> Result<(Message, Riders), Fault> {
    let raw: Raw<'_> = match serde_json::from_str(json) {
        Ok(raw) => raw,
        Err(error) => {
            return other_hello(json).ok_or_else(|| bad(error.to_string()));
        }
    };
    // A hello is read whatever its version, so that a mismatch can name both.
    if raw.v != VERSION && !matches!(raw.k, Kind::Hello) {
        return Err(bad(format!("protocol version {}, here {VERSION}", raw.v)));
    }
    let id = || need(raw.id, "id");
    let attempt = || need(raw.n, "n");
    let of = || need(raw.of, "of");
    let value = || need(raw.a, "a").map(|value| value.get().to_owned());
    let message = match raw.k {
        Kind::Hello => Message::Hello(Hello {
            role: need(raw.role, "role")?,
            protocol: need(raw.speaks, "speaks")?,
            facts: facts(raw.facts)?,
            offers: need(raw.offers, "offers")?,
            lacks: raw.lacks,
            waits: need(raw.waits, "waits")?,
        }),
        Kind::Call => Message::Call {
            id: id()?,
            attempt: attempt()?,
            root: match raw.t {
                None => None,
                Some(text) => Some(Root::parse(&text).ok_or_else(|| bad("\"t\" is no root"))?),
            },
            parcels: parcels(raw.p)?,
            value: value()?,
            method: text(raw.m, "m", limits::METHOD_NAME)?,
        },
        Kind::Ret => Message::Return {
            id: id()?,
            attempt: attempt()?,
            parcels: parcels(raw.p)?,
            value: value()?,
        },
        Kind::Err => Message::Error {
            id: id()?,
            code: text(raw.code, "code", limits::ERROR_CODE)?,
            text: text(raw.text, "text", 4 * TEXT)?,
        },
        Kind::Nack => Message::Refuse {
            of: of()?,
            id: id()?,
            attempt: attempt()?,
            storage: need(raw.s, "s")?,
            reason: text(raw.why, "why", 64)?,
            text: text(raw.text, "text", 4 * TEXT)?,
        },
        Kind::More => Message::More,
    };
    Ok((message, Riders { receipts: raw.rel, accepted: raw.acc, notices: raw.say }))
}

/// The hello of another version of the protocol, so that a mismatch can name both. The first called its
/// range `p`.
fn other_hello(json: &str) -> Option<(Message, Riders)> {
    #[derive(Deserialize)]
    struct Other {
        v: u32,
        k: String,
        role: Role,
        #[serde(alias = "p")]
        speaks: [u32; 2],
    }
    let Other { v, k, role, speaks: protocol } = serde_json::from_str(json).ok()?;
    if v == VERSION || k != "hello" {
        return None;
    }
    let (facts, offers, lacks) = (Facts::default(), Vec::new(), Vec::new());
    Some((
        Message::Hello(Hello { role, protocol, facts, offers, lacks, waits: 0 }),
        Riders::default(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rung::{LeaseId, Offer, Parcel, Receipt};

    fn parcel() -> ParcelWire {
        let handle = std::fs::File::open("/dev/null").unwrap().into();
        let meta = Meta::write(&()).unwrap();
        let (rung, lease, handles) = (RungId::SHM, LeaseId(7), vec![handle]);
        Parcel { rung, lease, bytes: 24, copies: 1, meta, handles }.split().unwrap().0
    }

    fn receipt() -> ReceiptWire {
        let (rung, lease) = (RungId::SHM, LeaseId(3));
        Receipt { rung, lease, meta: None, handles: vec![] }.split().unwrap().0
    }

    /// One of each message, in both directions, as the peers write them.
    fn every_message() -> Vec<(Message, Riders)> {
        let none = Riders::default;
        let receipts = |receipts| Riders { receipts, ..Riders::default() };
        let offer = |rung| {
            let meta = Meta::write(&1).unwrap();
            Offer { rung, meta, handles: vec![] }.split().unwrap().0
        };
        let hello = |role| {
            let offers = vec![offer(RungId::SHM), offer(RungId::INLINE)];
            let facts = [("library", "0.1.0"), ("page", "4096")].into_iter().collect();
            let lacks = vec![(RungId::new("cuda-ipc"), "platform".into(), "no driver".into())];
            Message::Hello(Hello { role, protocol: [1, 1], facts, offers, lacks, waits: 10_000 })
        };
        let tensor = r#"{"image":{"$T":{"d":"f32","h":[2,3],"s":0}}}"#.to_owned();
        let (id, attempt) = (1, 1);
        let refuse = |of| Message::Refuse {
            of,
            id,
            attempt,
            storage: 0,
            reason: Reason::Unsealed.code().to_owned(),
            text: Fault::from(Reason::Unsealed).to_string(),
        };
        vec![
            (hello(Role::Host), none()),
            (hello(Role::Worker), none()),
            (
                Message::Call {
                    id,
                    attempt,
                    root: None,
                    method: "invert".into(),
                    parcels: vec![parcel()],
                    value: tensor.clone(),
                },
                none(),
            ),
            (
                Message::Call {
                    id: 2,
                    attempt,
                    root: Some(Root { side: Role::Worker, id: 12 }),
                    method: "ping".into(),
                    parcels: vec![],
                    value: "null".into(),
                },
                receipts(vec![receipt(), receipt()]),
            ),
            (refuse(Of::Call), receipts(vec![receipt()])),
            (
                Message::Return { id, attempt, parcels: vec![parcel()], value: tensor },
                receipts(vec![receipt()]),
            ),
            (
                Message::Error {
                    id,
                    code: "unknown-method".into(),
                    text: "no method \"x\"".into(),
                },
                none(),
            ),
            (refuse(Of::Return), none()),
            (
                Message::More,
                Riders {
                    receipts: vec![receipt()],
                    accepted: vec![
                        Accepted { of: Of::Call, id, attempt },
                        Accepted { of: Of::Return, id: 2, attempt },
                    ],
                    notices: vec![(RungId::SHM, Meta::from_json(r#"{"x":[7]}"#.into()).unwrap())],
                },
            ),
        ]
    }

    /// The wire's form, committed: a change of it shows in review.
    #[test]
    fn messages_are_what_they_were() {
        let golden = include_str!("../tests/golden/messages.jsonl");
        let mut written = String::new();
        for (message, riders) in every_message() {
            let json = encode(&message, &riders).unwrap();
            let (back, back_riders) = decode(&json).unwrap();
            assert_eq!(encode(&back, &back_riders).unwrap(), json);
            written += &json;
            written.push('\n');
        }
        if std::env::var_os("BLESS").is_some() {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/messages.jsonl");
            std::fs::write(path, &written).unwrap();
            return;
        }
        assert_eq!(written, golden, "run with BLESS=1 where the change is meant");
    }

    #[test]
    fn what_is_no_message_is_a_fault() {
        for json in [
            "",
            "1",
            "{}",
            r#"{"v":2,"k":"more"}"#,
            r#"{"v":3,"k":"what"}"#,
            r#"{"v":3,"k":"more","acc":[["call",1]]}"#,
            r#"{"v":3,"k":"more","acc":[["hello",1,1]]}"#,
            r#"{"v":3,"k":"more","say":[["shm"]]}"#,
            r#"{"v":3,"k":"call","id":1,"n":1,"m":"x","p":[]}"#,
            r#"{"v":3,"k":"call","id":1,"n":1,"m":"x","p":[{}],"a":1}"#,
            r#"{"v":3,"k":"call","id":-1,"n":1,"m":"x","p":[],"a":1}"#,
            r#"{"v":3,"k":"more","rel":[],"extra":1}"#,
            r#"{"v":3,"k":"call","id":1,"n":1,"t":"x1","m":"x","p":[],"a":1}"#,
            r#"{"v":3,"k":"call","id":1,"n":1,"t":"h+1","m":"x","p":[],"a":1}"#,
            r#"{"v":3,"k":"call","id":1,"n":1,"t":"","m":"x","p":[],"a":1}"#,
        ] {
            assert_eq!(decode(json).unwrap_err().reason(), Reason::BadMetadata, "{json}");
        }
        let long = format!(
            r#"{{"v":3,"k":"call","id":1,"n":1,"m":"{}","p":[],"a":1}}"#,
            "x".repeat(limits::METHOD_NAME + 1)
        );
        assert_eq!(decode(&long).unwrap_err().reason(), Reason::OverCap);
    }

    #[test]
    fn a_hello_of_another_version_names_it() {
        let json = r#"{"v":1,"k":"hello","role":"worker","p":[1,1],"lib":"0.1.0","offers":[]}"#;
        let Ok((Message::Hello(hello), _)) = decode(json) else { panic!() };
        assert_eq!(hello.protocol, [1, 1]);
        let json = r#"{"v":1,"k":"call","role":"worker","p":[1,1]}"#;
        assert_eq!(decode(json).unwrap_err().reason(), Reason::BadMetadata);
    }

    #[test]
    fn a_long_text_keeps_both_ends() {
        let text = format!("first{}last", "é".repeat(5_000));
        let cut = cut(&text);
        assert!(cut.starts_with("first") && cut.ends_with("last") && cut.contains(" … "));
        assert_eq!(cut.chars().count(), TEXT + 3);
        assert_eq!(super::cut("short"), "short");
    }

    #[test]
    fn a_null_value_is_a_value() {
        let json = r#"{"v":3,"k":"ret","id":1,"n":1,"p":[],"a":null}"#;
        let (Message::Return { value, .. }, _) = decode(json).unwrap() else { panic!() };
        assert_eq!(value, "null");
    }
}
