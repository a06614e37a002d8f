//! The commands of the workspace: `cargo xtask NAME`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "commands for a person to read")]

mod asan;
mod bench;
mod env;
mod gpu;
mod layers;
mod sabotage;
mod windows;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check that nothing depends on its own layer or a higher one, and what `tier-shm` pulls in.
    Layers,
    /// Measure against limits and peers, interleaved in one run.
    Bench {
        /// What is measured.
        what: bench::What,
        /// Lines of JSON instead of a table.
        #[arg(long)]
        json: bool,
        /// Within a minute of measuring.
        #[arg(long)]
        quick: bool,
        /// A Python with torch and numpy, for the Python peers too.
        #[arg(long)]
        python: Option<PathBuf>,
        /// Without the Rust peers, which take a minute to build.
        #[arg(long)]
        alone: bool,
    },
    /// Pack the check of a machine with a device into one folder, and run it here; fails where there is none.
    Gpu {
        /// Build and pack, and run nothing.
        #[arg(long)]
        dry_run: bool,
        /// Run it on the stand-in of the tests: every line says so, and none is a figure of a device.
        #[arg(long)]
        stand_in: bool,
    },
    /// Go through the model of the pool ownership contract further than its tests do: some minutes.
    Model,
    /// Build for Windows, and run the suites, the program and the examples under wine: some 15 minutes.
    Windows {
        /// Only suites whose name contains this.
        only: Option<String>,
        /// Measure what shared memory is made of instead.
        #[arg(long)]
        measure: bool,
    },
    /// Four workers, values of every kind, forwards, demotions and kills: every byte is checked, and nothing may grow.
    Soak {
        /// How long.
        #[arg(long, default_value_t = 30.0)]
        minutes: f64,
        /// What everything at random follows from.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Run the suites of the crates with unsafe code, and of whole channels, under AddressSanitizer (a nightly compiler).
    Asan {
        /// Only test binaries whose name contains this.
        only: Option<String>,
    },
    /// Type-check what ships for macOS.
    MacosCheck,
    /// Make a Python environment with NumPy, and run the tests that need one.
    TestEnv,
    /// Break the code on purpose, one patch at a time, and see the named test turn red.
    Sabotage {
        /// Only patches whose name contains this.
        only: Option<String>,
        /// The suite was just seen green on this very tree: nothing is run without a patch first.
        #[arg(long)]
        after_tests: bool,
    },
}

/// Whatever makes a command fail.
type Error = Box<dyn std::error::Error + Send + Sync>;

/// The root of the workspace.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs a command that must succeed.
fn succeed(command: &mut std::process::Command) -> Result<(), Error> {
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}").into()) }
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Layers => layers::check(&root()),
        Command::Bench { what, json, quick, python, alone } => {
            bench::run(&root(), what, &bench::Options { json, quick, python, alone })
        }
        Command::Gpu { dry_run, stand_in } => {
            gpu::run(&root(), &gpu::Options { dry_run, stand_in })
        }
        Command::Model => {
            let mut cargo = std::process::Command::new(env!("CARGO"));
            cargo.current_dir(root()).args([
                "test",
                "--package",
                "pool-model",
                "--test",
                "contract",
            ]);
            succeed(cargo.args(["--", "--ignored", "--nocapture"]))
        }
        Command::Windows { only, measure } => {
            windows::run(&root(), &windows::Options { measure, only })
        }
        Command::Soak { minutes, seed } => {
            let mut cargo = std::process::Command::new(env!("CARGO"));
            cargo.current_dir(root()).args(["run", "--quiet", "--release", "--locked"]);
            cargo.args(["--package", "soak", "--", "--minutes", &minutes.to_string()]);
            cargo.args(seed.iter().flat_map(|seed| ["--seed".to_owned(), seed.to_string()]));
            succeed(&mut cargo)
        }
        Command::Asan { only } => asan::run(&root(), only.as_deref()),
        Command::MacosCheck => windows::check_macos(&root()),
        Command::TestEnv => env::run(&root()),
        Command::Sabotage { only, after_tests } => {
            sabotage::run(&root(), only.as_deref(), after_tests)
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
