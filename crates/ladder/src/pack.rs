//! A value as JSON, parcels and owners: everything decided before anything is sent.
//!
//! Three passes:
//!
//! 1. [`Survey`]: which leaves a form takes, which containers hold leaves that ride a carrier, and which
//!    storages and parts of them those leaves look at.
//! 2. [`place`]: shared storages go as they are; private ones, or the parts looked at, are bundled,
//!    so that a thousand small tensors are a few blocks. Each resulting storage is exported once: the
//!    message's table. Views of one storage stay views of one storage.
//! 3. The codec writes the value, with [`Packer`] splicing in what rides a rung.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use canary::{Digest, digest};
use rung::{
    Access, Device, Fault, Handle, Layout, LeaseId, Lowered, Meta, Owner, ParcelWire, Path, Reason,
    Refusal, RungId, Storage, Tensor, Unsendable, Value, limits,
};
use serde::{Deserialize, Serialize};
use tier_inline::codec::{self, Splice};

use crate::bundle::Bundle;
use crate::core::Core;
use crate::keeper::LeaseGuard;
use crate::ladder::{MINE, Sessions, Via, Way};
use crate::route::{LeafPath, Leg, Route, What, share};
pub(crate) use crate::survey::Blocks;
use crate::survey::{Named, Places, Survey, Table, Taken, address, place};

/// A tensor's content of a `$T` tag.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorTag {
    pub(crate) d: rung::DType,
    pub(crate) h: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) t: Option<Vec<isize>>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) o: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) s: Option<usize>,
    #[serde(default, skip_serializing_if = "no_flags")]
    pub(crate) f: u8,
    /// Of the elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) x: Option<Digest>,
}

/// The content of a `$S` or `$B` tag.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BlobTag {
    pub(crate) s: usize,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) o: usize,
    pub(crate) n: usize,
    /// Of the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) x: Option<Digest>,
}

/// The content of a `$L` tag: a leaf that a form took.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoweredTag {
    pub(crate) r: RungId,
    pub(crate) m: Meta,
    #[serde(deserialize_with = "a_few")]
    pub(crate) p: Vec<TensorTag>,
}

/// No more views than a leaf may have, counted before they are kept.
fn a_few<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<TensorTag>, D::Error> {
    struct Few;
    impl<'de> serde::de::Visitor<'de> for Few {
        type Value = Vec<TensorTag>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "at most {} views", limits::LEAF_VIEWS)
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(
            self,
            mut seq: A,
        ) -> Result<Self::Value, A::Error> {
            let mut views = Vec::new();
            while let Some(view) = seq.next_element()? {
                if views.len() == limits::LEAF_VIEWS {
                    return Err(serde::de::Error::custom("too many views of one leaf"));
                }
                views.push(view);
            }
            Ok(views)
        }
    }
    deserializer.deserialize_seq(Few)
}

pub(crate) const READ_ONLY: u8 = 1;
pub(crate) const REQUIRES_GRAD: u8 = 2;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn no_flags(flags: &u8) -> bool {
    *flags == 0
}

/// Whose names a route has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// Every leaf's.
    All,
    /// Not those of what stays in the JSON: nobody reads the route of an answer, but what is said of its bulk.
    Bulk,
}

/// A packed value.
#[derive(Default)]
pub(crate) struct Packing {
    pub(crate) value: String,
    pub(crate) parcels: Vec<ParcelWire>,
    pub(crate) handles: Vec<Handle>,
    pub(crate) owners: Vec<crate::keeper::Exported>,
    /// What each parcel rides.
    pub(crate) ways: Vec<Way>,
    pub(crate) route: Route,
}

/// How a value is packed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How<'a> {
    pub(crate) blocks: Blocks,
    pub(crate) names: Names,
    pub(crate) via: Via<'a>,
    pub(crate) sampling: Option<&'a Sampling>,
    /// Whether a digest goes with every leaf, sampled or not: the last attempt came to be something else.
    pub(crate) doubted: bool,
    /// Which channel this is.
    pub(crate) channel: u64,
    /// What could not be proven in time, and is not waited for again in this message.
    pub(crate) avoid: &'a [(Way, Refusal)],
}

impl How<'_> {
    fn avoided(&self, way: &Way) -> Option<&Refusal> {
        self.avoid.iter().find(|(avoided, _)| avoided == way).map(|(_, why)| why)
    }
}

/// Which leaves a digest goes with.
#[derive(Debug, Default)]
pub(crate) struct Sampling {
    /// Of so many leaves one; 0 for none.
    pub(crate) every: AtomicU32,
    /// Leaves so far.
    leaves: AtomicU32,
}

impl Sampling {
    fn takes_the_next(&self) -> bool {
        match self.every.load(Ordering::Relaxed) {
            0 => false,
            every => self.leaves.fetch_add(1, Ordering::Relaxed).is_multiple_of(every),
        }
    }
}

/// How often the bytes of a message may be digested: views may show the same ones many times, and whoever
/// receives them must not be kept busy by a few words.
pub(crate) const DIGESTED: usize = 4;

/// Bytes of the blocks under some storages: one that is named many times is there once.
pub(crate) fn bytes_of<'a>(storages: impl Iterator<Item = &'a Arc<Storage>>) -> usize {
    let mut blocks: HashMap<u64, usize> = HashMap::new();
    for storage in storages {
        let known = blocks.entry(storage.memory().block()).or_default();
        *known = storage.len().max(*known);
    }
    blocks.values().fold(0, |all, len| all.saturating_add(*len))
}

/// Why nothing was packed.
#[derive(Debug)]
pub(crate) enum NotPacked {
    /// No rung takes a leaf.
    Unsendable(Unsendable),
    /// Something is to be proven first; then it can be tried again.
    Unproven(Need),
}

impl From<Unsendable> for NotPacked {
    fn from(unsendable: Unsendable) -> Self {
        Self::Unsendable(unsendable)
    }
}

/// What is to be proven before a value can be sent: a rung on a device, or that this peer can take what another
/// one lent.
#[derive(Debug)]
pub(crate) struct Need {
    pub(crate) way: Way,
    /// Whose memory it is, where that is another peer's.
    pub(crate) lender: Option<Weak<Core>>,
}

/// Packs a value for one peer.
///
/// # Errors
///
/// The first leaf that no rung takes, or what is to be proven first; nothing stays exported then.
pub(crate) fn pack(value: &Value, sessions: &Sessions, how: How<'_>) -> Result<Packing, NotPacked> {
    let How { blocks, names, via, .. } = how;
    let mut survey = Survey::new(sessions, via);
    survey.look_at(value)?;
    let mixed = std::mem::take(&mut survey.mixed);
    let taken = std::mem::take(&mut survey.taken);
    let declined = std::mem::take(&mut survey.declined);
    // About as many as there are leaves.
    let legs = Vec::with_capacity(survey.nodes().min(1024));
    let (places, table) = place(survey, blocks);
    if let Some(need) = first_need(&table, sessions, how) {
        return Err(NotPacked::Unproven(need));
    }
    let bytes = || bytes_of(table.iter().map(|(storage, _)| storage));
    let sampled = how.sampling.is_some_and(|sampling| sampling.every.load(Ordering::Relaxed) > 0);
    let digests = sampled || how.doubted;
    let mut packer = Packer {
        sessions,
        how,
        digestible: if digests { bytes().saturating_mul(DIGESTED) } else { 0 },
        mixed,
        taken,
        declined,
        names,
        scratch: String::new(),
        places,
        table: Vec::with_capacity(table.len()),
        route: Route { legs },
    };
    let mut packing = Packing::default();
    let packed = pack_into(&mut packing, value, table, &mut packer);
    packing.route = packer.route;
    if let Err(not_packed) = packed {
        undo(packing, sessions);
        return Err(not_packed);
    }
    Ok(packing)
}

/// What was packed is not sent: nothing stays exported.
pub(crate) fn undo(packing: Packing, sessions: &Sessions) {
    for (rung, lease, _, owner) in packing.owners {
        sessions.take_back(&rung, lease, Some(owner));
    }
}

fn pack_into(
    packing: &mut Packing,
    value: &Value,
    table: Table,
    packer: &mut Packer<'_>,
) -> Result<(), NotPacked> {
    for (storage, first) in table {
        let exported = export(packer.sessions, &storage, &first, packer.how)?;
        packing.ways.push(
            exported.another.unwrap_or_else(|| (MINE, exported.rung.clone(), storage.device())),
        );
        let (rung, lease, bytes) = (exported.rung, exported.lease, storage.len() as u64);
        packing.owners.push((rung.clone(), lease, bytes, exported.owner));
        packing.parcels.push(exported.wire);
        packing.handles.extend(exported.handles);
        packer.table.push(Carried {
            rung,
            copies: exported.copies,
            origin: exported.origin.or(storage.origin()),
            access: exported.access,
            declined: exported.declined.into(),
            bytes: storage.len(),
            time: exported.time,
        });
    }
    Ok(codec::encode(value, &mut packing.value, packer)?)
}

struct Exported {
    rung: RungId,
    /// The device whose memory it was, where it was copied to the host.
    origin: Option<Device>,
    lease: LeaseId,
    wire: ParcelWire,
    handles: Vec<Handle>,
    owner: Owner,
    access: Access,
    copies: u8,
    declined: Vec<(RungId, Refusal)>,
    time: Duration,
    /// Whose memory it is, where that is another peer's and goes on as it is.
    another: Option<Way>,
}

/// Whose memory a storage is, if it is another channel's peer's, and on which rung it came.
fn lent_by_another(storage: &Storage, how: How<'_>) -> Option<(Way, Weak<Core>)> {
    let Via::Proven = how.via else { return None };
    let rung = &storage.provenance()?.rung;
    let (channel, core) = storage.guard_as::<LeaseGuard>()?.channel()?;
    // What is ours and came back is ours to lend.
    let another = channel != how.channel && !storage.memory().is_ours();
    another.then(|| ((channel, rung.clone(), storage.device()), core))
}

/// What is to be proven before a storage is offered to a carrier: where it is another peer's, that it can go on.
fn need_of(
    id: &RungId,
    carrier: &Result<&dyn rung::Carrier, Refusal>,
    device: Device,
    another: Option<&(Way, Weak<Core>)>,
    sessions: &Sessions,
    how: How<'_>,
) -> Option<Need> {
    let need = match (carrier, another) {
        (Err(why), _) if why.reason() == Reason::Unproven && sessions.session(id).is_some() => {
            Need { way: (MINE, id.clone(), device), lender: None }
        }
        (Ok(_), Some((way, lender))) if way.1 == *id && sessions.forward(way).is_none() => {
            Need { way: way.clone(), lender: Some(Weak::clone(lender)) }
        }
        _ => return None,
    };
    how.avoided(&need.way).is_none().then_some(need)
}

/// The first thing that is surely to be proven, before anything of a table is copied for it: down to the first
/// carrier of each storage that is in order.
fn first_need(table: &Table, sessions: &Sessions, how: How<'_>) -> Option<Need> {
    let Via::Proven = how.via else { return None };
    table.iter().find_map(|(storage, _)| {
        let device = storage.device();
        let another = lent_by_another(storage, how);
        for (id, carrier) in sessions.carriers(device, how.via) {
            let need = need_of(id, &carrier, device, another.as_ref(), sessions, how);
            if need.is_some() || carrier.is_ok() {
                return need;
            }
        }
        None
    })
}

/// Down the carriers until one takes it.
fn export(
    sessions: &Sessions,
    storage: &Arc<Storage>,
    first: &Named,
    how: How<'_>,
) -> Result<Exported, NotPacked> {
    let mut declined = Vec::new();
    let another = lent_by_another(storage, how);
    let given = another.as_ref();
    if let Some(exported) = export_as_it_is(sessions, storage, first, how, given, &mut declined)? {
        let another = another.map(|(way, _)| way).filter(|way| way.1 == exported.rung);
        return Ok(Exported { another, ..exported });
    }
    if !storage.device().is_host()
        && let Some(exported) = stage(sessions, storage, first, how, &mut declined)
    {
        return Ok(exported);
    }
    if another.is_some() && storage.device().is_host() {
        // What cannot go on as it is can be copied.
        let copy = Arc::new(Storage::new(Bundle::copy_of(storage)));
        let exported = export_as_it_is(sessions, &copy, first, how, None, &mut declined)?;
        if let Some(exported) = exported {
            return Ok(exported);
        }
    }
    let Named { path, kind } = first.clone();
    Err(Unsendable { path, kind, refusals: declined }.into())
}

/// Memory of a device that no rung of devices takes: a carrier of host memory may copy it.
fn stage(
    sessions: &Sessions,
    storage: &Arc<Storage>,
    first: &Named,
    how: How<'_>,
    declined: &mut Vec<(RungId, Refusal)>,
) -> Option<Exported> {
    let started = Instant::now();
    let given = match how.blocks {
        Blocks::AsTheyAre => Arc::clone(storage),
        Blocks::Fresh => Arc::new(Storage::new(Unpooled(Arc::clone(storage)))),
    };
    for (id, carrier) in sessions.carriers(Device::Host, how.via) {
        let Ok(carrier) = carrier else { continue };
        // That it moves no device's memory as it is was no last word.
        declined.retain(|(rung, _)| rung != id);
        match carrier.export(&given) {
            Ok(packed) => {
                let exported = exported(sessions, id, packed, declined, started)?;
                let way = Some((MINE, id.clone(), Device::Host));
                let origin = Some(storage.device());
                return Some(Exported { another: way, origin, ..exported });
            }
            Err(refusal) => {
                tracing::debug!(rung = %id, code = %refusal.reason(), path = first.path, "declined");
                declined.push((id.clone(), refusal));
            }
        }
    }
    None
}

/// Memory of a device whose copy must lie in a block that was used for nothing before.
#[derive(Debug)]
struct Unpooled(Arc<Storage>);

impl rung::Memory for Unpooled {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn device(&self) -> Device {
        self.0.device()
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        self.0.host_bytes()
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        self.0.memory().read_at(offset, into)
    }

    fn needs_fresh_memory(&self) -> bool {
        true
    }
}

/// What a carrier packed, apart; or back, where it cannot be sent.
fn exported(
    sessions: &Sessions,
    id: &RungId,
    packed: rung::Packed,
    declined: &mut Vec<(RungId, Refusal)>,
    started: Instant,
) -> Option<Exported> {
    let (lease, copies) = (packed.parcel.lease, packed.parcel.copies);
    match packed.parcel.split() {
        Ok((wire, handles)) => Some(Exported {
            rung: id.clone(),
            origin: None,
            lease,
            wire,
            handles,
            owner: packed.owner,
            access: packed.access,
            copies,
            declined: std::mem::take(declined),
            time: started.elapsed(),
            another: None,
        }),
        Err(fault) => {
            sessions.take_back(id, lease, Some(packed.owner));
            declined.push((id.clone(), fault.into()));
            None
        }
    }
}

fn export_as_it_is(
    sessions: &Sessions,
    storage: &Arc<Storage>,
    first: &Named,
    how: How<'_>,
    another: Option<&(Way, Weak<Core>)>,
    declined: &mut Vec<(RungId, Refusal)>,
) -> Result<Option<Exported>, NotPacked> {
    let started = Instant::now();
    let device = storage.device();
    for (id, carrier) in sessions.carriers(device, how.via) {
        if let Via::Proven = how.via
            && let Some(need) = need_of(id, &carrier, device, another, sessions, how)
        {
            return Err(NotPacked::Unproven(need));
        }
        let forward = match another.filter(|(way, _)| carrier.is_ok() && way.1 == *id) {
            None => Ok(()),
            Some((way, _)) => match sessions.forward(way) {
                Some(verdict) => verdict.usable(),
                None => Err(how.avoided(way).cloned().unwrap_or(Reason::Unproven.into())),
            },
        };
        let packed = carrier.and_then(|carrier| {
            forward?;
            carrier.export(storage)
        });
        match packed {
            Ok(packed) => {
                if let Some(exported) = exported(sessions, id, packed, declined, started) {
                    return Ok(Some(exported));
                }
            }
            Err(refusal) => {
                let not_now = how.avoided(&(MINE, id.clone(), device)).cloned();
                let refusal = not_now.unwrap_or(refusal);
                tracing::debug!(rung = %id, code = %refusal.reason(), path = first.path, "declined");
                declined.push((id.clone(), refusal));
            }
        }
    }
    Ok(None)
}

/// One entry of the table once it is exported.
struct Carried {
    rung: RungId,
    copies: u8,
    origin: Option<Device>,
    access: Access,
    declined: Arc<[(RungId, Refusal)]>,
    bytes: usize,
    time: Duration,
}

impl Carried {
    /// What so many of its bytes took.
    fn share(&self, bytes: usize) -> Duration {
        share(self.time, bytes, self.bytes)
    }
}

/// The third pass.
struct Packer<'a> {
    sessions: &'a Sessions,
    how: How<'a>,
    /// Bytes that may still be digested.
    digestible: usize,
    mixed: HashSet<usize>,
    names: Names,
    /// For paths.
    scratch: String,
    taken: HashMap<usize, Taken>,
    declined: HashMap<usize, Vec<(RungId, Refusal)>>,
    places: Places,
    table: Vec<Carried>,
    route: Route,
}

impl Packer<'_> {
    /// Whether a digest goes with the next leaf.
    fn is_sampled(&self) -> bool {
        let How { sampling, doubted, .. } = self.how;
        self.digestible > 0 && (doubted || sampling.is_some_and(Sampling::takes_the_next))
    }

    /// What the receiver is to check, where it may be asked to and this side can read the memory; `bytes` is
    /// what the check costs it.
    fn digest(
        &mut self,
        sampled: bool,
        bytes: usize,
        digest: impl FnOnce() -> Result<Digest, Refusal>,
    ) -> Option<Digest> {
        if !sampled || bytes > self.digestible {
            return None;
        }
        let digest = digest().ok()?;
        self.digestible -= bytes;
        Some(digest)
    }

    fn tag(&mut self, tensor: &Tensor, sampled: bool) -> Result<TensorTag, Refusal> {
        let flags = tensor.flags();
        let mut tag = TensorTag {
            d: tensor.dtype(),
            h: tensor.shape().to_vec(),
            t: None,
            o: 0,
            s: None,
            f: u8::from(flags.read_only) * READ_ONLY
                + u8::from(flags.requires_grad) * REQUIRES_GRAD,
            x: None,
        };
        if tensor.count() == 0 {
            // No bytes on no block: the tag says all there is.
            return Ok(tag);
        }
        let known = self.places.by_storage.get(&address(&**tensor.storage()));
        let place = known.and_then(|&at| self.places.seen.get(at)).ok_or(Reason::UnknownStorage)?;
        let layout = if place.gathered {
            Layout::contiguous(tensor.dtype(), tensor.shape())?
        } else {
            tensor.layout().rebased(place.base)?
        };
        tag.o = layout.offset() + place.at;
        tag.s = Some(place.entry);
        if !layout.is_contiguous() {
            tag.t = Some(layout.strides().to_vec());
        }
        // Of what the caller has, not of what was packed.
        let cost = tensor.byte_count().max(layout.span().len());
        tag.x = self.digest(sampled, cost, || digest::of_elements(tensor));
        Ok(tag)
    }

    fn tensor(&mut self, tensor: &Tensor, path: &Path<'_>) -> Result<TensorTag, Refusal> {
        let sampled = self.is_sampled();
        let tag = self.tag(tensor, sampled)?;
        let what = What::Tensor(tensor.dtype(), tensor.shape().to_vec());
        match tag.s {
            Some(entry) => self.carried(path, what, tensor.byte_count(), entry, 0),
            None => {
                self.leg(path, what, 0, RungId::INLINE, Duration::ZERO);
                let empty = |(rung, _): (&RungId, _)| (rung.clone(), Reason::Empty.into());
                if let Some(leg) = self.route.legs.last_mut() {
                    let carriers = self.sessions.carriers(tensor.device(), self.how.via);
                    leg.declined = carriers.map(empty).collect();
                }
            }
        }
        Ok(tag)
    }

    /// A leaf that a form took.
    fn lowered(
        &mut self,
        value: &Value,
        taken: Taken,
        path: &Path<'_>,
        out: &mut String,
    ) -> Result<(), Refusal> {
        let Taken { form, lowered: Lowered { meta, views }, declined, time } = taken;
        let sampled = self.is_sampled();
        let p = views.iter().map(|view| self.tag(view, sampled)).collect::<Result<Vec<_>, _>>()?;
        let bytes: usize = views.iter().map(Tensor::byte_count).sum();
        let carried = p.iter().find_map(|tag| tag.s).and_then(|entry| self.table.get(entry));
        let what = What::of(value);
        // Nothing beside a tensor: it rides as one.
        let as_tensor = meta.as_json() == "null" && views.len() == 1;
        let (rung, over) = match carried {
            // Without bytes, as an empty tensor.
            carried if as_tensor => {
                (carried.map_or(RungId::INLINE, |carried| carried.rung.clone()), None)
            }
            carried => (form.clone(), carried.map(|carried| carried.rung.clone())),
        };
        // A plain subtree is written as a pickle, and that is copied; a pickle of the user's is just there.
        let written = u8::from(matches!(what, What::Plain(_)));
        let copies = carried.map_or(0, |carried| carried.copies).saturating_add(written);
        let declined = match carried {
            Some(carried) if as_tensor => Arc::clone(&carried.declined),
            _ => declined.into(),
        };
        let share = carried.map_or(Duration::ZERO, |carried| carried.share(bytes));
        let (path, bytes, time) =
            (LeafPath::of(path, &mut self.scratch), bytes as u64, time + share);
        let origin = carried.and_then(|carried| carried.origin);
        let each = p.iter().filter_map(|tag| self.table.get(tag.s?));
        let access = each.map(|carried| carried.access).max().unwrap_or(Access::Own);
        let leg = Leg { path, what, bytes, rung, over, copies, origin, access, declined, time };
        self.route.legs.push(leg);
        let tag = LoweredTag { r: form, m: meta, p };
        write_tag(out, "L", &tag).map_err(Refusal::from)
    }

    /// Whether it is a text or byte string that rides as one.
    fn is_blob(&self, value: &Value) -> bool {
        self.places.by_blob.contains_key(&address(value))
    }

    fn blob(
        &mut self,
        value: &Value,
        path: &Path<'_>,
        (what, bytes, more): (What, &[u8], u8),
    ) -> Result<BlobTag, Refusal> {
        let known = self.places.by_blob.get(&address(value));
        let place = known.and_then(|&at| self.places.seen.get(at)).ok_or(Reason::UnknownStorage)?;
        let (entry, at, len) = (place.entry, place.at, bytes.len());
        let sampled = self.is_sampled();
        let x = self.digest(sampled, len, || Ok(digest::of_bytes(bytes)));
        self.carried(path, what, len, entry, more);
        Ok(BlobTag { s: entry, o: at, n: len, x })
    }

    fn carried(&mut self, path: &Path<'_>, what: What, bytes: usize, entry: usize, more: u8) {
        let Some(carried) = self.table.get(entry) else {
            return;
        };
        self.route.legs.push(Leg {
            path: LeafPath::of(path, &mut self.scratch),
            what,
            bytes: bytes as u64,
            rung: carried.rung.clone(),
            over: None,
            copies: carried.copies + more,
            origin: carried.origin,
            access: carried.access,
            declined: Arc::clone(&carried.declined),
            time: carried.share(bytes),
        });
    }

    fn leg(&mut self, path: &Path<'_>, what: What, bytes: usize, rung: RungId, time: Duration) {
        let path = match self.names {
            Names::Bulk if rung == RungId::INLINE => LeafPath::default(),
            _ => LeafPath::of(path, &mut self.scratch),
        };
        self.route.legs.push(Leg {
            path,
            what,
            bytes: bytes as u64,
            rung,
            over: None,
            copies: 0,
            origin: None,
            access: Access::Own,
            declined: self.sessions.above_inline(),
            time,
        });
    }

    /// A maximal subtree that stays in the JSON.
    fn plain(
        &mut self,
        value: &Value,
        path: &Path<'_>,
        out: &mut String,
    ) -> Result<(), Unsendable> {
        // Where a higher rung was asked in vain.
        let above = self.declined.remove(&address(value));
        match tier_inline::write(value, out) {
            Ok(len) => {
                let what = What::Plain(value.kind());
                self.leg(path, what, len, RungId::INLINE, Duration::ZERO);
                if let (Some(declined), Some(leg)) = (above, self.route.legs.last_mut()) {
                    leg.declined = declined.into();
                }
                Ok(())
            }
            // The path is from here.
            Err(Unsendable { path: rest, kind, refusals: why }) => {
                let path = path.text() + rest.strip_prefix('$').unwrap_or(&rest);
                let mut refusals = above.unwrap_or_else(|| self.sessions.above_inline().to_vec());
                refusals.extend(why);
                Err(Unsendable { path, kind, refusals })
            }
        }
    }
}

fn write_tag(out: &mut String, tag: &str, content: &impl Serialize) -> Result<(), Fault> {
    let json = serde_json::to_string(content)
        .map_err(|error| Fault::new(Reason::BadMetadata, error.to_string()))?;
    out.push_str("{\"$");
    out.push_str(tag);
    out.push_str("\":");
    out.push_str(&json);
    out.push('}');
    Ok(())
}

impl Splice for Packer<'_> {
    fn splice(
        &mut self,
        value: &Value,
        path: &Path<'_>,
        out: &mut String,
    ) -> Result<bool, Unsendable> {
        let refused = |refusal: Refusal| Unsendable {
            path: path.text(),
            kind: value.kind().to_owned(),
            refusals: vec![(RungId::INLINE, refusal)],
        };
        let unwritten = |fault: Fault| refused(fault.into());
        if !self.taken.is_empty()
            && let Some(taken) = self.taken.remove(&address(value))
        {
            self.lowered(value, taken, path, out).map_err(refused)?;
            return Ok(true);
        }
        match value {
            Value::Tensor(tensor) => {
                let tag = self.tensor(tensor, path).map_err(refused)?;
                write_tag(out, "T", &tag).map_err(unwritten)?;
            }
            Value::Str(text) if self.is_blob(value) => {
                // A String is cloned into its storage first.
                let tag =
                    self.blob(value, path, (What::Str, text.as_bytes(), 1)).map_err(refused)?;
                write_tag(out, "S", &tag).map_err(unwritten)?;
            }
            Value::Bytes(bytes) if self.is_blob(value) => {
                let tag = self.blob(value, path, (What::Bytes, &bytes[..], 0)).map_err(refused)?;
                write_tag(out, "B", &tag).map_err(unwritten)?;
            }
            // Its tag is the codec's, and its parts come one by one.
            Value::Object(object) => {
                let bytes = object.tag().len();
                self.leg(path, What::of(value), bytes, RungId::INLINE, Duration::ZERO);
                return Ok(false);
            }
            // The skeleton around such leaves is the codec's.
            Value::List(_) | Value::Tuple(_) | Value::Set(_) | Value::Map(_)
                if self.mixed.contains(&address(value)) =>
            {
                return Ok(false);
            }
            _ => self.plain(value, path, out)?,
        }
        Ok(true)
    }
}
