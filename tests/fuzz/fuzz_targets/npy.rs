//! Any bytes as an .npy file: an array that is written and read the same again, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tier_numpy::npy::{read, write};

fuzz_target!(|bytes: &[u8]| {
    // Headers are what matters; a file begins with its magic, which is not worth finding.
    let file = [&b"\x93NUMPY"[..], bytes].concat();
    let Ok(array) = read(file) else { return };
    let mut file = Vec::new();
    write(&array, &mut file).expect("what was read can be written");
    assert_eq!(read(file).expect("what was written can be read"), array);
});
