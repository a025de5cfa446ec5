//! What a run leaves behind: one record per step, per validation and per decision, all serialisable.

use serde::{Deserialize, Serialize};

/// One optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Steps done, this one included.
    pub step: u64,
    /// Samples seen, this step's included.
    pub samples: u64,
    /// Mean training loss over the global batch, before the update.
    pub loss: f64,
    /// Global batch size of this step in samples.
    pub batch: usize,
    /// Learning rate of this step's update.
    pub learning_rate: f64,
    /// Smoothed mean pairwise similarity of the micro-batch gradients; `None` before the first estimate.
    pub similarity: Option<f64>,
    /// Smoothed gradient noise scale in samples; `None` before the first estimate.
    pub noise_scale: Option<f64>,
    /// Wall-clock seconds of this step on this machine.
    pub wall_seconds: f64,
    /// Seconds that the planner's model gives this step on the simulated cluster, if there is one.
    pub simulated_seconds: Option<f64>,
    /// Money for this step on the simulated cluster, in the currency of its prices.
    pub simulated_cost: Option<f64>,
}

/// A validation pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidationRecord {
    /// Steps done before the pass.
    pub step: u64,
    /// Training samples seen before the pass.
    pub samples: u64,
    /// Mean loss over the validation samples.
    pub loss: f64,
}

/// A batch-size decision with what it was taken on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionRecord {
    /// Steps done when the decision was taken.
    pub step: u64,
    /// Samples seen when the decision was taken.
    pub samples: u64,
    /// Global batch size before.
    pub from_batch: usize,
    /// Global batch size from the next step on.
    pub to_batch: usize,
    /// Learning rate from the next step on.
    pub learning_rate: f64,
    /// Similarity that the controller saw.
    pub similarity: f64,
    /// Noise scale that the controller saw, in samples.
    pub noise_scale: f64,
    /// Micro-batches per step of each rank from the next step on.
    pub micro_batches: Vec<usize>,
    /// The controller's reason, one line.
    pub reason: String,
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Termination {
    /// All samples were consumed.
    Completed,
    /// The step limit was reached first.
    StepLimit,
    /// The stop flag was raised (Ctrl-C, for one).
    Interrupted,
}

/// The Pareto front of a plan over *simulated* time and cost, with the choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FrontView {
    /// (seconds per step, cost per step, layout), by rising time.
    pub points: Vec<(f64, f64, String)>,
    /// Index of the chosen point.
    pub chosen: usize,
}

/// Everything recorded of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingReport {
    /// The run's name, as given to the builder.
    pub name: String,
    /// Why the run ended.
    pub termination: Termination,
    /// One line per rank.
    pub devices: Vec<String>,
    /// The Pareto front that the allocation was chosen from; `None` without a simulated cluster.
    pub front: Option<FrontView>,
    /// All steps in order.
    pub steps: Vec<StepRecord>,
    /// All validation passes in order; the last one follows the last step.
    pub validations: Vec<ValidationRecord>,
    /// All decisions in order, those that kept the batch included.
    pub decisions: Vec<DecisionRecord>,
}

impl TrainingReport {
    /// Samples consumed.
    pub fn samples(&self) -> u64 {
        self.steps.last().map_or(0, |s| s.samples)
    }

    /// Wall-clock seconds of all steps, validation not included.
    pub fn wall_seconds(&self) -> f64 {
        self.steps.iter().fold(0.0, |sum, s| sum + s.wall_seconds)
    }

    /// *Simulated* seconds of all steps; `None` without a simulated cluster or a step.
    pub fn simulated_seconds(&self) -> Option<f64> {
        self.steps.last()?;
        self.steps.iter().map(|s| s.simulated_seconds).sum()
    }

    /// *Simulated* cost of all steps; `None` without a simulated cluster or a step.
    pub fn simulated_cost(&self) -> Option<f64> {
        self.steps.last()?;
        self.steps.iter().map(|s| s.simulated_cost).sum()
    }

    /// The loss of the last validation pass.
    pub fn validation_loss(&self) -> Option<f64> {
        self.validations.last().map(|v| v.loss)
    }
}
