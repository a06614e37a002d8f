//! The conformance suite of forms, with arrays of every kind of type, in both directions.

use std::process::ExitCode;

use testkit::form::Suite;

static SUITE: Suite = Suite {
    rung: || Box::new(tier_numpy::Numpy),
    cases: testkit::values::arrays,
    refused: || rung::Value::from(1),
};

fn main() -> ExitCode {
    testkit::form::main(&SUITE, Vec::new())
}
