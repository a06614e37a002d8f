//! The answering side of a call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rung::{Fault, Handle, Reason, Unsendable, Value, limits};

use crate::channel::{Channel, Peer};
use crate::core::{Answer, Core, Incoming, NotSent, Work};
use crate::error::Ended;
use crate::fail::reached;
use crate::handler::{Failure, Handler};
use crate::pack::{Blocks, Packing, pack};
use crate::transfer::{ATTEMPTS, TakeError, next_blocks, rungs_of};
use crate::unpack::{self, Entry};
use crate::wire::{Message, Of};

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
    /// Does one piece of work of the peer's.
    pub(crate) fn perform(self: &Arc<Self>, work: Work) -> Result<(), Ended> {
        match work {
            Work::Call(mut call) => {
                reached("call-received");
                let (id, attempt) = (call.id, call.attempt);
                let parcels = std::mem::take(&mut call.parcels);
                match self.take(Of::Call, id, attempt, parcels, &mut call.handles, None) {
                    Ok(table) => {
                        reached("accept-sent");
                        self.answer(&call, table)
                    }
                    Err(TakeError::Refused(_) | TakeError::Deadline) => Ok(()),
                    Err(TakeError::Ended(ended)) => Err(ended),
                }
            }
            Work::AnswerRefused { id, attempt, storage, code, text } => {
                self.answer_again(id, attempt, storage, &code, &text)
            }
        }
    }

    fn answer(self: &Arc<Self>, call: &Incoming, table: Vec<Entry>) -> Result<(), Ended> {
        let id = call.id;
        let read = match unpack::read(&call.value, &table) {
            Ok(read) => read,
            Err(fault) => return self.fail(id, Failure::new("malformed", fault.to_string())),
        };
        // What the value does not hold on to goes back now.
        drop(table);
        let Some(handler) = self.handler.get() else {
            return self.fail(id, Failure::new("no-handler", "this side takes no calls"));
        };
        let peer = Peer::of(self);
        let called = self.within(call.root, || {
            catch_unwind(AssertUnwindSafe(|| handler.call(&call.method, read.value, &peer)))
        });
        reached("handled");
        match called {
            Ok(Ok(value)) => self.send_answer(id, 1, value, Blocks::AsTheyAre),
            Ok(Err(failure)) => self.fail(id, failure),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
                    .or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_else(|| "no message".into());
                tracing::error!(method = call.method, "the handler panicked: {text}");
                let text = format!("the handler panicked: {text}");
                self.fail(id, Failure::new("handler-panicked", text))
            }
        }
    }

    fn fail(&self, id: u64, failure: Failure) -> Result<(), Ended> {
        let Failure { code, text } = failure;
        // What the peer would refuse to read must not cost us the channel.
        let code: String = code.chars().take(limits::ERROR_CODE / 4).collect();
        self.deliver(&Message::Error { id, code, text }, Vec::new())
    }

    fn deliver(&self, message: &Message, handles: Vec<Handle>) -> Result<(), Ended> {
        match self.send(message, handles, None) {
            Ok(()) => Ok(()),
            Err(NotSent::Ended(ended)) => Err(ended),
            Err(NotSent::Deadline | NotSent::Begun) => Ok(()),
            Err(NotSent::OverCap(text) | NotSent::OverBound(text)) => {
                Err(Ended::Broken(Fault::new(Reason::OverCap, text)))
            }
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
        let mut packing = match pack(&value, &self.sessions, blocks) {
            Ok(packing) => packing,
            Err(unsendable) => return self.fail(id, unsent(&unsendable)),
        };
        reached("answer-packed");
        let rungs = rungs_of(&packing);
        let leases = match self.keep(&mut packing) {
            Ok(leases) => leases,
            Err(NotSent::OverBound(text)) => {
                return self.fail(id, Failure::new("over-bound", text));
            }
            Err(_) => return Ok(()),
        };
        let Packing { value: json, parcels, handles, .. } = packing;
        let has_storages = !parcels.is_empty();
        let message = Message::Return { id, attempt, parcels, value: json };
        // An answer without storages cannot be refused.
        if has_storages {
            self.router().answers.insert(id, Answer { value, attempt, rungs });
        }
        match self.send(&message, handles, None) {
            Ok(()) => {
                reached("answer-sent");
                Ok(())
            }
            Err(error) => {
                let kept = self.router().answers.remove(&id);
                drop(kept);
                self.unkeep(leases);
                match error {
                    NotSent::OverCap(text) | NotSent::OverBound(text) => {
                        self.fail(id, Failure::new("unsendable", text))
                    }
                    NotSent::Deadline | NotSent::Begun => Ok(()),
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
        let kept = {
            let mut router = self.router();
            let current = router.answers.get(&id).is_some_and(|kept| kept.attempt == attempt);
            if current { router.answers.remove(&id) } else { None }
        };
        let Some(Answer { value, rungs, .. }) = kept else {
            return Ok(());
        };
        let mut blocks = if attempt == 1 { Blocks::AsTheyAre } else { Blocks::Fresh };
        let again =
            attempt < ATTEMPTS && next_blocks(self, &mut blocks, &rungs, storage, code, text);
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
