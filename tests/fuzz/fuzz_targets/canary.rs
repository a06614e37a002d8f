//! Any value as a canary and as the answer to one: digested the same each time, or refused.
#![no_main]

use ladder::canary::digest;
use libfuzzer_sys::fuzz_target;
use tier_inline::codec::{Plain, decode};

fuzz_target!(|text: &str| {
    let Ok(value) = decode(text, &mut Plain) else { return };
    if let Ok(digest) = digest::answer(&value) {
        assert_eq!(digest::answer(&value.clone()), Ok(digest));
        assert_eq!(digest.to_string().parse(), Ok(digest));
    }
    ladder::fuzzing::canary(value);
});
