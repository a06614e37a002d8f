//! Test binaries on the stand-in of the CUDA driver, or, where they are told to, on a real one.
//!
//! The library is looked for by the loader, so it has to be in its path before the process starts: a binary
//! starts itself once more.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

pub use cuda_standin::{Count, count};

/// `real`: the machine's own driver, and failing where there is none.
const DRIVER: &str = "LADDER_TEST_DRIVER";

/// What makes a process find the stand-in in the driver's place.
///
/// # Errors
///
/// Where the library was not built beside this binary, or the folder for its links cannot be made.
pub fn environment() -> io::Result<Vec<(&'static str, String)>> {
    let folder = folder()?.display().to_string();
    let path = match std::env::var("LD_LIBRARY_PATH") {
        Ok(rest) if !rest.is_empty() => format!("{folder}:{rest}"),
        _ => folder,
    };
    Ok(vec![("LD_LIBRARY_PATH", path), ("CUDA_CPU_STANDIN", "1".to_owned())])
}

/// The folder with the library under the driver's names.
fn folder() -> io::Result<PathBuf> {
    const LIBRARY: &str = "libcuda_standin.so";
    let binary = std::env::current_exe()?;
    let beside = binary.ancestors().skip(1).take(2);
    let candidates =
        beside.flat_map(|folder| [folder.join(LIBRARY), folder.join("deps").join(LIBRARY)]);
    let library = candidates
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| io::Error::other(format!("no {LIBRARY} beside {}", binary.display())))?;
    let home = library.parent().unwrap_or(Path::new(".")).join("cuda-standin-driver");
    std::fs::create_dir_all(&home)?;
    for name in ["libcuda.so.1", "libcuda.so"] {
        let link = home.join(name);
        if std::fs::read_link(&link).ok().as_ref() == Some(&library) {
            continue;
        }
        // Several test binaries do this at once; a rename is one step.
        let fresh = home.join(format!("{name}.{}", std::process::id()));
        std::os::unix::fs::symlink(&library, &fresh)?;
        std::fs::rename(&fresh, &link)?;
    }
    Ok(home)
}

/// Whether the machine's own driver is what is tested.
#[must_use]
pub fn is_real() -> bool {
    std::env::var(DRIVER).is_ok_and(|driver| driver == "real")
}

/// Whether the processes of this test defer device work until somebody waits.
#[must_use]
pub fn is_deferred() -> bool {
    std::env::var("CUDA_CPU_STANDIN_DEFER").is_ok_and(|value| value == "1")
}

/// Runs the `main` of a test binary on the stand-in: starts the binary again where it is not there yet. A real driver
/// defers work by itself.
#[must_use]
pub fn main(deferred: bool, main: impl FnOnce() -> ExitCode) -> ExitCode {
    if is_real() || std::env::var_os("CUDA_CPU_STANDIN").is_some() {
        return main();
    }
    let failed = environment().and_then(|variables| {
        let mut again = Command::new(std::env::current_exe()?);
        if deferred {
            again.env("CUDA_CPU_STANDIN_DEFER", "1");
        }
        Err::<(), _>(again.args(std::env::args_os().skip(1)).envs(variables).exec())
    });
    // Said where the harness says things: not a library.
    let text = failed.err().map_or_else(String::new, |error| error.to_string());
    tracing::error!("not on the stand-in: {text}");
    ExitCode::FAILURE
}
