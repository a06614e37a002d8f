//! Tensors on a device.

use ladder::tier_cuda_ipc::{self, cuda};
use ladder::{Contract, Device, Ladder, Map, Reason, Refusal, Value};

/// The device of a name: `cuda:0`, or by UUID.
fn named(name: &str) -> Result<Device, Refusal> {
    let driver = cuda::driver()?;
    let number: Option<usize> = name.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    if let Some(info) = number.and_then(|number| driver.devices().get(number)) {
        return Ok(info.device());
    }
    let device: Device = name.parse().map_err(|_| Reason::DeviceUnknown)?;
    Ok(driver.device(device)?.device())
}

/// A value with every tensor of it on a device; what is not one stays where it is.
pub(crate) fn put(name: &str, value: Value) -> Result<Value, Refusal> {
    on(named(name)?, value)
}

fn on(device: Device, value: Value) -> Result<Value, Refusal> {
    Ok(match value {
        Value::Tensor(tensor) if tensor.count() > 0 => {
            tier_cuda_ipc::copy_to(device, &tensor)?.with_flags(tensor.flags()).into()
        }
        Value::List(items) => Value::List(all_on(device, items)?),
        Value::Tuple(items) => Value::Tuple(all_on(device, items)?),
        Value::Map(map) => {
            let mut all = Map::new();
            for (key, item) in map.iter() {
                all.insert(key.clone(), on(device, item.clone())?);
            }
            Value::Map(all)
        }
        other => other,
    })
}

fn all_on(device: Device, items: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    items.into_iter().map(|item| on(device, item)).collect()
}

/// The rungs; with the experimental one, where it is asked for.
pub(crate) fn rungs(asks_for_pools: bool) -> Ladder {
    let rungs = Ladder::standard();
    if asks_for_pools { rungs.experimental_pool_ipc(Contract::V1) } else { rungs }
}
