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
