//! Any bytes and descriptors, in reads of any size: frames within the caps, or a fault.
#![no_main]

use libfuzzer_sys::fuzz_target;
use link::frame::{Decoder, PREFIX};
use rung::Handle;
use rung::limits::{FRAME_BYTES, FRAME_HANDLES};

fuzz_target!(|reads: Vec<(Vec<u8>, u8)>| {
    let mut decoder = Decoder::new();
    for (bytes, descriptors) in reads {
        let handles: Vec<Handle> = (0..descriptors % 4)
            .filter_map(|_| std::fs::File::open("/dev/null").ok().map(Into::into))
            .collect();
        let mut handles = Some(handles);
        for part in bytes.chunks(1 << 16) {
            let room = decoder.room();
            let some = part.len().min(room.len());
            room[..some].copy_from_slice(&part[..some]);
            decoder.filled(some, handles.take().unwrap_or_default());
            loop {
                match decoder.next_frame() {
                    Ok(Some(frame)) => {
                        assert!(!frame.json.is_empty() && frame.json.len() <= FRAME_BYTES);
                        assert!(frame.handles.len() <= FRAME_HANDLES);
                    }
                    Ok(None) => break,
                    Err(_) => return,
                }
            }
        }
    }
    if let Some((have, want)) = decoder.cut() {
        assert!(have < want && want <= PREFIX + FRAME_BYTES);
    }
});
