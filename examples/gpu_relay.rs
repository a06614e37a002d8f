//! A tensor on a device to an isolated worker and back, without a trip through the host.
//!
//! `cargo run --release --example gpu_relay`. Without a device it says why, and sends from host memory.
#![expect(clippy::print_stdout, reason = "a program for a person to read")]

use ladder::tier_cuda_ipc::cuda;
use ladder::{Channel, DType, Device, Methods, Tensor, Worker, alloc_on};

/// A tensor to send: on the first device, where there is one.
fn tensor(numbers: &[f32]) -> Result<Tensor, ladder::Refusal> {
    match cuda::driver() {
        Ok(driver) => {
            let info = &driver.devices()[0];
            println!("from {} ({}), CUDA {}", info.device(), info.name(), driver.version());
            // Born shareable: to any number of peers, any number of times, without a copy.
            let mut born = alloc_on(info.device(), DType::F32, &[numbers.len()])?;
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            born.write(&bytes)?;
            Ok(born.share())
        }
        Err(why) => {
            println!("cuda-ipc: not offered ({why}); sending from host memory");
            Tensor::from_vec(numbers.to_vec(), &[numbers.len()])
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The worker's side. A tensor of a device has an address for its kernels (`tier_cuda_ipc::on`); this one
    // copies the elements out, to look at them.
    if let Some(channel) = Channel::from_env()? {
        let methods = Methods::new()
            .on("sum", |value| {
                let tensor = value.as_tensor().ok_or("a tensor is wanted")?;
                Ok(f64::from(tensor.to_vec::<f32>()?.iter().sum::<f32>()).into())
            })
            .on("echo", Ok);
        channel.serve(methods)?;
        return Ok(());
    }

    let worker = Worker::spawn_self()?;
    let numbers: Vec<f32> = (0..1_000_000u32).map(|number| (number % 10) as f32).collect();
    let tensor = tensor(&numbers)?;
    let reply = worker.call("sum", tensor.clone())?;
    assert_eq!(reply.value().as_f64(), Some(4_500_000.0));
    let reply = worker.call("echo", tensor)?;
    let back = reply.value().as_tensor().ok_or("a tensor came back")?;
    assert_eq!(back.to_vec::<f32>()?, numbers);
    for (way, route) in [("sent", reply.sent().clone()), ("received", reply.received())] {
        for leg in &route.legs {
            println!("{way:8} {} bytes on {} with {} copies", leg.bytes, leg.rung, leg.copies);
            for (rung, why) in leg.declined.iter() {
                println!("         not {rung}: {why}");
            }
        }
    }
    let place = if back.device() == Device::Host { "the host" } else { "its device" };
    println!("back on {place}, {} elements as they were", back.count());
    Ok(())
}
