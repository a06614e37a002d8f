//! After a fork the child's blocks are inert (L9): it gives nothing back, and is given nothing.
#![cfg(unix)]
#![expect(unsafe_code, reason = "there is no fork without it")]

use nix::libc;
use segment::{Draft, Limits, Pool};

/// Runs something in a forked child: whether it held there.
fn in_a_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `check`, which takes no lock but those of a pool that no other thread uses,
    // and ends without running anything of its parent's.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let holds = check();
        // SAFETY: ends this process at once; exit handlers are its parent's.
        unsafe { libc::_exit(i32::from(!holds)) };
    }
    let mut status = 0;
    // SAFETY: `status` is a place for the answer; the child is ours and is waited for once.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    waited == pid && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn a_forked_child_neither_takes_blocks_nor_gives_them_back() {
    let pool = Pool::new(Limits::default());
    let fill = |byte: u8| {
        Draft::build_in(&pool, 10_000, |filling| filling.write(&[byte; 10_000])).expect("a block")
    };
    drop(fill(1));
    let (in_use, seen) = (fill(2), pool.stats());
    drop(fill(3));
    let idle = pool.stats();
    assert_eq!((seen.idle_blocks, idle.idle_blocks, idle.blocks), (0, 1, 2));
    let mut in_use = Some(in_use);
    assert!(in_a_child(|| {
        // Its parent's block shows nothing, and dropping it is nothing.
        let shows_nothing = in_use.as_ref().is_some_and(|draft| draft.bytes().is_empty());
        // A block of its own, perhaps where its parent's was.
        let own = Draft::build_in(&pool, 10_000, |filling| filling.write(&[4; 10_000]));
        drop(in_use.take());
        pool.trim();
        let stats = pool.stats();
        let Ok(own) = own else { return false };
        let begins_anew =
            (stats.made, stats.reused, stats.blocks, stats.idle_blocks) == (1, 0, 1, 0);
        let is_right = own.bytes() == [4; 10_000];
        drop(own);
        shows_nothing && begins_anew && is_right && pool.stats().idle_blocks == 1
    }));
    // The parent's blocks are as they were.
    assert_eq!(in_use.as_ref().map(Draft::bytes), Some(&[2; 10_000][..]));
    assert_eq!(pool.stats(), idle);
    drop(fill(5));
    assert_eq!(pool.stats().made, idle.made);
}
