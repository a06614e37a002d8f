//! Any bytes as a pickle: plain data that are written and read the same again, held as they are, or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tier_pickle::{dump, load};

fuzz_target!(|bytes: &[u8]| {
    let Ok(value) = load(bytes.to_vec()) else { return };
    if let Some(pickle) = value.as_pickle() {
        assert_eq!(*pickle.bytes().expect("host memory"), *bytes);
        return;
    }
    let pickle = dump(&value).expect("what was read can be written");
    assert_eq!(load(pickle).expect("what was written can be read"), value);
});
