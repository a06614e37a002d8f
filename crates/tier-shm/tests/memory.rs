//! Tensors that are born shared, and what a receiver may do with them.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::collections::VecDeque;
use std::sync::Arc;

use rung::{Carrier, DType, Parcel, Reason, Rung, Session, Storage, Tensor, Trust};
use tier_shm::{PeerTrust, Shm, TensorMut};

fn carrier(trust: Trust) -> Box<dyn Carrier> {
    let (mine, theirs) = (Shm.probe().unwrap(), Shm.probe().unwrap());
    match Shm.open(&mine, &theirs, trust).unwrap() {
        Session::Carrier(carrier) => carrier,
        Session::Form(_) => panic!("shm is a carrier"),
    }
}

/// Through text and descriptors, as between processes.
fn across(tensor: &Tensor, trust: Trust) -> (Tensor, rung::Packed) {
    across_by(&*carrier(Trust::none()), tensor, trust)
}

fn across_by(sender: &dyn Carrier, tensor: &Tensor, trust: Trust) -> (Tensor, rung::Packed) {
    let mut packed = sender.export(tensor.storage()).unwrap();
    let handles = std::mem::take(&mut packed.parcel.handles);
    let whole = Parcel {
        handles,
        meta: packed.parcel.meta.clone(),
        rung: packed.parcel.rung.clone(),
        ..packed.parcel
    };
    let (wire, handles) = whole.split().unwrap();
    let parcel = Parcel::join(wire, &mut VecDeque::from(handles)).unwrap();
    let storage = carrier(trust).import(parcel).unwrap();
    let there = Tensor::contiguous(Arc::new(storage), tensor.dtype(), tensor.shape()).unwrap();
    (there, packed)
}

fn numbers() -> TensorMut {
    let mut tensor = TensorMut::new(DType::U32, &[1000]).unwrap();
    for (index, element) in tensor.as_mut_slice::<u32>().unwrap().iter_mut().enumerate() {
        *element = index as u32;
    }
    tensor
}

/// A block as another process lends it: one that was not exported from this one.
fn foreign(meta: &impl serde::Serialize, trust: Trust) -> (Tensor, segment::Shared) {
    let mut draft = segment::Draft::new(4000).unwrap();
    for (index, element) in draft.bytes_mut().chunks_exact_mut(4).enumerate() {
        element.copy_from_slice(&(index as u32).to_le_bytes());
    }
    let block = draft.share().unwrap();
    let parcel = Parcel {
        rung: rung::RungId::SHM,
        lease: rung::LeaseId(1),
        bytes: 4000,
        copies: 0,
        meta: rung::Meta::write(meta).unwrap(),
        handles: vec![block.descriptor().unwrap()],
    };
    let storage = Arc::new(carrier(trust).import(parcel).unwrap());
    (Tensor::contiguous(storage, DType::U32, &[1000]).unwrap(), block)
}

fn trusted() -> Trust {
    Trust::carrying(PeerTrust::same_executable(std::process::id()).unwrap())
}

#[test]
fn what_its_owner_can_write_is_lent_only_in_trust() {
    let (there, _block) = foreign(&(), Trust::none());
    assert_eq!(there.as_slice::<u32>().unwrap_err().reason(), Reason::PeerNotTrusted);
    assert_eq!(there.to_vec::<u32>().unwrap()[999], 999);
    let (there, _block) = foreign(&(), trusted());
    assert_eq!(there.as_slice::<u32>().unwrap()[999], 999);
}

/// Whom a trusted peer trusts is another question: what it hands on is copied out.
#[test]
fn trust_is_not_handed_on() {
    let (there, _block) = foreign(&"forwarded", trusted());
    assert_eq!(there.as_slice::<u32>().unwrap_err().reason(), Reason::PeerNotTrusted);
    assert_eq!(there.to_vec::<u32>().unwrap()[999], 999);
    // And what this process hands on says that it is not its own.
    let (there, _block) = foreign(&(), trusted());
    let packed = carrier(Trust::none()).export(there.storage()).unwrap();
    assert_eq!(packed.parcel.meta.as_json(), "\"forwarded\"");
    let packed = carrier(Trust::none()).export(numbers().share().unwrap().storage()).unwrap();
    assert_eq!(packed.parcel.meta.as_json(), "null");
}

#[test]
fn what_nobody_can_write_is_lent_to_anyone() {
    let sealed = numbers().seal().unwrap();
    assert_eq!(across(&sealed, Trust::none()).0.as_slice::<u32>().unwrap()[999], 999);
    let private = Tensor::from_vec(vec![7u32; 1000], &[1000]).unwrap();
    let (there, packed) = across(&private, Trust::none());
    assert_eq!(there.as_slice::<u32>().unwrap(), [7; 1000]);
    assert_eq!(packed.parcel.copies, 1);
}

#[test]
fn memory_is_writable_again_when_every_lease_is_home_and_not_before() {
    let shared = numbers().share().unwrap();
    let sender = carrier(Trust::none());
    let (there, packed) = across_by(&*sender, &shared, Trust::none());
    // Lent out: the sender still keeps the owner for the receiver's lease.
    let shared = TensorMut::reclaim(shared).unwrap_err();
    drop(there);
    sender.released(sender.receipt(packed.parcel.lease));
    let shared = TensorMut::reclaim(shared).unwrap_err();
    drop(packed.owner);
    let view = shared.clone();
    let shared = TensorMut::reclaim(shared).unwrap_err();
    drop(view);
    let mut again = TensorMut::reclaim(shared).unwrap();
    assert_eq!(again.as_mut_slice::<u32>().unwrap()[999], 999);
    again.as_mut_slice::<u32>().unwrap()[0] = 42;
    assert_eq!(again.share().unwrap().as_slice::<u32>().unwrap()[0], 42);
}

/// Whoever drops an owner before the receipt came has lost the memory, and not the receiver its
/// elements.
#[test]
fn an_owner_dropped_too_early_gives_nothing_back() {
    let shared = numbers().share().unwrap();
    let sender = carrier(Trust::none());
    let packed = sender.export(shared.storage()).unwrap();
    let lease = packed.parcel.lease;
    drop(packed.owner);
    let shared = TensorMut::reclaim(shared).unwrap_err();
    // Too late, and about leases that never were: still nothing.
    sender.released(sender.receipt(lease));
    sender.released(sender.receipt(rung::LeaseId(u64::MAX)));
    assert!(TensorMut::reclaim(shared).is_err());
}

#[test]
fn a_peer_that_is_surely_gone_gives_everything_back() {
    let shared = numbers().share().unwrap();
    let sender = carrier(Trust::none());
    let (there, packed) = across_by(&*sender, &shared, Trust::none());
    sender.peer_gone();
    drop((there, packed));
    assert!(TensorMut::reclaim(shared).is_ok());
}

/// What comes back is the very memory: it cannot be written while somebody looks at it, whatever became
/// of the peer in between.
#[test]
fn a_block_of_ours_that_comes_back_is_not_written_meanwhile() {
    let shared = numbers().share().unwrap();
    let sender = carrier(Trust::none());
    let (there, packed) = across_by(&*sender, &shared, Trust::none());
    let peer = carrier(Trust::none());
    let (back, packed_back) = across_by(&*peer, &there, Trust::none());
    let elements = back.as_slice::<u32>().unwrap();
    peer.released(peer.receipt(packed_back.parcel.lease));
    drop((there, packed_back));
    sender.peer_gone();
    drop(packed);
    let shared = TensorMut::reclaim(shared).unwrap_err();
    assert_eq!(elements[999], 999);
    drop(back);
    assert!(TensorMut::reclaim(shared).is_ok());
}

#[test]
fn a_part_of_a_block_is_not_reclaimed_as_the_whole() {
    let part = numbers().share().unwrap().slice(0, 0, 10).unwrap();
    assert_eq!(TensorMut::reclaim(part).unwrap_err().shape(), [10]);
    let private = Tensor::from_vec(vec![1u8], &[1]).unwrap();
    assert!(TensorMut::reclaim(private).is_err());
}

#[test]
fn a_tensor_without_elements_needs_no_memory() {
    let mut empty = TensorMut::new(DType::F32, &[0, 7]).unwrap();
    assert!(empty.as_mut_slice::<f32>().unwrap().is_empty());
    assert_eq!(empty.share().unwrap().shape(), [0, 7]);
}

#[test]
fn a_forwarded_block_is_the_same_block() {
    let sealed = numbers().seal().unwrap();
    let (there, _packed) = across(&sealed, Trust::none());
    let (further, packed) = across(&there, Trust::none());
    assert_eq!(packed.parcel.copies, 0);
    drop((sealed, there));
    assert_eq!(further.as_slice::<u32>().unwrap()[999], 999);
}

#[test]
fn device_memory_is_refused() {
    #[derive(Debug)]
    struct OnDevice;
    impl rung::Memory for OnDevice {
        fn len(&self) -> usize {
            64
        }
        fn device(&self) -> rung::Device {
            rung::Device::Cuda([7; 16])
        }
        fn bytes(&self) -> Result<&[u8], rung::Refusal> {
            Err(Reason::DeviceMemory.into())
        }
    }
    let storage = Arc::new(Storage::new(OnDevice));
    let refusal = carrier(Trust::none()).export(&storage).unwrap_err();
    assert_eq!(refusal.reason(), Reason::DeviceMemory);
}
