//! Workers are started, supervised and reaped; nothing stays behind.

use std::io::Write;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use testkit::census::Census;
use testkit::peer::runs;
use testkit::{run_serially, trial};
use worker::{Command, HOST_GONE, Output};

const LONG: Duration = Duration::from_secs(20);

/// Of a worker that has much to say: far more than the queue of a reader holds. A line takes its time where wine is
/// the system.
const LINES: usize = if cfg!(windows) { 20_000 } else { 200_000 };

type Outcome = Result<(), String>;

fn check(holds: bool, what: impl Into<String>) -> Outcome {
    if holds { Ok(()) } else { Err(what.into()) }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn this(role: &str) -> Command {
    Command::this_executable().env("ROLE", role)
}

/// What this binary does as a worker.
fn act(role: &str) -> ExitCode {
    if role == "last-words" {
        // Of a program that knows nothing of links.
        let _ = writeln!(std::io::stdout(), "first");
        let _ = writeln!(std::io::stderr(), "out of cheese");
        return ExitCode::from(3);
    }
    let Ok(Some(link)) = worker::attach() else {
        return ExitCode::from(90);
    };
    match role {
        "echo" => {
            while let Ok(frame) = link.receive(None) {
                let _ = link.send(&frame.json, &[], None);
            }
            ExitCode::SUCCESS
        }
        "attach-twice" => {
            let again = worker::attach().is_ok_and(|link| link.is_none());
            let nothing = std::io::read_to_string(std::io::stdin()).is_ok_and(|all| all.is_empty());
            let _ = link.send(if again && nothing { "1" } else { "0" }, &[], None);
            ExitCode::SUCCESS
        }
        "flood" => {
            let mut out = std::io::stderr().lock();
            for number in 0..LINES {
                let _ = writeln!(out, "line {number} of a worker that has much to say");
            }
            let _ = link.send("\"done\"", &[], None);
            ExitCode::from(7)
        }
        "deaf" => loop {
            std::thread::sleep(LONG);
        },
        "host" => {
            // Starts a worker of its own that is busy for ever, says its number, and waits to die.
            let Ok((process, _link)) = this("deaf").spawn() else {
                return ExitCode::from(91);
            };
            let _ = link.send(&process.pid().to_string(), &[], None);
            std::thread::sleep(LONG);
            ExitCode::SUCCESS
        }
        _ => ExitCode::from(92),
    }
}

fn echoes() -> Outcome {
    let before = Census::take();
    {
        let (process, link) = this("echo").spawn().map_err(text)?;
        link.send("[1,2]", &[], None).map_err(text)?;
        let deadline = Some(Instant::now() + LONG);
        check(link.receive(deadline).map_err(text)?.json == "[1,2]", "no echo")?;
        check(process.is_running(), "not running")?;
        link.close();
        let exit = process.end(LONG);
        check(exit.status.success(), text(exit))?;
    }
    before.settle()
}

fn attaches_once() -> Outcome {
    let (_process, link) = this("attach-twice").spawn().map_err(text)?;
    check(link.receive(Some(Instant::now() + LONG)).map_err(text)?.json == "1", "attached twice")
}

fn not_a_worker() -> Outcome {
    check(worker::attach().map_err(text)?.is_none(), "attached without a host")
}

fn no_such_program() -> Outcome {
    let before = Census::take();
    let Err(error) = Command::new("/no/such/program").spawn() else {
        return Err("started nothing".into());
    };
    check(error.to_string().contains("/no/such/program"), text(&error))?;
    check(error.source.kind() == std::io::ErrorKind::NotFound, text(error))?;
    before.settle()
}

fn last_words() -> Outcome {
    let (process, link) = this("last-words").spawn().map_err(text)?;
    let exit = process.wait(LONG).ok_or("it runs on")?;
    check(
        exit.to_string() == "the worker exited with status 3; its last words: out of cheese",
        text(&exit),
    )?;
    check(exit.last_lines == ["first", "out of cheese"], format!("{:?}", exit.last_lines))?;
    check(link.receive(Some(Instant::now() + LONG)).is_err_and(|error| error.is_gone()), "not gone")
}

fn killed_after_its_grace() -> Outcome {
    let before = Census::take();
    let started = Instant::now();
    drop(this("deaf").grace(Duration::from_millis(50)).spawn().map_err(text)?);
    check(started.elapsed() < LONG, "the grace was not kept")?;
    let (process, _link) = this("deaf").spawn().map_err(text)?;
    let exit = process.kill();
    // There are no signals on Windows.
    let killed = if cfg!(windows) { "exited with status 1" } else { "was killed by signal 9" };
    check(exit.to_string() == format!("the worker {killed}"), text(exit))?;
    drop((process, _link));
    before.settle()
}

/// A reader of ours that never reads: the worker must not notice.
fn never_blocked_by_our_reader() -> Outcome {
    struct Stuck(Arc<Mutex<()>>);
    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            drop(self.0.lock());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let door = Arc::new(Mutex::new(()));
    let closed = door.lock().map_err(text)?;
    let output = Output::Pass(Box::new(Stuck(Arc::clone(&door))));
    let (process, link) = this("flood").output(output).spawn().map_err(text)?;
    check(link.receive(Some(Instant::now() + LONG)).map_err(text)?.json == "\"done\"", "stuck")?;
    let exit = process.wait(LONG).ok_or("it runs on")?;
    check(exit.status.code() == Some(7), text(&exit))?;
    let last = exit.last_lines.last().cloned().unwrap_or_default();
    drop(closed);
    check(last == format!("line {} of a worker that has much to say", LINES - 1), last)
}

fn ends_with_its_host() -> Outcome {
    let (host, link) = this("host").spawn().map_err(text)?;
    let pid = link.receive(Some(Instant::now() + LONG)).map_err(text)?.json;
    let pid = pid.parse().map_err(text)?;
    check(runs(pid), "the worker's worker does not run")?;
    host.kill();
    let end = Instant::now() + LONG;
    // Gone, or a zombie that whoever inherited it has yet to reap.
    while runs(pid) {
        check(Instant::now() < end, format!("{pid} outlives its host"))?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var("ROLE") {
        return act(&role);
    }
    assert_eq!(HOST_GONE, 83);
    run_serially(vec![
        trial("a_worker_echoes_and_leaves_nothing_behind", echoes),
        trial("a_worker_attaches_once", attaches_once),
        trial("a_process_that_was_not_spawned_is_no_worker", not_a_worker),
        trial("a_program_that_does_not_exist_is_an_error_that_names_it", no_such_program),
        trial("an_exit_tells_status_and_last_words", last_words),
        trial("a_worker_that_does_not_end_is_killed_after_its_grace", killed_after_its_grace),
        trial("a_worker_is_never_blocked_by_our_reader", never_blocked_by_our_reader),
        trial("a_worker_ends_with_its_host", ends_with_its_host),
    ])
}
