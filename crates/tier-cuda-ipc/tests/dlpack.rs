//! DLPack in and out, on the stand-in or a real driver.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cuda::{Context, Stream};
use dlpark::DlpackFlags;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::versioned::Dlpack;
use rung::{DType, Flags, Reason, Tensor};
use testkit::{run_serially, stand_in, trial};
use tier_cuda_ipc::{alloc_on, cuda, from_dlpack, to_dlpack};

type Outcome<T = ()> = Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: impl std::fmt::Debug) -> Outcome {
    if holds { Ok(()) } else { Err(format!("{what:?}")) }
}

fn tensor() -> Outcome<(Tensor, Stream)> {
    let device = cuda::driver().map_err(text)?.devices()[0].device();
    let mut born = alloc_on(device, DType::I32, &[4, 5]).map_err(text)?;
    let bytes: Vec<u8> = (0..20i32).flat_map(i32::to_le_bytes).collect();
    born.write(&bytes).map_err(text)?;
    let stream = Stream::new(&Context::of(device).map_err(text)?).map_err(text)?;
    Ok((born.share(), stream))
}

/// Out and in again: views, types and flags as they were, and the memory the same.
fn a_tensor_goes_out_and_comes_in() -> Outcome {
    let (tensor, stream) = tensor()?;
    for view in [
        tensor.clone(),
        tensor.slice(1, 1, 4).map_err(text)?,
        tensor.permute(&[1, 0]).map_err(text)?,
        tensor.flip(0).map_err(text)?,
    ] {
        let out = to_dlpack(&view, &stream).map_err(text)?;
        check(out.flags().contains(DlpackFlags::READ_ONLY), "may be written")?;
        let back = from_dlpack(out, &stream).map_err(text)?;
        check(back.flags() == Flags { read_only: true, requires_grad: false }, back.flags())?;
        check(back.to_bytes().map_err(text)? == view.to_bytes().map_err(text)?, &view)?;
        check((back.shape(), back.strides()) == (view.shape(), view.strides()), &back)?;
    }
    Ok(())
}

struct Counts(Arc<AtomicUsize>);

impl Drop for Counts {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A tensor as a framework makes it, over memory of its own or anybody's.
fn theirs(
    address: u64,
    shape: &[i64],
    strides: &[i64],
    (code, bits, kind): (DLDataTypeCode, u8, u32),
    dropped: &Arc<AtomicUsize>,
) -> Outcome<Dlpack> {
    let metadata = Dynamic::new(shape.to_vec(), strides.to_vec());
    let prepared = metadata.prepare_as::<DLManagedTensorVersioned>().map_err(text)?;
    let mut made = prepared.initialize(Box::new(Counts(Arc::clone(dropped))));
    made.set_data(std::ptr::without_provenance_mut(address as usize));
    made.set_device(DLDevice { device_type: DLDeviceType(kind), device_id: 0 });
    made.set_dtype(DLDataType { code, bits, lanes: 1 });
    // SAFETY: a test of what is said of memory; nothing follows the address.
    #[expect(unsafe_code, reason = "a framework of the test's own")]
    Ok(unsafe { made.finish() })
}

fn what_is_wrong_is_refused_and_given_back() -> Outcome {
    let device = cuda::driver().map_err(text)?.devices()[0].device();
    let context = Context::of(device).map_err(text)?;
    let stream = Stream::new(&context).map_err(text)?;
    let buffer = cuda::Buffer::plain(&context, 4096).map_err(text)?;
    let (at, dropped) = (buffer.address(), Arc::new(AtomicUsize::new(0)));
    let (float, cuda) = (DLDataTypeCode::FLOAT, 2);
    let host = [0u8; 64];
    let cases = [
        (at, [32i64, 32], [32i64, 1], (float, 32, cuda), None),
        (at, [33, 32], [32, 1], (float, 32, cuda), Some(Reason::OutOfBounds)),
        (at, [2, 2], [-1, 1], (float, 32, cuda), Some(Reason::OutOfBounds)),
        (at, [2, 2], [i64::MAX, 1], (float, 32, cuda), Some(Reason::OutOfBounds)),
        (at, [0, 2], [2, 1], (float, 32, cuda), Some(Reason::Empty)),
        (at, [2, 2], [2, 1], (float, 4, cuda), Some(Reason::SubByteDType)),
        (at, [2, 2], [2, 1], (DLDataTypeCode(3), 64, cuda), Some(Reason::UnknownDType)),
        (at, [2, 2], [2, 1], (float, 32, 1), Some(Reason::DeviceMemory)),
        (host.as_ptr() as u64, [2, 2], [2, 1], (float, 32, cuda), Some(Reason::Driver)),
    ];
    let all = cases.len();
    for (at, shape, strides, kind, reason) in cases {
        let managed = theirs(at, &shape, &strides, kind, &dropped)?;
        let came = from_dlpack(managed, &stream);
        check(came.as_ref().err().map(rung::Refusal::reason) == reason, (shape, strides, came))?;
    }
    check(dropped.load(Ordering::SeqCst) == all, "not given back")
}

fn main() -> ExitCode {
    stand_in::main(false, || {
        run_serially(vec![
            trial("a_tensor_goes_out_and_comes_in", a_tensor_goes_out_and_comes_in),
            trial("what_is_wrong_is_refused", what_is_wrong_is_refused_and_given_back),
        ])
    })
}
