//! Device memory end to end, with every work of a device put off until somebody waits for it: a wait that is missing
//! reads what was there before.

#[path = "gpu.rs"]
mod gpu;

fn main() -> std::process::ExitCode {
    gpu::run(true)
}
