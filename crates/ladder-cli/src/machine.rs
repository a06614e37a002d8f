//! What on this machine decides which rungs there are: looked at, and told with what to do about it.

use ladder::Report;
use serde::Serialize;

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub(crate) struct Check {
    pub(crate) about: &'static str,
    pub(crate) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) remedy: Option<String>,
}

impl Check {
    fn fine(about: &'static str, found: impl Into<String>) -> Self {
        Self { about, found: found.into(), remedy: None }
    }

    fn wanting(about: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { about, found: found.into(), remedy: Some(remedy.into()) }
    }
}

/// The devices that this process sees.
pub(crate) fn devices() -> Vec<ladder::Device> {
    let driver = ladder::tier_cuda_ipc::cuda::driver();
    driver.map_or(Vec::new(), |driver| driver.devices().iter().map(|info| info.device()).collect())
}

/// Everything that a person who misses a rung should know.
#[cfg(target_os = "linux")]
pub(crate) fn look_around(report: &Report) -> Vec<Check> {
    vec![cuda(), shm(), locked(), descriptors(), namespaces(report)]
}

/// Elsewhere there is little to set up.
#[cfg(not(target_os = "linux"))]
pub(crate) fn look_around(_: &Report) -> Vec<Check> {
    let found = format!("{}: shared memory and what is below it", std::env::consts::OS);
    let remedy = "run both processes on Linux for the rungs of device memory";
    vec![cuda(), Check::wanting("platform", found, remedy)]
}

fn cuda() -> Check {
    use ladder::tier_cuda_ipc::cuda;
    let driver = match cuda::driver() {
        Ok(driver) => driver,
        Err(why) => {
            let remedy = why.reason().remedy().unwrap_or("see what the driver's own tools say");
            return Check::wanting("CUDA", why.to_string(), remedy);
        }
    };
    let kind = if driver.is_stand_in() { "STAND-IN, no device is there; " } else { "" };
    let device = |info: &cuda::DeviceInfo| {
        let can = info.can();
        let lacks =
            [(can.share_events, "events for others"), (can.share_descriptors, "descriptors")];
        let lacks: Vec<&str> =
            lacks.iter().filter(|(has, _)| !has).map(|(_, what)| *what).collect();
        let lacks = if lacks.is_empty() {
            String::new()
        } else {
            format!(", without {}", lacks.join(" and "))
        };
        format!("{} {} ({} MiB{lacks})", info.device(), info.name(), info.bytes() >> 20)
    };
    let devices: Vec<String> = driver.devices().iter().map(device).collect();
    let found = format!(
        "{kind}driver for CUDA {} (at least {}); {}",
        driver.version(),
        cuda::driver::floor(),
        devices.join(", ")
    );
    Check::fine("CUDA", found)
}

/// Blocks are memfds: memfd_create(2).
#[cfg(target_os = "linux")]
fn shm() -> Check {
    let irrelevant =
        "irrelevant: blocks are files in memory of no mount; the control group's memory counts";
    match rustix::fs::statvfs("/dev/shm") {
        Ok(fs) => {
            let size = fs.f_blocks.saturating_mul(fs.f_frsize) >> 20;
            Check::fine("/dev/shm", format!("{size} MiB, {irrelevant}"))
        }
        Err(_) => Check::fine("/dev/shm", format!("none, {irrelevant}")),
    }
}

/// As in getrlimit(2).
#[cfg(target_os = "linux")]
fn limit(of: rustix::process::Resource, unit: u64) -> Option<u64> {
    rustix::process::getrlimit(of).current.map(|current| current / unit)
}

#[cfg(target_os = "linux")]
fn locked() -> Check {
    let found = match limit(rustix::process::Resource::Memlock, 1 << 20) {
        None => "no limit".to_owned(),
        Some(mebibytes) => format!("{mebibytes} MiB; only staging of device memory would pin any"),
    };
    Check::fine("memlock", found)
}

/// Descriptors that a channel may want at the same time, with what a program has besides.
#[cfg(target_os = "linux")]
const WANTED: u64 = 1024;

#[cfg(target_os = "linux")]
fn descriptors() -> Check {
    match limit(rustix::process::Resource::Nofile, 1) {
        Some(limit) if limit < WANTED => Check::wanting(
            "descriptors",
            format!("at most {limit}"),
            format!(
                "raise the limit of open files (ulimit -n {WANTED}): each block that is kept takes one"
            ),
        ),
        Some(limit) => Check::fine("descriptors", format!("at most {limit}")),
        None => Check::fine("descriptors", "no limit"),
    }
}

#[cfg(target_os = "linux")]
fn namespaces(report: &Report) -> Check {
    let differs = |fact: &str| report.differences().iter().any(|each| each.fact == fact);
    if differs("pid-namespace") {
        return Check::wanting(
            "pid namespace",
            "another one: whether the worker runs this very executable cannot be told",
            "vouch for it (WorkerBuilder::trust), or its memory is copied out; share the namespace for CUDA IPC",
        );
    }
    Check::fine("pid namespace", "the same")
}
