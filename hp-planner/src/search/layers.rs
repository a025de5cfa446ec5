//! Times of the model's layers on each node group, and how they are dealt out to pipeline stages.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::partition;
use super::space::{Family, Shape};
use crate::cost::{CostModel, Problem};
use crate::plan::{Allocation, Configuration, ParallelDims, Stage};
use crate::training::{Recompute, Schedule};

/// What the times of layers depend on.
type Key = (usize, u32, u32, u32, u32, Recompute);

/// Cumulated seconds of the first layers on one group, remembered: many shapes share them.
#[derive(Debug)]
pub(super) struct LayerTimes<'a> {
    problem: Problem<'a>,
    cost: &'a dyn CostModel,
    /// Whether the cost model can tell how long stages take; without, nothing is excluded.
    pub(super) bounded: bool,
    known: Mutex<BTreeMap<Key, Arc<[f64]>>>,
}

impl<'a> LayerTimes<'a> {
    pub(super) fn new(problem: &Problem<'a>, cost: &'a dyn CostModel) -> Self {
        let probe = Shape {
            family: Family::Within(vec![0]),
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            micro_batch: 1,
            recompute: problem.training.recompute[0],
        };
        let stage = Stage {
            group: 0,
            first_layer: 0,
            layers: 1,
            tp: 1,
        };
        let template = template(problem, &probe, 1);
        Self {
            problem: *problem,
            cost,
            bounded: cost.round_seconds(problem, &template, &stage, 1).is_some(),
            known: Mutex::new(BTreeMap::new()),
        }
    }

    /// Seconds of one micro-batch in the first l layers of the model on `group`, for all l.
    pub(super) fn prefix(&self, shape: &Shape, group: usize) -> Arc<[f64]> {
        let key = (
            group,
            shape.tp,
            shape.cp,
            shape.ep,
            shape.micro_batch,
            shape.recompute,
        );
        if let Ok(known) = self.known.lock()
            && let Some(prefix) = known.get(&key)
        {
            return prefix.clone();
        }
        let template = template(&self.problem, shape, 1);
        let mut sum = 0.0;
        let mut prefix = vec![0.0];
        for layer in 0..self.problem.model.depth() {
            let stage = Stage {
                group,
                first_layer: layer,
                layers: 1,
                tp: shape.tp,
            };
            // A model that cannot tell counts each layer as one.
            sum += self
                .cost
                .round_seconds(&self.problem, &template, &stage, 1)
                .unwrap_or(1.0);
            prefix.push(sum);
        }
        let prefix: Arc<[f64]> = prefix.into();
        if let Ok(mut known) = self.known.lock() {
            known.insert(key, prefix.clone());
        }
        prefix
    }

    /// Seconds per micro-batch in the whole model on `group`, without a pipeline at the number of virtual workers that
    /// serves it best.
    pub(super) fn whole(&self, shape: &Shape, group: usize) -> f64 {
        let prefix = self.prefix(shape, group);
        let alone = prefix[prefix.len() - 1];
        if shape.pp > 1 {
            return alone;
        }
        let template = template(&self.problem, shape, 1);
        let stage = Stage {
            group,
            first_layer: 0,
            layers: prefix.len() as u32 - 1,
            tp: shape.tp,
        };
        (1..=self.problem.training.max_virtual_workers)
            .filter_map(|streams| {
                let seconds = self
                    .cost
                    .round_seconds(&self.problem, &template, &stage, streams)?;
                Some(seconds / f64::from(streams))
            })
            .fold(alone, f64::min)
    }

    /// The stages of each kind of replica, with `chunks` chunks each: one kind per group that holds whole replicas, or the
    /// one across groups; `None` if there are too few layers.
    pub(super) fn layouts(&self, shape: &Shape, chunks: u32) -> Option<Vec<Vec<Stage>>> {
        match &shape.family {
            Family::Within(groups) => groups
                .iter()
                .map(|&group| self.layout(shape, &[(group, shape.pp)], chunks))
                .collect(),
            Family::Across(stages) => Some(vec![self.layout(shape, stages, chunks)?]),
        }
    }

    /// Stages of one replica on the groups in order, so many in each.
    fn layout(&self, shape: &Shape, groups: &[(usize, u32)], chunks: u32) -> Option<Vec<Stage>> {
        // With several chunks per stage, layers are dealt out in bundles of as many.
        let bundles: Vec<Vec<f64>> = groups
            .iter()
            .map(|&(group, _)| {
                let prefix = self.prefix(shape, group);
                prefix.iter().copied().step_by(chunks as usize).collect()
            })
            .collect();
        let rows: Vec<(usize, &[f64])> = groups
            .iter()
            .zip(&bundles)
            .flat_map(|(&(group, n), row)| std::iter::repeat_n((group, row.as_slice()), n as usize))
            .collect();
        let prefix: Vec<&[f64]> = rows.iter().map(|row| row.1).collect();
        let counts = partition::bottleneck(&prefix)?;
        let mut first_layer = 0;
        let stage = |(&(group, _), count): (&(usize, &[f64]), u32)| {
            let layers = count * chunks;
            let stage = Stage {
                group,
                first_layer,
                layers,
                tp: shape.tp,
            };
            first_layer += layers;
            stage
        };
        Some(rows.iter().zip(counts).map(stage).collect())
    }
}

/// A configuration of the shape without replicas.
pub(super) fn template(problem: &Problem<'_>, shape: &Shape, chunks: u32) -> Configuration {
    Configuration {
        dims: ParallelDims {
            dp: 1,
            tp: shape.tp,
            pp: shape.pp,
            vpp: chunks,
            cp: shape.cp,
            ep: shape.ep,
        },
        allocation: Allocation { gpus: Vec::new() },
        replicas: Vec::new(),
        micro_batch: shape.micro_batch,
        schedule: Schedule::OneFOneB,
        recompute: shape.recompute,
        zero: 0,
        sequence_parallel: problem.training.sequence_parallel && shape.tp > 1,
    }
}
