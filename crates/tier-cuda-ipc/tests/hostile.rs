//! What a peer may say: every parcel, receipt and notice that is not what it should be is a fault with its reason, and
//! gets at nothing that was not lent.

use std::fs::File;
use std::process::ExitCode;
use std::sync::Arc;

use cuda::{Buffer, Context, Stream};
use rung::{
    Carrier, DType, LeaseId, Meta, Offer, Parcel, Reason, Receipt, Rung, Session, Storage, Trust,
};
use segment::PeerTrust;
use testkit::stand_in::{self, Count, count};
use testkit::{run_serially, trial};
use tier_cuda_ipc::{CudaIpc, CudaVmm, cuda, share_buffer};

type Outcome<T = ()> = Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
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

fn trusted() -> Trust {
    PeerTrust::same_executable(std::process::id()).map_or(Trust::none(), Trust::carrying)
}

/// A session whose peer says that it is another process.
fn session(rung: &dyn Rung, trust: Trust) -> Outcome<Box<dyn Carrier>> {
    let mine = rung.probe().map_err(text)?;
    let theirs = changed(&mine, &nonce(&mine)?, &"7".repeat(32))?;
    match rung.open(&mine, &theirs, trust) {
        Ok(Session::Carrier(carrier)) => {
            carrier.wake_with(Arc::new(|| {}));
            Ok(carrier)
        }
        other => Err(format!("{other:?}")),
    }
}

fn storage(len: usize, shareable: bool) -> Outcome<Arc<Storage>> {
    let device = cuda::driver().map_err(text)?.devices()[0].device();
    let context = Context::of(device).map_err(text)?;
    let stream = Stream::new(&context).map_err(text)?;
    let make = if shareable { Buffer::shareable } else { Buffer::plain };
    let buffer = make(&context, len).map_err(text)?;
    Ok(share_buffer(buffer, &stream, DType::U8, &[len]).map_err(text)?.into_storage())
}

fn parcel(rung: &dyn Rung, bytes: u64, meta: &str, files: usize) -> Outcome<Parcel> {
    let null = || File::open("/dev/null").map(Into::into).map_err(text);
    Ok(Parcel {
        rung: rung.id(),
        lease: LeaseId(1),
        bytes,
        copies: 0,
        meta: Meta::from_json(meta.to_owned()).map_err(text)?,
        handles: (0..files).map(|_| null()).collect::<Result<_, _>>()?,
    })
}

fn parcels_that_are_wrong_are_faults() -> Outcome {
    let handle = format!("\"h\":\"{}AA==\"", "A".repeat(84));
    let h = |rest: &str| format!("{{\"b\":5,\"d\":0,\"s\":4096,{handle}{rest}}}");
    let cases: Vec<(&dyn Rung, u64, String, usize, Reason)> = vec![
        (&CudaIpc, 100, "[]".into(), 0, Reason::BadMetadata),
        (&CudaIpc, 100, "{\"b\":5}".into(), 0, Reason::BadMetadata),
        (&CudaIpc, 100, h(",\"zz\":1"), 0, Reason::BadMetadata),
        (&CudaIpc, 0, h(""), 0, Reason::Empty),
        (&CudaIpc, u64::MAX, h(""), 0, Reason::WrongSize),
        (&CudaIpc, 4097, h(""), 0, Reason::OutOfBounds),
        (&CudaIpc, 4000, h(",\"o\":97"), 0, Reason::OutOfBounds),
        (&CudaIpc, 10, h(",\"o\":18446744073709551615"), 0, Reason::OutOfBounds),
        (&CudaIpc, 10, h("").replace("\"d\":0", "\"d\":9"), 0, Reason::DeviceUnknown),
        (&CudaIpc, 10, h("").replace("4096", "18446744073709551615"), 0, Reason::WrongSize),
        (
            &CudaIpc,
            10,
            "{\"b\":5,\"d\":0,\"s\":4096,\"h\":\"AAAA\"}".into(),
            0,
            Reason::BadMetadata,
        ),
        (&CudaIpc, 10, "{\"b\":5,\"d\":0,\"s\":4096,\"h\":\"é\"}".into(), 0, Reason::BadMetadata),
        (&CudaIpc, 10, h(""), 1, Reason::WrongHandles),
        (&CudaIpc, 10, "{\"b\":5,\"d\":0,\"s\":4096}".into(), 0, Reason::WrongHandles),
        (&CudaIpc, 10, "{\"b\":5,\"d\":0,\"s\":4096,\"k\":true}".into(), 0, Reason::UnknownBlock),
        (&CudaIpc, 10, "{\"b\":5,\"d\":0,\"s\":4096,\"r\":true}".into(), 0, Reason::UnknownLease),
        (&CudaIpc, 10, "{\"b\":5,\"d\":0,\"s\":4096,\"t\":\"0\"}".into(), 0, Reason::UnknownLease),
        // A handle of nobody's, which the driver refuses.
        (&CudaIpc, 10, h(""), 0, Reason::Driver),
        (&CudaVmm, 10, "{\"b\":5,\"d\":0,\"s\":2097152}".into(), 0, Reason::WrongHandles),
        (&CudaVmm, 10, "{\"b\":5,\"d\":0,\"s\":2097152}".into(), 2, Reason::WrongHandles),
        (&CudaVmm, 10, h(""), 0, Reason::WrongHandles),
        (&CudaVmm, 10, "{\"b\":5,\"d\":0,\"s\":4096}".into(), 1, Reason::WrongSize),
        // A descriptor of something else.
        (&CudaVmm, 10, "{\"b\":5,\"d\":0,\"s\":2097152}".into(), 1, Reason::Driver),
    ];
    // With a context, so that what comes is opened at once.
    let _context = storage(1, false)?;
    for (rung, bytes, meta, files, reason) in cases {
        let carrier = session(rung, trusted())?;
        match carrier.import(parcel(rung, bytes, &meta, files)?) {
            Err(fault) if fault.reason() == reason => {}
            other => return Err(format!("{meta}: {other:?}, not {reason}")),
        }
    }
    Ok(())
}

/// Memory of this process that was not lent to this very peer is nobody's to name, lent to others or not.
fn nobody_names_what_he_was_not_lent() -> Outcome {
    for (rung, shareable) in [(&CudaIpc as &dyn Rung, false), (&CudaVmm, true)] {
        let (friend, stranger) = (session(rung, trusted())?, session(rung, trusted())?);
        let lent = friend.export(&storage(4096, shareable)?).map_err(text)?;
        for number in 0..200 {
            for how in ["\"r\":true", "\"k\":true"] {
                let meta = format!("{{\"b\":{number},\"d\":0,\"s\":2097152,{how}}}");
                let came = stranger.import(parcel(rung, 10, &meta, 0)?);
                check(came.is_err(), (number, how))?;
            }
        }
        drop(lent);
    }
    // Whoever says that he is this very process is lent no more for it.
    let mine = CudaVmm.probe().map_err(text)?;
    let Ok(Session::Carrier(liar)) = CudaVmm.open(&mine, &mine, Trust::none()) else {
        return Err("not opened".into());
    };
    let _kept = storage(4096, true)?;
    for number in 0..200 {
        let meta = format!("{{\"b\":{number},\"d\":0,\"s\":2097152,\"t\":\"{number:032x}\"}}");
        check(liar.import(parcel(&CudaVmm, 10, &meta, 0)?).is_err(), number)?;
    }
    Ok(())
}

/// Where both ends are in one process, what arrives is the memory itself: nothing is opened where it was made.
fn both_ends_in_one_process_share_the_memory() -> Outcome {
    for (rung, shareable, copies) in
        [(&CudaIpc as &dyn Rung, false, 0), (&CudaVmm, true, 0), (&CudaVmm, false, 1)]
    {
        let (mine, theirs) = (rung.probe().map_err(text)?, rung.probe().map_err(text)?);
        let open = |a, b| match rung.open(a, b, trusted()) {
            Ok(Session::Carrier(carrier)) => Ok(carrier),
            other => Err(format!("{other:?}")),
        };
        let (sender, receiver) = (open(&mine, &theirs)?, open(&theirs, &mine)?);
        let lent = storage(5000, shareable)?;
        let packed = sender.export(&lent).map_err(text)?;
        check(packed.parcel.copies == copies && packed.parcel.handles.is_empty(), &packed)?;
        let lease = packed.parcel.lease;
        let before = [Count::ImportsMade, Count::HandlesImported].map(count);
        let came = receiver.import(packed.parcel).map_err(text)?;
        let mut bytes = [1; 5000];
        came.memory().read_at(0, &mut bytes).map_err(text)?;
        check([Count::ImportsMade, Count::HandlesImported].map(count) == before, "opened")?;
        let same = came.memory().block() == lent.memory().block();
        check(same == (copies == 0), "another block")?;
        drop(came);
        sender.released(receiver.receipt(lease));
        drop(packed.owner);
    }
    Ok(())
}

/// A stranger is shown no more than the tensor: neither what shares a block of the driver's with it, nor the rest of a
/// larger allocation.
fn a_stranger_sees_the_tensor_alone() -> Outcome {
    let small = storage(4096, false)?;
    let ipc = session(&CudaIpc, Trust::none())?;
    match ipc.export(&small) {
        Err(refusal) if refusal.reason() == Reason::PeerNotTrusted => {}
        other => return Err(format!("{other:?}")),
    }
    check(session(&CudaIpc, trusted())?.export(&small).is_ok(), "a friend")?;
    check(ipc.export(&storage(2 << 20, false)?).is_ok(), "alone in its handle")?;
    // Of a part of a shareable allocation a stranger gets a copy.
    let device = cuda::driver().map_err(text)?.devices()[0].device();
    let context = Context::of(device).map_err(text)?;
    let stream = Stream::new(&context).map_err(text)?;
    let part = Buffer::shareable(&context, 8 << 20).and_then(|whole| whole.part(0..1000));
    let part = share_buffer(part.map_err(text)?, &stream, DType::U8, &[1000]).map_err(text)?;
    let copies = |trust| -> Outcome<u8> {
        let packed = session(&CudaVmm, trust)?.export(part.storage()).map_err(text)?;
        Ok(packed.parcel.copies)
    };
    check((copies(Trust::none())?, copies(trusted())?) == (1, 0), "copies")
}

/// That something is unmapped counts for what was said to be gone, and for nothing else.
fn nothing_is_freed_because_a_peer_says_so() -> Outcome {
    let carrier = session(&CudaIpc, trusted())?;
    let before = count(Count::Ranges);
    let lent = storage(2 << 20, false)?;
    let packed = carrier.export(&lent).map_err(text)?;
    carrier.sent(packed.parcel.lease);
    for serial in 0..100 {
        let notice = Meta::from_json(format!("{{\"c\":[{serial}]}}")).map_err(text)?;
        carrier.noticed(notice).map_err(text)?;
    }
    // Home, and let go by its user: kept, until the peer has been told and has answered.
    let lease = packed.parcel.lease;
    let (rung, handles) = (CudaIpc.id(), Vec::new());
    carrier.released(Receipt { rung, lease, meta: None, handles });
    drop((packed, lent));
    // What is freed is freed by another thread.
    std::thread::sleep(std::time::Duration::from_millis(200));
    check(count(Count::Ranges) > before, "freed before the peer unmapped it")?;
    let told = carrier.notice().ok_or("nothing is said")?;
    check(told.as_json().starts_with("{\"x\":[["), told.as_json())?;
    let serial = told.as_json().trim_end_matches("]]}").rsplit(',').next().ok_or("x")?.to_owned();
    carrier
        .noticed(Meta::from_json(format!("{{\"c\":[{serial}]}}")).map_err(text)?)
        .map_err(text)?;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while count(Count::Ranges) != before {
        check(std::time::Instant::now() < end, "never freed")?;
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    for bad in ["null", "{\"x\":[[1]]}", "{\"zz\":[]}", "7"] {
        let fault = carrier.noticed(Meta::from_json(bad.into()).map_err(text)?).err();
        check(fault.is_some_and(|fault| fault.reason() == Reason::BadMetadata), bad)?;
    }
    let many: Vec<[u64; 2]> = (0..20_000).map(|number| [number, number]).collect();
    let flood = Meta::from_json(format!("{{\"x\":{many:?}}}")).map_err(text)?;
    let fault = carrier.noticed(flood).err().ok_or("a flood")?;
    check(fault.reason() == Reason::OverCap, fault)
}

/// Events that are none, and more of them than there can be.
fn receipts_that_are_wrong_give_the_memory_up() -> Outcome {
    for meta in [
        "{\"d\":[[1,\"AAAA\"]]}".to_owned(),
        format!("{{\"d\":[{}]}}", vec!["[1,\"\"]"; 100].join(",")),
    ] {
        let carrier = session(&CudaVmm, trusted())?;
        let lent = storage(4096, true)?;
        let packed = carrier.export(&lent).map_err(text)?;
        let lease = packed.parcel.lease;
        let meta = Some(Meta::from_json(meta).map_err(text)?);
        carrier.released(Receipt { rung: CudaVmm.id(), lease, meta, handles: Vec::new() });
        drop((packed, lent));
    }
    Ok(())
}

fn offers_that_are_wrong_are_refused() -> Outcome {
    let mine = CudaIpc.probe().map_err(text)?;
    for (from, to, reason) in [
        ("\"v\":1", "\"v\":2", Reason::NotOffered),
        ("cuda:", "cudo:", Reason::BadMetadata),
        ("\"d\":[", "\"zz\":[", Reason::BadMetadata),
    ] {
        let theirs = changed(&mine, from, to)?;
        match CudaIpc.open(&mine, &theirs, Trust::none()) {
            Err(refusal) if refusal.reason() == reason => {}
            other => return Err(format!("{to}: {other:?}, not {reason}")),
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    stand_in::main(false, || {
        run_serially(vec![
            trial("parcels_that_are_wrong_are_faults", parcels_that_are_wrong_are_faults),
            trial("nobody_names_what_he_was_not_lent", nobody_names_what_he_was_not_lent),
            trial("a_stranger_sees_the_tensor_alone", a_stranger_sees_the_tensor_alone),
            trial(
                "nothing_is_freed_because_a_peer_says_so",
                nothing_is_freed_because_a_peer_says_so,
            ),
            trial("receipts_that_are_wrong_give_it_up", receipts_that_are_wrong_give_the_memory_up),
            trial("both_ends_in_one_process", both_ends_in_one_process_share_the_memory),
            trial("offers_that_are_wrong_are_refused", offers_that_are_wrong_are_refused),
        ])
    })
}
