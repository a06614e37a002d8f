//! The answering side of a call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use rung::{Fault, Reason, limits};

use crate::channel::{Channel, Peer};
use crate::core::{Answer, Core, Incoming, NotKept, NotSent, NotYet, Outgoing, Work};
use crate::error::Ended;
use crate::fail::{reached, reached_of};
use crate::handler::{Failure, Handler};
use crate::ladder::Via;
use crate::own;
use crate::pack::{Names, Packing};
use crate::prove::is_passing;
use crate::transfer::{ATTEMPTS, NotReady, TakeError, Tries};
use crate::unpack::Read;
use crate::wire::{Message, Of, Role};

impl Channel {
    /// Answers the peer's calls until it closes the channel.
    ///
    /// Calls that come at the same time are answered by several threads, 16 at most; a call that is
    /// nested in one of ours by the thread that waits for that. A handler that fails or panics is an
    /// error at the caller, and serving goes on. Only the first handler of a channel counts.
    ///
    /// # Errors
    ///
    /// How the channel ended, unless the peer simply closed it.
    pub fn serve(&self, handler: impl Handler + Send + Sync + 'static) -> Result<(), Ended> {
        // A second one would have nothing to answer: the first has every call.
        let _ = self.peer.core.handler.set(Arc::new(handler));
        match self.peer.core.serve_for_good() {
            Ended::Closed | Ended::Exited => Ok(()),
            ended => Err(ended),
        }
    }
}

impl Core {
    /// Does one piece of work of the peer's; what is said for it is said by the deadline of the call
    /// that waits meanwhile, if one does.
    pub(crate) fn perform(
        self: &Arc<Self>,
        work: Work,
        deadline: Option<Instant>,
    ) -> Result<(), Ended> {
        match work {
            Work::Call(mut call) => {
                reached_of(|| own::is_own(&call.method), "call-received");
                let (id, attempt) = (call.id, call.attempt);
                let parcels = std::mem::take(&mut call.parcels);
                let (of, json) = ((Of::Call, id, attempt), std::mem::take(&mut call.value));
                match self.take(of, parcels, &mut call.handles, &json, deadline) {
                    Ok(read) => {
                        reached_of(|| own::is_own(&call.method), "accept-sent");
                        self.answer(&call, read, deadline)
                    }
                    Err(TakeError::Refused(..) | TakeError::Deadline) => Ok(()),
                    Err(TakeError::Ended(ended)) => Err(ended),
                }
            }
            Work::AnswerRefused { id, answer, storage, code, text } => {
                self.answer_again(id, answer, storage, &code, &text)
            }
        }
    }

    fn answer(
        self: &Arc<Self>,
        call: &Incoming,
        read: Result<Read, Fault>,
        deadline: Option<Instant>,
    ) -> Result<(), Ended> {
        let id = call.id;
        let read = match read {
            Ok(read) => read,
            Err(fault) => {
                tracing::warn!(method = call.method, code = %fault.reason(), "malformed: {fault}");
                let text = fault.for_peer().to_string();
                return self.fail(id, deadline, Failure::new("malformed", text));
            }
        };
        if own::is_own(&call.method) {
            let root = call.root;
            return match self.within(root, || self.answer_own(&call.method, read, deadline)) {
                Ok((value, rung)) => {
                    let answer = Outgoing { id, root, attempt: 1, value, only: Some(rung) };
                    self.send_answer(answer, Tries::of(true), deadline)
                }
                Err(failure) => self.fail(id, deadline, failure),
            };
        }
        self.counters.received(read.legs());
        let Some(handler) = self.handler.get() else {
            return self.fail(id, deadline, Failure::new("no-handler", "this side takes no calls"));
        };
        let peer = Peer::of(self);
        let called = self.within(call.root, || {
            catch_unwind(AssertUnwindSafe(|| handler.call(&call.method, read.value, &peer)))
        });
        reached("handled");
        match called {
            Ok(Ok(value)) => {
                let answer = Outgoing { id, root: call.root, attempt: 1, value, only: None };
                self.send_answer(answer, Tries::of(false), deadline)
            }
            Ok(Err(failure)) => self.fail(id, deadline, failure),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
                    .or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_else(|| "no message".into());
                tracing::error!(method = call.method, "the handler panicked: {text}");
                // A worker's panics are for its host to know; a host's are its own.
                let text = match self.role {
                    Role::Worker => format!("the handler panicked: {text}"),
                    Role::Host => "the handler panicked".to_owned(),
                };
                self.fail(id, deadline, Failure::new("handler-panicked", text))
            }
        }
    }

    fn fail(&self, id: u64, deadline: Option<Instant>, failure: Failure) -> Result<(), Ended> {
        let Failure { code, text, .. } = failure.told_by(self.role);
        // What the peer would refuse to read must not cost us the channel.
        let code: String = code.chars().take(limits::ERROR_CODE / 4).collect();
        let message = Message::Error { id, code, text };
        match self.send(&message, Vec::new(), deadline) {
            Ok(()) | Err(NotSent::Begun) => Ok(()),
            // Later, by the thread that has the time.
            Err(NotSent::Deadline) => {
                self.post(message, &[]);
                Ok(())
            }
            Err(NotSent::Ended(ended)) => Err(ended),
            Err(NotSent::OverCap(text)) => Err(Ended::Broken(Fault::new(Reason::OverCap, text))),
        }
    }

    /// Sends an answer, and keeps its value until the caller has accepted it.
    fn send_answer(
        self: &Arc<Self>,
        answer: Outgoing,
        mut tries: Tries,
        deadline: Option<Instant>,
    ) -> Result<(), Ended> {
        let Outgoing { id, root, attempt, .. } = answer;
        let is_canary = answer.only.is_some();
        let fail = |code: &str, text: String| self.fail(id, deadline, Failure::new(code, text));
        if !is_canary {
            self.within(root, || self.tell_what_is_untold(deadline))?;
        }
        let via = answer.only.as_ref().map_or(Via::Proven, Via::Canary);
        // The caller waits for this answer: what is asked of it is nested in its call.
        let packed = self
            .within(root, || self.pack(&answer.value, &mut tries, (Names::Bulk, via), deadline));
        let mut packing = match packed {
            Ok(packing) => packing,
            Err(NotReady::Ended(ended)) => return Err(ended),
            Err(NotReady::Unsendable(unsendable)) => {
                // Of a canary it matters whether it is this moment's trouble or the rung's.
                let last = unsendable.refusals.last().map(|(_, why)| why.reason());
                let code = last.filter(|why| is_canary && is_passing(*why));
                let code = code.map_or("unsendable", Reason::code);
                tracing::debug!("the answer: {unsendable}");
                return fail(code, unsendable.for_peer().to_string());
            }
        };
        // The peer may be waiting for this very answer before it gives anything back.
        let patience = Instant::now().checked_add(ROOM_FOR_AN_ANSWER);
        let room_by = deadline.into_iter().chain(patience).min();
        let leases = match self.keep(&mut packing, is_canary, room_by) {
            Ok(leases) => leases,
            Err(NotKept::OverBound(text)) => return fail("over-bound", text),
            Err(NotKept::NotYet(NotYet::Ended(ended))) => return Err(ended),
            Err(NotKept::NotYet(NotYet::Deadline)) => {
                return fail("over-bound", "there was no room for the answer in time".into());
            }
        };
        reached_of(|| is_canary, "answer-packed");
        tries.note(&mut packing);
        let Packing { value: json, parcels, handles, route, .. } = packing;
        let has_storages = !parcels.is_empty();
        let message = Message::Return { id, attempt, parcels, value: json };
        // An answer without storages cannot be refused.
        if has_storages {
            let mut router = self.router();
            let room = router.answers.len() < ANSWERS;
            let before =
                if room { router.answers.insert(id, Answer { answer, tries }) } else { None };
            drop(router);
            // A number that the peer uses twice: its loss, outside the lock (L7).
            drop(before);
            if !room {
                self.unkeep(leases);
                return fail("busy", format!("{ANSWERS} answers have not been accepted yet"));
            }
        }
        match self.send(&message, handles, deadline) {
            // The caller gets the rest, so the leases are out.
            Ok(()) | Err(NotSent::Begun) => {
                reached_of(|| is_canary, "answer-sent");
                if !is_canary {
                    self.count_sent(&route);
                }
                Ok(())
            }
            Err(error) => {
                let kept = self.router().answers.remove(&id);
                drop(kept);
                self.unkeep(leases);
                match error {
                    NotSent::OverCap(text) => {
                        tracing::warn!("an answer was not sent: {text}");
                        fail("unsendable", "more than a frame, or the system, takes".into())
                    }
                    NotSent::Deadline | NotSent::Begun => {
                        fail("abandoned", "there was no time to send the answer".into())
                    }
                    NotSent::Ended(ended) => Err(ended),
                }
            }
        }
    }

    /// The caller could not take an answer: the next way, or an error that says so.
    fn answer_again(
        self: &Arc<Self>,
        id: u64,
        answer: Answer,
        storage: usize,
        code: &str,
        text: &str,
    ) -> Result<(), Ended> {
        let Answer { answer, mut tries } = answer;
        let again = answer.attempt < ATTEMPTS && tries.go_on(self, storage, code, text);
        if again {
            let attempt = answer.attempt + 1;
            return self.send_answer(Outgoing { attempt, ..answer }, tries, None);
        }
        let text = format!("the caller could not take the answer: {text}");
        self.fail(id, None, Failure::new("undelivered", text))
    }
}

/// How long an answer may wait for room under the bounds.
const ROOM_FOR_AN_ANSWER: std::time::Duration = std::time::Duration::from_secs(10);

/// Answers that a peer may leave neither accepted nor refused.
const ANSWERS: usize = 1024;
