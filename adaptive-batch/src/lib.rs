#![forbid(unsafe_code)]
#![allow(
    clippy::doc_markdown,
    reason = "names of methods, authors and formulas in running text"
)]
//! How noisy is the gradient, and how large should the batch be?
//!
//! 1. Each rank accumulates its micro-batch gradients through a [`GradientMeter`], which measures them in the same pass.
//! 2. The ranks add up a few scalars ([`Gather`]) and share one [`MicroBatchStats`].
//! 3. An [`EmaEstimator`] turns them into a [`GradientEstimate`]: noise scale, similarity, confidence. The [`estimate`] module has the formulas.
//! 4. A [`BatchSizeController`] decides on the batch size ([`controller`] lists them), a [`LearningRate`] follows, and a
//!    [`Forecaster`] says where it is going ([`forecast`]).
//!
//! Everything works on slices; with feature `burn` (and `wgpu`, `cuda`) the module `burn` measures Burn tensors on the device
//! that they live on.
//!
//! Equal inputs give equal decisions on every rank: there is no clock and no randomness in here, and sums do not depend on the
//! number of threads.

#[cfg(feature = "burn")]
pub mod burn;
pub mod controller;
mod element;
mod error;
pub mod estimate;
pub mod forecast;
pub mod fused;
mod gather;
mod half_split;
mod layout;
mod meter;
mod scaling_rule;
mod stats;

pub use controller::{
    BatchLimits, BatchSizeController, BatchSizeDecision, DecisionReason, FixedController,
    GoodputController, NoiseScaleController, NormTestController, ScheduleController,
    SimiGradController, ThroughputModel, TrainingState,
};
pub use element::{AccumulatorElement, Element};
pub use error::{Error, GradientOf, Result};
pub use estimate::{EmaEstimator, EstimateSource, GradientEstimate};
pub use forecast::{BatchForecast, DampedHolt, Ensemble, Forecaster, GaussianProcess, Persistence};
pub use fused::{
    Measured, accumulate, accumulate_and_measure, accumulate_and_measure_dot,
    accumulate_scaled_and_measure, dot, squared_norm,
};
pub use gather::{Gather, SingleRank, ThreadGather};
pub use half_split::HalfSplit;
pub use layout::{OwnerRule, Placement, Shard};
pub use meter::{GradientMeter, MeterConfig, MicroBatch, Weighting};
pub use scaling_rule::{LearningRate, ScalingRule};
pub use stats::MicroBatchStats;
