//! What shared memory costs on Windows: sections of the page file, as `segment` makes them, beside the files in a
//! temporary folder that the crate `shared_memory` maps; and what is left of each when its owner is killed.
//!
//! `cargo xtask windows --measure`

#[cfg(not(windows))]
fn main() {
    println!("there is nothing to compare here: blocks are memfds");
}

#[cfg(windows)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    compare::main()
}

#[cfg(windows)]
mod compare {
    use std::error::Error;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use segment::{Draft, Limits, PeerTrust, Pool, Received};
    use shared_memory::{Shmem, ShmemConf};

    const ROUNDS: usize = 21;

    type Outcome<T = ()> = Result<T, Box<dyn Error>>;

    pub(super) fn main() -> Outcome {
        if std::env::args().nth(1).as_deref() == Some("leave") {
            let _peer = file(1 << 20)?;
            let _ours = Draft::new(1 << 20)?.share()?;
            std::process::abort();
        }
        println!(
            "made, written, mapped by another, read, and given back; median of {ROUNDS}, interleaved"
        );
        println!("{:>10} {:>14} {:>14} {:>7}", "bytes", "section µs", "file µs", "ratio");
        for len in [64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            let (mut sections, mut files) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS {
                sections.push(timed(|| by_section(len, round as u8))?);
                files.push(timed(|| by_file(len, round as u8))?);
            }
            let (section, file) = (median(sections), median(files));
            let ratio = section.as_secs_f64() / file.as_secs_f64();
            println!("{len:>10} {:>14} {:>14} {ratio:>7.2}", section.as_micros(), file.as_micros());
        }
        let before = left_behind();
        for _ in 0..3 {
            Command::new(std::env::current_exe()?).arg("leave").status()?;
        }
        println!(
            "three owners that were killed left {} files of theirs; sections have no name to leave",
            left_behind() - before
        );
        Ok(())
    }

    fn timed(run: impl FnOnce() -> Outcome) -> Outcome<Duration> {
        let started = Instant::now();
        run()?;
        Ok(started.elapsed())
    }

    fn median(mut times: Vec<Duration>) -> Duration {
        times.sort_unstable();
        times[times.len() / 2]
    }

    fn by_section(len: usize, fill: u8) -> Outcome {
        // Nothing is kept for the next round.
        let pool = Pool::new(Limits { idle_bytes: 0, ..Limits::default() });
        let mut draft = Draft::new_in(&pool, len)?;
        draft.bytes_mut().fill(fill);
        let shared = draft.share()?;
        let received = segment::receive(shared.descriptor()?, len)?;
        let Received::Foreign(foreign) = received else { return Err("nobody writes it?".into()) };
        let trust = PeerTrust::same_executable(std::process::id())?;
        if foreign.bytes(Some(&trust))?[..len].iter().any(|byte| *byte != fill) {
            return Err("other bytes".into());
        }
        Ok(())
    }

    fn file(len: usize) -> Outcome<Shmem> {
        Ok(ShmemConf::new().size(len).create()?)
    }

    fn by_file(len: usize, fill: u8) -> Outcome {
        let mut owner = file(len)?;
        // SAFETY: nobody else has it mapped yet.
        let bytes = unsafe { owner.as_slice_mut() };
        bytes[..len].fill(fill);
        let other = ShmemConf::new().os_id(owner.get_os_id()).open()?;
        // SAFETY: nobody writes it any more.
        let bytes = unsafe { other.as_slice() };
        if bytes[..len].iter().any(|byte| *byte != fill) {
            return Err("other bytes".into());
        }
        Ok(())
    }

    /// Files in the folder that the peer makes for them.
    fn left_behind() -> usize {
        std::fs::read_dir(std::env::temp_dir().join("shared_memory-rs"))
            .map_or(0, |folder| folder.flatten().count())
    }
}
