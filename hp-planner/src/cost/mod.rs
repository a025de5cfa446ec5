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
use crate::plan::{Configuration, Estimate};
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
}
