//! Memory of pools end to end, with every work of a device put off until somebody waits for it.

mod pools;

fn main() -> std::process::ExitCode {
    pools::run(true)
}
