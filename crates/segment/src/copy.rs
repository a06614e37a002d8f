//! Copying into shared memory: with stores that pass the caches by where that is faster.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "streaming stores have no safe form")
)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// From here on, ordinary stores lose: the destination no longer fits a core's own cache, so each of
/// its lines is read in before it is overwritten.
///
/// Measured on warm shared mappings with 2 MiB of cache a core: at 1 MiB the two are close and the
/// receiver still finds the bytes in a cache, at 4 MiB streaming takes 0.55 of the time, at 64 MiB 0.54,
/// at 1 GiB (where the C library streams as well) 0.95.
const STREAM: usize = 4 << 20;

/// Copies from here on may be shared out among threads; below, starting one costs more than it saves.
const SHARE_OUT: usize = 128 << 20;

/// How many threads a large copy may use.
static THREADS: AtomicUsize = AtomicUsize::new(1);

/// Lets copies of 128 MiB and more use so many threads, this one included: 1 unless said otherwise.
///
/// Worth it on a machine with idle cores and memory bandwidth to spare (0.67 of the time with two, seen
/// on a quiet machine); on a busy one it takes from others and gains nothing.
pub fn set_copy_threads(threads: usize) {
    THREADS.store(threads.clamp(1, 64), Ordering::Relaxed);
}

/// Copies all of `from` to the start of `to`; what is longer in `to` stays as it is.
///
/// # Panics
///
/// Where `to` is shorter, as slices do.
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    let to = &mut to[..from.len()];
    let threads = THREADS.load(Ordering::Relaxed);
    if threads < 2 || from.len() < SHARE_OUT {
        return copy_alone(to, from);
    }
    let share = from.len().div_ceil(threads).next_multiple_of(4096);
    std::thread::scope(|scope| {
        let mut parts = to.chunks_mut(share).zip(from.chunks(share));
        let mine = parts.next();
        for (to, from) in parts {
            // Without a thread, this one has the rest to do: a part goes to whoever takes it first.
            let part = Mutex::new(Some((to, from)));
            let part = Arc::new(part);
            let other = Arc::clone(&part);
            let take = |part: &Mutex<Option<(&mut [u8], &[u8])>>| {
                let taken = part.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some((to, from)) = taken {
                    copy_alone(to, from);
                }
            };
            let spawned = std::thread::Builder::new().spawn_scoped(scope, move || take(&other));
            if spawned.is_err() {
                take(&part);
            }
        }
        if let Some((to, from)) = mine {
            copy_alone(to, from);
        }
    });
}

fn copy_alone(to: &mut [u8], from: &[u8]) {
    if from.len() >= STREAM && stream(to, from) {
        return;
    }
    to.copy_from_slice(from);
}

/// Copies with streaming stores, if this machine has them.
#[cfg(target_arch = "x86_64")]
fn stream(to: &mut [u8], from: &[u8]) -> bool {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature was just seen.
        unsafe { x86::stream_512(to, from) };
        return true;
    }
    if is_x86_feature_detected!("avx") {
        // SAFETY: the feature was just seen.
        unsafe { x86::stream_256(to, from) };
        return true;
    }
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(_to: &mut [u8], _from: &[u8]) -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    /// Four pages are written at a time, four lines of each in turn: more banks of memory at work. Against
    /// one page at a time, 0.93 of the time at 1 GiB.
    const PAGE: usize = 4096;
    const PAGES: usize = 4;
    const STEP: usize = PAGES * PAGE;
    /// Enough for the widest store.
    const LINE: usize = 64;
    const LINES: usize = 4;

    /// - **C1** `line` is called with a source and a destination that each begin `LINE` readable and
    ///   writable bytes within the slices, the destination at a multiple of `LINE`.
    #[inline(always)] // Else `line` cannot be inlined: it is compiled for more features than this.
    fn steps(to: &mut [u8], from: &[u8], line: impl Fn(*mut u8, *const u8)) {
        let from = &from[..from.len().min(to.len())];
        // Up to the first line of the destination, and past the last whole step, ordinary stores do.
        let head = to.as_ptr().align_offset(LINE).min(from.len());
        let (to_head, to_rest) = to.split_at_mut(head);
        let (from_head, from_rest) = from.split_at(head);
        to_head.copy_from_slice(from_head);
        // `to` may be longer; what is past the source stays.
        let to_rest = &mut to_rest[..from_rest.len()];
        let (to_steps, to_rest) = to_rest.as_chunks_mut::<STEP>();
        let (from_steps, from_rest) = from_rest.as_chunks::<STEP>();
        for (to, from) in to_steps.iter_mut().zip(from_steps) {
            for start in (0..PAGE).step_by(LINES * LINE) {
                for page in 0..PAGES {
                    for number in 0..LINES {
                        let at = page * PAGE + start + number * LINE;
                        line(to[at..at + LINE].as_mut_ptr(), from[at..at + LINE].as_ptr());
                    }
                }
            }
        }
        to_rest.copy_from_slice(from_rest);
    }

    /// # Safety
    ///
    /// The machine has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn stream_512(to: &mut [u8], from: &[u8]) {
        steps(to, from, |to, from| {
            // SAFETY: C1: 64 readable bytes; loads need no alignment.
            let bytes = unsafe { _mm512_loadu_si512(from.cast::<__m512i>()) };
            // SAFETY: C1: 64 writable bytes at a multiple of 64.
            unsafe { _mm512_stream_si512(to.cast::<__m512i>(), bytes) };
        });
        // Streaming stores are not ordered with others: whoever is told of the bytes must see them.
        _mm_sfence();
    }

    /// # Safety
    ///
    /// The machine has AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn stream_256(to: &mut [u8], from: &[u8]) {
        steps(to, from, |to, from| {
            for half in 0..2 {
                // SAFETY: C1: both halves of the line lie in the slice.
                let from = unsafe { from.add(32 * half) };
                // SAFETY: C1, as above.
                let to = unsafe { to.add(32 * half) };
                // SAFETY: C1: 32 readable bytes; loads need no alignment.
                let bytes = unsafe { _mm256_loadu_si256(from.cast::<__m256i>()) };
                // SAFETY: C1: 32 writable bytes at a multiple of 32.
                unsafe { _mm256_stream_si256(to.cast::<__m256i>(), bytes) };
            }
        });
        // As above.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Routine = fn(&mut [u8], &[u8]);

    fn routines() -> Vec<(&'static str, Routine)> {
        let mut all: Vec<(&str, Routine)> = vec![("portable", |to, from| {
            to[..from.len()].copy_from_slice(from);
        })];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx") {
                all.push(("256 bits", |to, from| {
                    // SAFETY: the feature was just seen.
                    unsafe { x86::stream_256(to, from) }
                }));
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(("512 bits", |to, from| {
                    // SAFETY: the feature was just seen.
                    unsafe { x86::stream_512(to, from) }
                }));
            }
        }
        all
    }

    /// Every alignment of both sides within a line, and lengths around every boundary of the routine.
    #[test]
    fn every_byte_is_copied_at_every_alignment_and_no_other() {
        const ROOM: usize = 2 * 16384 + 400;
        let from: Vec<u8> = (0..ROOM).map(|at| (at * 31 % 251) as u8 + 1).collect();
        let lengths = [0, 1, 63, 64, 65, 4095, 16383, 16384, 16385, 16447, 16448, 20480, 32831];
        for (name, routine) in routines() {
            for to_at in 0..65 {
                for from_at in [0, 1, 7, 31, 32, 33, 63, 64] {
                    for len in lengths {
                        let mut to = vec![0; ROOM];
                        routine(&mut to[to_at..], &from[from_at..from_at + len]);
                        let (before, rest) = to.split_at(to_at);
                        let (copied, after) = rest.split_at(len);
                        assert!(
                            copied == &from[from_at..from_at + len]
                                && before.iter().chain(after).all(|byte| *byte == 0),
                            "{name}: {len} bytes from {from_at} to {to_at}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn large_copies_are_whole_by_one_thread_and_by_several() {
        let len = SHARE_OUT + 12_345;
        let from: Vec<u8> = (0..len).map(|at| (at % 253) as u8).collect();
        for threads in [1, 2, 3] {
            set_copy_threads(threads);
            let mut to = vec![255; len + 10];
            copy(&mut to, &from);
            assert!(to[..len] == from && to[len..] == [255; 10], "{threads} threads");
        }
        set_copy_threads(1);
    }
}
