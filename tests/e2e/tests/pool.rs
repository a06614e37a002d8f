//! Memory of pools end to end, where both sides ask for it.

mod pools;

fn main() -> std::process::ExitCode {
    pools::run(false)
}
