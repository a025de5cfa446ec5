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
use crate::training::TrainingSpec;

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
}
