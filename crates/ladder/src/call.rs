//! The caller's side of a call.

use std::time::Instant;

use rung::{Fault, Value};

use crate::channel::{Peer, Reply};
use crate::core::{Event, NotKept, NotSent, NotYet, Work};
use crate::error::{CallErrorKind, Ended};
use crate::fail::reached;
use crate::handshake::post_mortem;
use crate::pack::{Blocks, Names, Packing, pack, undo};
use crate::route::{Require, Route};
use crate::transfer::{ATTEMPTS, TakeError, next_blocks, rungs_of};
use crate::unpack;
use crate::wire::{Message, Of, Root};

impl Peer {
    /// The call itself; `value` is taken once the peer has accepted it.
    pub(crate) fn exchange(
        &self,
        id: u64,
        nested: Option<Root>,
        method: &str,
        value: &mut Option<Value>,
        deadline: Option<Instant>,
        require: &Require,
    ) -> Result<Reply, CallErrorKind> {
        let core = &self.core;
        let mut blocks = Blocks::AsTheyAre;
        let (mut attempt, mut sent, mut rungs) = (0, Route::default(), Vec::new());
        // How often an answer could not be taken, and why the last time.
        let (mut not_taken, mut refusals) = (None, 0);
        loop {
            // Again after a NACK; a value that is gone was accepted.
            if let Some(undelivered) = &*value {
                attempt += 1;
                let packing = pack(undelivered, &core.sessions, blocks, Names::All)
                    .map_err(CallErrorKind::Unsendable)?;
                reached("call-packed");
                if let Err(below) = require.check(&packing.route, |rung| core.sessions.rank(rung)) {
                    undo(packing, &core.sessions);
                    return Err(CallErrorKind::BelowRequired(below));
                }
                rungs = rungs_of(&packing);
                sent = self.send_call(id, attempt, nested, method, packing, deadline)?;
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
                    let again = attempt < ATTEMPTS
                        && next_blocks(core, &mut blocks, &rungs, storage, &code, &text);
                    if !again {
                        return Err(CallErrorKind::NotAccepted { code, text });
                    }
                }
                Ok((attempt, parcels, json, mut handles)) => {
                    // Whoever answers has what it was asked.
                    drop(value.take());
                    reached("answer-received");
                    match core.take(Of::Return, id, attempt, parcels, &mut handles, deadline) {
                        Ok(table) => {
                            reached("answer-imported");
                            let read = unpack::read(&json, &table, &core.sessions)
                                .map_err(CallErrorKind::Malformed)?;
                            core.counters.received(read.legs());
                            return Ok(Reply { read, sent });
                        }
                        // The peer tries again, but not for ever.
                        Err(TakeError::Refused(fault)) if refusals < ATTEMPTS => {
                            refusals += 1;
                            not_taken = Some(fault);
                        }
                        Err(TakeError::Refused(fault)) => {
                            return Err(CallErrorKind::AnswerNotTaken(fault));
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
        method: &str,
        mut packing: Packing,
        deadline: Option<Instant>,
    ) -> Result<Route, CallErrorKind> {
        let core = &self.core;
        let leases = core.keep(&mut packing, deadline).map_err(|error| match error {
            NotKept::OverBound(text) => CallErrorKind::OverBound(text),
            NotKept::NotYet(error) => self.not_yet(error, None),
        })?;
        let Packing { value, parcels, handles, route, .. } = packing;
        let method = method.to_owned();
        let message = Message::Call { id, attempt, root: nested, method, parcels, value };
        match core.send(&message, handles, deadline) {
            Ok(()) => {
                reached("call-sent");
                core.count_sent(&route);
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
