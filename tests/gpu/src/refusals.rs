//! What the driver refuses, and with which code: beside the stand-in's.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::ipc::Shareable;
use cuda::{Buffer, Context, Event, EventHandle, MemHandle, Stream};
use rung::Refusal;

use crate::{Error, Row};

const HELPER: &str = "GPU_CHECK_HANDLE";

fn to_text(handle: &[u8; 64]) -> String {
    handle.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_text(text: &str) -> Option<[u8; 64]> {
    let digits = text.as_bytes().chunks_exact(2);
    let bytes = digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    bytes.collect::<Option<Vec<u8>>>()?.try_into().ok()
}

fn first_context() -> Result<Arc<Context>, Refusal> {
    Context::of(cuda::driver()?.devices()[0].device())
}

/// A second process, which makes or opens a handle.
pub(crate) fn helper() -> Option<ExitCode> {
    let role = std::env::var(HELPER).ok()?;
    let outcome = (|| -> Result<String, Refusal> {
        let context = first_context()?;
        Ok(match role.split_once(' ') {
            Some(("open", handle)) => {
                let handle = MemHandle(from_text(handle).unwrap_or([0; 64]));
                handle.open(&context).map(|_| "opened".to_owned())?
            }
            Some(("event", handle)) => {
                let handle = EventHandle(from_text(handle).unwrap_or([0; 64]));
                Event::open(&context, handle).map(|_| "opened".to_owned())?
            }
            Some(("open-twice", handle)) => {
                let handle = MemHandle(from_text(handle).unwrap_or([0; 64]));
                let (one, other) = (handle.open(&context)?, handle.open(&context)?);
                let same = one.address() == other.address();
                let stream = Stream::new(&context)?;
                drop(one);
                // Closed once, it has to be there still.
                other.read_at(0, &mut [0; 16], &stream)?;
                format!("opened twice, at {} address", if same { "one" } else { "another" })
            }
            Some(("wait", handle)) => {
                let handle = EventHandle(from_text(handle).unwrap_or([0; 64]));
                let event = Event::open(&context, handle)?;
                println!("waiting");
                event.synchronize()?;
                "done".to_owned()
            }
            Some(("busy", _)) => {
                let (stream, event) = (Stream::new(&context)?, Event::shared(&context)?);
                stream.pause(Duration::from_secs(5))?;
                event.record(&stream)?;
                println!("{}", to_text(&event.handle()?.0));
                std::thread::sleep(Duration::from_secs(60));
                String::new()
            }
            _ => {
                let buffer = Buffer::plain(&context, 4 << 20)?;
                to_text(&MemHandle::of(&buffer)?.0)
            }
        })
    })();
    println!("{}", outcome.unwrap_or_else(|why| why.to_string()));
    Some(ExitCode::SUCCESS)
}

fn ask(role: String) -> Result<String, Error> {
    let output = Command::new(std::env::current_exe()?).env(HELPER, role).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The code in a refusal's words: `… gave 201 (INVALID_CONTEXT)`.
fn code(text: &str) -> Option<u32> {
    let (_, after) = text.split_once(" gave ")?;
    after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// (what is tried, what the stand-in answers, whether it is refused at all)
pub(crate) fn rows() -> Result<Vec<Row>, Error> {
    let context = first_context()?;
    let stream = Stream::new(&context)?;
    let plain = Buffer::plain(&context, 4 << 20)?;
    let shareable = Buffer::shareable(&context, 4 << 20)?;
    let said = |result: Result<(), Refusal>| {
        result.map_or_else(|why| why.to_string(), |()| "taken".into())
    };
    let handle = MemHandle::of(&plain)?;
    let freed = {
        let gone = Buffer::plain(&context, 4 << 20)?;
        MemHandle::of(&gone)?
    };
    let event = Event::shared(&context)?;
    event.record(&stream)?;
    let dead = from_text(&ask("make".into())?).map(|handle| MemHandle(handle).open(&context));
    let import = |descriptor, len| {
        Shareable::import(&context, descriptor, len).map(drop).map_err(Refusal::from)
    };
    let shared = shareable.as_shareable().ok_or("not shareable")?;
    let zero = std::fs::File::open("/dev/zero")?;
    let tried: Vec<(&str, u32, String)> = vec![
        ("a handle, where it was made", 201, said(handle.open(&context).map(drop))),
        ("a handle of shareable memory", 1, said(MemHandle::of(&shareable).map(drop))),
        (
            "a handle of stream-ordered memory",
            1,
            said(MemHandle::of(&Buffer::stream_ordered(&stream, 4096)?).map(drop)),
        ),
        (
            "a handle of managed memory",
            1,
            said(MemHandle::of(&Buffer::managed(&context, 4096)?).map(drop)),
        ),
        ("a handle of what was freed, elsewhere", 400, ask(format!("open {}", to_text(&freed.0)))?),
        (
            "a handle of a process that is gone",
            400,
            match dead {
                Some(opened) => said(opened.map(drop)),
                None => "no handle was made".into(),
            },
        ),
        (
            "an event's handle, where it was made",
            201,
            said(Event::open(&context, event.handle()?).map(drop)),
        ),
        ("an allocation of no bytes", 1, said(Buffer::plain(&context, 0).map(drop))),
        ("an allocation of 1 PiB", 2, said(Buffer::plain(&context, 1 << 50).map(drop))),
        ("a descriptor that is none of a driver's", 1, said(import(zero.into(), 2 << 20))),
        ("a descriptor of half as much", 1, said(import(shared.descriptor()?, 2 * shared.len()))),
    ];
    let mut rows: Vec<Row> = tried
        .into_iter()
        .map(|(what, stand_in, found)| {
            let refused = found != "taken" && found != "opened";
            let same = if code(&found) == Some(stand_in) { "the same" } else { "ANOTHER CODE" };
            Row::held(
                what,
                format!("{found}: {same} as the stand-in's {stand_in}"),
                "refused",
                refused,
            )
        })
        .collect();
    let opened = ask(format!("open {}", to_text(&handle.0)))?;
    rows.push(Row::held("a living handle, elsewhere", &opened, "opened", opened == "opened"));
    let opened = ask(format!("open-twice {}", to_text(&handle.0)))?;
    let twice = opened.starts_with("opened twice");
    rows.push(Row::held("one handle twice in a process", &opened, "opened twice", twice));
    let opened = ask(format!("event {}", to_text(&event.handle()?.0)))?;
    rows.push(Row::held("an event's handle, elsewhere", &opened, "opened", opened == "opened"));
    // What the rungs go by.
    let odd = plain.part(512..1024)?.attributes()?;
    let base = odd.range.0 == plain.address() && odd.is_legacy_ipc_capable;
    rows.push(Row::held(
        "a pointer inside an allocation",
        format!("{odd:?}"),
        "knows its allocation",
        base,
    ));
    let small = Buffer::plain(&context, 4096)?;
    let (range, id) = (small.attributes()?.range, small.attributes()?.buffer_id);
    rows.push(Row::told("a small allocation", format!("{range:?}, number {id}")));
    Ok(rows)
}

/// A helper that goes on, the first line that it says, and the rest.
fn start(role: String) -> Result<(Child, String, BufReader<ChildStdout>), Error> {
    let mut child =
        Command::new(std::env::current_exe()?).env(HELPER, role).stdout(Stdio::piped()).spawn()?;
    let (mut line, stdout) = (String::new(), child.stdout.take().ok_or("no output")?);
    let mut rest = BufReader::new(stdout);
    rest.read_line(&mut line)?;
    Ok((child, line.trim().to_owned(), rest))
}

/// What a driver does with those who wait for a process that is killed before it was done: told, since nothing in the
/// documents says.
pub(crate) fn of_several() -> Result<Vec<Row>, Error> {
    let (mut busy, event, _rest) = start("busy now".into())?;
    let (mut waiter, said, _more) = start(format!("wait {event}"))?;
    busy.kill()?;
    busy.wait()?;
    let (killed, limit) = (Instant::now(), Duration::from_secs(10));
    let ended = loop {
        match waiter.try_wait()? {
            Some(status) => {
                break format!("ended by itself after {:?}: {status}", killed.elapsed());
            }
            None if killed.elapsed() > limit => break format!("still waits after {limit:?}"),
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    waiter.kill()?;
    waiter.wait()?;
    let found = format!("{said}; {ended}");
    Ok(vec![Row::told("whoever waits for an event of a process that is killed", found)])
}
