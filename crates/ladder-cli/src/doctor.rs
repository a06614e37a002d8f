//! `ladder doctor`: what works between this program and a worker, and how to get the rest.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use ladder::{
    Command, ConnectError, Output, Proof, Report, RungReport, Verdict, Worker, WorkerBuilder,
};
use serde::Serialize;

use crate::machine::{self, Check};

/// Prove every rung with a worker, and tell what works, what it costs, and how to get the rest.
///
/// The status is 0 where every rung that both sides offer is verified, 1 where one was demoted, and 2 where
/// the worker is refused or does not answer.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// A command, as the shell takes it, that starts a worker; this program unless said otherwise.
    #[arg(long, value_name = "CMD")]
    worker: Option<String>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
    /// Ask for `pool-ipc` too, and have the worker do so where it is this program.
    #[arg(long)]
    experimental_pool_ipc: bool,
    /// Seconds that the worker may take to say hello, and then to answer.
    #[arg(long, default_value_t = 10.0, value_parser = crate::relay::seconds)]
    timeout: f64,
}

/// What was found, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Verified,
    Demoted,
    Refused,
}

impl Outcome {
    fn of(report: &Report, let_in: bool) -> Self {
        match report.demoted().next() {
            _ if !let_in => Self::Refused,
            Some(_) => Self::Demoted,
            None => Self::Verified,
        }
    }

    fn status(self) -> u8 {
        match self {
            Self::Verified => 0,
            Self::Demoted => 1,
            Self::Refused => 2,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Verified => "every rung that both sides offer is verified",
            Self::Demoted => "something was demoted; work goes on without it",
            Self::Refused => "THE WORKER IS REFUSED",
        }
    }
}

/// What was printed, or why nothing was.
#[derive(Debug)]
pub(crate) enum Error {
    Connect(ConnectError),
    Print(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(error) => error.fmt(f),
            Self::Print(error) => write!(f, "writing the report: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    pub(crate) fn status(&self) -> ExitCode {
        match self {
            Self::Connect(_) => ExitCode::from(Outcome::Refused.status()),
            Self::Print(_) => ExitCode::FAILURE,
        }
    }
}

/// A command line, as its system reads one.
#[cfg(unix)]
fn shell(command: &str) -> Command {
    Command::new("sh").args(["-c", &format!("exec {command}")])
}

/// Words, and quotes around those with spaces: a shell between the two processes would keep the link from the worker.
#[cfg(not(unix))]
fn shell(command: &str) -> Command {
    let mut is_quoted = false;
    let mut words = command.split(|c| {
        is_quoted ^= c == '"';
        c == ' ' && !is_quoted
    });
    let plain = |word: &str| word.replace('"', "");
    let program = Command::new(words.next().map_or(String::new(), plain));
    program.args(words.filter(|word| !word.is_empty()).map(plain))
}

impl Doctor {
    /// The status to end with.
    pub(crate) fn run(self) -> Result<ExitCode, Error> {
        let command = match &self.worker {
            Some(command) => shell(command),
            None if self.experimental_pool_ipc => {
                Command::this_executable().args([crate::POOL_IPC])
            }
            None => Command::this_executable(),
        };
        let command = command.output(Output::Discard).grace(Duration::from_secs(1));
        let limit = Duration::from_secs_f64(self.timeout);
        // Every device now, not before its first leaf.
        let builder = Worker::builder()
            .handshake(limit)
            .ladder(crate::device::rungs(self.experimental_pool_ipc));
        let builder = machine::devices().into_iter().fold(builder, WorkerBuilder::prove_on);
        let connected = builder.spawn(command);
        let (report, let_in) = match connected {
            Ok(worker) => (worker.report(), true),
            Err(ConnectError::Refused(report)) => (*report, false),
            Err(error) => return Err(Error::Connect(error)),
        };
        let outcome = Outcome::of(&report, let_in);
        let checks = machine::look_around(&report);
        let printed = if self.json {
            print_json(&report, outcome, &checks)
        } else {
            print_table(&report, outcome, &checks)
        };
        printed.map_err(Error::Print)?;
        Ok(ExitCode::from(outcome.status()))
    }
}

/// A verdict, in words and for a script.
#[derive(Debug, Serialize)]
struct Told {
    verdict: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<&'static str>,
}

impl Told {
    fn of(verdict: &Verdict) -> Self {
        let (word, refusal) = match verdict {
            Verdict::Verified => ("verified", None),
            Verdict::Demoted(why) => ("demoted", Some(why)),
            Verdict::NotOffered(why) => ("not offered", Some(why)),
            _ => ("before its first leaf", None),
        };
        Self {
            verdict: word,
            code: refusal.map(|why| why.reason().code()),
            why: refusal.map(ToString::to_string),
            remedy: refusal.and_then(|why| why.reason().remedy()),
        }
    }
}

fn millis(time: Duration) -> String {
    if time.is_zero() { String::new() } else { format!("{:.1}", time.as_secs_f64() * 1e3) }
}

fn print_table(report: &Report, outcome: Outcome, checks: &[Check]) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["rung", "memory", "from here", "to here", "ms", "why, and what to do"]);
    for RungReport { rung, proofs, .. } in &report.rungs {
        for Proof { device, sending, receiving, time, .. } in proofs {
            let told = [Told::of(sending), Told::of(receiving)];
            let mut notes: Vec<String> = Vec::new();
            for told in &told {
                let remedy = told.remedy.map(|remedy| format!(" ({remedy})")).unwrap_or_default();
                let note = told.why.as_ref().map(|why| format!("{why}{remedy}"));
                notes.extend(note.filter(|note| !notes.contains(note)));
            }
            let [there, back] = told.map(|told| told.verdict);
            let (rung, device) = (rung.told().into_owned(), device.to_string());
            table.add_row([
                rung,
                device,
                there.into(),
                back.into(),
                millis(*time),
                notes.join("; "),
            ]);
        }
    }
    if let Some(column) = table.column_mut(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{table}")?;
    for difference in report.differences() {
        writeln!(out, "the two processes differ: {difference}")?;
    }
    for Check { about, found, remedy } in checks {
        writeln!(out, "{about}: {found}")?;
        if let Some(remedy) = remedy {
            writeln!(out, "    {remedy}")?;
        }
    }
    writeln!(out, "{}", outcome.words())?;
    out.flush()
}

#[derive(Serialize)]
struct Row<'a> {
    rung: &'a str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    experimental: bool,
    memory: String,
    from_here: Told,
    to_here: Told,
    us: f64,
}

#[derive(Serialize)]
struct Everything<'a> {
    verdict: Outcome,
    rungs: Vec<Row<'a>>,
    here: BTreeMap<&'a str, &'a str>,
    there: BTreeMap<&'a str, &'a str>,
    differ: Vec<String>,
    machine: &'a [Check],
}

fn print_json(report: &Report, outcome: Outcome, checks: &[Check]) -> io::Result<()> {
    let row = |rung: &RungReport| -> Vec<Row<'_>> {
        let row = |proof: &Proof| Row {
            rung: report.rung(&rung.rung).map_or("", |rung| rung.rung.as_str()),
            experimental: rung.rung.is_experimental(),
            memory: proof.device.to_string(),
            from_here: Told::of(&proof.sending),
            to_here: Told::of(&proof.receiving),
            us: (proof.time.as_secs_f64() * 1e7).round() / 10.0,
        };
        rung.proofs.iter().map(row).collect()
    };
    let everything = Everything {
        verdict: outcome,
        rungs: report.rungs.iter().flat_map(row).collect(),
        here: report.mine.iter().collect(),
        there: report.theirs.iter().collect(),
        differ: report.differences().into_iter().map(|difference| difference.fact).collect(),
        machine: checks,
    };
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &everything)?;
    writeln!(out)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ladder::{Device, Facts, RungId};
    use rung::{Reason, Refusal};

    fn report(sending: Verdict) -> Report {
        let mut proof = Proof::of(Device::Cuda([1; 16]), Verdict::Verified);
        proof.sending = sending;
        let rung = RungReport::new(RungId::new("near"), vec![proof]);
        Report::new(Facts::default(), Facts::default(), vec![rung])
    }

    #[test]
    fn the_status_says_what_became_of_the_rungs() {
        let lacking = Verdict::NotOffered(Reason::Platform.into());
        let wrong = Verdict::Demoted(Refusal::new(Reason::Corrupt, "x"));
        for (sending, let_in, status) in [
            (Verdict::Verified, true, 0),
            (Verdict::Unproven, true, 0),
            (lacking, true, 0),
            (wrong.clone(), true, 1),
            (wrong, false, 2),
        ] {
            let outcome = Outcome::of(&report(sending.clone()), let_in);
            assert_eq!(outcome.status(), status, "{sending:?}");
        }
    }

    #[test]
    fn a_demotion_is_told_with_its_remedy() {
        let told = Told::of(&Verdict::Demoted(Reason::DeviceUnknown.into()));
        assert_eq!((told.verdict, told.code), ("demoted", Some("device-unknown")));
        assert!(told.remedy.is_some_and(|remedy| remedy.contains("CUDA_VISIBLE_DEVICES")));
        assert_eq!(Told::of(&Verdict::Unproven).verdict, "before its first leaf");
    }
}
