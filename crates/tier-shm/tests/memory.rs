//! Tensors that are born shared, and what a receiver may do with them.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rung::{Carrier, DType, Parcel, Reason, Rung, Session, Storage, Tensor, Trust};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use tier_shm::{PeerTrust, Shm, TensorMut};

fn carrier(trust: Trust) -> Box<dyn Carrier> {
    let (mine, theirs) = (Shm.probe().unwrap(), Shm.probe().unwrap());
    match Shm.open(&mine, &theirs, trust).unwrap() {
        Session::Carrier(carrier) => carrier,
        Session::Form(_) => panic!("shm is a carrier"),
    }
}

/// One whose transport sends notices, so that blocks may be kept by number.
fn listening(trust: Trust) -> Box<dyn Carrier> {
    let carrier = carrier(trust);
    carrier.wake_with(Arc::new(|| {}));
    carrier
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

/// A block as another process lends it: one that was not made by this one's crates.
fn foreign(meta: &impl serde::Serialize, trust: Trust) -> (Tensor, File) {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("foreign", flags).unwrap());
    for index in 0..1000u32 {
        file.write_all(&index.to_le_bytes()).unwrap();
    }
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    fcntl_add_seals(&file, seals).unwrap();
    let parcel = Parcel {
        rung: rung::RungId::SHM,
        lease: rung::LeaseId(1),
        bytes: 4000,
        copies: 0,
        meta: rung::Meta::write(meta).unwrap(),
        handles: vec![file.try_clone().unwrap().into()],
    };
    let storage = Arc::new(carrier(trust).import(parcel).unwrap());
    (Tensor::contiguous(storage, DType::U32, &[1000]).unwrap(), file)
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
    let (there, _block) = foreign(&HashMap::from([("f", true)]), trusted());
    assert_eq!(there.as_slice::<u32>().unwrap_err().reason(), Reason::PeerNotTrusted);
    assert_eq!(there.to_vec::<u32>().unwrap()[999], 999);
    // And what this process hands on says that it is not its own.
    let (there, _block) = foreign(&(), trusted());
    let packed = carrier(Trust::none()).export(there.storage()).unwrap();
    assert_eq!(packed.parcel.meta.as_json(), "{\"f\":true}");
    let packed = carrier(Trust::none()).export(numbers().share().unwrap().storage()).unwrap();
    assert!(!packed.parcel.meta.as_json().contains("\"f\""));
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

/// Whoever drops an owner before the receipt came cannot write the memory again, so the receiver keeps
/// its elements.
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

/// A parcel as it is on the wire, so that it can be handed over twice.
fn sent(sender: &dyn Carrier, packed: &mut rung::Packed) -> (Option<File>, String) {
    sender.sent(packed.parcel.lease);
    let handle = packed.parcel.handles.pop().map(File::from);
    (handle, packed.parcel.meta.as_json().to_owned())
}

fn give_back(sender: &dyn Carrier, packed: rung::Packed) {
    sender.released(sender.receipt(packed.parcel.lease));
    drop(packed.owner);
}

#[test]
fn a_descriptor_goes_once_and_a_number_after_that() {
    let sender = listening(trusted());
    let shared = numbers().share().unwrap();
    let mut first = sender.export(shared.storage()).unwrap();
    // Until it is known to be on its way, every parcel takes it along.
    let unsent = sender.export(shared.storage()).unwrap();
    assert_eq!(unsent.parcel.handles.len(), 1);
    let (handle, meta) = sent(&*sender, &mut first);
    assert!(handle.is_some());
    let mut second = sender.export(shared.storage()).unwrap();
    let (handle, again) = sent(&*sender, &mut second);
    assert!(handle.is_none() && again == meta);
}

#[test]
fn private_memory_goes_into_the_same_block_again() {
    let sender = listening(trusted());
    let private = |seed: u32| Tensor::from_vec(vec![seed; 300_000], &[300_000]).unwrap();
    let mut first = sender.export(private(1).storage()).unwrap();
    let (handle, meta) = sent(&*sender, &mut first);
    let block = handle.unwrap();
    give_back(&*sender, first);
    let mut second = sender.export(private(2).storage()).unwrap();
    let (handle, again) = sent(&*sender, &mut second);
    assert!(handle.is_none() && again == meta);
    let mut bytes = [0; 4];
    block.read_exact_at(&mut bytes, 1_199_996).unwrap();
    assert_eq!(u32::from_le_bytes(bytes), 2);
    // While that is out, another send takes another block.
    let third = sender.export(private(3).storage()).unwrap();
    assert_eq!(third.parcel.handles.len(), 1);
}

/// L8: a peer that gets a block in its second life finds nothing of the first in it.
#[test]
fn a_block_shows_nobody_what_went_to_another() {
    let (first, second) = (listening(trusted()), listening(trusted()));
    let secret = Tensor::from_vec(vec![0xAAu8; 70_000], &[70_000]).unwrap();
    let mut packed = first.export(secret.storage()).unwrap();
    let inode = |file: &File| std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    let before = inode(&sent(&*first, &mut packed).0.unwrap());
    give_back(&*first, packed);
    let short = Tensor::from_vec(vec![0xBBu8; 66_000], &[66_000]).unwrap();
    let mut packed = second.export(short.storage()).unwrap();
    let block = sent(&*second, &mut packed).0.unwrap();
    assert_eq!(inode(&block), before, "the pool gave another block, so nothing is shown");
    let mut whole = vec![0; block.metadata().unwrap().len() as usize];
    block.read_exact_at(&mut whole, 0).unwrap();
    assert!(whole[..66_000].iter().all(|byte| *byte == 0xBB));
    assert!(whole[66_000..].iter().all(|byte| *byte == 0));
}

/// Nobody can take a mapping from a peer, so what a stranger has seen is written for nobody else.
#[test]
fn what_a_stranger_saw_is_not_used_again() {
    let stranger = carrier(Trust::none());
    let inode = |file: &File| std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    let tensor = || {
        let mut tensor = TensorMut::new(DType::U8, &[1_234_567]).unwrap();
        tensor.as_bytes_mut().fill(1);
        tensor.share().unwrap()
    };
    let shared = tensor();
    let mut packed = stranger.export(shared.storage()).unwrap();
    let seen = sent(&*stranger, &mut packed).0.unwrap();
    drop(shared);
    give_back(&*stranger, packed);
    let friend = listening(trusted());
    for _ in 0..3 {
        let mut packed = friend.export(tensor().storage()).unwrap();
        if let Some(block) = sent(&*friend, &mut packed).0 {
            assert_ne!(inode(&block), inode(&seen));
        }
        give_back(&*friend, packed);
    }
    // Private memory goes to a stranger in a block that nobody can write.
    let private = Tensor::from_vec(vec![1u8; 5000], &[5000]).unwrap();
    let mut packed = stranger.export(private.storage()).unwrap();
    let block = sent(&*stranger, &mut packed).0.unwrap();
    assert!(rustix::fs::fcntl_get_seals(&block).unwrap().contains(SealFlags::WRITE));
}

#[test]
fn a_number_that_says_nothing_is_answered_by_the_descriptor() {
    let (sender, receiver) = (listening(trusted()), listening(trusted()));
    let shared = numbers().share().unwrap();
    let mut first = sender.export(shared.storage()).unwrap();
    sent(&*sender, &mut first);
    // The receiver never saw the first; the second is a number alone.
    let second = sender.export(shared.storage()).unwrap();
    let (lease, owner) = (second.parcel.lease, second.owner);
    let fault = receiver.import(second.parcel).unwrap_err();
    assert_eq!(fault.reason(), Reason::UnknownBlock);
    sender.released(receiver.receipt(lease));
    drop(owner);
    let third = sender.export(shared.storage()).unwrap();
    assert_eq!(third.parcel.handles.len(), 1);
    let lease = third.parcel.lease;
    receiver.import(third.parcel).unwrap();
    // Said once, and for that lease alone.
    assert!(receiver.receipt(lease).meta.is_none());
}

#[test]
fn a_peer_is_told_when_a_block_is_gone() {
    let (sender, receiver) = (carrier(trusted()), listening(trusted()));
    let woken = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    sender.wake_with(Arc::new(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }));
    // Sealed, so that dropping it is its end, and not the pool's business.
    let sealed = numbers().seal().unwrap();
    let packed = sender.export(sealed.storage()).unwrap();
    let (lease, owner) = (packed.parcel.lease, packed.owner);
    sender.sent(lease);
    drop(receiver.import(packed.parcel).unwrap());
    sender.released(receiver.receipt(lease));
    drop(owner);
    let named = sender.export(sealed.storage()).unwrap();
    assert!(named.parcel.handles.is_empty());
    assert!(sender.notice().is_none());
    give_back(&*sender, named);
    drop(sealed);
    assert_eq!(woken.load(std::sync::atomic::Ordering::Relaxed), 1);
    let notice = sender.notice().unwrap();
    assert!(sender.notice().is_none());
    receiver.noticed(notice).unwrap();
    let nonsense = rung::Meta::write(&["nonsense"]).unwrap();
    assert_eq!(receiver.noticed(nonsense).unwrap_err().reason(), Reason::BadMetadata);
}

/// The owner of a block that was lent on to a stranger hears so, and does not use it again.
#[test]
fn an_owner_hears_of_strangers_with_the_receipt() {
    let (there, _block) = foreign(&(), trusted());
    let receiver = listening(trusted());
    let parcel = |lease| Parcel {
        rung: rung::RungId::SHM,
        lease: rung::LeaseId(lease),
        bytes: 4000,
        copies: 0,
        meta: rung::Meta::write(&()).unwrap(),
        handles: vec![_block.try_clone().unwrap().into()],
    };
    drop(there);
    for (stranger, meta) in [(false, None), (true, Some("\"exposed\""))] {
        let lease = 7 + u64::from(stranger);
        let storage = Arc::new(receiver.import(parcel(lease)).unwrap());
        let trust = if stranger { Trust::none() } else { trusted() };
        let further = carrier(trust);
        give_back(&*further, further.export(&storage).unwrap());
        drop(storage);
        let receipt = receiver.receipt(rung::LeaseId(lease));
        assert_eq!(receipt.meta.as_ref().map(rung::Meta::as_json), meta);
    }
}

#[test]
fn sharing_copies_once_and_releasing_loses_nothing() {
    let private = Tensor::from_vec((0..1_000_000u32).collect(), &[1000, 1000]).unwrap();
    let transposed = private.permute(&[1, 0]).unwrap();
    let before = segment::calls().copied;
    let shared = tier_shm::share(&transposed).unwrap();
    let again = tier_shm::share(&shared).unwrap();
    assert!(Arc::ptr_eq(shared.storage(), again.storage()));
    // Other tests of this binary copy too, but none so much at once.
    assert!(segment::calls().copied - before >= 4_000_000);
    assert!(tier_shm::release(&shared).unwrap() >= 3_990_000);
    assert_eq!(shared.to_vec::<u32>().unwrap(), transposed.to_vec::<u32>().unwrap());
    assert_eq!(tier_shm::release(&private).unwrap_err().reason(), Reason::PrivateMemory);
    let sealed = tier_shm::seal_copy(&transposed).unwrap();
    assert_eq!(sealed.as_slice::<u32>().unwrap()[1], 1000);
}

/// Whatever the pool hands out, a tensor can be sealed.
#[test]
fn a_tensor_on_a_used_block_can_be_sealed() {
    for turn in 0..3u8 {
        let mut tensor = TensorMut::new(DType::U8, &[77_777]).unwrap();
        assert!(tensor.as_bytes_mut().iter().all(|byte| *byte == 0));
        tensor.as_bytes_mut().fill(turn + 1);
        let shared = tensor.share().unwrap();
        let sealed = TensorMut::reclaim(shared).unwrap().seal().unwrap();
        assert_eq!(sealed.as_slice::<u8>().unwrap(), [turn + 1; 77_777]);
    }
}

#[cfg(feature = "ndarray")]
#[test]
fn a_tensor_is_filled_as_an_array() {
    let mut tensor = TensorMut::new(DType::F32, &[3, 4]).unwrap();
    tensor.as_array_mut::<f32>().unwrap()[[2, 1]] = 7.0;
    assert_eq!(tensor.as_array_mut::<f64>().unwrap_err().reason(), Reason::WrongDType);
    assert_eq!(tensor.share().unwrap().as_slice::<f32>().unwrap()[9], 7.0);
}

/// A transport without a way to say that a block is gone must not have its peer keep it.
#[test]
fn without_notices_a_descriptor_goes_each_time() {
    let sender = carrier(trusted());
    let shared = numbers().share().unwrap();
    for _ in 0..3 {
        let mut packed = sender.export(shared.storage()).unwrap();
        let (handle, meta) = sent(&*sender, &mut packed);
        assert!(handle.is_some() && meta == "null");
    }
    drop(shared);
    assert!(sender.notice().is_none());
}

/// Parcels that were never looked at bring their descriptors again, however many there were.
#[test]
fn what_goes_back_unopened_goes_whole_again() {
    let (sender, receiver) = (listening(trusted()), listening(trusted()));
    let tensors: Vec<Tensor> = (0..20).map(|_| numbers().share().unwrap()).collect();
    for tensor in &tensors {
        let mut packed = sender.export(tensor.storage()).unwrap();
        sent(&*sender, &mut packed);
        receiver.unopened(packed.parcel.lease);
        sender.released(receiver.receipt(packed.parcel.lease));
    }
    for tensor in &tensors {
        assert_eq!(sender.export(tensor.storage()).unwrap().parcel.handles.len(), 1);
    }
}

/// Its heirs may go on looking, so its blocks may be written, but not for others to see.
#[test]
fn what_a_dead_peer_had_is_not_used_for_others() {
    let inode = |file: &File| std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    let dead = listening(trusted());
    let private = |fill: u8| Tensor::from_vec(vec![fill; 345_678], &[345_678]).unwrap();
    let mut packed = dead.export(private(1).storage()).unwrap();
    let seen = sent(&*dead, &mut packed).0.unwrap();
    dead.peer_gone();
    drop(packed.owner);
    let mut packed = listening(trusted()).export(private(2).storage()).unwrap();
    let other = packed.parcel.handles.pop().map(File::from).unwrap();
    assert_ne!(inode(&seen), inode(&other));
}
