//! What a step gives back.

use std::time::Duration;

use serde::Serialize;

use crate::Coordinates;
use crate::pipeline::TaskTiming;

/// Result of [`HybridExecutor::step`](super::HybridExecutor::step).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HybridOutput {
    /// Number of the step, from zero.
    pub step: u64,
    /// Mean loss over the samples of the global batch, before the update.
    pub loss: f64,
    /// Samples in the global batch.
    pub samples: usize,
    /// Mean loss of each micro-batch, in the order of the global batch.
    pub micro_batch_losses: Vec<f64>,
    /// L2 norm of the global batch's gradient over the whole model, before clipping.
    pub gradient_norm: f64,
    /// Whether the gradient was scaled down to the clip norm.
    pub clipped: bool,
    /// From the call to its return.
    pub total: Duration,
    /// One entry per rank of this process, by rank.
    pub ranks: Vec<HybridTimings>,
}

impl HybridOutput {
    /// The part of the time from the first task to the last one in which ranks of this process wait for messages: 0 with one stage that never waits.
    pub fn bubble(&self) -> f64 {
        let (mut busy, mut whole) = (0.0, 0.0);
        let longest = self
            .ranks
            .iter()
            .map(|rank| rank.compute)
            .max()
            .unwrap_or_default();
        for tasks in self.ranks.iter().flat_map(|rank| &rank.tasks) {
            busy += tasks
                .iter()
                .map(|timing| timing.duration.as_secs_f64())
                .sum::<f64>();
            whole += longest.as_secs_f64();
        }
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }

    /// Bytes that the ranks of this process sent in the step.
    pub fn bytes_sent(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.bytes_sent).sum()
    }
}

/// Where one rank's time went in a step, and what it sent.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct HybridTimings {
    /// The rank.
    pub rank: usize,
    /// Its place in the mesh.
    pub coordinates: Coordinates,
    /// The tasks of each virtual worker, in the order of the schedule.
    pub tasks: Vec<Vec<TaskTiming>>,
    /// From the start of the step until the last task was done and its gradient accumulated.
    pub compute: Duration,
    /// In the reductions after it.
    pub communicate: Duration,
    /// In the optimizer.
    pub update: Duration,
    /// Bytes that the rank sent, counted as by an algorithm that moves the least.
    pub bytes_sent: u64,
}
