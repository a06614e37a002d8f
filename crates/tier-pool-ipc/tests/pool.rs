//! The conformance suite: memory of pools, by pointers.

mod common;

fn main() -> std::process::ExitCode {
    common::run(false)
}
