//! The owned layer on the stand-in, and, where it is told to, on a real driver.

use std::process::ExitCode;
use std::sync::Arc;

use cuda::{Buffer, Context, Event, MemHandle, Stream};
use cudarc::driver::CudaContext;
use rung::{Device, Reason, Refusal};
use testkit::stand_in::{self, Count, count};
use testkit::{run_serially, trial};

type Outcome = Result<(), String>;

fn text(refusal: impl std::fmt::Display) -> String {
    refusal.to_string()
}

fn context() -> Result<Arc<Context>, String> {
    let driver = cuda::driver().map_err(text)?;
    Context::of(driver.devices()[0].device()).map_err(text)
}

fn expect<T: std::fmt::Debug>(result: Result<T, Refusal>, reason: Reason) -> Outcome {
    match result {
        Err(refusal) if refusal.reason() == reason => Ok(()),
        other => Err(format!("{other:?}, not {reason}")),
    }
}

fn same<T: PartialEq + std::fmt::Debug>(left: T, right: T) -> Outcome {
    if left == right { Ok(()) } else { Err(format!("{left:?} is not {right:?}")) }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn devices_have_names_and_uuids() -> Outcome {
    let driver = cuda::driver().map_err(text)?;
    same(driver.is_stand_in(), !stand_in::is_real())?;
    for info in driver.devices() {
        same(driver.device(info.device()).map_err(text)?.name(), info.name())?;
        if driver.is_stand_in() {
            same(info.name(), cuda_standin::NAME)?;
        }
    }
    expect(driver.device(Device::Cuda([9; 16])), Reason::DeviceUnknown)
}

fn every_kind_of_memory_keeps_what_is_written() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context).map_err(text)?;
    let len = (2 << 20) + 17;
    let bytes = pattern(len);
    for buffer in [
        Buffer::plain(&context, len),
        Buffer::shareable(&context, len),
        Buffer::stream_ordered(&stream, len),
        Buffer::managed(&context, len),
    ] {
        let buffer = buffer.map_err(text)?;
        buffer.write_at(0, &bytes, &stream).map_err(text)?;
        let part = buffer.part(5..len).map_err(text)?;
        let mut back = vec![0; 1000];
        part.read_at(len - 1005, &mut back, &stream).map_err(text)?;
        same(&back[..], &bytes[len - 1000..])?;
        expect(part.read_at(len - 1004, &mut back, &stream), Reason::OutOfBounds)?;
        expect(buffer.part(1..len + 1), Reason::OutOfBounds)?;
        expect(part.write_at(usize::MAX, &[1], &stream), Reason::OutOfBounds)?;
    }
    Ok(())
}

fn a_pointer_says_what_it_can_do() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context).map_err(text)?;
    let plain = Buffer::plain(&context, 4096).map_err(text)?;
    let said = plain.part(100..200).map_err(text)?.attributes().map_err(text)?;
    same((said.is_device, said.is_managed, said.is_legacy_ipc_capable), (true, false, true))?;
    same(said.range.0, plain.address())?;
    for (buffer, managed) in [
        (Buffer::shareable(&context, 4096), false),
        (Buffer::stream_ordered(&stream, 4096), false),
        (Buffer::managed(&context, 4096), true),
    ] {
        let buffer = buffer.map_err(text)?;
        let said = buffer.attributes().map_err(text)?;
        same((said.is_managed, said.is_legacy_ipc_capable), (managed, false))?;
        expect(MemHandle::of(&buffer), Reason::Driver)?;
    }
    let other = Buffer::plain(&context, 4096).map_err(text)?;
    let other = other.attributes().map_err(text)?;
    if other.buffer_id == said.buffer_id {
        return Err("two allocations under one number".into());
    }
    Ok(())
}

fn a_handle_is_refused_where_it_was_made() -> Outcome {
    let context = context()?;
    let buffer = Buffer::plain(&context, 4096).map_err(text)?;
    let handle = MemHandle::of(&buffer.part(100..200).map_err(text)?).map_err(text)?;
    expect(handle.open(&context), Reason::Driver)
}

fn a_descriptor_is_the_same_memory() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context).map_err(text)?;
    let buffer = Buffer::shareable(&context, 100).map_err(text)?;
    buffer.write_at(3, b"abc", &stream).map_err(text)?;
    let shareable = buffer.as_shareable().ok_or("not shareable")?;
    let import = |len| {
        let descriptor = shareable.descriptor()?;
        cuda::ipc::Shareable::import(&context, descriptor, len).map_err(Refusal::from)
    };
    let other = import(shareable.len()).map_err(text)?;
    let mut back = [9; 6];
    other.read_at(1, &mut back, &stream).map_err(text)?;
    same(&back, b"\0\0abc\0")?;
    expect(import(100), Reason::WrongSize)?;
    expect(import(2 * shareable.len()), Reason::Driver)?;
    let file = std::fs::File::open("/dev/zero").map_err(text)?;
    let strange = cuda::ipc::Shareable::import(&context, file.into(), shareable.len());
    expect(strange.map_err(Refusal::from), Reason::Driver)
}

fn a_stream_waits_for_another() -> Outcome {
    let context = context()?;
    let (one, other) = (Stream::new(&context).map_err(text)?, Stream::new(&context).map_err(text)?);
    let buffer = Buffer::shareable(&context, 64 << 10).map_err(text)?;
    buffer.fill(7, &one).map_err(text)?;
    other.after(&one).map_err(text)?;
    let mut back = [0; 16];
    buffer.read_at(1000, &mut back, &other).map_err(text)?;
    same(back, [7; 16])?;
    let event = Event::shared(&context).map_err(text)?;
    event.record(&one).map_err(text)?;
    event.synchronize().map_err(text)?;
    same(event.is_done().map_err(text)?, true)?;
    expect(Event::open(&context, event.handle().map_err(text)?), Reason::Driver)
}

/// What is dropped while work on it is under way: the driver does not wait, so this crate does.
fn memory_that_is_still_written_is_not_unmapped() -> Outcome {
    let context = context()?;
    let stream = Stream::new(&context).map_err(text)?;
    for _ in 0..3 {
        let buffer = Buffer::shareable(&context, 4096).map_err(text)?;
        stream.pause(std::time::Duration::from_millis(20)).map_err(text)?;
        buffer.fill(7, &stream).map_err(text)?;
    }
    stream.synchronize().map_err(text)?;
    Buffer::plain(&context, 10).map(drop).map_err(text)
}

fn what_cannot_be_allocated_is_a_refusal() -> Outcome {
    let context = context()?;
    expect(Buffer::plain(&context, 1 << 50), Reason::NoMemory)?;
    expect(Buffer::shareable(&context, 1 << 50), Reason::NoMemory)?;
    expect(Buffer::shareable(&context, usize::MAX), Reason::NoMemory)?;
    expect(Buffer::plain(&context, 0), Reason::Driver)
}

fn slices_of_cudarc_come_in_and_go_out() -> Outcome {
    let theirs = CudaContext::new(0).map_err(|error| format!("{}", error.0 as u32))?;
    let stream = theirs.default_stream();
    let numbers: Vec<f32> = (0..1000u16).map(f32::from).collect();
    let slice = stream.clone_htod(&numbers).map_err(|error| format!("{}", error.0 as u32))?;
    let (buffer, ours) = Buffer::of_slice(slice).map_err(text)?;
    same(buffer.len(), 4000)?;
    let mut back = vec![0; 8];
    buffer.read_at(4, &mut back, &ours).map_err(text)?;
    same(back, [1f32.to_ne_bytes(), 2f32.to_ne_bytes()].concat())?;
    {
        let view = buffer.as_slice::<f32>(&stream).map_err(text)?;
        let back = stream.clone_dtoh(&*view).map_err(|error| format!("{}", error.0 as u32))?;
        same(back, numbers)?;
    }
    let odd = buffer.part(0..3999).map_err(text)?;
    expect(odd.as_slice::<f32>(&stream), Reason::ShapeMismatch)?;
    let odd = buffer.part(1..3997).map_err(text)?;
    expect(odd.as_slice::<f32>(&stream), Reason::Misaligned)
}

fn nothing_is_left() -> Outcome {
    let counted = || {
        [Count::Ranges, Count::Handles, Count::Events, Count::OpenImports, Count::Registered]
            .map(count)
    };
    let held = context()?;
    held.stream().map_err(text)?;
    let before = counted();
    for test in [
        every_kind_of_memory_keeps_what_is_written,
        a_pointer_says_what_it_can_do,
        a_handle_is_refused_where_it_was_made,
        a_descriptor_is_the_same_memory,
        a_stream_waits_for_another,
        slices_of_cudarc_come_in_and_go_out,
    ] {
        test()?;
    }
    // What is freed in a stream's order is gone when that is done.
    Stream::legacy_default(&held).synchronize().map_err(text)?;
    same(counted(), before)
}

fn a_context_goes_with_the_last_that_needs_it() -> Outcome {
    let driver = cuda::driver().map_err(text)?;
    let info = &driver.devices()[0];
    same(driver.has_context(info), false)?;
    let buffer = Buffer::plain(&context()?, 10).map_err(text)?;
    same(driver.has_context(info), true)?;
    drop(buffer);
    same(driver.has_context(info), false)
}

fn main() -> ExitCode {
    stand_in::main(true, || {
        run_serially(vec![
            trial("devices_have_names_and_uuids", devices_have_names_and_uuids),
            trial("a_context_goes_with_the_last", a_context_goes_with_the_last_that_needs_it),
            trial("every_kind_of_memory_keeps", every_kind_of_memory_keeps_what_is_written),
            trial("a_pointer_says_what_it_can_do", a_pointer_says_what_it_can_do),
            trial("a_handle_is_refused_where_it_was_made", a_handle_is_refused_where_it_was_made),
            trial("a_descriptor_is_the_same_memory", a_descriptor_is_the_same_memory),
            trial("a_stream_waits_for_another", a_stream_waits_for_another),
            trial(
                "memory_that_is_still_written_is_not_unmapped",
                memory_that_is_still_written_is_not_unmapped,
            ),
            trial("what_cannot_be_allocated_is_a_refusal", what_cannot_be_allocated_is_a_refusal),
            trial("slices_of_cudarc_come_in_and_go_out", slices_of_cudarc_come_in_and_go_out),
            trial("nothing_is_left", nothing_is_left),
        ])
    })
}
