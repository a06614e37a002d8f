//! Streams and events: in order, and in deferred mode not before somebody waits.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Once};
use std::time::Duration;

use crate::memory::{Backing, EVENT};
use crate::state::{
    Code, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, State, is_deferred, lock,
};

#[derive(Clone)]
pub(crate) enum Place {
    /// Of a range of device addresses, and where that begins.
    Device(Arc<Backing>, usize, u64),
    Host(usize),
    /// What stood in host memory that is not registered, when the copy was asked for.
    Taken(Arc<[u8]>),
}

pub(crate) enum Op {
    Copy { to: Place, from: Place, len: usize },
    Fill { to: Place, len: usize, byte: u8 },
    Record { event: Arc<Backing>, number: u64 },
    Wait { event: Arc<Backing>, number: u64, stream: u64, exporter: u32 },
    Free(u64),
    Call(unsafe extern "C" fn(usize), usize),
}

pub(crate) struct StreamState {
    pub(crate) device: usize,
    pub(crate) queue: VecDeque<Op>,
    /// How often somebody asked whether it is done: whoever asks again and again sees it done by and by, and
    /// whoever asks once does not hurry it.
    pub(crate) asked: u32,
    /// Some thread runs something of it now.
    pub(crate) is_running: bool,
    /// Since when it is of nobody's, and runs by itself to its end.
    pub(crate) destroyed: Option<std::time::Instant>,
}

impl StreamState {
    pub(crate) fn new(device: usize) -> Self {
        Self { device, queue: VecDeque::new(), asked: 0, is_running: false, destroyed: None }
    }
}

/// How often somebody has to ask.
pub(crate) const PATIENCE: u32 = 20;

/// How long a stream that was destroyed does nothing, if nobody waits for what is on it.
const LINGER: Duration = Duration::from_millis(5);

pub(crate) struct EventState {
    pub(crate) page: Arc<Backing>,
    pub(crate) shared: bool,
    /// On which stream it was last recorded, in this process.
    pub(crate) stream: u64,
    /// Records that may not be done, and their streams.
    pub(crate) records: Vec<(u64, u64)>,
    /// 0 for one of this process.
    pub(crate) exporter: u32,
    pub(crate) asked: u32,
}

/// Whether host memory is registered.
pub(crate) fn is_pinned(state: &State, start: usize, len: usize) -> bool {
    let before = state.registered.range(..=start).next_back();
    before.is_some_and(|(registered, pinned)| start + len <= registered + pinned)
}

fn perform(state: &mut State, op: Op) {
    let copied = |state: &mut State, to: &Place, from: &Place, len: usize| {
        let what = match (to, from) {
            (Place::Device(..), Place::Device(..)) => crate::Count::CopiedOnDevice,
            _ => crate::Count::CopiedToHost,
        };
        state.add(what, len as u64);
        for host in [to, from] {
            if let Place::Host(at) = host
                && is_pinned(state, *at, len)
            {
                state.add(crate::Count::CopiedPinned, len as u64);
            }
        }
    };
    // Memory that was unmapped or freed meanwhile: the work faults, and the context with it.
    let places: Vec<&Place> = match &op {
        Op::Copy { to, from, .. } => vec![to, from],
        Op::Fill { to, .. } => vec![to],
        _ => Vec::new(),
    };
    let is_there = |place: &&Place| match place {
        Place::Device(backing, _, start) => state.ranges.get(start).is_some_and(|range| {
            range.backing.as_ref().is_some_and(|now| Arc::ptr_eq(now, backing))
        }),
        _ => true,
    };
    if !places.iter().all(is_there) {
        state.is_broken = true;
        return;
    }
    match op {
        Op::Copy { to, from, len } => {
            copied(state, &to, &from, len);
            // SAFETY: device places are within their files; host places are what the caller of the driver gave, who
            // answers for them as towards the driver. They may overlap.
            unsafe {
                let from: *const u8 = match &from {
                    Place::Device(backing, at, _) => backing.bytes(*at, len).as_ptr(),
                    Place::Host(at) => *at as *const u8,
                    Place::Taken(bytes) => bytes.as_ptr(),
                };
                let to: *mut u8 = match &to {
                    Place::Device(backing, at, _) => backing.bytes(*at, len).as_mut_ptr(),
                    Place::Host(at) => *at as *mut u8,
                    Place::Taken(_) => unreachable!("nothing is copied there"),
                };
                std::ptr::copy(from, to, len);
            }
        }
        Op::Fill { to, len, byte } => {
            if let Place::Device(backing, at, _) = to {
                backing.fill(at, len, byte);
            }
        }
        Op::Record { event, number } => {
            event.header().note_done(number);
        }
        Op::Free(start) => state.free(start),
        Op::Wait { .. } | Op::Call(..) => {}
    }
}

/// Runs what is enqueued on a stream, up to where an event was recorded, or all of it.
pub(crate) fn run(stream: u64, until: Option<(&Backing, u64)>) {
    loop {
        let mut state = lock();
        if until.is_some_and(|(event, number)| event.header().is_done(number)) {
            return;
        }
        let Some(queued) = state.streams.get_mut(&stream) else { return };
        if queued.is_running {
            // One after the other, whoever runs it.
            drop(state);
            std::thread::sleep(Duration::from_micros(30));
            continue;
        }
        let Some(op) = queued.queue.pop_front() else { return };
        match op {
            Op::Wait { .. } | Op::Call(..) => queued.is_running = true,
            op => {
                perform(&mut state, op);
                continue;
            }
        }
        drop(state);
        match op {
            Op::Wait { event, number, stream, exporter } => {
                wait(&event, number, stream, exporter);
            }
            // SAFETY: as the caller of the driver's function said.
            Op::Call(function, argument) => unsafe { function(argument) },
            _ => {}
        }
        if let Some(queued) = lock().streams.get_mut(&stream) {
            queued.is_running = false;
        }
    }
}

/// Waits for an event: runs what is before it here, or has the other process do so.
fn wait(event: &Backing, number: u64, stream: u64, exporter: u32) {
    let header = event.header();
    if exporter == 0 {
        return run(stream, Some((event, number)));
    }
    header.want(number);
    while !header.is_done(number) {
        // Of a process that is gone nothing comes any more.
        if !crate::memory::is_running(u64::from(exporter)) {
            return;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// In deferred mode, what other processes wait for, and what was asked for, is run by and by.
pub(crate) fn look_after_others() {
    static STARTED: Once = Once::new();
    if !is_deferred() {
        return;
    }
    STARTED.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_micros(300));
                let state = lock();
                let events = state.events.values().filter(|event| event.exporter == 0);
                let wanted: Vec<_> = events
                    .flat_map(|event| event.records.iter().map(move |record| (event, record)))
                    .filter(|(event, (number, _))| {
                        let header = event.page.header();
                        header.is_wanted(*number) && !header.is_done(*number)
                    })
                    .map(|(event, (number, stream))| (*stream, Arc::clone(&event.page), *number))
                    .collect();
                let streams: Vec<u64> = state
                    .streams
                    .iter()
                    .filter(|(_, stream)| {
                        let is_old = |since: &std::time::Instant| since.elapsed() > LINGER;
                        stream.asked > PATIENCE || stream.destroyed.as_ref().is_some_and(is_old)
                    })
                    .map(|(id, _)| *id)
                    .collect();
                drop(state);
                // Each on a thread of its own: one may wait for another process, which waits for another one here.
                for (stream, page, number) in wanted {
                    std::thread::spawn(move || run(stream, Some((&page, number))));
                }
                for stream in streams {
                    if let Some(stream) = lock().streams.get_mut(&stream) {
                        stream.asked = 0;
                    }
                    std::thread::spawn(move || {
                        run(stream, None);
                        let mut state = lock();
                        let is_gone = |known: &StreamState| known.destroyed.is_some();
                        if state.streams.get(&stream).is_some_and(is_gone) {
                            state.streams.remove(&stream);
                        }
                    });
                }
            }
        });
    });
}

/// The stream that a handle stands for, in a context: 0 is the context's own.
pub(crate) fn stream_id(state: &mut State, handle: u64, device: usize) -> Result<u64, Code> {
    // The default streams, of the legacy kind and of each thread: one each here.
    if handle <= 2 {
        let id = u64::MAX - device as u64;
        state.streams.entry(id).or_insert_with(|| StreamState::new(device));
        return Ok(id);
    }
    match state.streams.get(&handle) {
        Some(stream) if stream.device == device && stream.destroyed.is_none() => Ok(handle),
        Some(_) => Err(INVALID_HANDLE),
        None => Err(INVALID_HANDLE),
    }
}

/// Enqueues; at once, where nothing is deferred.
pub(crate) fn enqueue(mut state: std::sync::MutexGuard<'_, State>, stream: u64, op: Op) {
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.queue.push_back(op);
    }
    drop(state);
    if is_deferred() {
        look_after_others();
    } else {
        run(stream, None);
    }
}

/// Runs everything of this process.
pub(crate) fn run_all() {
    let streams: Vec<u64> = lock().streams.keys().copied().collect();
    for stream in streams {
        run(stream, None);
    }
}

/// Where a range of device addresses is, if it may be touched.
pub(crate) fn place(state: &State, address: u64, len: usize) -> Result<Place, Code> {
    use crate::memory::Kind;
    let (start, range) = state.range_of(address).ok_or(INVALID_VALUE)?;
    let offset = usize::try_from(address - start).map_err(|_| INVALID_VALUE)?;
    if offset.checked_add(len).is_none_or(|end| end > range.len) {
        return Err(INVALID_VALUE);
    }
    match (&range.backing, range.kind) {
        (Some(_), Kind::Mapped) | (None, _) => Err(ILLEGAL_ADDRESS),
        // An imported pool is nobody's to see before access is set.
        (Some(_), Kind::PoolImport)
            if !state.pools.get(&range.pool).is_some_and(|pool| pool.is_accessible) =>
        {
            Err(ILLEGAL_ADDRESS)
        }
        (Some(backing), _) => Ok(Place::Device(Arc::clone(backing), offset, start)),
    }
}

pub(crate) fn make_event(state: &mut State, shared: bool) -> Result<u64, Code> {
    let page = Backing::make(EVENT, 0, 1)?;
    let id = state.id() << 8;
    state.events.insert(
        id,
        EventState { page, shared, stream: 0, records: Vec::new(), exporter: 0, asked: 0 },
    );
    Ok(id)
}

/// An event as other processes name it: where its file is.
pub(crate) fn name(magic: u64, file: &OwnedFd, more: [u64; 2]) -> [u8; 64] {
    let mut handle = [0; 64];
    let words = [
        magic,
        u64::from(std::process::id()),
        file.as_raw_fd() as u64,
        crate::memory::inode(file),
        more[0],
        more[1],
        namespace(),
    ];
    for (at, word) in handle.chunks_exact_mut(8).zip(words) {
        at.copy_from_slice(&word.to_ne_bytes());
    }
    // What is not used is whatever was there: nobody may compare handles by their bytes.
    let anything = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.subsec_nanos());
    handle[56..60].copy_from_slice(&anything.to_ne_bytes());
    handle
}

/// The pid namespace of this process.
fn namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// The words of a name, and the file of it in the process that made it.
pub(crate) fn named(magic: u64, handle: &[u8; 64]) -> Result<([u64; 7], OwnedFd), Code> {
    let mut words = [0; 7];
    for (word, at) in words.iter_mut().zip(handle.chunks_exact(8)) {
        *word = u64::from_ne_bytes(at.try_into().unwrap_or_default());
    }
    let [kind, process, file, inode, _, _, space] = words;
    if kind != magic {
        return Err(INVALID_VALUE);
    }
    // Process numbers of another namespace mean nothing here.
    if process == u64::from(std::process::id()) || space != namespace() {
        return Err(crate::state::INVALID_CONTEXT);
    }
    if !std::path::Path::new(&format!("/proc/{process}")).exists() {
        return Err(INVALID_HANDLE);
    }
    let path = format!("/proc/{process}/fd/{file}\0");
    // SAFETY: a path that ends with a zero.
    let opened = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
    if opened < 0 {
        return Err(crate::state::INVALID_CONTEXT);
    }
    // SAFETY: just opened.
    let opened = unsafe { OwnedFd::from_raw_fd(opened) };
    // Another file by the same number: that one is closed.
    if crate::memory::inode(&opened) != inode {
        return Err(INVALID_HANDLE);
    }
    Ok((words, opened))
}

pub(crate) fn open_event(state: &mut State, handle: &[u8; 64]) -> Result<u64, Code> {
    let (words, file) = named(EVENT, handle)?;
    let page = Backing::open(file, EVENT).ok_or(INVALID_HANDLE)?;
    let exporter = u32::try_from(words[1]).map_err(|_| INVALID_VALUE)?;
    let id = state.id() << 8;
    state.events.insert(
        id,
        EventState { page, shared: false, stream: 0, records: Vec::new(), exporter, asked: 0 },
    );
    Ok(id)
}
