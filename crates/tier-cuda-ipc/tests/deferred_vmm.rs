//! `cuda-vmm` between two processes, both directions, with every work of a device put off until somebody waits for it.

mod common;

fn main() -> std::process::ExitCode {
    common::run("cuda-vmm", true)
}
