//! `shm` between two processes, both directions, from private and from shared memory.

use std::process::ExitCode;
use std::sync::Arc;

use rung::{DType, Storage, Trust};
use testkit::carrier::{Suite, main as suite, private};
use tier_shm::{PeerTrust, Shm, TensorMut};

fn born(bytes: &[u8]) -> TensorMut {
    let mut tensor = TensorMut::new(DType::U8, &[bytes.len()]).expect("a block");
    tensor.as_bytes_mut().copy_from_slice(bytes);
    tensor
}

fn shared(bytes: &[u8]) -> Arc<Storage> {
    born(bytes).share().expect("a shared block").into_storage()
}

fn sealed(bytes: &[u8]) -> Arc<Storage> {
    born(bytes).seal().expect("a sealed block").into_storage()
}

fn main() -> ExitCode {
    suite(&Suite {
        rung: || Box::new(Shm),
        copied: &[("private", private)],
        native: &[("shared", shared), ("sealed", sealed)],
        trust: |pid| PeerTrust::same_executable(pid).map_or(Trust::none(), Trust::carrying),
    })
}
