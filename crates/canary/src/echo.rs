//! What sends canaries, and what is made of the answer.

use std::time::{Duration, Instant};

use rung::{Device, Reason, Refusal, RungId, Value};

use crate::battery::Canary;
use crate::compare::difference;
use crate::digest::Digest;
use crate::verdict::Verdict;

/// Sends a value to the other side by the very path that users' values take, and tells what it made of it.
pub trait Echo {
    /// Why nothing more can be proven: the peer is gone, or time is up. What a rung cannot do is no error but
    /// an answer.
    type Error;

    /// Sends a canary on its rung alone, with no other way tried if that fails; the receiver decodes it and
    /// answers with the digest of what it got ([`answer`](crate::answer)), the leaves as they came, and,
    /// unless it is to be `quiet`, the value itself, on the same rung.
    ///
    /// # Errors
    ///
    /// Where the conversation is over.
    fn echo(&mut self, canary: &Canary, quiet: bool) -> Result<Echoed, Self::Error>;
}

/// What became of a canary.
#[derive(Debug)]
#[non_exhaustive]
pub enum Echoed {
    /// It never got there: this side could not send it, or the other could not take it.
    Declined(Refusal),
    /// It got there, and this is what the receiver says.
    Answered(Answer),
}

/// What the receiver of a canary says.
#[derive(Debug)]
pub struct Answer {
    /// Of what it decoded.
    pub digest: Digest,
    /// The entries of the value as they came: the name, and the rung of each.
    pub leaves: Vec<(String, RungId)>,
    /// The value, or why that could not be taken back, which is a fault of the other direction; with
    /// [`Reason::NoCarrier`], the receiver has nothing to send it back on, and nothing is shown of that.
    pub back: Result<Value, Refusal>,
}

/// What one canary shows, of both directions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The rung.
    pub rung: RungId,
    /// The device.
    pub device: Device,
    /// From here to there: verified or demoted.
    pub sending: Verdict,
    /// From there to here, as far as what came back shows: unproven where nothing did.
    pub returning: Verdict,
    /// There and back, with both digests.
    pub time: Duration,
}

impl Finding {
    /// Of a canary that could not be made.
    #[must_use]
    pub fn declined(rung: RungId, device: Device, refusal: Refusal) -> Self {
        let (sending, returning) = (Verdict::Demoted(refusal), Verdict::Unproven);
        Self { rung, device, sending, returning, time: Duration::ZERO }
    }

    /// This and what another canary of the same rung and device showed.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            sending: self.sending.and(other.sending),
            returning: self.returning.and(other.returning),
            time: self.time + other.time,
            ..self
        }
    }
}

/// Sends a canary and compares all three: the digest and the leaves for the way there, the value for the way back.
///
/// # Errors
///
/// Those of [`Echo::echo`].
pub fn prove<E: Echo>(echo: &mut E, canary: &Canary) -> Result<Finding, E::Error> {
    let started = Instant::now();
    let mut echoed = echo.echo(canary, false)?;
    let lost = |back: &Refusal| back.reason() != Reason::NoCarrier;
    if let Echoed::Answered(Answer { back: Err(refusal), .. }) = &echoed
        && lost(refusal)
    {
        // The way there must not suffer for the way back: once more, without the value.
        let refusal = refusal.clone();
        echoed = match echo.echo(canary, true)? {
            Echoed::Answered(answer) => Echoed::Answered(Answer { back: Err(refusal), ..answer }),
            declined => declined,
        };
    }
    let (sending, returning) = match echoed {
        Echoed::Declined(refusal) => (Verdict::Demoted(refusal), Verdict::Unproven),
        Echoed::Answered(answer) => check(canary, &answer),
    };
    let Canary { rung, device, .. } = canary;
    let (rung, device, time) = (rung.clone(), *device, started.elapsed());
    Ok(Finding { rung, device, sending, returning, time })
}

/// The three comparisons.
fn check(canary: &Canary, answer: &Answer) -> (Verdict, Verdict) {
    let arrived = answer.digest == canary.digest;
    let returned = match &answer.back {
        Ok(value) => difference(&canary.value, value),
        Err(refusal) => Some(refusal.clone()),
    };
    let sending = if !arrived {
        let corrupt = |detail: String| Some(Refusal::new(Reason::Corrupt, detail));
        match &returned {
            None => corrupt("the other side decoded other contents than came back".into()),
            Some(refusal) if answer.back.is_ok() => corrupt(refusal.detail().to_owned()),
            Some(_) => corrupt("the other side decoded other contents".into()),
        }
    } else {
        wrong_rung(canary, &answer.leaves)
    };
    // What came back wrong is the fault of the way back only where it was right over there.
    let returning = match returned {
        Some(refusal) if refusal.reason() == Reason::NoCarrier => Verdict::Unproven,
        returned if arrived => refusal_or_verified(returned),
        _ => Verdict::Unproven,
    };
    (refusal_or_verified(sending), returning)
}

fn refusal_or_verified(refusal: Option<Refusal>) -> Verdict {
    refusal.map_or(Verdict::Verified, Verdict::Demoted)
}

fn wrong_rung(canary: &Canary, leaves: &[(String, RungId)]) -> Option<Refusal> {
    let expected = canary.expected();
    for (path, rung) in &expected {
        let detail = match leaves.iter().find(|(known, _)| known == path) {
            Some((_, came)) if came == rung => continue,
            Some((_, came)) => format!("$.{path} came on {came}"),
            None => format!("$.{path} is not reported"),
        };
        return Some(Refusal::new(Reason::WrongRung, detail));
    }
    (leaves.len() != expected.len()).then(|| {
        let detail = format!("{} leaves were sent and {} reported", expected.len(), leaves.len());
        Refusal::new(Reason::WrongRung, detail)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::battery::{self, Contents};
    use rung::{Fill, Map, Storage, Tensor};
    use std::convert::Infallible;

    /// What the other side gets wrong.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Lie {
        None,
        /// Decodes another byte, and sends that back.
        There,
        /// Decodes another byte, which is undone on the way back.
        ThereAndBack,
        /// Sends another byte back.
        Back,
        /// Loses the value on the way back.
        Lost,
        /// Names another rung.
        Rung,
        /// Forgets a leaf.
        Leaf,
        /// Sends copies back where there was one storage.
        Apart,
        /// Has no value to send back.
        NoValue,
        /// Takes nothing.
        Declined,
    }

    struct Liar(Lie, Vec<bool>);

    fn map(value: &Value) -> Vec<(Value, Value)> {
        value.as_map().into_iter().flat_map(Map::iter).cloned().collect()
    }

    fn changed(value: &Value) -> Value {
        let change = |item: &Value| match item.as_tensor() {
            Some(tensor) if tensor.byte_count() > 1000 => {
                let mut bytes = tensor.to_bytes().unwrap();
                bytes[17] ^= 1;
                Tensor::from_bytes(bytes, tensor.dtype(), tensor.shape()).unwrap().into()
            }
            _ => item.clone(),
        };
        Value::map(map(value).into_iter().map(|(key, item)| (key, change(&item))))
    }

    impl Echo for Liar {
        type Error = Infallible;

        fn echo(&mut self, canary: &Canary, quiet: bool) -> Result<Echoed, Infallible> {
            let Self(lie, asked) = self;
            asked.push(quiet);
            let sent = &canary.value;
            let decoded = match lie {
                Lie::There | Lie::ThereAndBack => changed(sent),
                _ => sent.clone(),
            };
            let back = match lie {
                Lie::There => Ok(decoded.clone()),
                Lie::Back => Ok(changed(sent)),
                Lie::Lost => Err(Refusal::new(Reason::System, "it broke")),
                Lie::Apart => Ok(Value::map(map(sent).into_iter().map(|(key, item)| {
                    let copy = item.as_tensor().map(|tensor| {
                        let bytes = tensor.to_bytes().unwrap();
                        Tensor::from_bytes(bytes, tensor.dtype(), tensor.shape()).unwrap()
                    });
                    (key, copy.map_or(item, Value::from))
                }))),
                Lie::NoValue => Ok(Value::Null),
                Lie::Declined => return Ok(Echoed::Declined(Reason::NoMemory.into())),
                _ => Ok(sent.clone()),
            };
            let mut leaves = canary.expected();
            match lie {
                Lie::Rung => leaves[1].1 = RungId::PICKLE,
                Lie::Leaf => drop(leaves.pop()),
                _ => {}
            }
            let digest = crate::digest::answer(&decoded).unwrap();
            Ok(Echoed::Answered(Answer { digest, leaves, back }))
        }
    }

    fn canary() -> Canary {
        let make = |_, len, fill: Fill<'_>| {
            let mut bytes = vec![0; len];
            fill(&mut bytes);
            Ok(Storage::from_bytes(bytes))
        };
        let mut contents = Contents::random().unwrap();
        let all = battery::of_carrier(&RungId::SHM, Device::Host, 4096, make, &mut contents);
        all.unwrap().swap_remove(0)
    }

    fn reason(verdict: &Verdict) -> Option<Reason> {
        match verdict {
            Verdict::Verified => None,
            Verdict::Demoted(why) => Some(why.reason()),
            Verdict::Unproven => Some(Reason::Unproven),
            Verdict::NotOffered(_) => Some(Reason::NotOffered),
        }
    }

    /// What is compared, and which way is at fault.
    #[test]
    fn each_lie_is_seen_on_its_way() {
        use Reason::{Corrupt, NoMemory, System, Unproven, Unshared, WrongRung};
        let table = [
            (Lie::None, None, None),
            (Lie::There, Some(Corrupt), Some(Unproven)),
            (Lie::ThereAndBack, Some(Corrupt), Some(Unproven)),
            (Lie::Back, None, Some(Corrupt)),
            (Lie::Lost, None, Some(System)),
            (Lie::Rung, Some(WrongRung), None),
            (Lie::Leaf, Some(WrongRung), None),
            (Lie::Apart, None, Some(Unshared)),
            (Lie::NoValue, None, Some(Corrupt)),
            (Lie::Declined, Some(NoMemory), Some(Unproven)),
        ];
        let canary = canary();
        for (lie, sending, returning) in table {
            let mut liar = Liar(lie, Vec::new());
            let finding = prove(&mut liar, &canary).unwrap_or_else(|never| match never {});
            assert_eq!(reason(&finding.sending), sending, "{lie:?}");
            assert_eq!(reason(&finding.returning), returning, "{lie:?}");
            // What was lost on the way back alone is asked for again, quietly.
            let asked: &[bool] = if lie == Lie::Lost { &[false, true] } else { &[false] };
            assert_eq!(liar.1, asked, "{lie:?}");
        }
    }

    #[test]
    fn what_differed_is_told_with_the_first_byte_and_the_size() {
        let canary = canary();
        let finding = prove(&mut Liar(Lie::There, Vec::new()), &canary);
        let finding = finding.unwrap_or_else(|never| match never {});
        let Verdict::Demoted(why) = finding.sending else { panic!() };
        let text = why.to_string();
        assert!(text.contains("$.whole: byte 17 of 2101249 is 0x"), "{text}");
        assert!(text.ends_with("; 1 differ"), "{text}");
    }

    #[test]
    fn findings_of_one_rung_are_one() {
        let of = |sending, returning| Finding {
            rung: RungId::SHM,
            device: Device::Host,
            sending,
            returning,
            time: Duration::from_millis(1),
        };
        let wrong = |reason: Reason| Verdict::Demoted(reason.into());
        let fine = of(Verdict::Verified, Verdict::Verified);
        let both = fine.clone().and(of(wrong(Reason::Corrupt), Verdict::Unproven));
        assert_eq!(both.sending, wrong(Reason::Corrupt));
        assert_eq!(both.returning, Verdict::Verified);
        assert_eq!(both.time, Duration::from_millis(2));
        // The first fault is told, since the second may follow from it.
        let both = both.and(of(wrong(Reason::System), wrong(Reason::System)));
        assert_eq!((both.sending, both.returning), (wrong(Reason::Corrupt), wrong(Reason::System)));
    }
}
