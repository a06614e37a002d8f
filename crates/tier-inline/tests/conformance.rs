//! `inline` between two processes, both directions.

use std::process::ExitCode;

use rung::{Tensor, Value};
use testkit::form::{Suite, main as suite, plain_cases};

fn tensor() -> Value {
    Tensor::from_vec(vec![1u8], &[1]).expect("a tensor").into()
}

static SUITE: Suite =
    Suite { rung: || Box::new(tier_inline::Inline), cases: plain_cases, refused: tensor };

fn main() -> ExitCode {
    suite(&SUITE, Vec::new())
}
