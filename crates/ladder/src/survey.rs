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
use crate::ladder::Sessions;

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
    fn of(value: &Value, path: &Path<'_>) -> Self {
        let kind = match value {
            Value::Tensor(tensor) => format!("{} tensor", tensor.dtype()),
            Value::Array(array) => format!("array of {}", array.descr()),
            other => other.kind().to_owned(),
        };
        Self { path: path.to_string(), kind }
    }
}

/// What is known of one storage before it is placed.
#[derive(Debug)]
pub(crate) struct Seen {
    storage: Arc<Storage>,
    span: Range<usize>,
    views: usize,
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
pub(crate) struct Survey<'s> {
    sessions: &'s Sessions,
    /// Containers that hold, at any depth, a leaf that rides a carrier, and objects; by address, since the
    /// value is borrowed and does not move.
    pub(crate) mixed: HashSet<usize>,
    /// Leaves that a form took, by address.
    pub(crate) taken: HashMap<usize, Taken>,
    seen: Vec<Seen>,
    by_storage: HashMap<usize, usize>,
    by_blob: HashMap<usize, usize>,
    /// Values that the JSON has so far.
    nodes: usize,
    /// Bytes of JSON that subtrees may still have.
    room: usize,
}

pub(crate) fn address<T: ?Sized>(of: &T) -> usize {
    std::ptr::from_ref(of).cast::<()>() as usize
}

/// What was found out of a value.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// Whether something in it rides a carrier, or is an object.
    rides: bool,
    /// Bytes of its JSON, at most.
    weight: usize,
    /// Values that it consists of.
    nodes: usize,
}

impl Look {
    const RIDES: Self = Self { rides: true, weight: 0, nodes: 1 };

    fn light(weight: usize) -> Self {
        Self { rides: false, weight, nodes: 1 }
    }
}

/// The parts of a container that have no leaf that rides a carrier, but are not small.
type Plain<'v> = Vec<(&'v Value, usize, Look)>;

/// Bytes of a string in JSON, at most.
fn quoted(text: &str) -> usize {
    let escaped = |byte: &&u8| **byte < 0x20 || matches!(**byte, b'"' | b'\\');
    // A control character takes six.
    text.len() + 2 + 5 * text.as_bytes().iter().filter(escaped).count()
}

fn digits(number: i64) -> usize {
    number.unsigned_abs().checked_ilog10().unwrap_or(0) as usize + 2
}

impl<'s> Survey<'s> {
    pub(crate) fn new(sessions: &'s Sessions) -> Self {
        Self {
            sessions,
            mixed: HashSet::new(),
            taken: HashMap::new(),
            seen: Vec::new(),
            by_storage: HashMap::new(),
            by_blob: HashMap::new(),
            nodes: 0,
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
    pub(crate) fn look_at(&mut self, value: &Value) -> Result<(), Unsendable> {
        let look = self.look(value, &Path::ROOT, 1)?;
        if !look.rides {
            self.plain(value, look, &Path::ROOT)?;
        }
        if self.nodes > limits::NODES {
            let refusal = Refusal::new(Reason::TooLarge, format!("over {} values", limits::NODES));
            return Err(unsendable(value, &Path::ROOT, vec![(RungId::INLINE, refusal)]));
        }
        Ok(())
    }

    /// A leaf that does.
    fn rides(&mut self) -> Look {
        self.nodes += 1;
        Look::RIDES
    }

    fn look(&mut self, value: &Value, path: &Path<'_>, depth: usize) -> Result<Look, Unsendable> {
        if depth > limits::VALUE_DEPTH {
            let refusal = Refusal::new(Reason::TooDeep, format!("at most {}", limits::VALUE_DEPTH));
            return Err(unsendable(value, path, vec![(RungId::INLINE, refusal)]));
        }
        Ok(match value {
            Value::Tensor(tensor) => {
                self.memory(tensor, || Named::of(value, path));
                self.rides()
            }
            Value::Array(array) => {
                let refusals = self.lower(value, Leaf::Array(array), path);
                refusals.map_err(|refusals| unsendable(value, path, refusals))?;
                self.rides()
            }
            Value::Pickle(pickle) => {
                let refusals = self.lower(value, Leaf::Pickle(pickle), path);
                refusals.map_err(|refusals| unsendable(value, path, refusals))?;
                self.rides()
            }
            Value::Str(text) if text.len() > limits::INLINE_TEXT => {
                self.blob(value, path);
                self.rides()
            }
            Value::Bytes(bytes) if bytes.len() > limits::INLINE_TEXT => {
                self.blob(value, path);
                self.rides()
            }
            Value::Null | Value::Bool(_) => Look::light(5),
            Value::Int(number) => Look::light(digits(*number)),
            Value::BigInt(number) => Look::light(number.as_str().len() + 9),
            // The shortest that reads back, with its sign and exponent; or the bits of it.
            Value::Float(_) => Look::light(25),
            Value::Str(text) => Look::light(quoted(text)),
            Value::Bytes(bytes) => Look::light(bytes.len().div_ceil(3) * 4 + 9),
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                let mut all = Look::light(10);
                let mut plain = Plain::new();
                for (index, item) in items.iter().enumerate() {
                    let look = self.look(item, &path.then(Step::Index(index)), depth + 1)?;
                    add(&mut all, &mut plain, (item, index, look));
                }
                self.settle(value, all, plain, |_, index| path.then(Step::Index(index)))?
            }
            Value::Map(map) => {
                let keys = codec::has_plain_keys(map);
                let mut all = Look::light(10);
                let mut plain = Plain::new();
                for (index, (key, item)) in map.iter().enumerate() {
                    let entry = path.then(Step::of_entry(key, index));
                    if keys {
                        all.weight += key.as_str().map_or(0, quoted) + 2;
                    } else {
                        let look = self.look(key, &entry, depth + 1)?;
                        add(&mut all, &mut plain, (key, index, look));
                    }
                    let look = self.look(item, &entry, depth + 1)?;
                    add(&mut all, &mut plain, (item, index, look));
                }
                let step = |index: usize| {
                    let entry = map.iter().as_slice().get(index);
                    entry.map_or(Step::Index(index), |(key, _)| Step::of_entry(key, index))
                };
                self.settle(value, all, plain, |_, index| path.then(step(index)))?
            }
            Value::Object(object) => {
                let mut all = Look { weight: object.tag().len() + 30, ..Look::RIDES };
                let mut plain = Plain::new();
                let schema = path.then(Step::Key("schema"));
                let look = self.look(object.schema(), &schema, depth + 1)?;
                add(&mut all, &mut plain, (object.schema(), 0, look));
                for (index, part) in object.parts().iter().enumerate() {
                    let look = self.look(part, &path.then(Step::Index(index)), depth + 1)?;
                    add(&mut all, &mut plain, (part, index, look));
                }
                self.settle(value, all, plain, |part, index| {
                    let is_schema = std::ptr::eq(part, object.schema());
                    path.then(if is_schema { Step::Key("schema") } else { Step::Index(index) })
                })?
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
        value: &Value,
        all: Look,
        plain: Plain<'_>,
        path: impl Fn(&Value, usize) -> Path<'p>,
    ) -> Result<Look, Unsendable> {
        if !all.rides {
            return Ok(all);
        }
        self.mixed.insert(address(value));
        // The container itself, and those of its parts that are small.
        self.nodes += all.nodes - plain.iter().map(|(.., look)| look.nodes).sum::<usize>();
        for (part, index, look) in plain {
            self.plain(part, look, &path(part, index))?;
        }
        Ok(Look::RIDES)
    }

    /// A maximal subtree that rides no carrier as it is: whether it stays in the JSON is decided here and
    /// nowhere else.
    fn plain(&mut self, value: &Value, look: Look, path: &Path<'_>) -> Result<(), Unsendable> {
        if look.weight <= limits::INLINE_LEAF || look.weight <= self.room {
            if look.weight > limits::INLINE_LEAF {
                self.room -= look.weight;
            }
            self.nodes += look.nodes;
            return Ok(());
        }
        self.nodes += 1;
        match value {
            Value::Str(_) | Value::Bytes(_) => self.blob(value, path),
            _ => {
                if let Err(refusals) = self.lower(value, Leaf::Plain(value), path) {
                    // The lowest rung may take it yet, where it is not too large for that one.
                    if look.weight > limits::INLINE_SUBTREE {
                        return Err(unsendable(value, path, refusals));
                    }
                }
            }
        }
        Ok(())
    }

    /// Down the forms above the lowest until one takes the leaf.
    fn lower(
        &mut self,
        value: &Value,
        leaf: Leaf<'_>,
        path: &Path<'_>,
    ) -> Result<(), Vec<(RungId, Refusal)>> {
        let started = Instant::now();
        let mut declined = Vec::new();
        for (rung, form) in self.sessions.all() {
            if *rung == RungId::INLINE {
                let refusal = match leaf {
                    Leaf::Plain(_) => Reason::TooLarge,
                    _ => Reason::OtherKind,
                };
                declined.push((rung.clone(), refusal.into()));
                continue;
            }
            match form.and_then(|form| form.lower(leaf)) {
                Ok(lowered) => {
                    for view in &lowered.views {
                        self.memory(view, || Named::of(value, path));
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
                seen.views += 1;
                seen.view = None;
            }
            None => {
                self.by_storage.insert(address(&**tensor.storage()), self.seen.len());
                self.seen.push(Seen {
                    storage: Arc::clone(tensor.storage()),
                    span,
                    views: 1,
                    view: Some(tensor.clone()),
                    first: first(),
                });
            }
        }
    }

    fn blob(&mut self, value: &Value, path: &Path<'_>) {
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
        self.seen.push(Seen { storage: Arc::new(storage), span, views: 1, view: None, first });
    }
}

fn unsendable(value: &Value, path: &Path<'_>, refusals: Vec<(RungId, Refusal)>) -> Unsendable {
    let Named { path, kind } = Named::of(value, path);
    Unsendable { path, kind, refusals }
}

/// Adds what a part is to what its container is.
fn add<'v>(all: &mut Look, plain: &mut Plain<'v>, (part, index, look): (&'v Value, usize, Look)) {
    all.rides |= look.rides;
    all.weight += look.weight + 2;
    all.nodes += look.nodes;
    if look.rides {
        // Counted where it was found.
        all.nodes -= look.nodes;
    } else if look.weight > limits::INLINE_LEAF {
        plain.push((part, index, look));
    }
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
pub(crate) fn place(survey: Survey<'_>, blocks: Blocks) -> (Places, Table) {
    let Survey { seen, by_storage, by_blob, .. } = survey;
    let mut table: Table = Vec::new();
    let mut places: Vec<Option<Place>> = vec![None; seen.len()];
    let mut shared = 0;
    let mut private = Vec::new();
    for (index, seen) in seen.into_iter().enumerate() {
        let goes_as_it_is = blocks == Blocks::AsTheyAre
            && seen.storage.memory().is_shared()
            && shared < SHARED_IN_A_MESSAGE;
        // Device memory is for a carrier to take or refuse; it is never looked into here.
        if goes_as_it_is || !seen.storage.device().is_host() {
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
