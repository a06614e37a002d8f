//! Rungs that go wrong: any rung, wrapped, with a fault of one kind in one direction.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rung::{
    Access, Carrier, Device, Fault, Fill, Form, Leaf, LeaseId, Lowered, Meta, Offer, Packed,
    Parcel, Provenance, Reach, Reason, Receipt, Refusal, Room, Rung, RungId, Session, Storage,
    Tensor, Trust, Value,
};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One byte in the middle is another.
    Flip,
    /// Each two bytes are swapped: done on both ways, it cancels itself.
    Swap,
    /// What this process's first session saw at this turn.
    Stale,
    /// More bytes are declared than there are.
    Longer,
    /// Half as many are declared.
    Shorter,
    /// It takes long, and is right.
    Delay(Duration),
    /// It does not work.
    Fail,
}

/// Where it goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// What this process sends.
    Export,
    /// What this process receives.
    Import,
    /// Both.
    Both,
}

/// When it goes wrong: from the first use on, unless said otherwise. Shared with the test that sets it off.
#[derive(Debug, Clone)]
pub struct Trigger(Arc<(AtomicBool, AtomicU64)>);

impl Trigger {
    /// Always.
    #[must_use]
    pub fn always() -> Self {
        Self(Arc::new((AtomicBool::new(true), AtomicU64::new(0))))
    }

    /// Not until [set](Self::set).
    #[must_use]
    pub fn never() -> Self {
        Self(Arc::new((AtomicBool::new(false), AtomicU64::new(0))))
    }

    /// From the `nth` use from now on, counted from 1.
    pub fn set(&self, nth: u64) {
        self.0.1.store(nth - 1, Ordering::SeqCst);
        self.0.0.store(true, Ordering::SeqCst);
    }

    /// No more.
    pub fn unset(&self) {
        self.0.0.store(false, Ordering::SeqCst);
    }

    fn fires(&self) -> bool {
        let one_less = |left: u64| left.checked_sub(1);
        self.0.0.load(Ordering::SeqCst)
            && self.0.1.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_err()
    }
}

/// A rung that goes wrong.
#[derive(Debug, Clone)]
pub struct Faulty {
    /// The rung that does the work.
    pub inner: Arc<dyn Rung>,
    /// What it is called here: its own name, or another, for a second rung of the same kind.
    pub id: RungId,
    /// What goes wrong.
    pub kind: Kind,
    /// Where.
    pub on: On,
    /// When.
    pub trigger: Trigger,
}

/// What the first session of this process saw.
static SEEN: Mutex<Option<Seen>> = Mutex::new(None);

/// By rung, way and turn: in which session, and what.
type Seen = HashMap<(RungId, bool, u64), (u64, Vec<u8>)>;

static SESSIONS: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct Wrong {
    fault: Faulty,
    /// Its number in this process.
    session: u64,
    turns: [AtomicU64; 2],
}

impl Wrong {
    fn now(&self, export: bool) -> Option<Kind> {
        let here = match self.fault.on {
            On::Export => export,
            On::Import => !export,
            On::Both => true,
        };
        let kind = (here && self.fault.trigger.fires()).then_some(self.fault.kind);
        if let Some(Kind::Delay(time)) = kind {
            std::thread::sleep(time);
        }
        kind
    }

    fn change(&self, kind: Kind, export: bool, bytes: &mut Vec<u8>) {
        match kind {
            Kind::Flip => {
                if let Some(byte) = bytes.len().checked_div(2).and_then(|at| bytes.get_mut(at)) {
                    *byte ^= 0x55;
                }
            }
            Kind::Swap => bytes.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1)),
            Kind::Stale => {
                let turn = self.turns[usize::from(export)].fetch_add(1, Ordering::SeqCst);
                let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
                let seen = seen.get_or_insert_default();
                let key = (self.fault.id.clone(), export, turn);
                let (first, old) = seen.entry(key).or_insert_with(|| (self.session, bytes.clone()));
                if *first != self.session && old.len() == bytes.len() {
                    bytes.clone_from(old);
                }
            }
            _ => {}
        }
    }
}

impl Rung for Faulty {
    fn id(&self) -> RungId {
        self.id.clone()
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        Ok(Offer { rung: self.id.clone(), ..self.inner.probe()? })
    }

    fn open(&self, mine: &Offer, peer: &Offer, trust: Trust) -> Result<Session, Refusal> {
        let session = SESSIONS.fetch_add(1, Ordering::SeqCst);
        let wrong = Wrong { fault: self.clone(), session, turns: Default::default() };
        Ok(match self.inner.open(mine, peer, trust)? {
            Session::Carrier(inner) => Session::Carrier(Box::new(FaultyCarrier { inner, wrong })),
            Session::Form(inner) => Session::Form(Box::new(FaultyForm { inner, wrong })),
        })
    }
}

struct FaultyCarrier {
    inner: Box<dyn Carrier>,
    wrong: Wrong,
}

impl FaultyCarrier {
    fn changed(&self, storage: &Storage, kind: Kind, export: bool) -> Result<Storage, Refusal> {
        let mut bytes = storage.read(0..storage.len()).map_or_else(
            // A bundle cannot be lent as one slice, but read.
            |_| {
                let mut bytes = vec![0; storage.len()];
                storage.memory().read_at(0, &mut bytes).map(|()| bytes)
            },
            |bytes| Ok(bytes.into_owned()),
        )?;
        self.wrong.change(kind, export, &mut bytes);
        self.inner.specimen(storage.device(), bytes.len(), &mut |into| into.copy_from_slice(&bytes))
    }
}

impl Carrier for FaultyCarrier {
    fn copies(&self, access: Access) -> bool {
        self.inner.copies(access)
    }

    fn devices(&self) -> Vec<(Device, Reach)> {
        self.inner.devices()
    }

    fn specimen(&self, device: Device, len: usize, fill: Fill<'_>) -> Result<Storage, Refusal> {
        self.inner.specimen(device, len, fill)
    }

    fn export(&self, storage: &Arc<Storage>) -> Result<Packed, Refusal> {
        let kind = self.wrong.now(true);
        let mut packed = match kind {
            Some(Kind::Fail) => return Err(Refusal::new(Reason::NoMemory, "so says the test")),
            Some(kind @ (Kind::Flip | Kind::Swap | Kind::Stale)) => {
                self.inner.export(&Arc::new(self.changed(storage, kind, true)?))?
            }
            _ => self.inner.export(storage)?,
        };
        match kind {
            Some(Kind::Longer) => packed.parcel.bytes += 1 << 30,
            Some(Kind::Shorter) => packed.parcel.bytes /= 2,
            _ => {}
        }
        packed.parcel.rung = self.wrong.fault.id.clone();
        Ok(packed)
    }

    fn import(&self, mut parcel: Parcel) -> Result<Storage, Fault> {
        parcel.rung = self.wrong.fault.inner.id();
        let lease = parcel.lease;
        let kind = self.wrong.now(false);
        match kind {
            Some(Kind::Fail) => return Err(Fault::new(Reason::System, "it broke")),
            Some(Kind::Longer) => parcel.bytes += 1 << 30,
            Some(Kind::Shorter) => parcel.bytes /= 2,
            _ => {}
        }
        let storage = self.inner.import(parcel)?;
        let storage = match kind {
            Some(kind @ (Kind::Flip | Kind::Swap | Kind::Stale)) => {
                self.changed(&storage, kind, false)?
            }
            _ => storage,
        };
        let rung = self.wrong.fault.id.clone();
        Ok(storage.with_provenance(Provenance { rung, lease }))
    }

    fn sent(&self, lease: LeaseId) {
        self.inner.sent(lease);
    }

    fn unopened(&self, lease: LeaseId) {
        self.inner.unopened(lease);
    }

    fn is_settled(&self, lease: LeaseId) -> bool {
        self.inner.is_settled(lease)
    }

    fn receipt(&self, lease: LeaseId) -> Receipt {
        Receipt { rung: self.wrong.fault.id.clone(), ..self.inner.receipt(lease) }
    }

    fn released(&self, receipt: Receipt) {
        self.inner.released(Receipt { rung: self.wrong.fault.inner.id(), ..receipt });
    }

    fn peer_gone(&self) {
        self.inner.peer_gone();
    }

    fn notice(&self) -> Option<Meta> {
        self.inner.notice()
    }

    fn keeps(&self) -> bool {
        self.inner.keeps()
    }

    fn noticed(&self, notice: Meta) -> Result<(), Fault> {
        self.inner.noticed(notice)
    }

    fn wake_with(&self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.inner.wake_with(wake);
    }
}

struct FaultyForm {
    inner: Box<dyn Form>,
    wrong: Wrong,
}

impl FaultyForm {
    fn changed(&self, lowered: Lowered, export: bool) -> Result<Lowered, Refusal> {
        let Some(kind) = self.wrong.now(export) else { return Ok(lowered) };
        let Lowered { meta, mut views } = lowered;
        match kind {
            Kind::Flip | Kind::Swap | Kind::Stale => {
                for view in &mut views {
                    let mut bytes = view.to_bytes()?;
                    self.wrong.change(kind, export, &mut bytes);
                    *view = Tensor::from_bytes(bytes, view.dtype(), view.shape())?;
                }
            }
            Kind::Longer => views.extend(views.clone()),
            Kind::Shorter => drop(views.pop()),
            Kind::Fail => return Err(Refusal::new(Reason::System, "it broke")),
            Kind::Delay(_) => {}
        }
        Ok(Lowered { meta, views })
    }
}

impl Form for FaultyForm {
    fn lower(&self, leaf: Leaf<'_>) -> Result<Lowered, Refusal> {
        self.changed(self.inner.lower(leaf)?, true)
    }

    fn specimens(&self, random: Fill<'_>) -> Result<Vec<Value>, Refusal> {
        self.inner.specimens(random)
    }

    fn raise(&self, lowered: Lowered, room: &mut Room) -> Result<Value, Fault> {
        self.inner.raise(self.changed(lowered, false)?, room)
    }
}
