//! Proving: this side's canaries, at connect, before the first leaf on a device, before the first forward from
//! one peer to another, and when somebody asks.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use canary::{Answer, Canary, Contents, Echo, Echoed, Finding, Report, Verdict, battery};
use rung::{Device, Fault, Fill, Reason, Refusal, RungId, Session, Value};

use crate::call::Call;
use crate::channel::{Peer, Reply};
use crate::core::{Core, NotYet};
use crate::error::{CallErrorKind, ConnectError, Ended};
use crate::fail::reached;
use crate::handshake::post_mortem;
use crate::keeper::lock;
use crate::ladder::{MINE, Via, Way};
use crate::own;
use crate::pack::Need;
use crate::route::Require;
use crate::transfer::{Tries, refusal_of};
use crate::wire::Role;

/// What the other side says that is about itself at the moment, and not about the rung: no verdict follows.
const PASSING: &[&str] =
    &["busy", "abandoned", "too-deep", "over-bound", "unproven", "no-handler", "undelivered"];

/// What a side lacks at the moment, whatever the rung.
pub(crate) fn is_passing(why: Reason) -> bool {
    matches!(why, Reason::NoMemory | Reason::NoDescriptors)
}

/// The turn of whoever tells.
const TELLING: Way = (u64::MAX, RungId::INLINE, Device::Host);

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
        let require = &Require::default();
        let call = Call { method, deadline, require, via };
        Peer::of(self).place(&mut Some(argument), call)
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
        let mut argument = vec![
            ("r", Value::from(canary.rung.as_str())),
            ("d", Value::from(canary.device.to_string())),
            ("v", canary.value.clone()),
        ];
        if quiet {
            argument.push(("q", Value::from(true)));
        }
        let via = Via::Canary(&canary.rung);
        let reply = self.core.own_call(own::CANARY, Value::map(argument), via, self.deadline);
        reached("canary-answered");
        // Once all was proven, a lack of memory or descriptors is this moment's, and not the rung's.
        let proven = self.core.proven.load(Ordering::Acquire);
        let declined = |why: Refusal| {
            if proven && is_passing(why.reason()) {
                return Err(CallErrorKind::OverCap(why.to_string()));
            }
            Ok(Echoed::Declined(why))
        };
        // The way back alone failed: asked again, quietly, the peer tells what it got.
        let lost = |refusal: Refusal| {
            if quiet || (proven && is_passing(refusal.reason())) {
                return declined(refusal);
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
                declined(why.map_or(Reason::OtherKind.into(), |(_, refusal)| refusal))
            }
            Err(CallErrorKind::NotAccepted { code, text }) => declined(refusal_of(&code, &text)),
            Err(CallErrorKind::OverCap(text)) => {
                declined(Refusal::new(Reason::NoDescriptors, text))
            }
            Err(CallErrorKind::AnswerNotTaken(fault) | CallErrorKind::Malformed(fault)) => {
                lost(fault.into())
            }
            Err(CallErrorKind::Remote { code, text }) if code == "unsendable" => {
                lost(Refusal::new(Reason::PeerFault, text))
            }
            // It was decoded over there, and cannot be sent back.
            Err(CallErrorKind::Remote { code, text })
                if Reason::from_code(&code).is_some_and(is_passing) =>
            {
                lost(refusal_of(&code, &text))
            }
            Err(CallErrorKind::Remote { code, text }) if !PASSING.contains(&&*code) => {
                declined(refusal_of(&code, &text))
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
        for (rung, device, canaries) in prepared {
            let proven = self.prove((&rung, device), canaries, deadline);
            proven.map_err(|error| self.unproven(error))?;
        }
        self.tell(deadline).map_err(|error| self.unproven(error))?;
        if self.role == Role::Host {
            self.answer_canaries(deadline)?;
        }
        let report = self.report();
        if report.refusal().is_some() {
            return Err(ConnectError::Refused(Box::new(report)));
        }
        if let Some(rung) = self.sessions.unproven_by_the_peer() {
            let detail = format!("it has not proven {rung}");
            let ended = Ended::Broken(Fault::new(Reason::Unproven, detail));
            return Err(ConnectError::Ended(ended, post_mortem(self.process.as_ref())));
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
            let answered = self.answer_canaries(deadline);
            // Without a thread, or where a rung of a user's panicked in it, it is done here.
            let prepared = preparing.ok().and_then(|preparing| preparing.join().ok());
            answered?;
            let mut prepared = prepared.unwrap_or_else(|| self.prepare());
            // What the host wants proven at connect is to be proven both ways.
            let wanted: Vec<Device> = self.proofs.answered().into_iter().map(|way| way.1).collect();
            for (rung, device) in self.sessions.at_connect(&wanted) {
                if !prepared.iter().any(|known| (&known.0, known.1) == (&rung, device)) {
                    let canaries = self.canaries(&rung, device);
                    prepared.push((rung, device, canaries));
                }
            }
            Ok(prepared)
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
    pub(crate) fn answer_canaries(
        self: &Arc<Self>,
        deadline: Option<Instant>,
    ) -> Result<(), ConnectError> {
        let heard = || self.heard.load(Ordering::Acquire);
        self.serve_until(deadline, heard).map_err(|not_yet| match not_yet {
            NotYet::Deadline => ConnectError::Deadline(self.patience),
            NotYet::Ended(ended) => ConnectError::Ended(ended, post_mortem(self.process.as_ref())),
        })
    }

    /// Tells the peer what canaries showed that it has not been told; what it does not hear is told again. One
    /// thread at a time, so that nothing old is told after what is new.
    fn tell(self: &Arc<Self>, deadline: Option<Instant>) -> Result<(), CallErrorKind> {
        let _turn = self.proofs.turn(&TELLING, deadline).ok_or(CallErrorKind::Deadline)?;
        let findings = self.proofs.take_untold();
        if findings.is_empty() && self.proven.load(Ordering::Acquire) {
            return Ok(());
        }
        let via = Via::Canary(&RungId::INLINE);
        let told = self.own_call(own::FINDINGS, own::to_value(&findings), via, deadline);
        if told.is_err() {
            self.proofs.put_back(findings);
        }
        told.map(drop)
    }

    /// Before a user's value goes out: the peer may otherwise go on sending on what was found wrong here.
    pub(crate) fn tell_what_is_untold(
        self: &Arc<Self>,
        deadline: Option<Instant>,
    ) -> Result<(), Ended> {
        if !self.proofs.has_untold.load(Ordering::Acquire) || self.proofs.is_busy() {
            return Ok(());
        }
        match self.tell(self.patient(deadline)) {
            Err(CallErrorKind::Gone(ended, _)) => Err(ended),
            _ => Ok(()),
        }
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
    ) -> Result<(), CallErrorKind> {
        let demotions = self.sessions.sending(rung, device).map_or(0, |(_, demotions)| demotions);
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
            Err(refusal) if is_passing(refusal.reason()) && self.proven.load(Ordering::Acquire) => {
                return Err(CallErrorKind::OverCap(refusal.to_string()));
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
        let wrong = finding.sending.is_demoted() || finding.returning.is_demoted();
        self.proofs.keep_untold(self.sessions.found(finding, demotions));
        if wrong && *rung == RungId::INLINE && self.proven.load(Ordering::Acquire) {
            // There is nothing below it, and no value goes without it: the peer is refused after all.
            let ended = Ended::Broken(Fault::new(Reason::Corrupt, "its plain values are wrong"));
            self.break_off(ended.clone());
            return Err(CallErrorKind::Gone(ended, None));
        }
        Ok(())
    }

    fn canaries(&self, rung: &RungId, device: Device) -> Result<Vec<Canary>, Refusal> {
        let mut contents = Contents::random()?;
        match self.sessions.session(rung) {
            Some(Session::Carrier(carrier)) => {
                let make = |device, len, fill: Fill<'_>| carrier.specimen(device, len, fill);
                battery::of_carrier(rung, device, self.page(), make, &mut contents)
            }
            Some(Session::Form(form)) => battery::of_form(rung, &**form, &mut contents),
            None => Err(Reason::UnknownRung.into()),
        }
    }

    /// Proves what a value needs before it can be sent. A verdict comes of it; or, where there was no time or
    /// the other side had none, the way is avoided for this message, and nothing is known.
    ///
    /// # Errors
    ///
    /// How the channel ended.
    pub(crate) fn prove_first(
        self: &Arc<Self>,
        need: Need,
        tries: &mut Tries,
        deadline: Option<Instant>,
    ) -> Result<(), Ended> {
        let Need { way, lender } = need;
        // Half of the time that the caller has, so that what rides lower for it still gets there.
        let now = Instant::now();
        let half = deadline.map(|deadline| now + deadline.saturating_duration_since(now) / 2);
        let until = self.patient(half);
        let proven = match &lender {
            None => self.prove_now(&way, until),
            Some(lender) => self.prove_forward(&way, lender, until),
        };
        let why = match proven {
            Ok(()) => return Ok(()),
            Err(NotProven::Error(CallErrorKind::Gone(ended, _))) => return Err(ended),
            // The peer had all the time there is: not to be waited for again.
            Err(NotProven::Error(CallErrorKind::Deadline)) if until != half => {
                self.give_up_on(way, lender, Reason::NoAnswer.into());
                return Ok(());
            }
            Err(NotProven::Error(error)) => Refusal::new(Reason::Unproven, error.to_string()),
            Err(NotProven::NotNow(why)) => why,
        };
        let (_, rung, device) = &way;
        tracing::warn!(%rung, %device, "not proven, and not used for this value: {why}");
        tries.avoid.push((way, why));
        Ok(())
    }

    fn give_up_on(&self, way: Way, lender: Option<Weak<Self>>, why: Refusal) {
        let (_, rung, device) = &way;
        tracing::warn!(%rung, %device, code = %why.reason(), "demoted, from here to there: {why}");
        match lender {
            None => {
                let demotions = self.sessions.sending(rung, *device).map_or(0, |known| known.1);
                let finding = Finding::declined(rung.clone(), *device, why);
                self.proofs.keep_untold(self.sessions.found(finding, demotions));
            }
            Some(lender) => self.sessions.forwarded(way, Verdict::Demoted(why), lender),
        }
    }

    /// A rung on a device, unless another thread has proven it meanwhile.
    fn prove_now(self: &Arc<Self>, way: &Way, deadline: Option<Instant>) -> Result<(), NotProven> {
        let (_, rung, device) = way;
        let _turn = self.proofs.turn(way, deadline).ok_or(CallErrorKind::Deadline)?;
        if self.sessions.sending(rung, *device).is_none_or(|(known, _)| known != Verdict::Unproven)
        {
            return Ok(());
        }
        let canaries = self.canaries(rung, *device);
        self.prove((rung, *device), canaries, deadline)?;
        // What is not told now is told with the next call.
        match self.tell(deadline) {
            Err(gone @ CallErrorKind::Gone(..)) => Err(gone.into()),
            _ => Ok(()),
        }
    }

    /// The lender makes a canary, this peer says what it got, and both are compared here.
    fn prove_forward(
        self: &Arc<Self>,
        way: &Way,
        lender: &Weak<Self>,
        deadline: Option<Instant>,
    ) -> Result<(), NotProven> {
        let (_, rung, device) = way;
        let _turn = self.proofs.turn(way, deadline).ok_or(CallErrorKind::Deadline)?;
        if self.sessions.forward(way).is_some() {
            return Ok(());
        }
        let verdict = match self.forward_canary(way, lender, deadline)? {
            None => Verdict::Verified,
            Some(why) => {
                let code = why.reason();
                tracing::warn!(%rung, %device, %code, "what another peer lent cannot go on: {why}");
                Verdict::Demoted(why)
            }
        };
        self.sessions.forwarded(way.clone(), verdict, Weak::clone(lender));
        Ok(())
    }

    /// Why what the lender lent cannot go on to this peer, if it cannot.
    fn forward_canary(
        self: &Arc<Self>,
        (_, rung, device): &Way,
        lender: &Weak<Self>,
        deadline: Option<Instant>,
    ) -> Result<Option<Refusal>, NotProven> {
        let refused = |reason: Reason, text: &str| Ok(Some(Refusal::new(reason, text)));
        // Nobody can ever say now: nothing is known, and nothing needs to be kept of it.
        let gone = || NotProven::NotNow(Refusal::new(Reason::Unproven, "its lender is gone"));
        let lender = lender.upgrade().ok_or_else(gone)?;
        let argument = [("r", Value::from(rung.as_str())), ("d", Value::from(device.to_string()))];
        let via = Via::Canary(rung);
        let made = match lender.own_call(own::MAKE, Value::map(argument), via, deadline) {
            Ok(made) => made.into_value(),
            // The lender's end is no end of this channel, and its trouble none of this peer's.
            Err(CallErrorKind::Gone(..)) => return Err(gone()),
            Err(CallErrorKind::Remote { code, .. })
                if PASSING.contains(&&*code)
                    || Reason::from_code(&code).is_some_and(is_passing) =>
            {
                let why = Refusal::new(Reason::Unproven, "its lender is busy");
                return Err(NotProven::NotNow(why));
            }
            Err(error @ (CallErrorKind::Deadline | CallErrorKind::OverBound(_))) => {
                return Err(error.into());
            }
            // What one peer says is not for another.
            Err(error) => {
                tracing::warn!(%rung, %device, "no canary to forward: {error}");
                return refused(Reason::Unproven, "its lender made none");
            }
        };
        let digest = made.get("d").and_then(Value::as_str).and_then(|text| text.parse().ok());
        let value = made.get("v").cloned().unwrap_or(Value::Null);
        let Some(digest) = digest else {
            return refused(Reason::Unproven, "its lender says no digest");
        };
        if let Err(why) = own::check_size(&value) {
            return Ok(Some(why));
        }
        let canary = Canary { rung: rung.clone(), device: *device, value, digest };
        let mut echo = Calls { core: self, deadline };
        match echo.echo(&canary, true)? {
            Echoed::Declined(refusal) => Ok(Some(refusal)),
            Echoed::Answered(answer) if answer.digest == canary.digest => Ok(None),
            Echoed::Answered(_) => {
                refused(Reason::Corrupt, "it decoded other contents than its lender made")
            }
            _ => refused(Reason::PeerFault, ""),
        }
    }

    /// Proves anew, in the direction of sending, all that was proven or found wrong; and tells.
    pub(crate) fn reprove_sending(
        self: &Arc<Self>,
        deadline: Option<Instant>,
    ) -> Result<(), CallErrorKind> {
        self.sessions.forget_forwards();
        for (rung, device) in self.sessions.to_reprove() {
            let way = (MINE, rung.clone(), device);
            let _turn = self.proofs.turn(&way, deadline).ok_or(CallErrorKind::Deadline)?;
            let canaries = self.canaries(&rung, device);
            self.prove((&rung, device), canaries, deadline)?;
        }
        self.tell(deadline)
    }

    /// The same in both directions.
    pub(crate) fn reprove(self: &Arc<Self>) -> Result<Report, CallErrorKind> {
        let deadline = self.patient(None);
        self.reprove_sending(deadline)?;
        self.own_call(own::REPROVE, Value::Null, Via::Canary(&RungId::INLINE), deadline)?;
        Ok(self.report())
    }
}

/// Why there is no verdict.
enum NotProven {
    Error(CallErrorKind),
    /// Not now, and perhaps never.
    NotNow(Refusal),
}

impl From<CallErrorKind> for NotProven {
    fn from(error: CallErrorKind) -> Self {
        Self::Error(error)
    }
}

/// What is being proven on a channel, and what of it the peer has not been told.
#[derive(Debug, Default)]
pub(crate) struct Proofs {
    /// One proof of a way at a time: a second one's verdict would come after what the first one's caused.
    now: Mutex<HashSet<Way>>,
    done: Condvar,
    untold: Mutex<Vec<Finding>>,
    has_untold: AtomicBool,
    /// On what the peer's canaries were answered.
    answered: Mutex<HashSet<(RungId, Device)>>,
}

/// This thread's turn to prove a way.
struct Turn<'a>(&'a Proofs, Way);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.now).remove(&self.1);
        self.0.done.notify_all();
    }
}

impl Proofs {
    /// Waits for a turn; none where the deadline passes first.
    fn turn(&self, way: &Way, deadline: Option<Instant>) -> Option<Turn<'_>> {
        let mut now = lock(&self.now);
        while now.contains(way) {
            now = match deadline {
                None => self.done.wait(now).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now())?;
                    let waited = self.done.wait_timeout(now, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        now.insert(way.clone());
        Some(Turn(self, way.clone()))
    }

    /// Whether anything is being proven.
    pub(crate) fn is_busy(&self) -> bool {
        !lock(&self.now).is_empty()
    }

    /// A canary of the peer's was answered.
    pub(crate) fn note_answer(&self, rung: &RungId, device: Device) {
        lock(&self.answered).insert((rung.clone(), device));
    }

    /// Whether one was.
    pub(crate) fn has_answered(&self, rung: &RungId, device: Device) -> bool {
        lock(&self.answered).contains(&(rung.clone(), device))
    }

    /// The devices and rungs of them.
    fn answered(&self) -> Vec<(RungId, Device)> {
        lock(&self.answered).iter().cloned().collect()
    }

    /// To be told: the last word on a rung and device, but that the way back was wrong stays said until it is
    /// told, where the last canary saw nothing of it.
    fn keep_untold(&self, mut finding: Finding) {
        let mut untold = lock(&self.untold);
        let is_same =
            |known: &Finding| (&known.rung, known.device) == (&finding.rung, finding.device);
        if let Some(at) = untold.iter().position(is_same) {
            let before = untold.remove(at);
            if finding.returning == Verdict::Unproven {
                finding.returning = before.returning;
            }
        }
        untold.push(finding);
        self.has_untold.store(true, Ordering::Release);
    }

    /// They were not heard, and are older than what was found meanwhile.
    fn put_back(&self, findings: Vec<Finding>) {
        let newer = std::mem::take(&mut *lock(&self.untold));
        findings.into_iter().chain(newer).for_each(|finding| self.keep_untold(finding));
    }

    fn take_untold(&self) -> Vec<Finding> {
        let mut untold = lock(&self.untold);
        self.has_untold.store(false, Ordering::Release);
        std::mem::take(&mut *untold)
    }
}
