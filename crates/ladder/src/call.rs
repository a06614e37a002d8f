//! The caller's side of a call.

use std::time::Instant;

use rung::{Fault, Refusal, Value};

use crate::channel::{Peer, Reply};
use crate::core::{Event, NotKept, NotSent, NotYet, Work};
use crate::error::{CallErrorKind, Ended};
use crate::fail::reached_of;
use crate::handshake::post_mortem;
use crate::ladder::Via;
use crate::pack::{Names, Packing, undo};
use crate::route::{Require, Route};
use crate::transfer::{ATTEMPTS, NotReady, TakeError, Tries};
use crate::wire::{Message, Of, Root};

/// A call, but for its value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) method: &'a str,
    pub(crate) deadline: Option<Instant>,
    pub(crate) require: &'a Require,
    /// A canary is sent once, on its rung, and heals nothing: what fails is what it is to show.
    pub(crate) via: Via<'a>,
}

impl Call<'_> {
    fn is_canary(&self) -> bool {
        matches!(self.via, Via::Canary(_))
    }
}

impl Peer {
    /// A call from its beginning to its end; `value` is taken once the peer has accepted it.
    pub(crate) fn place(
        &self,
        value: &mut Option<Value>,
        call: Call<'_>,
    ) -> Result<Reply, CallErrorKind> {
        let nested = self.core.current_root();
        let id = self.core.router().begin(self.core.role, nested, call.is_canary());
        let outcome = self.exchange(id, nested, value, call);
        if matches!(outcome, Err(CallErrorKind::Deadline)) {
            self.core.give_up();
        }
        self.core.finish(id);
        outcome
    }

    fn exchange(
        &self,
        id: u64,
        nested: Option<Root>,
        value: &mut Option<Value>,
        call: Call<'_>,
    ) -> Result<Reply, CallErrorKind> {
        let core = &self.core;
        let Call { deadline, .. } = call;
        if !call.is_canary() {
            core.tell_what_is_untold(deadline).map_err(|ended| self.gone(ended))?;
        }
        let (mut attempt, mut sent, mut tries) = (0, Route::default(), Tries::of(call.is_canary()));
        // What could not be taken of the answer, each time.
        let mut refused: Vec<(rung::RungId, Refusal)> = Vec::new();
        let mut not_taken: Option<Fault> = None;
        loop {
            // Again after a NACK; a value that is gone was accepted.
            if let Some(undelivered) = &*value {
                attempt += 1;
                let packed = core.pack(undelivered, &mut tries, (Names::All, call.via), deadline);
                let mut packing = packed.map_err(|error| match error {
                    NotReady::Unsendable(unsendable) => CallErrorKind::Unsendable(unsendable),
                    NotReady::Ended(ended) => self.gone(ended),
                })?;
                reached_of(|| call.is_canary(), "call-packed");
                let rank = |rung: &_| core.sessions.rank(rung);
                if let Err(below) = call.require.check(&packing.route, rank) {
                    undo(packing, &core.sessions);
                    return Err(CallErrorKind::BelowRequired(below));
                }
                tries.note(&mut packing);
                sent = self.send_call(id, attempt, nested, packing, call)?;
            }
            let event = loop {
                let event = core
                    .wait_for(deadline, |router| router.event(id))
                    .map_err(|error| self.not_yet(error, not_taken.take()))?;
                match event {
                    Event::Accepted => drop(value.take()),
                    // The peer calls back: this thread has nothing else to do.
                    Event::Nested(call) => {
                        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                            core.abandon(*call);
                            return Err(CallErrorKind::Deadline);
                        }
                        let done = core.perform(Work::Call(*call), deadline);
                        done.map_err(|ended| self.gone(ended))?;
                    }
                    // About an attempt that is superseded, or after all was accepted.
                    Event::Refused { attempt: of, .. } if of != attempt || value.is_none() => {}
                    Event::Refused { storage, code, text, .. } => break Err((storage, code, text)),
                    Event::Failed { code, text } => {
                        return Err(match not_taken {
                            Some(fault) if code == "undelivered" => {
                                CallErrorKind::AnswerNotTaken(fault)
                            }
                            _ => CallErrorKind::Remote { code, text },
                        });
                    }
                    Event::Returned { attempt, parcels, value, handles } => {
                        break Ok((attempt, parcels, value, handles));
                    }
                }
            };
            match event {
                Err((storage, code, text)) => {
                    let again = attempt < ATTEMPTS && tries.go_on(core, storage, &code, &text);
                    if !again {
                        return Err(CallErrorKind::NotAccepted { code, text });
                    }
                }
                Ok((attempt, parcels, json, mut handles)) => {
                    // Whoever answers has what it was asked.
                    drop(value.take());
                    reached_of(|| call.is_canary(), "answer-received");
                    let of = (Of::Return, id, attempt);
                    match core.take(of, parcels, &mut handles, &json, deadline) {
                        Ok(read) => {
                            reached_of(|| call.is_canary(), "answer-imported");
                            let mut read = read.map_err(CallErrorKind::Malformed)?;
                            if !call.is_canary() {
                                core.counters.received(read.legs());
                            }
                            sent.tell(&tries.failed);
                            read.refused = refused;
                            return Ok(Reply { read, sent });
                        }
                        Err(TakeError::Refused(rung, fault)) => {
                            // The peer tries again, but not for ever.
                            if refused.len() >= ATTEMPTS as usize {
                                return Err(CallErrorKind::AnswerNotTaken(fault));
                            }
                            refused.push((rung, fault.clone().into()));
                            not_taken = Some(fault);
                        }
                        Err(TakeError::Deadline) => return Err(CallErrorKind::Deadline),
                        Err(TakeError::Ended(ended)) => return Err(self.gone(ended)),
                    }
                }
            }
        }
    }

    fn send_call(
        &self,
        id: u64,
        attempt: u32,
        nested: Option<Root>,
        mut packing: Packing,
        call: Call<'_>,
    ) -> Result<Route, CallErrorKind> {
        let core = &self.core;
        let deadline = call.deadline;
        let leases =
            core.keep(&mut packing, call.is_canary(), deadline).map_err(|error| match error {
                NotKept::OverBound(text) => CallErrorKind::OverBound(text),
                NotKept::NotYet(error) => self.not_yet(error, None),
            })?;
        let Packing { value, parcels, handles, route, .. } = packing;
        let method = call.method.to_owned();
        let message = Message::Call { id, attempt, root: nested, method, parcels, value };
        match core.send(&message, handles, deadline) {
            Ok(()) => {
                reached_of(|| call.is_canary(), "call-sent");
                if !call.is_canary() {
                    core.count_sent(&route);
                }
                Ok(route)
            }
            // The peer will get the rest, so the leases are out; what it answers is stale.
            Err(NotSent::Begun) => Err(CallErrorKind::Deadline),
            Err(error) => {
                core.unkeep(leases);
                Err(match error {
                    NotSent::Deadline | NotSent::Begun => CallErrorKind::Deadline,
                    NotSent::OverCap(text) => CallErrorKind::OverCap(text),
                    NotSent::Ended(ended) => self.gone(ended),
                })
            }
        }
    }

    fn gone(&self, ended: Ended) -> CallErrorKind {
        CallErrorKind::Gone(ended, post_mortem(self.core.process.as_ref()))
    }

    fn not_yet(&self, error: NotYet, not_taken: Option<Fault>) -> CallErrorKind {
        match (error, not_taken) {
            (_, Some(fault)) => CallErrorKind::AnswerNotTaken(fault),
            (NotYet::Deadline, None) => CallErrorKind::Deadline,
            (NotYet::Ended(ended), None) => self.gone(ended),
        }
    }
}
