//! The framing itself, without any I/O: what the fuzzer drives.

use std::collections::VecDeque;

use rung::limits::{FRAME_BYTES, FRAME_HANDLES};
use rung::{Fault, Handle, Reason};

/// Bytes before the JSON: `[u32 length][u16 descriptors]`, big endian.
pub const PREFIX: usize = 6;

/// Bytes of a handle's name in a frame, where the platform has no descriptors that ride it: its number in the process
/// that receives it, or in the one that sends it, whichever of the two was started by the other. They come between the
/// prefix and the text.
const NAME: usize = crate::sys::NAME;

/// What is read at a time, and kept while the link is idle.
const CHUNK: usize = 64 << 10;

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    /// The JSON text: valid UTF-8, but not yet read as JSON.
    pub json: String,
    /// The descriptors that came with it, in order.
    pub handles: VecDeque<Handle>,
}

/// The prefix of a frame.
///
/// # Errors
///
/// A fault where the frame is over a cap or empty.
pub fn prefix(json: &str, handles: usize) -> Result<[u8; PREFIX], Fault> {
    check(json.len(), handles)?;
    let mut prefix = [0; PREFIX];
    // Both fit: the caps are far below.
    prefix[..4].copy_from_slice(&(json.len() as u32).to_be_bytes());
    prefix[4..].copy_from_slice(&(handles as u16).to_be_bytes());
    Ok(prefix)
}

/// The caps, for both sides.
fn check(length: usize, handles: usize) -> Result<(), Fault> {
    if length == 0 {
        return Err(Fault::new(Reason::BadMetadata, "an empty frame"));
    }
    if length > FRAME_BYTES {
        return Err(Fault::new(
            Reason::OverCap,
            format!("a frame of {length} bytes, at most {FRAME_BYTES}"),
        ));
    }
    if handles > FRAME_HANDLES {
        return Err(Fault::new(
            Reason::OverCap,
            format!("{handles} descriptors in a frame, at most {FRAME_HANDLES}"),
        ));
    }
    Ok(())
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

/// Bytes and descriptors in, frames out.
///
/// Invariants between calls of [`Self::next_frame`]:
///
/// - **F1** `start <= filled <= buffer.len()`, and `buffer[start..filled]` is what came and is in no
///   frame yet.
/// - **F2** `handles` are what came and are in no frame yet: of the frames begun in
///   `buffer[start..filled]`, in order.
#[derive(Debug)]
pub struct Decoder {
    /// Bytes of a handle's name: none where they ride the frame.
    name: usize,
    /// Bytes of a frame's JSON, at most.
    limit: usize,
    buffer: Vec<u8>,
    start: usize,
    filled: usize,
    handles: VecDeque<Handle>,
}

impl Decoder {
    /// With nothing in it.
    #[must_use]
    pub fn new() -> Self {
        Self::naming(NAME)
    }

    fn naming(name: usize) -> Self {
        Self {
            name,
            limit: FRAME_BYTES,
            buffer: Vec::new(),
            start: 0,
            filled: 0,
            handles: VecDeque::new(),
        }
    }

    /// Takes no next frame larger than this: for peers that have yet to say who they are. Those after it are
    /// limited as ever, since they may have come along with it.
    pub fn limit_next(&mut self, bytes: usize) {
        self.limit = bytes.min(FRAME_BYTES);
    }

    /// Room for what comes next: to be filled from the front, then told to [`Self::filled`].
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.filled {
            (self.start, self.filled) = (0, 0);
            // One large frame does not make the link large for ever.
            if self.buffer.len() > 16 * CHUNK {
                self.buffer.truncate(CHUNK);
                self.buffer.shrink_to_fit();
            }
        }
        if self.buffer.len() - self.filled < CHUNK {
            self.buffer.copy_within(self.start..self.filled, 0);
            (self.start, self.filled) = (0, self.filled - self.start);
            // Doubling, so that a frame of n bytes is copied O(n) in all; the cap on a frame's
            // length, checked in `next_frame`, bounds it.
            let wanted = (2 * self.filled).max(self.filled + CHUNK);
            if self.buffer.len() < wanted {
                self.buffer.resize(wanted, 0);
            }
        }
        &mut self.buffer[self.filled..]
    }

    /// So many bytes of [`Self::room`] were filled, and these descriptors came with them.
    pub fn filled(&mut self, bytes: usize, handles: impl IntoIterator<Item = Handle>) {
        self.filled = (self.filled + bytes).min(self.buffer.len());
        self.handles.extend(handles);
    }

    /// Bytes that came and are in no frame yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.filled - self.start
    }

    /// The next complete frame, if there is one.
    ///
    /// To be called until it gives `None` before more is filled in: only then can descriptors be
    /// told from those of the next frame.
    ///
    /// # Errors
    ///
    /// [`Reason::OverCap`] or [`Reason::BadMetadata`] for what the prefix says or text that is not
    /// UTF-8, [`Reason::WrongHandles`] where descriptors are missing, or are there that no frame
    /// declares.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Fault> {
        self.next_frame_by(|_| Err(Reason::WrongHandles.into()))
    }

    /// As [`Self::next_frame`], where handles are named in the frame: `named` says what a name means.
    ///
    /// # Errors
    ///
    /// As [`Self::next_frame`], and what `named` gives.
    pub fn next_frame_by(
        &mut self,
        named: impl FnMut(u64) -> Result<Handle, Fault>,
    ) -> Result<Option<Frame>, Fault> {
        let pending = &self.buffer[self.start..self.filled];
        let Some((prefix, rest)) = pending.split_first_chunk::<PREFIX>() else {
            return self.nothing_yet(0, pending.is_empty());
        };
        let [l0, l1, l2, l3, c0, c1] = *prefix;
        let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
        let count = usize::from(u16::from_be_bytes([c0, c1]));
        check(length, count)?;
        if length > self.limit {
            let detail = format!("a frame of {length} bytes, at most {}", self.limit);
            return Err(Fault::new(Reason::OverCap, detail));
        }
        // They ride the first byte, which is here.
        let riding = if self.name == 0 { count } else { 0 };
        if self.handles.len() < riding {
            return Err(Fault::new(
                Reason::WrongHandles,
                format!("{count} declared, {} came", self.handles.len()),
            ));
        }
        let names = count * self.name;
        let Some((names, json)) = rest.get(..names + length).map(|rest| rest.split_at(names))
        else {
            return self.nothing_yet(riding, false);
        };
        let json = std::str::from_utf8(json)
            .map_err(|_| Fault::new(Reason::BadMetadata, "a frame that is not UTF-8"))?
            .to_owned();
        let numbers = names.as_chunks::<8>().0.iter().map(|name| u64::from_be_bytes(*name));
        let named = numbers.map(named).collect::<Result<Vec<_>, _>>()?;
        self.start += PREFIX + names.len() + length;
        self.limit = FRAME_BYTES;
        let handles = self.handles.drain(..riding).chain(named).collect();
        Ok(Some(Frame { json, handles }))
    }

    /// No frame is complete: what is queued must be of the one that has begun.
    fn nothing_yet(&self, declared: usize, empty: bool) -> Result<Option<Frame>, Fault> {
        let known = empty || self.pending() >= PREFIX;
        let most = if known { declared } else { FRAME_HANDLES };
        if self.handles.len() > most {
            return Err(Fault::new(
                Reason::WrongHandles,
                format!("{} came that no frame declares", self.handles.len() - most),
            ));
        }
        Ok(None)
    }

    /// At the end of the stream: how much of a frame is there, and how much there should be.
    #[must_use]
    pub fn cut(&self) -> Option<(usize, usize)> {
        let pending = &self.buffer[self.start..self.filled];
        if pending.is_empty() {
            return None;
        }
        let want = match pending.first_chunk::<PREFIX>() {
            Some(&[l0, l1, l2, l3, c0, c1]) => {
                let names = usize::from(u16::from_be_bytes([c0, c1])) * self.name;
                PREFIX + names + u32::from_be_bytes([l0, l1, l2, l3]) as usize
            }
            _ => PREFIX,
        };
        Some((pending.len(), want))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn handle() -> Handle {
        let null = if cfg!(windows) { "NUL" } else { "/dev/null" };
        std::fs::File::open(null).unwrap().into()
    }

    fn feed(decoder: &mut Decoder, mut bytes: &[u8], handles: Vec<Handle>) {
        let mut handles = Some(handles);
        loop {
            let room = decoder.room();
            let some = bytes.len().min(room.len());
            room[..some].copy_from_slice(&bytes[..some]);
            decoder.filled(some, handles.take().unwrap_or_default());
            bytes = &bytes[some..];
            if bytes.is_empty() {
                return;
            }
        }
    }

    #[test]
    fn the_first_frame_alone_is_limited() {
        let mut decoder = Decoder::naming(0);
        decoder.limit_next(8);
        feed(&mut decoder, &[encoded("\"key\"", 0), encoded(&"1".repeat(200), 0)].concat(), vec![]);
        assert_eq!(decoder.next_frame().unwrap().unwrap().json, "\"key\"");
        assert_eq!(decoder.next_frame().unwrap().unwrap().json.len(), 200);
        let mut decoder = Decoder::naming(0);
        decoder.limit_next(8);
        feed(&mut decoder, &encoded("123456789", 0), vec![]);
        assert_eq!(decoder.next_frame().unwrap_err().reason(), Reason::OverCap);
    }

    fn encoded(json: &str, handles: usize) -> Vec<u8> {
        [&prefix(json, handles).unwrap(), json.as_bytes()].concat()
    }

    #[test]
    fn descriptors_go_to_the_frame_that_declares_them() {
        let mut decoder = Decoder::naming(0);
        let both = [encoded("1", 0), encoded("2", 1)].concat();
        feed(&mut decoder, &both, vec![handle()]);
        let first = decoder.next_frame().unwrap().unwrap();
        assert_eq!((first.json.as_str(), first.handles.len()), ("1", 0));
        let second = decoder.next_frame().unwrap().unwrap();
        assert_eq!((second.json.as_str(), second.handles.len()), ("2", 1));
        assert!(decoder.next_frame().unwrap().is_none());
    }

    #[test]
    fn descriptors_that_no_frame_declares_are_a_fault() {
        for (bytes, handles) in [
            (encoded("1", 0), 1),
            (encoded("1", 1), 2),
            (encoded("[1,2]", 1)[..8].to_vec(), 2),
            (Vec::new(), 1),
            (vec![0], FRAME_HANDLES + 1),
        ] {
            let mut decoder = Decoder::naming(0);
            feed(&mut decoder, &bytes, (0..handles).map(|_| handle()).collect());
            let fault = loop {
                match decoder.next_frame() {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("{handles} descriptors with {bytes:?} were taken"),
                    Err(fault) => break fault,
                }
            };
            assert_eq!(fault.reason(), Reason::WrongHandles);
        }
    }

    #[test]
    fn missing_descriptors_are_a_fault_before_the_frame_is_complete() {
        let mut decoder = Decoder::naming(0);
        feed(&mut decoder, &encoded("[1,2]", 2)[..7], vec![handle()]);
        assert_eq!(decoder.next_frame().unwrap_err().reason(), Reason::WrongHandles);
    }

    #[test]
    fn caps_are_checked_before_anything_is_stored() {
        for (length, count) in [(FRAME_BYTES as u32 + 1, 0u16), (u32::MAX, 0), (1, 254), (0, 0)] {
            let mut decoder = Decoder::naming(0);
            let bytes = [&length.to_be_bytes()[..], &count.to_be_bytes()].concat();
            feed(&mut decoder, &bytes, vec![]);
            let reason = decoder.next_frame().unwrap_err().reason();
            assert!(matches!(reason, Reason::OverCap | Reason::BadMetadata), "{reason}");
        }
    }

    #[test]
    fn a_cut_frame_says_how_much_came() {
        let whole = encoded("[1,2,3]", 0);
        for (came, want) in [(0, None), (3, Some((3, 6))), (6, Some((6, 13))), (12, Some((12, 13)))]
        {
            let mut decoder = Decoder::naming(0);
            feed(&mut decoder, &whole[..came], vec![]);
            assert!(decoder.next_frame().unwrap().is_none());
            assert_eq!(decoder.cut(), want);
        }
    }

    /// A frame with names of handles.
    fn naming(json: &str, names: &[u64]) -> Vec<u8> {
        let prefix = prefix(json, names.len()).unwrap();
        let names = names.iter().flat_map(|name| name.to_be_bytes());
        prefix.into_iter().chain(names).chain(json.bytes()).collect()
    }

    #[test]
    fn handles_that_are_named_go_to_the_frame_that_names_them() {
        let stream = [naming("1", &[]), naming("[2]", &[7, u64::MAX]), naming("3", &[9])].concat();
        // However the stream is cut.
        for cut in 1..stream.len() {
            let (mut decoder, mut seen, mut asked) = (Decoder::naming(8), Vec::new(), Vec::new());
            for part in [&stream[..cut], &stream[cut..]] {
                feed(&mut decoder, part, vec![]);
                let mut named = |name| {
                    asked.push(name);
                    Ok(handle())
                };
                while let Some(frame) = decoder.next_frame_by(&mut named).unwrap() {
                    seen.push((frame.json, frame.handles.len()));
                }
            }
            let expected = [("1", 0), ("[2]", 2), ("3", 1)];
            let expected = expected.map(|(json, count)| (json.to_owned(), count));
            assert_eq!((&seen[..], &asked[..]), (&expected[..], &[7, u64::MAX, 9][..]));
            assert_eq!(decoder.cut(), None);
        }
        let mut decoder = Decoder::naming(8);
        feed(&mut decoder, &naming("[2]", &[7, 8])[..20], vec![]);
        assert!(decoder.next_frame().unwrap().is_none());
        assert_eq!(decoder.cut(), Some((20, 6 + 16 + 3)));
        // What nobody can say the meaning of is a fault.
        feed(&mut decoder, &naming("[2]", &[7, 8])[20..], vec![]);
        assert_eq!(decoder.next_frame().unwrap_err().reason(), Reason::WrongHandles);
    }

    proptest! {
        /// However a stream is cut into reads, the same frames come out.
        #[test]
        fn any_chunking_gives_the_same_frames(
            frames in prop::collection::vec("[a-zé\"]{1,300}", 1..8),
            cuts in prop::collection::vec(1usize..400, 1..40),
        ) {
            let stream: Vec<u8> = frames.iter().flat_map(|json| encoded(json, 0)).collect();
            let (mut decoder, mut seen, mut rest) = (Decoder::naming(0), Vec::new(), &stream[..]);
            for cut in cuts.iter().cycle() {
                let some = rest.len().min(*cut);
                feed(&mut decoder, &rest[..some], vec![]);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    seen.push(frame.json);
                }
                rest = &rest[some..];
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(seen, frames);
            prop_assert_eq!(decoder.cut(), None);
        }

        /// Whatever bytes come, the answer is frames or a fault, and nothing is stored past the cap.
        #[test]
        fn any_bytes_give_frames_or_a_fault(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let mut decoder = Decoder::naming(0);
            feed(&mut decoder, &bytes, vec![]);
            while let Ok(Some(_)) = decoder.next_frame() {}
            prop_assert!(decoder.buffer.len() <= 4 * CHUNK);
        }
    }
}
