//! `inline` between two processes, both directions.

use std::process::ExitCode;

use testkit::form::{Suite, main as suite};

fn main() -> ExitCode {
    suite(&Suite { rung: || Box::new(tier_inline::Inline) }, Vec::new())
}
