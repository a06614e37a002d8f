//! Any parcel, receipt and notice, with descriptors of every kind, for every carrier that opens here; and whatever a
//! form's metadata may be. The rungs of devices open where there is a driver: `LD_LIBRARY_PATH` names the stand-in's
//! folder (CONTRIBUTING).
#![no_main]

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};

use arbitrary::Arbitrary;
use fuzz::{BYTES, Descriptor, descriptors};
use libfuzzer_sys::fuzz_target;
use rung::{Carrier, DType, Form, LeaseId, Lowered, Meta, Offer, Parcel, Receipt, Room, Rung, Session, Tensor, Trust};

#[derive(Debug, Arbitrary)]
struct Step {
    rung: u8,
    what: What,
}

#[derive(Debug, Arbitrary)]
enum What {
    Parcel { text: Text, bytes: u64, exact: bool, descriptors: Vec<Descriptor> },
    Receipt { lease: u64, meta: Option<Text> },
    Notice(Text),
    Form { meta: Text, fill: Vec<u8>, views: u8 },
}

/// Metadata: of the shape that the rungs write, with numbers that are not; or anything.
#[derive(Debug, Arbitrary)]
enum Text {
    Null,
    Block { number: u8, forwarded: bool, device: bool },
    Retired(Vec<u64>),
    Device { serial: u64, offset: u64, bytes: u64, bits: Vec<u8>, key: u8 },
    Any(String),
}

impl Text {
    fn meta(&self) -> Option<Meta> {
        let json = match self {
            Self::Null => "null".into(),
            Self::Block { number, forwarded, device } => {
                let device = if *device { ",\"d\":\"host\"" } else { "" };
                format!("{{\"b\":{number},\"f\":{forwarded}{device}}}")
            }
            Self::Retired(numbers) => format!("{{\"x\":{numbers:?}}}"),
            Self::Device { serial, offset, bytes, bits, key } => {
                let hex: String = bits.iter().map(|byte| format!("{byte:02x}")).collect();
                let device = format!("cuda:{}", "0".repeat(32));
                match key % 3 {
                    0 => format!("{{\"d\":\"{device}\",\"s\":{serial},\"o\":{offset},\"n\":{bytes},\"h\":\"{hex}\"}}"),
                    1 => format!("{{\"d\":\"{device}\",\"b\":{serial},\"o\":{offset},\"e\":\"{hex}\"}}"),
                    _ => format!("{{\"p\":{serial},\"t\":\"{hex}\",\"g\":{offset}}}"),
                }
            }
            Self::Any(text) => text.clone(),
        };
        serde_json::from_str(&json).ok()
    }
}

struct Opened {
    carriers: Vec<(rung::RungId, Box<dyn Carrier>)>,
    forms: Vec<Box<dyn Form>>,
}

/// Every rung, between this process and one that is called something else.
static OPENED: LazyLock<Opened> = LazyLock::new(|| {
    let contract = ladder::Contract::V1;
    let rungs: [Arc<dyn Rung>; 8] = [
        Arc::new(tier_shm::Shm),
        Arc::new(tier_shm::SealedShm),
        Arc::new(ladder::tier_cuda_ipc::CudaIpc),
        Arc::new(ladder::tier_cuda_ipc::CudaVmm),
        Arc::new(ladder::tier_pool_ipc::PoolIpc::experimental(contract)),
        Arc::new(tier_numpy::Numpy),
        Arc::new(tier_pickle::Pickle),
        Arc::new(tier_inline::Inline),
    ];
    let mut opened = Opened { carriers: Vec::new(), forms: Vec::new() };
    for rung in rungs {
        let Ok(mine) = rung.probe() else { continue };
        let theirs: Offer = Offer { rung: rung.id(), meta: another(&mine.meta), handles: Vec::new() };
        let trusts = [Trust::none(), trusted()];
        for trust in trusts {
            match rung.open(&mine, &theirs, trust) {
                Ok(Session::Carrier(carrier)) => opened.carriers.push((rung.id(), carrier)),
                Ok(Session::Form(form)) => opened.forms.push(form),
                Err(_) => {}
            }
        }
    }
    eprintln!("carriers: {:?}", opened.carriers.iter().map(|(rung, _)| rung).collect::<Vec<_>>());
    opened
});

fn trusted() -> Trust {
    tier_shm::PeerTrust::same_executable(std::process::id()).map_or(Trust::none(), Trust::carrying)
}

/// The same offer by a process that drew another name.
fn another(meta: &Meta) -> Meta {
    let mut text = meta.as_json().to_owned();
    if let Some(at) = text.find("\"n\":\"") {
        let name = at + 5..(at + 5 + 32).min(text.len());
        text.replace_range(name, &"5".repeat(32));
    }
    serde_json::from_str(&text).expect("an offer")
}

/// Descriptors before anything came.
static FIRST: std::sync::OnceLock<usize> = std::sync::OnceLock::new();

fuzz_target!(|steps: Vec<Step>| {
    let opened = &*OPENED;
    let before = descriptors();
    {
        // What was imported is held till the end, so that what comes meets it.
        let mut held = Vec::new();
        for step in steps.iter().take(16) {
            let at = usize::from(step.rung);
            let (rung, carrier) = &opened.carriers[at % opened.carriers.len()];
            match &step.what {
                What::Parcel { text, bytes, exact, descriptors } => {
                    let Some(meta) = text.meta() else { continue };
                    let handles = descriptors.iter().take(3).filter_map(|descriptor| descriptor.open()).collect();
                    let bytes = if *exact { BYTES as u64 } else { *bytes };
                    let lease = LeaseId(held.len() as u64);
                    let parcel = Parcel { rung: rung.clone(), lease, bytes, copies: 0, meta, handles };
                    // As text and back, as it crosses.
                    let Ok((wire, handles)) = parcel.split() else { continue };
                    let text = serde_json::to_string(&wire).expect("a parcel is written");
                    let wire = serde_json::from_str(&text).expect("what was written is read");
                    let Ok(parcel) = Parcel::join(wire, &mut VecDeque::from(handles)) else { continue };
                    if let Ok(storage) = carrier.import(parcel) {
                        assert_eq!(storage.len() as u64, bytes);
                        let storage = Arc::new(storage);
                        let _ = storage.host_bytes().map(|bytes| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>());
                        let _ = carrier.export(&storage).map(drop);
                        held.push(storage);
                    }
                    let _ = carrier.receipt(lease);
                }
                What::Receipt { lease, meta } => {
                    let meta = meta.as_ref().and_then(Text::meta);
                    carrier.released(Receipt { rung: rung.clone(), lease: LeaseId(*lease), meta, handles: Vec::new() });
                }
                What::Notice(text) => {
                    if let Some(meta) = text.meta() {
                        let _ = carrier.noticed(meta);
                    }
                }
                What::Form { meta, fill, views } => {
                    let (Some(meta), form) = (meta.meta(), &opened.forms[at % opened.forms.len()]) else { continue };
                    let Ok(view) = Tensor::from_vec(fill.clone(), &[fill.len()]) else { continue };
                    assert_eq!(view.dtype(), DType::U8);
                    let views = vec![view; usize::from(views % 3)];
                    let mut room = Room::of(fill.len());
                    if let Ok(value) = form.raise(Lowered { meta, views }, &mut room) {
                        fuzz::look_at(&value);
                    }
                }
            }
        }
    }
    // Blocks that are kept are the peer's to name again; they are bounded, and told to be forgotten here.
    let all = Meta::write(&serde_json::json!({"x": (0..256).collect::<Vec<u64>>()})).expect("a list");
    for (rung, carrier) in &opened.carriers {
        if *rung == rung::RungId::SHM {
            let _ = carrier.noticed(all.clone());
        }
    }
    // What came of pools, and memory of devices, is kept, within bounds; other threads let go of the rest.
    let most = *FIRST.get_or_init(|| before) + 512;
    for _ in 0..200 {
        if descriptors() <= most {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("descriptors: {before} before, {} after", descriptors());
});
