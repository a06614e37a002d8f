//! A tensor to an isolated worker and back: the same executable is host and worker.
//!
//! `cargo run --example 01_first_crossing`
#![expect(clippy::print_stdout, reason = "a program for a person to read")]

use ladder::{Channel, DType, Methods, TensorMut, Value, Worker};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The worker's side: a method that doubles what it is sent.
    if let Some(channel) = Channel::from_env()? {
        let methods = Methods::new().on("double", |value| {
            let image =
                value.get("image").and_then(Value::as_tensor).ok_or("an image is wanted")?;
            let doubled = image.to_vec::<f32>()?.into_iter().map(|x| 2.0 * x).collect();
            Ok(rung::Tensor::from_vec(doubled, image.shape())?.into())
        });
        channel.serve(methods)?;
        return Ok(());
    }

    // The host's side. This tensor is born in shared memory, so sending it copies nothing.
    let mut image = TensorMut::new(DType::F32, &[480, 640])?;
    image.as_mut_slice::<f32>()?.fill(21.0);
    let job =
        Value::map([("image", image.share()?.into()), ("note", Value::from("twice, please"))]);

    let worker = Worker::spawn_self()?;
    let reply = worker.call("double", job)?;
    let doubled = reply.value().as_tensor().ok_or("a tensor came back")?;
    assert_eq!(doubled.as_slice::<f32>()?[0], 42.0);

    for leg in &reply.sent().legs {
        println!(
            "sent     {:8} {:>8} bytes on {} with {} copies",
            leg.path, leg.bytes, leg.rung, leg.copies
        );
    }
    for leg in &reply.received().legs {
        println!(
            "received {:8} {:>8} bytes on {} with {} copies",
            leg.path, leg.bytes, leg.rung, leg.copies
        );
    }

    // An error in the worker is an error here, and the worker lives on.
    let error = worker.call("triple", Value::Null).expect_err("there is no such method");
    println!("and {error}");
    Ok(())
}
