//! One tier in a protocol of one's own: nothing but `rung`, `tier-shm` and a socket that takes descriptors along
//! (`transport/unix.rs`), or on Windows a process to give handles to (`transport/windows.rs`).
//!
//! Two processes exchange a tensor, its receipt comes back, and the memory is used again.
//!
//! `cargo run --example 07_tier_shm_alone`
#![expect(clippy::print_stdout, reason = "a program for a person to read")]

#[cfg(unix)]
#[path = "transport/unix.rs"]
mod transport;
#[cfg(windows)]
#[path = "transport/windows.rs"]
mod transport;

use std::collections::VecDeque;
use std::error::Error;
use std::process::Command;
use std::sync::Arc;

use rung::{
    Carrier, DType, Handle, Offer, OfferWire, Parcel, ParcelWire, Receipt, ReceiptWire, Rung,
    Session, Tensor,
};
use serde::{Deserialize, Serialize};
use tier_shm::{Shm, TensorMut};
use transport::Socket;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// What this little protocol says.
#[derive(Serialize, Deserialize)]
enum Message {
    Offer(OfferWire),
    /// A tensor in C order: its storage on the way, its type and shape.
    Tensor(ParcelWire, DType, Vec<usize>),
    /// The sum of its elements, and its lease on the way home.
    Sum(f64, ReceiptWire),
}

/// JSON, with descriptors.
fn send(socket: &Socket, message: &Message, descriptors: &[Handle]) -> Outcome {
    socket.send(&serde_json::to_vec(message)?, descriptors)
}

fn receive(socket: &Socket) -> Outcome<(Message, VecDeque<Handle>)> {
    let (json, descriptors) = socket.receive()?;
    Ok((serde_json::from_slice(&json)?, descriptors))
}

/// Both sides probe, exchange offers, and open; neither trusts the other.
fn open(socket: &Socket) -> Outcome<Box<dyn Carrier>> {
    let mine = Shm.probe()?;
    let (wire, descriptors) = Shm.probe()?.split()?;
    send(socket, &Message::Offer(wire), &descriptors)?;
    let (Message::Offer(wire), mut descriptors) = receive(socket)? else {
        return Err("not an offer".into());
    };
    let theirs = Offer::join(wire, &mut descriptors)?;
    match Shm.open(&mine, &theirs, rung::Trust::none())? {
        Session::Carrier(carrier) => Ok(carrier),
        Session::Form(_) => Err("shm is a carrier".into()),
    }
}

/// The second process: sums what it is sent, and lets go of it.
fn summing_process() -> Outcome {
    let socket = Socket::of_parent()?;
    let carrier = open(&socket)?;
    while let Ok((Message::Tensor(wire, dtype, shape), mut descriptors)) = receive(&socket) {
        let parcel = Parcel::join(wire, &mut descriptors)?;
        let lease = parcel.lease;
        let storage = Arc::new(carrier.import(parcel)?);
        let tensor = Tensor::contiguous(storage, dtype, &shape)?;
        // The sender could write this memory again, so it is copied out; a tensor that was sealed
        // instead of shared could be looked at in place.
        let sum = tensor.to_vec::<f32>()?.into_iter().map(f64::from).sum();
        drop(tensor);
        let (receipt, descriptors) = carrier.receipt(lease).split()?;
        send(&socket, &Message::Sum(sum, receipt), &descriptors)?;
    }
    Ok(())
}

fn main() -> Outcome {
    if std::env::args().nth(1).as_deref() == Some("sum") {
        return summing_process();
    }
    let (socket, mut child) = Socket::to(Command::new(std::env::current_exe()?).arg("sum"))?;
    let carrier = open(&socket)?;

    let mut memory = TensorMut::new(DType::F32, &[1000, 1000])?;
    for round in 1..=3u8 {
        memory.as_mut_slice::<f32>()?.fill(f32::from(round));
        let tensor = memory.share()?;

        let packed = carrier.export(tensor.storage())?;
        let (lease, copies, owner) = (packed.parcel.lease, packed.parcel.copies, packed.owner);
        let (wire, descriptors) = packed.parcel.split()?;
        let message = Message::Tensor(wire, tensor.dtype(), tensor.shape().to_vec());
        send(&socket, &message, &descriptors)?;

        // As long as the lease is out, the owner is kept and nobody can write the memory.
        let (Message::Sum(sum, wire), mut descriptors) = receive(&socket)? else {
            return Err("not a sum".into());
        };
        let receipt = Receipt::join(wire, &mut descriptors)?;
        assert_eq!(receipt.lease, lease);
        carrier.released(receipt);
        drop(owner);
        println!("round {round}: {copies} copies, the sum is {sum}");
        assert_eq!(sum, 1e6 * f64::from(round));

        // Every lease is home: the same memory again.
        memory = TensorMut::reclaim(tensor).map_err(|_| "the memory is still lent out")?;
    }
    drop(socket);
    assert!(child.wait()?.success());
    Ok(())
}
