//! What a meter measures and how.

use super::GradientMeter;
use super::previous::Previous;
use crate::error::{Error, Result, require};
use crate::fused::Adam;
use crate::layout::{Placement, Shard};

/// One micro-batch: its index within this replica's step and its number of samples.
///
/// Indices only have to differ from each other within a step on one replica; all ranks of a replica use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MicroBatch {
    /// Index within the step.
    pub index: u64,
    /// Samples b_k.
    pub samples: u64,
}

/// What the gradients passed to the meter are and with which weight they are accumulated; with g_k the *mean* gradient
/// over the b_k samples of micro-batch k and B the samples of the whole batch over all replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Weighting {
    /// Passed: g_k. Accumulator: `acc += g_k`, so it ends as `sum_k g_k`; divide the all-reduced sum by K. Only right
    /// if all micro-batches of all replicas have the same size, which is checked.
    #[default]
    Equal,
    /// Passed: g_k. Accumulator: `acc += b_k g_k`, so it ends as `sum_k b_k g_k`; divide the all-reduced sum by B.
    Samples,
    /// Passed: g_k. Accumulator: `acc += (b_k / B) g_k`, with this B: the all-reduced sum is the mean gradient.
    Fraction {
        /// Samples B of the whole batch, over all replicas.
        batch: u64,
    },
    /// Passed: the sum over the samples, b_k g_k. Accumulator: `acc += b_k g_k` as it is; divide the all-reduced sum by B.
    Sum,
}

impl Weighting {
    /// Factor on the gradient that is passed.
    pub(super) fn factor(self, samples: u64) -> f64 {
        match self {
            Self::Equal | Self::Sum => 1.0,
            Self::Samples => samples as f64,
            // As f32, which is what multiplies the gradient.
            Self::Fraction { batch } => f64::from((samples as f64 / batch as f64) as f32),
        }
    }

    /// Factor on the mean gradient that ends up in the accumulator.
    pub(super) fn weight(self, samples: u64) -> f64 {
        match self {
            Self::Sum => samples as f64,
            _ => self.factor(samples),
        }
    }
}

/// Options of a [`GradientMeter`].
///
/// # Examples
/// ```
/// use adaptive_batch::{MeterConfig, Placement, Shard, Weighting};
/// let meter = MeterConfig::new([Shard::new("bucket 0", 1_000), Shard::new("bucket 1", 24)])
///     .placement(Placement::data_parallel(1, 4)?)
///     .weighting(Weighting::Fraction { batch: 256 })
///     .build()?;
/// assert_eq!(meter.shards().len(), 2);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MeterConfig {
    pub(super) shards: Vec<Shard>,
    pub(super) placement: Placement,
    pub(super) weighting: Weighting,
    pub(super) loss_scale: f64,
    pub(super) guard: bool,
    keep_previous: bool,
    pub(super) adam: Option<Adam>,
}

impl MeterConfig {
    /// A meter for one rank that holds these shards, whole and alone until [`placement`](Self::placement) says otherwise.
    pub fn new(shards: impl IntoIterator<Item = Shard>) -> Self {
        Self {
            shards: shards.into_iter().collect(),
            placement: Placement::single(),
            weighting: Weighting::default(),
            loss_scale: 1.0,
            guard: false,
            keep_previous: false,
            adam: None,
        }
    }

    /// Where the rank stands.
    #[must_use]
    pub const fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// What the gradients are and how they are accumulated; [`Weighting::Equal`] by default.
    #[must_use]
    pub const fn weighting(mut self, weighting: Weighting) -> Self {
        self.weighting = weighting;
        self
    }

    /// The factor on the loss that the gradients still carry (mixed precision); the statistics are divided by its square.
    #[must_use]
    pub const fn loss_scale(mut self, scale: f64) -> Self {
        self.loss_scale = scale;
        self
    }

    /// Looks at each gradient *before* it is added, so that a NaN or infinite one leaves the accumulator as it was.
    ///
    /// Off by default: the accumulator then receives such values as it would by plain accumulation, the meter refuses
    /// the gradient all the same, and the step is lost to the accumulator (as with every loss scaler). On, the gradient is read
    /// twice, which about halves the speed of accumulation.
    #[must_use]
    pub const fn guard(mut self, guard: bool) -> Self {
        self.guard = guard;
        self
    }

    /// Keeps this rank's share of the summed gradient until the next step, for batches that consist of one micro-batch.
    ///
    /// A batch of K = 1 tells nothing about the noise. With the previous step's gradient at hand the two steps are taken
    /// for two micro-batches, and the estimate is flagged. Costs one `f32` per counted element divided by the replicas.
    #[must_use]
    pub const fn keep_previous(mut self, keep: bool) -> Self {
        self.keep_previous = keep;
        self
    }

    /// Measures p = g / (sqrt(v / correction) + eps) instead of g, v being Adam's second moment and `correction` its
    /// bias correction 1 - beta2^t: the noise that the optimizer sees. What is accumulated stays g.
    #[must_use]
    pub const fn adam(mut self, eps: f64, correction: f64) -> Self {
        self.adam = Some(Adam { eps, correction });
        self
    }

    /// Builds the meter.
    ///
    /// # Errors
    /// [`Error::Parameter`] or [`Error::OutOfShard`] for parameter ranges that overlap or leave their shard, a loss
    /// scale that is not positive (or whose square leaves the range of `f64`), a batch of 0 samples, or Adam's eps below 0 or correction outside (0, 1].
    pub fn build(self) -> Result<GradientMeter> {
        check_scale(self.loss_scale)?;
        check_weighting(self.weighting)?;
        if let Some(adam) = self.adam {
            check_adam(adam)?;
        }
        require(!self.shards.is_empty(), "shards", "at least one", "none")?;
        let segments = self
            .shards
            .iter()
            .map(|shard| shard.segments(self.placement))
            .collect::<Result<Vec<_>>>()?;
        let mut counted = 0u64;
        for segment in segments.iter().flatten().filter(|s| s.counted) {
            counted = counted
                .checked_add(segment.range.len() as u64)
                .ok_or(Error::Overflow {
                    what: "number of parameters",
                })?;
        }
        if self.keep_previous && self.adam.is_some() {
            return Err(Error::Option {
                call: "keep_previous",
                needs: "a meter without `adam`, whose measure changes from step to step",
            });
        }
        let previous = self.keep_previous.then(|| Previous::new(self.shards.len()));
        Ok(GradientMeter::new(self, segments, counted, previous))
    }
}

pub(super) fn check_scale(scale: f64) -> Result<()> {
    require(
        scale > 0.0 && (scale * scale).is_normal(),
        "loss scale",
        "positive and finite, as its square",
        scale,
    )
}

pub(super) fn check_weighting(weighting: Weighting) -> Result<()> {
    match weighting {
        Weighting::Fraction { batch } => require(
            batch > 0,
            "batch of the weighting",
            "at least one sample",
            batch,
        ),
        _ => Ok(()),
    }
}

pub(super) fn check_adam(adam: Adam) -> Result<()> {
    require(
        adam.eps >= 0.0 && adam.eps.is_finite(),
        "Adam's eps",
        "at least 0",
        adam.eps,
    )?;
    require(
        adam.correction > 0.0 && adam.correction <= 1.0,
        "Adam's bias correction",
        "in (0, 1]",
        adam.correction,
    )
}
