//! The first two passes of packing: what of a value rides a carrier, and on which block it goes.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use rung::{Path, Reason, Refusal, RungId, Step, Storage, Tensor, Unsendable, Value, limits};

use crate::bundle::{ALIGN, Bundle, Member};

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

/// The first pass.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// Containers that hold, at any depth, a leaf that rides a carrier; by address, since the value
    /// is borrowed and does not move.
    pub(crate) mixed: HashSet<usize>,
    seen: Vec<Seen>,
    by_storage: HashMap<usize, usize>,
    by_blob: HashMap<usize, usize>,
    /// Values seen so far.
    nodes: usize,
}

pub(crate) fn address<T: ?Sized>(of: &T) -> usize {
    std::ptr::from_ref(of).cast::<()>() as usize
}

impl Survey {
    /// Whether there is such a leaf in it.
    pub(crate) fn look(
        &mut self,
        value: &Value,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<bool, Unsendable> {
        if depth > limits::VALUE_DEPTH {
            return Err(Unsendable {
                path: path.to_string(),
                kind: value.kind().to_owned(),
                refusals: vec![(
                    RungId::INLINE,
                    Refusal::new(Reason::TooDeep, format!("at most {}", limits::VALUE_DEPTH)),
                )],
            });
        }
        self.nodes += 1;
        if self.nodes > limits::NODES {
            let refusal = Refusal::new(Reason::TooLarge, format!("over {} values", limits::NODES));
            return Err(Unsendable {
                path: path.to_string(),
                kind: value.kind().to_owned(),
                refusals: vec![(RungId::INLINE, refusal)],
            });
        }
        let mut heavy = false;
        match value {
            Value::Tensor(tensor) => {
                self.tensor(tensor, path);
                return Ok(true);
            }
            Value::Str(text) if text.len() > limits::INLINE_TEXT => {
                // The text is borrowed for the call alone and a storage owns its memory; the copy
                // is the price of a String, and shows in the route.
                let storage = Storage::from_bytes(text.clone().into_bytes());
                self.blob(value, Arc::new(storage), path);
                return Ok(true);
            }
            Value::Bytes(bytes) if bytes.len() > limits::INLINE_TEXT => {
                self.blob(value, Arc::new(Storage::from_bytes(bytes.clone())), path);
                return Ok(true);
            }
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                for (index, item) in items.iter().enumerate() {
                    heavy |= self.look(item, &path.then(Step::Index(index)), depth + 1)?;
                }
            }
            Value::Map(map) => {
                for (index, (key, item)) in map.iter().enumerate() {
                    let entry = path.then(Step::of_entry(key, index));
                    heavy |= self.look(key, &entry, depth + 1)?;
                    heavy |= self.look(item, &entry, depth + 1)?;
                }
            }
            _ => {}
        }
        if heavy {
            self.mixed.insert(address(value));
        }
        Ok(heavy)
    }

    fn tensor(&mut self, tensor: &Tensor, path: &Path<'_>) {
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
                    first: Named {
                        path: path.to_string(),
                        kind: format!("{} tensor", tensor.dtype()),
                    },
                });
            }
        }
    }

    fn blob(&mut self, value: &Value, storage: Arc<Storage>, path: &Path<'_>) {
        self.by_blob.insert(address(value), self.seen.len());
        let first = Named { path: path.to_string(), kind: value.kind().to_owned() };
        let span = 0..storage.len();
        self.seen.push(Seen { storage, span, views: 1, view: None, first });
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
pub(crate) fn place(survey: Survey, blocks: Blocks) -> (Places, Table) {
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
