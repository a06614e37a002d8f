//! Device memory end to end, with every work of a device put off until somebody waits for it: a wait that is missing
//! reads what was there before.

mod devices;

fn main() -> std::process::ExitCode {
    devices::run(true)
}
