//! The driver's library, and the devices that it shows this process.
#![expect(unsafe_code, reason = "calls of the driver")]

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUdevice, CUdevice_attribute as attribute, CUuuid};
use libloading::Library;
use rung::{Device, Reason, Refusal};

use crate::code::{Failed, SUCCESS};
use crate::functions::Functions;

/// The oldest driver that has every function that is called: that of CUDA 11.4.
const FLOOR: u32 = 11_040;

/// What the driver's library is called.
const NAMES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// Looks for a library by the dynamic loader's rules (ld.so(8)).
///
/// # Safety
///
/// As of [`Library::new`].
#[cfg(not(windows))]
unsafe fn load(name: &str) -> Result<Library, libloading::Error> {
    // SAFETY: as the caller has it.
    unsafe { Library::new(name) }
}

/// Looks for a library in the system's own folder, where the driver puts it: otherwise the program's folder and the
/// current one come first, and anybody may have put a library there.
///
/// # Safety
///
/// As of [`Library::new`].
#[cfg(windows)]
unsafe fn load(name: &str) -> Result<Library, libloading::Error> {
    use libloading::os::windows::{LOAD_LIBRARY_SEARCH_SYSTEM32, Library};
    // SAFETY: as the caller has it.
    Ok(unsafe { Library::load_with_flags(name, LOAD_LIBRARY_SEARCH_SYSTEM32) }?.into())
}

/// Exported by the stand-in of the tests, and by no driver.
const STAND_IN: &str = "cuda_cpu_standin_marker";

/// A driver that was started, and the devices that it shows.
#[derive(Debug)]
pub struct Driver {
    pub(crate) functions: Functions,
    /// Never unloaded: threads of the driver's may run in it to the end (C1).
    _library: std::mem::ManuallyDrop<Library>,
    process: u32,
    version: u32,
    is_stand_in: bool,
    devices: Vec<DeviceInfo>,
}

/// A device, or a slice of one (MIG), as this process sees it.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    pub(crate) ordinal: CUdevice,
    device: Device,
    name: String,
    bytes: usize,
    can: Can,
}

/// What a device can do, as it says itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Can {
    /// Events that another process waits for.
    pub share_events: bool,
    /// Allocations that leave as descriptors (`cuMemCreate`, POSIX file descriptors).
    pub share_descriptors: bool,
    /// Stream-ordered pools (`cuMemAllocAsync`).
    pub pools: bool,
    /// Pools that leave as descriptors (`CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES`).
    pub share_pools: bool,
}

impl DeviceInfo {
    /// By its UUID.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Its number in this process alone.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// What its maker calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it can do.
    #[must_use]
    pub fn can(&self) -> Can {
        self.can
    }
}

/// The driver of this process: looked for and started on the first call, once.
///
/// # Errors
///
/// [`Reason::NoDriver`] where no library is found, [`Reason::OldDriver`] where it lacks functions,
/// [`Reason::NoDevice`] where it shows none, [`Reason::Driver`] with the code that it gave, and
/// [`Reason::Forked`] in a fork of the process that asked first.
pub fn driver() -> Result<&'static Driver, Refusal> {
    static DRIVER: OnceLock<Result<Driver, Refusal>> = OnceLock::new();
    let driver = DRIVER.get_or_init(Driver::start).as_ref().map_err(Clone::clone)?;
    if driver.is_inherited() {
        return Err(Reason::Forked.into());
    }
    Ok(driver)
}

impl Driver {
    fn start() -> Result<Self, Refusal> {
        let mut why = String::new();
        let library = NAMES.iter().find_map(|name| {
            // SAFETY: the library of the driver, which is made to be loaded in this way; it is this process's
            // environment that says where it is, as for every other library of it.
            match unsafe { load(name) } {
                Ok(library) => Some(library),
                Err(error) => {
                    if why.is_empty() {
                        why = reason_of(&error);
                    }
                    None
                }
            }
        });
        let library = library.ok_or_else(|| Refusal::new(Reason::NoDriver, why))?;
        // SAFETY: only whether there is one of that name is asked; it is not used.
        let is_stand_in = unsafe { library.get::<*const ()>(STAND_IN) }.is_ok();
        let functions = Functions::load(&library).map_err(|missing| {
            let detail = format!("it has no {missing}; CUDA {} is the least", version_text(FLOOR));
            Refusal::new(Reason::OldDriver, detail)
        })?;
        let mut driver = Self {
            functions,
            _library: std::mem::ManuallyDrop::new(library),
            process: std::process::id(),
            version: 0,
            is_stand_in,
            devices: Vec::new(),
        };
        // SAFETY: C1; flags must be 0.
        driver.check("cuInit", unsafe { (driver.functions.cuInit)(0) })?;
        let mut version: c_int = 0;
        // SAFETY: C1: writes one number.
        let code = unsafe { (driver.functions.cuDriverGetVersion)(&raw mut version) };
        driver.check("cuDriverGetVersion", code)?;
        driver.version = u32::try_from(version).unwrap_or(0);
        if driver.version < FLOOR {
            let (has, least) = (version_text(driver.version), version_text(FLOOR));
            let detail = format!("CUDA {has}, and {least} is the least");
            return Err(Refusal::new(Reason::OldDriver, detail));
        }
        let mut count: c_int = 0;
        // SAFETY: C1: writes one number.
        let code = unsafe { (driver.functions.cuDeviceGetCount)(&raw mut count) };
        driver.check("cuDeviceGetCount", code)?;
        driver.devices =
            (0..count).map(|ordinal| driver.look_at(ordinal)).collect::<Result<_, Failed>>()?;
        if driver.devices.is_empty() {
            return Err(Reason::NoDevice.into());
        }
        Ok(driver)
    }

    fn look_at(&self, ordinal: c_int) -> Result<DeviceInfo, Failed> {
        let functions = &self.functions;
        let mut raw: CUdevice = 0;
        // SAFETY: C1: writes one number.
        let code = unsafe { (functions.cuDeviceGet)(&raw mut raw, ordinal) };
        self.check("cuDeviceGet", code)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: C1: writes sixteen bytes.
        let code = unsafe { (functions.cuDeviceGetUuid_v2)(&raw mut uuid, raw) };
        self.check("cuDeviceGetUuid_v2", code)?;
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: C1: writes at most the 127 bytes it is told of, and the 128th stays 0.
        let code = unsafe { (functions.cuDeviceGetName)(name.as_mut_ptr(), 127, raw) };
        self.check("cuDeviceGetName", code)?;
        let name: Vec<u8> =
            name.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect();
        let mut bytes = 0;
        // SAFETY: C1: writes one number.
        let code = unsafe { (functions.cuDeviceTotalMem_v2)(&raw mut bytes, raw) };
        self.check("cuDeviceTotalMem_v2", code)?;
        let number = |attribute: attribute| {
            let mut value: c_int = 0;
            // SAFETY: C1: writes one number. One that the driver does not know is an error, and 0.
            let code = unsafe {
                (functions.cuDeviceGetAttribute)(&raw mut value, attribute as c_uint, raw)
            };
            if code == SUCCESS { value } else { 0 }
        };
        let has = |attribute| number(attribute) != 0;
        let can = Can {
            share_events: has(attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)
                // A driver that does not know the question answers it by being one of Linux.
                || self.version < 12_000,
            share_descriptors: has(
                attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            ) && has(
                attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            ),
            pools: has(attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
            share_pools: number(attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)
                .cast_unsigned()
                & crate::ipc::POSIX_DESCRIPTOR
                != 0,
        };
        Ok(DeviceInfo {
            ordinal: raw,
            device: Device::Cuda(uuid.bytes.map(c_char::cast_unsigned)),
            name: String::from_utf8_lossy(&name).into_owned(),
            bytes,
            can,
        })
    }

    /// The devices that this process sees, in its order (`CUDA_VISIBLE_DEVICES`).
    #[must_use]
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// One of them.
    ///
    /// # Errors
    ///
    /// [`Reason::DeviceUnknown`].
    pub fn device(&self, device: Device) -> Result<&DeviceInfo, Refusal> {
        let known = self.devices.iter().find(|info| info.device == device);
        known.ok_or_else(|| Refusal::new(Reason::DeviceUnknown, device.to_string()))
    }

    /// The version of CUDA that it is made for, as `12.8`.
    #[must_use]
    pub fn version(&self) -> String {
        version_text(self.version)
    }

    /// Whether it is the stand-in of the tests: no device is there, and nothing measured on it says anything of one.
    #[must_use]
    pub fn is_stand_in(&self) -> bool {
        self.is_stand_in
    }

    /// Whether something in this process has a primary context on a device; makes none.
    #[must_use]
    pub fn has_context(&self, device: &DeviceInfo) -> bool {
        let (mut flags, mut active): (c_uint, c_int) = (0, 0);
        if self.is_inherited() {
            return false;
        }
        // SAFETY: C1: writes two numbers.
        let code = unsafe {
            (self.functions.cuDevicePrimaryCtxGetState)(
                device.ordinal,
                &raw mut flags,
                &raw mut active,
            )
        };
        code == SUCCESS && active != 0
    }

    /// Whether this is a fork of the process that the driver was started in (C3).
    pub(crate) fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }

    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<(), Failed> {
        if code == SUCCESS { Ok(()) } else { Err(Failed { call, code }) }
    }
}

/// The oldest version of CUDA whose driver does, as `11.4`.
#[must_use]
pub fn floor() -> String {
    version_text(FLOOR)
}

fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The loader's own words, where the error keeps them inside.
fn reason_of(error: &libloading::Error) -> String {
    use std::error::Error;
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
