//! Device memory end to end.

mod devices;

fn main() -> std::process::ExitCode {
    devices::run(false)
}
