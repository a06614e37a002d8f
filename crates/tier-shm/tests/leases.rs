//! The lease table against a plain model, under any sequence of sends, drops, receipts and deaths.
//!
//! What a receiver sees is read through the descriptor that it was sent, as another process would: as long
//! as it may look, it sees what was sent and nothing else (L4, L8). The model says who may still look.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;
use rung::{Carrier, DType, LeaseId, Meta, Owner, Reason, Rung, Session, Tensor, Trust};
use tier_shm::{PeerTrust, Shm, TensorMut};

/// The last of them is not trusted.
const PEERS: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    /// A tensor is born, of one of a few sizes.
    Born(usize),
    /// A private tensor goes to a peer.
    Private(usize, usize),
    /// A tensor goes to a peer.
    Send(usize, usize),
    /// A receiver lets go.
    Receipt(usize),
    /// A receiver lets go, and says that somebody else may go on looking.
    ExposedReceipt(usize),
    /// The owner of a lease is dropped before its receipt came.
    Lose(usize),
    /// The user drops a tensor.
    Drop(usize),
    /// The user wants to write a tensor again.
    Reclaim(usize),
    /// A peer is gone for sure.
    Gone(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = 0..8usize;
    let peer = 0..PEERS;
    let step = prop_oneof![
        3 => index.clone().prop_map(Step::Born),
        3 => (index.clone(), peer.clone()).prop_map(|(size, peer)| Step::Private(size, peer)),
        6 => (index.clone(), peer.clone()).prop_map(|(tensor, peer)| Step::Send(tensor, peer)),
        6 => index.clone().prop_map(Step::Receipt),
        1 => index.clone().prop_map(Step::ExposedReceipt),
        1 => index.clone().prop_map(Step::Lose),
        2 => index.clone().prop_map(Step::Drop),
        3 => index.prop_map(Step::Reclaim),
        1 => peer.prop_map(Step::Gone),
    ];
    prop::collection::vec(step, 1..80)
}

/// Somebody who may look at a block, and what he has to see there.
struct View {
    block: File,
    stamp: u64,
    /// Of which of our tensors, if it is one.
    tensor: Option<u64>,
}

struct Lease {
    peer: usize,
    id: LeaseId,
    owner: Owner,
    view: View,
}

struct World {
    peers: Vec<Box<dyn Carrier>>,
    /// Descriptors that each peer holds, by the number they came with.
    held: Vec<HashMap<u64, File>>,
    tensors: Vec<(u64, Tensor)>,
    leases: Vec<Lease>,
    /// Those who may look for good: strangers, and who was lost.
    lookers: Vec<View>,
    stamps: u64,
}

fn size(of: usize) -> usize {
    [8, 4096, 4096, 5000, 8192, 8192, 100_000, 99_000][of]
}

impl World {
    fn new() -> Self {
        let trusted = || Trust::carrying(PeerTrust::same_executable(std::process::id()).unwrap());
        let open = |peer: usize| {
            let trust = if peer == PEERS - 1 { Trust::none() } else { trusted() };
            match Shm.open(&Shm.probe().unwrap(), &Shm.probe().unwrap(), trust).unwrap() {
                Session::Carrier(carrier) => {
                    carrier.wake_with(std::sync::Arc::new(|| {}));
                    carrier
                }
                Session::Form(_) => unreachable!("shm is a carrier"),
            }
        };
        Self {
            peers: (0..PEERS).map(open).collect(),
            held: (0..PEERS).map(|_| HashMap::new()).collect(),
            tensors: Vec::new(),
            leases: Vec::new(),
            lookers: Vec::new(),
            stamps: 0,
        }
    }

    fn stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }

    fn send(&mut self, tensor: &Tensor, stamp: u64, of: Option<u64>, peer: usize) {
        let carrier = &self.peers[peer];
        let mut packed = carrier.export(tensor.storage()).unwrap();
        let id = packed.parcel.lease;
        carrier.sent(id);
        let meta: Option<HashMap<String, u64>> = packed.parcel.meta.read().unwrap();
        let number = meta.and_then(|meta| meta.get("b").copied());
        let block = match (packed.parcel.handles.pop().map(File::from), number) {
            (Some(block), None) => block,
            (Some(block), Some(number)) => {
                self.held[peer].insert(number, block.try_clone().unwrap());
                block
            }
            (None, Some(number)) => self.held[peer][&number].try_clone().unwrap(),
            (None, None) => unreachable!("a parcel without a block"),
        };
        let view = View { block, stamp, tensor: of };
        self.leases.push(Lease { peer, id, owner: packed.owner, view });
    }

    fn release(&mut self, lease: usize, exposed: bool) {
        if lease >= self.leases.len() {
            return;
        }
        let Lease { peer, id, owner, view } = self.leases.swap_remove(lease);
        let carrier = &self.peers[peer];
        let mut receipt = carrier.receipt(id);
        if exposed {
            receipt.meta = Some(Meta::write(&"exposed").unwrap());
        }
        carrier.released(receipt);
        drop(owner);
        if exposed || peer == PEERS - 1 {
            // He goes on looking; but whoever reclaims a tensor that a stranger saw may write it.
            let tensor = if exposed { Some(u64::MAX) } else { view.tensor };
            self.lookers.push(View { tensor: tensor.filter(|_| view.tensor.is_some()), ..view });
        }
    }

    /// Whether nobody looks at a tensor who could not be told that it changes.
    fn may_reclaim(&self, tensor: u64, retired: &[u64]) -> bool {
        !retired.contains(&tensor)
            && self.leases.iter().all(|lease| lease.view.tensor != Some(tensor))
    }

    /// Everybody who may look sees what he was sent.
    fn check(&self) -> Result<(), TestCaseError> {
        for view in self.leases.iter().map(|lease| &lease.view).chain(&self.lookers) {
            let mut bytes = [0; 8];
            view.block.read_exact_at(&mut bytes, 0).unwrap();
            prop_assert_eq!(u64::from_le_bytes(bytes), view.stamp);
        }
        Ok(())
    }
}

fn born(len: usize, stamp: u64) -> TensorMut {
    let mut tensor = TensorMut::new(DType::U8, &[len]).unwrap();
    assert!(tensor.as_bytes_mut().iter().all(|byte| *byte == 0), "stale bytes");
    tensor.as_bytes_mut()[..8].copy_from_slice(&stamp.to_le_bytes());
    tensor
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn whoever_may_look_sees_what_he_was_sent(steps in steps()) {
        let mut world = World::new();
        let mut retired: Vec<u64> = Vec::new();
        for step in steps {
            match step {
                Step::Born(of) => {
                    let stamp = world.stamp();
                    world.tensors.push((stamp, born(size(of), stamp).share().unwrap()));
                }
                Step::Private(of, peer) => {
                    let stamp = world.stamp();
                    let mut bytes = vec![0xEE; size(of)];
                    bytes[..8].copy_from_slice(&stamp.to_le_bytes());
                    let tensor = Tensor::from_vec(bytes, &[size(of)]).unwrap();
                    world.send(&tensor, stamp, None, peer);
                }
                Step::Send(index, peer) if index < world.tensors.len() => {
                    let (stamp, tensor) = world.tensors[index].clone();
                    world.send(&tensor, stamp, Some(stamp), peer);
                }
                Step::Receipt(index) => world.release(index, false),
                Step::ExposedReceipt(index) => {
                    if let Some(tensor) = world.leases.get(index).and_then(|l| l.view.tensor) {
                        retired.push(tensor);
                    }
                    world.release(index, true);
                }
                Step::Lose(index) if index < world.leases.len() => {
                    let Lease { owner, view, .. } = world.leases.swap_remove(index);
                    drop(owner);
                    retired.extend(view.tensor);
                    world.lookers.push(View { tensor: view.tensor.map(|_| u64::MAX), ..view });
                }
                Step::Drop(index) if index < world.tensors.len() => {
                    drop(world.tensors.swap_remove(index));
                }
                Step::Reclaim(index) if index < world.tensors.len() => {
                    let (before, tensor) = world.tensors.swap_remove(index);
                    let may = world.may_reclaim(before, &retired);
                    match TensorMut::reclaim(tensor) {
                        Ok(mut tensor) => {
                            prop_assert!(may, "somebody still looks at it");
                            let stamp = world.stamp();
                            tensor.as_bytes_mut()[..8].copy_from_slice(&stamp.to_le_bytes());
                            // Strangers may see what is written: they were sent this tensor.
                            world.lookers.retain(|view| view.tensor != Some(before));
                            world.tensors.push((stamp, tensor.share().unwrap()));
                        }
                        Err(tensor) => {
                            prop_assert!(!may, "nobody looks at it");
                            world.tensors.push((before, tensor));
                        }
                    }
                }
                Step::Gone(peer) => {
                    // Its process has ended, so it looks at nothing; the next one has its place.
                    world.peers[peer].peer_gone();
                    world.leases.retain(|lease| lease.peer != peer);
                    let fresh = World::new();
                    let World { peers, .. } = fresh;
                    world.peers[peer] = peers.into_iter().nth(peer).unwrap();
                    world.held[peer].clear();
                }
                _ => {}
            }
            world.check()?;
        }
    }
}

/// A stranger's number says nothing about anybody else's blocks.
#[test]
fn a_number_of_another_session_says_nothing() {
    let world = World::new();
    let tensor = born(5000, 1).share().unwrap();
    let packed = world.peers[0].export(tensor.storage()).unwrap();
    world.peers[0].sent(packed.parcel.lease);
    let mut named = world.peers[0].export(tensor.storage()).unwrap();
    assert!(named.parcel.handles.is_empty());
    named.parcel.lease = LeaseId(1);
    let fault = world.peers[1].import(named.parcel).unwrap_err();
    assert_eq!(fault.reason(), Reason::UnknownBlock);
}
