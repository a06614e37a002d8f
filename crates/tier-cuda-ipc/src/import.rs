//! Device memory of another process, mapped here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use cuda::ipc::Shareable;
use cuda::{Buffer, Context, MemHandle, Stream};
use cuda_memory::block::{Watcher, Watchers, serial};
use cuda_memory::events::Streams;
use cuda_memory::lease::Mapped;
use cuda_memory::lock;
use rung::{Device, Fault, Handle, Reason, Refusal};

/// What an allocation is mapped by.
#[derive(Debug)]
pub(crate) enum Source {
    Legacy(MemHandle),
    Descriptor(Handle),
}

/// An allocation of another process: opened once, closed once, whoever uses it in between.
#[derive(Debug)]
pub(crate) struct Import {
    /// A number of this process's own.
    pub(crate) serial: u64,
    pub(crate) device: Device,
    /// Bytes of the whole allocation, as its owner says; held to what the driver says when it is opened.
    pub(crate) size: usize,
    /// Whether its owner's process numbers mean something here.
    is_one_namespace: bool,
    /// Opened under its lock, and closed with the last who holds it: nobody does both at once.
    state: Mutex<State>,
    /// For copies to the host: its own, so that an owner who is never done holds up nobody else's.
    reads: OnceLock<Stream>,
    /// What still has to run before it is closed.
    streams: Streams,
    owner_gone: AtomicBool,
    watchers: Watchers,
}

#[derive(Debug)]
struct State {
    source: Source,
    open: Option<Buffer>,
}

impl Import {
    pub(crate) fn new(
        device: Device,
        size: usize,
        source: Source,
        is_one_namespace: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            serial: serial(),
            device,
            size,
            is_one_namespace,
            state: Mutex::new(State { source, open: None }),
            reads: OnceLock::new(),
            streams: Streams::default(),
            owner_gone: AtomicBool::new(false),
            watchers: Watchers::default(),
        })
    }

    /// The memory: opened on the first call, which makes a context of its device where there is none.
    pub(crate) fn open(&self) -> Result<Buffer, Fault> {
        if self.owner_gone.load(Ordering::Acquire) {
            return Err(Reason::OwnerGone.into());
        }
        let mut state = lock(&self.state);
        if let Some(open) = &state.open {
            return Ok(open.clone());
        }
        let context = Context::of(self.device)?;
        let opened = match &state.source {
            Source::Legacy(handle) => handle.open(&context).map_err(|why| self.explain(why))?,
            Source::Descriptor(descriptor) => {
                let copy = descriptor.try_clone().map_err(system)?;
                Shareable::import(&context, copy, self.size)?
            }
        };
        if opened.len() < self.size {
            let detail = format!("{} bytes declared, {} there", self.size, opened.len());
            return Err(Fault::new(Reason::WrongSize, detail));
        }
        // What the driver maps beside it is nobody's business.
        let opened = opened.part(0..self.size)?;
        state.open = Some(opened.clone());
        Ok(opened)
    }

    /// What is likely behind a driver's refusal, for a person.
    fn explain(&self, why: Refusal) -> Refusal {
        if why.reason() == Reason::Driver && !self.is_one_namespace {
            return Refusal::new(Reason::Namespace, why.detail());
        }
        why
    }

    /// A stream for copies to the host.
    pub(crate) fn reads(&self) -> Result<Stream, Fault> {
        if let Some(stream) = self.reads.get() {
            return Ok(stream.clone());
        }
        let stream = Stream::new(self.open()?.context())?;
        Ok(self.reads.get_or_init(|| stream).clone())
    }

    /// Something that goes on to another process: the owner's own handle, or a descriptor.
    pub(crate) fn source(&self) -> Result<Source, Refusal> {
        if self.owner_gone.load(Ordering::Acquire) {
            return Err(Reason::OwnerGone.into());
        }
        Ok(match &lock(&self.state).source {
            Source::Legacy(handle) => Source::Legacy(*handle),
            Source::Descriptor(descriptor) => {
                Source::Descriptor(descriptor.try_clone().map_err(system)?)
            }
        })
    }

    /// Whether it goes with its owner.
    pub(crate) fn is_legacy(&self) -> bool {
        matches!(lock(&self.state).source, Source::Legacy(_))
    }

    /// Its owner is gone for sure, and a memory of the older kind with it: an error from now on, not a stale read.
    pub(crate) fn owner_is_gone(&self) {
        if self.is_legacy() && !self.owner_gone.swap(true, Ordering::AcqRel) {
            for session in self.watchers.all() {
                session.lost(self.serial);
            }
        }
    }

    /// A session lends it on, and wants to hear of its end.
    pub(crate) fn watch<W: Watcher>(&self, session: &Arc<W>) {
        self.watchers.add(session);
    }
}

fn system(error: std::io::Error) -> Refusal {
    Refusal::new(Reason::NoDescriptors, error.to_string())
}

impl Mapped for Import {
    fn device(&self) -> Device {
        self.device
    }

    fn serial(&self) -> u64 {
        self.serial
    }

    fn open(&self) -> Result<Buffer, Fault> {
        Self::open(self)
    }

    fn reads(&self) -> Result<Stream, Fault> {
        Self::reads(self)
    }

    fn streams(&self) -> &Streams {
        &self.streams
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // What is enqueued runs first: unmapping waits for nothing by itself.
        self.streams.wait();
        lock(&self.state).open = None;
        for session in self.watchers.all() {
            session.retire(self.serial);
        }
    }
}
