//! The states of a shared pool allocation as types: what may come next is what there is a method for.
//!
//! The contract is `docs/pool-ownership-contract.md`; O1 to O10 are its clauses. On the side of the owner:
//!
//! ```text
//! Allocated ─ready─▶ Ready ─export─▶ Exported ─home, freed, dead─▶ Reclaimable ─reclaim─▶ the memory
//!                                       └─dropped─▶ quarantined: it stays allocated
//! ```
//!
//! and on the side of whoever imports it:
//!
//! ```text
//! Imported ─idle─▶ Idle ─free─▶ Freed, to be said
//!     └─dropped, or abandoned─▶ it stays mapped
//! ```
//!
//! An owner gets at memory that was exported by a proof alone, and only this crate makes proofs, where the contract says
//! so:
//!
//! ```
//! use tier_pool_ipc::contract::{Allocated, Exported, Freed};
//!
//! fn again(exported: Exported<Vec<u8>>, freed: Freed) -> Vec<u8> {
//!     exported.freed(freed).reclaim()
//! }
//! # let ready = Allocated::new(vec![1]).ready(|_| Ok::<_, ()>(None::<()>)).unwrap();
//! # let _ = (ready.export(), again);
//! ```
//!
//! ```compile_fail
//! use tier_pool_ipc::contract::{Allocated, Exported, Freed};
//!
//! fn again(exported: Exported<Vec<u8>>, freed: Freed) -> Vec<u8> {
//!     exported.reclaim()
//! }
//! # let ready = Allocated::new(vec![1]).ready(|_| Ok::<_, ()>(None::<()>)).unwrap();
//! # let _ = (ready.export(), again);
//! ```
//!
//! Nothing is exported before its owner's work is behind an event:
//!
//! ```
//! # use tier_pool_ipc::contract::Allocated;
//! let allocated = Allocated::new(vec![1]);
//! let (exported, event) = allocated.ready(|_| Ok::<_, ()>(Some("event"))).unwrap().export();
//! # let _ = (exported, event);
//! ```
//!
//! ```compile_fail
//! # use tier_pool_ipc::contract::Allocated;
//! let allocated = Allocated::new(vec![1]);
//! let (exported, event) = allocated.export();
//! # let _ = (exported, event);
//! ```

/// Which contract both sides go by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contract {
    /// `docs/pool-ownership-contract.md`, as it is.
    V1,
}

impl Contract {
    /// Its number in an offer.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
        }
    }
}

/// Every lease is home (O3), and none was to be kept: the last receipt said that nothing is imported.
#[derive(Debug)]
pub struct Home(pub(crate) ());

/// The importer has freed its import, and said so (O6, O7).
#[derive(Debug)]
pub struct Freed(pub(crate) ());

/// The importer is dead for sure: its process has ended (O9).
#[derive(Debug, Clone, Copy)]
pub struct Dead(pub(crate) ());

/// Memory that its owner alone has.
#[derive(Debug)]
pub struct Allocated<T>(T);

impl<T> Allocated<T> {
    /// Memory of a pool.
    #[must_use]
    pub fn new(memory: T) -> Self {
        Self(memory)
    }

    /// Puts an event behind everything that the owner has enqueued (O4); none, where there is nothing.
    ///
    /// # Errors
    ///
    /// What `behind` answers.
    pub fn ready<E, R>(
        self,
        behind: impl FnOnce(&T) -> Result<Option<E>, R>,
    ) -> Result<Ready<T, E>, R> {
        let event = behind(&self.0)?;
        Ok(Ready { memory: self.0, event })
    }
}

/// Memory that is ready once its event is.
#[derive(Debug)]
pub struct Ready<T, E> {
    memory: T,
    event: Option<E>,
}

impl<T, E> Ready<T, E> {
    /// Somebody else is about to see it, with this event.
    #[must_use]
    pub fn export(self) -> (Exported<T>, Option<E>) {
        (Exported(Some(self.memory)), self.event)
    }
}

/// Memory that an importer may have imported: pinned (O3). Dropped, it stays allocated for good: quarantined (O9).
#[derive(Debug)]
pub struct Exported<T>(Option<T>);

impl<T> Exported<T> {
    /// It is home, and was not to be kept.
    #[must_use]
    pub fn home(self, _proof: Home) -> Reclaimable<T> {
        self.out()
    }

    /// Its importer has freed it.
    #[must_use]
    pub fn freed(self, _proof: Freed) -> Reclaimable<T> {
        self.out()
    }

    /// Its importer is dead.
    #[must_use]
    pub fn dead(self, _proof: Dead) -> Reclaimable<T> {
        self.out()
    }

    fn out(mut self) -> Reclaimable<T> {
        Reclaimable(self.0.take())
    }
}

impl<T> Drop for Exported<T> {
    fn drop(&mut self) {
        if let Some(memory) = self.0.take() {
            tracing::warn!("memory of a pool stays allocated: an importer may still see it");
            std::mem::forget(memory);
        }
    }
}

/// Memory that no importer sees.
#[derive(Debug)]
pub struct Reclaimable<T>(Option<T>);

impl<T> Reclaimable<T> {
    /// The memory, to be freed by being dropped.
    ///
    /// # Panics
    ///
    /// Never: it is there until it is taken here.
    #[must_use]
    pub fn reclaim(self) -> T {
        match self.0 {
            Some(memory) => memory,
            None => unreachable!("made of what was there"),
        }
    }
}

/// Memory of another process's pool, mapped here. Dropped, it stays mapped: its owner may be gone, and it with its owner
/// (O10).
#[derive(Debug)]
pub struct Imported<M>(Option<M>);

impl<M> Imported<M> {
    /// Just imported: once for each pointer (O8).
    #[must_use]
    pub(crate) fn new(mapped: M) -> Self {
        Self(Some(mapped))
    }

    /// What is mapped.
    #[must_use]
    pub fn mapped(&self) -> Option<&M> {
        self.0.as_ref()
    }

    /// No user has it any more, and what they enqueued has run: `wait` sees to that.
    #[must_use]
    pub(crate) fn idle(mut self, wait: impl FnOnce(&M)) -> Idle<M> {
        let mapped = self.0.take();
        if let Some(mapped) = &mapped {
            wait(mapped);
        }
        Idle(mapped)
    }
}

impl<M> Drop for Imported<M> {
    fn drop(&mut self) {
        std::mem::forget(self.0.take());
    }
}

/// An import that nothing runs on any more.
#[derive(Debug)]
pub struct Idle<M>(Option<M>);

impl<M> Idle<M> {
    /// Frees it: `free` returns when that is done (O6). Then it can be said, and not where it failed.
    ///
    /// # Errors
    ///
    /// What `free` answers.
    pub(crate) fn free<R>(self, free: impl FnOnce(M) -> Result<(), R>) -> Result<Freed, R> {
        if let Some(mapped) = self.0 {
            free(mapped)?;
        }
        Ok(Freed(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    fn exported(memory: &Rc<()>) -> Exported<Rc<()>> {
        let ready = Allocated::new(Rc::clone(memory)).ready(|_| Ok::<_, ()>(Some(7)));
        let (exported, event) = ready.expect("nothing fails").export();
        assert_eq!(event, Some(7));
        exported
    }

    #[test]
    fn memory_without_a_proof_stays_allocated() {
        let memory = Rc::new(());
        drop(exported(&memory));
        assert_eq!(Rc::strong_count(&memory), 2);
    }

    #[test]
    fn each_proof_gives_it_back() {
        let memory = Rc::new(());
        drop(exported(&memory).home(Home(())).reclaim());
        drop(exported(&memory).freed(Freed(())).reclaim());
        drop(exported(&memory).dead(Dead(())).reclaim());
        assert_eq!(Rc::strong_count(&memory), 1);
    }

    #[test]
    fn an_import_is_freed_after_its_work_or_never() {
        let mapped = Rc::new(());
        drop(Imported::new(Rc::clone(&mapped)));
        assert_eq!(Rc::strong_count(&mapped), 2, "dropped");
        let mut waited = false;
        let idle = Imported::new(Rc::clone(&mapped)).idle(|_| waited = true);
        let freed = idle.free(|mapped| {
            drop(mapped);
            Ok::<_, ()>(())
        });
        assert!(freed.is_ok());
        assert!(waited);
        assert_eq!(Rc::strong_count(&mapped), 2, "freed");
        let failed = Imported::new(Rc::clone(&mapped)).idle(|_| ()).free(|_| Err(()));
        assert!(failed.is_err(), "what failed is not said to be done");
    }
}
