//! The suites under AddressSanitizer: every access to memory of every process of a test. What is left allocated at a
//! process's end is not looked at: many here are killed.

use std::path::Path;
use std::process::Command;

use crate::{Error, succeed};

/// What the sanitizer builds for: a target of its own keeps build scripts and macros out of it.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Trials that limit the address space, of which the sanitizer takes terabytes; that count what a process asks of the
/// kernel, or how long it takes, which it changes; and that see an abort, which it makes its own.
const OTHERWISE: &[&str] = &[
    "address_space",
    "in_steady_state_nothing_is_asked_of_the_kernel",
    "a_host_runs_out_of_descriptors",
    "a_worker_runs_out_of_descriptors",
    "odd_surroundings_work_or_say_why",
    "a_worker_in_a_small_group_is_not_killed",
    "many_sends_leave_nothing",
    // Of deadlines under a second.
    "_that_ends_",
];

/// Builds with it, and runs.
pub(crate) fn run(root: &Path, only: Option<&str>) -> Result<(), Error> {
    let mut cargo = Command::new("cargo");
    // Rustup's, and not this one's compiler.
    cargo.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC");
    cargo.current_dir(root).args(["+nightly", "test", "--workspace", "--no-fail-fast", "--locked"]);
    cargo.args(["--lib", "--tests"]);
    // No memory of its own to look at, and millions of states.
    cargo.args(["xtask", "bench", "pool-model"].iter().flat_map(|name| ["--exclude", *name]));
    cargo.args(["--target", TARGET, "--target-dir", "target/asan"]);
    if let Some(only) = only {
        cargo.args(["--test", only]);
    }
    cargo.arg("--");
    cargo.args(OTHERWISE.iter().flat_map(|trial| ["--skip", *trial]));
    // The stand-in of the driver is a library of its own, and finds the sanitizer in whoever loads it.
    cargo.env("RUSTFLAGS", "-Zsanitizer=address -Cdebuginfo=1 -Clink-arg=-Wl,--export-dynamic");
    cargo.env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=1:abort_on_error=1:allocator_may_return_null=1");
    succeed(&mut cargo)
}
