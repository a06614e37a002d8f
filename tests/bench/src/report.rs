//! Samples, medians, ratios.

use std::collections::HashMap;

/// One case of one size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) peer: String,
    pub(crate) case: String,
    pub(crate) bytes: usize,
}

pub(crate) fn key(peer: &str, case: &str, bytes: usize) -> Key {
    Key { peer: peer.into(), case: case.into(), bytes }
}

#[derive(Debug, Default)]
struct Samples {
    /// Of each round, in microseconds.
    rounds: Vec<Vec<f64>>,
    copies: u32,
    error: Option<String>,
}

#[derive(Debug)]
struct Ratio {
    name: String,
    value: f64,
    /// The quartiles over the rounds.
    spread: (f64, f64),
    /// The baseline against itself.
    null: (f64, f64),
    target: f64,
}

pub(crate) struct Report {
    pub(crate) rounds: usize,
    order: Vec<Key>,
    samples: HashMap<Key, Samples>,
    ratios: Vec<Ratio>,
    facts: Vec<(String, String)>,
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = at * last as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

impl Report {
    pub(crate) fn new(rounds: usize) -> Self {
        Self {
            rounds,
            order: Vec::new(),
            samples: HashMap::new(),
            ratios: Vec::new(),
            facts: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, key: &Key, copies: u32, outcome: Result<Vec<f64>, String>) {
        if !self.samples.contains_key(key) {
            self.order.push(key.clone());
        }
        let samples = self.samples.entry(key.clone()).or_default();
        samples.copies = copies;
        match outcome {
            Ok(some) => samples.rounds.push(some),
            Err(error) => samples.error = Some(error),
        }
    }

    pub(crate) fn fact(&mut self, name: &str, value: String) {
        self.facts.push((name.into(), value));
    }

    fn medians(&self, key: &Key) -> Vec<f64> {
        let samples = self.samples.get(key);
        samples.map_or(Vec::new(), |s| s.rounds.iter().map(|round| median(round)).collect())
    }

    /// The median over the rounds of one case's median over another's.
    pub(crate) fn ratio(&mut self, name: &str, of: &Key, to: &Key, target: f64) {
        let (of, to_medians) = (self.medians(of), self.medians(to));
        if of.is_empty() || to_medians.is_empty() {
            return;
        }
        let ratios: Vec<f64> = of.iter().zip(&to_medians).map(|(a, b)| a / b).collect();
        // Neighbouring rounds of the baseline: what the machine's unrest alone makes of a ratio of 1.
        let null: Vec<f64> = to_medians.windows(2).map(|pair| pair[0] / pair[1]).collect();
        self.ratios.push(Ratio {
            name: name.into(),
            value: median(&ratios),
            spread: (quantile(&ratios, 0.25), quantile(&ratios, 0.75)),
            null: (quantile(&null, 0.25), quantile(&null, 0.75)),
            target,
        });
    }

    pub(crate) fn print_json(&self) {
        for key in &self.order {
            let samples = &self.samples[key];
            let head = serde_json::json!({"peer": key.peer, "case": key.case, "bytes": key.bytes});
            let mut line = head;
            if let Some(error) = &samples.error {
                line["error"] = error.as_str().into();
            } else {
                let all: Vec<f64> = samples.rounds.concat();
                let middle = median(&all);
                line["n"] = all.len().into();
                line["min_us"] = quantile(&all, 0.0).into();
                line["median_us"] = middle.into();
                line["p90_us"] = quantile(&all, 0.9).into();
                line["max_us"] = quantile(&all, 1.0).into();
                let large = key.bytes >= 1 << 20;
                line["gbps"] = if large { key.bytes as f64 / middle / 1e3 } else { 0.0 }.into();
                line["copies"] = samples.copies.into();
            }
            println!("{line}");
        }
        for ratio in &self.ratios {
            let line = serde_json::json!({
                "ratio": ratio.name, "value": ratio.value, "target": ratio.target,
                "holds": ratio.value <= ratio.target,
                "quartiles": [ratio.spread.0, ratio.spread.1], "null": [ratio.null.0, ratio.null.1],
            });
            println!("{line}");
        }
        for (name, value) in &self.facts {
            println!("{}", serde_json::json!({"fact": name, "value": value}));
        }
    }

    pub(crate) fn print_table(&self) {
        println!("| peer | case | bytes | n | min µs | median µs | p90 µs | copies |");
        println!("|---|---|---:|---:|---:|---:|---:|---:|");
        for key in &self.order {
            let samples = &self.samples[key];
            let (peer, case, bytes) = (&key.peer, &key.case, key.bytes);
            if let Some(error) = &samples.error {
                println!("| {peer} | {case} | {bytes} | failed: {error} |||||");
                continue;
            }
            let all: Vec<f64> = samples.rounds.concat();
            let at = |place| quantile(&all, place);
            println!(
                "| {peer} | {case} | {bytes} | {} | {:.1} | {:.1} | {:.1} | {} |",
                all.len(),
                at(0.0),
                at(0.5),
                at(0.9),
                samples.copies
            );
        }
        println!("\n| ratio | value | quartiles | null | at most | holds |");
        println!("|---|---:|---:|---:|---:|---|");
        for Ratio { name, value, spread, null, target } in &self.ratios {
            let (target, holds) = match (target.is_finite(), value <= target) {
                (false, _) => ("–".to_owned(), "–"),
                (true, true) => (target.to_string(), "yes"),
                (true, false) => (target.to_string(), "no"),
            };
            println!(
                "| {name} | {value:.3} | {:.3}–{:.3} | {:.3}–{:.3} | {target} | {holds} |",
                spread.0, spread.1, null.0, null.1
            );
        }
        println!();
        for (name, value) in &self.facts {
            println!("- {name}: {value}");
        }
    }
}
