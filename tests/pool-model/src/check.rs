//! The model as a checker takes it: what may happen next, within bounds, and what has to hold.

use stateright::{Model, Property};

use crate::state::{Free, Id, Message, Rules, State, Step};

/// How much of everything there is.
#[derive(Debug, Clone)]
pub struct Bounds {
    pub rules: Rules,
    pub allocations: Id,
    pub importers: Id,
    /// Leases of an allocation to one importer.
    pub leases: u8,
    /// Writes to an allocation, the first one among them.
    pub writes: u8,
    /// Work under one lease.
    pub uses: u8,
    /// Whether imports are kept between leases.
    pub keep: bool,
    /// Whether processes die, and connections.
    pub ends: bool,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            rules: Rules::CONTRACT,
            allocations: 1,
            importers: 2,
            leases: 1,
            writes: 2,
            uses: 1,
            keep: true,
            ends: true,
        }
    }
}

/// A lease's number: where it is from is in it, and how often there was one before.
fn lease(a: Id, i: Id, turn: u64) -> Id {
    a * 10_000 + i * 100 + turn
}

impl Bounds {
    /// Every step that has a subject; whether it may be taken, the rules say.
    fn candidates(&self, state: &State) -> Vec<Step> {
        let mut steps = vec![Step::CrashOwner];
        for i in 0..self.importers {
            steps.extend([Step::Crash { i }, Step::CutOff { i }]);
            let importer = &state.importers[&i];
            if importer.is_dead && !importer.is_known_dead {
                steps.push(Step::KnowDead { i });
            }
            steps.push(Step::KnowOwnerDead { i });
        }
        for (&a, allocation) in &state.allocations {
            if allocation.written < self.writes {
                steps.push(Step::Write { a });
            }
            steps.extend([Step::LetGo { a }, Step::Free { a }]);
            if allocation.pairs.values().any(|pair| !pair.out.is_empty()) {
                steps.push(Step::Evict { a });
            }
            steps.push(Step::StreamRuns { a });
            for i in 0..self.importers {
                let lent = allocation.pairs.get(&i).map_or(0, |pair| pair.lent);
                if lent < self.leases {
                    let lease = lease(a, i, u64::from(lent));
                    steps.push(Step::Export { a, i, lease, keep: self.keep });
                }
                let Some(pair) = allocation.pairs.get(&i) else { continue };
                for &lease in &pair.out {
                    steps.push(Step::Lose { a, i, lease });
                }
                for message in &pair.there {
                    match *message {
                        Message::Parcel { lease, .. } => {
                            steps.push(Step::Import { a, i, lease });
                            steps.push(Step::Refuse { a, i, lease });
                        }
                        Message::Retire => steps.push(Step::Retire { a, i }),
                        _ => {}
                    }
                }
                for message in &pair.back {
                    match *message {
                        Message::Receipt { lease } => steps.push(Step::Home { a, i, lease }),
                        Message::Freed => steps.push(Step::HearFreed { a, i }),
                        _ => {}
                    }
                }
                for (&lease, held) in &pair.held {
                    if held.is_held {
                        steps.push(Step::Release { a, i, lease });
                        if held.used < self.uses {
                            steps.push(Step::Use { a, i, lease });
                        }
                    }
                    if held.pending > 0 {
                        steps.push(Step::UseRuns { a, i, lease });
                    }
                }
                if pair.is_imported || pair.was_freed {
                    steps.push(Step::FreeImport { a, i });
                }
            }
        }
        steps
    }

    fn enabled(&self, state: &State) -> Vec<Step> {
        // Nothing that follows from what must never happen is of interest.
        if !state.wrong.is_empty() {
            return Vec::new();
        }
        let mut steps = self.candidates(state);
        let may = |step: &Step| {
            (self.ends || !step.is_an_end()) && state.apply(self.rules, *step).is_ok()
        };
        steps.retain(may);
        steps
    }

    /// Whether nothing but an end could come any more.
    fn is_over(&self, state: &State) -> bool {
        self.enabled(state).iter().all(|step| step.is_an_end())
    }

    /// Every allocation is freed, or in quarantine, or gone with its owner; and nobody waits for anything.
    fn is_well(state: &State) -> bool {
        let quarantine = |i: &Id, pair: &crate::state::Pair| {
            let importer = &state.importers[i];
            (importer.is_cut_off || pair.is_lost) && !importer.is_known_dead
        };
        state.allocations.values().all(|allocation| {
            let stays =
                |(i, pair): (&Id, &crate::state::Pair)| !pair.is_clear() && quarantine(i, pair);
            let is_freed = allocation.free == Free::Ran;
            let is_settled = is_freed || state.owner_is_dead || allocation.pairs.iter().any(stays);
            let leases = allocation.pairs.values().all(|pair| {
                pair.held.values().all(|held| !held.is_held && held.pending == 0)
                    && (pair.there.is_empty() && pair.back.is_empty() || state.owner_is_dead)
            });
            is_settled && leases
        })
    }
}

impl Model for Bounds {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut state = State::new(0..self.importers);
        for a in 0..self.allocations {
            state = state.apply(self.rules, Step::Allocate { a }).unwrap_or_default();
        }
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        actions.extend(self.enabled(state));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        state.apply(self.rules, step).ok()
    }

    fn properties(&self) -> Vec<Property<Self>> {
        use crate::state::Wrong;
        vec![
            Property::always(USE, |_: &Self, s: &State| !s.wrong.contains(&Wrong::UseAfterFree)),
            Property::always(BYTES, |_: &Self, s: &State| !s.wrong.contains(&Wrong::WrongBytes)),
            Property::always(ORDER, |_: &Self, s: &State| {
                !s.wrong.contains(&Wrong::FreedUnderAnImport)
            }),
            Property::always(ONCE, |_: &Self, s: &State| {
                !s.wrong.contains(&Wrong::FreedTwice) && !s.wrong.contains(&Wrong::ImportedTwice)
            }),
            // Liveness, as it holds at the ends of a space without cycles, which a test shows.
            Property::always(END, |bounds: &Self, s: &State| {
                !s.wrong.is_empty() || !bounds.is_over(s) || Self::is_well(s)
            }),
            Property::sometimes("all is freed", |_: &Self, s: &State| {
                s.allocations.values().all(|allocation| allocation.free == Free::Ran)
            }),
        ]
    }
}

/// No use of memory after its owner reclaimed it.
pub const USE: &str = "no use after the owner's free";
/// What an importer reads is what it was lent.
pub const BYTES: &str = "an importer reads what it was lent";
/// The importer's free comes before the exporter's.
pub const ORDER: &str = "importers free first";
/// Nothing is freed twice, nor imported twice.
pub const ONCE: &str = "nothing is freed or imported twice";
/// Every allocation is reclaimed in the end, or in quarantine; and no deadlock.
pub const END: &str = "every end is a good one";
