//! The contract holds in everything that can happen within these bounds; the rules that it is there to rule out do not.
#![expect(
    clippy::print_stdout,
    reason = "how much was looked at, and how it goes wrong, is for a person to read"
)]

use std::collections::HashMap;

use pool_model::check::{BYTES, END, ONCE, ORDER, USE};
use pool_model::{Bounds, Rules, State, Step};
use stateright::{Checker, HasDiscoveries, Model};

const ALL: &[&str] = &[USE, BYTES, ORDER, ONCE, END];

fn holds(name: &str, bounds: Bounds) {
    let checked = bounds.checker().threads(2).spawn_bfs().join();
    let (all, different) = (checked.state_count(), checked.unique_state_count());
    println!("{name}: {different} states in {all} ways, {} steps deep", checked.max_depth());
    for property in ALL {
        if let Some(path) = checked.discovery(property) {
            let last = path.last_state().clone();
            panic!("{name}: not {property}: {:#?}, {last:#?}", path.into_actions());
        }
    }
    assert!(checked.is_done(), "everything was looked at");
    checked.assert_any_discovery("all is freed");
}

/// What goes wrong by other rules, at the least.
fn goes_wrong(name: &str, rules: Rules, bounds: Bounds, property: &'static str) -> Vec<Step> {
    let bounds = Bounds { rules, ends: false, ..bounds };
    // A single thread goes through it in one order, so that what is found is the shortest way, and the same each time.
    let found = HasDiscoveries::AnyOf([property].into());
    let checked = bounds.checker().threads(1).finish_when(found).spawn_bfs().join();
    let path = checked.discovery(property).unwrap_or_else(|| panic!("{name}: {property}"));
    let steps = path.into_actions();
    println!("{name}: not {property}: {steps:#?}");
    steps
}

fn one() -> Bounds {
    Bounds { importers: 1, leases: 2, ..Bounds::default() }
}

fn ends_in(steps: &[Step], is_last: impl Fn(&Step) -> bool) {
    assert!(steps.last().is_some_and(is_last), "{steps:?}");
}

#[test]
fn two_importers_that_keep_what_they_import() {
    holds("two importers, a lease each, kept", Bounds::default());
}

#[test]
fn two_importers_that_keep_nothing() {
    holds("two importers, a lease each, not kept", Bounds { keep: false, ..Bounds::default() });
}

#[test]
fn one_importer_of_two_leases() {
    holds("one importer, two leases, kept", one());
    holds("one importer, two leases, not kept", Bounds { keep: false, ..one() });
}

#[test]
fn two_allocations() {
    let two = Bounds { allocations: 2, importers: 1, writes: 1, ..Bounds::default() };
    holds("two allocations, one importer", two);
}

/// As it was found in the field: imported pointers were never freed.
#[test]
fn importers_that_never_free_are_freed_under() {
    let rules = Rules { importer_frees: false, ..Rules::CONTRACT };
    let steps = goes_wrong("no importer frees", rules, one(), ORDER);
    ends_in(&steps, |step| matches!(step, Step::StreamRuns { .. }));
}

/// As it was found in the field: what pinned the memory was an entry of a cache, which other entries drove out.
#[test]
fn a_cache_that_pins_lets_go_too_early() {
    let rules = Rules { leases_pin: false, ..Rules::CONTRACT };
    let steps = goes_wrong("a cache pins", rules, one(), USE);
    assert!(steps.iter().any(|step| matches!(step, Step::Evict { .. })), "{steps:?}");
    ends_in(&steps, |step| matches!(step, Step::UseRuns { .. }));
}

/// As it was found in the field: nothing ordered the work of two processes.
#[test]
fn without_events_other_bytes_are_read() {
    let rules = Rules { ready_events: false, done_events: false, ..Rules::CONTRACT };
    let steps = goes_wrong("no events", rules, one(), BYTES);
    ends_in(&steps, |step| matches!(step, Step::UseRuns { .. }));
    let rules = Rules { done_events: false, ..Rules::CONTRACT };
    let steps = goes_wrong("no done-events", rules, one(), BYTES);
    assert!(steps.iter().any(|step| matches!(step, Step::Write { .. })), "{steps:?}");
}

/// Each lease with an import of its own.
#[test]
fn an_import_for_each_lease_is_one_too_many() {
    let rules = Rules { one_import: false, ..Rules::CONTRACT };
    goes_wrong("an import for each lease", rules, one(), ONCE);
}

/// Whoever frees does so again.
#[test]
fn what_is_freed_again_is_found() {
    let rules = Rules { importer_frees_once: false, ..Rules::CONTRACT };
    let steps = goes_wrong("freed again by its importer", rules, one(), ONCE);
    ends_in(&steps, |step| matches!(step, Step::FreeImport { .. }));
    let rules = Rules { owner_frees_once: false, ..Rules::CONTRACT };
    let steps = goes_wrong("freed again by its owner", rules, one(), ONCE);
    ends_in(&steps, |step| matches!(step, Step::Free { .. }));
}

/// No state comes again, so that what holds at every end comes in the end.
#[test]
fn the_space_has_no_cycles() {
    let bounds = one();
    // States by number, and what follows each; and those that nothing leads to any more, until none is left.
    let mut numbers: HashMap<State, usize> = HashMap::new();
    let mut next: Vec<Vec<usize>> = Vec::new();
    let mut left: Vec<State> = bounds.init_states();
    for (number, state) in left.iter().enumerate() {
        numbers.insert(state.clone(), number);
        next.push(Vec::new());
    }
    while let Some(state) = left.pop() {
        let from = numbers[&state];
        for following in bounds.next_states(&state) {
            let known = numbers.len();
            let to = *numbers.entry(following.clone()).or_insert(known);
            if to == known {
                next.push(Vec::new());
                left.push(following);
            }
            next[from].push(to);
        }
    }
    let mut into = vec![0usize; next.len()];
    next.iter().flatten().for_each(|to| into[*to] += 1);
    let mut free: Vec<usize> = (0..into.len()).filter(|state| into[*state] == 0).collect();
    let mut sorted = 0;
    while let Some(state) = free.pop() {
        sorted += 1;
        for to in &next[state] {
            into[*to] -= 1;
            if into[*to] == 0 {
                free.push(*to);
            }
        }
    }
    println!("{sorted} states in an order that every step goes forward in");
    assert_eq!(sorted, next.len(), "states that lead back to themselves");
}

/// Much more of everything: `cargo xtask model`.
#[test]
#[ignore = "takes long: cargo xtask model"]
fn more_of_everything() {
    holds("one importer of three leases", Bounds { leases: 3, ..one() });
    let two = Bounds { leases: 2, writes: 1, ..Bounds::default() };
    holds("two importers of two leases", Bounds { ends: false, ..two.clone() });
    holds("two importers of two leases, not kept", Bounds { keep: false, ..two.clone() });
    holds("three importers", Bounds { importers: 3, writes: 1, ends: false, ..Bounds::default() });
    holds("two importers of two leases, which die", two);
}
