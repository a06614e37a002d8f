//! A proven connection: calls one way, answers the other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use link::{Link, Traffic};
use rung::{Fault, Reason, Refusal, RungId, Trust, Unsendable, Value};
use segment::PeerTrust;

use crate::core::{Answer, Core, Event, NotSent, NotYet, Work};
use crate::error::{CallError, CallErrorKind, ConnectError, Ended};
use crate::handler::{Failure, Handler};
use crate::handshake::{post_mortem, shake};
use crate::ladder::Ladder;
use crate::pack::{Blocks, Packing, pack};
use crate::route::Route;
use crate::unpack::{self, Entry, NotTaken, Read};
use crate::wire::{Message, Of, Role};

/// How long a handshake may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(10);

/// Attempts at sending one value: as it is, rung by rung down, and once in fresh blocks.
const ATTEMPTS: u32 = 16;

/// A connection to a peer with whom a handshake was done; there is no other way to get one.
///
/// All methods take `&self`. Dropping it closes the connection.
#[derive(Debug)]
pub struct Channel {
    core: Arc<Core>,
    flusher: Option<JoinHandle<()>>,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    read: Read,
    sent: Route,
}

impl Reply {
    /// The value.
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.read.value
    }

    /// The value.
    #[must_use]
    pub fn into_value(self) -> Value {
        self.read.value
    }

    /// What each leaf of the argument rode.
    #[must_use]
    pub fn sent(&self) -> &Route {
        &self.sent
    }

    /// What each leaf of the answer rode; worked out by a look at the whole value.
    ///
    /// Which higher rungs declined is known to the sender alone.
    #[must_use]
    pub fn received(&self) -> Route {
        self.read.route()
    }
}

/// How a call is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct CallOptions {
    /// How long it may take, from sending to the answer; for ever if none is set.
    pub limit: Option<Duration>,
}

impl Channel {
    pub(crate) fn connect(
        link: Link,
        role: Role,
        ladder: &Ladder,
        trust: &Trust,
        limit: Duration,
        process: Option<Arc<worker::Process>>,
    ) -> Result<Self, ConnectError> {
        let core = Arc::new(shake(link, role, ladder, trust, limit, process)?);
        let flushed = Arc::clone(&core);
        let flusher = std::thread::Builder::new()
            .name("ladder-receipts".into())
            .spawn(move || flushed.flush_receipts())?;
        Ok(Self { core, flusher: Some(flusher) })
    }

    /// The channel to the host, if this process was spawned as a worker.
    ///
    /// To be asked once, at the beginning of `main`:
    ///
    /// ```no_run
    /// use ladder::{Channel, Methods};
    ///
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     if let Some(channel) = Channel::from_env()? {
    ///         channel.serve(&Methods::new().on("echo", Ok))?;
    ///         return Ok(());
    ///     }
    ///     // Otherwise this is the host …
    ///     Ok(())
    /// }
    /// ```
    ///
    /// The host is trusted with memory if it runs this very executable; see
    /// [`Self::from_env_with`].
    ///
    /// # Errors
    ///
    /// Where the handshake fails. Not having been spawned as a worker is `Ok(None)`.
    pub fn from_env() -> Result<Option<Self>, ConnectError> {
        Self::from_env_with(&Ladder::standard(), None)
    }

    /// As [`Self::from_env`], with other rungs, and with the user's word for the host.
    ///
    /// # Errors
    ///
    /// As [`Self::from_env`].
    pub fn from_env_with(
        ladder: &Ladder,
        trust: Option<PeerTrust>,
    ) -> Result<Option<Self>, ConnectError> {
        let Some(link) = worker::attach()? else {
            return Ok(None);
        };
        let known = || {
            let pid = link.peer_pid().ok()?;
            PeerTrust::same_executable(pid).ok()
        };
        let trust = trust.or_else(known).map_or(Trust::none(), Trust::carrying);
        Self::connect(link, Role::Worker, ladder, &trust, HANDSHAKE, None).map(Some)
    }

    /// Calls a method of the peer, and waits for its answer.
    ///
    /// Bulk goes by the highest rung that takes it; the value is packed before anything is sent, so
    /// nothing is half-sent.
    ///
    /// # Errors
    ///
    /// [`CallError`], with the value in it unless the peer had accepted it.
    pub fn call(&self, method: &str, value: impl Into<Value>) -> Result<Reply, CallError> {
        self.call_with(method, value, CallOptions::default())
    }

    /// As [`Self::call`], with a limit of time.
    ///
    /// # Errors
    ///
    /// As [`Self::call`]. After a deadline the channel lives on: an answer that comes too late is
    /// dropped, and its memory goes back.
    pub fn call_with(
        &self,
        method: &str,
        value: impl Into<Value>,
        options: CallOptions,
    ) -> Result<Reply, CallError> {
        let deadline = options.limit.and_then(|limit| Instant::now().checked_add(limit));
        let id = self.core.router().begin();
        let mut value = Some(value.into());
        let outcome = self.exchange(id, method, &mut value, deadline);
        self.core.router().finish(id);
        outcome.map_err(|kind| CallError::new(method, kind, value))
    }

    /// The call itself; `value` is taken once the peer has accepted it.
    fn exchange(
        &self,
        id: u64,
        method: &str,
        value: &mut Option<Value>,
        deadline: Option<Instant>,
    ) -> Result<Reply, CallErrorKind> {
        let core = &*self.core;
        let mut blocks = Blocks::AsTheyAre;
        let (mut attempt, mut sent, mut rungs) = (0, Route::default(), Vec::new());
        // How often an answer could not be taken, and why the last time.
        let (mut not_taken, mut refusals) = (None, 0);
        loop {
            // Again after a NACK; a value that is gone was accepted.
            if let Some(undelivered) = &*value {
                attempt += 1;
                let packing =
                    pack(undelivered, &core.sessions, blocks).map_err(CallErrorKind::Unsendable)?;
                rungs = rungs_of(&packing);
                sent = self.send_call(id, attempt, method, packing, deadline)?;
            }
            let event = loop {
                let event = core
                    .wait_for(deadline, |router| router.event(id))
                    .map_err(|error| self.not_yet(error, not_taken.take()))?;
                match event {
                    Event::Accepted => drop(value.take()),
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
                    match self.take(Of::Return, id, attempt, parcels, &mut handles) {
                        Ok(table) => {
                            let read =
                                unpack::read(&json, &table).map_err(CallErrorKind::Malformed)?;
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
        method: &str,
        mut packing: Packing,
        deadline: Option<Instant>,
    ) -> Result<Route, CallErrorKind> {
        let core = &*self.core;
        let leases = core.keep(&mut packing);
        let Packing { value, parcels, handles, route, .. } = packing;
        let method = method.to_owned();
        let message = Message::Call { id, attempt, method, parcels, value };
        match core.send(&message, handles, deadline) {
            Ok(()) => Ok(route),
            Err(error) => {
                core.unkeep(leases);
                Err(match error {
                    NotSent::Deadline => CallErrorKind::Deadline,
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

    /// Imports what came, and tells the sender: ACCEPT, or NACK.
    fn take(
        &self,
        of: Of,
        id: u64,
        attempt: u32,
        parcels: Vec<rung::ParcelWire>,
        handles: &mut std::collections::VecDeque<rung::Handle>,
    ) -> Result<Vec<Entry>, TakeError> {
        let core = &*self.core;
        let ended = |error| match error {
            NotSent::Ended(ended) => TakeError::Ended(ended),
            NotSent::Deadline => TakeError::Ended(Ended::Closed),
            NotSent::OverCap(text) => {
                TakeError::Ended(Ended::Broken(Fault::new(Reason::OverCap, text)))
            }
        };
        match unpack::import(&core.sessions, &core.returns, parcels, handles) {
            Ok(table) => {
                core.send(&Message::Accept { of, id, attempt }, Vec::new(), None).map_err(ended)?;
                Ok(table)
            }
            Err(NotTaken::Storage(storage, fault)) => {
                let message = Message::Refuse {
                    of,
                    id,
                    attempt,
                    storage,
                    reason: fault.reason().code().to_owned(),
                    // The reason's own text: a detail might tell the peer of this process.
                    text: fault.reason().text().to_owned(),
                };
                core.send(&message, Vec::new(), None).map_err(ended)?;
                Err(TakeError::Refused(fault))
            }
            Err(NotTaken::Broken(fault)) => {
                core.link.close();
                Err(TakeError::Ended(Ended::Broken(fault)))
            }
        }
    }

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
                    match self.take(Of::Call, id, attempt, parcels, &mut handles) {
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

    fn deliver(&self, message: &Message, handles: Vec<rung::Handle>) -> Result<(), Ended> {
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

    /// What became of every rung with this peer, from the highest.
    #[must_use]
    pub fn rungs(&self) -> Vec<(RungId, Result<(), Refusal>)> {
        self.core.sessions.report()
    }

    /// What crossed the socket so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.core.link.traffic()
    }

    /// Leases that the peer has not given back, and the bytes that are kept for them.
    #[must_use]
    pub fn lent(&self) -> (usize, u64) {
        self.core.keeper.out()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.core.is_home() {
            // A fork: the connection is not ours to close (L9).
            return;
        }
        self.core.close();
        if let Some(flusher) = self.flusher.take() {
            // It ends with the channel; its panic would have nothing to add.
            let _ = flusher.join();
        }
    }
}

#[derive(Debug)]
enum TakeError {
    Refused(Fault),
    Ended(Ended),
}

fn rungs_of(packing: &Packing) -> Vec<RungId> {
    packing.parcels.iter().map(|parcel| parcel.lease().0.clone()).collect()
}

fn unsent(unsendable: &Unsendable) -> Failure {
    Failure::new("unsendable", unsendable.to_string())
}

/// What to try after a NACK, loudly; false where nothing is left.
fn next_blocks(
    core: &Core,
    blocks: &mut Blocks,
    rungs: &[RungId],
    storage: usize,
    code: &str,
    text: &str,
) -> bool {
    let Some(rung) = rungs.get(storage) else {
        return false;
    };
    if core.sessions.demote(rung) {
        tracing::warn!(%rung, code, "the peer could not take a storage and the rung is demoted: {text}");
        return true;
    }
    // Nothing below it: a fresh block, once.
    if *blocks == Blocks::Fresh {
        return false;
    }
    tracing::warn!(%rung, code, "the peer could not take a storage, trying a fresh block: {text}");
    *blocks = Blocks::Fresh;
    true
}
