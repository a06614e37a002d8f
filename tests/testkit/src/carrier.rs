//! The conformance suite of carriers: one storage, two processes, both directions.
//!
//! A rung runs it in a test binary with `harness = false`, whose `main` gives the [`Suite`] to
//! [`main`].
//!
//! Every case exports tensors with random contents, and the receiving process answers with the
//! digest of the logical elements that it decoded; the exporting one compares, and takes the
//! receipts.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use link::Link;
use rung::{
    Carrier, DType, Handle, Meta, Offer, OfferWire, Parcel, ParcelWire, Reason, Receipt,
    ReceiptWire, Rung, Session, Storage, Tensor, Trust,
};
use serde::{Deserialize, Serialize};

use crate::peer::{self, Peer};
use crate::{run, sha256, trial, values};

/// How a storage with these contents is made.
pub type Maker = fn(&[u8]) -> Arc<Storage>;

/// A rung and the ways in which it may legitimately differ from others.
#[derive(Debug, Clone, Copy)]
pub struct Suite {
    /// The rung.
    pub rung: fn() -> Box<dyn Rung>,
    /// Memory that the rung sends without a copy, by name.
    pub native: &'static [(&'static str, Maker)],
    /// Memory that it copies once, by name: where it moves host memory, a `Vec`'s is among it.
    pub copied: &'static [(&'static str, Maker)],
    /// Trust in the peer of this process id.
    pub trust: fn(u32) -> Trust,
}

type Outcome<T = ()> = Result<T, String>;

/// Tensors of a case, over storages made by a [`Maker`].
type Build = fn(Maker, u64) -> Result<Vec<Tensor>, rung::Refusal>;

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    values::contents(seed, len, DType::U8)
}

fn one(make: Maker, seed: u64, len: usize) -> Result<Vec<Tensor>, rung::Refusal> {
    Ok(vec![Tensor::contiguous(make(&bytes(seed, len)), DType::U8, &[len])?])
}

macro_rules! sizes {
    ($($name:literal = $len:expr;)*) => {
        &[$(($name, |make, seed| one(make, seed, $len)),)*]
    };
}

/// Bytes around page and huge-page boundaries.
const SIZES: &[(&str, Build)] = sizes! {
    "1_byte" = 1;
    "1_page_less_1" = 4095;
    "1_page" = 4096;
    "1_page_and_1" = 4097;
    "2_mib_less_1" = (2 << 20) - 1;
    "2_mib" = 2 << 20;
    "2_mib_and_1" = (2 << 20) + 1;
    "64_mib" = 64 << 20;
};

/// Every layout a tensor can have.
const LAYOUTS: &[(&str, Build)] = &[
    ("0_dimensional", |make, seed| {
        Ok(vec![Tensor::contiguous(make(&bytes(seed, 8)), DType::F64, &[])?])
    }),
    ("offset_view", |make, seed| {
        let whole = Tensor::contiguous(make(&bytes(seed, 4000)), DType::F32, &[10, 100])?;
        Ok(vec![whole.slice(0, 3, 7)?])
    }),
    ("odd_offset_view", |make, seed| {
        Ok(vec![Tensor::new(make(&bytes(seed, 4001)), DType::F32, &[1000], &[1], 1)?])
    }),
    ("non_contiguous_view", |make, seed| {
        let whole = Tensor::contiguous(make(&bytes(seed, 6000)), DType::I16, &[30, 100])?;
        Ok(vec![whole.slice(1, 10, 90)?.permute(&[1, 0])?])
    }),
    ("negative_strides", |make, seed| {
        let whole = Tensor::contiguous(make(&bytes(seed, 4096)), DType::U64, &[8, 8, 8])?;
        Ok(vec![whole.flip(0)?.flip(2)?])
    }),
    ("broadcast_view", |make, seed| {
        Ok(vec![Tensor::new(make(&bytes(seed, 12)), DType::F32, &[50, 3], &[0, 1], 0)?])
    }),
    ("no_elements_of_a_storage", |make, seed| {
        let whole = Tensor::contiguous(make(&bytes(seed, 64)), DType::U8, &[8, 8])?;
        Ok(vec![whole.slice(0, 4, 4)?])
    }),
    ("two_views_of_one_storage", |make, seed| {
        let whole = Tensor::contiguous(make(&bytes(seed, 9000)), DType::U8, &[3, 3000])?;
        Ok(vec![whole.select(0, 0)?, whole.flip(1)?])
    }),
    ("two_storages", |make, seed| {
        let other = Tensor::contiguous(make(&bytes(!seed, 100)), DType::U8, &[100])?;
        Ok([one(make, seed, 5000)?, vec![other]].concat())
    }),
];

fn every_dtype(make: Maker, seed: u64) -> Result<Vec<Tensor>, rung::Refusal> {
    let one = |dtype: &DType| {
        let contents = values::contents(seed ^ *dtype as u64, 7 * 11 * dtype.size(), *dtype);
        Tensor::contiguous(make(&contents), *dtype, &[7, 11])
    };
    DType::ALL.iter().map(one).collect()
}

fn cases() -> impl Iterator<Item = (&'static str, Build)> {
    let dtypes: (&str, Build) = ("every_dtype", every_dtype);
    SIZES.iter().chain(LAYOUTS).copied().chain([dtypes])
}

/// One tensor of a message, as the suite writes it.
#[derive(Debug, Serialize, Deserialize)]
struct View {
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<isize>,
    offset: usize,
    storage: usize,
}

#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Offer(OfferWire),
    /// Export this case, from memory of this kind, with this seed.
    Export(String, String, u64),
    /// Import these.
    Parcels(Vec<ParcelWire>, Vec<View>),
    /// The digests of what was imported, and the receipts for it.
    Imported(Vec<String>, Vec<ReceiptWire>),
    /// How an export went: how many copies it took.
    Outcome(Result<u64, String>),
}

fn send(link: &Link, message: &Message, handles: &[Handle]) -> Outcome {
    let json = serde_json::to_string(message).map_err(|error| error.to_string())?;
    link.send(&json, handles, soon()).map_err(|error| error.to_string())
}

fn receive(link: &Link) -> Outcome<(Message, VecDeque<Handle>)> {
    let frame = link.receive(soon()).map_err(|error| error.to_string())?;
    let message = serde_json::from_str(&frame.json).map_err(|error| error.to_string())?;
    Ok((message, frame.handles))
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

/// Exchanges offers and opens; both sides do the same.
fn open(suite: &Suite, link: &Link, peer: u32) -> Outcome<Box<dyn Carrier>> {
    let rung = (suite.rung)();
    let mine = rung.probe().map_err(|refusal| refusal.to_string())?;
    let copy = Offer { rung: mine.rung.clone(), meta: mine.meta.clone(), handles: Vec::new() };
    let (wire, handles) = copy.split().map_err(|fault| fault.to_string())?;
    send(link, &Message::Offer(wire), &handles)?;
    let (Message::Offer(wire), mut handles) = receive(link)? else {
        return Err("no offer came".into());
    };
    let theirs = Offer::join(wire, &mut handles).map_err(|fault| fault.to_string())?;
    match rung.open(&mine, &theirs, (suite.trust)(peer)) {
        Ok(Session::Carrier(carrier)) => {
            // Sessions here are short: what is said of blocks that are gone is never late.
            carrier.wake_with(Arc::new(|| {}));
            Ok(carrier)
        }
        Ok(Session::Form(_)) => Err("not a carrier".into()),
        Err(refusal) => Err(refusal.to_string()),
    }
}

/// Exports a case and checks what the other side says it got; how often bytes were copied.
fn export_case(
    link: &Link,
    carrier: &dyn Carrier,
    build: Build,
    make: Maker,
    seed: u64,
) -> Outcome<u64> {
    let tensors = build(make, seed).map_err(|refusal| refusal.to_string())?;
    export_tensors(link, carrier, &tensors)
}

fn export_tensors(link: &Link, carrier: &dyn Carrier, tensors: &[Tensor]) -> Outcome<u64> {
    let mut table: Vec<Arc<Storage>> = Vec::new();
    let mut views = Vec::new();
    for tensor in tensors {
        let known = table.iter().position(|storage| Arc::ptr_eq(storage, tensor.storage()));
        let storage = known.unwrap_or_else(|| {
            table.push(Arc::clone(tensor.storage()));
            table.len() - 1
        });
        views.push(View {
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            strides: tensor.strides().to_vec(),
            offset: tensor.offset(),
            storage,
        });
    }
    let (mut parcels, mut handles, mut owners, mut copies) = (vec![], vec![], vec![], 0);
    for storage in &table {
        let packed = carrier.export(storage).map_err(|refusal| refusal.to_string())?;
        copies += u64::from(packed.parcel.copies);
        owners.push((packed.parcel.lease, packed.owner));
        let (wire, mut some) = packed.parcel.split().map_err(|fault| fault.to_string())?;
        parcels.push(wire);
        handles.append(&mut some);
    }
    send(link, &Message::Parcels(parcels, views), &handles)?;
    drop(handles);
    for (lease, _) in &owners {
        carrier.sent(*lease);
    }
    let (Message::Imported(digests, receipts), mut handles) = receive(link)? else {
        return Err("no digests came".into());
    };
    let expected: Vec<String> = tensors
        .iter()
        .map(|tensor| tensor.to_bytes().map(|bytes| sha256(&bytes)))
        .collect::<Result<_, _>>()
        .map_err(|refusal| refusal.to_string())?;
    if digests != expected {
        return Err("the receiver decoded other elements".into());
    }
    for wire in receipts {
        let receipt = Receipt::join(wire, &mut handles).map_err(|fault| fault.to_string())?;
        let lease = receipt.lease;
        carrier.released(receipt);
        owners.retain(|(owned, _)| *owned != lease);
    }
    if owners.is_empty() { Ok(copies) } else { Err(format!("{} leases stay out", owners.len())) }
}

/// Imports what was exported, and answers with digests and receipts.
fn import_case(
    link: &Link,
    carrier: &dyn Carrier,
    parcels: Vec<ParcelWire>,
    views: Vec<View>,
    mut handles: VecDeque<Handle>,
) -> Outcome {
    let (mut table, mut leases) = (Vec::new(), Vec::new());
    for wire in parcels {
        let parcel = Parcel::join(wire, &mut handles).map_err(|fault| fault.to_string())?;
        leases.push(parcel.lease);
        table.push(Arc::new(carrier.import(parcel).map_err(|fault| fault.to_string())?));
    }
    let mut digests = Vec::new();
    for view in views {
        let storage = Arc::clone(&table[view.storage]);
        let tensor = Tensor::new(storage, view.dtype, &view.shape, &view.strides, view.offset)
            .map_err(|refusal| refusal.to_string())?;
        digests.push(sha256(&tensor.to_bytes().map_err(|refusal| refusal.to_string())?));
    }
    drop(table);
    let (mut receipts, mut handles) = (Vec::new(), Vec::new());
    for lease in leases {
        let (wire, mut some) = carrier.receipt(lease).split().map_err(|fault| fault.to_string())?;
        receipts.push(wire);
        handles.append(&mut some);
    }
    send(link, &Message::Imported(digests, receipts), &handles)
}

/// The other process: does what it is told until the link ends.
fn serve(suite: &Suite, link: &Link) -> Outcome {
    let carrier = open(suite, link, peer::parent())?;
    loop {
        let Ok((message, handles)) = receive(link) else {
            return Ok(());
        };
        match message {
            Message::Parcels(parcels, views) => {
                import_case(link, &*carrier, parcels, views, handles)?;
            }
            Message::Export(case, memory, seed) => {
                let outcome = find(suite, &case, &memory)
                    .and_then(|(build, make)| export_case(link, &*carrier, build, make, seed));
                send(link, &Message::Outcome(outcome), &[])?;
            }
            _ => return Err("not a command".into()),
        }
    }
}

/// Host memory of this process alone.
#[must_use]
pub fn private(bytes: &[u8]) -> Arc<Storage> {
    Arc::new(Storage::from_vec(bytes.to_vec()))
}

fn memories(suite: &Suite) -> impl Iterator<Item = (&'static str, Maker)> {
    suite.copied.iter().chain(suite.native).copied()
}

/// Some memory that the rung takes.
fn some(suite: &Suite, bytes: &[u8]) -> Outcome<Arc<Storage>> {
    let (_, make) = memories(suite).next().ok_or("a rung that takes nothing")?;
    Ok(make(bytes))
}

fn find(suite: &Suite, case: &str, memory: &str) -> Outcome<(Build, Maker)> {
    let build = cases().find(|(name, _)| *name == case);
    let make = memories(suite).find(|(name, _)| *name == memory);
    build.zip(make).map(|((_, build), (_, make))| (build, make)).ok_or("no such case".into())
}

#[expect(clippy::print_stderr, reason = "all that is left of a peer that fails")]
fn failed(why: &str) -> ExitCode {
    eprintln!("the peer: {why}");
    ExitCode::FAILURE
}

fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// What is not the rung's own is copied once a storage, what is never.
fn expect_copies(suite: &Suite, memory: &str, copies: u64) -> Outcome {
    let copied = suite.copied.iter().any(|(name, _)| *name == memory);
    if copied == (copies > 0) { Ok(()) } else { Err(format!("{copies} copies of {memory} memory")) }
}

fn to_peer(suite: Suite, case: &'static str, memory: &'static str) -> Outcome {
    let peer = Peer::start("carrier").map_err(|error| error.to_string())?;
    let carrier = open(&suite, &peer.link, peer.pid())?;
    let (build, make) = find(&suite, case, memory)?;
    let copies = export_case(&peer.link, &*carrier, build, make, seed())?;
    expect_copies(&suite, memory, copies)
}

fn from_peer(suite: Suite, case: &'static str, memory: &'static str) -> Outcome {
    let peer = Peer::start("carrier").map_err(|error| error.to_string())?;
    let carrier = open(&suite, &peer.link, peer.pid())?;
    let command = Message::Export(case.into(), memory.into(), seed());
    send(&peer.link, &command, &[])?;
    loop {
        match receive(&peer.link)? {
            (Message::Parcels(parcels, views), handles) => {
                import_case(&peer.link, &*carrier, parcels, views, handles)?;
            }
            (Message::Outcome(outcome), _) => return expect_copies(&suite, memory, outcome?),
            _ => return Err("not an answer".into()),
        }
    }
}

/// One after the other through one session: blocks, descriptors and mappings are used again.
fn again_and_again(suite: &Suite, memory: &'static str) -> Outcome {
    let peer = Peer::start("carrier").map_err(|error| error.to_string())?;
    let carrier = open(suite, &peer.link, peer.pid())?;
    let makers = find(suite, "1_page", memory)?;
    // Shorter and longer contents in turn, in blocks of one size and of several.
    for (turn, len) in [5000, 8192, 4097, 100_000, 5000, 8000, 99_000, 1].into_iter().enumerate() {
        let tensor = |seed| one(makers.1, seed, len).map_err(|refusal| refusal.to_string());
        let kept = tensor(seed() ^ turn as u64)?;
        for _ in 0..2 {
            export_tensors(&peer.link, &*carrier, &kept)?;
        }
    }
    Ok(())
}

/// Two sessions in this process, for what needs no second one.
fn sessions(suite: &Suite) -> Outcome<[Box<dyn Carrier>; 2]> {
    let rung = (suite.rung)();
    let offer = || rung.probe().map_err(|refusal| refusal.to_string());
    let (mine, theirs) = (offer()?, offer()?);
    let trust = || (suite.trust)(std::process::id());
    let open = |a: &Offer, b: &Offer| match rung.open(a, b, trust()) {
        Ok(Session::Carrier(carrier)) => Ok(carrier),
        other => Err(format!("{other:?}")),
    };
    Ok([open(&mine, &theirs)?, open(&theirs, &mine)?])
}

fn expect_fault(suite: &Suite, reason: Reason, spoil: fn(&mut Parcel)) -> Outcome {
    let [sender, receiver] = sessions(suite)?;
    let mut packed =
        sender.export(&some(suite, &[7; 5000])?).map_err(|refusal| refusal.to_string())?;
    spoil(&mut packed.parcel);
    match receiver.import(packed.parcel) {
        Err(fault) if fault.reason() == reason => Ok(()),
        other => Err(format!("{other:?}, not {reason}")),
    }
}

fn refusals(suite: &Suite) -> Outcome {
    let [sender, _] = sessions(suite)?;
    match sender.export(&private(&[])) {
        Err(refusal) if refusal.reason() == Reason::Empty => Ok(()),
        other => Err(format!("{other:?} for an empty storage")),
    }
}

fn leases(suite: &Suite) -> Outcome {
    let [sender, _] = sessions(suite)?;
    let storage = some(suite, &[1; 100])?;
    let export = || sender.export(&storage).map_err(|refusal| refusal.to_string());
    let (first, second) = (export()?, export()?);
    if first.parcel.lease == second.parcel.lease {
        return Err("two exports under one lease".into());
    }
    Ok(())
}

fn skewed_offer(suite: &Suite) -> Outcome {
    let rung = (suite.rung)();
    let mine = rung.probe().map_err(|refusal| refusal.to_string())?;
    let meta = Meta::from_json(r#"{"from":"the future"}"#.into()).map_err(|f| f.to_string())?;
    let theirs = Offer { rung: rung.id(), meta, handles: Vec::new() };
    match rung.open(&mine, &theirs, Trust::none()) {
        Err(_) => Ok(()),
        Ok(session) => Err(format!("{session:?} with an offer that nobody understands")),
    }
}

/// Runs the suite; the `main` of a test binary with `harness = false`.
#[must_use]
pub fn main(suite: &'static Suite) -> ExitCode {
    if let Some((_, link)) = peer::role() {
        return match serve(suite, &link) {
            Ok(()) => ExitCode::SUCCESS,
            Err(why) => failed(&why),
        };
    }
    let mut trials: Vec<Trial> = Vec::new();
    for (memory, _) in memories(suite) {
        for (case, _) in cases() {
            let name = |direction: &str| format!("{direction}::{memory}::{case}");
            trials.push(trial(name("to_peer"), move || to_peer(*suite, case, memory)));
            trials.push(trial(name("from_peer"), move || from_peer(*suite, case, memory)));
        }
        let name = format!("to_peer::{memory}::again_and_again");
        trials.push(trial(name, move || again_and_again(suite, memory)));
    }
    trials.extend([
        trial("an_empty_storage_is_refused", || refusals(suite)),
        trial("every_export_has_its_own_lease", || leases(suite)),
        trial("an_offer_that_nobody_understands_is_refused", || skewed_offer(suite)),
        trial("a_parcel_of_another_rung_is_a_fault", || {
            expect_fault(suite, Reason::UnknownRung, |parcel| {
                parcel.rung = rung::RungId::new("no-such-rung");
            })
        }),
        trial("a_parcel_with_other_metadata_is_a_fault", || {
            expect_fault(suite, Reason::BadMetadata, |parcel| {
                if let Ok(meta) = Meta::write(&["nonsense"]) {
                    parcel.meta = meta;
                }
            })
        }),
        trial("an_impossible_length_is_a_fault", || {
            expect_fault(suite, Reason::WrongSize, |parcel| parcel.bytes = u64::MAX)
        }),
    ]);
    // Within one process, which rungs of devices know better than to send a handle.
    if suite.copied.iter().any(|(name, _)| *name == "private") {
        trials.push(trial("a_parcel_without_its_handles_is_a_fault", || {
            expect_fault(suite, Reason::WrongHandles, |parcel| parcel.handles.clear())
        }));
    }
    run(trials)
}
