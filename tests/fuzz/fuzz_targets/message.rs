//! Any text as a message of a channel: one that is written and read again, or a fault.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = ladder::fuzzing::message(text);
});
