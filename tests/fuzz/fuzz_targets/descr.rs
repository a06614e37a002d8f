//! Any text as a NumPy type: one that is written and read the same again, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rung::{Array, Descr};

fuzz_target!(|text: &str| {
    let Ok(descr) = serde_json::from_str::<Descr>(text) else { return };
    let json = serde_json::to_string(&descr).expect("what was read can be written");
    let back: Descr = serde_json::from_str(&json).expect("what was written can be read");
    assert_eq!(back, descr);
    // Each field lies inside of its record.
    let fields = descr.fields().unwrap_or_default().iter().filter(|field| !field.is_padding());
    for field in fields {
        let (at, found) = descr.field(&field.name).expect("a field has its place");
        assert_eq!(found, field);
        let extents: usize = field.shape.iter().product();
        assert!(at + extents * field.descr.size() <= descr.size());
    }
    if descr.size() < 4096 {
        let array = Array::from_bytes(vec![0; 2 * descr.size()], descr.clone(), &[2]).expect("an array");
        for field in descr.fields().unwrap_or_default() {
            if let Ok(view) = array.field(&field.name) {
                assert_eq!(view.to_bytes().expect("host memory").len(), view.byte_count());
            }
        }
    }
});
