//! What a person, or a script, gets to read.

use std::io::{self, Write};
use std::process::ExitCode;

use comfy_table::{CellAlignment, Table, presets};
use ladder::{Leg, Route, What};
use serde::Serialize;

/// One file that crossed.
pub(crate) struct Crossing {
    pub(crate) file: String,
    pub(crate) route: Route,
    /// What the worker answered, where that is to be read.
    pub(crate) result: Option<String>,
}

/// One line on the standard error, and the status of a failure.
pub(crate) fn failed(error: &dyn std::error::Error) -> ExitCode {
    let line = error.to_string().replace('\n', " ");
    // Where even the standard error is gone, the status is all there is.
    let _ = writeln!(io::stderr(), "ladder: {line}");
    ExitCode::FAILURE
}

/// Ends the program as for a wrong command line.
pub(crate) fn usage(text: &str) -> ! {
    clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, format!("{text}\n")).exit()
}

fn dtype(what: &What) -> String {
    match what {
        What::Tensor(dtype, _) => dtype.to_string(),
        What::Array(descr, _) => descr.to_string(),
        What::Str => "str".into(),
        What::Bytes => "bytes".into(),
        What::Plain(kind) => (*kind).into(),
        other => other.to_string(),
    }
}

/// As much of a long type as a table has room for.
fn short(text: String) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// What a leaf rode: a form over its carrier, or a carrier.
fn rung(leg: &Leg) -> String {
    match &leg.over {
        Some(carrier) => format!("{} over {}", leg.rung.told(), carrier.told()),
        None => leg.rung.told().into_owned(),
    }
}

fn shape(what: &What) -> Option<&[usize]> {
    match what {
        What::Tensor(_, shape) | What::Array(_, shape) => Some(shape),
        _ => None,
    }
}

fn micros(leg: &Leg) -> f64 {
    (leg.time.as_secs_f64() * 1e7).round() / 10.0
}

/// One table, and a line below it.
pub(crate) fn table(crossings: &[Crossing], ok: bool, calls: u64, pid: u32) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["leaf", "dtype", "shape", "bytes", "rung", "copies", "µs", "why not higher"]);
    for crossing in crossings {
        for leg in &crossing.route.legs {
            let shape = shape(&leg.what).map(|shape| {
                let extents: Vec<String> = shape.iter().map(ToString::to_string).collect();
                extents.join("×")
            });
            let why: Vec<String> = leg
                .declined
                .iter()
                .map(|(rung, why)| format!("{rung}: {}", why.reason()))
                .collect();
            table.add_row([
                format!("{} {}", crossing.file, leg.path),
                short(dtype(&leg.what)),
                shape.unwrap_or_default(),
                leg.bytes.to_string(),
                rung(leg),
                leg.copies.to_string(),
                format!("{:.1}", micros(leg)),
                why.join("; "),
            ]);
        }
    }
    for number in [3, 5, 6] {
        if let Some(column) = table.column_mut(number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{table}")?;
    for crossing in crossings {
        if let Some(result) = &crossing.result {
            writeln!(out, "{}: {result}", crossing.file)?;
        }
    }
    let verdict = if ok { "every result checked" } else { "A RESULT IS WRONG" };
    let plural = if calls == 1 { "" } else { "s" };
    writeln!(out, "{calls} call{plural} to worker {pid}: {verdict}")?;
    out.flush()
}

#[derive(Serialize)]
struct Leaf<'a> {
    file: &'a str,
    path: &'a str,
    dtype: String,
    shape: Option<&'a [usize]>,
    bytes: u64,
    rung: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<&'a str>,
    copies: u8,
    access: String,
    us: f64,
    declined: Vec<Declined<'a>>,
}

#[derive(Serialize)]
struct Declined<'a> {
    rung: &'a str,
    reason: &'static str,
}

#[derive(Serialize)]
struct Closing {
    ok: bool,
    calls: u64,
    worker_pid: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    results: Vec<Box<serde_json::value::RawValue>>,
}

/// One object a leaf, and a closing one.
pub(crate) fn json(crossings: &[Crossing], ok: bool, calls: u64, pid: u32) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for crossing in crossings {
        for leg in &crossing.route.legs {
            let declined = leg.declined.iter().map(|(rung, refusal)| Declined {
                rung: rung.as_str(),
                reason: refusal.reason().code(),
            });
            let leaf = Leaf {
                file: &crossing.file,
                path: &leg.path,
                dtype: dtype(&leg.what),
                shape: shape(&leg.what),
                bytes: leg.bytes,
                rung: leg.rung.as_str(),
                over: leg.over.as_ref().map(|carrier| carrier.as_str()),
                copies: leg.copies,
                access: leg.access.to_string(),
                us: micros(leg),
                declined: declined.collect(),
            };
            serde_json::to_writer(&mut out, &leaf)?;
            writeln!(out)?;
        }
    }
    let results = crossings.iter().filter_map(|crossing| {
        serde_json::value::RawValue::from_string(crossing.result.clone()?).ok()
    });
    let results = results.collect();
    serde_json::to_writer(&mut out, &Closing { ok, calls, worker_pid: pid, results })?;
    writeln!(out)?;
    out.flush()
}
