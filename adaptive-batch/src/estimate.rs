//! From sums to the noise of the gradient.
//!
//! # Notation
//! K micro-batches of b_k samples, together B; g_k the mean gradient of micro-batch k; G the true gradient, tr the trace
//! of the per-sample covariance. `B_simple = tr / |G|^2` is the gradient noise scale (McCandlish et al. 2018, eq. 2.9).
//!
//! # Estimators
//! With `Q = sum_k (b_k / B) |g_k|^2` and `P = |sum_k (b_k / B) g_k|^2`
//!
//! ```text
//! E Q = |G|^2 + K tr / B        E P = |G|^2 + tr / B
//! |G|^2 = (K P - Q) / (K - 1)   tr = B (Q - P) / (K - 1)          (unbiased, whatever the sizes b_k)
//! ```
//!
//! since each `b_k |g_k|^2` has the expectation `b_k |G|^2 + tr`. For equal sizes, `Q = S1 / K` and `P = S2 / K^2`, these are
//! `(S2 - S1) / (K (K - 1))` and `b (S1 - S2 / K) / (K - 1)`: McCandlish et al., appendix A.1, with all micro-batches as the small
//! batch. `tr` is the within-groups mean square of a one-way analysis of variance, which also settles the weights.
//! The mean pairwise similarity is `phi_K = |G|^2 / Q`, for equal sizes `(S2 - S1) / ((K - 1) S1)`; its ratio of
//! expectations is `1 / (1 + K B_simple / B)`. The cosine of two half-batches (SimiGrad, eq. 3) has
//! `1 / (1 + 2 B_simple / B)`.
//!
//! A ratio of noisy numbers is biased however unbiased both are, and |G|^2 of one step is often negative; so
//! [`EmaEstimator`] smooths |G|^2 and tr apart and divides last.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, require};
use crate::stats::MicroBatchStats;

/// Where an estimate comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EstimateSource {
    /// The micro-batches of one step.
    MicroBatches,
    /// K = 1: the batches of this and the previous step, taken for two micro-batches. The change of the true gradient between the
    /// steps counts as noise, so the noise scale is overestimated while the gradient turns fast.
    TwoSteps,
}

/// What is known about the gradient at one step, or smoothed over steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GradientEstimate {
    /// Mean pairwise similarity phi_K of the micro-batch gradients, `|G|^2 / (|G|^2 + K tr / B)`; in [-1/(K-1), 1].
    pub similarity: f64,
    /// Cosine of the gradients of two half-batches: measured by [`HalfSplit`](crate::HalfSplit) if that is in use, else
    /// `|G|^2 / (|G|^2 + 2 tr / B)`; in [-1, 1].
    pub half_cosine: f64,
    /// `B_simple = tr / |G|^2` in samples; infinite where the estimate of |G|^2 is not positive.
    #[serde(with = "infinite_as_null")]
    pub noise_scale: f64,
    /// |G|^2; may be negative, being unbiased.
    pub grad_sq_norm: f64,
    /// tr, the variance of one sample's gradient summed over all parameters.
    pub variance: f64,
    /// Gradient diversity of the micro-batches (Yin et al. 2018, definition 1), `sum |g_k|^2 / |sum g_k|^2`, for unequal sizes
    /// `Q / (K P)`: 1/K for identical gradients, 1 for orthogonal ones. Expected `(1 + K r) / (K (1 + r))` with r = `B_simple / B`.
    #[serde(with = "infinite_as_null")]
    pub diversity: f64,
    /// K; 2 for [`EstimateSource::TwoSteps`].
    pub micro_batches: u64,
    /// B, samples of the batch (of both for [`EstimateSource::TwoSteps`]).
    pub samples: u64,
    /// How far |G|^2 stands out of its own error, `x^2 / (x^2 + error^2)`: near 1 reliable, 1/2 when the error is as large as
    /// the value, 0 when the value is not positive.
    pub confidence: f64,
    /// Standard error of `grad_sq_norm`: for one step an upper bound on what the noise model allows, for smoothed
    /// estimates mostly from the scatter of the steps.
    pub grad_sq_norm_error: f64,
    /// Standard error of `variance`, found likewise.
    pub variance_error: f64,
    /// Micro-batches of this step, or two steps.
    pub source: EstimateSource,
}

impl GradientEstimate {
    /// The interval of noise scales within `z` standard errors of |G|^2 and tr; the upper end is infinite where |G|^2 may be 0.
    pub fn noise_scale_interval(&self, z: f64) -> (f64, f64) {
        let low = (self.variance - z * self.variance_error).max(0.0)
            / (self.grad_sq_norm + z * self.grad_sq_norm_error).max(f64::MIN_POSITIVE);
        let floor = self.grad_sq_norm - z * self.grad_sq_norm_error;
        let high = if floor > 0.0 {
            (self.variance + z * self.variance_error) / floor
        } else {
            f64::INFINITY
        };
        (low.min(self.noise_scale), high)
    }

    fn new(moments: Moments, errors: Errors, context: Context) -> Self {
        let Moments { grad_sq, variance } = moments;
        let Context {
            micro_batches,
            samples,
            half_cosine,
            source,
        } = context;
        let (k, b) = (micro_batches as f64, samples as f64);
        let share = |groups: f64, floor: f64| {
            let total = grad_sq + groups * variance / b;
            if total > 0.0 {
                (grad_sq / total).clamp(floor, 1.0)
            } else {
                floor
            }
        };
        let mean_sq = grad_sq + variance / b;
        let error_sq = errors.grad_sq * errors.grad_sq;
        Self {
            similarity: share(k, -1.0 / (k - 1.0).max(1.0)),
            half_cosine: half_cosine.unwrap_or_else(|| share(2.0, -1.0)),
            noise_scale: if grad_sq > 0.0 {
                variance / grad_sq
            } else {
                f64::INFINITY
            },
            grad_sq_norm: grad_sq,
            variance,
            diversity: if mean_sq > 0.0 {
                ((grad_sq + k * variance / b) / (k * mean_sq)).max(1.0 / k)
            } else {
                f64::INFINITY
            },
            micro_batches,
            samples,
            confidence: if grad_sq > 0.0 {
                grad_sq * grad_sq / (grad_sq * grad_sq + error_sq)
            } else {
                0.0
            },
            grad_sq_norm_error: errors.grad_sq,
            variance_error: errors.variance,
            source,
        }
    }
}

/// Moments from here on are refused: their squares are added up too, and must stay finite.
const LARGEST_MOMENT: f64 = 1e140;

/// `|G|^2` and tr.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct Moments {
    grad_sq: f64,
    variance: f64,
}

#[derive(Debug, Clone, Copy)]
struct Errors {
    grad_sq: f64,
    variance: f64,
}

#[derive(Debug, Clone, Copy)]
struct Context {
    micro_batches: u64,
    samples: u64,
    half_cosine: Option<f64>,
    source: EstimateSource,
}

/// One step's unbiased moments, with the variance that the noise model allows at most.
fn moments(stats: &MicroBatchStats) -> Result<(Moments, Errors, Context)> {
    stats.check()?;
    let k = stats.micro_batches as f64;
    let b = stats.samples as f64;
    let mut context = Context {
        micro_batches: stats.micro_batches,
        samples: stats.samples,
        half_cosine: None,
        source: EstimateSource::MicroBatches,
    };
    let p = stats.mean_gradient_sq();
    let q = stats.s1 / b;
    let zero = Error::ZeroGradient {
        micro_batches: stats.micro_batches,
    };
    let (groups, total, grad_sq, variance) = if stats.micro_batches >= 2 {
        if q <= 0.0 {
            return Err(zero);
        }
        (k, b, (k * p - q) / (k - 1.0), b * (q - p) / (k - 1.0))
    } else {
        let before = &stats.previous;
        if before.elements != stats.parameters() || before.samples == 0 {
            return Err(Error::SingleMicroBatch {
                samples: stats.samples,
            });
        }
        // Two steps as two micro-batches: mean gradients, weighted by their samples.
        let total_samples = stats
            .samples
            .checked_add(before.samples)
            .ok_or(Error::Overflow {
                what: "number of samples of two steps",
            })?;
        let (b0, total) = (before.samples as f64, total_samples as f64);
        let norm0 = before.norm_sq / (before.weight * before.weight);
        let dot = before.dot / (before.weight * stats.weight);
        let q = (b * p + b0 * norm0) / total;
        if q <= 0.0 {
            return Err(zero);
        }
        let p2 = (b * b * p + b0 * b0 * norm0 + 2.0 * b * b0 * dot) / (total * total);
        context.micro_batches = 2;
        context.samples = total_samples;
        context.source = EstimateSource::TwoSteps;
        (2.0, total, 2.0 * p2 - q, total * (q - p2))
    };
    // Written so that NaN is refused as well.
    if !(grad_sq.abs() < LARGEST_MOMENT && variance.abs() < LARGEST_MOMENT) {
        return Err(Error::Overflow {
            what: "square of |G|^2 or of the variance",
        });
    }
    // Q >= P but for the rounding of the summed gradient.
    let variance = variance.max(0.0);
    let halves = &stats.halves;
    if halves.elements > 0 {
        let norms = (halves.first_sq * halves.second_sq).sqrt();
        context.half_cosine = Some(if norms > 0.0 {
            (halves.dot / norms).clamp(-1.0, 1.0)
        } else {
            0.0
        });
    }
    // Var |G|^2 = 4 G'CG / B + 2 tr(C^2) K / (B^2 (K-1)) and Var tr = 2 tr(C^2) / (K - 1) for Gaussian noise of
    // covariance C; G'CG <= |G|^2 tr and tr(C^2) <= tr^2, with equality where all noise lies along the gradient.
    let var_grad = 4.0 * grad_sq.max(0.0) * variance / total
        + 2.0 * variance * variance * groups / (total * total * (groups - 1.0));
    let var_variance = 2.0 * variance * variance / (groups - 1.0);
    let errors = Errors {
        grad_sq: var_grad.sqrt(),
        variance: var_variance.sqrt(),
    };
    Ok((Moments { grad_sq, variance }, errors, context))
}

impl MicroBatchStats {
    /// The unbiased estimate of this one step. The [module](crate::estimate) has the formulas.
    ///
    /// # Errors
    /// - [`Error::NoMicroBatch`], [`Error::Incomplete`], [`Error::Weights`]: the statistics are not those of a whole batch.
    /// - [`Error::SingleMicroBatch`]: K = 1 and no previous gradient was kept.
    /// - [`Error::ZeroGradient`]: there is nothing to compare.
    /// - [`Error::Overflow`]: |G|^2 or tr is not below 10^140.
    pub fn estimate(&self) -> Result<GradientEstimate> {
        let (moments, errors, context) = moments(self)?;
        Ok(GradientEstimate::new(moments, errors, context))
    }
}

/// Smooths |G|^2 and tr over steps, each by an exponential moving average with its start-up bias taken out, and
/// divides last.
///
/// After t steps with decay beta, step i has the weight `beta^(t-i) (1 - beta) / (1 - beta^t)`. Both moments are independent of
/// the batch size, so the average goes on when that changes.
///
/// # Examples
/// ```
/// use adaptive_batch::{EmaEstimator, MeterConfig, MicroBatch, Shard};
/// let mut meter = MeterConfig::new([Shard::new("all", 1)]).build()?;
/// let mut ema = EmaEstimator::new(0.9)?;
/// for step in 0..3 {
///     let mut acc = [0.0f32];
///     for index in 0..2 {
///         let noise = if index == 0 { 0.5 } else { -0.5 };
///         meter.accumulate(0, MicroBatch { index, samples: 4 }, &mut acc, &[1.0f32 + noise])?;
///     }
///     meter.summed(0, &acc)?;
///     let estimate = ema.observe(&meter.finish()?)?;
///     assert!((estimate.variance - 2.0).abs() < 1e-12);
/// }
/// assert_eq!(ema.steps(), 3);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SavedEma")]
pub struct EmaEstimator {
    decay: f64,
    steps: u64,
    /// beta^t.
    remaining: f64,
    first: Moments,
    second: Moments,
    half_cosine: f64,
    /// beta^t of the measured cosines; 1 while none was measured.
    half_remaining: f64,
    last: Option<GradientEstimate>,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct SavedEma {
    decay: f64,
    steps: u64,
    remaining: f64,
    first: Moments,
    second: Moments,
    half_cosine: f64,
    half_remaining: f64,
    last: Option<GradientEstimate>,
}

impl TryFrom<SavedEma> for EmaEstimator {
    type Error = Error;

    fn try_from(s: SavedEma) -> Result<Self> {
        let mut ema = Self::new(s.decay)?;
        require(
            (0.0..=1.0).contains(&s.remaining),
            "weight of the start in a saved moving average",
            "in [0, 1]",
            s.remaining,
        )?;
        require(
            (0.0..=1.0).contains(&s.half_remaining) && s.half_cosine.abs() <= 1.0,
            "average of the measured cosines in a saved moving average",
            "in [-1, 1], with a weight of the start in [0, 1]",
            format!("{} with {}", s.half_cosine, s.half_remaining),
        )?;
        for (name, first, second) in [
            ("saved average of |G|^2", s.first.grad_sq, s.second.grad_sq),
            (
                "saved average of the variance",
                s.first.variance,
                s.second.variance,
            ),
        ] {
            require(
                first.abs() < LARGEST_MOMENT && (0.0..LARGEST_MOMENT.powi(2)).contains(&second),
                name,
                "below 10^140, with a square from 0 to 10^280",
                format!("{first} with a square of {second}"),
            )?;
        }
        ema.steps = s.steps;
        ema.remaining = s.remaining;
        ema.first = s.first;
        ema.second = s.second;
        ema.half_cosine = s.half_cosine;
        ema.half_remaining = s.half_remaining;
        ema.last = s.last;
        Ok(ema)
    }
}

impl EmaEstimator {
    /// An average with this decay per step, in [0, 1); 0 smooths nothing.
    ///
    /// # Errors
    /// [`Error::Parameter`] outside of that range.
    pub fn new(decay: f64) -> Result<Self> {
        require(
            (0.0..1.0).contains(&decay),
            "decay of the moving average",
            "in [0, 1)",
            decay,
        )?;
        Ok(Self {
            decay,
            steps: 0,
            remaining: 1.0,
            first: Moments::default(),
            second: Moments::default(),
            half_cosine: 0.0,
            half_remaining: 1.0,
            last: None,
        })
    }

    /// An average in which a step's weight halves every `steps` steps.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless positive and finite.
    pub fn with_half_life(steps: f64) -> Result<Self> {
        require(
            steps > 0.0 && steps.is_finite(),
            "half-life",
            "positive and finite",
            steps,
        )?;
        Self::new((-std::f64::consts::LN_2 / steps).exp())
    }

    /// Takes in one step's statistics and returns the smoothed estimate. Computes in O(1).
    ///
    /// # Errors
    /// As [`MicroBatchStats::estimate`]; the estimator is unchanged then.
    pub fn observe(&mut self, stats: &MicroBatchStats) -> Result<GradientEstimate> {
        let (now, model, mut context) = moments(stats)?;
        let mix = |old: f64, new: f64| self.decay * old + (1.0 - self.decay) * new;
        self.first = Moments {
            grad_sq: mix(self.first.grad_sq, now.grad_sq),
            variance: mix(self.first.variance, now.variance),
        };
        self.second = Moments {
            grad_sq: mix(self.second.grad_sq, now.grad_sq * now.grad_sq),
            variance: mix(self.second.variance, now.variance * now.variance),
        };
        if let Some(cosine) = context.half_cosine {
            self.half_cosine = mix(self.half_cosine, cosine);
            self.half_remaining *= self.decay;
            context.half_cosine = Some(self.half_cosine / (1.0 - self.half_remaining));
        }
        self.remaining *= self.decay;
        self.steps = self.steps.saturating_add(1);
        let filled = 1.0 - self.remaining;
        let smooth = Moments {
            grad_sq: self.first.grad_sq / filled,
            variance: self.first.variance / filled,
        };
        // (sum of weights)^2 / (sum of squared weights): the number of equally weighted steps with the same error.
        let effective = filled * (1.0 + self.decay) / ((1.0 + self.remaining) * (1.0 - self.decay));
        // The scatter of few steps says little about itself: the noise model counts as one more observation of it.
        let error = |mean: f64, square: f64, model: f64| {
            let scatter = (square / filled - mean * mean).max(0.0) * effective;
            ((scatter + model * model) / (effective * effective)).sqrt()
        };
        let errors = Errors {
            grad_sq: error(smooth.grad_sq, self.second.grad_sq, model.grad_sq),
            variance: error(smooth.variance, self.second.variance, model.variance),
        };
        let estimate = GradientEstimate::new(smooth, errors, context);
        self.last = Some(estimate);
        Ok(estimate)
    }

    /// The last estimate, if there was one.
    pub const fn last(&self) -> Option<&GradientEstimate> {
        self.last.as_ref()
    }

    /// Steps observed.
    pub const fn steps(&self) -> u64 {
        self.steps
    }
}

/// JSON has no infinity.
pub(crate) mod infinite_as_null {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(
        clippy::trivially_copy_pass_by_ref,
        reason = "the signature that serde calls"
    )]
    pub(crate) fn serialize<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
        x.is_finite().then_some(*x).serialize(s)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::INFINITY))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An estimate with these moments and no error.
    pub(crate) fn estimate(grad_sq: f64, variance: f64, samples: u64, k: u64) -> GradientEstimate {
        let context = Context {
            micro_batches: k,
            samples,
            half_cosine: None,
            source: EstimateSource::MicroBatches,
        };
        GradientEstimate::new(
            Moments { grad_sq, variance },
            Errors {
                grad_sq: 0.0,
                variance: 0.0,
            },
            context,
        )
    }

    #[test]
    fn the_closed_forms_hold_for_exact_moments() {
        let e = estimate(2.0, 96.0, 64, 4);
        assert!((e.noise_scale - 48.0).abs() < 1e-12);
        assert!((e.similarity - 1.0 / (1.0 + 4.0 * 48.0 / 64.0)).abs() < 1e-12);
        assert!((e.half_cosine - 1.0 / (1.0 + 2.0 * 48.0 / 64.0)).abs() < 1e-12);
        let r = 48.0 / 64.0;
        assert!((e.diversity - (1.0 + 4.0 * r) / (4.0 * (1.0 + r))).abs() < 1e-12);
        assert!((e.confidence - 1.0).abs() < 1e-12);
        let drowned = estimate(-0.5, 96.0, 64, 4);
        assert!(drowned.noise_scale.is_infinite() && drowned.confidence == 0.0);
        assert!((-1.0 / 3.0..=1.0).contains(&drowned.similarity));
        let json = serde_json::to_string(&drowned).unwrap();
        assert_eq!(
            serde_json::from_str::<GradientEstimate>(&json).unwrap(),
            drowned
        );
    }
}
