//! Structs as arguments and answers, and a type of one's own that others forward without knowing it.
//!
//! `cargo run --example 02_structs_and_objects`
#![expect(clippy::print_stdout, reason = "a program for a person to read")]

use ladder::{CallOptions, Channel, Methods, Registry, RungId, Tensor, Value, Worker};
use serde::{Deserialize, Serialize};

/// What `serde` derives is all it takes; the tensor inside rides its own rung.
#[derive(Serialize, Deserialize)]
struct Job {
    image: Tensor,
    axis: usize,
    note: String,
}

/// A type that is taken apart by hand: for what `serde` cannot do, or should not.
#[derive(Debug, Clone, PartialEq)]
struct Mesh {
    name: String,
    vertices: Tensor,
}

fn registry() -> Result<Registry, ladder::RegisterError> {
    let registry = Registry::builder().register::<Mesh>(
        "example.org/mesh",
        1,
        |mesh, _| Ok((mesh.name.as_str().into(), vec![mesh.vertices.clone().into()])),
        |mut parts| Ok(Mesh { name: parts.schema_as()?, vertices: parts.next_as()? }),
    )?;
    Ok(registry.build())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(channel) = Channel::from_env()? {
        let methods = Methods::new()
            .on_as("mirror", |job: Job| Ok(job.image.flip(job.axis)?))
            // This worker has never heard of meshes: it holds what it gets, and gives it back.
            .on("keep", Ok);
        channel.serve(methods)?;
        return Ok(());
    }

    let worker = Worker::spawn_self()?;
    let image = ladder::share(&Tensor::from_vec(vec![1u8, 2, 3, 4, 5, 6], &[2, 3])?)?;
    let job = Job { image, axis: 1, note: "mirror it, please".into() };
    // Nothing may be copied, or nothing is sent.
    let options = CallOptions::new().require_at_least(RungId::SHM).require_max_copies(0);
    let answer = worker.call_as_with::<Tensor>("mirror", &job, options)?;
    assert_eq!(answer.value.to_vec::<u8>()?, [3, 2, 1, 6, 5, 4]);
    for leg in &answer.sent.legs {
        println!("{:8} rode {} with {} copies", leg.path, leg.rung, leg.copies);
    }

    let registry = registry()?;
    let mesh = Mesh { name: "cube".into(), vertices: Tensor::from_vec(vec![0f32; 24], &[8, 3])? };
    let kept = worker.call("keep", Value::from(registry.decompose(&mesh)?))?;
    assert_eq!(registry.compose::<Mesh>(kept.value())?, mesh);
    println!("the mesh came back as it was");

    // An argument of another shape is an error that says where.
    let error = worker.call_as::<Tensor>("mirror", &("no job",)).expect_err("it is no job");
    println!("and {error}");
    Ok(())
}
