//! The driver's functions.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::memory::{
    Backing, Kind, LEGACY, POOL, Range, SHAREABLE, is_running, reserve, unreserve,
};
use crate::state::{
    ALREADY_REGISTERED, Code, GRANULARITY, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE,
    INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, NOT_READY, NOT_REGISTERED, NOT_SUPPORTED, OK,
    OUT_OF_MEMORY, PEER_ACCESS_UNSUPPORTED, PHYSICAL, Physical, Pool, State, current, fault,
    is_deferred, lock, pop, push, set,
};
use crate::work::{
    Op, PATIENCE, Place, StreamState, enqueue, is_pinned, look_after_others, make_event, name,
    named, open_event, place, run, run_all, stream_id,
};
use crate::{Count, NAME};

/// Writes through a pointer that the caller of a driver's function gave.
macro_rules! give {
    ($to:expr, $value:expr) => {{
        let to = $to;
        if to.is_null() {
            return INVALID_VALUE;
        }
        // SAFETY: the caller says that something of this type can be written there, as to the driver.
        unsafe { to.write($value) }
    }};
}

/// What is in a result, or its code as the answer.
macro_rules! have {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(code) => return code,
        }
    };
}

/// What names an event or an allocation: passed by value.
#[repr(C)]
pub struct Name([u8; 64]);

#[unsafe(no_mangle)]
pub static cuda_cpu_standin_marker: u8 = 1;

#[unsafe(no_mangle)]
pub extern "C" fn cuda_cpu_standin_count(what: u32) -> u64 {
    let state = lock();
    let counted = state.counts.get(what as usize).copied().unwrap_or(0);
    let imports = |range: &Range| match range.kind {
        Kind::Import(opened) => u64::from(opened),
        _ => 0,
    };
    match what {
        what if what == Count::Ranges as u32 => state.ranges.len() as u64,
        what if what == Count::OpenImports as u32 => state.ranges.values().map(imports).sum(),
        what if what == Count::Events as u32 => state.events.len() as u64,
        what if what == Count::Streams as u32 => state.streams.len() as u64,
        what if what == Count::Handles as u32 => state.physical.len() as u64,
        what if what == Count::Registered as u32 => state.registered.len() as u64,
        _ => counted,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> Code {
    if flags != 0 {
        return INVALID_VALUE;
    }
    if std::env::var("CUDA_CPU_STANDIN").as_deref() != Ok("1") || fault("no-device") {
        return NO_DEVICE;
    }
    let mut state = lock();
    if state.process == 0 {
        let all: Vec<usize> = (0..PHYSICAL).collect();
        // As the driver: up to the first that is none.
        state.visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => list
                .split(',')
                .map_while(|number| number.trim().parse().ok().filter(|n| all.contains(n)))
                .collect(),
            Err(_) => all,
        };
        state.retained = vec![0; state.visible.len()];
        state.process = std::process::id();
        state.next = 1 << 16;
    }
    if state.process != std::process::id() {
        return NOT_INITIALIZED;
    }
    if state.visible.is_empty() { NO_DEVICE } else { OK }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    give!(version, if fault("old") { 11_000 } else { 12_080 });
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    let state = have!(State::here());
    give!(count, state.visible.len() as c_int);
    OK
}

fn number(device: c_int) -> Result<usize, Code> {
    let state = State::here()?;
    usize::try_from(device)
        .ok()
        .filter(|device| *device < state.visible.len())
        .ok_or(INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    have!(number(ordinal));
    give!(device, ordinal);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Code {
    have!(number(device));
    let Ok(room) = usize::try_from(len) else { return INVALID_VALUE };
    let bytes = NAME.bytes().take(room.saturating_sub(1)).chain([0]);
    for (at, byte) in bytes.enumerate() {
        // SAFETY: the caller says that there is so much room.
        unsafe { name.add(at).write(byte.cast_signed()) };
    }
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> Code {
    let device = have!(number(device));
    let physical = have!(State::here()).visible[device];
    let mut bytes = *b"CPU-STAND-IN-000";
    bytes[15] = b'0' + physical as u8;
    if fault("wrong-uuid") {
        bytes[13..15].copy_from_slice(b"XX");
    }
    give!(uuid, bytes);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> Code {
    // SAFETY: as asked of the caller.
    unsafe { cuDeviceGetUuid_v2(uuid, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    device: c_int,
) -> Code {
    have!(number(device));
    let yes = match attribute {
        // Virtual memory management, and its descriptors.
        102 | 103 => !fault("no-vmm"),
        // Unified addressing, pools.
        41 | 115 => true,
        // Kinds of handles of pools: the bit of POSIX descriptors.
        119 => !fault("no-pool-handles"),
        // Events for other processes.
        125 => !fault("no-events"),
        // Compute capability, PCI numbers: none of any device.
        _ => false,
    };
    give!(value, c_int::from(yes));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> Code {
    have!(number(device));
    give!(bytes, 8 << 30);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, one: c_int, other: c_int) -> Code {
    have!(number(one));
    have!(number(other));
    give!(can, 0);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> Code {
    let device = have!(number(device));
    let state = have!(State::here());
    give!(flags, 0);
    give!(active, c_int::from(state.retained[device] > 0));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> Code {
    let device = have!(number(device));
    let mut state = have!(State::here());
    if state.retained[device] == 0 {
        state.add(Count::ContextsMade, 1);
    }
    state.retained[device] += 1;
    give!(context, device + 1);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Code {
    let device = have!(number(device));
    let mut state = have!(State::here());
    if state.retained[device] == 1 {
        // Its work runs before it goes; meanwhile it is there.
        drop(state);
        run_all();
        state = lock();
    }
    let Some(left) = state.retained[device].checked_sub(1) else { return INVALID_CONTEXT };
    state.retained[device] = left;
    if left == 0 {
        // What is left of a context goes with it, at once: somebody may be about to have it again.
        let left: Vec<u64> = state
            .ranges
            .iter()
            .filter(|(_, range)| range.device == device && range.kind.is_of_a_context())
            .map(|(start, _)| *start)
            .collect();
        for start in left {
            state.free(start);
        }
        state.streams.retain(|_, stream| stream.device != device);
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: usize) -> Code {
    let state = have!(State::here());
    if context == 0 || state.retained.get(context - 1).is_none_or(|retained| *retained == 0) {
        return INVALID_CONTEXT;
    }
    push(context);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> Code {
    let _here = have!(State::here());
    let Some(popped) = pop() else { return INVALID_CONTEXT };
    give!(context, popped);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> Code {
    let _here = have!(State::here());
    set(context);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Code {
    let _here = have!(State::here());
    give!(context, current());
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Code {
    drop(have!(State::in_context()));
    run_all();
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut u64, _flags: c_uint) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = state.id() << 8;
    state.streams.insert(id, StreamState::new(device));
    give!(stream, id);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: u64) -> Code {
    let (mut state, device) = have!(State::in_context());
    if stream <= 2 {
        return INVALID_HANDLE;
    }
    let id = have!(stream_id(&mut state, stream, device));
    // What was enqueued still runs, by and by.
    match state.streams.get_mut(&id) {
        Some(stream) if is_deferred() && !stream.queue.is_empty() => {
            stream.destroyed = Some(std::time::Instant::now());
            drop(state);
            look_after_others();
        }
        _ => drop(state.streams.remove(&id)),
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: u64) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    drop(state);
    run(id, None);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: u64) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    let Some(stream) = state.streams.get_mut(&id) else { return INVALID_HANDLE };
    if stream.queue.is_empty() && !stream.is_running {
        return OK;
    }
    stream.asked += 1;
    NOT_READY
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    let Some(known) = state.events.get(&event) else { return INVALID_HANDLE };
    let number = known.page.header().recorded.load(Ordering::Acquire);
    let op = Op::Wait {
        event: Arc::clone(&known.page),
        number,
        stream: known.stream,
        exporter: known.exporter,
    };
    enqueue(state, id, op);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    stream: u64,
    function: unsafe extern "C" fn(usize),
    argument: usize,
) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    enqueue(state, id, Op::Call(function, argument));
    OK
}

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut u64, flags: c_uint) -> Code {
    let (mut state, _) = have!(State::in_context());
    let shared = flags & INTERPROCESS != 0;
    if shared && flags & DISABLE_TIMING == 0 {
        return INVALID_VALUE;
    }
    if shared && fault("no-events") {
        return NOT_SUPPORTED;
    }
    give!(event, have!(make_event(&mut state, shared)));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: u64) -> Code {
    let mut state = have!(State::here());
    let Some(gone) = state.events.remove(&event) else { return INVALID_HANDLE };
    // What waits for it has the page, and is served to the end.
    if gone.exporter == 0 {
        gone.page.free();
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: u64, stream: u64) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    let Some(known) = state.events.get_mut(&event) else { return INVALID_HANDLE };
    if known.exporter != 0 {
        return INVALID_HANDLE;
    }
    known.stream = id;
    let page = Arc::clone(&known.page);
    let number = page.header().recorded.fetch_add(1, Ordering::AcqRel) + 1;
    known.records.retain(|(number, _)| !page.header().is_done(*number));
    known.records.push((number, id));
    enqueue(state, id, Op::Record { event: page, number });
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: u64) -> Code {
    let mut state = have!(State::here());
    let Some(known) = state.events.get_mut(&event) else { return INVALID_HANDLE };
    known.asked += 1;
    let asked = known.asked;
    let header = known.page.header();
    let recorded = header.recorded.load(Ordering::Acquire);
    if header.is_done(recorded) {
        return OK;
    }
    if asked > PATIENCE {
        header.want(recorded);
    }
    NOT_READY
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: u64) -> Code {
    let state = have!(State::here());
    let Some(known) = state.events.get(&event) else { return INVALID_HANDLE };
    let (page, stream, exporter) = (Arc::clone(&known.page), known.stream, known.exporter);
    drop(state);
    let number = page.header().recorded.load(Ordering::Acquire);
    if exporter == 0 {
        run(stream, Some((&page, number)));
        return OK;
    }
    page.header().want(number);
    while !page.header().is_done(number) {
        if !is_running(u64::from(exporter)) {
            return INVALID_HANDLE;
        }
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetEventHandle(handle: *mut [u8; 64], event: u64) -> Code {
    let state = have!(State::here());
    let Some(known) = state.events.get(&event) else { return INVALID_HANDLE };
    if !known.shared {
        return INVALID_VALUE;
    }
    give!(handle, name(crate::memory::EVENT, known.page.file(), [0; 2]));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenEventHandle(event: *mut u64, handle: Name) -> Code {
    let (mut state, _) = have!(State::in_context());
    if fault("no-events") {
        return NOT_SUPPORTED;
    }
    give!(event, have!(open_event(&mut state, &handle.0)));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> Code {
    let (mut state, device) = have!(State::in_context());
    give!(address, have!(state.allocate(device, len, Kind::Plain)));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocManaged(address: *mut u64, len: usize, _flags: c_uint) -> Code {
    let (mut state, device) = have!(State::in_context());
    give!(address, have!(state.allocate(device, len, Kind::Managed)));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, len: usize, stream: u64) -> Code {
    let (mut state, device) = have!(State::in_context());
    have!(stream_id(&mut state, stream, device));
    give!(address, have!(state.allocate(device, len, Kind::StreamOrdered)));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> Code {
    let (state, _) = have!(State::in_context());
    let kind = state.ranges.get(&address).map(|range| range.kind);
    drop(state);
    match kind {
        Some(Kind::Plain | Kind::Managed) => run_all(),
        // Of a pool's memory nothing is waited for.
        Some(Kind::StreamOrdered | Kind::PoolImport) => {}
        _ => return INVALID_VALUE,
    }
    lock().free(address);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: u64, stream: u64) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    match state.ranges.get(&address).map(|range| range.kind) {
        Some(Kind::PoolImport) if fault("no-free") => INVALID_VALUE,
        Some(Kind::StreamOrdered | Kind::PoolImport) => {
            enqueue(state, id, Op::Free(address));
            OK
        }
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut u64,
    size: *mut usize,
    address: u64,
) -> Code {
    let state = have!(State::here());
    let Some((start, range)) = state.range_of(address) else { return INVALID_VALUE };
    give!(base, start);
    give!(size, range.len);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_uint,
    address: u64,
) -> Code {
    let state = have!(State::here());
    let Some((start, range)) = state.range_of(address) else { return INVALID_VALUE };
    let is_capable = range.kind == Kind::Plain && !fault("no-legacy");
    match attribute {
        2 => give!(data.cast::<c_uint>(), 2),
        7 => give!(data.cast::<u64>(), range.buffer_id),
        8 => give!(data.cast::<c_uint>(), c_uint::from(range.kind == Kind::Managed)),
        9 => give!(data.cast::<c_int>(), range.device as c_int),
        10 => give!(data.cast::<c_uint>(), c_uint::from(is_capable)),
        11 => give!(data.cast::<u64>(), start),
        12 => give!(data.cast::<usize>(), range.len),
        _ => return INVALID_VALUE,
    }
    OK
}

fn copy(to: Result<Place, Code>, from: Result<Place, Code>, len: usize, stream: u64) -> Code {
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    let (to, mut from) = (have!(to), have!(from));
    // As the driver: host memory that it does not know is read before it returns, and written before it returns.
    let mut at_once = false;
    match (&to, &from) {
        (Place::Host(start), _) => at_once = !is_pinned(&state, *start, len),
        (_, Place::Host(start)) if !is_pinned(&state, *start, len) => {
            // SAFETY: the caller says that so much can be read there.
            let bytes = unsafe { std::slice::from_raw_parts(*start as *const u8, len) };
            from = Place::Taken(bytes.into());
        }
        _ => {}
    }
    enqueue(state, id, Op::Copy { to, from, len });
    if at_once {
        run(id, None);
    }
    OK
}

fn on_device(address: u64, len: usize) -> Result<Place, Code> {
    place(&*State::here()?, address, len)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    len: usize,
    stream: u64,
) -> Code {
    copy(Ok(Place::Host(to as usize)), on_device(from, len), len, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    len: usize,
    stream: u64,
) -> Code {
    copy(on_device(to, len), Ok(Place::Host(from as usize)), len, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> Code {
    copy(on_device(to, len), on_device(from, len), len, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(to: u64, byte: u8, len: usize, stream: u64) -> Code {
    let to = have!(on_device(to, len));
    let (mut state, device) = have!(State::in_context());
    let id = have!(stream_id(&mut state, stream, device));
    enqueue(state, id, Op::Fill { to, len, byte });
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: u64) -> Code {
    let (state, _) = have!(State::in_context());
    // The whole allocation's, whatever address in it is asked for.
    let Some((_, range)) = state.range_of(address) else { return INVALID_VALUE };
    let Some(backing) = &range.backing else { return INVALID_VALUE };
    if range.kind != Kind::Plain || fault("no-legacy") {
        return INVALID_VALUE;
    }
    give!(handle, name(LEGACY, backing.file(), [range.len as u64, range.buffer_id]));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    address: *mut u64,
    handle: Name,
    _flags: c_uint,
) -> Code {
    let (mut state, device) = have!(State::in_context());
    if fault("unknown-code") {
        return 4242;
    }
    if fault("no-open") {
        return INVALID_CONTEXT;
    }
    let (words, file) = have!(named(LEGACY, &handle.0));
    let Some(mut backing) = Backing::open(file, LEGACY) else { return INVALID_HANDLE };
    if backing.physical_device() != state.visible[device] {
        return PEER_ACCESS_UNSUPPORTED;
    }
    let known = state
        .ranges
        .iter_mut()
        .find(|(_, range)| matches!(range.kind, Kind::Import(_)) && range.inode == words[3]);
    if let Some((start, Range { kind: Kind::Import(opened), .. })) = known {
        *opened += 1;
        give!(address, *start);
        return OK;
    }
    let len = backing.len();
    if fault("corrupt") {
        backing = have!(Backing::make(LEGACY, 0, len));
    }
    let start = have!(reserve(len));
    backing.note_open(true);
    let buffer_id = state.id();
    let kind = Kind::Import(1);
    let range =
        Range { len, device, kind, backing: Some(backing), buffer_id, inode: words[3], pool: 0 };
    state.ranges.insert(start, range);
    state.add(Count::ImportsMade, 1);
    give!(address, start);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(address: u64) -> Code {
    let (mut state, _) = have!(State::in_context());
    match state.ranges.get_mut(&address).map(|range| &mut range.kind) {
        Some(Kind::Import(opened)) => *opened -= 1,
        _ => return INVALID_VALUE,
    }
    if state.ranges.get(&address).is_some_and(|range| range.kind == Kind::Import(0)) {
        state.free(address);
    }
    OK
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_uint,
    id: c_int,
}

#[repr(C)]
pub struct Props {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

#[repr(C)]
pub struct Access {
    location: Location,
    flags: c_uint,
}

const POSIX_DESCRIPTOR: c_uint = 1;

/// The device of properties that are in order.
fn checked(props: *const Props) -> Result<usize, Code> {
    if props.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller says that it is one.
    let props = unsafe { &*props };
    if props.kind != 1 || props.location.kind != 1 || !props.win32.is_null() {
        return Err(INVALID_VALUE);
    }
    if fault("no-vmm") {
        return Err(NOT_SUPPORTED);
    }
    number(props.location.id)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    props: *const Props,
    _option: c_uint,
) -> Code {
    have!(checked(props));
    give!(granularity, GRANULARITY);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    len: usize,
    props: *const Props,
    flags: u64,
) -> Code {
    let device = have!(checked(props));
    let mut state = have!(State::here());
    if flags != 0 || len == 0 || !len.is_multiple_of(GRANULARITY) {
        return INVALID_VALUE;
    }
    if fault("no-memory") || len > 1 << 40 {
        return OUT_OF_MEMORY;
    }
    let backing = have!(Backing::make(SHAREABLE, state.visible[device], len));
    // SAFETY: looked at above.
    let exportable = unsafe { (*props).handle_types } & POSIX_DESCRIPTOR != 0;
    let id = state.id();
    state.physical.insert(id, Physical { backing, exportable });
    give!(handle, id);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> Code {
    let mut state = have!(State::here());
    state.physical.remove(&handle).map_or(INVALID_VALUE, |_| OK)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    props: *mut Props,
    handle: u64,
) -> Code {
    let state = have!(State::here());
    let Some(physical) = state.physical.get(&handle) else { return INVALID_VALUE };
    let device = physical.backing.physical_device();
    let Some(id) = state.visible.iter().position(|visible| *visible == device) else {
        return INVALID_DEVICE;
    };
    let location = Location { kind: 1, id: id as c_int };
    let (kind, handle_types, win32, flags) = (1, POSIX_DESCRIPTOR, std::ptr::null_mut(), [0; 8]);
    give!(props, Props { kind, handle_types, location, win32, flags });
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    descriptor: *mut c_int,
    handle: u64,
    kind: c_uint,
    flags: u64,
) -> Code {
    let state = have!(State::here());
    let Some(physical) = state.physical.get(&handle) else { return INVALID_VALUE };
    if kind != POSIX_DESCRIPTOR || flags != 0 || !physical.exportable {
        return INVALID_VALUE;
    }
    let Ok(copy) = physical.backing.file().try_clone() else { return OUT_OF_MEMORY };
    give!(descriptor, copy.into_raw_fd());
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut u64,
    descriptor: usize,
    kind: c_uint,
) -> Code {
    let (mut state, _) = have!(State::in_context());
    if kind != POSIX_DESCRIPTOR || fault("no-import") {
        return INVALID_VALUE;
    }
    let Ok(number) = c_int::try_from(descriptor) else { return INVALID_VALUE };
    // SAFETY: the caller says that it is open; it stays the caller's, since a copy is made.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return INVALID_VALUE;
    }
    // SAFETY: just made.
    let file = unsafe { OwnedFd::from_raw_fd(copy) };
    debug_assert!(file.as_raw_fd() >= 0);
    let Some(mut backing) = Backing::open(file, SHAREABLE) else { return INVALID_VALUE };
    if !state.visible.contains(&backing.physical_device()) {
        return INVALID_DEVICE;
    }
    if fault("corrupt-import") {
        backing = have!(Backing::make(SHAREABLE, backing.physical_device(), backing.len()));
    }
    let id = state.id();
    state.physical.insert(id, Physical { backing, exportable: true });
    state.add(Count::HandlesImported, 1);
    give!(handle, id);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    len: usize,
    _alignment: usize,
    _fixed: u64,
    _flags: u64,
) -> Code {
    let (mut state, device) = have!(State::in_context());
    if len == 0 || !len.is_multiple_of(GRANULARITY) {
        return INVALID_VALUE;
    }
    let start = have!(reserve(len));
    let buffer_id = state.id();
    let range =
        Range { len, device, kind: Kind::Reserved, backing: None, buffer_id, inode: 0, pool: 0 };
    state.ranges.insert(start, range);
    give!(address, start);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(address: u64, len: usize) -> Code {
    let mut state = have!(State::here());
    match state.ranges.get(&address) {
        Some(range) if range.kind == Kind::Reserved && range.len == len => {}
        _ => return INVALID_VALUE,
    }
    state.ranges.remove(&address);
    unreserve(address, len);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(
    address: u64,
    len: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> Code {
    let mut state = have!(State::here());
    let Some(physical) = state.physical.get(&handle) else { return INVALID_VALUE };
    let backing = Arc::clone(&physical.backing);
    let Some(range) = state.ranges.get_mut(&address) else { return INVALID_VALUE };
    // One allocation in one reservation: what is called here needs no more.
    if offset != 0 || flags != 0 || range.kind != Kind::Reserved {
        return INVALID_VALUE;
    }
    if range.len != len || backing.len() != len {
        return INVALID_VALUE;
    }
    (range.kind, range.backing) = (Kind::Mapped, Some(backing));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(
    address: u64,
    len: usize,
    access: *const Access,
    count: usize,
) -> Code {
    let mut state = have!(State::here());
    if access.is_null() || count != 1 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller says that there is one.
    let access = unsafe { &*access };
    let Ok(device) = usize::try_from(access.location.id) else { return INVALID_DEVICE };
    let Some(visible) = state.visible.get(device).copied() else { return INVALID_DEVICE };
    let Some(range) = state.ranges.get_mut(&address) else { return INVALID_VALUE };
    let Some(backing) = &range.backing else { return INVALID_VALUE };
    if range.len != len || access.location.kind != 1 || access.flags != 3 {
        return INVALID_VALUE;
    }
    // Devices that cannot reach each other.
    if backing.physical_device() != visible {
        return INVALID_DEVICE;
    }
    range.kind = Kind::Accessible;
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(address: u64, len: usize) -> Code {
    let state = have!(State::here());
    match state.ranges.get(&address) {
        Some(range)
            if matches!(range.kind, Kind::Mapped | Kind::Accessible) && range.len == len => {}
        _ => return INVALID_VALUE,
    }
    drop(state);
    // As the driver: it waits for nothing.
    if let Some(range) = lock().ranges.get_mut(&address) {
        (range.kind, range.backing) = (Kind::Reserved, None);
    }
    OK
}

#[repr(C)]
pub struct PoolProps {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32: *mut c_void,
    max_size: usize,
    reserved: [u8; 56],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolCreate(pool: *mut u64, props: *const PoolProps) -> Code {
    if props.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller says that it is one.
    let props = unsafe { &*props };
    let is_one = props.kind == 1 && props.location.kind == 1 && props.win32.is_null();
    // What is reserved may come to mean something.
    if !is_one || props.max_size != 0 || props.reserved.iter().any(|byte| *byte != 0) {
        return INVALID_VALUE;
    }
    let device = have!(number(props.location.id));
    let mut state = have!(State::here());
    let backing = have!(Backing::make(POOL, state.visible[device], 1));
    let id = state.id() << 8;
    let is_exportable = props.handle_types & POSIX_DESCRIPTOR != 0;
    let made = Pool {
        device,
        backing,
        is_exportable,
        was_exported: false,
        is_imported: false,
        is_accessible: true,
    };
    state.pools.insert(id, made);
    give!(pool, id);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolDestroy(pool: u64) -> Code {
    let mut state = have!(State::here());
    state.pools.remove(&pool).map_or(INVALID_VALUE, |_| OK)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolSetAccess(
    pool: u64,
    access: *const Access,
    count: usize,
) -> Code {
    let mut state = have!(State::here());
    if access.is_null() || count != 1 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller says that there is one.
    let access = unsafe { &*access };
    let Some(pool) = state.pools.get_mut(&pool) else { return INVALID_VALUE };
    if usize::try_from(access.location.id) != Ok(pool.device) || access.flags != 3 {
        return INVALID_DEVICE;
    }
    pool.is_accessible = true;
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolExportToShareableHandle(
    descriptor: *mut c_int,
    pool: u64,
    kind: c_uint,
    flags: u64,
) -> Code {
    let mut state = have!(State::here());
    let Some(pool) = state.pools.get_mut(&pool) else { return INVALID_VALUE };
    if kind != POSIX_DESCRIPTOR || flags != 0 || !pool.is_exportable || pool.is_imported {
        return INVALID_VALUE;
    }
    let Ok(copy) = pool.backing.file().try_clone() else { return OUT_OF_MEMORY };
    pool.was_exported = true;
    give!(descriptor, copy.into_raw_fd());
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolImportFromShareableHandle(
    pool: *mut u64,
    descriptor: usize,
    kind: c_uint,
    flags: u64,
) -> Code {
    let (mut state, device) = have!(State::in_context());
    let Ok(number) = c_int::try_from(descriptor) else { return INVALID_VALUE };
    if kind != POSIX_DESCRIPTOR || flags != 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller says that it is open; it stays the caller's, since a copy is made.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return INVALID_VALUE;
    }
    // SAFETY: just made.
    let file = unsafe { OwnedFd::from_raw_fd(copy) };
    let Some(backing) = Backing::open(file, POOL) else { return INVALID_VALUE };
    if backing.physical_device() != state.visible[device] {
        return INVALID_DEVICE;
    }
    let id = state.id() << 8;
    let imported = Pool {
        device,
        backing,
        is_exportable: false,
        was_exported: false,
        is_imported: true,
        is_accessible: false,
    };
    state.pools.insert(id, imported);
    give!(pool, id);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocFromPoolAsync(
    address: *mut u64,
    len: usize,
    pool: u64,
    stream: u64,
) -> Code {
    let (mut state, device) = have!(State::in_context());
    have!(stream_id(&mut state, stream, device));
    match state.pools.get(&pool) {
        Some(known) if !known.is_imported && known.device == device => {}
        _ => return INVALID_VALUE,
    }
    let start = have!(state.allocate(device, len, Kind::StreamOrdered));
    if let Some(range) = state.ranges.get_mut(&start) {
        range.pool = pool;
    }
    give!(address, start);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolExportPointer(data: *mut Name, address: u64) -> Code {
    let state = have!(State::here());
    let Some(range) = state.ranges.get(&address) else { return INVALID_VALUE };
    // The pool first: a pointer means nothing without it.
    let pool = state.pools.get(&range.pool).filter(|pool| pool.was_exported);
    let (Some(pool), Some(backing)) = (pool, &range.backing) else { return INVALID_VALUE };
    let pool = crate::memory::inode(pool.backing.file());
    give!(data, Name(name(LEGACY, backing.file(), [range.len as u64, pool])));
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolImportPointer(
    address: *mut u64,
    pool: u64,
    data: *mut Name,
) -> Code {
    let (mut state, device) = have!(State::in_context());
    if data.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller says that there is one.
    let (words, file) = have!(named(LEGACY, unsafe { &(*data).0 }));
    let of = match state.pools.get(&pool) {
        Some(known) if known.is_imported => crate::memory::inode(known.backing.file()),
        _ => return INVALID_VALUE,
    };
    let Some(mut backing) = Backing::open(file, LEGACY) else { return INVALID_VALUE };
    let is_open = |range: &Range| range.kind == Kind::PoolImport && range.inode == words[3];
    // Twice is a known fault of drivers': nothing to count on.
    if words[5] != of || state.ranges.values().any(is_open) {
        return INVALID_VALUE;
    }
    let len = backing.len();
    let start = have!(reserve(len));
    backing.note_open(true);
    // Drivers are known to map something else, without a word, where an allocation is larger.
    if fault("corrupt-pool") || len > 4096 << 20 {
        let wrong = have!(Backing::make(LEGACY, backing.physical_device(), len));
        wrong.note_open(true);
        backing.note_open(false);
        backing = wrong;
    }
    let buffer_id = state.id();
    let (kind, backing, inode) = (Kind::PoolImport, Some(backing), words[3]);
    state.ranges.insert(start, Range { len, device, kind, backing, buffer_id, inode, pool });
    give!(address, start);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(start: usize, len: usize, _flags: c_uint) -> Code {
    let (mut state, _) = have!(State::in_context());
    if start == 0 || len == 0 {
        return INVALID_VALUE;
    }
    if fault("no-register") {
        return NOT_SUPPORTED;
    }
    let before = state.registered.range(..start + len).next_back();
    if before.is_some_and(|(other, bytes)| other + bytes > start) {
        return ALREADY_REGISTERED;
    }
    state.registered.insert(start, len);
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(start: usize) -> Code {
    let mut state = have!(State::here());
    state.registered.remove(&start).map_or(NOT_REGISTERED, |_| OK)
}

// For `cudarc`, which tests hand memory back and forth with.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Code {
    let (_state, current) = have!(State::in_context());
    give!(device, current as c_int);
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(_code: Code, text: *mut *const c_char) -> Code {
    give!(text, c"STAND_IN".as_ptr());
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_code: Code, text: *mut *const c_char) -> Code {
    give!(text, c"an error of the stand-in".as_ptr());
    OK
}
