//! What `tier-pool-ipc` says that it did, held to the rules.
//!
//! A line is a step, in the order of both processes: `STEP OWNER IMPORTER ALLOCATION LEASE MORE`. What the device did
//! nobody sees; it is taken to have run as soon as it could, which is one of the ways in which it may.

use std::collections::BTreeMap;

use crate::state::{Id, Message, Rules, State, Step};

/// One line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub step: String,
    pub owner: String,
    pub importer: String,
    pub a: Id,
    pub lease: Id,
    pub more: bool,
}

impl Line {
    /// Reads one.
    pub fn read(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [step, owner, importer, a, lease, more] = words[..] else { return None };
        let (step, owner, importer) = (step.into(), owner.into(), importer.into());
        let (a, lease) = (a.parse().ok()?, lease.parse().ok()?);
        Some(Self { step, owner, importer, a, lease, more: more == "true" })
    }
}

/// What was seen of one owner and those who import from it.
#[derive(Debug, Default)]
struct Owner {
    state: State,
    importers: BTreeMap<String, Id>,
}

impl Owner {
    fn importer(&mut self, name: &str) -> Id {
        let next = self.importers.len() as Id;
        let id = *self.importers.entry(name.to_owned()).or_insert(next);
        self.state.importers.entry(id).or_default();
        id
    }

    fn take(&mut self, step: Step) -> Result<(), String> {
        let refused = |clause| format!("{step:?}: {clause}");
        self.state = self.state.apply(Rules::CONTRACT, step).map_err(refused)?;
        // The device, as soon as it can.
        loop {
            let next = self
                .of_the_device()
                .into_iter()
                .find_map(|step| self.state.apply(Rules::CONTRACT, step).ok());
            match next {
                Some(next) => self.state = next,
                None => break,
            }
        }
        match self.state.wrong.first() {
            Some(wrong) => Err(format!("{step:?}: {wrong:?}")),
            None => Ok(()),
        }
    }

    fn of_the_device(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (&a, allocation) in &self.state.allocations {
            if !allocation.stream.is_empty() {
                steps.push(Step::StreamRuns { a });
            }
            for (&i, pair) in &allocation.pairs {
                let pending = pair.held.iter().filter(|(_, held)| held.pending > 0);
                steps.extend(pending.map(|(&lease, _)| Step::UseRuns { a, i, lease }));
            }
        }
        steps
    }

    fn line(&mut self, line: &Line) -> Result<(), String> {
        let &Line { a, lease, more, .. } = line;
        let i = self.importer(&line.importer);
        if line.step == "export" && !self.state.allocations.contains_key(&a) {
            self.take(Step::Allocate { a })?;
        }
        let is_let_go = self.state.allocations.get(&a).is_some_and(|one| one.is_let_go);
        let dead = self.state.importers.get(&i).is_some_and(|importer| importer.is_dead);
        match line.step.as_str() {
            "export" => self.take(Step::Export { a, i, lease, keep: more }),
            "lose" => self.take(Step::Lose { a, i, lease }),
            "import" => self.take(Step::Import { a, i, lease }),
            "use" => self.take(Step::Use { a, i, lease }),
            "release" => self.take(Step::Release { a, i, lease }),
            "home" => {
                // What could not be taken goes home at once, and nobody says so.
                let pair = self.state.allocations.get(&a).and_then(|one| one.pairs.get(&i));
                let is_said =
                    pair.is_some_and(|pair| pair.back.contains(&Message::Receipt { lease }));
                if !is_said && !dead {
                    self.take(Step::Refuse { a, i, lease })?;
                }
                self.take(Step::Home { a, i, lease })
            }
            // Each of its sessions says so.
            "let-go" if is_let_go => Ok(()),
            "let-go" => self.take(Step::LetGo { a }),
            "retire" => self.take(Step::Retire { a, i }),
            "free-import" => self.take(Step::FreeImport { a, i }),
            "hear-freed" => self.take(Step::HearFreed { a, i }),
            // Lent to nobody who lived.
            "free" if !self.state.allocations.contains_key(&a) => Ok(()),
            "free" => {
                if !is_let_go {
                    self.take(Step::LetGo { a })?;
                }
                self.take(Step::Free { a })
            }
            "know-dead" => {
                if !dead {
                    self.take(Step::Crash { i })?;
                }
                self.take(Step::KnowDead { i })
            }
            "know-owner-dead" => {
                if !self.state.owner_is_dead {
                    self.take(Step::CrashOwner)?;
                }
                self.take(Step::KnowOwnerDead { i })
            }
            other => Err(format!("{other}: no such step")),
        }
    }
}

/// How much of what was seen.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Seen {
    /// By the name of the step.
    pub steps: BTreeMap<String, usize>,
}

/// Holds a log of several processes to the rules.
///
/// # Errors
///
/// The line that they do not allow, and why.
pub fn accept(log: &str) -> Result<Seen, String> {
    let mut owners: BTreeMap<String, Owner> = BTreeMap::new();
    let mut seen = Seen::default();
    for (number, text) in log.lines().enumerate() {
        let line = Line::read(text).ok_or_else(|| format!("line {number}: {text}"))?;
        let owner = owners.entry(line.owner.clone()).or_default();
        owner.line(&line).map_err(|why| format!("line {number}, {text}: {why}"))?;
        *seen.steps.entry(line.step).or_default() += 1;
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::accept;

    const GOOD: &[&str] = &[
        "export o i 7 1 true",
        "import o i 7 1 true",
        "use o i 7 1 false",
        "release o i 7 1 true",
        "home o i 7 1 true",
        "let-go o i 7 0 false",
        "retire o i 7 0 false",
        "free-import o i 7 0 false",
        "hear-freed o i 7 0 false",
        "free o - 7 0 false",
    ];

    #[test]
    fn what_goes_by_the_contract_is_accepted() {
        let seen = accept(&GOOD.join("\n")).expect("by the contract");
        assert_eq!(seen.steps.len(), GOOD.len());
    }

    #[test]
    fn what_is_left_out_or_put_elsewhere_is_not() {
        for at in [0, 1, 3, 4, 6, 7, 8] {
            let mut lines = GOOD.to_vec();
            let out = lines.remove(at);
            let why = accept(&lines.join("\n")).expect_err(out);
            assert!(why.starts_with("line"), "{out}: {why}");
        }
        for at in 0..GOOD.len() - 1 {
            let mut lines = GOOD.to_vec();
            lines.swap(at, at + 1);
            assert!(accept(&lines.join("\n")).is_err(), "{} after {}", GOOD[at], GOOD[at + 1]);
        }
    }
}
