//! The same frames and the same codec without a channel, and the price of one pass.

use std::collections::VecDeque;
use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use link::Link;
use rung::{
    DType, Fault, LeaseId, Meta, Parcel, ParcelWire, Path, Receipt, Rung, RungId, Session, Storage,
    Tensor, Trust, Unsendable, Value,
};
use segment::PeerTrust;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tier_inline::codec::{self, Node, Splice, Unsplice};
use tier_shm::{Shm, TensorMut};

use crate::Error;
use crate::report::{Report, median};
use crate::wire::{self, Accepted, Message, Of, Riders};

/// As in the library.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tag {
    d: DType,
    h: Vec<usize>,
    s: usize,
}

struct Write;

impl Splice for Write {
    fn splice(
        &mut self,
        value: &Value,
        _: &Path<'_>,
        out: &mut String,
    ) -> Result<bool, Unsendable> {
        let Value::Tensor(tensor) = value else { return Ok(false) };
        let tag = Tag { d: tensor.dtype(), h: tensor.shape().to_vec(), s: 0 };
        out.push_str("{\"$T\":");
        out.push_str(&serde_json::to_string(&tag).unwrap_or_default());
        out.push('}');
        Ok(true)
    }
}

struct Read<'a>(&'a Arc<Storage>);

impl Unsplice for Read<'_> {
    fn unsplice(&mut self, _: &str, content: &RawValue, _: Node) -> Result<Value, Fault> {
        let tag: Tag = serde_json::from_str(content.get())
            .map_err(|error| Fault::new(rung::Reason::BadMetadata, error.to_string()))?;
        Ok(Value::Tensor(Tensor::contiguous(Arc::clone(self.0), tag.d, &tag.h)?))
    }
}

/// One side of a conversation of frames like ours.
pub(crate) struct Loop {
    link: Link,
    value: Value,
    storage: Arc<Storage>,
    parcel: ParcelWire,
}

impl Loop {
    pub(crate) fn over(socket: OwnedFd) -> Result<Self, Error> {
        let len = 64 << 20;
        let storage = Arc::new(Storage::from_bytes(vec![0; len]));
        let value = Value::from(Tensor::contiguous(Arc::clone(&storage), DType::U8, &[len])?);
        let meta = Meta::from_json("{\"b\":7}".into())?;
        let (rung, lease, bytes) = (RungId::SHM, LeaseId(123_456), len as u64);
        let parcel = Parcel { rung, lease, bytes, copies: 0, meta, handles: Vec::new() };
        let link = Link::over(socket);
        Ok(Self { link, value, storage, parcel: parcel.split()?.0 })
    }

    fn write(&self) -> Result<String, Error> {
        let mut value = String::new();
        codec::encode(&self.value, &mut value, &mut Write).map_err(|error| error.to_string())?;
        Ok(value)
    }

    fn riders() -> Result<Riders, Error> {
        let receipt =
            Receipt { rung: RungId::SHM, lease: LeaseId(123_456), meta: None, handles: Vec::new() };
        let accepted = vec![Accepted { of: Of::Return, id: 123_456, attempt: 1 }];
        Ok(Riders { receipts: vec![receipt.split()?.0], accepted, notices: Vec::new() })
    }

    fn receive(&self) -> Result<Value, Error> {
        let frame = self.link.receive(None)?;
        let (message, riders) = wire::decode(&frame.json)?;
        black_box(riders);
        let (Message::Call { value, .. } | Message::Return { value, .. }) = message else {
            return Err("another message".into());
        };
        Ok(codec::decode(&value, &mut Read(&self.storage))?)
    }

    pub(crate) fn once(&mut self) -> Result<(), Error> {
        let message = Message::Call {
            id: 123_456,
            attempt: 1,
            root: None,
            method: "echo".into(),
            parcels: vec![self.parcel.clone()],
            value: self.write()?,
        };
        self.link.send(&wire::encode(&message, &Self::riders()?)?, &[], None)?;
        black_box(self.receive()?);
        Ok(())
    }

    pub(crate) fn answer(socket: OwnedFd) -> Result<(), Error> {
        let this = Self::over(socket)?;
        while let Ok(value) = this.receive() {
            black_box(value);
            let message = Message::Return {
                id: 123_456,
                attempt: 1,
                parcels: vec![this.parcel.clone()],
                value: this.write()?,
            };
            let mut riders = Self::riders()?;
            riders.accepted.clear();
            this.link.send(&wire::encode(&message, &riders)?, &[], None)?;
        }
        Ok(())
    }
}

/// One hop without a socket: export, encode, decode, import, receipt. Both sides are in this process, so
/// that an instruction counter sees all of it.
fn pass(count: u32) -> Result<f64, Error> {
    let trust = Trust::carrying(PeerTrust::same_executable(std::process::id())?);
    let (mine, theirs) = (Shm.probe()?, Shm.probe()?);
    let open = |a: &_, b: &_| match Shm.open(a, b, trust.clone()) {
        Ok(Session::Carrier(carrier)) => Ok(carrier),
        other => Err(format!("{other:?}")),
    };
    let (sender, receiver) = (open(&mine, &theirs)?, open(&theirs, &mine)?);
    sender.wake_with(Arc::new(|| {}));
    let tensor = TensorMut::new(DType::U8, &[64 << 20])?.share()?;
    let mut samples = Vec::new();
    for id in 0..u64::from(count) {
        let started = Instant::now();
        let packed = sender.export(tensor.storage())?;
        let (parcel, handles) = packed.parcel.split()?;
        let lease = parcel.lease().1;
        let mut value = String::new();
        codec::encode(&Value::from(tensor.clone()), &mut value, &mut Write)
            .map_err(|error| error.to_string())?;
        let parcels = vec![parcel];
        let message =
            Message::Call { id, attempt: 1, root: None, method: "echo".into(), parcels, value };
        let json = wire::encode(&message, &Riders::default())?;
        sender.sent(lease);

        let (message, _) = wire::decode(&json)?;
        let Message::Call { parcels, value, .. } = message else { return Err("a call".into()) };
        let mut handles = VecDeque::from(handles);
        for wire in parcels {
            let storage = Arc::new(receiver.import(Parcel::join(wire, &mut handles)?)?);
            black_box(codec::decode(&value, &mut Read(&storage))?);
        }
        sender.released(receiver.receipt(lease));
        drop(packed.owner);
        samples.push(started.elapsed().as_nanos() as f64 / 1e3);
    }
    Ok(median(&samples))
}

/// So many passes, for an instruction counter.
pub(crate) fn run(count: u32) -> Result<(), Error> {
    pass(count).map(drop)
}

pub(crate) fn measure(report: &mut Report) -> Result<(), Error> {
    pass(2_000)?;
    let micros = pass(20_000)?;
    report.fact("encode + decode + lease of one hop, both sides", format!("{micros:.2} µs"));
    Ok(())
}
