//! How good predictions are on measurements that calibration has not seen.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::calibration::{Calibration, quantile};
use crate::profile::MeasuredRow;

/// Errors of one group of rows, as fractions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ErrorSummary {
    /// Rows compared.
    pub rows: usize,
    /// Mean absolute percentage error.
    pub mape: f64,
    /// Median of the absolute error.
    pub median: f64,
    /// 95th percentile of the absolute error.
    pub p95: f64,
}

/// Loss by trusting predictions: how much slower the configuration predicted to be fastest is than the fastest measured one, over
/// groups of equal model, GPU count and global batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Regret {
    /// Groups of two or more configurations.
    pub groups: usize,
    /// Mean over groups.
    pub mean: f64,
    /// Greatest.
    pub max: f64,
}

/// Result of comparing predictions with measurements.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Time errors by source.
    pub time: BTreeMap<String, ErrorSummary>,
    /// Time errors of the rows that a layer profile predicts, by source; they are part of `time` as well.
    pub profiled: BTreeMap<String, ErrorSummary>,
    /// Memory errors by source.
    pub memory: BTreeMap<String, ErrorSummary>,
    /// Regret by source.
    pub regret: BTreeMap<String, Regret>,
    /// Fraction of measured times inside the 90 % interval.
    pub coverage: f64,
    /// Rows without a prediction, by reason.
    pub skipped: BTreeMap<String, usize>,
}

/// Collects comparisons over one or more splits.
#[derive(Debug, Clone, Default)]
pub struct Evaluator {
    time: BTreeMap<String, Vec<f64>>,
    profiled: BTreeMap<String, Vec<f64>>,
    memory: BTreeMap<String, Vec<f64>>,
    regret: BTreeMap<String, Vec<f64>>,
    inside: (usize, usize),
    skipped: BTreeMap<String, usize>,
}

impl Evaluator {
    /// An evaluator without comparisons.
    pub fn new() -> Self {
        Self::default()
    }

    /// Compares predictions for `rows` with what was measured.
    pub fn add(&mut self, calibration: &Calibration, rows: &[&MeasuredRow]) {
        let mut choices: BTreeMap<(String, String), Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows {
            let prediction = calibration.predict(row);
            let source = label(row);
            if let Some(measured) = row.iteration_time() {
                if let (Some(seconds), Some((low, high))) =
                    (prediction.iteration_time, prediction.interval)
                {
                    let error = (seconds / measured - 1.0).abs();
                    self.time.entry(source.clone()).or_default().push(error);
                    if prediction.profiled {
                        self.profiled.entry(source.clone()).or_default().push(error);
                    }
                    self.inside.0 += usize::from((low..=high).contains(&measured));
                    self.inside.1 += 1;
                    choices
                        .entry((source.clone(), group(row)))
                        .or_default()
                        .push((seconds, measured));
                } else {
                    let reason = prediction
                        .reason
                        .as_ref()
                        .map_or_else(|| "unknown".to_owned(), ToString::to_string);
                    *self.skipped.entry(reason).or_default() += 1;
                }
            }
            if let (Some(measured), Some(gib)) = (row.memory_gib(), prediction.memory_gib) {
                self.memory
                    .entry(source)
                    .or_default()
                    .push((gib / measured - 1.0).abs());
            }
        }
        for ((source, _), rows) in choices {
            let least = |of: fn(&(f64, f64)) -> f64| {
                rows.iter()
                    .min_by(|a, b| of(a).total_cmp(&of(b)))
                    .map(|row| row.1)
            };
            if let (true, Some(picked), Some(best)) =
                (rows.len() > 1, least(|row| row.0), least(|row| row.1))
            {
                self.regret
                    .entry(source)
                    .or_default()
                    .push(picked / best - 1.0);
            }
        }
    }

    /// The summary over all comparisons.
    pub fn finish(&self) -> Evaluation {
        let summaries = |groups: &BTreeMap<String, Vec<f64>>| {
            groups
                .iter()
                .map(|(source, errors)| (source.clone(), summary(errors)))
                .collect()
        };
        Evaluation {
            time: summaries(&self.time),
            profiled: summaries(&self.profiled),
            memory: summaries(&self.memory),
            regret: self
                .regret
                .iter()
                .map(|(source, values)| {
                    let regret = Regret {
                        groups: values.len(),
                        mean: values.iter().sum::<f64>() / values.len() as f64,
                        max: values.iter().copied().fold(0.0, f64::max),
                    };
                    (source.clone(), regret)
                })
                .collect(),
            coverage: self.inside.0 as f64 / (self.inside.1.max(1)) as f64,
            skipped: self.skipped.clone(),
        }
    }
}

/// Source of a row, and whether it ran in one node or in several: these differ in what they test.
fn label(row: &MeasuredRow) -> String {
    let gpus = row.number("gpus").unwrap_or(0.0);
    let node = row.number("gpus_per_node").unwrap_or(8.0);
    let nodes = if gpus > node {
        "several nodes"
    } else {
        "one node"
    };
    format!("{} [{nodes}]", row.source())
}

/// Rows among which a planner chooses: equal model, cluster and batch.
fn group(row: &MeasuredRow) -> String {
    [
        "model",
        "layers",
        "hidden",
        "heads",
        "seq",
        "gpu",
        "gpus",
        "gbs",
        "precision",
    ]
    .iter()
    .map(|column| row.text(column).unwrap_or_default())
    .collect::<Vec<_>>()
    .join("|")
}

fn summary(errors: &[f64]) -> ErrorSummary {
    let mut sorted = errors.to_vec();
    sorted.sort_by(f64::total_cmp);
    ErrorSummary {
        rows: sorted.len(),
        mape: sorted.iter().sum::<f64>() / sorted.len().max(1) as f64,
        median: quantile(&sorted, 0.5),
        p95: quantile(&sorted, 0.95),
    }
}

/// A deterministic random split of `count` items: whether each belongs to the training part.
///
/// The generator is `SplitMix64` (Steele et al. 2014); the part has `round(fraction * count)` items.
pub fn split(count: usize, fraction: f64, seed: u64) -> Vec<bool> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let mut order: Vec<usize> = (0..count).collect();
    for index in (1..count).rev() {
        order.swap(index, (next() % (index as u64 + 1)) as usize);
    }
    let mut inside = vec![false; count];
    let part = (fraction.clamp(0.0, 1.0) * count as f64).round() as usize;
    for &index in &order[..part] {
        inside[index] = true;
    }
    inside
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .time
            .keys()
            .chain(self.memory.keys())
            .map(String::len)
            .max()
            .unwrap_or(0);
        for (title, table) in [
            ("time", &self.time),
            ("time, of it by layer profile", &self.profiled),
            ("memory", &self.memory),
        ] {
            writeln!(
                f,
                "{title:<width$}  {:>6} {:>8} {:>8} {:>8}",
                "rows", "MAPE", "median", "p95"
            )?;
            for (source, s) in table {
                writeln!(
                    f,
                    "{source:<width$}  {:>6} {:>7.2}% {:>7.2}% {:>7.2}%",
                    s.rows,
                    100.0 * s.mape,
                    100.0 * s.median,
                    100.0 * s.p95
                )?;
            }
        }
        writeln!(
            f,
            "{:<width$}  {:>6} {:>8} {:>8}",
            "regret of the choice", "groups", "mean", "max"
        )?;
        for (source, r) in &self.regret {
            writeln!(
                f,
                "{source:<width$}  {:>6} {:>7.2}% {:>7.2}%",
                r.groups,
                100.0 * r.mean,
                100.0 * r.max
            )?;
        }
        writeln!(f, "inside the 90 % interval: {:.1}%", 100.0 * self.coverage)?;
        for (reason, count) in &self.skipped {
            writeln!(f, "{count} rows without prediction: {reason}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_exact_and_depend_on_the_seed() {
        let first = split(101, 0.5, 0);
        assert_eq!(first.iter().filter(|&&inside| inside).count(), 51);
        assert_eq!(first, split(101, 0.5, 0));
        assert_ne!(first, split(101, 0.5, 1));
    }

    #[test]
    fn summary_by_hand() {
        let s = summary(&[0.1, 0.3, 0.2]);
        assert!((s.mape - 0.2).abs() < 1e-12 && (s.median - 0.2).abs() < 1e-12);
    }
}
