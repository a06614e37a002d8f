//! Device memory of one worker's, lent on to another: the host between them neither copies nor maps it.
//!
//! `cargo run --release --example gpu_forward`. Without a device it says why, and forwards host memory.
#![expect(clippy::print_stdout, reason = "a program for a person to read")]

use ladder::tier_cuda_ipc::cuda;
use ladder::{Channel, DType, Methods, Tensor, Worker, alloc_on};

fn made() -> Result<Tensor, ladder::Refusal> {
    let bytes: Vec<u8> = (0..4_000_000u32).map(|number| (number % 251) as u8).collect();
    let Ok(driver) = cuda::driver() else {
        return Tensor::from_vec(bytes, &[2000, 2000]);
    };
    let mut born = alloc_on(driver.devices()[0].device(), DType::U8, &[2000, 2000])?;
    born.write(&bytes)?;
    Ok(born.share())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(channel) = Channel::from_env()? {
        let methods = Methods::new().on("make", |_| Ok(made()?.into())).on("check", |value| {
            let tensor = value.as_tensor().ok_or("a tensor is wanted")?;
            let bytes = tensor.to_vec::<u8>()?;
            let right = |(at, byte): (usize, &u8)| usize::from(*byte) == at % 251;
            Ok(bytes.iter().enumerate().all(right).into())
        });
        channel.serve(methods)?;
        return Ok(());
    }

    if let Err(why) = cuda::driver() {
        println!("cuda-ipc: not offered ({why}); forwarding host memory");
    }
    let (maker, checker) = (Worker::spawn_self()?, Worker::spawn_self()?);
    for turn in 1..=3 {
        let made = maker.call("make", ())?;
        // The very memory goes on; the first time, both workers prove that it can.
        let reply = checker.call("check", made.value().clone())?;
        assert_eq!(reply.value().as_bool(), Some(true));
        let leg = reply.sent().legs.first().ok_or("one leaf")?;
        println!("turn {turn}: {} bytes on {} with {} copies", leg.bytes, leg.rung, leg.copies);
    }
    Ok(())
}
