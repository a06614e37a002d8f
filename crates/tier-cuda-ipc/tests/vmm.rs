//! `cuda-vmm` between two processes, both directions.

mod common;

fn main() -> std::process::ExitCode {
    common::run("cuda-vmm", false)
}
