#![forbid(unsafe_code)]
#![allow(
    clippy::doc_markdown,
    reason = "names of methods, authors and formulas in running text"
)]
//! How noisy is the gradient, and how large should the batch be?

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
