//! What one step has measured, and the statistics that follow from it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::config::{MeterConfig, Weighting};
use super::previous::Previous;
use crate::error::{Error, Result};
use crate::stats::{HalfSums, MicroBatchStats, PreviousSums};

/// What one step has measured so far.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) micro_batches: BTreeMap<u64, Measurement>,
    pub(super) sums: Vec<ShardSum>,
}

#[derive(Debug)]
pub(super) struct Measurement {
    pub(super) samples: u64,
    /// |g|^2 of each shard as it was passed. Kept apart until the end and added in the order of the shards, so that the
    /// result does not depend on the order in which they came.
    pub(super) norms: Vec<Option<f64>>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct ShardSum {
    /// Parts of the shard that were measured, with their squared norms, in the order of their start.
    pub(super) parts: Vec<(Range<usize>, f64)>,
    pub(super) elements: u64,
    /// Whether the whole shard was passed, of which this rank took its share.
    pub(super) whole: bool,
    pub(super) halves: HalfSums,
    pub(super) previous_norm_sq: f64,
    pub(super) previous_dot: f64,
}

impl Step {
    pub(super) fn new(shards: usize) -> Self {
        Self {
            micro_batches: BTreeMap::new(),
            sums: vec![ShardSum::default(); shards],
        }
    }

    /// This rank's statistics, if all that the step needs was measured; `counted` elements of the shards are the rank's.
    pub(super) fn stats(
        &self,
        config: &MeterConfig,
        counted: u64,
        previous: Option<&Previous>,
    ) -> Result<MicroBatchStats> {
        if self.micro_batches.is_empty() {
            return Err(Error::NoMicroBatch);
        }
        let mut samples = 0u64;
        let (mut s1, mut weight, mut weight_sq_per_sample) = (0.0, 0.0, 0.0);
        for (&index, measurement) in &self.micro_batches {
            let mut norm_sq = 0.0;
            for (norm, shard) in measurement.norms.iter().zip(&config.shards) {
                norm_sq += norm.ok_or_else(|| Error::MissingShard {
                    shard: shard.name().to_owned(),
                    micro_batch: index,
                })?;
            }
            let b = measurement.samples as f64;
            // Norms are of what was passed: the mean gradient, or b times it.
            s1 += if config.weighting == Weighting::Sum {
                norm_sq / b
            } else {
                norm_sq * b
            };
            let w = config.weighting.weight(measurement.samples);
            weight += w;
            weight_sq_per_sample += w * w / b;
            samples = samples
                .checked_add(measurement.samples)
                .ok_or(Error::Overflow {
                    what: "number of samples",
                })?;
        }
        if let Weighting::Fraction { batch } = config.weighting
            && (samples > batch || (config.placement.replicas() == 1 && samples < batch))
        {
            return Err(Error::BatchTotal {
                expected: batch,
                got: samples,
            });
        }
        let sums = &self.sums;
        if sums.iter().any(|sum| sum.whole) {
            for (sum, shard) in sums.iter().zip(&config.shards) {
                if !sum.whole && sum.parts.is_empty() && !shard.is_empty() {
                    return Err(Error::MissingSum {
                        shard: shard.name().to_owned(),
                    });
                }
            }
        }
        let micro_batches = self.micro_batches.len() as u64;
        let measured = counted.checked_mul(micro_batches).ok_or(Error::Overflow {
            what: "number of measured elements",
        })?;
        let scale_sq = config.loss_scale * config.loss_scale;
        let leads = config.placement.leads_replica();
        let if_leads = |x: f64| if leads { x } else { 0.0 };
        let count_if_leads = |x: u64| if leads { x } else { 0 };
        let summed = sums.iter().map(|s| s.elements).sum();
        Ok(MicroBatchStats {
            micro_batches: count_if_leads(micro_batches),
            samples: count_if_leads(samples),
            replicas: count_if_leads(1),
            parameters: counted,
            measured,
            summed,
            weight: if_leads(weight),
            weight_sq_per_sample: if_leads(weight_sq_per_sample),
            s1: s1 / scale_sq,
            s2: sums
                .iter()
                .flat_map(|s| &s.parts)
                .map(|(_, norm_sq)| norm_sq)
                .sum::<f64>()
                / scale_sq,
            halves: HalfSums {
                elements: sums.iter().map(|s| s.halves.elements).sum(),
                first_sq: sums.iter().map(|s| s.halves.first_sq).sum::<f64>() / scale_sq,
                second_sq: sums.iter().map(|s| s.halves.second_sq).sum::<f64>() / scale_sq,
                dot: sums.iter().map(|s| s.halves.dot).sum::<f64>() / scale_sq,
            },
            previous: match previous {
                Some(previous) if previous.valid => PreviousSums {
                    elements: summed,
                    samples: count_if_leads(previous.samples),
                    weight: if_leads(previous.weight),
                    norm_sq: sums.iter().map(|s| s.previous_norm_sq).sum(),
                    dot: sums.iter().map(|s| s.previous_dot).sum(),
                },
                _ => PreviousSums::default(),
            },
        })
    }
}
