//! The driver's functions, by the names that `cuda.h` maps them to.
#![expect(unsafe_code, reason = "functions of a library that is looked for at run time")]
#![expect(non_snake_case, reason = "the driver's own names")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUipcEventHandle, CUipcMemHandle,
    CUmemGenericAllocationHandle, CUmemPoolPtrExportData, CUmemoryPool, CUstream, CUuuid,
};
use libloading::Library;

/// `CUmemLocation`: cudarc's has another shape for each version of CUDA, the driver's never changed.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct MemLocation {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`, likewise.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct MemAllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) requested_handle_types: c_uint,
    pub(crate) location: MemLocation,
    pub(crate) win32_metadata: *mut c_void,
    pub(crate) flags: [u8; 8],
}

/// `CUmemAccessDesc`, likewise.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct MemAccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: c_uint,
}

/// `CUmemPoolProps`, likewise: fields come out of what is reserved.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct MemPoolProps {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: MemLocation,
    pub(crate) win32_attributes: *mut c_void,
    pub(crate) max_size: usize,
    pub(crate) reserved: [u8; 56],
}

// Of one size with cudarc's of whatever version is in the build.
const _: () = {
    use cudarc::driver::sys;
    assert!(size_of::<MemLocation>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<MemAllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(size_of::<MemPoolProps>() == size_of::<sys::CUmemPoolProps>());
    assert!(size_of::<MemAccessDesc>() == size_of::<sys::CUmemAccessDesc>());
};

macro_rules! functions {
    ($($name:ident ($($argument:ty),*);)*) => {
        /// Each returns a plain number: a `CUresult` of an unknown value would be undefined behaviour before one
        /// could look at it.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Functions {
            /// Looks all of them up.
            ///
            /// # Errors
            ///
            /// The first name that the library does not have.
            pub(crate) fn load(library: &Library) -> Result<Self, &'static str> {
                $(
                    // SAFETY: C1: the type is that of `cuda.h` for this very name, but for the result, which is a
                    // C enum, an `unsigned int`.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> u32>(stringify!($name))
                    };
                    let $name = *$name.map_err(|_| stringify!($name))?;
                )*
                Ok(Self { $($name),* })
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut std::ffi::c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceGetAttribute(*mut c_int, c_uint, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxSynchronize();
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamQuery(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuLaunchHostFunc(CUstream, unsafe extern "C" fn(*mut c_void), *mut c_void);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemAllocManaged(*mut CUdeviceptr, usize, c_uint);
    cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream);
    cuMemFreeAsync(CUdeviceptr, CUstream);
    cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuPointerGetAttribute(*mut c_void, c_uint, CUdeviceptr);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemsetD8Async(CUdeviceptr, std::ffi::c_uchar, usize, CUstream);
    cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
    cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
    cuIpcCloseMemHandle(CUdeviceptr);
    cuIpcGetEventHandle(*mut CUipcEventHandle, CUevent);
    cuIpcOpenEventHandle(*mut CUevent, CUipcEventHandle);
    cuMemGetAllocationGranularity(*mut usize, *const MemAllocationProp, c_uint);
    cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const MemAllocationProp, c_ulonglong);
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemGetAllocationPropertiesFromHandle(*mut MemAllocationProp, CUmemGenericAllocationHandle);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const MemAccessDesc, usize);
    cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, c_uint, c_ulonglong);
    cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, c_uint);
    cuMemPoolCreate(*mut CUmemoryPool, *const MemPoolProps);
    cuMemPoolDestroy(CUmemoryPool);
    cuMemPoolSetAccess(CUmemoryPool, *const MemAccessDesc, usize);
    cuMemPoolExportToShareableHandle(*mut c_void, CUmemoryPool, c_uint, c_ulonglong);
    cuMemPoolImportFromShareableHandle(*mut CUmemoryPool, *mut c_void, c_uint, c_ulonglong);
    cuMemPoolExportPointer(*mut CUmemPoolPtrExportData, CUdeviceptr);
    cuMemPoolImportPointer(*mut CUdeviceptr, CUmemoryPool, *mut CUmemPoolPtrExportData);
    cuMemAllocFromPoolAsync(*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
}
