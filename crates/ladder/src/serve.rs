//! The answering side of a call.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rung::{Fault, Handle, Reason, Unsendable, Value};

use crate::channel::Channel;
use crate::core::{Answer, NotSent, NotYet, Work};
use crate::error::Ended;
use crate::handler::{Failure, Handler};
use crate::pack::{Blocks, Packing, pack};
use crate::transfer::{ATTEMPTS, TakeError, next_blocks, rungs_of};
use crate::unpack::{self, Entry};
use crate::wire::{Message, Of};

impl Channel {
    /// Answers the peer's calls, one after the other, until it closes the channel.
    ///
    /// A handler that fails or panics is an error at the caller, and serving goes on.
    ///
    /// # Errors
    ///
    /// How the channel ended, unless the peer simply closed it.
    pub fn serve(&self, handler: &(impl Handler + ?Sized)) -> Result<(), Ended> {
        loop {
            let work = match self.core.wait_for(None, |router| router.work.pop_front()) {
                Ok(work) => work,
                Err(NotYet::Ended(Ended::Closed | Ended::Exited)) => return Ok(()),
                Err(NotYet::Ended(ended)) => return Err(ended),
                // There is no deadline to pass.
                Err(NotYet::Deadline) => continue,
            };
            let outcome = match work {
                Work::Call { id, attempt, method, parcels, value, mut handles } => {
                    match self.core.take(Of::Call, id, attempt, parcels, &mut handles) {
                        Ok(table) => self.answer(id, &method, &value, table, handler),
                        Err(TakeError::Refused(_)) => Ok(()),
                        Err(TakeError::Ended(ended)) => Err(ended),
                    }
                }
                Work::AnswerRefused { id, attempt, storage, code, text } => {
                    self.answer_again(id, attempt, storage, &code, &text)
                }
            };
            match outcome {
                // Closed while we answered: the next turn sees how.
                Ok(()) | Err(Ended::Closed | Ended::Exited) => {}
                Err(ended) => return Err(ended),
            }
        }
    }

    fn answer(
        &self,
        id: u64,
        method: &str,
        json: &str,
        table: Vec<Entry>,
        handler: &(impl Handler + ?Sized),
    ) -> Result<(), Ended> {
        let read = match unpack::read(json, &table) {
            Ok(read) => read,
            Err(fault) => return self.fail(id, Failure::new("malformed", fault.to_string())),
        };
        // What the value does not hold on to goes back now.
        drop(table);
        let called = catch_unwind(AssertUnwindSafe(|| handler.call(method, read.value)));
        match called {
            Ok(Ok(value)) => self.send_answer(id, 1, value, Blocks::AsTheyAre),
            Ok(Err(failure)) => self.fail(id, failure),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
                    .or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_else(|| "no message".into());
                tracing::error!(method, "the handler panicked: {text}");
                self.fail(
                    id,
                    Failure::new("handler-panicked", format!("the handler panicked: {text}")),
                )
            }
        }
    }

    fn fail(&self, id: u64, failure: Failure) -> Result<(), Ended> {
        let Failure { code, text } = failure;
        self.deliver(&Message::Error { id, code, text }, Vec::new())
    }

    fn deliver(&self, message: &Message, handles: Vec<Handle>) -> Result<(), Ended> {
        match self.core.send(message, handles, None) {
            Ok(()) => Ok(()),
            Err(NotSent::Ended(ended)) => Err(ended),
            Err(NotSent::Deadline) => Ok(()),
            Err(NotSent::OverCap(text)) => Err(Ended::Broken(Fault::new(Reason::OverCap, text))),
        }
    }

    /// Sends an answer, and keeps its value until the caller has accepted it.
    fn send_answer(
        &self,
        id: u64,
        attempt: u32,
        value: Value,
        blocks: Blocks,
    ) -> Result<(), Ended> {
        let core = &*self.core;
        let mut packing = match pack(&value, &core.sessions, blocks) {
            Ok(packing) => packing,
            Err(unsendable) => return self.fail(id, unsent(&unsendable)),
        };
        let rungs = rungs_of(&packing);
        let leases = core.keep(&mut packing);
        let Packing { value: json, parcels, handles, .. } = packing;
        let has_storages = !parcels.is_empty();
        let message = Message::Return { id, attempt, parcels, value: json };
        // An answer without storages cannot be refused.
        if has_storages {
            core.router().answers.insert(id, Answer { value, attempt, rungs });
        }
        match core.send(&message, handles, None) {
            Ok(()) => Ok(()),
            Err(error) => {
                let kept = core.router().answers.remove(&id);
                drop(kept);
                core.unkeep(leases);
                match error {
                    NotSent::OverCap(text) => self.fail(id, Failure::new("unsendable", text)),
                    NotSent::Deadline => Ok(()),
                    NotSent::Ended(ended) => Err(ended),
                }
            }
        }
    }

    /// The caller could not take an answer: the next way, or an error that says so.
    fn answer_again(
        &self,
        id: u64,
        attempt: u32,
        storage: usize,
        code: &str,
        text: &str,
    ) -> Result<(), Ended> {
        let core = &*self.core;
        let kept = {
            let mut router = core.router();
            let current = router.answers.get(&id).is_some_and(|kept| kept.attempt == attempt);
            if current { router.answers.remove(&id) } else { None }
        };
        let Some(Answer { value, rungs, .. }) = kept else {
            return Ok(());
        };
        let mut blocks = if attempt == 1 { Blocks::AsTheyAre } else { Blocks::Fresh };
        let again =
            attempt < ATTEMPTS && next_blocks(core, &mut blocks, &rungs, storage, code, text);
        if again {
            return self.send_answer(id, attempt + 1, value, blocks);
        }
        self.fail(
            id,
            Failure::new("undelivered", format!("the caller could not take the answer: {text}")),
        )
    }
}

fn unsent(unsendable: &Unsendable) -> Failure {
    Failure::new("unsendable", unsendable.to_string())
}
