//! What one process says of its devices, and what follows for a pair.

use std::sync::OnceLock;

use rung::{Device, Fault, Meta, Offer, Reach, Reason, Refusal, RungId};
use serde::{Deserialize, Serialize};

/// The version of what parcels hold.
const FORMAT: u32 = 1;

/// Devices that one process may name.
const DEVICES: usize = 64;

/// What a process offers on either rung.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    /// The version.
    v: u32,
    /// Drawn once a process: whether both ends are in one.
    n: String,
    /// Its pid namespace on its machine: names that go by process numbers mean nothing outside.
    s: String,
    /// The shared memory that it sees (`/dev/shm`): the driver keeps events of several processes there.
    m: u64,
    /// The devices by UUID, and whether each has events for other processes.
    d: Vec<(String, bool)>,
}

/// The names of two processes, as each says of itself.
#[derive(Debug, Clone)]
pub struct Names {
    /// This one's.
    pub mine: String,
    /// The peer's.
    pub theirs: String,
}

/// Both offers, read.
#[derive(Debug)]
pub struct Pair {
    /// What each process drew to be told apart by.
    pub names: Names,
    /// This side's devices, and whether each has events for other processes.
    pub mine: Vec<(Device, bool)>,
    /// The peer's.
    pub theirs: Vec<(Device, bool)>,
    /// Both ends are in one process.
    pub is_one_process: bool,
    /// Both see each other's process numbers.
    pub is_one_namespace: bool,
    /// Both see one `/dev/shm`.
    is_one_mount: bool,
}

fn nonce() -> Result<String, Refusal> {
    static NONCE: OnceLock<(u32, String)> = OnceLock::new();
    let draw = || {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Refusal::new(Reason::System, error.to_string()))?;
        Ok::<_, Refusal>((std::process::id(), format!("{:032x}", u128::from_le_bytes(bytes))))
    };
    let (process, drawn) = match NONCE.get() {
        Some(drawn) => drawn,
        None => {
            let drawn = draw()?;
            NONCE.get_or_init(|| drawn)
        }
    };
    if *process == std::process::id() { Ok(drawn.clone()) } else { Err(Reason::Forked.into()) }
}

/// The pid namespace, and the boot that it belongs to; for a process that drew this name.
fn namespace(nonce: &str) -> String {
    let pid = std::fs::read_link("/proc/self/ns/pid");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    match (pid, boot) {
        (Ok(pid), Ok(boot)) => format!("{} {}", pid.display(), boot.trim()),
        // What is not known is nobody else's.
        _ => format!("unknown {nonce}"),
    }
}

/// What tells this process's `/dev/shm` from another; 0 where there is none.
fn mount() -> u64 {
    #[cfg(target_os = "linux")]
    return std::fs::metadata("/dev/shm")
        .map_or(0, |mount| std::os::unix::fs::MetadataExt::dev(&mount));
    #[cfg(not(target_os = "linux"))]
    0
}

/// That memory of devices can go from one process to another here at all: the driver's handles of both kinds are
/// Linux's.
///
/// # Errors
///
/// [`Reason::Platform`] elsewhere.
pub fn expect_linux() -> Result<(), Refusal> {
    if cfg!(target_os = "linux") {
        return Ok(());
    }
    let detail =
        format!("memory of devices is shared on Linux alone, this is {}", std::env::consts::OS);
    Err(Refusal::new(Reason::Platform, detail))
}

/// This process's offer on a rung, with these devices.
///
/// # Errors
///
/// [`Reason::Forked`] in a fork of the process that first asked, [`Reason::System`] without random bytes.
pub fn make(rung: RungId, devices: Vec<(Device, bool)>) -> Result<Offer, Refusal> {
    let d = devices.into_iter().map(|(device, events)| (device.to_string(), events)).collect();
    let n = nonce()?;
    let said = Said { v: FORMAT, s: namespace(&n), n, m: mount(), d };
    Ok(Offer { rung, meta: Meta::write(&said)?, handles: Vec::new() })
}

fn devices(said: &Said) -> Result<Vec<(Device, bool)>, Refusal> {
    if said.d.len() > DEVICES {
        return Err(Refusal::new(Reason::OverCap, format!("{} devices", said.d.len())));
    }
    said.d.iter().map(|(name, events)| Ok((name.parse()?, *events))).collect()
}

impl Pair {
    /// What follows from both offers.
    ///
    /// # Errors
    ///
    /// [`Reason::NotOffered`] for another format, [`Reason::OverCap`] or [`Reason::BadMetadata`] for what is none.
    pub fn read(mine: &Offer, peer: &Offer) -> Result<Self, Refusal> {
        let (mine, peer): (Said, Said) = (mine.meta.read()?, peer.meta.read()?);
        if peer.v != FORMAT {
            let detail = format!("format {}, here {FORMAT}", peer.v);
            return Err(Refusal::new(Reason::NotOffered, detail));
        }
        Ok(Self {
            is_one_process: mine.n == peer.n,
            names: Names { mine: mine.n.clone(), theirs: peer.n.clone() },
            is_one_namespace: mine.s == peer.s,
            is_one_mount: mine.m == peer.m,
            mine: devices(&mine)?,
            theirs: devices(&peer)?,
        })
    }

    /// The devices of this side, and how each is reached.
    #[must_use]
    pub fn reach(&self) -> Vec<(Device, Reach)> {
        let reach = |device: Device| {
            if !self.theirs.iter().any(|(theirs, _)| *theirs == device) {
                return Reach::Not(Refusal::new(Reason::DeviceUnknown, device.to_string()));
            }
            // Making a context takes long and much memory, and may never be needed.
            let has_context = cuda::Context::exists(device);
            if has_context { Reach::Ready } else { Reach::Idle }
        };
        self.mine.iter().map(|(device, _)| (*device, reach(*device))).collect()
    }

    /// A device by its place in this side's offer.
    ///
    /// # Errors
    ///
    /// [`Reason::DeviceUnknown`].
    pub fn place_of(&self, device: Device) -> Result<usize, Refusal> {
        let place = self.mine.iter().position(|(mine, _)| *mine == device);
        place.ok_or_else(|| Refusal::new(Reason::DeviceUnknown, device.to_string()))
    }

    /// The device at a place of the peer's offer, which this side has too.
    ///
    /// # Errors
    ///
    /// [`Reason::DeviceUnknown`].
    pub fn device_at(&self, place: usize) -> Result<Device, Fault> {
        let device = self.theirs.get(place).map(|(device, _)| *device);
        let device = device.ok_or_else(|| Fault::new(Reason::DeviceUnknown, "no such place"))?;
        self.place_of(device)?;
        Ok(device)
    }

    /// Whether events of this device order work across both processes.
    #[must_use]
    pub fn has_events(&self, device: Device) -> bool {
        let has = |devices: &[(Device, bool)]| devices.contains(&(device, true));
        self.is_one_namespace && self.is_one_mount && has(&self.mine) && has(&self.theirs)
    }
}
