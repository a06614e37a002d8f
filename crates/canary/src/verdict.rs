//! What follows from what was found.

use std::time::Duration;

use rung::{Device, Reason, Refusal, RungId};

use crate::facts::{Difference, Facts};

/// What is known of a rung, in one direction and on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// Real bytes crossed, and were right.
    Verified,
    /// It is not used, and this is why.
    Demoted(Refusal),
    /// This pair does not have it, and this is why.
    NotOffered(Refusal),
    /// Nothing crossed yet: it is proven before the first leaf.
    Unproven,
}

impl Verdict {
    /// Why the rung is not used, if it is not.
    ///
    /// # Errors
    ///
    /// The refusal that a leaf gets.
    pub fn usable(&self) -> Result<(), Refusal> {
        match self {
            Self::Verified => Ok(()),
            Self::Unproven => Err(Reason::Unproven.into()),
            Self::NotOffered(refusal) => Err(refusal.clone()),
            Self::Demoted(refusal) => {
                Err(Refusal::new(Reason::Demoted, format!("{}: {refusal}", refusal.reason())))
            }
        }
    }

    /// Whether something was found to be wrong.
    #[must_use]
    pub fn is_demoted(&self) -> bool {
        matches!(self, Self::Demoted(_))
    }

    /// This and what another canary showed: what was once found wrong is wrong.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let weight = |verdict: &Self| match verdict {
            Self::Unproven => 0,
            Self::Verified => 1,
            Self::NotOffered(_) => 2,
            Self::Demoted(_) => 3,
        };
        // The first of two demotions tells more: the second may follow from it.
        if weight(&other) > weight(&self) { other } else { self }
    }
}

/// What is known of a rung on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// The device.
    pub device: Device,
    /// From here to there.
    pub sending: Verdict,
    /// From there to here.
    pub receiving: Verdict,
    /// How long this side's canaries took, there and back, with all digests; zero before any flew.
    pub time: Duration,
}

impl Proof {
    /// With nothing known yet.
    #[must_use]
    pub fn unproven(device: Device) -> Self {
        let (sending, receiving) = (Verdict::Unproven, Verdict::Unproven);
        Self { device, sending, receiving, time: Duration::ZERO }
    }

    /// With the same verdict for both directions.
    #[must_use]
    pub fn of(device: Device, verdict: Verdict) -> Self {
        Self { device, sending: verdict.clone(), receiving: verdict, time: Duration::ZERO }
    }
}

/// What is known of a rung.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RungReport {
    /// The rung.
    pub rung: RungId,
    /// On each device that it has to do with; the host alone for a rung that was not opened.
    pub proofs: Vec<Proof>,
}

impl RungReport {
    /// From what is known.
    #[must_use]
    pub fn new(rung: RungId, proofs: Vec<Proof>) -> Self {
        Self { rung, proofs }
    }
}

/// What is known of a pair of processes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// What this process says of itself.
    pub mine: Facts,
    /// What the peer says of itself.
    pub theirs: Facts,
    /// Every rung, from the highest.
    pub rungs: Vec<RungReport>,
}

impl Report {
    /// From what is known.
    #[must_use]
    pub fn new(mine: Facts, theirs: Facts, rungs: Vec<RungReport>) -> Self {
        Self { mine, theirs, rungs }
    }

    /// Where the two processes differ. That demotes nothing: what works in spite of it is proven.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        self.mine.differences(&self.theirs)
    }

    /// A rung.
    #[must_use]
    pub fn rung(&self, rung: &RungId) -> Option<&RungReport> {
        self.rungs.iter().find(|each| each.rung == *rung)
    }

    /// Everything that was found wrong: the rung, the device, whether it is on the way there, and what.
    pub fn demoted(&self) -> impl Iterator<Item = (&RungId, Device, bool, &Refusal)> {
        self.rungs.iter().flat_map(|RungReport { rung, proofs }| {
            proofs.iter().flat_map(move |proof| {
                [(true, &proof.sending), (false, &proof.receiving)].into_iter().filter_map(
                    move |(sending, verdict)| match verdict {
                        Verdict::Demoted(refusal) => Some((rung, proof.device, sending, refusal)),
                        _ => None,
                    },
                )
            })
        })
    }

    /// Why the worker is refused, if it is: a rung of host memory, or one that writes plain values, that gets
    /// contents wrong leaves nothing to fall back to. A device that fails is demoted, and work goes on.
    #[must_use]
    pub fn refusal(&self) -> Option<(&RungId, bool, &Refusal)> {
        let mut host = self.demoted().filter(|(_, device, ..)| device.is_host());
        host.next().map(|(rung, _, sending, refusal)| (rung, sending, refusal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(proofs: Vec<(RungId, Device, Verdict, Verdict)>) -> Report {
        let rung = |(rung, device, sending, receiving)| {
            let proof = Proof { sending, receiving, ..Proof::unproven(device) };
            RungReport::new(rung, vec![proof])
        };
        let rungs = proofs.into_iter().map(rung).collect();
        Report::new(Facts::default(), Facts::default(), rungs)
    }

    fn wrong() -> Verdict {
        Verdict::Demoted(Refusal::new(Reason::Corrupt, "$.a: byte 1"))
    }

    #[test]
    fn host_memory_and_plain_values_refuse_and_devices_do_not() {
        let (host, device) = (Device::Host, Device::Cuda([1; 16]));
        let near = RungId::new("near");
        let fine = Verdict::Verified;
        assert!(report(vec![(near.clone(), device, wrong(), wrong())]).refusal().is_none());
        for rung in [RungId::SHM, RungId::NUMPY, RungId::PICKLE, RungId::INLINE] {
            for (sending, receiving) in [(wrong(), fine.clone()), (fine.clone(), wrong())] {
                let there = sending.is_demoted();
                let report = report(vec![
                    (near.clone(), device, wrong(), fine.clone()),
                    (rung.clone(), host, sending, receiving),
                ]);
                assert_eq!(report.demoted().count(), 2);
                let (refused, sending, why) = report.refusal().unwrap();
                assert_eq!((refused, sending, why.reason()), (&rung, there, Reason::Corrupt));
            }
        }
        let lacking = Verdict::NotOffered(Reason::Platform.into());
        assert!(report(vec![(RungId::SHM, host, lacking.clone(), lacking)]).refusal().is_none());
    }

    #[test]
    fn a_leaf_hears_why_a_rung_is_not_used() {
        assert_eq!(Verdict::Verified.usable(), Ok(()));
        assert_eq!(Verdict::Unproven.usable().unwrap_err().reason(), Reason::Unproven);
        let why = wrong().usable().unwrap_err();
        assert_eq!(why.reason(), Reason::Demoted);
        assert_eq!(why.detail(), "corrupt: other contents came than were sent: $.a: byte 1");
        let why = Verdict::NotOffered(Reason::Platform.into()).usable().unwrap_err();
        assert_eq!(why.reason(), Reason::Platform);
    }
}
