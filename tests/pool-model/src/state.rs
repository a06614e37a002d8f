//! The state, the steps, and what each may do. The numbers of clauses are those of the contract.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// An allocation, an importer, a lease.
pub type Id = u64;

/// By which rules the processes go: the contract's, or one of those that it is there to rule out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// O6, O7: an importer frees what it imported, and says so, before its owner does.
    pub importer_frees: bool,
    /// O3: the owner holds the memory while a lease is out; otherwise while a cache of its does.
    pub leases_pin: bool,
    /// O4: whoever imports waits for what its owner has enqueued.
    pub ready_events: bool,
    /// O8: a pointer is imported once, however many leases there are.
    pub one_import: bool,
    /// O6: an importer frees once.
    pub importer_frees_once: bool,
    /// O7: so does the owner.
    pub owner_frees_once: bool,
    /// O5: whoever owns waits for what an importer has enqueued.
    pub done_events: bool,
}

impl Rules {
    /// The contract.
    pub const CONTRACT: Self = Self {
        importer_frees: true,
        leases_pin: true,
        ready_events: true,
        one_import: true,
        importer_frees_once: true,
        owner_frees_once: true,
        done_events: true,
    };
}

/// What a step can be wrong about; none of it may ever happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Wrong {
    /// Work of an importer ran on memory that its owner had freed.
    UseAfterFree,
    /// Work of an importer read what was not written yet, or was written over.
    WrongBytes,
    /// The owner's free ran while a process had the memory imported.
    FreedUnderAnImport,
    /// Memory was freed, or an import was, that was not there.
    FreedTwice,
    /// One pointer was imported twice.
    ImportedTwice,
}

/// What is under way between two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// A lease, on contents of this version; to be kept afterwards.
    Parcel { lease: Id, version: u8, keep: bool },
    /// The lease is home; work that may still run is behind a done-event.
    Receipt { lease: Id },
    /// Nobody uses it any more: it need not be kept.
    Retire,
    /// It is not imported any more.
    Freed,
}

/// A lease as its importer has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Held {
    pub version: u8,
    /// Kept by some user, not just by work that is to run.
    pub is_held: bool,
    /// Work that is enqueued and has not run.
    pub pending: u8,
    /// Work that was enqueued.
    pub used: u8,
}

/// One allocation between its owner and one importer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Pair {
    /// Leases that are out, as the owner sees it.
    pub out: BTreeSet<Id>,
    /// The importer may have it imported, as the owner sees it.
    pub may_be_imported: bool,
    /// A lease ended without a receipt.
    pub is_lost: bool,
    /// Leases that there were.
    pub lent: u8,
    /// As it is: imported.
    pub is_imported: bool,
    /// It was, and is freed.
    pub was_freed: bool,
    /// By the importer: kept without leases.
    pub is_kept: bool,
    pub is_retired: bool,
    pub held: BTreeMap<Id, Held>,
    /// What is under way, to the importer and back.
    pub there: BTreeSet<Message>,
    pub back: BTreeSet<Message>,
}

impl Pair {
    fn is_held(&self) -> bool {
        self.held.values().any(|held| held.is_held)
    }

    fn is_working(&self) -> bool {
        self.held.values().any(|held| held.pending > 0)
    }

    /// The owner knows no reason why the importer would still see it.
    pub fn is_clear(&self) -> bool {
        self.out.is_empty() && !self.may_be_imported && !self.is_lost
    }
}

/// Where the owner's free is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Free {
    #[default]
    Not,
    /// In its stream, behind whatever that waits for.
    Enqueued,
    Ran,
}

/// What is enqueued on the stream that the owner orders work on an allocation by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    Write,
    /// For an importer's work under a lease.
    Wait(Id, Id),
    Free,
}

/// One allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// In order.
    pub stream: VecDeque<Work>,
    /// Writes of the owner's that were enqueued, and that have run.
    pub written: u8,
    pub ran: u8,
    /// Nobody of the owner's uses it, and no lease is out.
    pub is_let_go: bool,
    pub free: Free,
    pub pairs: BTreeMap<Id, Pair>,
}

/// One importer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Importer {
    pub is_dead: bool,
    /// The owner knows for sure.
    pub is_known_dead: bool,
    /// Nothing goes between the two any more.
    pub is_cut_off: bool,
    /// It knows for sure that the owner is dead.
    pub knows_owner_dead: bool,
}

/// Everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct State {
    pub owner_is_dead: bool,
    pub importers: BTreeMap<Id, Importer>,
    pub allocations: BTreeMap<Id, Allocation>,
    pub wrong: BTreeSet<Wrong>,
}

/// Something that happens: `a` an allocation, `i` an importer, `lease` a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The owner allocates, and enqueues a first write.
    Allocate {
        a: Id,
    },
    /// The owner enqueues a write: nothing is lent.
    Write {
        a: Id,
    },
    /// The owner lends it.
    Export {
        a: Id,
        i: Id,
        lease: Id,
        keep: bool,
    },
    /// What was to be lent was not sent after all.
    Unlend {
        a: Id,
        i: Id,
        lease: Id,
    },
    /// A lease ends on the owner's side, and no receipt came.
    Lose {
        a: Id,
        i: Id,
        lease: Id,
    },
    /// The importer takes a lease.
    Import {
        a: Id,
        i: Id,
        lease: Id,
    },
    /// It cannot: the lease goes home at once.
    Refuse {
        a: Id,
        i: Id,
        lease: Id,
    },
    /// The importer enqueues work.
    Use {
        a: Id,
        i: Id,
        lease: Id,
    },
    /// The importer lets go of a lease.
    Release {
        a: Id,
        i: Id,
        lease: Id,
    },
    /// The owner hears that a lease is home.
    Home {
        a: Id,
        i: Id,
        lease: Id,
    },
    /// The owner's users let go.
    LetGo {
        a: Id,
    },
    /// The importer hears that it need not be kept.
    Retire {
        a: Id,
        i: Id,
    },
    /// The importer frees its import, after all work on it.
    FreeImport {
        a: Id,
        i: Id,
    },
    /// The owner hears so.
    HearFreed {
        a: Id,
        i: Id,
    },
    /// The owner enqueues its free.
    Free {
        a: Id,
    },
    /// A cache of the owner's lets go of it (rules without O3).
    Evict {
        a: Id,
    },
    /// The owner knows that an importer is dead.
    KnowDead {
        i: Id,
    },
    /// An importer knows that the owner is dead.
    KnowOwnerDead {
        i: Id,
    },
    /// Nothing goes between them any more, and both may live.
    CutOff {
        i: Id,
    },
    Crash {
        i: Id,
    },
    CrashOwner,
    /// Work of the device runs: the next of the owner's stream, or an importer's use.
    StreamRuns {
        a: Id,
    },
    UseRuns {
        a: Id,
        i: Id,
        lease: Id,
    },
}

impl Step {
    /// Whether it is the device's, which nobody sees.
    pub fn is_of_the_device(self) -> bool {
        matches!(self, Self::StreamRuns { .. } | Self::UseRuns { .. })
    }

    /// Whether it is an end that may always come.
    pub fn is_an_end(self) -> bool {
        matches!(
            self,
            Self::Crash { .. } | Self::CrashOwner | Self::CutOff { .. } | Self::Lose { .. }
        )
    }
}

/// Why a step may not be taken: the clause, or what it lacks.
pub type Refused = &'static str;

fn need(holds: bool, clause: Refused) -> Result<(), Refused> {
    if holds { Ok(()) } else { Err(clause) }
}

impl State {
    /// With importers that live, and nothing allocated.
    pub fn new(importers: impl IntoIterator<Item = Id>) -> Self {
        let importers = importers.into_iter().map(|i| (i, Importer::default())).collect();
        Self { importers, ..Self::default() }
    }

    fn allocation(&mut self, a: Id) -> Result<&mut Allocation, Refused> {
        self.allocations.get_mut(&a).ok_or("no such allocation")
    }

    fn pair(&mut self, a: Id, i: Id) -> Result<&mut Pair, Refused> {
        self.allocation(a)?.pairs.get_mut(&i).ok_or("never lent to it")
    }

    fn importer(&mut self, i: Id) -> Result<&mut Importer, Refused> {
        self.importers.get_mut(&i).ok_or("no such importer")
    }

    fn owner_lives(&self) -> Result<(), Refused> {
        need(!self.owner_is_dead, "the owner is dead")
    }

    fn importer_lives(&self, i: Id) -> Result<Importer, Refused> {
        let importer = *self.importers.get(&i).ok_or("no such importer")?;
        need(!importer.is_dead, "the importer is dead")?;
        Ok(importer)
    }

    /// Whether the two can still hear each other.
    fn are_connected(&self, i: Id) -> Result<(), Refused> {
        let importer = self.importers.get(&i).ok_or("no such importer")?;
        need(!importer.is_cut_off && !importer.is_known_dead, "nothing goes between them")
    }

    /// The state after a step, or why the rules do not allow it.
    ///
    /// What the rules allow and the driver does not is noted in [`State::wrong`].
    ///
    /// # Errors
    ///
    /// The clause of the contract that stands against it.
    pub fn apply(&self, rules: Rules, step: Step) -> Result<Self, Refused> {
        let mut next = self.clone();
        next.take(rules, step)?;
        Ok(next)
    }

    fn take(&mut self, rules: Rules, step: Step) -> Result<(), Refused> {
        match step {
            Step::Allocate { a } => {
                self.owner_lives()?;
                let stream = VecDeque::from([Work::Write]);
                let first = Allocation { stream, written: 1, ..Allocation::default() };
                need(self.allocations.insert(a, first).is_none(), "O1: a number is used once")?;
            }
            Step::Write { a } => {
                self.owner_lives()?;
                let allocation = self.allocation(a)?;
                need(!allocation.is_let_go && allocation.free == Free::Not, "it was let go")?;
                let is_home =
                    allocation.pairs.values().all(|pair| pair.out.is_empty() && !pair.is_lost);
                need(is_home || !rules.leases_pin, "O3: nothing is written while it is lent")?;
                allocation.written = allocation.written.saturating_add(1);
                allocation.stream.push_back(Work::Write);
            }
            Step::Export { a, i, lease, keep } => {
                self.owner_lives()?;
                self.are_connected(i)?;
                let allocation = self.allocation(a)?;
                need(!allocation.is_let_go, "O3: what was let go is lent to nobody")?;
                let version = allocation.written;
                let pair = allocation.pairs.entry(i).or_default();
                need(pair.out.insert(lease), "O1: a lease is used once")?;
                pair.lent = pair.lent.saturating_add(1);
                pair.may_be_imported |= keep && rules.importer_frees;
                pair.there.insert(Message::Parcel { lease, version, keep });
            }
            Step::Unlend { a, i, lease } => {
                self.owner_lives()?;
                let pair = self.pair(a, i)?;
                let sent = pair.there.iter().copied().find(|message| is_parcel(message, lease));
                let sent = sent.ok_or("O2: it is on its way")?;
                pair.there.remove(&sent);
                need(pair.out.remove(&lease), "O1: a lease ends once")?;
            }
            Step::Lose { a, i, lease } => {
                self.owner_lives()?;
                let pair = self.pair(a, i)?;
                need(pair.out.remove(&lease), "O1: a lease ends once")?;
                pair.is_lost = true;
            }
            Step::Import { a, i, lease } => self.import(rules, a, i, lease)?,
            Step::Refuse { a, i, lease } => {
                self.importer_lives(i)?;
                let pair = self.pair(a, i)?;
                let sent = pair.there.iter().copied().find(|message| is_parcel(message, lease));
                pair.there.remove(&sent.ok_or("no such parcel")?);
                pair.back.insert(Message::Receipt { lease });
            }
            Step::Use { a, i, lease } => {
                let importer = self.importer_lives(i)?;
                need(!importer.knows_owner_dead, "O10: what its owner took along is not used")?;
                let held = self.pair(a, i)?.held.get_mut(&lease).ok_or("no such lease")?;
                need(held.is_held, "O5: nothing is enqueued after a lease was let go")?;
                held.pending = held.pending.saturating_add(1);
                held.used = held.used.saturating_add(1);
            }
            Step::Release { a, i, lease } => self.release(rules, a, i, lease)?,
            Step::Home { a, i, lease } => {
                self.owner_lives()?;
                self.are_connected(i)?;
                let pair = self.pair(a, i)?;
                need(pair.back.remove(&Message::Receipt { lease }), "no such receipt")?;
                // Of a lease that was lost nothing is noted.
                if !pair.out.remove(&lease) {
                    return Ok(());
                }
                let is_working = pair.held.get(&lease).is_some_and(|held| held.pending > 0);
                if rules.done_events && is_working {
                    self.allocation(a)?.stream.push_back(Work::Wait(i, lease));
                }
            }
            Step::LetGo { a } => {
                self.owner_lives()?;
                let connected: BTreeSet<Id> = self
                    .importers
                    .iter()
                    .filter(|(_, importer)| !importer.is_cut_off && !importer.is_known_dead)
                    .map(|(i, _)| *i)
                    .collect();
                let quarantined: BTreeSet<Id> = self
                    .importers
                    .iter()
                    .filter(|(_, importer)| importer.is_cut_off && !importer.is_known_dead)
                    .map(|(i, _)| *i)
                    .collect();
                let allocation = self.allocation(a)?;
                need(!allocation.is_let_go, "O1: it is let go once")?;
                let home = |(i, pair): (&Id, &Pair)| pair.out.is_empty() || quarantined.contains(i);
                let is_home = allocation.pairs.iter().all(home);
                need(is_home || !rules.leases_pin, "O3: a lease pins it")?;
                allocation.is_let_go = true;
                for (i, pair) in &mut allocation.pairs {
                    if pair.may_be_imported && connected.contains(i) {
                        pair.there.insert(Message::Retire);
                    }
                }
            }
            Step::Retire { a, i } => {
                self.importer_lives(i)?;
                let pair = self.pair(a, i)?;
                need(pair.there.remove(&Message::Retire), "nobody said so")?;
                pair.is_retired = true;
                if !pair.is_imported {
                    // Never imported, or refused: there is nothing to free.
                    pair.back.insert(Message::Freed);
                }
            }
            Step::FreeImport { a, i } => {
                let importer = self.importer_lives(i)?;
                need(rules.importer_frees, "nobody frees imports")?;
                need(!importer.knows_owner_dead, "O10: what its owner took along is not freed")?;
                let pair = self.pair(a, i)?;
                need(!pair.is_held(), "O6: not while a lease is held")?;
                need(pair.is_retired || importer.is_cut_off, "O6: not before it is retired")?;
                need(!pair.is_working(), "O6: after all work on it")?;
                need(pair.is_imported || !rules.importer_frees_once, "O6: once")?;
                if !std::mem::take(&mut pair.is_imported) {
                    self.wrong.insert(Wrong::FreedTwice);
                    return Ok(());
                }
                pair.was_freed = true;
                pair.is_kept = false;
                pair.held.clear();
                if !importer.is_cut_off {
                    pair.back.insert(Message::Freed);
                }
            }
            Step::HearFreed { a, i } => {
                self.owner_lives()?;
                self.are_connected(i)?;
                let pair = self.pair(a, i)?;
                need(pair.back.remove(&Message::Freed), "nobody said so")?;
                pair.may_be_imported = false;
            }
            Step::Free { a } => {
                self.owner_lives()?;
                let allocation = self.allocation(a)?;
                need(allocation.is_let_go, "O3: not while it is used")?;
                need(
                    allocation.pairs.values().all(Pair::is_clear),
                    "O7: not before importers did",
                )?;
                need(allocation.free == Free::Not || !rules.owner_frees_once, "O7: once")?;
                if allocation.free != Free::Not {
                    self.wrong.insert(Wrong::FreedTwice);
                    return Ok(());
                }
                allocation.free = Free::Enqueued;
                allocation.stream.push_back(Work::Free);
            }
            Step::Evict { a } => {
                self.owner_lives()?;
                need(!rules.leases_pin, "O3: a lease pins it")?;
                let allocation = self.allocation(a)?;
                need(allocation.free == Free::Not, "once")?;
                allocation.is_let_go = true;
                allocation.free = Free::Enqueued;
                allocation.stream.push_back(Work::Free);
            }
            Step::KnowDead { i } => {
                self.owner_lives()?;
                need(self.importer(i)?.is_dead, "O9: the dead alone are known to be dead")?;
                self.importer(i)?.is_known_dead = true;
                for allocation in self.allocations.values_mut() {
                    if let Some(pair) = allocation.pairs.get_mut(&i) {
                        *pair = Pair::default();
                    }
                }
            }
            Step::KnowOwnerDead { i } => {
                need(self.owner_is_dead, "O9: the dead alone are known to be dead")?;
                self.importer_lives(i)?;
                let importer = self.importer(i)?;
                need(!importer.knows_owner_dead, "it knows")?;
                importer.knows_owner_dead = true;
            }
            Step::CutOff { i } => {
                self.owner_lives()?;
                self.importer_lives(i)?;
                let importer = self.importer(i)?;
                need(!importer.is_cut_off, "once")?;
                importer.is_cut_off = true;
                for allocation in self.allocations.values_mut() {
                    if let Some(pair) = allocation.pairs.get_mut(&i) {
                        pair.there.clear();
                        pair.back.clear();
                    }
                }
            }
            Step::Crash { i } => {
                self.importer_lives(i)?;
                self.importer(i)?.is_dead = true;
                for allocation in self.allocations.values_mut() {
                    if let Some(pair) = allocation.pairs.get_mut(&i) {
                        // D5: with the process go its mappings and its work; what it has said may still be heard.
                        (pair.is_imported, pair.is_kept, pair.is_retired) = (false, false, false);
                        pair.held.clear();
                        pair.there.clear();
                    }
                }
            }
            Step::CrashOwner => {
                self.owner_lives()?;
                self.owner_is_dead = true;
                for allocation in self.allocations.values_mut() {
                    for pair in allocation.pairs.values_mut() {
                        pair.back.clear();
                    }
                }
            }
            Step::StreamRuns { a } => self.stream_runs(a)?,
            Step::UseRuns { a, i, lease } => self.use_runs(rules, a, i, lease)?,
        }
        Ok(())
    }

    fn import(&mut self, rules: Rules, a: Id, i: Id, lease: Id) -> Result<(), Refused> {
        let importer = self.importer_lives(i)?;
        need(!importer.knows_owner_dead, "O10: what its owner took along is not imported")?;
        let pair = self.pair(a, i)?;
        let sent = pair.there.iter().copied().find(|message| is_parcel(message, lease));
        let Some(sent @ Message::Parcel { version, keep, .. }) = sent else {
            return Err("no such parcel");
        };
        pair.there.remove(&sent);
        let is_second = std::mem::replace(&mut pair.is_imported, true);
        pair.is_kept |= keep;
        pair.held.insert(lease, Held { version, is_held: true, pending: 0, used: 0 });
        if is_second && !rules.one_import {
            self.wrong.insert(Wrong::ImportedTwice);
        }
        Ok(())
    }

    fn release(&mut self, rules: Rules, a: Id, i: Id, lease: Id) -> Result<(), Refused> {
        let importer = self.importer_lives(i)?;
        let pair = self.pair(a, i)?;
        let held = pair.held.get_mut(&lease).ok_or("no such lease")?;
        need(std::mem::take(&mut held.is_held), "O1: a lease is let go once")?;
        let is_done = held.pending == 0;
        if rules.importer_frees && !pair.is_kept && !pair.is_held() && !importer.knows_owner_dead {
            // O6: what is not kept is freed before its last receipt, after all work on it.
            need(!pair.is_working(), "O6: after all work on it")?;
            pair.is_imported = false;
            pair.held.clear();
        } else if is_done {
            pair.held.remove(&lease);
        }
        if !importer.is_cut_off && !importer.knows_owner_dead {
            pair.back.insert(Message::Receipt { lease });
        }
        Ok(())
    }

    fn stream_runs(&mut self, a: Id) -> Result<(), Refused> {
        self.owner_lives()?;
        let allocation = self.allocation(a)?;
        match allocation.stream.pop_front().ok_or("nothing is to run")? {
            Work::Write => allocation.ran = allocation.ran.saturating_add(1),
            Work::Wait(i, lease) => {
                let held = allocation.pairs.get(&i).and_then(|pair| pair.held.get(&lease));
                let is_working = held.is_some_and(|held| held.pending > 0);
                need(!is_working, "O5: after what importers have enqueued")?;
            }
            Work::Free => {
                allocation.free = Free::Ran;
                if allocation.pairs.values().any(|pair| pair.is_imported) {
                    self.wrong.insert(Wrong::FreedUnderAnImport);
                }
            }
        }
        Ok(())
    }

    fn use_runs(&mut self, rules: Rules, a: Id, i: Id, lease: Id) -> Result<(), Refused> {
        self.importer_lives(i)?;
        let owner_is_dead = self.owner_is_dead;
        let allocation = self.allocation(a)?;
        let (ran, free) = (allocation.ran, allocation.free);
        let pair = allocation.pairs.get_mut(&i).ok_or("never lent to it")?;
        let held = pair.held.get_mut(&lease).ok_or("no such lease")?;
        need(held.pending > 0, "nothing is to run")?;
        if rules.ready_events && !owner_is_dead {
            need(ran >= held.version, "O4: after what its owner has enqueued")?;
        }
        held.pending -= 1;
        let version = held.version;
        if held.pending == 0 && !held.is_held {
            pair.held.remove(&lease);
        }
        // D6: of an owner that is dead nothing is promised, and nobody is to look at it.
        if owner_is_dead {
            return Ok(());
        }
        if free == Free::Ran {
            self.wrong.insert(Wrong::UseAfterFree);
        } else if ran != version {
            self.wrong.insert(Wrong::WrongBytes);
        }
        Ok(())
    }
}

fn is_parcel(message: &Message, of: Id) -> bool {
    matches!(message, Message::Parcel { lease, .. } if *lease == of)
}
