//! Other systems: built for Windows and run under wine; type-checked for macOS. Both with the compiler of Debian, whose
//! package has the sources of std, beside whatever other toolchain is there.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cargo_metadata::Message;

use crate::{Error, succeed};

/// What is needed, as Debian names it; `rustc-web` is its newest compiler.
const PACKAGES: &[&str] = &[
    "rustc-web",
    "cargo-web",
    "rust-web-src",
    "libstd-rust-web-dev",
    "gcc-mingw-w64-x86-64",
    "wine64",
    "wine",
];

/// What shows that they are there.
const TOOLS: &[&str] = &["/usr/bin/cargo", "/usr/bin/x86_64-w64-mingw32-gcc", "/usr/bin/wine"];

const WINDOWS: &str = "x86_64-pc-windows-gnu";

/// The lock file is for the newest crates; cargo's own ways to find folders would be those of another toolchain.
const VARIABLES: &[(&str, &str)] = &[
    ("PATH", "/usr/bin:/bin"),
    ("RUSTC_BOOTSTRAP", "1"),
    ("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER", "x86_64-w64-mingw32-gcc"),
    // Symbols take most of the disk and of the time to link.
    ("CARGO_PROFILE_DEV_DEBUG", "0"),
];

/// Packages whose unit tests run.
const UNITS: &[&str] = &[
    "rung",
    "segment",
    "cuda",
    "link",
    "canary",
    "tier-cuda-ipc",
    "tier-numpy",
    "tier-pickle",
    "tier-inline",
    "ladder",
    "ladder-cli",
];

/// Suites, by package and test target.
const SUITES: &[(&str, &str)] = &[
    ("winproc", "windows"),
    ("link", "sockets"),
    ("worker", "processes"),
    ("testkit", "watchdog"),
    ("tier-shm", "conformance"),
    ("tier-numpy", "conformance"),
    ("tier-numpy", "properties"),
    ("tier-pickle", "conformance"),
    ("tier-inline", "conformance"),
    ("tier-inline", "properties"),
    ("e2e", "canary"),
    ("e2e", "values"),
    ("e2e", "calls"),
    ("e2e", "concurrency"),
    ("e2e", "memory"),
    ("ladder-cli", "relay"),
    ("ladder-cli", "doctor"),
];

/// Programs to copy, and what each says in the end.
const EXAMPLES: &[(&str, &str)] = &[
    ("01_first_crossing", "1228800 bytes on shm"),
    ("02_structs_and_objects", "the mesh came back as it was"),
    ("07_tier_shm_alone", "round 3: 0 copies"),
    ("gpu_relay", "back on the host, 1000000 elements as they were"),
];

/// How long one program may run under wine.
const LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(crate) struct Options {
    /// Measures what shared memory is made of, and runs no test.
    pub(crate) measure: bool,
    /// Only suites whose name contains this.
    pub(crate) only: Option<String>,
}

/// Sees that the packages are there.
fn install() -> Result<(), Error> {
    if TOOLS.iter().all(|tool| Path::new(tool).exists()) {
        return Ok(());
    }
    println!("installing {}", PACKAGES.join(" "));
    succeed(Command::new("apt-get").arg("update"))?;
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive");
    succeed(install.args(["install", "--yes", "--no-install-recommends"]).args(PACKAGES))
}

/// Beside what other toolchains build.
fn target_folder() -> PathBuf {
    crate::root().join("target/other")
}

/// Debian's cargo, with std built along.
fn cargo(root: &Path, command: &str, target: &str) -> Command {
    let mut cargo = Command::new("/usr/bin/cargo");
    cargo
        .current_dir(root)
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO")
        .env_remove("RUSTC")
        .envs(VARIABLES.iter().copied())
        .args([command, "--locked", "-Zbuild-std=std,panic_abort", "--target", target])
        .arg("--target-dir")
        .arg(target_folder());
    cargo
}

/// Type-checks everything that ships for macOS; nothing links or runs.
pub(crate) fn check_macos(root: &Path) -> Result<(), Error> {
    install()?;
    let mut check = cargo(root, "check", "aarch64-apple-darwin");
    succeed(check.args(["--package", "ladder-cli", "--package", "testkit"]))?;
    println!("aarch64-apple-darwin: what ships checks; nothing was linked or run");
    Ok(())
}

/// Builds for Windows, and runs the suites.
pub(crate) fn run(root: &Path, options: &Options) -> Result<(), Error> {
    install()?;
    if options.measure {
        return measure(root);
    }
    let wine = Wine::new(root)?;
    let is_wanted = |name: &str| options.only.as_ref().is_none_or(|only| name.contains(only));
    let started = Instant::now();
    let built = everything(root)?;
    println!("built in {} s", started.elapsed().as_secs());
    wine.place(&built)?;
    let suites: Vec<(String, &Path)> =
        suites(&built)?.into_iter().filter(|(name, _)| is_wanted(name)).collect();
    let (mut passed, mut failed) = (0, Vec::new());
    for (name, path) in &suites {
        match wine.suite(name, path)? {
            0 => failed.push(name.as_str()),
            count => passed += count,
        }
    }
    if !failed.is_empty() {
        return Err(format!("not all is well with {}", failed.join(", ")).into());
    }
    if is_wanted("ladder.exe") {
        program(root, &built, &wine)?;
    }
    if is_wanted("examples") {
        examples(root, &wine)?;
    }
    if passed == 0 && options.only.is_none() {
        return Err("nothing ran".into());
    }
    println!(
        "{passed} tests passed on {WINDOWS} under {}, in {} suites",
        wine.version,
        suites.len()
    );
    Ok(())
}

/// What a build made that can be run.
struct Built {
    /// Of the package, as its folder is called.
    package: String,
    target: String,
    is_unit: bool,
    path: PathBuf,
}

/// Builds at once, so that what is shared is built once.
fn everything(root: &Path) -> Result<Vec<Built>, Error> {
    let mut test = cargo(root, "test", WINDOWS);
    test.args(["--no-run", "--lib", "--bins"]);
    let suites = SUITES.iter();
    let mut packages: Vec<&str> = suites.map(|(package, _)| *package).collect();
    packages.extend(UNITS);
    let mut targets: Vec<&str> = SUITES.iter().map(|(_, target)| *target).collect();
    for names in [&mut packages, &mut targets] {
        names.sort_unstable();
        names.dedup();
    }
    for (flag, names) in [("--package", packages), ("--test", targets)] {
        test.args(names.into_iter().flat_map(|name| [flag, name]));
    }
    built(&mut test)
}

fn find<'b>(
    built: &'b [Built],
    what: &str,
    is_it: impl Fn(&Built) -> bool,
) -> Result<&'b Path, Error> {
    let found = built.iter().find(|built| is_it(built));
    Ok(&found.ok_or_else(|| format!("no {what} was built"))?.path)
}

/// The suites, by name.
fn suites(built: &[Built]) -> Result<Vec<(String, &Path)>, Error> {
    let mut suites = Vec::new();
    for package in UNITS {
        let is_it = |built: &Built| built.package == *package && built.is_unit;
        suites.push(((*package).to_owned(), find(built, package, is_it)?));
    }
    for (package, target) in SUITES {
        let name = format!("{package} {target}");
        let is_it =
            |built: &Built| built.package == *package && built.target == *target && !built.is_unit;
        suites.push((name.clone(), find(built, &name, is_it)?));
    }
    Ok(suites)
}

/// What a build makes that can be run.
fn built(cargo: &mut Command) -> Result<Vec<Built>, Error> {
    let cargo = cargo.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child = cargo.spawn()?;
    let output = child.stdout.take().ok_or("no output")?;
    let mut found = Vec::new();
    for message in Message::parse_stream(BufReader::new(output)) {
        let Message::CompilerArtifact(artifact) = message? else { continue };
        let (target, is_test) = (artifact.target, artifact.profile.test);
        let Some(path) = artifact.executable else { continue };
        if !is_test && !target.is_bin() && !target.is_example() {
            continue;
        }
        let folder = artifact.manifest_path.parent().and_then(|folder| folder.file_name());
        found.push(Built {
            package: folder.unwrap_or_default().to_owned(),
            is_unit: is_test && !target.is_test(),
            target: target.name,
            path: path.into(),
        });
    }
    if child.wait()?.success() { Ok(found) } else { Err("the build failed".into()) }
}

struct Wine {
    prefix: PathBuf,
    library: PathBuf,
    version: String,
}

impl Wine {
    /// In a folder of its own, so that nothing of an earlier run or a person's is there.
    fn new(root: &Path) -> Result<Self, Error> {
        let folder = target_folder().join("wine");
        std::fs::create_dir_all(&folder)?;
        let (prefix, library) = (folder.join("prefix"), folder.join("bcryptprimitives.dll"));
        let _ = std::fs::remove_dir_all(&prefix);
        let source = root.join("xtask/src/windows/process_prng.c");
        let mut compile = Command::new("/usr/bin/x86_64-w64-mingw32-gcc");
        succeed(compile.arg("-shared").arg("-o").arg(&library).arg(source).arg("-ladvapi32"))?;
        let version =
            Command::new("/usr/bin/wine").arg("--version").stderr(Stdio::null()).output()?;
        let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        Ok(Self { prefix, library, version })
    }

    /// Puts the library beside every program, where it is looked for: those that tests start, too.
    fn place(&self, built: &[Built]) -> Result<(), Error> {
        for built in built {
            std::fs::copy(&self.library, built.path.with_file_name("bcryptprimitives.dll"))?;
        }
        Ok(())
    }

    /// Runs a program, from the root of the workspace; what it says, and whether it succeeded.
    fn run(&self, program: &Path, arguments: &[&str]) -> Result<(String, Option<i32>), Error> {
        let mut command = Command::new("timeout");
        command
            .arg(LIMIT.as_secs().to_string())
            .arg("/usr/bin/wine")
            .arg(program)
            .args(arguments)
            .env("WINEPREFIX", &self.prefix)
            .env("WINEDEBUG", "-all")
            .stdin(Stdio::null());
        let output = command.output()?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        Ok((text, output.status.code()))
    }

    /// Runs a suite and says how it went; how many passed, none where anything is wrong.
    fn suite(&self, name: &str, path: &Path) -> Result<u32, Error> {
        let started = Instant::now();
        let (text, status) = self.run(path, &[])?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix("test result: "));
        let seconds = started.elapsed().as_secs();
        // A library that is missing ends a program with status 53, and not a word.
        let Some(line) = line else {
            println!("{name:26} NOTHING RAN, status {status:?} after {seconds} s\n{text}");
            return Ok(0);
        };
        let counts: Vec<u32> =
            line.split([' ', ';', '.']).filter_map(|word| word.parse().ok()).collect();
        let (passed, ignored) =
            (counts.first().copied().unwrap_or(0), counts.get(2).copied().unwrap_or(0));
        let is_well = status == Some(0) && line.starts_with("ok") && passed > 0;
        let verdict = if is_well { "ok" } else { "FAILED" };
        println!("{name:26} {verdict}: {passed} passed, {ignored} ignored, {seconds} s");
        if is_well {
            return Ok(passed);
        }
        println!("{text}");
        Ok(0)
    }

    /// Runs a program that has to succeed and to say something.
    fn expect(&self, program: &Path, arguments: &[&str], says: &[&str]) -> Result<(), Error> {
        let (text, status) = self.run(program, arguments)?;
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        if status == Some(0) && says.iter().all(|says| text.contains(says)) {
            println!("{name} {}: ok", arguments.join(" "));
            return Ok(());
        }
        Err(format!("{name} {}: status {status:?}\n{text}", arguments.join(" ")).into())
    }
}

/// `ladder.exe`, as a person runs it.
fn program(root: &Path, built: &[Built], wine: &Wine) -> Result<(), Error> {
    let is_it =
        |built: &Built| built.target == "ladder" && built.package == "ladder-cli" && !built.is_unit;
    let program = find(built, "program", is_it)?;
    let photo = root.join("examples/data/astronaut.png");
    let photo = photo.canonicalize()?.display().to_string();
    wine.expect(program, &["relay", &photo], &["512×512×3", " shm ", "every result checked"])?;
    wine.expect(
        program,
        &["doctor"],
        &[
            "every rung that both sides offer is verified",
            "memory of devices is shared on Linux alone",
        ],
    )
}

/// They are built apart: along with tests they would be tests.
fn examples(root: &Path, wine: &Wine) -> Result<(), Error> {
    let mut build = cargo(root, "build", WINDOWS);
    let built = built(build.args(["--package", "examples", "--examples"]))?;
    wine.place(&built)?;
    for (name, says) in EXAMPLES {
        wine.expect(find(&built, name, |built| built.target == *name)?, &[], &[says])?;
    }
    Ok(())
}

/// What sections cost beside the files of the crate `shared_memory` (docs/adr/0032).
fn measure(root: &Path) -> Result<(), Error> {
    let wine = Wine::new(root)?;
    let mut build = cargo(&root.join("tests/bench/windows"), "build", WINDOWS);
    let found = built(build.arg("--release"))?;
    wine.place(&found)?;
    let program = find(&found, "program", |_| true)?;
    let (text, status) = wine.run(program, &[])?;
    println!("{text}");
    if status == Some(0) { Ok(()) } else { Err(format!("status {status:?}").into()) }
}
