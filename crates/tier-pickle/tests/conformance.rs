//! The conformance suite of forms, with plain values and unopened pickles, in both directions.

use std::process::ExitCode;

use rung::{Array, OpaquePickle, Tensor, Value};
use testkit::form::Suite;

fn cases() -> Vec<(&'static str, Value)> {
    let mut cases = testkit::form::plain_cases();
    // As Python writes a call of a class that nobody has.
    let shut = OpaquePickle::new(b"\x80\x04cmain\nUnknown\n)\x81.".to_vec());
    let buffer = Tensor::from_vec((0..100u8).collect::<Vec<_>>(), &[100]).expect("a buffer");
    let outside = shut.clone().with_buffers(vec![buffer]).expect("a pickle");
    cases.push(("shut", shut.into()));
    cases.push(("shut_with_a_buffer", outside.into()));
    cases.push(("large", Value::list((0..5000).map(f64::from))));
    cases
}

fn array() -> Value {
    let tensor = Tensor::from_vec(vec![1u8], &[1]).expect("a tensor");
    Array::from_tensor(&tensor).expect("an array").into()
}

static SUITE: Suite = Suite { rung: || Box::new(tier_pickle::Pickle), cases, refused: array };

fn main() -> ExitCode {
    testkit::form::main(&SUITE, Vec::new())
}
