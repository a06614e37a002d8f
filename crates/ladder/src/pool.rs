//! Which thread runs a handler.
//!
//! - A call that is nested in one of ours runs on the thread that waits in its root ([`Event::Nested`]):
//!   that thread has nothing else to do, so however deep two sides call each other, there is one.
//! - Any other is a new root, and runs on a server: a thread of this pool, started when it is needed
//!   and gone after a while without work. Their number is capped; a call that comes when all are busy
//!   is refused with `busy` at once. It never waits for a thread that may be waiting for it.
//!
//! [`Event::Nested`]: crate::core::Event::Nested

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::core::{Core, Incoming, NotYet, Work};
use crate::error::Ended;
use crate::own;
use crate::wire::{Role, Root};

/// How many calls of the peer's, not nested in ours, are handled at a time.
const SERVERS: usize = 16;

/// How long a server without work stays.
const IDLE: Duration = Duration::from_secs(10);

/// A handler that takes no longer is back before another thread has woken up to read in its place.
const QUICK: Duration = Duration::from_micros(200);

/// A call that is answered with an error, unopened.
pub(crate) struct Refused {
    pub(crate) call: Incoming,
    pub(crate) code: &'static str,
    pub(crate) text: String,
}

/// Work that waits for a server, and the servers; part of the router, under its lock.
///
/// - **V1** `idle <= servers <= SERVERS`, but that work which must not be refused may start one more.
/// - **V2** Work is queued only where a server is idle for it, is about to be started, or (in a worker
///   that has not begun to serve) will come.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    work: VecDeque<Work>,
    servers: usize,
    idle: usize,
}

impl Pool {
    /// Takes a call, or refuses it; whether a server is to be started for it.
    pub(crate) fn offer(
        &mut self,
        call: Incoming,
        has_handler: bool,
        role: Role,
    ) -> (bool, Option<Refused>) {
        // A server that waits where there is no handler waits for the channel's own work.
        if self.has_time() && (has_handler || own::is_own(&call.method)) {
            self.work.push_back(Work::Call(call));
            return (false, None);
        }
        if has_handler && self.servers < SERVERS {
            self.servers += 1;
            self.work.push_back(Work::Call(call));
            return (true, None);
        }
        if !has_handler && role == Role::Worker && self.work.len() < SERVERS {
            // It has attached and will serve in a moment.
            self.work.push_back(Work::Call(call));
            return (false, None);
        }
        let (code, text) = if has_handler {
            ("busy", format!("all {SERVERS} threads are busy with other calls"))
        } else {
            ("no-handler", "this side takes no calls".to_owned())
        };
        (false, Some(Refused { call, code, text }))
    }

    /// Takes work that cannot be refused; whether a server is to be started for it.
    pub(crate) fn push(&mut self, work: Work) -> bool {
        let start = self.idle <= self.work.len() && self.servers <= SERVERS;
        self.servers += usize::from(start);
        self.work.push_back(work);
        start
    }

    /// Whether a server waits that has nothing to do yet.
    pub(crate) fn has_time(&self) -> bool {
        self.idle > self.work.len()
    }

    /// Whether one piece of work waits, for the one who has read it.
    pub(crate) fn is_one(&self) -> bool {
        self.work.len() == 1
    }

    /// Work for an idle server, which is idle no more; users' calls only where there is a handler for them.
    fn take(&mut self, has_handler: bool) -> Option<Work> {
        let can = |work: &Work| match work {
            Work::Call(call) => has_handler || own::is_own(&call.method),
            Work::AnswerRefused { .. } => true,
        };
        let at = self.work.iter().position(can)?;
        let work = self.work.remove(at)?;
        self.idle -= 1;
        Some(work)
    }
}

impl Core {
    /// Starts a server that was counted already.
    pub(crate) fn spawn_server(self: &Arc<Self>) {
        let core = Arc::clone(self);
        let started = std::thread::Builder::new()
            .name("ladder-server".into())
            .spawn(move || core.serve_while(Some(IDLE)));
        if let Err(error) = started {
            tracing::error!("no thread to serve with: {error}");
            let mut router = self.router();
            router.pool.servers -= 1;
            // What was queued for it: nobody else may come by.
            let left = router.pool.work.pop_back();
            drop(router);
            if let Some(Work::Call(call)) = left {
                self.refuse(call, "busy", "no thread could be started".into());
            }
        }
    }

    /// Counts this thread as a server, and serves until the end.
    pub(crate) fn serve_for_good(self: &Arc<Self>) -> Ended {
        self.router().pool.servers += 1;
        self.serve_while(None)
    }

    /// Serves as the only server until something has happened, which follows from what is served.
    pub(crate) fn serve_until(
        self: &Arc<Self>,
        deadline: Option<Instant>,
        happened: impl Fn() -> bool,
    ) -> Result<(), NotYet> {
        let mut router = self.router();
        router.pool.servers += 1;
        drop(router);
        let served = loop {
            if happened() {
                break Ok(());
            }
            self.router().pool.idle += 1;
            let work = match self.wait_for(deadline, |router| router.pool.take(false)) {
                Ok(work) => work,
                Err(not_yet) => {
                    self.router().pool.idle -= 1;
                    break Err(not_yet);
                }
            };
            if let Err(ended) = self.perform(work, deadline) {
                break Err(NotYet::Ended(ended));
            }
        };
        self.router().pool.servers -= 1;
        served
    }

    /// Serves until there was no work for so long, or until the end.
    fn serve_while(self: &Arc<Self>, patience: Option<Duration>) -> Ended {
        self.router().pool.idle += 1;
        loop {
            let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
            let serves = || self.handler.get().is_some();
            let work = match self.wait_as(true, deadline, |router| router.pool.take(serves())) {
                Ok(work) => work,
                Err(reason) => {
                    let pool = &mut self.router().pool;
                    match (reason, pool.take(serves())) {
                        // It came after all.
                        (NotYet::Deadline, Some(work)) => work,
                        (NotYet::Deadline, None) => {
                            pool.idle -= 1;
                            pool.servers -= 1;
                            return Ended::Closed;
                        }
                        (NotYet::Ended(ended), _) => return ended,
                    }
                }
            };
            let started = Instant::now();
            if let Err(ended) = self.perform(work, None) {
                tracing::debug!("while serving: {ended}");
            }
            self.slow.store(started.elapsed() > QUICK, Ordering::Relaxed);
            self.router().pool.idle += 1;
        }
    }
}

thread_local! {
    /// The roots that this thread runs handlers of, the innermost last, with the channel of each.
    static ROOTS: RefCell<Vec<(usize, Root)>> = const { RefCell::new(Vec::new()) };
}

fn channel_of(core: &Core) -> usize {
    std::ptr::from_ref(core) as usize
}

impl Core {
    /// The root that a call by this thread is nested in: of the innermost handler that it runs for
    /// this channel.
    pub(crate) fn current_root(&self) -> Option<Root> {
        ROOTS.with_borrow(|roots| {
            let mine = roots.iter().rev().find(|(channel, _)| *channel == channel_of(self));
            mine.map(|(_, root)| *root)
        })
    }

    /// Runs something as part of a root.
    pub(crate) fn within<T>(&self, root: Root, run: impl FnOnce() -> T) -> T {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                ROOTS.with_borrow_mut(|roots| roots.pop());
            }
        }
        ROOTS.with_borrow_mut(|roots| roots.push((channel_of(self), root)));
        let _leave = Leave;
        run()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> Incoming {
        Incoming {
            id: 1,
            attempt: 1,
            root: Root { side: Role::Host, id: 1 },
            method: "m".into(),
            parcels: Vec::new(),
            value: "null".into(),
            handles: VecDeque::new(),
        }
    }

    #[test]
    fn calls_are_queued_only_for_servers_that_will_take_them() {
        let mut pool = Pool::default();
        for _ in 0..SERVERS {
            assert!(matches!(pool.offer(call(), true, Role::Host), (true, None)));
        }
        let (start, refused) = pool.offer(call(), true, Role::Host);
        assert!(!start && refused.is_some_and(|refused| refused.code == "busy"));
        // One has come to wait and taken its work; another waits.
        pool.idle = 2;
        assert!(pool.take(true).is_some());
        pool.work.clear();
        assert!(matches!(pool.offer(call(), true, Role::Host), (false, None)));
        assert!(pool.offer(call(), true, Role::Host).1.is_some());
    }

    #[test]
    fn a_side_without_a_handler_refuses_unless_it_will_have_one() {
        let (_, refused) = Pool::default().offer(call(), false, Role::Host);
        assert_eq!(refused.map(|refused| refused.code), Some("no-handler"));
        assert!(Pool::default().offer(call(), false, Role::Worker).1.is_none());
    }
}
