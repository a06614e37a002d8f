//! JSON and parcels as a value again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use canary::{Digest, digest};
use rung::{
    Access, Fault, Flags, Handle, Layout, Lendable, Lowered, Parcel, ParcelWire, Path, Reason,
    Refusal, Room, RungId, Step, Storage, Tensor, Value, limits,
};
use serde_json::value::RawValue;
use tier_inline::codec::{self, Node, Unsplice};

use crate::keeper::{LeaseGuard, Returns};
use crate::ladder::Sessions;
use crate::pack::{BlobTag, DIGESTED, LoweredTag, READ_ONLY, REQUIRES_GRAD, TensorTag, bytes_of};
use crate::route::{LeafPath, Leg, Route, What, share};

/// An imported storage and how it came.
#[derive(Debug)]
pub(crate) struct Entry {
    storage: Arc<Storage>,
    rung: RungId,
    copies: u8,
    time: Duration,
}

/// Why a message was not taken.
#[derive(Debug)]
pub(crate) enum NotTaken {
    /// One of its storages could not be imported: a NACK, and the sender tries something else.
    Storage(usize, RungId, Fault),
    /// Parcels and handles do not fit: the peer broke the protocol.
    Broken(Fault),
}

/// Imports every storage of a message.
///
/// Every lease of the message goes home, whatever happens: those imported through the guard in their
/// storage, the others by the returns at once.
///
/// # Errors
///
/// The first storage that cannot be imported, or a message whose handles do not fit.
pub(crate) fn import(
    sessions: &Sessions,
    returns: &Arc<Returns>,
    parcels: Vec<ParcelWire>,
    handles: &mut VecDeque<Handle>,
) -> Result<Vec<Entry>, NotTaken> {
    let mut table = Vec::with_capacity(parcels.len());
    let mut outcome = Ok(());
    for (index, wire) in parcels.into_iter().enumerate() {
        // Made first: the lease goes home also where the import fails.
        let (rung, lease) = wire.lease();
        let guard = LeaseGuard::new(returns, rung.clone(), lease);
        if outcome.is_err() {
            sessions.unopened(&wire);
            drop(handles.drain(..wire.handle_count().min(handles.len())));
            continue;
        }
        let started = Instant::now();
        let parcel = match Parcel::join(wire, handles) {
            Ok(parcel) => parcel,
            Err(fault) => {
                outcome = Err(NotTaken::Broken(fault));
                continue;
            }
        };
        let (rung, copies) = (parcel.rung.clone(), parcel.copies);
        let declared = parcel.bytes;
        let imported = match sessions.carrier(&rung) {
            Some(carrier) => carrier.import(parcel),
            None => Err(Fault::new(Reason::UnknownRung, rung.as_str())),
        };
        // Less than was sent would be malformed, and no other way be tried.
        let imported = imported.and_then(|storage| {
            let len = storage.len();
            if len as u64 == declared {
                return Ok(storage);
            }
            Err(Fault::new(Reason::WrongSize, format!("{declared} bytes declared, {len} taken")))
        });
        match imported {
            Ok(storage) => table.push(Entry {
                storage: Arc::new(storage.with_guard(guard)),
                rung,
                copies,
                time: started.elapsed(),
            }),
            Err(fault) => {
                tracing::warn!(%rung, code = %fault.reason(), "not imported: {fault}");
                outcome = Err(NotTaken::Storage(index, rung, fault));
            }
        }
    }
    outcome.map(|()| table)
}

/// A value that was read, and how its leaves came.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) value: Value,
    /// By the number of the node, ascending.
    arrivals: Vec<(usize, Leg)>,
    /// What this side could not take before it came as it did.
    pub(crate) refused: Vec<(RungId, Refusal)>,
}

/// Why a value was not read.
#[derive(Debug)]
pub(crate) enum NotRead {
    /// It is not what the wire says.
    Malformed(Fault),
    /// Of a leaf on this storage other contents came than were sent: a NACK, as for one that was not imported.
    Corrupt(usize, RungId, Fault),
}

/// Reads a value over an imported table.
///
/// # Errors
///
/// Whatever in it is not what the wire says, or not what its digest says.
pub(crate) fn read(json: &str, table: &[Entry], sessions: &Sessions) -> Result<Read, NotRead> {
    let room = match table {
        [one] => one.storage.len(),
        table => bytes_of(table.iter().map(|entry| &entry.storage)),
    };
    let mut reader = Reader {
        sessions,
        table,
        arrivals: Vec::new(),
        room,
        raised: Room::of(room),
        digestible: room.saturating_mul(DIGESTED),
        corrupt: None,
    };
    let decoded = codec::decode(json, &mut reader);
    match (reader.corrupt, decoded) {
        (Some((storage, fault)), _) => {
            let rung = table.get(storage).map_or(RungId::INLINE, |entry| entry.rung.clone());
            Err(NotRead::Corrupt(storage, rung, fault))
        }
        (None, Ok(value)) => Ok(Read { value, arrivals: reader.arrivals, refused: Vec::new() }),
        (None, Err(fault)) => Err(NotRead::Malformed(fault)),
    }
}

impl Read {
    /// The leaves that are tags of their own in the JSON (tensors without elements too), without their paths.
    pub(crate) fn legs(&self) -> impl Iterator<Item = &Leg> {
        self.arrivals.iter().map(|(_, leg)| leg)
    }

    /// The route: worked out when somebody asks, since it takes another look at the whole value.
    pub(crate) fn route(&self) -> Route {
        let mut namer = Namer {
            arrivals: &self.arrivals,
            node: 0,
            route: Route::default(),
            scratch: String::new(),
        };
        namer.look(&self.value, &Path::ROOT);
        let mut route = namer.route;
        route.tell(&self.refused);
        route
    }
}

struct Namer<'a> {
    arrivals: &'a [(usize, Leg)],
    node: usize,
    route: Route,
    /// For paths.
    scratch: String,
}

impl Namer<'_> {
    fn look(&mut self, value: &Value, path: &Path<'_>) {
        let end = self.node + codec::nodes(value);
        let from = self.arrivals.partition_point(|(node, _)| *node < self.node);
        match self.arrivals.get(from) {
            Some((node, leg)) if *node == self.node => {
                self.route
                    .legs
                    .push(Leg { path: LeafPath::of(path, &mut self.scratch), ..leg.clone() });
                self.node = end;
            }
            Some((node, _)) if *node < end => {
                self.node += 1;
                self.look_inside(value, path);
            }
            // An object is taken apart wherever it stands.
            _ if has_object(value) => {
                self.node += 1;
                self.look_inside(value, path);
            }
            _ => {
                let mut json = String::new();
                // It was decoded, so it encodes; were it not to, its length is not known.
                let _ = codec::encode(value, &mut json, &mut codec::Plain);
                let what = What::Plain(value.kind());
                let mut leg = inline(what, json.len());
                leg.path = LeafPath::of(path, &mut self.scratch);
                self.route.legs.push(leg);
                self.node = end;
            }
        }
    }

    fn look_inside(&mut self, value: &Value, path: &Path<'_>) {
        if let Value::Object(object) = value {
            let leg = inline(What::of(value), object.tag().len());
            self.route.legs.push(Leg { path: LeafPath::of(path, &mut self.scratch), ..leg });
        }
        match value {
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                for (index, item) in items.iter().enumerate() {
                    self.look(item, &path.then(Step::Index(index)));
                }
            }
            Value::Map(map) => {
                let plain = codec::has_plain_keys(map);
                for (index, (key, item)) in map.iter().enumerate() {
                    let entry = path.then(Step::of_entry(key, index));
                    if !plain {
                        self.look(key, &entry);
                    }
                    self.look(item, &entry);
                }
            }
            Value::Object(object) => {
                self.look(object.schema(), &path.then(Step::Key("schema")));
                for (index, part) in object.parts().iter().enumerate() {
                    self.look(part, &path.then(Step::Index(index)));
                }
            }
            _ => {}
        }
    }
}

fn has_object(value: &Value) -> bool {
    match value {
        Value::Object(_) => true,
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            items.iter().any(has_object)
        }
        Value::Map(map) => map.iter().any(|(key, item)| has_object(key) || has_object(item)),
        _ => false,
    }
}

fn inline(what: What, bytes: usize) -> Leg {
    Leg {
        path: LeafPath::default(),
        what,
        bytes: bytes as u64,
        rung: RungId::INLINE,
        over: None,
        copies: 0,
        origin: None,
        access: Access::Own,
        declined: Arc::default(),
        time: Duration::ZERO,
    }
}

struct Reader<'a> {
    sessions: &'a Sessions,
    table: &'a [Entry],
    arrivals: Vec<(usize, Leg)>,
    /// How many bytes may still be copied out: many tags over one block are no reason to copy it many
    /// times.
    room: usize,
    /// What the leaves that a form took may still become.
    raised: Room,
    /// Bytes that may still be digested.
    digestible: usize,
    /// The first leaf that was not what its digest says: its storage.
    corrupt: Option<(usize, Fault)>,
}

fn content<'a, T: serde::Deserialize<'a>>(content: &'a RawValue) -> Result<T, Fault> {
    serde_json::from_str(content.get())
        .map_err(|error| Fault::new(Reason::BadMetadata, error.to_string()))
}

impl Reader<'_> {
    fn entry(&self, index: usize) -> Result<&Entry, Fault> {
        self.table.get(index).ok_or_else(|| {
            let detail = format!("{index} of {}", self.table.len());
            Fault::new(Reason::UnknownStorage, detail)
        })
    }

    fn arrived(&mut self, node: Node, what: What, bytes: usize, entry: Option<usize>, more: u8) {
        let leg = match entry.and_then(|index| self.table.get(index)) {
            Some(entry) => Leg {
                rung: entry.rung.clone(),
                copies: entry.copies.saturating_add(more),
                origin: entry.storage.origin(),
                access: entry.storage.memory().access(),
                time: share(entry.time, bytes, entry.storage.len()),
                ..inline(what, bytes)
            },
            None => inline(what, bytes),
        };
        self.arrivals.push((node.number, leg));
    }

    /// Holds a leaf to its digest, where one came with it.
    fn check(
        &mut self,
        expected: Option<Digest>,
        storage: Option<usize>,
        bytes: usize,
        digest: impl FnOnce() -> Result<Digest, Refusal>,
    ) -> Result<(), Fault> {
        let Some(expected) = expected else { return Ok(()) };
        self.digestible = self.digestible.checked_sub(bytes).ok_or_else(|| {
            Fault::new(Reason::OverCap, "more bytes to digest than the message has")
        })?;
        let fault = match digest() {
            Ok(digest) if digest == expected => return Ok(()),
            Ok(_) => Fault::new(Reason::Corrupt, format!("a leaf of {bytes} bytes")),
            // What cannot be read here cannot be held to it: another way then.
            Err(refusal) => refusal.into(),
        };
        self.corrupt = Some((storage.unwrap_or(0), fault.clone()));
        Err(fault)
    }

    fn tensor(&mut self, tag: TensorTag) -> Result<Tensor, Fault> {
        let TensorTag { d, h, t, o, s, f, x } = tag;
        if f & !(READ_ONLY | REQUIRES_GRAD) != 0 {
            return Err(Fault::new(Reason::BadMetadata, format!("tensor flags {f}")));
        }
        let flags = Flags { read_only: f & READ_ONLY != 0, requires_grad: f & REQUIRES_GRAD != 0 };
        let whole = Layout::contiguous(d, &h)?;
        let tensor = match s {
            None if whole.count() == 0 => {
                let empty = Arc::new(Storage::from_bytes(Vec::new()));
                Tensor::contiguous(empty, d, whole.shape())?
            }
            None => return Err(Fault::new(Reason::UnknownStorage, "a tensor without one")),
            Some(index) => {
                let storage = Arc::clone(&self.entry(index)?.storage);
                let strides = t.as_deref().unwrap_or(whole.strides());
                Tensor::new(storage, d, whole.shape(), strides, o)?
            }
        };
        let cost = tensor.byte_count().max(tensor.layout().span().len());
        self.check(x, s, cost, || digest::of_elements(&tensor))?;
        Ok(tensor.with_flags(flags))
    }

    /// A leaf that a form took.
    fn raise(&mut self, tag: LoweredTag, node: Node) -> Result<Value, Fault> {
        let LoweredTag { r, m, p } = tag;
        let entry = p.iter().find_map(|tag| tag.s);
        let each = p.iter().filter_map(|tag| self.table.get(tag.s?));
        let access = each.map(|entry| entry.storage.memory().access()).max();
        let as_tensor = m.as_json() == "null" && p.len() == 1;
        let views = p.into_iter().map(|tag| self.tensor(tag)).collect::<Result<Vec<_>, _>>()?;
        let bytes: usize = views.iter().map(Tensor::byte_count).fold(0, usize::saturating_add);
        // What the lowest rung takes stands in the JSON, where it is counted.
        let form = self.sessions.form(&r).filter(|_| r != RungId::INLINE);
        let form = form.ok_or_else(|| Fault::new(Reason::UnknownRung, r.as_str()))?;
        // One or two are a leaf's; any more are counted like values.
        self.raised.take(views.len().saturating_sub(2), 0)?;
        self.raised.depth = limits::VALUE_DEPTH + 1 - node.depth;
        let value = form.raise(Lowered { meta: m, views }, &mut self.raised)?;
        let what = What::of(&value);
        let copied = matches!(what, What::Plain(_));
        self.arrived(node, what, bytes, entry, u8::from(copied));
        if let Some((_, leg)) = self.arrivals.last_mut() {
            leg.access = access.unwrap_or(Access::Own);
        }
        if let Some((_, leg)) = self.arrivals.last_mut().filter(|_| !as_tensor) {
            leg.over = entry.is_some().then(|| leg.rung.clone());
            leg.rung = r;
        }
        Ok(value)
    }

    /// Takes from the bytes that may still be copied.
    fn charge(&mut self, bytes: usize) -> Result<(), Fault> {
        self.room = self.room.checked_sub(bytes).ok_or_else(|| {
            Fault::new(Reason::OverCap, "more bytes to copy than the message has")
        })?;
        Ok(())
    }

    /// The bytes of a blob: lent where they may be, else copied out.
    fn blob(&mut self, tag: &BlobTag, owned: bool) -> Result<(Bytes, u8), Fault> {
        let entry = self.entry(tag.s)?;
        let end = tag.o.checked_add(tag.n).filter(|&end| end <= entry.storage.len());
        let end = end.ok_or_else(|| {
            let detail = format!("{} bytes at {} of {}", tag.n, tag.o, entry.storage.len());
            Fault::new(Reason::OutOfBounds, detail)
        })?;
        let storage = Arc::clone(&entry.storage);
        let lent = Lendable::new(Arc::clone(&storage));
        if owned || lent.is_err() {
            self.charge(tag.n)?;
        }
        let (bytes, copies) = match lent {
            Ok(lent) => (Bytes::from_owner(lent).slice(tag.o..end), 0),
            Err(_) => (storage.read(tag.o..end)?.into_owned().into(), 1),
        };
        self.check(tag.x, Some(tag.s), tag.n, || Ok(digest::of_bytes(&bytes)))?;
        Ok((bytes, copies))
    }
}

impl Unsplice for Reader<'_> {
    fn unsplice(&mut self, tag: &str, raw: &RawValue, node: Node) -> Result<Value, Fault> {
        match tag {
            "T" => {
                let tag: TensorTag = content(raw)?;
                let entry = tag.s;
                let tensor = self.tensor(tag)?;
                let what = What::Tensor(tensor.dtype(), tensor.shape().to_vec());
                self.arrived(node, what, tensor.byte_count(), entry, 0);
                Ok(Value::Tensor(tensor))
            }
            "L" => self.raise(content(raw)?, node),
            "B" => {
                let tag: BlobTag = content(raw)?;
                let (bytes, copies) = self.blob(&tag, false)?;
                self.arrived(node, What::Bytes, tag.n, Some(tag.s), copies);
                Ok(Value::Bytes(bytes))
            }
            "S" => {
                let tag: BlobTag = content(raw)?;
                let (bytes, copies) = self.blob(&tag, true)?;
                let text = std::str::from_utf8(&bytes)
                    .map_err(|_| Fault::new(Reason::BadMetadata, "a string that is not UTF-8"))?;
                // A String owns its bytes, so they are copied out of the block.
                self.arrived(node, What::Str, tag.n, Some(tag.s), copies + 1);
                Ok(Value::Str(text.to_owned()))
            }
            other => Err(codec::unknown_tag(other)),
        }
    }
}
