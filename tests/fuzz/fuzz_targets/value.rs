//! Any text: a value that is written and read the same again, or a fault.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tier_inline::codec::{Plain, decode, encode};

fuzz_target!(|text: &str| {
    let Ok(value) = decode(text, &mut Plain) else { return };
    let mut json = String::new();
    encode(&value, &mut json, &mut Plain).expect("what was read can be written");
    assert_eq!(decode(&json, &mut Plain).expect("what was written can be read"), value);
});
