//! What a step gives back.

use std::time::Duration;

use serde::Serialize;

/// Result of [`Executor::step`](super::Executor::step).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StepOutput {
    /// Number of the step, from zero.
    pub step: u64,
    /// Mean loss over the samples of the global batch, before the update.
    pub loss: f64,
    /// Samples in the global batch.
    pub samples: usize,
    /// Mean loss of each micro-batch, in the order of the global batch.
    pub micro_batch_losses: Vec<f64>,
    /// L2 norm of the global batch's gradient, before clipping.
    pub gradient_norm: f64,
    /// Whether the gradient was scaled down to the clip norm.
    pub clipped: bool,
    /// Where the time went.
    pub timings: StepTimings,
}

/// Where the time of a step went.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct StepTimings {
    /// From the call to its return.
    pub total: Duration,
    /// One entry per rank of this process, by rank.
    pub ranks: Vec<RankTimings>,
}

/// Where one rank's time went in a step.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct RankTimings {
    /// The rank.
    pub rank: usize,
    /// From the start of the step until the last micro-batch was computed.
    pub compute: Duration,
    /// In the accumulation passes (part of them beside the compute of other micro-batches).
    pub accumulate: Duration,
    /// Waiting for the all-reduces after the last micro-batch.
    pub communicate: Duration,
    /// In the optimizer.
    pub update: Duration,
    /// Each micro-batch of the rank, in the order of the global batch.
    pub micro_batches: Vec<MicroBatchTiming>,
}

/// When one micro-batch was computed.
#[derive(Debug, Clone, Copy, Serialize)]
#[non_exhaustive]
pub struct MicroBatchTiming {
    /// Position in the global batch.
    pub micro_batch: usize,
    /// Which virtual worker of the rank.
    pub worker: usize,
    /// Since the rank began the step.
    pub start: Duration,
    /// Forward and backward, with the rest that an emulated speed asks for.
    pub duration: Duration,
}
