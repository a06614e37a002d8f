//! Proving: this side's canaries, at connect, before the first leaf on a device, before the first forward from
//! one peer to another, and when somebody asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use canary::{Answer, Canary, Contents, Echo, Echoed, Finding, Report, Verdict, battery};
use rung::{Device, Fault, Reason, Refusal, RungId, Session, Value};

use crate::call::Call;
use crate::channel::{Peer, Reply};
use crate::core::{Core, NotYet};
use crate::error::{CallErrorKind, ConnectError, Ended};
use crate::fail::reached;
use crate::handshake::post_mortem;
use crate::ladder::{Via, Way};
use crate::own;
use crate::pack::Need;
use crate::route::Require;
use crate::transfer::refusal_of;
use crate::wire::Role;

/// What proves a rung on a device, or why nothing can.
type Prepared = (RungId, Device, Result<Vec<Canary>, Refusal>);

/// Canaries by way of a channel's own calls.
struct Calls<'a> {
    core: &'a Arc<Core>,
    deadline: Option<Instant>,
}

impl Core {
    /// One of the channel's own calls.
    fn own_call(
        self: &Arc<Self>,
        method: &str,
        argument: Value,
        via: Via<'_>,
        deadline: Option<Instant>,
    ) -> Result<Reply, CallErrorKind> {
        let nested = self.current_root();
        let id = self.router().begin(self.role, nested, true);
        let require = &Require::default();
        let call = Call { method, deadline, require, via };
        let outcome = Peer::of(self).exchange(id, nested, &mut Some(argument), call);
        if matches!(outcome, Err(CallErrorKind::Deadline)) {
            self.give_up();
        }
        self.finish(id);
        outcome
    }

    /// As long as proving may take, and no longer than the caller has time.
    fn patient(&self, deadline: Option<Instant>) -> Option<Instant> {
        let patience = Instant::now().checked_add(self.patience);
        deadline.into_iter().chain(patience).min()
    }
}

impl Echo for Calls<'_> {
    type Error = CallErrorKind;

    fn echo(&mut self, canary: &Canary, quiet: bool) -> Result<Echoed, CallErrorKind> {
        let mut argument =
            vec![("r", Value::from(canary.rung.as_str())), ("v", canary.value.clone())];
        if quiet {
            argument.push(("q", Value::from(true)));
        }
        let via = Via::Canary(&canary.rung);
        let reply = self.core.own_call(own::CANARY, Value::map(argument), via, self.deadline);
        reached("canary-answered");
        let refused =
            |reason: Reason, text: String| Ok(Echoed::Declined(Refusal::new(reason, text)));
        // The way back alone failed: asked again, quietly, the peer tells what it got.
        let lost = |refusal: Refusal| {
            if quiet {
                return Ok(Echoed::Declined(refusal));
            }
            let digest = canary::digest::of_bytes(&[]);
            Ok(Echoed::Answered(Answer { digest, leaves: Vec::new(), back: Err(refusal) }))
        };
        match reply {
            Ok(reply) => {
                let read = own::read_answer(reply.into_value()).map_err(|failure| {
                    let fault = Fault::new(Reason::BadMetadata, failure.text);
                    CallErrorKind::Malformed(fault)
                })?;
                Ok(Echoed::Answered(read))
            }
            Err(CallErrorKind::Unsendable(unsendable)) => {
                // The rung's own answer, or that of what was to carry it.
                let mut refusals = unsendable.refusals;
                let own = refusals.iter().position(|(rung, _)| *rung == canary.rung);
                if own.is_none() && self.core.sessions.lacks_a_carrier(&canary.rung) {
                    return Ok(Echoed::Declined(Reason::NoCarrier.into()));
                }
                let at = own.unwrap_or(refusals.len().saturating_sub(1));
                let why = refusals.drain(..).nth(at);
                let why = why.map_or(Reason::OtherKind.into(), |(_, refusal)| refusal);
                Ok(Echoed::Declined(why))
            }
            Err(CallErrorKind::NotAccepted { code, text }) => {
                Ok(Echoed::Declined(refusal_of(&code, &text)))
            }
            Err(CallErrorKind::OverCap(text) | CallErrorKind::OverBound(text)) => {
                refused(Reason::NoDescriptors, text)
            }
            Err(CallErrorKind::AnswerNotTaken(fault) | CallErrorKind::Malformed(fault)) => {
                lost(fault.into())
            }
            Err(CallErrorKind::Remote { code, text }) if code == "unsendable" => {
                lost(Refusal::new(Reason::PeerFault, text))
            }
            Err(CallErrorKind::Remote { code, text }) => {
                Ok(Echoed::Declined(refusal_of(&code, &text)))
            }
            Err(other) => Err(other),
        }
    }
}

/// The connection of a pair of processes.
impl Core {
    /// Proves both directions, one after the other: first the host's way there, then the worker's.
    pub(crate) fn rehearse(
        self: &Arc<Self>,
        deadline: Option<Instant>,
    ) -> Result<(), ConnectError> {
        let prepared = match self.role {
            Role::Host => self.prepare(),
            Role::Worker => self.prepare_and_answer(deadline)?,
        };
        let mut findings = Vec::new();
        for (rung, device, canaries) in prepared {
            let finding = self.prove((&rung, device), canaries, deadline);
            findings.push(finding.map_err(|error| self.unproven(error))?);
        }
        self.tell(&findings, deadline).map_err(|error| self.unproven(error))?;
        if self.role == Role::Host {
            self.answer_canaries(deadline)?;
        }
        if let Some(rung) = self.sessions.unproven_by_the_peer() {
            let detail = format!("it has not proven {rung}");
            let ended = Ended::Broken(Fault::new(Reason::Unproven, detail));
            return Err(ConnectError::Ended(ended, post_mortem(self.process.as_ref())));
        }
        let report = self.report();
        if report.refusal().is_some() {
            return Err(ConnectError::Refused(Box::new(report)));
        }
        self.proven.store(true, Ordering::Release);
        reached("proven");
        Ok(())
    }

    /// This side's canaries.
    fn prepare(&self) -> Vec<Prepared> {
        let at_connect = self.sessions.at_connect(&self.named).into_iter();
        let canaries = |(rung, device)| {
            let canaries = self.canaries(&rung, device);
            (rung, device, canaries)
        };
        at_connect.map(canaries).collect()
    }

    /// The worker's, while it answers the host's: most of their time is the memory's.
    fn prepare_and_answer(
        self: &Arc<Self>,
        deadline: Option<Instant>,
    ) -> Result<Vec<Prepared>, ConnectError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("ladder-canaries".into());
            let preparing = thread.spawn_scoped(scope, || self.prepare());
            self.answer_canaries(deadline)?;
            // Without a thread, or where a rung of a user's panicked in it, it is done here.
            let prepared = preparing.ok().and_then(|preparing| preparing.join().ok());
            Ok(prepared.unwrap_or_else(|| self.prepare()))
        })
    }

    fn unproven(&self, error: CallErrorKind) -> ConnectError {
        match error {
            CallErrorKind::Deadline => ConnectError::Deadline(self.patience),
            CallErrorKind::Gone(ended, exit) => ConnectError::Ended(ended, exit),
            other => {
                let fault = Fault::new(Reason::Unproven, other.to_string());
                ConnectError::Ended(Ended::Broken(fault), post_mortem(self.process.as_ref()))
            }
        }
    }

    /// Answers the peer's canaries until it has told what they showed.
    fn answer_canaries(self: &Arc<Self>, deadline: Option<Instant>) -> Result<(), ConnectError> {
        let heard = || self.heard.load(Ordering::Acquire);
        self.serve_until(deadline, heard).map_err(|not_yet| match not_yet {
            NotYet::Deadline => ConnectError::Deadline(self.patience),
            NotYet::Ended(ended) => ConnectError::Ended(ended, post_mortem(self.process.as_ref())),
        })
    }

    /// Tells the peer what canaries showed.
    fn tell(
        self: &Arc<Self>,
        findings: &[Finding],
        deadline: Option<Instant>,
    ) -> Result<(), CallErrorKind> {
        let findings = own::to_value(findings);
        self.own_call(own::FINDINGS, findings, Via::Canary(&RungId::INLINE), deadline).map(drop)
    }

    /// What is known of this pair.
    pub(crate) fn report(&self) -> Report {
        let [mine, theirs] = self.facts.clone();
        Report::new(mine, theirs, self.sessions.proofs())
    }
}

/// One rung after the other.
impl Core {
    /// Proves a rung on a device, in the direction of sending, and keeps the verdict.
    fn prove(
        self: &Arc<Self>,
        (rung, device): (&RungId, Device),
        canaries: Result<Vec<Canary>, Refusal>,
        deadline: Option<Instant>,
    ) -> Result<Finding, CallErrorKind> {
        let mut echo = Calls { core: self, deadline };
        let mut all = match canaries {
            Ok(canaries) => {
                let mut all: Option<Finding> = None;
                for canary in canaries {
                    let finding = canary::prove(&mut echo, &canary)?;
                    let wrong = finding.sending.is_demoted() || finding.returning.is_demoted();
                    all = Some(match all {
                        Some(before) => before.and(finding),
                        None => finding,
                    });
                    if wrong {
                        break;
                    }
                }
                all
            }
            Err(refusal) => Some(Finding::declined(rung.clone(), device, refusal)),
        };
        let nothing = || Finding::declined(rung.clone(), device, Reason::Empty.into());
        let mut finding = all.take().unwrap_or_else(nothing);
        if let Verdict::Demoted(why) = &finding.sending
            && why.reason() == Reason::NoCarrier
        {
            // It follows from what was found of the carriers, and is no fault of its own.
            finding.sending = Verdict::NotOffered(why.clone());
        }
        for (verdict, way) in
            [(&finding.sending, "from here to there"), (&finding.returning, "from there to here")]
        {
            if let Verdict::Demoted(why) = verdict {
                tracing::warn!(%rung, %device, code = %why.reason(), "demoted, {way}: {why}");
            }
        }
        self.sessions.found(&finding);
        Ok(finding)
    }

    fn canaries(&self, rung: &RungId, device: Device) -> Result<Vec<Canary>, Refusal> {
        let mut contents = Contents::random()?;
        match self.sessions.session(rung) {
            Some(Session::Carrier(carrier)) => {
                let make =
                    |device, len, fill: battery::Fill<'_>| carrier.specimen(device, len, fill);
                battery::of_carrier(rung, device, self.page(), make, &mut contents)
            }
            Some(Session::Form(form)) => battery::of_form(rung, &**form, &mut contents),
            None => Err(Reason::UnknownRung.into()),
        }
    }

    /// Proves what a value needs before it can be sent. What comes of it is a verdict; an error is about the
    /// channel or the time.
    pub(crate) fn prove_first(
        self: &Arc<Self>,
        need: Need,
        deadline: Option<Instant>,
    ) -> Result<(), CallErrorKind> {
        let deadline = self.patient(deadline);
        match need {
            Need::Rung(rung, device) => {
                let canaries = self.canaries(&rung, device);
                let finding = self.prove((&rung, device), canaries, deadline)?;
                self.tell(&[finding], deadline)
            }
            Need::Forward(way, lender) => {
                let verdict = match self.prove_forward(&way, lender.upgrade(), deadline) {
                    Ok(()) => Verdict::Verified,
                    Err(NotForwarded::Refused(refusal)) => {
                        let (_, rung, device) = &way;
                        let code = refusal.reason();
                        tracing::warn!(%rung, %device, %code, "what another peer lent cannot go on: {refusal}");
                        Verdict::Demoted(refusal)
                    }
                    Err(NotForwarded::Error(error)) => return Err(error),
                };
                self.sessions.forwarded(way, verdict);
                Ok(())
            }
        }
    }

    /// The lender makes a canary, this peer says what it got, and both are compared here.
    fn prove_forward(
        self: &Arc<Self>,
        (_, rung, device): &Way,
        lender: Option<Arc<Self>>,
        deadline: Option<Instant>,
    ) -> Result<(), NotForwarded> {
        let refused =
            |reason: Reason, text: &str| NotForwarded::Refused(Refusal::new(reason, text));
        let lender = lender.ok_or_else(|| refused(Reason::Unproven, "its lender is gone"))?;
        let argument = [("r", Value::from(rung.as_str())), ("d", Value::from(device.to_string()))];
        let made = lender
            .own_call(own::MAKE, Value::map(argument), Via::Canary(rung), deadline)
            // Whatever is wrong with the lender is not this peer's fault, and no reason to fail its call.
            .map_err(|error| refused(Reason::Unproven, &format!("its lender: {error}")))?;
        let made = made.into_value();
        let digest = made.get("d").and_then(Value::as_str).and_then(|text| text.parse().ok());
        let digest =
            digest.ok_or_else(|| refused(Reason::Unproven, "its lender says no digest"))?;
        let value = made.get("v").cloned().unwrap_or(Value::Null);
        let canary = Canary { rung: rung.clone(), device: *device, value, digest };
        let echoed = Calls { core: self, deadline }.echo(&canary, true);
        match echoed.map_err(NotForwarded::Error)? {
            Echoed::Declined(refusal) => Err(NotForwarded::Refused(refusal)),
            Echoed::Answered(answer) if answer.digest == canary.digest => Ok(()),
            Echoed::Answered(_) => {
                Err(refused(Reason::Corrupt, "it decoded other contents than its lender made"))
            }
            _ => Err(refused(Reason::PeerFault, "")),
        }
    }

    /// Proves anew, in the direction of sending, all that was proven or found wrong; and tells.
    pub(crate) fn reprove_sending(
        self: &Arc<Self>,
        deadline: Option<Instant>,
    ) -> Result<(), CallErrorKind> {
        self.sessions.forget_forwards();
        let mut findings = Vec::new();
        for (rung, device) in self.sessions.to_reprove() {
            let canaries = self.canaries(&rung, device);
            findings.push(self.prove((&rung, device), canaries, deadline)?);
        }
        self.tell(&findings, deadline)
    }

    /// The same in both directions.
    pub(crate) fn reprove(self: &Arc<Self>) -> Result<Report, CallErrorKind> {
        let deadline = self.patient(None);
        self.reprove_sending(deadline)?;
        self.own_call(own::REPROVE, Value::Null, Via::Canary(&RungId::INLINE), deadline)?;
        Ok(self.report())
    }
}

enum NotForwarded {
    /// It cannot go on as it is.
    Refused(Refusal),
    /// The channel is at its end, or time is up.
    Error(CallErrorKind),
}
