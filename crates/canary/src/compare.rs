//! Where two values differ, in words.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use rung::{Reason, Refusal, Tensor, Value};

/// The first difference: `$.whole: byte 17 of 400 is 0x3c and came as 0x00`.
pub(crate) fn difference(sent: &Value, came: &Value) -> Option<Refusal> {
    let corrupt = |detail: String| Refusal::new(Reason::Corrupt, detail);
    let (Value::Map(sent_map), Value::Map(came_map)) = (sent, came) else {
        return (sent != came)
            .then(|| corrupt(format!("a {} came as a {}", sent.kind(), came.kind())));
    };
    if sent_map.iter().len() != came_map.iter().len() {
        let (sent, came) = (sent_map.iter().len(), came_map.iter().len());
        return Some(corrupt(format!("{sent} leaves were sent and {came} came")));
    }
    // Which storage of those that came a storage that was sent is.
    let mut same: HashMap<*const rung::Storage, *const rung::Storage> = HashMap::new();
    for (key, sent) in sent_map.iter() {
        let name = key.as_str().unwrap_or_default();
        let Some(came) = came.get(name) else {
            return Some(corrupt(format!("$.{name} did not come")));
        };
        let different = match (sent, came) {
            (Value::Tensor(sent), Value::Tensor(came)) => in_tensor(sent, came),
            (Value::Array(sent), Value::Array(came)) if sent.descr() == came.descr() => {
                in_tensor(sent.cells(), came.cells())
            }
            (Value::Pickle(sent), Value::Pickle(came)) => in_tensor(sent.stream(), came.stream()),
            (Value::Bytes(sent), Value::Bytes(came)) => in_bytes(sent, came),
            (Value::Str(sent), Value::Str(came)) => in_bytes(sent.as_bytes(), came.as_bytes()),
            _ => None,
        };
        if let Some(difference) = different {
            return Some(corrupt(format!("$.{name}: {difference}")));
        }
        if sent != came {
            let detail = match (sent.kind(), came.kind()) {
                (sent, came) if sent != came => format!("a {sent} came as a {came}"),
                (kind, _) => format!("another {kind} came"),
            };
            return Some(corrupt(format!("$.{name}: {detail}")));
        }
        if let (Value::Tensor(sent), Value::Tensor(came)) = (sent, came)
            && sent.count() > 0
        {
            let there = Arc::as_ptr(came.storage());
            if *same.entry(Arc::as_ptr(sent.storage())).or_insert(there) != there {
                return Some(Refusal::new(Reason::Unshared, format!("$.{name}")));
            }
        }
    }
    None
}

fn in_tensor(sent: &Tensor, came: &Tensor) -> Option<String> {
    if (sent.dtype(), sent.shape()) != (came.dtype(), came.shape()) {
        let describe = |tensor: &Tensor| format!("{} of {:?}", tensor.dtype(), tensor.shape());
        return Some(format!("{} came as {}", describe(sent), describe(came)));
    }
    let (sent, came) = match (bytes(sent), bytes(came)) {
        (Ok(sent), Ok(came)) => (sent, came),
        (Err(refusal), _) | (_, Err(refusal)) => return Some(refusal.to_string()),
    };
    in_bytes(&sent, &came)
}

fn in_bytes(sent: &[u8], came: &[u8]) -> Option<String> {
    if sent == came {
        return None;
    }
    let of = sent.len();
    if came.len() != of {
        return Some(format!("{of} bytes came as {}", came.len()));
    }
    let at = sent.iter().zip(came).position(|(sent, came)| sent != came)?;
    let others = sent.iter().zip(came).filter(|(sent, came)| sent != came).count();
    let (was, is) = (sent[at], came[at]);
    Some(format!("byte {at} of {of} is {was:#04x} and came as {is:#04x}; {others} differ"))
}

fn bytes(tensor: &Tensor) -> Result<Cow<'_, [u8]>, Refusal> {
    if tensor.count() == 0 {
        Ok(Cow::Borrowed(&[]))
    } else if tensor.layout().is_contiguous() {
        tensor.storage().read(tensor.layout().span())
    } else {
        tensor.to_bytes().map(Cow::Owned)
    }
}
