//! `cuda-ipc` between two processes, both directions.

mod common;

fn main() -> std::process::ExitCode {
    common::run("cuda-ipc", false)
}
