//! From an estimate to a batch size.
//!
//! | controller | batch size | use it |
//! |---|---|---|
//! | [`SimiGradController`] | grows or shrinks by a rate until the half-batch cosine meets a target | to reproduce SimiGrad |
//! | [`NoiseScaleController`] | a multiple of the noise scale | by default |
//! | [`NormTestController`] | grows whenever the gradient's relative variance exceeds theta^2 | for convergence guarantees |
//! | [`GoodputController`] | maximises throughput times the worth of a sample | for time on given devices |
//! | [`ScheduleController`] | planned by steps or tokens | to follow a known recipe |
//! | [`FixedController`] | one size | as the base line |
//!
//! All of them keep to [`BatchLimits`]: bounds, a granularity, a hysteresis, a cool-down and a largest change. They hold no
//! clock and no random numbers: equal estimates give equal decisions on every rank, and a controller that is saved and
//! restored with serde continues as if nothing had happened (through JSON with `serde_json`'s feature `float_roundtrip`).

mod fixed;
mod goodput;
mod limits;
mod noise_scale;
mod norm_test;
mod schedule;
mod simigrad;

pub use fixed::FixedController;
pub use goodput::{GoodputController, ThroughputModel};
pub use limits::BatchLimits;
pub(crate) use limits::Limiter;
pub use noise_scale::NoiseScaleController;
pub use norm_test::NormTestController;
pub use schedule::ScheduleController;
pub use simigrad::SimiGradController;

use serde::{Deserialize, Serialize};

use crate::estimate::GradientEstimate;

/// Where training stands when a controller is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainingState {
    /// Optimizer steps taken.
    pub step: u64,
    /// Samples seen.
    pub samples: u64,
    /// Tokens seen; for tasks without tokens the same as `samples`.
    pub tokens: u64,
    /// Global batch size in use, in samples.
    pub batch_size: u64,
}

impl TrainingState {
    /// A state whose tokens are its samples.
    pub const fn new(step: u64, samples: u64, batch_size: u64) -> Self {
        Self {
            step,
            samples,
            tokens: samples,
            batch_size,
        }
    }

    /// The same state with this many tokens seen.
    #[must_use]
    pub const fn with_tokens(self, tokens: u64) -> Self {
        Self { tokens, ..self }
    }
}

/// The batch size to use from the next step on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchSizeDecision {
    /// Global batch size in samples: within the bounds and a multiple of the granularity, always.
    pub batch_size: u64,
    /// Whether it differs from the state's.
    pub changed: bool,
    /// What the controller asked for before bounds, granularity and all else; infinite while |G|^2 drowns in noise.
    #[serde(with = "crate::estimate::infinite_as_null")]
    pub target: f64,
    /// Why it is this one.
    pub reason: DecisionReason,
}

/// Why a decision came out as it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DecisionReason {
    /// The batch grows towards the target.
    Grow,
    /// The batch shrinks towards the target.
    Shrink,
    /// The target is what is in use, to the granularity.
    OnTarget,
    /// The target lies within the hysteresis of what is in use.
    Hysteresis,
    /// The last change is too recent.
    CoolDown,
    /// The controller's own interval has not passed.
    Interval,
    /// The target lies above the upper bound, which is in use.
    AtMaximum,
    /// The target lies below the lower bound, which is in use.
    AtMinimum,
    /// What was in use was out of bounds or no multiple of the granularity.
    OutOfLimits,
    /// The estimate says nothing (a target that is not a number).
    NoEstimate,
}

/// Chooses the global batch size.
pub trait BatchSizeController: std::fmt::Debug + Send {
    /// Decides on the batch size after the state's step. Computes in O(1) unless the controller says otherwise.
    fn decide(&mut self, estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision;
}

impl<C: BatchSizeController + ?Sized> BatchSizeController for Box<C> {
    fn decide(&mut self, estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision {
        (**self).decide(estimate, state)
    }
}
