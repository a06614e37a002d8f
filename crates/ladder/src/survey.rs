//! The first two passes of packing: what of a value rides a carrier, and on which block it goes.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rung::{
    Leaf, Lowered, Path, Reason, Refusal, RungId, Step, Storage, Tensor, Unsendable, Value, limits,
};
use tier_inline::codec;

use crate::bundle::{ALIGN, Bundle, Member};
use crate::ladder::{Sessions, Via};

/// How storages are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocks {
    /// Shared storages as they are.
    AsTheyAre,
    /// All copied to blocks that were used for nothing before: the answer to a block that the peer could not take.
    Fresh,
}

/// A leaf, for an error.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    pub(crate) path: String,
    pub(crate) kind: String,
}

impl Named {
    fn of(value: &Value, path: String) -> Self {
        let kind = match value {
            Value::Tensor(tensor) => format!("{} tensor", tensor.dtype()),
            Value::Array(array) => format!("array of {}", array.descr()),
            other => other.kind().to_owned(),
        };
        Self { path, kind }
    }
}

/// What is known of one storage before it is placed.
#[derive(Debug)]
pub(crate) struct Seen {
    storage: Arc<Storage>,
    span: Range<usize>,
    /// The only view, while there is one.
    view: Option<Tensor>,
    first: Named,
}

/// A leaf that a form took.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) form: RungId,
    pub(crate) lowered: Lowered,
    /// Each higher rung, and why not.
    pub(crate) declined: Vec<(RungId, Refusal)>,
    pub(crate) time: Duration,
}

/// The first pass.
#[derive(Debug)]
pub(crate) struct Survey<'s, 'v> {
    sessions: &'s Sessions,
    via: Via<'s>,
    /// Whether what is too much for the JSON can be pickled.
    pickles: bool,
    /// Containers that hold, at any depth, a leaf that rides a carrier, and objects; by address, since the
    /// value is borrowed and does not move.
    pub(crate) mixed: HashSet<usize>,
    /// Leaves that a form took, by address.
    pub(crate) taken: HashMap<usize, Taken>,
    /// Why no form above the lowest took a leaf that was too much for the JSON, by address.
    pub(crate) declined: HashMap<usize, Vec<(RungId, Refusal)>>,
    seen: Vec<Seen>,
    by_storage: HashMap<usize, usize>,
    by_blob: HashMap<usize, usize>,
    /// Parts that do not stay in the JSON though no memory is theirs: carried out once all was looked at,
    /// since what is around them may yet take them along.
    moving: Vec<Moving<'v>>,
    /// Values that the JSON has so far.
    nodes: usize,
    /// Values that pickles become on the other side, and views of leaves past the second.
    made: usize,
    /// Bytes of JSON that subtrees may still have.
    room: usize,
}

pub(crate) fn address<T: ?Sized>(of: &T) -> usize {
    std::ptr::from_ref(of).cast::<()>() as usize
}

#[derive(Debug)]
struct Moving<'v> {
    value: &'v Value,
    path: String,
    nodes: usize,
    keys: usize,
}

/// What was found out of a value.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// Whether a leaf in it rides a carrier as things stand, or it has an object in it.
    rides: bool,
    /// Whether that is more than long texts: memory, or an object.
    memory: bool,
    /// Bytes of its JSON, at most, without long texts.
    weight: usize,
    /// Bytes of long texts in it.
    long: usize,
    /// Values that it consists of.
    nodes: usize,
    /// Keys that are no values in the JSON, but are in a pickle.
    keys: usize,
}

impl Look {
    const MEMORY: Self = Self { rides: true, memory: true, weight: 0, long: 0, nodes: 1, keys: 0 };

    fn light(weight: usize) -> Self {
        Self { rides: false, memory: false, weight, long: 0, nodes: 1, keys: 0 }
    }
}

/// A container while its parts are looked at.
struct Whole<'v> {
    look: Look,
    /// Parts that ride no carrier, but are not small: leaves of their own if another part does.
    plain: Vec<(&'v Value, usize, Look)>,
    /// Values in the parts that are small.
    small: usize,
    /// How far things were before the first part.
    moving: usize,
    nodes: usize,
    room: usize,
}

impl<'v> Whole<'v> {
    fn add(&mut self, part: &'v Value, index: usize, look: Look) {
        let all = &mut self.look;
        all.rides |= look.rides;
        all.memory |= look.memory;
        all.weight += look.weight + 2;
        all.long = all.long.saturating_add(look.long);
        all.nodes += look.nodes;
        all.keys += look.keys;
        if !look.rides {
            if look.weight > limits::INLINE_LEAF {
                self.plain.push((part, index, look));
            } else {
                self.small += look.nodes;
            }
        }
    }
}

/// Bytes of a string in JSON, at most.
fn quoted(text: &str) -> usize {
    let escaped = |byte: &&u8| **byte < 0x20 || matches!(**byte, b'"' | b'\\');
    // A control character takes six, and a key that begins like a tag one more.
    text.len() + 3 + 5 * text.as_bytes().iter().filter(escaped).count()
}

fn digits(number: i64) -> usize {
    number.unsigned_abs().checked_ilog10().unwrap_or(0) as usize + 2
}

impl<'s, 'v> Survey<'s, 'v> {
    pub(crate) fn new(sessions: &'s Sessions, via: Via<'s>) -> Self {
        Self {
            sessions,
            via,
            pickles: sessions.form(&RungId::PICKLE).is_some(),
            mixed: HashSet::new(),
            taken: HashMap::new(),
            declined: HashMap::new(),
            seen: Vec::new(),
            by_storage: HashMap::new(),
            by_blob: HashMap::new(),
            moving: Vec::new(),
            nodes: 0,
            made: 0,
            room: limits::INLINE_SUBTREE,
        }
    }

    /// Values that the JSON has.
    pub(crate) fn nodes(&self) -> usize {
        self.nodes
    }

    /// Looks at a whole value.
    ///
    /// # Errors
    ///
    /// What is nested too deeply, what no form takes, and more values than a message may have.
    pub(crate) fn look_at(&mut self, value: &'v Value) -> Result<(), Unsendable> {
        let look = self.look(value, &Path::ROOT, 1)?;
        if !look.rides {
            self.plain(value, look, &Path::ROOT);
        }
        for Moving { value, path, nodes, keys } in std::mem::take(&mut self.moving) {
            if matches!(value, Value::Str(_) | Value::Bytes(_)) {
                self.blob(value, path);
                continue;
            }
            self.made = self.made.saturating_add(nodes + keys);
            if let Err(declined) = self.lower(value, Leaf::Plain(value), path) {
                // The lowest rung is asked when it is written: the weight is only what it may come to.
                self.nodes += nodes;
                self.declined.insert(address(value), declined);
            }
        }
        if self.made > limits::PICKLE_NODES {
            let detail = format!("over {} values in pickles", limits::PICKLE_NODES);
            let refusals = vec![(RungId::PICKLE, Refusal::new(Reason::TooLarge, detail))];
            return Err(unsendable(value, &Path::ROOT, refusals));
        }
        if self.nodes > limits::NODES {
            let refusal = Refusal::new(Reason::TooLarge, format!("over {} values", limits::NODES));
            return Err(unsendable(value, &Path::ROOT, vec![(RungId::INLINE, refusal)]));
        }
        Ok(())
    }

    /// A leaf with memory.
    fn rides(&mut self) -> Look {
        self.nodes += 1;
        Look::MEMORY
    }

    /// A text that is too long for the JSON, alone or among others.
    fn long(&mut self, value: &'v Value, path: &Path<'_>, len: usize) -> Look {
        self.nodes += 1;
        self.moving.push(Moving { value, path: path.text(), nodes: 1, keys: 0 });
        Look { rides: true, long: len, ..Look::light(0) }
    }

    fn whole(&self, look: Look) -> Whole<'v> {
        let (moving, nodes, room) = (self.moving.len(), self.nodes, self.room);
        Whole { look, plain: Vec::new(), small: 0, moving, nodes, room }
    }

    fn look(
        &mut self,
        value: &'v Value,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Look, Unsendable> {
        if depth > limits::VALUE_DEPTH {
            let refusal = Refusal::new(Reason::TooDeep, format!("at most {}", limits::VALUE_DEPTH));
            return Err(unsendable(value, path, vec![(RungId::INLINE, refusal)]));
        }
        Ok(match value {
            Value::Tensor(tensor) => {
                self.memory(tensor, || Named::of(value, path.text()));
                self.rides()
            }
            Value::Array(array) => {
                let refusals = self.lower(value, Leaf::Array(array), path.text());
                refusals.map_err(|refusals| unsendable(value, path, refusals))?;
                self.rides()
            }
            Value::Pickle(pickle) => {
                let refusals = self.lower(value, Leaf::Pickle(pickle), path.text());
                refusals.map_err(|refusals| unsendable(value, path, refusals))?;
                self.rides()
            }
            Value::Str(text) if text.len() > limits::INLINE_TEXT => {
                self.long(value, path, text.len())
            }
            Value::Bytes(bytes) if bytes.len() > limits::INLINE_TEXT => {
                self.long(value, path, bytes.len())
            }
            Value::Null | Value::Bool(_) => Look::light(5),
            Value::Int(number) => Look::light(digits(*number)),
            Value::BigInt(number) => Look::light(number.as_str().len() + 9),
            // The shortest that reads back, with its sign and exponent; or the bits of it.
            Value::Float(_) => Look::light(25),
            Value::Str(text) => Look::light(quoted(text)),
            Value::Bytes(bytes) => Look::light(bytes.len().div_ceil(3) * 4 + 9),
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                let mut whole = self.whole(Look::light(10));
                for (index, item) in items.iter().enumerate() {
                    let look = self.look(item, &path.then(Step::Index(index)), depth + 1)?;
                    whole.add(item, index, look);
                }
                self.settle(value, whole, |_, index| path.then(Step::Index(index)))
            }
            Value::Map(map) => {
                let keys = codec::has_plain_keys(map);
                let mut whole = self.whole(Look::light(10));
                for (index, (key, item)) in map.iter().enumerate() {
                    let entry = path.then(Step::of_entry(key, index));
                    if keys {
                        whole.look.weight += key.as_str().map_or(0, quoted) + 2;
                        whole.look.keys += 1;
                    } else {
                        let look = self.look(key, &entry, depth + 1)?;
                        whole.add(key, index, look);
                    }
                    let look = self.look(item, &entry, depth + 1)?;
                    whole.add(item, index, look);
                }
                let step = |index: usize| {
                    let entry = map.iter().as_slice().get(index);
                    entry.map_or(Step::Index(index), |(key, _)| Step::of_entry(key, index))
                };
                self.settle(value, whole, |_, index| path.then(step(index)))
            }
            Value::Object(object) => {
                let mut whole = self.whole(Look::MEMORY);
                let schema = path.then(Step::Key("schema"));
                let look = self.look(object.schema(), &schema, depth + 1)?;
                whole.add(object.schema(), 0, look);
                for (index, part) in object.parts().iter().enumerate() {
                    let look = self.look(part, &path.then(Step::Index(index)), depth + 1)?;
                    whole.add(part, index, look);
                }
                self.settle(value, whole, |part, index| {
                    let is_schema = std::ptr::eq(part, object.schema());
                    path.then(if is_schema { Step::Key("schema") } else { Step::Index(index) })
                })
            }
            other => {
                let refusals = vec![(RungId::INLINE, Reason::OtherKind.into())];
                return Err(unsendable(other, path, refusals));
            }
        })
    }

    /// Once all of a container's parts were looked at: where one of them rides a carrier, the others are
    /// leaves of their own.
    fn settle<'p>(
        &mut self,
        value: &'v Value,
        whole: Whole<'v>,
        path: impl Fn(&Value, usize) -> Path<'p>,
    ) -> Look {
        let all = whole.look;
        if !all.rides {
            return all;
        }
        if !all.memory && all.weight > limits::INLINE_SUBTREE && self.pickles {
            // Long texts, and too much around them: they go along, in one pickle.
            self.moving.truncate(whole.moving);
            (self.nodes, self.room) = (whole.nodes, whole.room);
            return Look { rides: false, weight: all.weight.saturating_add(all.long), ..all };
        }
        self.mixed.insert(address(value));
        // The container itself, and what is small.
        self.nodes += 1 + whole.small;
        for (part, index, look) in whole.plain {
            self.plain(part, look, &path(part, index));
        }
        all
    }

    /// A maximal subtree that rides no carrier as it is: whether it stays in the JSON is decided here and
    /// nowhere else.
    fn plain(&mut self, value: &'v Value, look: Look, path: &Path<'_>) {
        if look.weight <= limits::INLINE_LEAF {
            self.nodes += look.nodes;
        } else if look.weight <= self.room {
            self.nodes += look.nodes;
            self.room -= look.weight;
        } else {
            self.nodes += 1;
            let Look { nodes, keys, .. } = look;
            self.moving.push(Moving { value, path: path.text(), nodes, keys });
        }
    }

    /// Down the forms above the lowest until one takes the leaf.
    fn lower(
        &mut self,
        value: &Value,
        leaf: Leaf<'_>,
        path: String,
    ) -> Result<(), Vec<(RungId, Refusal)>> {
        let started = Instant::now();
        let mut declined = Vec::new();
        let is_plain = matches!(leaf, Leaf::Plain(_));
        for (rung, form) in self.sessions.all(self.via) {
            if *rung == RungId::INLINE {
                // What is plain may still be asked of it; nothing else is its business.
                if !is_plain {
                    declined.push((rung.clone(), Reason::OtherKind.into()));
                }
                continue;
            }
            let lowered = form.and_then(|form| form.lower(leaf)).and_then(|lowered| {
                if lowered.views.len() > limits::LEAF_VIEWS {
                    let detail = format!("{} views of one leaf", lowered.views.len());
                    return Err(Refusal::new(Reason::TooLarge, detail));
                }
                Ok(lowered)
            });
            match lowered {
                Ok(lowered) => {
                    self.made += lowered.views.len().saturating_sub(2);
                    for view in &lowered.views {
                        self.memory(view, || Named::of(value, path.clone()));
                    }
                    let form = rung.clone();
                    let time = started.elapsed();
                    self.taken.insert(address(value), Taken { form, lowered, declined, time });
                    return Ok(());
                }
                Err(refusal) => declined.push((rung.clone(), refusal)),
            }
        }
        Err(declined)
    }

    fn memory(&mut self, tensor: &Tensor, first: impl FnOnce() -> Named) {
        if tensor.count() == 0 {
            return;
        }
        let span = tensor.layout().span();
        match self.by_storage.get(&address(&**tensor.storage())) {
            Some(&at) => {
                let seen = &mut self.seen[at];
                seen.span = seen.span.start.min(span.start)..seen.span.end.max(span.end);
                seen.view = None;
            }
            None => {
                self.by_storage.insert(address(&**tensor.storage()), self.seen.len());
                self.seen.push(Seen {
                    storage: Arc::clone(tensor.storage()),
                    span,
                    view: Some(tensor.clone()),
                    first: first(),
                });
            }
        }
    }

    fn blob(&mut self, value: &Value, path: String) {
        let storage = match value {
            // The text is borrowed for the call alone and a storage owns its memory; the copy is the
            // price of a String, and shows in the route.
            Value::Str(text) => Storage::from_bytes(text.clone().into_bytes()),
            Value::Bytes(bytes) => Storage::from_bytes(bytes.clone()),
            _ => return,
        };
        self.by_blob.insert(address(value), self.seen.len());
        let span = 0..storage.len();
        let first = Named::of(value, path);
        self.seen.push(Seen { storage: Arc::new(storage), span, view: None, first });
    }
}

fn unsendable(value: &Value, path: &Path<'_>, refusals: Vec<(RungId, Refusal)>) -> Unsendable {
    let Named { path, kind } = Named::of(value, path.text());
    Unsendable { path, kind, refusals }
}

/// Where what was seen went.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Index into the message's table.
    pub(crate) entry: usize,
    /// Where the part begins there.
    pub(crate) at: usize,
    /// Where the part begins in the original storage.
    pub(crate) base: usize,
    /// Whether its elements were put side by side.
    pub(crate) gathered: bool,
}

#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) seen: Vec<Place>,
    pub(crate) by_storage: HashMap<usize, usize>,
    pub(crate) by_blob: HashMap<usize, usize>,
}

/// Shared storages that may go with a handle each; any more are copied into bundles, since a frame
/// carries 253 handles.
const SHARED_IN_A_MESSAGE: usize = 128;

/// Bundles of a message, at most about this many.
const BUNDLES: usize = 50;

/// Private storages up to this size share a block, which lives as long as any of them is held.
const BUNDLE_BYTES: usize = 16 << 20;

pub(crate) type Table = Vec<(Arc<Storage>, Named)>;

/// The second pass: what goes on which entry of the table.
pub(crate) fn place(survey: Survey<'_, '_>, blocks: Blocks) -> (Places, Table) {
    let Survey { sessions, seen, by_storage, by_blob, .. } = survey;
    let mut table: Table = Vec::new();
    let mut places: Vec<Option<Place>> = vec![None; seen.len()];
    let mut shared = 0;
    let mut private = Vec::new();
    for (index, seen) in seen.into_iter().enumerate() {
        let as_it_is = blocks == Blocks::AsTheyAre
            && goes_as_it_is(sessions, &seen.storage)
            && shared < SHARED_IN_A_MESSAGE;
        // Device memory is for a carrier to take or refuse; it is never looked into here.
        if as_it_is || !seen.storage.device().is_host() {
            shared += 1;
            places[index] = Some(Place { entry: table.len(), at: 0, base: 0, gathered: false });
            table.push((seen.storage, seen.first));
        } else {
            private.push((index, seen));
        }
    }
    let total: usize = private.iter().map(|(_, seen)| seen.span.len()).sum();
    let most = BUNDLE_BYTES.max(total / BUNDLES);
    let mut open: Option<(Bundle, Named)> = None;
    for (index, seen) in private {
        let (member, base, gathered) = member(&seen);
        let (mut bundle, first) = open.take().unwrap_or_else(|| {
            let fresh = blocks == Blocks::Fresh;
            (Bundle::new(fresh), seen.first)
        });
        let at = bundle.push(member);
        places[index] = Some(Place { entry: table.len(), at, base, gathered });
        if rung::Memory::len(&bundle) >= most {
            table.push((Arc::new(Storage::new(bundle)), first));
        } else {
            open = Some((bundle, first));
        }
    }
    if let Some((bundle, first)) = open {
        table.push((Arc::new(Storage::new(bundle)), first));
    }
    let seen = places.into_iter().flatten().collect();
    (Places { seen, by_storage, by_blob }, table)
}

/// Whether the peer is lent a storage where it lies.
fn goes_as_it_is(sessions: &Sessions, storage: &Storage) -> bool {
    let memory = storage.memory();
    memory.is_shared() && !sessions.copies(memory.access())
}

/// The part of a private storage that is worth sending.
fn member(seen: &Seen) -> (Member, usize, bool) {
    if let Some(view) = &seen.view {
        // A sparse view of something large: its elements alone.
        if view.byte_count() <= seen.span.len() / 2 {
            return (Member::Elements(view.clone()), 0, true);
        }
    }
    // Down to an aligned byte, so that every view of it stays as aligned as it was.
    let base = seen.span.start / ALIGN * ALIGN;
    (Member::Range(Arc::clone(&seen.storage), base..seen.span.end), base, false)
}
