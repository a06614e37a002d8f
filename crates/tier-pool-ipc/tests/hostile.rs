//! What a peer may say, and what becomes of memory when it says nothing.

use std::collections::VecDeque;
use std::fs::File;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rung::{
    Carrier, DType, Handle, LeaseId, Meta, Offer, OfferWire, Packed, Parcel, ParcelWire, Reason,
    Receipt, ReceiptWire, Rung, RungId, Session, Storage, Trust,
};
use segment::PeerTrust;
use serde::Serialize;
use serde::de::DeserializeOwned;
use testkit::peer::{self, Link, Peer};
use testkit::stand_in::{self, Count, count};
use testkit::{run_serially, trial};
use tier_pool_ipc::{Contract, PoolIpc, STEP, alloc_on};

type Outcome<T = ()> = Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn rung() -> PoolIpc {
    PoolIpc::experimental(Contract::V1)
}

/// An offer with some of its text replaced.
fn changed(offer: &Offer, from: &str, to: &str) -> Outcome<Offer> {
    let json = offer.meta.as_json().replace(from, to);
    let meta = Meta::from_json(json).map_err(text)?;
    Ok(Offer { rung: offer.rung.clone(), meta, handles: Vec::new() })
}

fn nonce(offer: &Offer) -> Outcome<String> {
    let json = offer.meta.as_json();
    let at = json.find("\"n\":\"").ok_or("no nonce")? + 5;
    Ok(json[at..at + 32].to_owned())
}

fn trusted(pid: u32) -> Trust {
    PeerTrust::same_executable(pid).map_or(Trust::none(), Trust::carrying)
}

fn opened(mine: &Offer, theirs: &Offer, pid: u32) -> Outcome<Box<dyn Carrier>> {
    match rung().open(mine, theirs, trusted(pid)) {
        Ok(Session::Carrier(carrier)) => {
            carrier.wake_with(Arc::new(|| {}));
            Ok(carrier)
        }
        other => Err(format!("{other:?}")),
    }
}

/// A session whose peer says that it is another process.
fn session() -> Outcome<Box<dyn Carrier>> {
    let mine = rung().probe().map_err(text)?;
    let theirs = changed(&mine, &nonce(&mine)?, &"7".repeat(32))?;
    opened(&mine, &theirs, std::process::id())
}

fn storage() -> Outcome<Arc<Storage>> {
    let device = cuda::driver().map_err(text)?.devices()[0].device();
    let mut tensor = alloc_on(device, DType::U8, &[5000]).map_err(text)?;
    tensor.write(&[7; 5000]).map_err(text)?;
    Ok(tensor.share().into_storage())
}

fn parcel(bytes: u64, meta: &str, files: usize) -> Outcome<Parcel> {
    let null = || File::open("/dev/null").map(Into::into).map_err(text);
    Ok(Parcel {
        rung: RungId::POOL_IPC,
        lease: LeaseId(1),
        bytes,
        copies: 0,
        meta: Meta::from_json(meta.to_owned()).map_err(text)?,
        handles: (0..files).map(|_| null()).collect::<Result<_, _>>()?,
    })
}

fn notice(carrier: &dyn Carrier, json: impl Into<String>) -> Outcome {
    carrier.noticed(Meta::from_json(json.into()).map_err(text)?).map_err(text)
}

fn home(carrier: &dyn Carrier, lease: LeaseId, meta: Option<&str>) -> Outcome {
    let meta = meta.map(|json| Meta::from_json(json.to_owned()).map_err(text)).transpose()?;
    carrier.released(Receipt { rung: RungId::POOL_IPC, lease, meta, handles: Vec::new() });
    Ok(())
}

fn parcels_that_are_wrong_are_faults() -> Outcome {
    let handle = format!("\"h\":\"{}AA==\"", "A".repeat(84));
    let h = |rest: &str| format!("{{\"b\":5,\"p\":3,\"d\":0,\"s\":{STEP},{handle}{rest}}}");
    let cases: Vec<(u64, String, usize, Reason)> = vec![
        (100, "[]".into(), 1, Reason::BadMetadata),
        (100, "{\"b\":5}".into(), 1, Reason::BadMetadata),
        (100, h(",\"zz\":1"), 1, Reason::BadMetadata),
        (0, h(""), 1, Reason::Empty),
        (u64::MAX, h(""), 1, Reason::WrongSize),
        (STEP as u64 + 1, h(""), 1, Reason::OutOfBounds),
        (10, h(",\"o\":18446744073709551615"), 1, Reason::OutOfBounds),
        (10, h("").replace("\"d\":0", "\"d\":9"), 1, Reason::DeviceUnknown),
        (10, h("").replace(&STEP.to_string(), "4096"), 1, Reason::WrongSize),
        (10, h("").replace(&STEP.to_string(), &(5u64 << 30).to_string()), 1, Reason::WrongSize),
        (10, format!("{{\"b\":5,\"p\":3,\"d\":0,\"s\":{STEP}}}"), 1, Reason::BadMetadata),
        (10, h("").replace(&handle, "\"h\":\"AAAA\""), 1, Reason::BadMetadata),
        (10, h(""), 2, Reason::WrongHandles),
        (10, h(""), 0, Reason::UnknownBlock),
        (10, h(",\"r\":true"), 0, Reason::UnknownLease),
        (10, h(",\"t\":\"0\""), 0, Reason::UnknownLease),
        // A descriptor of something else, which the driver refuses.
        (10, h(""), 1, Reason::Driver),
    ];
    // With a context, so that what comes is opened at once.
    let _context = storage()?;
    for (bytes, meta, files, reason) in cases {
        match session()?.import(parcel(bytes, &meta, files)?) {
            Err(fault) if fault.reason() == reason => {}
            other => return Err(format!("{meta}: {other:?}, not {reason}")),
        }
    }
    Ok(())
}

fn only_peers_that_are_trusted_by_one_contract() -> Outcome {
    let mine = rung().probe().map_err(text)?;
    let theirs = changed(&mine, "\"c\":1", "\"c\":2")?;
    for (theirs, trust, reason) in [
        (&theirs, trusted(std::process::id()), Reason::NotOffered),
        (&mine, Trust::none(), Reason::PeerNotTrusted),
    ] {
        match rung().open(&mine, theirs, trust) {
            Err(refusal) if refusal.reason() == reason => {}
            other => return Err(format!("{other:?}, not {reason}")),
        }
    }
    Ok(())
}

/// Lent, and home: `None` where it is to stay out.
fn lent(carrier: &dyn Carrier, receipt: Option<&str>) -> Outcome<u64> {
    let storage = storage()?;
    let packed = carrier.export(&storage).map_err(text)?;
    let (lease, json) = (packed.parcel.lease, packed.parcel.meta.as_json().to_owned());
    carrier.sent(lease);
    if let Some(receipt) = receipt {
        home(carrier, lease, Some(receipt))?;
    }
    let digits = json.trim_start_matches("{\"b\":").split(',').next().ok_or("no number")?;
    digits.parse().map_err(text)
}

/// By another thread.
fn is_freed(before: Option<u64>) -> Outcome {
    let end = Instant::now() + Duration::from_secs(10);
    while count(Count::Ranges) != before {
        check(Instant::now() < end, "never freed")?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// O7: what an importer may have is freed when it says so, after it was asked; and not a moment earlier, whatever it
/// says.
fn nothing_is_freed_because_a_peer_says_so() -> Outcome {
    let carrier = session()?;
    let _context = storage()?;
    let before = count(Count::Ranges);
    let kept = storage()?;
    let packed = carrier.export(&kept).map_err(text)?;
    let lease = packed.parcel.lease;
    carrier.sent(lease);
    let every: Vec<u64> = (0..1000).collect();
    notice(&*carrier, format!("{{\"f\":{every:?}}}"))?;
    home(&*carrier, lease, None)?;
    drop(packed);
    notice(&*carrier, format!("{{\"f\":{every:?}}}"))?;
    drop(kept);
    std::thread::sleep(Duration::from_millis(100));
    check(count(Count::Ranges) > before, "freed before it was asked for")?;
    let asked = carrier.notice().ok_or("nothing is asked")?;
    check(asked.as_json().starts_with("{\"x\":["), asked.as_json())?;
    notice(&*carrier, format!("{{\"f\":{every:?}}}"))?;
    is_freed(before)?;
    for bad in ["null", "{\"x\":[[1]]}", "{\"zz\":[]}", "7"] {
        check(notice(&*carrier, bad).is_err(), bad)?;
    }
    let flood: Vec<u64> = (0..20_000).collect();
    let flood = Meta::from_json(format!("{{\"x\":{flood:?}}}")).map_err(text)?;
    let fault = carrier.noticed(flood).err().ok_or("a flood")?;
    check(fault.reason() == Reason::OverCap, fault)
}

/// O9: a lease that ends without a receipt, or with one that cannot be waited for, leaves the memory in quarantine, out
/// of which the peer's word does not get it, but its death does.
fn a_lost_lease_is_quarantined_until_death_is_sure() -> Outcome {
    let _context = storage()?;
    for receipt in [None, Some("{\"d\":[[1,\"AAAA\"]]}"), Some("{\"zz\":1}"), Some("{\"n\":true}")]
    {
        let carrier = session()?;
        let before = count(Count::Ranges);
        let number = lent(&*carrier, receipt)?;
        check(count(Count::Ranges) > before, "freed while it may be seen")?;
        let _ = carrier.notice();
        notice(&*carrier, format!("{{\"f\":[{number}]}}"))?;
        std::thread::sleep(Duration::from_millis(100));
        check(count(Count::Ranges) > before, "freed at the peer's word")?;
        carrier.peer_gone();
        check(count(Count::Ranges) == before, "not freed by a death that is sure")?;
    }
    Ok(())
}

/// O9, O10: what is lent to a peer that is known to be dead is freed with its lease, and what it lent is not taken.
fn nothing_goes_between_the_dead() -> Outcome {
    let _context = storage()?;
    let before = count(Count::Ranges);
    let carrier = session()?;
    carrier.peer_gone();
    lent(&*carrier, None)?;
    is_freed(before)?;
    let handle = "A".repeat(84) + "AA==";
    let meta = format!("{{\"b\":5,\"p\":3,\"d\":0,\"s\":{STEP},\"h\":\"{handle}\"}}");
    let fault = carrier.import(parcel(10, &meta, 1)?).err().ok_or("it was taken")?;
    check(fault.reason() == Reason::OwnerGone, fault)
}

/// O9: a session that ends while its peer may live leaves what the peer may see allocated.
fn a_session_that_ends_leaves_it_allocated() -> Outcome {
    let _context = storage()?;
    let before = count(Count::Ranges);
    let carrier = session()?;
    lent(&*carrier, Some("{}"))?;
    drop(carrier);
    check(count(Count::Ranges) > before, "freed under a peer that may live")
}

/// Where both ends are in one process, what arrives is the memory itself.
fn both_ends_in_one_process_share_the_memory() -> Outcome {
    let (mine, theirs) = (rung().probe().map_err(text)?, rung().probe().map_err(text)?);
    let pid = std::process::id();
    let (sender, receiver) = (opened(&mine, &theirs, pid)?, opened(&theirs, &mine, pid)?);
    let lent = storage()?;
    let Packed { parcel, owner, .. } = sender.export(&lent).map_err(text)?;
    check(parcel.copies == 0 && parcel.handles.is_empty(), &parcel)?;
    let lease = parcel.lease;
    let came = receiver.import(parcel).map_err(text)?;
    let mut bytes = [1; 5000];
    came.memory().read_at(0, &mut bytes).map_err(text)?;
    check(bytes == [7; 5000], "bytes")?;
    check(came.memory().block() == lent.memory().block(), "another block")?;
    drop(came);
    sender.released(receiver.receipt(lease));
    drop(owner);
    Ok(())
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(30))
}

fn say(link: &Link, what: &impl Serialize, handles: &[Handle]) -> Outcome {
    let json = serde_json::to_string(what).map_err(text)?;
    link.send(&json, handles, soon()).map_err(text)
}

fn hear<T: DeserializeOwned>(link: &Link) -> Outcome<(T, VecDeque<Handle>)> {
    let frame = link.receive(soon()).map_err(text)?;
    Ok((serde_json::from_str(&frame.json).map_err(text)?, frame.handles))
}

/// Two sessions between the same two processes.
fn two_sessions(link: &Link, pid: u32) -> Outcome<[Box<dyn Carrier>; 2]> {
    let (mine, copy) = (rung().probe().map_err(text)?, rung().probe().map_err(text)?);
    let (wire, handles) = copy.split().map_err(text)?;
    say(link, &wire, &handles)?;
    let (wire, mut handles) = hear::<OfferWire>(link)?;
    let theirs = Offer::join(wire, &mut handles).map_err(text)?;
    Ok([opened(&mine, &theirs, pid)?, opened(&mine, &theirs, pid)?])
}

/// The notices that one side has, and what the other side then has to say.
type Notices = [Option<Meta>; 2];

/// The importer: takes what comes on both sessions, holds both at once, and frees when it is told to.
fn import_twice(link: &Link) -> Outcome {
    let sessions = two_sessions(link, std::os::unix::process::parent_id())?;
    let (wires, mut handles) = hear::<Vec<ParcelWire>>(link)?;
    let (mut came, mut leases) = (Vec::new(), Vec::new());
    for (wire, session) in wires.into_iter().zip(&sessions) {
        let parcel = Parcel::join(wire, &mut handles).map_err(text)?;
        leases.push(parcel.lease);
        came.push(session.import(parcel).map_err(text)?);
    }
    check(came[0].memory().block() == came[1].memory().block(), "imported twice")?;
    for storage in came {
        let mut bytes = [1; 5000];
        storage.memory().read_at(0, &mut bytes).map_err(text)?;
        check(bytes == [7; 5000], "bytes")?;
        // The other one reads on when this one is let go.
    }
    let mut receipts = Vec::new();
    for (lease, session) in leases.into_iter().zip(&sessions) {
        receipts.push(session.receipt(lease).split().map_err(text)?.0);
    }
    say(link, &receipts, &[])?;
    let (notices, _) = hear::<Notices>(link)?;
    let before = count(Count::Ranges);
    for (notice, session) in notices.into_iter().zip(&sessions) {
        session.noticed(notice.ok_or("nothing is asked")?).map_err(text)?;
    }
    let end = Instant::now() + Duration::from_secs(20);
    let mut answers: Notices = [None, None];
    while answers.iter().any(Option::is_none) && Instant::now() < end {
        for (answer, session) in answers.iter_mut().zip(&sessions) {
            *answer = answer.take().or_else(|| session.notice());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    check(count(Count::Ranges) < before, "said to be freed, and is not")?;
    say(link, &answers, &[])?;
    let _ = link.receive(soon());
    Ok(())
}

/// O8: what goes to a process on two ways is imported there once, and freed here when both ways have said that it is
/// freed there.
fn two_sessions_import_once() -> Outcome {
    let peer = Peer::start("pool").map_err(text)?;
    let sessions = two_sessions(&peer.link, peer.pid())?;
    let _context = storage()?;
    let before = count(Count::Ranges);
    let kept = storage()?;
    let (mut wires, mut handles, mut owners) = (Vec::new(), Vec::new(), Vec::new());
    for session in &sessions {
        let Packed { parcel, owner, .. } = session.export(&kept).map_err(text)?;
        owners.push((parcel.lease, owner));
        let (wire, mut some) = parcel.split().map_err(text)?;
        wires.push(wire);
        handles.append(&mut some);
    }
    say(&peer.link, &wires, &handles)?;
    let (receipts, mut none) = hear::<Vec<ReceiptWire>>(&peer.link)?;
    for (wire, session) in receipts.into_iter().zip(&sessions) {
        session.released(Receipt::join(wire, &mut none).map_err(text)?);
    }
    drop((owners, kept));
    let asked: Notices = [sessions[0].notice(), sessions[1].notice()];
    say(&peer.link, &asked, &[])?;
    let (answers, _) = hear::<Notices>(&peer.link)?;
    let [first, second] = answers;
    sessions[0].noticed(first.ok_or("no answer")?).map_err(text)?;
    std::thread::sleep(Duration::from_millis(100));
    check(count(Count::Ranges) > before, "freed before both have said so")?;
    sessions[1].noticed(second.ok_or("no answer")?).map_err(text)?;
    is_freed(before)
}

fn main() -> ExitCode {
    stand_in::main(false, || {
        if let Some((_, link)) = peer::role() {
            return match import_twice(&link) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        run_serially(vec![
            trial("two_sessions_import_once", two_sessions_import_once),
            trial("parcels_that_are_wrong_are_faults", parcels_that_are_wrong_are_faults),
            trial("only_peers_that_are_trusted", only_peers_that_are_trusted_by_one_contract),
            trial(
                "nothing_is_freed_because_a_peer_says_so",
                nothing_is_freed_because_a_peer_says_so,
            ),
            trial("a_lost_lease_is_quarantined", a_lost_lease_is_quarantined_until_death_is_sure),
            trial("nothing_goes_between_the_dead", nothing_goes_between_the_dead),
            trial("a_session_that_ends", a_session_that_ends_leaves_it_allocated),
            trial("both_ends_in_one_process", both_ends_in_one_process_share_the_memory),
        ])
    })
}
