//! The calls that a channel makes by itself: canaries and what they showed.
//!
//! They are calls like any other, so that they take the path that users' calls take. Their names begin with
//! `$`, which no user's does.
//!
//! | method | argument | answer |
//! |---|---|---|
//! | `$canary` | `r`: the rung, `d`: the device, `v`: a map of leaves, `q`: whether the value need not come back | `d`: the digest of `v`, `l`: a list of each leaf's name and what it rode, `v`: `v`, or `w`: the code of why it does not come |
//! | `$make` | `r`: the rung, `d`: the device | `d`: the digest of `v`, `v`: a map of leaves in memory of the peer's, to be forwarded |
//! | `$findings` | a list of `[rung, device, code or null, text, code or null, text]`: what this side's canaries showed of the way there, and of the way back; null for verified, `unproven` for nothing | null |
//! | `$reprove` | null | null, when the peer has proven its rungs anew, and told |

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use canary::{Answer, Contents, Finding, Verdict, battery, digest};
use rung::{Device, Fill, Map, Reach, Reason, Refusal, RungId, Storage, Tensor, Value, limits};

use crate::core::Core;
use crate::handler::Failure;
use crate::pack::{DIGESTED, bytes_of};
use crate::transfer::refusal_of;
use crate::unpack::Read;

pub(crate) const CANARY: &str = "$canary";
pub(crate) const MAKE: &str = "$make";
pub(crate) const FINDINGS: &str = "$findings";
pub(crate) const REPROVE: &str = "$reprove";

/// Whether a method is the channel's own.
pub(crate) fn is_own(method: &str) -> bool {
    method.starts_with('$')
}

/// The page that canaries are cut by where a peer says nothing of its own.
const PAGE: usize = 4096;

/// Of what a peer says was found, this much is kept.
const TEXT: usize = 300;

fn wanted(what: &str) -> Failure {
    Failure::new("malformed", format!("{what} is wanted"))
}

/// A refusal as the peer hears it.
fn heard(why: &Refusal) -> Failure {
    Failure::new(why.reason().code(), why.for_peer().to_string())
}

fn text<'v>(value: &'v Value, key: &str) -> Result<&'v str, Failure> {
    value.get(key).and_then(Value::as_str).ok_or_else(|| wanted(key))
}

/// Values that a canary consists of, at most; ours have some fifty.
const NODES: usize = 1024;

/// Holds what a peer has digested here to what a canary is.
///
/// # Errors
///
/// [`Reason::TooLarge`] for more values, or views that show the bytes of their blocks more than a few times.
pub(crate) fn check_size(value: &Value) -> Result<(), Refusal> {
    let too_large = |what: String| Err(Refusal::new(Reason::TooLarge, what));
    let (mut left, mut shown, mut storages) = (vec![value], 0usize, Vec::<&Arc<Storage>>::new());
    let mut nodes = 0;
    while let Some(value) = left.pop() {
        nodes += 1;
        if nodes + left.len() > NODES {
            return too_large(format!("a canary of more than {NODES} values"));
        }
        let mut see = |view: &'_ Tensor| {
            shown = shown.saturating_add(view.byte_count().max(view.layout().span().len()));
        };
        match value {
            Value::Tensor(tensor) => {
                see(tensor);
                storages.push(tensor.storage());
            }
            Value::Array(array) => {
                see(array.cells());
                storages.push(array.cells().storage());
            }
            Value::Pickle(pickle) => {
                for view in std::iter::once(pickle.stream()).chain(pickle.buffers()) {
                    see(view);
                    storages.push(view.storage());
                }
            }
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => left.extend(items),
            Value::Map(map) => {
                left.extend(map.iter().flat_map(|(key, item)| [key, item]));
            }
            // No canary has one.
            Value::Object(_) => return too_large("an object in a canary".into()),
            _ => {}
        }
    }
    let bytes = bytes_of(storages.into_iter());
    if shown > bytes.saturating_mul(DIGESTED).max(limits::INLINE_SUBTREE) {
        return too_large(format!("views of {shown} bytes over {bytes}"));
    }
    Ok(())
}

/// An answer, and the rung that it goes back on.
type Answered = Result<(Value, RungId), Failure>;

impl Core {
    /// The larger of both sides' pages.
    pub(crate) fn page(&self) -> usize {
        let pages = self.facts.iter().filter_map(|facts| facts.get("page")?.parse().ok());
        pages.max().unwrap_or(PAGE).clamp(2048, 256 << 10)
    }

    /// Answers a call that is not a user's.
    pub(crate) fn answer_own(
        self: &Arc<Self>,
        method: &str,
        read: Read,
        deadline: Option<Instant>,
    ) -> Answered {
        match method {
            CANARY => self.answer_canary(read),
            MAKE => self.make(&read.value),
            FINDINGS => {
                self.hear(&read.value)?;
                Ok((Value::Null, RungId::INLINE))
            }
            REPROVE => {
                // Answers to canaries are no place to begin new ones, and one round at a time is enough.
                if !self.proven.load(Ordering::Acquire) || self.proofs.is_busy() {
                    return Err(Failure::new("busy", "something is being proven already"));
                }
                let deadline = deadline.or_else(|| Instant::now().checked_add(self.patience));
                self.reprove_sending(deadline).map_err(|error| {
                    tracing::warn!("not proven anew, as the peer asked: {error}");
                    Failure::new("unproven", "it could not be proven")
                })?;
                Ok((Value::Null, RungId::INLINE))
            }
            other => Err(Failure::unknown_method(other)),
        }
    }

    fn known(&self, name: &str) -> Result<RungId, Failure> {
        let known = self.sessions.proofs().into_iter().map(|report| report.rung);
        let mut known = known.filter(|rung| rung.as_str() == name);
        known.next().ok_or_else(|| Failure::new("unknown-rung", format!("no rung {name:?} here")))
    }

    fn answer_canary(&self, read: Read) -> Answered {
        // Before anything is made of it: a few words can say a lot.
        check_size(&read.value).map_err(|why| heard(&why))?;
        let route = read.route();
        let argument = read.value;
        let device: Device = text(&argument, "d")?.parse()?;
        let rung = self.known(text(&argument, "r")?)?;
        let quiet = argument.get("q").and_then(Value::as_bool).unwrap_or(false);
        let Value::Map(argument) = argument else { return Err(wanted("a map")) };
        let value = argument.into_iter().find(|(key, _)| key.as_str() == Some("v"));
        let (_, value) = value.ok_or_else(|| wanted("v"))?;
        let digest = digest::answer(&value).map_err(|why| heard(&why))?;
        // What has no leg of its own is a part of what stayed in the JSON.
        let leaves = value.as_map().map(Map::iter).into_iter().flatten().map(|(key, _)| {
            let name = key.as_str().unwrap_or_default();
            let leg = route.at(&format!("$.v.{name}"));
            let rode = leg.map_or(RungId::INLINE, |leg| leg.rung.clone());
            Value::list([name, rode.as_str()])
        });
        let mut answer = vec![("d", Value::from(digest.to_string())), ("l", Value::list(leaves))];
        if self.sessions.lacks_a_carrier(&rung) {
            answer.push(("w", Value::from(Reason::NoCarrier.code())));
        } else if !quiet {
            answer.push(("v", value));
        }
        // Of a device that this side does not know, nothing is to be proven.
        if self.sessions.sending(&rung, device).is_some() {
            self.proofs.note_answer(&rung, device);
        }
        Ok((Value::map(answer), rung))
    }

    /// Makes a canary for the peer to forward.
    fn make(&self, argument: &Value) -> Answered {
        let rung = self.known(text(argument, "r")?)?;
        let device: Device = text(argument, "d")?.parse()?;
        let carrier = self.sessions.carrier(&rung).ok_or_else(|| wanted("a carrier"))?;
        // Only where memory of this side's comes from: nothing is set up on a device for a peer's asking.
        let reached =
            |(known, reach): &(Device, Reach)| *known == device && !matches!(reach, Reach::Not(_));
        if !carrier.devices().iter().any(reached) {
            return Err(heard(&Reason::DeviceUnknown.into()));
        }
        let make = |device, len, fill: Fill<'_>| carrier.specimen(device, len, fill);
        let canary = Contents::random()
            .and_then(|mut contents| battery::to_forward(&rung, device, make, &mut contents))
            .map_err(|why| heard(&why))?;
        let answer = [("d", Value::from(canary.digest.to_string())), ("v", canary.value)];
        Ok((Value::map(answer), rung))
    }

    /// Takes in what the peer's canaries showed.
    fn hear(&self, findings: &Value) -> Result<(), Failure> {
        let findings = findings.items().ok_or_else(|| wanted("a list"))?;
        let known = self.sessions.proofs();
        // The peer may see devices that this side does not.
        if findings.len() > NODES {
            return Err(wanted("a finding for each rung and device"));
        }
        for finding in findings {
            let parts: Option<&[Value; 6]> =
                finding.items().and_then(|parts| parts.try_into().ok());
            let parts = parts.ok_or_else(|| wanted("a finding of six parts"))?;
            let [rung, device, sending, why, returning, why_not] = parts;
            let text = |value: &Value| value.as_str().map(str::to_owned);
            let rung = text(rung).and_then(|name| {
                known.iter().map(|known| &known.rung).find(|known| known.as_str() == name)
            });
            let device: Option<Device> = text(device).and_then(|device| device.parse().ok());
            // A rung or a device that this side has not is none of its business.
            let (Some(rung), Some(device)) = (rung, device) else { continue };
            let verdict = |code: &Value, why: &Value| match code {
                Value::Null => Verdict::Verified,
                code if code.as_str() == Some(Reason::Unproven.code()) => Verdict::Unproven,
                code if code.as_str() == Some(Reason::NoCarrier.code()) => {
                    Verdict::NotOffered(Reason::NoCarrier.into())
                }
                code => {
                    let why: String = why.as_str().unwrap_or_default().chars().take(TEXT).collect();
                    Verdict::Demoted(refusal_of(code.as_str().unwrap_or_default(), &why))
                }
            };
            let (mut sending, returning) = (verdict(sending, why), verdict(returning, why_not));
            if sending == Verdict::Verified && !self.proofs.has_answered(rung, device) {
                // Said of a canary that never came here.
                sending = Verdict::Unproven;
            }
            for (verdict, way) in
                [(&sending, "from there to here"), (&returning, "from here to there")]
            {
                if let Verdict::Demoted(why) = verdict {
                    let code = why.reason();
                    tracing::warn!(%rung, %device, %code, "demoted by the peer, {way}: {why}");
                }
            }
            self.sessions.heard(rung, device, sending, returning);
        }
        self.heard.store(true, Ordering::Release);
        Ok(())
    }
}

/// Findings as `$findings` takes them.
pub(crate) fn to_value(findings: &[Finding]) -> Value {
    let row = |finding: &Finding| {
        let parts = |verdict: &Verdict| match verdict {
            Verdict::Demoted(why) | Verdict::NotOffered(why) => {
                (Value::from(why.reason().code()), Value::from(cut(why)))
            }
            Verdict::Verified => (Value::Null, Value::from("")),
            // Nothing was seen of it, which is not to say that it is right.
            _ => (Value::from(Reason::Unproven.code()), Value::from("")),
        };
        let ((sending, why), (returning, why_not)) =
            (parts(&finding.sending), parts(&finding.returning));
        let (rung, device) = (finding.rung.as_str().into(), finding.device.to_string().into());
        Value::List(vec![rung, device, sending, why, returning, why_not])
    };
    Value::list(findings.iter().map(row))
}

fn cut(why: &Refusal) -> String {
    why.for_peer().to_string().chars().take(TEXT).collect()
}

/// What `$canary` answered.
pub(crate) fn read_answer(answer: Value) -> Result<Answer, Failure> {
    let digest = text(&answer, "d")?.parse()?;
    let leaf = |pair: &Value| match pair.items()? {
        [name, rode] => {
            // Only to be compared, so a name that is none is as good as any other that is wrong.
            let rode = rung_of(rode.as_str()?);
            Some((name.as_str()?.to_owned(), rode))
        }
        _ => None,
    };
    let leaves = answer.get("l").and_then(Value::items).ok_or_else(|| wanted("l"))?;
    let leaves = leaves.iter().map(leaf).collect::<Option<_>>().ok_or_else(|| wanted("l"))?;
    let why = answer.get("w").and_then(Value::as_str).and_then(Reason::from_code);
    let value = match answer {
        Value::Map(map) => map.into_iter().find(|(key, _)| key.as_str() == Some("v")),
        _ => None,
    };
    let missing = || Refusal::new(why.unwrap_or(Reason::Corrupt), "the value did not come back");
    let back = value.map(|(_, value)| value).ok_or_else(missing);
    Ok(Answer { digest, leaves, back })
}

fn rung_of(name: &str) -> RungId {
    let none = RungId::new("none");
    rung::Meta::write(&name).and_then(|name| name.read()).unwrap_or(none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rung::DType;

    fn view(count: usize, stride: isize) -> Value {
        let storage = Arc::new(Storage::from_vec(vec![1u8; 4096]));
        Tensor::new(storage, DType::U8, &[count], &[stride], 0).unwrap().into()
    }

    #[test]
    fn canaries_of_any_size_are_not_digested() {
        assert_eq!(check_size(&Value::map([("a", view(4096, 1)), ("b", view(4, 1000))])), Ok(()));
        for large in [
            // One byte, for ever.
            view(1 << 62, 0),
            Value::list((0..100_000).map(Value::from)),
            Value::list([Value::list((0..1500).map(|_| view(0, 1)))]),
        ] {
            assert_eq!(check_size(&large).map_err(|why| why.reason()), Err(Reason::TooLarge));
        }
        let whole = Arc::new(Storage::from_vec(vec![1u8; 1 << 20]));
        let whole = Tensor::contiguous(whole, DType::U8, &[1 << 20]).unwrap();
        assert_eq!(check_size(&Value::list(vec![whole.clone(); 4])), Ok(()));
        assert!(check_size(&Value::list(vec![whole; 5])).is_err());
    }
}
