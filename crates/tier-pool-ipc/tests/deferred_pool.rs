//! The conformance suite on a device whose work runs when somebody waits for it: whoever waits for nothing reads
//! something else.

mod common;

fn main() -> std::process::ExitCode {
    common::run(true)
}
