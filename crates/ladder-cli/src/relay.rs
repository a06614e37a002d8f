//! `ladder relay`.

use std::fmt;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use ladder::{
    CallError, CallOptions, Command, ConnectError, Output, Reply, Value, Worker, WorkerBuilder,
};

use crate::load::{self, load};
use crate::operate::Operation;
use crate::report::{self, Crossing};
use crate::save::{json, save};

/// Send files through a worker and back.
#[derive(Debug, Args)]
pub(crate) struct Relay {
    /// PNG and JPEG pictures, .npy and .npz arrays, .safetensors maps, .pickle, .txt; anything else goes
    /// as bytes.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// What the worker does with them.
    #[arg(long, value_enum, default_value_t = Operation::Echo)]
    op: Operation,
    /// Write the result, in the form of the name's ending; for one file.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Send each file this many times.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// One JSON object a leaf, and a closing one.
    #[arg(long)]
    json: bool,
    /// Seconds that a call may take.
    #[arg(long, default_value_t = 120.0, value_parser = seconds)]
    timeout: f64,
    /// Send tensors from the memory of this device: `cuda:0`, a number of this process's, or the UUID as `ladder doctor`
    /// prints it.
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Another program as the worker, instead of this one.
    #[arg(long, value_name = "PROGRAM")]
    worker: Option<PathBuf>,
}

pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if Duration::try_from_secs_f64(seconds).is_ok_and(|limit| !limit.is_zero()) {
        Ok(seconds)
    } else {
        Err("not a number of seconds".into())
    }
}

/// Why nothing, or not everything, was relayed.
#[derive(Debug)]
pub(crate) enum Error {
    File(PathBuf, load::Error),
    Operation(PathBuf, load::Error),
    Connect(ConnectError),
    Call(PathBuf, CallError),
    Device(String, ladder::Refusal),
    Print(std::io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, error) | Self::Operation(path, error) => {
                write!(f, "{}: {error}", path.display())
            }
            Self::Connect(error) => error.fmt(f),
            Self::Call(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Device(name, refusal) => write!(f, "{name}: {refusal}"),
            Self::Print(error) => write!(f, "writing the report: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl Relay {
    /// Whether all that came back was what it should be.
    pub(crate) fn run(self) -> Result<bool, Error> {
        if self.output.is_some() && self.files.len() > 1 {
            report::usage("--output takes the result of one file");
        }
        // Everything is read before a worker is started: a bad file costs nothing else.
        let mut values = Vec::new();
        for path in &self.files {
            let mut value = load(path).map_err(|error| Error::File(path.clone(), error))?;
            if let Some(device) = &self.device {
                value = crate::device::put(device, value)
                    .map_err(|refusal| Error::Device(device.clone(), refusal))?;
            }
            values.push((path.as_path(), value));
        }
        let limit = Duration::from_secs_f64(self.timeout);
        let worker = self.spawn(limit)?;
        let pid = worker.process().pid();

        let calls = u64::from(self.repeat) * values.len() as u64;
        let progress = progress(calls);
        let (mut ok, mut crossings) = (true, Vec::new());
        for (path, value) in &values {
            let expected = self.op.apply(value).ok();
            let mut last = None;
            for _ in 0..self.repeat {
                let reply = self.call(&worker, path, value, limit)?;
                ok &= Some(reply.value()) == expected.as_ref();
                last = Some(reply);
                progress.inc(1);
            }
            let Some(reply) = last else { continue };
            if let Some(output) = &self.output {
                let written = save(output, reply.value());
                written.map_err(|error| Error::File(output.clone(), error))?;
            }
            let result = match self.op {
                Operation::Stats => {
                    let json = json(reply.value());
                    Some(json.map_err(|error| Error::Operation(path.to_path_buf(), error))?)
                }
                _ => None,
            };
            crossings.push(Crossing { file: name(path), route: reply.sent().clone(), result });
        }
        progress.finish_and_clear();
        drop(worker);
        let printed = if self.json {
            report::json(&crossings, ok, calls, pid)
        } else {
            report::table(&crossings, ok, calls, pid)
        };
        printed.map_err(Error::Print)?;
        Ok(ok)
    }

    fn spawn(&self, limit: Duration) -> Result<Worker, Error> {
        let command = match &self.worker {
            Some(program) => Command::new(program),
            None => Command::this_executable(),
        };
        let command = command.output(Output::Discard).grace(Duration::from_secs(1));
        // A worker that hangs is given as long to say hello as for a call, up to 10 seconds.
        WorkerBuilder::default()
            .handshake(limit.min(Duration::from_secs(10)))
            .spawn(command)
            .map_err(Error::Connect)
    }

    fn call(
        &self,
        worker: &Worker,
        path: &Path,
        value: &Value,
        limit: Duration,
    ) -> Result<Reply, Error> {
        worker
            .call_with(self.op.name(), value.clone(), CallOptions::new().limit(limit))
            .map_err(|error| Error::Call(path.to_path_buf(), error))
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// On the standard error, where that is a terminal and there is something to wait for.
fn progress(calls: u64) -> ProgressBar {
    if calls < 2 || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(calls);
    if let Ok(style) = ProgressStyle::with_template("{pos}/{len} calls {wide_bar} {eta}") {
        bar.set_style(style);
    }
    bar
}
