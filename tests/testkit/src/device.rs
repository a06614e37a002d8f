//! Devices that there are none of: memory that the CPU does not see, on devices that have names and no more.
//!
//! It is a file that is never mapped, so nothing reads it but by way of its rung. Nothing that is
//! measured on it says anything of a real device.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rung::{
    Access, Carrier, DType, Device, Fault, Fill, LeaseId, Memory, Meta, Offer, Packed, Parcel,
    Provenance, Reach, Reason, Receipt, Refusal, Rung, RungId, Session, Storage, Tensor, Trust,
};

/// A device by a number, where a real one has a UUID.
#[must_use]
pub fn device(number: u8) -> Device {
    Device::Cuda([number; 16])
}

fn system(error: impl std::fmt::Display) -> Refusal {
    Refusal::new(Reason::System, error.to_string())
}

#[derive(Debug)]
struct DeviceMemory {
    device: Device,
    file: File,
    len: usize,
    block: u64,
}

impl DeviceMemory {
    fn over(device: Device, file: File) -> Result<Self, Refusal> {
        static BLOCKS: AtomicU64 = AtomicU64::new(1 << 40);
        let len = file.metadata().map_err(system)?.len();
        let len = usize::try_from(len).map_err(system)?;
        Ok(Self { device, file, len, block: BLOCKS.fetch_add(1, Ordering::Relaxed) })
    }
}

impl Memory for DeviceMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn device(&self) -> Device {
        self.device
    }

    fn bytes(&self) -> Result<&[u8], Refusal> {
        Err(Refusal::new(Reason::DeviceMemory, self.device.to_string()))
    }

    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), Refusal> {
        read_at(&self.file, into, offset as u64).map_err(system)
    }

    fn block(&self) -> u64 {
        self.block
    }

    fn is_shared(&self) -> bool {
        true
    }
}

#[cfg(target_os = "linux")]
fn file() -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    Ok(File::from(memfd_create(c"device", MemfdFlags::CLOEXEC)?))
}

#[cfg(not(target_os = "linux"))]
fn file() -> io::Result<File> {
    tempfile::tempfile()
}

#[cfg(unix)]
fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

#[cfg(windows)]
fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        let rest = &mut into[done..];
        match std::os::windows::fs::FileExt::seek_read(file, rest, offset + done as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => done += count,
        }
    }
    Ok(())
}

/// Memory of a device with these bytes in it.
///
/// # Errors
///
/// What making a file gives.
pub fn memory(device: Device, bytes: &[u8]) -> Result<Storage, Refusal> {
    let mut file = file().map_err(system)?;
    file.write_all(bytes).map_err(system)?;
    Ok(Storage::new(DeviceMemory::over(device, file)?))
}

/// A tensor of bytes on a device.
///
/// # Errors
///
/// As [`memory`].
pub fn tensor(device: Device, bytes: &[u8]) -> Result<Tensor, Refusal> {
    Tensor::contiguous(Arc::new(memory(device, bytes)?), DType::U8, &[bytes.len()])
}

/// A rung that moves memory of such devices.
#[derive(Debug, Clone)]
pub struct DeviceRung {
    /// Its name.
    pub id: RungId,
    /// The devices that this process sees.
    pub devices: Vec<Device>,
    /// Whether it says which: one that does not leaves it to the canary.
    pub says: bool,
    /// Whether they can be proven at connect.
    pub ready: bool,
}

impl Rung for DeviceRung {
    fn id(&self) -> RungId {
        self.id.clone()
    }

    fn probe(&self) -> Result<Offer, Refusal> {
        let names: Vec<String> = self.devices.iter().map(ToString::to_string).collect();
        let meta = Meta::write(&self.says.then_some(names))?;
        Ok(Offer { rung: self.id.clone(), meta, handles: Vec::new() })
    }

    fn open(&self, _: &Offer, peer: &Offer, _: Trust) -> Result<Session, Refusal> {
        let theirs: Option<Vec<String>> = peer.meta.read()?;
        let reach = |device: &Device| {
            let name = device.to_string();
            let reach = match &theirs {
                Some(theirs) if !theirs.contains(&name) => {
                    Reach::Not(Refusal::new(Reason::DeviceUnknown, name))
                }
                _ if self.ready => Reach::Ready,
                _ => Reach::Idle,
            };
            (*device, reach)
        };
        let devices = self.devices.iter().map(reach).collect();
        let (id, next) = (self.id.clone(), AtomicU64::new(1));
        Ok(Session::Carrier(Box::new(DeviceCarrier { id, devices, next })))
    }
}

#[derive(Debug)]
struct DeviceCarrier {
    id: RungId,
    devices: Vec<(Device, Reach)>,
    next: AtomicU64,
}

impl Carrier for DeviceCarrier {
    fn devices(&self) -> Vec<(Device, Reach)> {
        self.devices.clone()
    }

    fn specimen(&self, device: Device, len: usize, fill: Fill<'_>) -> Result<Storage, Refusal> {
        let mut bytes = vec![0; len];
        fill(&mut bytes);
        memory(device, &bytes)
    }

    fn export(&self, storage: &Arc<Storage>) -> Result<Packed, Refusal> {
        let memory = storage.memory_as::<DeviceMemory>().ok_or(Reason::OtherKind)?;
        let (lease, bytes) =
            (LeaseId(self.next.fetch_add(1, Ordering::Relaxed)), memory.len as u64);
        let meta = Meta::write(&memory.device.to_string())?;
        let handles = vec![memory.file.try_clone().map_err(system)?.into()];
        let parcel = Parcel { rung: self.id.clone(), lease, bytes, copies: 0, meta, handles };
        Ok(Packed { parcel, owner: Box::new(Arc::clone(storage)), access: Access::Lent })
    }

    fn import(&self, parcel: Parcel) -> Result<Storage, Fault> {
        let Parcel { rung, lease, bytes, meta, handles, .. } = parcel;
        let device: Device = meta.read::<String>()?.parse()?;
        if !self.devices.iter().any(|(mine, _)| *mine == device) {
            return Err(Fault::new(Reason::DeviceUnknown, device.to_string()));
        }
        let handle = handles.into_iter().next().ok_or(Reason::WrongHandles)?;
        let mut memory = DeviceMemory::over(device, File::from(handle))?;
        let len = usize::try_from(bytes).ok().filter(|len| *len <= memory.len);
        memory.len = len.ok_or(Reason::WrongSize)?;
        Ok(Storage::new(memory).with_provenance(Provenance { rung, lease }))
    }

    fn receipt(&self, lease: LeaseId) -> Receipt {
        Receipt { rung: self.id.clone(), lease, meta: None, handles: Vec::new() }
    }

    fn released(&self, _: Receipt) {}

    fn peer_gone(&self) {}
}
