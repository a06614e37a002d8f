//! The host's side: a process and its end.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use link::Link;

use crate::output::{Output, Tail, drain};
use crate::sys::{self, Group, Handover};

/// How long a dropped [`Process`] may take to end by itself.
const GRACE: Duration = Duration::from_secs(2);

/// A program could not be started as a worker.
#[derive(Debug, thiserror::Error)]
#[error("the worker {program:?} could not be started: {source}")]
pub struct SpawnError {
    /// The program.
    pub program: OsString,
    /// Why.
    pub source: io::Error,
}

/// What to start.
#[derive(Debug)]
pub struct Command {
    program: OsString,
    name: Option<OsString>,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    output: Output,
    grace: Duration,
}

impl Command {
    /// A program, looked up in `PATH` unless its name is a path.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            name: None,
            arguments: Vec::new(),
            variables: Vec::new(),
            output: Output::default(),
            grace: GRACE,
        }
    }

    /// This very executable; on Linux even if its file was replaced meanwhile.
    #[must_use]
    pub fn this_executable() -> Self {
        let (program, name) = sys::this_executable();
        let mut command = Self::new(program);
        command.name = name;
        command
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.variables.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Where its standard output and error go, besides the tail kept for errors.
    #[must_use]
    pub fn output(mut self, output: Output) -> Self {
        self.output = output;
        self
    }

    /// How long it may take to end by itself when its [`Process`] is dropped, before it is killed:
    /// 2 seconds unless said otherwise.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Starts it, with one end of a new link handed over through its standard input.
    ///
    /// On Windows the process and whatever it starts are in a job of their own, and end with this process.
    ///
    /// # Errors
    ///
    /// Where the program does not exist or cannot be executed, or descriptors or processes ran out.
    pub fn spawn(self) -> Result<(Process, Link), SpawnError> {
        let Self { program, name, arguments, variables, output, grace } = self;
        let failed = |source: io::Error| SpawnError { program: program.clone(), source };
        let (reader, writer) = io::pipe().map_err(failed)?;
        let mut command = std::process::Command::new(&program);
        command
            .args(arguments)
            .envs(variables)
            .stdout(Stdio::from(writer.try_clone().map_err(failed)?))
            .stderr(Stdio::from(writer));
        let handover = Handover::prepare(&mut command).map_err(failed)?;
        if let Some(name) = name {
            sys::name(&mut command, &name);
        }
        let mut child = command.spawn().map_err(failed)?;
        // The command still holds the worker's ends; with them open, no end of stream would come.
        drop(command);
        match supervise(&mut child, handover, reader, output) {
            Ok((link, supervised)) => {
                let Supervised { exit, group, tail, drainer } = supervised;
                let process = Process {
                    pid: child.id(),
                    host: std::process::id(),
                    exit,
                    group,
                    inner: Mutex::new(Inner { child, drainer: Some(drainer), exit: None }),
                    tail,
                    grace,
                };
                Ok((process, link))
            }
            Err(error) => {
                // W1, also for a process that cannot be watched.
                let _ = child.kill();
                let _ = child.wait();
                Err(failed(error))
            }
        }
    }
}

struct Supervised {
    exit: sys::Exit,
    group: Group,
    tail: Tail,
    drainer: JoinHandle<()>,
}

fn supervise(
    child: &mut Child,
    handover: Handover,
    reader: io::PipeReader,
    output: Output,
) -> io::Result<(Link, Supervised)> {
    let exit = sys::Exit::of(child)?;
    // Before it is handed the link: what it starts once it is a worker is in its group.
    let group = Group::of(child)?;
    let link = handover.complete(child)?.watching(exit.socket()?);
    let drained = exit.try_clone()?;
    let tail = Tail::default();
    let kept = tail.clone();
    let drainer = std::thread::Builder::new()
        .name("worker-drain".into())
        .spawn(move || drain(reader, &drained, &kept, output))?;
    Ok((link, Supervised { exit, group, tail, drainer }))
}

/// A started process; ended and reaped when dropped (W1).
///
/// Dropping waits up to the [`Command::grace`] for it to end by itself (its link should be closed
/// by then), and then kills it.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    host: u32,
    exit: sys::Exit,
    group: Group,
    inner: Mutex<Inner>,
    tail: Tail,
    grace: Duration,
}

#[derive(Debug)]
struct Inner {
    child: Child,
    drainer: Option<JoinHandle<()>>,
    exit: Option<Exit>,
}

impl Process {
    /// Its process id; its own until this value is dropped or has reaped it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.wait(Duration::ZERO).is_none()
    }

    /// Waits up to `limit` until it has exited, and reaps it.
    pub fn wait(&self, limit: Duration) -> Option<Exit> {
        if let Some(exit) = &self.inner().exit {
            return Some(exit.clone());
        }
        self.exit.wait(limit).then(|| self.reap())
    }

    /// Kills it (SIGKILL, TerminateProcess) and reaps it.
    pub fn kill(&self) -> Exit {
        // It fails only for a process that is reaped already, and then there is nothing to do.
        let _ = self.inner().child.kill();
        self.reap()
    }

    /// Waits up to `grace` for it to end by itself, then kills it.
    pub fn end(&self, grace: Duration) -> Exit {
        self.wait(grace).unwrap_or_else(|| self.kill())
    }

    /// The [`Command::grace`].
    #[must_use]
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// The last lines that it wrote so far.
    #[must_use]
    pub fn last_lines(&self) -> Vec<String> {
        self.tail.lines()
    }

    fn reap(&self) -> Exit {
        let mut inner = self.inner();
        if let Some(exit) = &inner.exit {
            return exit.clone();
        }
        // It has exited or is being killed, so this does not wait long. Only a process that somebody
        // else reaped has no status; the kernel's zero is then as good as any.
        let status = inner.child.wait().unwrap_or_else(|_| sys::no_status());
        self.group.end();
        if let Some(drainer) = inner.drainer.take() {
            Group::join(drainer);
        }
        let exit = Exit { status, last_lines: self.tail.lines() };
        inner.exit = Some(exit.clone());
        exit
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(unix)]
impl std::os::fd::AsFd for Process {
    /// What can be read from once it has ended: on Linux its pidfd.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.exit.as_fd()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.host != std::process::id() {
            // A fork of the host: the worker is not its child (L9).
            return;
        }
        let exit = self.end(self.grace);
        tracing::debug!(pid = self.pid, "{exit}");
    }
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// Its status, or the signal that killed it.
    pub status: ExitStatus,
    /// The last lines that it wrote on its standard output and error.
    pub last_lines: Vec<String>,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.status.code(), sys::signal(self.status)) {
            (Some(code), _) => write!(f, "the worker exited with status {code}")?,
            (None, Some(signal)) => write!(f, "the worker was killed by signal {signal}")?,
            (None, None) => write!(f, "the worker ended: {}", self.status)?,
        }
        if let Some(last) = self.last_lines.iter().rev().find(|line| !line.trim().is_empty()) {
            write!(f, "; its last words: {}", last.trim())?;
        }
        Ok(())
    }
}
