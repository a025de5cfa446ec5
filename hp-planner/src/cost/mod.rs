//! Time, memory and price of a configuration.

pub mod analytic;
pub mod collective;
pub mod compute;
pub mod constants;
pub mod memory;
pub mod schedule;
pub mod shapes;

use std::fmt::Debug;

use crate::cluster::ClusterSpec;
use crate::error::Infeasible;
use crate::model::ModelSpec;
use crate::plan::{Configuration, Estimate, Stage};
use crate::training::{Schedule, TrainingSpec};

/// What is to be planned; all three parts have been validated.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// Where it can run.
    pub cluster: &'a ClusterSpec,
    /// The model.
    pub model: &'a ModelSpec,
    /// The training.
    pub training: &'a TrainingSpec,
}

/// Predicts what a configuration takes. Implementations are pure: the same arguments give the same bits.
///
/// The search relies on this: memory per device does not grow when equal replicas are added, all else equal, and the price
/// is that of the GPUs of the allocation.
pub trait CostModel: Debug + Send + Sync {
    /// Time, memory and price of one iteration.
    ///
    /// # Errors
    /// The reason for which the configuration cannot run.
    fn estimate(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<Estimate, Infeasible>;

    /// Seconds that `stage` is busy with a round of `virtual_workers` micro-batches, both passes, under the degrees,
    /// micro-batch and recomputation of `configuration` (whose replicas and allocation may be empty).
    ///
    /// The time of an iteration must not be less than the rounds of any replica times this for its slowest stage, and the
    /// time of a stage not less than the sum over its layers taken one by one; the search excludes configurations by it
    /// and divides layers and micro-batches in its proportion. `None`, the default, says that the model cannot tell: the
    /// search is exhaustive then and divides evenly.
    fn round_seconds(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
        virtual_workers: u32,
    ) -> Option<f64> {
        let _ = (problem, configuration, stage, virtual_workers);
        None
    }

    /// Fraction of a round that an iteration takes at least for every stage but the busiest, besides the rounds of the
    /// busiest: pipelines fill and drain. 0, the default, is always right.
    fn fill(&self, schedule: Schedule, chunks: u32) -> f64 {
        let _ = (schedule, chunks);
        0.0
    }

    /// What the search asks about replicas of one shape before their number and share of the batch are known, or the reason
    /// for which none of them can run. `template` gives degrees (of which `dp` does not count), micro-batch,
    /// recomputation and, by what its allocation is not 0, the groups in use.
    ///
    /// `None`, the default, makes the search ask [`estimate`](Self::estimate) about each configuration that
    /// [`round_seconds`](Self::round_seconds) does not exclude: right, but slower.
    fn shape<'a>(
        &'a self,
        problem: &Problem<'a>,
        template: &Configuration,
        kinds: &[ReplicaKind<'_>],
    ) -> Option<Result<Box<dyn ShapeCost + 'a>, Infeasible>> {
        let _ = (problem, template, kinds);
        None
    }
}

/// A kind of replica: its stages, and the virtual workers that share each of its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaKind<'a> {
    /// Pipeline stages.
    pub stages: &'a [Stage],
    /// Virtual workers per GPU.
    pub virtual_workers: u32,
}

/// What is chosen for a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShapeChoice<'a> {
    /// Pipeline schedule.
    pub schedule: Schedule,
    /// `ZeRO` stage.
    pub zero: u8,
    /// Data-parallel replicas in all.
    pub dp: u32,
    /// For each group of equal replicas its kind and its rounds of micro-batches.
    pub rounds: &'a [(usize, u32)],
}

/// Time and memory of replicas of one shape; see [`CostModel::shape`].
///
/// The answers exclude configurations from the search, so they must be on the safe side; what they do not exclude is
/// [estimated](CostModel::estimate).
pub trait ShapeCost: Debug {
    /// Seconds of one round of a kind of replica on its busiest stage, and summed over its stages; both no more than
    /// [`CostModel::round_seconds`] says.
    fn round(&self, kind: usize) -> (f64, f64);

    /// Seconds that an iteration of `dp` replicas, some of each kind, takes at least besides the rounds and the idle time of
    /// its slowest replica, whatever the shares of the batch: reduction, update, fixed costs.
    fn after(&mut self, zero: u8, dp: u32) -> f64;

    /// Seconds that no configuration of this choice beats.
    fn seconds(&mut self, choice: &ShapeChoice<'_>) -> f64;

    /// `false` only if the memory of a device does not suffice: then fewer replicas or more rounds do not fit either.
    fn fits(&self, choice: &ShapeChoice<'_>) -> bool;
}
