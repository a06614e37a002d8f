//! What this side did, for whoever wants to hold it to the contract: `tracing` events of target `pool_ipc`, level TRACE.
//!
//! Each is said when it is done and before its message leaves, so that in a log of both processes every cause comes
//! before its effect. The names are those of the steps of the model in `tests/pool-model`.

use rung::LeaseId;

/// Whether anybody listens.
pub(crate) fn are_heard() -> bool {
    tracing::enabled!(target: "pool_ipc", tracing::Level::TRACE)
}

/// Between whom, about what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Said<'a> {
    /// The process that owns the memory, and the one that imports it, by the names in their offers.
    pub(crate) owner: &'a str,
    pub(crate) importer: &'a str,
    /// The owner's number for the allocation.
    pub(crate) allocation: u64,
}

impl Said<'_> {
    /// A step under a lease.
    pub(crate) fn lease(&self, step: &str, LeaseId(lease): LeaseId, more: bool) {
        let Self { owner, importer, allocation } = self;
        tracing::trace!(target: "pool_ipc", step, owner, importer, allocation, lease, more);
    }

    /// A step of an allocation.
    pub(crate) fn step(&self, step: &str) {
        let Self { owner, importer, allocation } = self;
        tracing::trace!(target: "pool_ipc", step, owner, importer, allocation, lease = 0u64, more = false);
    }
}
