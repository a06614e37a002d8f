//! What a worker does.

use std::sync::{Arc, Mutex, PoisonError};

use ladder::{Channel, DType, Device, Failure, Ladder, Methods, Tensor, TensorMut, Value};
use rung::{Rung, RungId};
use testkit::device::DeviceRung;
use testkit::faulty::{Faulty, Kind, On, Trigger};

/// Serves until the host is gone, if this is a worker.
pub(crate) fn serve() -> Result<bool, ladder::ConnectError> {
    let trigger = Trigger::never();
    let Some(channel) = Channel::from_env_with(&ladder(&trigger), None)? else { return Ok(false) };
    let held: Arc<Mutex<Vec<Value>>> = Arc::default();
    let hold = Arc::clone(&held);
    let methods = Methods::new()
        .on("echo", Ok)
        .on("give", |seed: Value| Ok(give(seed_of(&seed)?)?.into()))
        .on("is", |asked: Value| {
            let Value::List(items) = &asked else { return Err(wanted()) };
            let [seed, value] = &items[..] else { return Err(wanted()) };
            Ok(Value::from(*value == Value::from(give(seed_of(seed)?)?)))
        })
        .on("hold", move |value| {
            let mut held = hold.lock().unwrap_or_else(PoisonError::into_inner);
            held.push(value);
            // Older ones go, here and there in the middle of what others do.
            let kept = held.len().saturating_sub(8);
            let gone: Vec<Value> = held.drain(..kept).collect();
            drop(held);
            drop(gone);
            Ok(Value::Null)
        })
        .on("bytes", |value: Value| {
            let Value::Tensor(tensor) = &value else { return Err(wanted()) };
            Ok(Value::Bytes(tensor.to_bytes()?.into()))
        })
        .on("break", move |_| {
            trigger.set(1);
            Ok(Value::Null)
        });
    // Its end is the host's to judge.
    let _ = channel.serve(methods);
    Ok(true)
}

/// The device that there is none of.
pub(crate) fn device() -> Device {
    testkit::device::device(1)
}

/// Every rung that moves host memory, below two for memory of a device that there is none of, the higher of which
/// breaks on request.
pub(crate) fn ladder(trigger: &Trigger) -> Ladder {
    let rung = |name| DeviceRung {
        id: RungId::new(name),
        devices: vec![device()],
        says: true,
        ready: true,
    };
    let inner: Arc<dyn Rung> = Arc::new(rung("near"));
    let (id, trigger) = (inner.id(), trigger.clone());
    let near = Faulty { inner, id, kind: Kind::Fail, on: On::Import, trigger };
    Ladder::of(vec![
        Arc::new(near),
        Arc::new(rung("far")),
        Arc::new(tier_shm::Shm),
        Arc::new(tier_numpy::Numpy),
        Arc::new(tier_pickle::Pickle),
        Arc::new(tier_inline::Inline),
    ])
}

fn wanted() -> Failure {
    Failure::new("wanted", "a seed, and perhaps a tensor")
}

fn seed_of(value: &Value) -> Result<u64, Failure> {
    let seed = value.as_i64().and_then(|seed| u64::try_from(seed).ok());
    seed.ok_or_else(wanted)
}

/// The tensor that a seed stands for: of any size to 4 MiB, born shared or private, whole or a part.
pub(crate) fn give(seed: u64) -> Result<Tensor, rung::Refusal> {
    let mut random = fastrand::Rng::with_seed(seed);
    let len = 1 + (random.u32(..) as usize >> random.u32(10..32));
    let bytes = testkit::values::contents(seed, len, DType::U8);
    let tensor = if random.bool() {
        let mut born = TensorMut::new(DType::U8, &[len])?;
        born.as_bytes_mut().copy_from_slice(&bytes);
        born.share()?
    } else {
        Tensor::from_vec(bytes, &[len])?
    };
    if len > 100 && random.bool() { tensor.slice(0, len / 3, len / 3 * 2) } else { Ok(tensor) }
}
