//! The check of a machine with a device: one table, in a few minutes, without a toolchain.
//!
//! It lies in a folder beside the suites (`cargo xtask gpu`), runs them on the machine's own driver, compares what that
//! refuses with what the stand-in of the tests refuses, and measures. Told to run on the stand-in, it labels every line,
//! and none of it is a figure of a device.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for a person to read")]

mod figures;
mod refusals;
mod suites;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use ladder::{Channel, Methods, Value};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// One row of the table.
pub(crate) struct Row {
    what: String,
    found: String,
    /// What was wanted, and whether it was found; nothing was wanted of what is only told.
    wanted: Option<(String, bool)>,
    /// Of a device alone: on the stand-in it says nothing, whatever it is.
    is_figure: bool,
}

impl Row {
    pub(crate) fn told(what: impl Into<String>, found: impl Into<String>) -> Self {
        Self { what: what.into(), found: found.into(), wanted: None, is_figure: false }
    }

    pub(crate) fn held(
        what: impl Into<String>,
        found: impl Into<String>,
        wanted: impl Into<String>,
        holds: bool,
    ) -> Self {
        Self { wanted: Some((wanted.into(), holds)), ..Self::told(what, found) }
    }

    pub(crate) fn figure(
        what: impl Into<String>,
        found: impl Into<String>,
        wanted: impl Into<String>,
        holds: bool,
    ) -> Self {
        Self { is_figure: true, ..Self::held(what, found, wanted, holds) }
    }

    /// Prints it; whether it is as it was wanted.
    fn print(&self, label: &str, on_stand_in: bool) -> bool {
        let Self { what, found, wanted, is_figure } = self;
        let (wanted, verdict, holds) = match wanted {
            None => (String::new(), "", true),
            Some((wanted, _)) if *is_figure && on_stand_in => {
                (format!("  (of a device: {wanted})"), "-", true)
            }
            Some((wanted, true)) => (format!("  (wanted: {wanted})"), "ok", true),
            Some((wanted, false)) => (format!("  (wanted: {wanted})"), "MISS", false),
        };
        println!("{label}{verdict:4} {what}: {found}{wanted}");
        holds
    }
}

/// What was found, printed as it is.
struct Table {
    label: &'static str,
    on_stand_in: bool,
    all: bool,
}

impl Table {
    fn add(&mut self, row: &Row) {
        self.all &= row.print(self.label, self.on_stand_in);
    }

    fn heading(&self, of: &str) {
        println!("{}     {of}", self.label);
    }

    /// A part of it: one that ends early is a row of its own.
    fn part(&mut self, what: &str, rows: Result<Vec<Row>, Error>) {
        match rows {
            Ok(rows) => rows.iter().for_each(|row| self.add(row)),
            Err(error) => self.add(&Row::held(what, format!("{error}"), "no error", false)),
        }
    }
}

/// The worker's side of the figures.
fn serve() -> Result<bool, Error> {
    let Some(channel) = Channel::from_env()? else { return Ok(false) };
    channel.serve(Methods::new().on("take", |_| Ok(Value::Null)).on("echo", Ok))?;
    Ok(true)
}

/// Suites of the experimental rung are a section of their own.
fn is_of_pools(name: &str) -> bool {
    name.contains("pool")
}

/// Whether it is to run on the stand-in.
fn is_told_to() -> bool {
    std::env::args().any(|argument| argument == "--stand-in")
}

fn check() -> Result<bool, Error> {
    let started = Instant::now();
    let driver = cuda::driver()?;
    let on_stand_in = driver.is_stand_in();
    let label = if on_stand_in { "STAND-IN " } else { "" };
    if on_stand_in && !is_told_to() {
        return Err(
            "the stand-in of the tests is in the driver's place: nothing is measured on it".into(),
        );
    }
    let mut table = Table { label, on_stand_in, all: true };
    let found = format!("CUDA {} (at least {})", driver.version(), cuda::driver::floor());
    table.add(&Row::told("driver", found));
    for info in driver.devices() {
        let found = format!("{} ({} MiB), {:?}", info.name(), info.bytes() >> 20, info.can());
        table.add(&Row::told(info.device().to_string(), found));
    }
    if !on_stand_in {
        table.add(&Row::told("marker of the stand-in", "not there"));
    }
    let folder = std::env::current_exe()?.parent().map(PathBuf::from).ok_or("no folder")?;
    // What needs no other part comes even where that part ends early.
    table.part("refusals", refusals::rows());
    table.part("what several processes do", refusals::of_several());
    table.heading("rungs of devices");
    suites::each(&folder, on_stand_in, |name| !is_of_pools(name), |row| table.add(&row))?;
    table.heading("pool-ipc (experimental: docs/pool-ownership-contract.md)");
    suites::each(&folder, on_stand_in, is_of_pools, |row| table.add(&row))?;
    table.heading("figures");
    table.part("hops", figures::hops(on_stand_in));
    table.part("copies on the device", figures::copies(on_stand_in));
    table.part("copies to the host", figures::to_the_host(on_stand_in));
    let all = table.all;
    println!(
        "{label}{:4} in {:.0} s",
        if all { "ok" } else { "MISS" },
        started.elapsed().as_secs_f64()
    );
    Ok(all)
}

fn main() -> ExitCode {
    if let Some(outcome) = refusals::helper() {
        return outcome;
    }
    match serve().and_then(|served| if served { Ok(true) } else { check() }) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let label = if is_told_to() { "STAND-IN " } else { "" };
            eprintln!("{label}no check of a device: {error}");
            ExitCode::FAILURE
        }
    }
}
