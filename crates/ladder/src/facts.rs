//! What this process says of itself in its hello.

use canary::Facts;

use crate::ladder::Ladder;

/// Everything that is known; what is not is left out.
pub(crate) fn gather(ladder: &Ladder) -> Facts {
    let mut facts = Facts::default();
    facts.state("library", env!("CARGO_PKG_VERSION"));
    facts.state("target", target());
    of_the_system(&mut facts);
    ladder.state(&mut facts);
    pretend(&mut facts);
    facts
}

fn target() -> String {
    let endian = if cfg!(target_endian = "big") { "big" } else { "little" };
    let (os, arch, bits) = (std::env::consts::OS, std::env::consts::ARCH, usize::BITS);
    format!("{arch}-{os}-{bits}-{endian}")
}

/// Whose memory it is and whether both sides can see each other: proc(5), namespaces(7), random(4).
#[cfg(target_os = "linux")]
fn of_the_system(facts: &mut Facts) {
    facts.state("page", rustix::param::page_size().to_string());
    facts.state("uid", rustix::process::getuid().as_raw().to_string());
    if let Ok(boot) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        facts.state("boot", boot.trim());
    }
    for (name, file) in
        [("pid-namespace", "pid"), ("ipc-namespace", "ipc"), ("user-namespace", "user")]
    {
        if let Ok(link) = std::fs::read_link(format!("/proc/self/ns/{file}")) {
            facts.state(name, link.to_string_lossy());
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn of_the_system(_: &mut Facts) {}

/// For tests: `LADDER_PRETEND=FACT=VALUE` (nothing for a fact that is not stated).
#[cfg(all(feature = "failpoints", debug_assertions))]
fn pretend(facts: &mut Facts) {
    let Ok(pretended) = std::env::var("LADDER_PRETEND") else { return };
    if let Some((name, value)) = pretended.split_once('=') {
        facts.state(name, value);
    }
}

#[cfg(not(all(feature = "failpoints", debug_assertions)))]
fn pretend(_: &mut Facts) {}
