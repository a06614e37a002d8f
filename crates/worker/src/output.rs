//! What a worker writes on its standard output and error.

use std::collections::VecDeque;
use std::fmt;
use std::io::{PipeReader, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use crate::sys::{self, Exit};

/// Last lines that are kept for an error.
const TAIL_LINES: usize = 20;

/// Bytes of a line that are kept; the rest of it is passed on in pieces.
const LINE_BYTES: usize = 1024;

/// Lines that may wait for a slow reader of ours before some are dropped.
const WAITING_LINES: usize = 1024;

/// Where a worker's output goes, besides the tail kept for errors.
#[derive(Default)]
pub enum Output {
    /// To `tracing`, a debug event a line.
    #[default]
    Trace,
    /// Nowhere.
    Discard,
    /// To a writer, from a thread of its own; lines that it is too slow for are dropped and counted.
    Pass(Box<dyn Write + Send>),
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trace => "Trace",
            Self::Discard => "Discard",
            Self::Pass(_) => "Pass",
        })
    }
}

/// The last lines that a worker wrote.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().cloned().collect()
    }
}

/// Drains a pipe until its process is gone and nothing is left in it.
pub(crate) fn drain(pipe: PipeReader, process: &Exit, tail: &Tail, output: Output) {
    let mut sink = Sink::new(output);
    let mut line = Vec::new();
    sys::drain(pipe, process, |bytes| take(bytes, &mut line, tail, &mut sink));
    if !line.is_empty() {
        finish(&mut line, tail, &mut sink);
    }
}

fn take(bytes: &[u8], line: &mut Vec<u8>, tail: &Tail, sink: &mut Sink) {
    for &byte in bytes {
        if byte == b'\n' || line.len() == LINE_BYTES {
            finish(line, tail, sink);
        }
        if byte != b'\n' {
            line.push(byte);
        }
    }
}

fn finish(line: &mut Vec<u8>, tail: &Tail, sink: &mut Sink) {
    let text = String::from_utf8_lossy(line).into_owned();
    line.clear();
    sink.take(&text);
    tail.push(text);
}

enum Sink {
    Trace,
    Discard,
    Pass { queue: SyncSender<String>, dropped: usize },
}

impl Sink {
    fn new(output: Output) -> Self {
        match output {
            Output::Trace => Self::Trace,
            Output::Discard => Self::Discard,
            Output::Pass(mut writer) => {
                let (queue, lines) = sync_channel::<String>(WAITING_LINES);
                // It ends with the queue; a writer that blocks for ever keeps this thread alone.
                let passing = std::thread::Builder::new().name("worker-output".into());
                let started = passing.spawn(move || {
                    for line in lines {
                        if writeln!(writer, "{line}").is_err() {
                            return;
                        }
                    }
                });
                match started {
                    Ok(_) => Self::Pass { queue, dropped: 0 },
                    Err(_) => Self::Trace,
                }
            }
        }
    }

    fn take(&mut self, line: &str) {
        match self {
            Self::Trace => tracing::debug!(target: "worker", "{line}"),
            Self::Discard => {}
            Self::Pass { queue, dropped } => {
                if *dropped > 0 && queue.try_send(format!("[{dropped} lines dropped]")).is_ok() {
                    *dropped = 0;
                }
                if queue.try_send(line.to_owned()).is_err() {
                    *dropped += 1;
                }
            }
        }
    }
}
