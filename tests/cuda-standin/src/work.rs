//! Streams and events: in order, and in deferred mode not before somebody waits.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::time::Duration;

use crate::memory::{Backing, EVENT};
use crate::state::{
    Code, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, State, is_deferred, lock,
};

#[derive(Clone)]
pub(crate) enum Place {
    Device(Arc<Backing>, usize),
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
}

/// How often somebody has to ask.
pub(crate) const PATIENCE: u32 = 20;

pub(crate) struct EventState {
    pub(crate) page: Arc<Backing>,
    pub(crate) shared: bool,
    /// On which stream it was last recorded, in this process.
    pub(crate) stream: u64,
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
    match op {
        Op::Copy { to, from, len } => {
            copied(state, &to, &from, len);
            // SAFETY: device places are within their files; host places are what the caller of the driver gave, who
            // answers for them as towards the driver. They may overlap.
            unsafe {
                let from: *const u8 = match &from {
                    Place::Device(backing, at) => backing.bytes(*at, len).as_ptr(),
                    Place::Host(at) => *at as *const u8,
                    Place::Taken(bytes) => bytes.as_ptr(),
                };
                let to: *mut u8 = match &to {
                    Place::Device(backing, at) => backing.bytes(*at, len).as_mut_ptr(),
                    Place::Host(at) => *at as *mut u8,
                    Place::Taken(_) => unreachable!("nothing is copied there"),
                };
                std::ptr::copy(from, to, len);
            }
        }
        Op::Fill { to, len, byte } => {
            if let Place::Device(backing, at) = to {
                backing.bytes(at, len).fill(byte);
            }
        }
        Op::Record { event, number } => {
            event.header().done.fetch_max(number, Ordering::Release);
        }
        Op::Free(start) => state.free(start),
        Op::Wait { .. } | Op::Call(..) => {}
    }
}

/// Runs what is enqueued on a stream, up to where an event was recorded, or all of it.
pub(crate) fn run(stream: u64, until: Option<(&Backing, u64)>) {
    loop {
        let mut state = lock();
        if until
            .is_some_and(|(event, number)| event.header().done.load(Ordering::Acquire) >= number)
        {
            return;
        }
        let Some(queue) = state.streams.get_mut(&stream).map(|stream| &mut stream.queue) else {
            return;
        };
        let Some(op) = queue.pop_front() else { return };
        match op {
            Op::Wait { event, number, stream, exporter } => {
                drop(state);
                wait(&event, number, stream, exporter);
            }
            Op::Call(function, argument) => {
                drop(state);
                // SAFETY: as the caller of the driver's function said.
                unsafe { function(argument) };
            }
            op => perform(&mut state, op),
        }
    }
}

/// Waits for an event: runs what is before it here, or has the other process do so.
fn wait(event: &Backing, number: u64, stream: u64, exporter: u32) {
    let header = event.header();
    if exporter == 0 {
        return run(stream, Some((event, number)));
    }
    header.wanted.fetch_max(number, Ordering::Release);
    while header.done.load(Ordering::Acquire) < number {
        // Of a process that is gone nothing comes any more.
        if !std::path::Path::new(&format!("/proc/{exporter}/fd")).exists() {
            return;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// In deferred mode, what other processes wait for, and what was asked for, is run by and by.
fn look_after_others() {
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
                    .filter(|event| {
                        let header = event.page.header();
                        let wanted = header.wanted.load(Ordering::Acquire);
                        header.done.load(Ordering::Acquire) < wanted
                    })
                    .map(|event| (event.stream, Arc::clone(&event.page)))
                    .collect();
                let streams: Vec<u64> = state
                    .streams
                    .iter()
                    .filter(|(_, stream)| stream.asked > PATIENCE)
                    .map(|(id, _)| *id)
                    .collect();
                drop(state);
                for (stream, page) in wanted {
                    let number = page.header().wanted.load(Ordering::Acquire);
                    run(stream, Some((&page, number)));
                }
                for stream in streams {
                    run(stream, None);
                    if let Some(stream) = lock().streams.get_mut(&stream) {
                        stream.asked = 0;
                    }
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
        state.streams.entry(id).or_insert_with(|| StreamState {
            device,
            queue: VecDeque::new(),
            asked: 0,
        });
        return Ok(id);
    }
    match state.streams.get(&handle) {
        Some(stream) if stream.device == device => Ok(handle),
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
        (Some(backing), _) => Ok(Place::Device(Arc::clone(backing), offset)),
    }
}

pub(crate) fn make_event(state: &mut State, shared: bool) -> Result<u64, Code> {
    let page = Backing::make(EVENT, 0, 1)?;
    let id = state.id() << 8;
    state.events.insert(id, EventState { page, shared, stream: 0, exporter: 0, asked: 0 });
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

/// The words of a name, and the file of it in the process that made it.
pub(crate) fn named(magic: u64, handle: &[u8; 64]) -> Result<([u64; 6], OwnedFd), Code> {
    let mut words = [0; 6];
    for (word, at) in words.iter_mut().zip(handle.chunks_exact(8)) {
        *word = u64::from_ne_bytes(at.try_into().unwrap_or_default());
    }
    let [kind, process, file, inode, ..] = words;
    if kind != magic {
        return Err(INVALID_VALUE);
    }
    if process == u64::from(std::process::id()) {
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
    state.events.insert(id, EventState { page, shared: false, stream: 0, exporter, asked: 0 });
    Ok(id)
}
