//! The contract holds in everything that can happen within these bounds; the rules that it rules out do not.

use pool_model::Bounds;
use pool_model::check::{BYTES, END, ONCE, ORDER, USE};
use stateright::{Checker, Model};

fn holds(name: &str, bounds: Bounds) {
    let checked = bounds.checker().threads(2).spawn_bfs().join();
    println!(
        "{name}: {} states, {} of them different, {} steps deep",
        checked.state_count(),
        checked.unique_state_count(),
        checked.max_depth()
    );
    for property in [USE, BYTES, ORDER, ONCE, END] {
        if let Some(path) = checked.discovery(property) {
            let last = path.last_state().clone();
            panic!("{name}: {property}: {:?} {last:#?}", path.into_actions());
        }
    }
    assert!(checked.is_done(), "everything was looked at");
    checked.assert_any_discovery("all is freed");
}

#[test]
fn two_importers_that_keep() {
    holds("two importers that keep", Bounds::default());
}

#[test]
fn one_importer() {
    holds("x", Bounds { importers: 1, leases: 2, writes: 2, ..Bounds::default() });
}
