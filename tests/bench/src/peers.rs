//! What a user would pick instead.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::Error;
use crate::report::{Report, key};

/// The Rust peers, in a program of their own.
pub(crate) struct Driver {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Driver {
    pub(crate) fn start(program: &Path) -> Result<Self, Error> {
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (Some(to), Some(from)) = (to, from) else { return Err("no pipes".into()) };
        Ok(Self { child, to, from: BufReader::new(from) })
    }

    /// A batch of round trips, in microseconds.
    pub(crate) fn batch(
        &mut self,
        peer: &str,
        case: &str,
        bytes: usize,
        count: usize,
    ) -> Result<Vec<f64>, Error> {
        writeln!(self.to, "{peer} {case} {bytes} {count}")?;
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        if let Some(error) = line.trim().strip_prefix("error: ") {
            return Err(error.to_owned().into());
        }
        let samples: Result<Vec<f64>, _> = line.split_ascii_whitespace().map(str::parse).collect();
        let samples = samples?;
        if samples.is_empty() { Err("the driver ended".into()) } else { Ok(samples) }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The Python peers: their own loops, one after the other, in this run.
pub(crate) fn python(
    report: &mut Report,
    python: &Path,
    script: &Path,
    quick: bool,
) -> Result<(), Error> {
    let sizes = if quick { "67108864" } else { "67108864,1073741824" };
    for name in ["torch_fs_pipe", "shm"] {
        let output = Command::new(python).arg(script).args([name, "--sizes", sizes]).output()?;
        for line in String::from_utf8(output.stdout)?.lines() {
            let Ok(line) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            let (Some(peer), Some(case)) = (line["peer"].as_str(), line["case"].as_str()) else {
                continue;
            };
            let bytes = line["bytes"].as_u64().unwrap_or(0) as usize;
            let outcome = line["median_us"].as_f64().map(|us| vec![us]);
            let outcome = outcome.ok_or_else(|| line["error"].to_string());
            report.add(&key(peer, case, bytes), 0, outcome);
            if peer.contains("torch") && case.contains("fresh") {
                let private = key("ladder", "private, one way + ack", bytes);
                let name = format!("private vs torch.multiprocessing file_system, {bytes}");
                report.ratio(&name, &private, &key(peer, case, bytes), 0.2);
            }
        }
    }
    Ok(())
}
