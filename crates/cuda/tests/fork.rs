//! After a fork nothing of the driver's is called (C3): use is refused, drops do nothing.
#![expect(unsafe_code, reason = "there is no fork without it")]

use std::process::ExitCode;

use cuda::{Buffer, Context, Event, Stream};
use rung::Reason;
use testkit::{run_serially, stand_in, trial};

/// Runs something in a forked child: whether it held there.
fn in_a_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `check`, which takes no lock that another thread of its parent's might have held, and
    // ends without running anything of its parent's.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let holds = check();
        // SAFETY: ends this process at once; exit handlers are its parent's.
        unsafe { libc::_exit(i32::from(!holds)) };
    }
    let mut status = 0;
    // SAFETY: `status` is a place for the answer; the child is ours and is waited for once.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    waited == pid && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

fn a_forked_child_calls_nothing() -> Result<(), String> {
    let text = |error: rung::Refusal| error.to_string();
    let device = cuda::driver().map_err(text)?.devices()[0].device();
    let context = Context::of(device).map_err(text)?;
    let stream = Stream::new(&context).map_err(text)?;
    let event = Event::shared(&context).map_err(text)?;
    let buffer = Buffer::shareable(&context, 100).map_err(text)?;
    let plain = Buffer::plain(&context, 100).map_err(text)?;
    buffer.write_at(0, &[7; 100], &stream).map_err(text)?;
    let all = (stream, event, buffer, plain);
    let held = in_a_child(move || {
        let (stream, event, buffer, plain) = all;
        let forked = |result: Result<(), rung::Refusal>| {
            result.is_err_and(|refusal| refusal.reason() == Reason::Forked)
        };
        let refused = forked(cuda::driver().map(drop))
            && forked(buffer.read_at(0, &mut [0; 10], &stream))
            && forked(stream.synchronize())
            && forked(event.record(&stream))
            && forked(Buffer::plain(&context, 10).map(drop))
            && forked(plain.attributes().map(drop));
        let before = stand_in::count(stand_in::Count::Calls);
        drop((stream, event, buffer, plain, context));
        refused && stand_in::count(stand_in::Count::Calls) == before
    });
    // The closure went to the child as a copy; here it was dropped, in order.
    if held { Ok(()) } else { Err("something of the driver's was called in the child".into()) }
}

fn main() -> ExitCode {
    stand_in::main(false, || {
        let forks = trial("a_forked_child_calls_nothing", a_forked_child_calls_nothing);
        run_serially(vec![forks])
    })
}
