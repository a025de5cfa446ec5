//! Pollux's goodput.

use serde::{Deserialize, Serialize};

use super::{BatchLimits, BatchSizeController, BatchSizeDecision, Limiter, TrainingState};
use crate::error::{Error, Result, require};
use crate::estimate::GradientEstimate;

/// Time of a step by batch size (Pollux, OSDI 2021, eq. 8 to 11, with gradient accumulation).
///
/// ```text
/// t_grad = alpha + beta m                                     m samples on each replica at once
/// t_step = (s - 1) t_grad + (t_grad^gamma + t_sync^gamma)^(1 / gamma),   B = replicas x m x s
/// ```
///
/// gamma = 1 adds computation and synchronisation, a large gamma overlaps them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SavedThroughput")]
pub struct ThroughputModel {
    alpha: f64,
    beta: f64,
    sync: f64,
    gamma: f64,
    replicas: u64,
    most_samples: u64,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct SavedThroughput {
    alpha: f64,
    beta: f64,
    sync: f64,
    gamma: f64,
    replicas: u64,
    most_samples: u64,
}

impl TryFrom<SavedThroughput> for ThroughputModel {
    type Error = Error;

    fn try_from(s: SavedThroughput) -> Result<Self> {
        Self::new(s.alpha, s.beta, s.sync, s.replicas, s.most_samples)?.overlap(s.gamma)
    }
}

impl ThroughputModel {
    /// A model with `alpha` seconds per pass, `beta` per sample, `sync` per all-reduce, on `replicas` devices that hold up
    /// to `most_samples` samples each; without overlap.
    ///
    /// # Errors
    /// [`Error::Parameter`] for negative times, a beta of 0, no replica or no sample.
    pub fn new(alpha: f64, beta: f64, sync: f64, replicas: u64, most_samples: u64) -> Result<Self> {
        for (name, time) in [
            ("alpha of the throughput model", alpha),
            ("sync of the throughput model", sync),
        ] {
            require(
                time >= 0.0 && time.is_finite(),
                name,
                "at least 0 seconds",
                time,
            )?;
        }
        require(
            beta > 0.0 && beta.is_finite(),
            "beta of the throughput model",
            "above 0 seconds per sample",
            beta,
        )?;
        require(replicas > 0, "replicas", "at least 1", replicas)?;
        require(
            most_samples > 0,
            "most samples of a device",
            "at least 1",
            most_samples,
        )?;
        Ok(Self {
            alpha,
            beta,
            sync,
            gamma: 1.0,
            replicas,
            most_samples,
        })
    }

    /// Sets gamma, the overlap of computation and synchronisation.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless in [1, 10], the range that Pollux fits.
    pub fn overlap(mut self, gamma: f64) -> Result<Self> {
        require(
            (1.0..=10.0).contains(&gamma),
            "overlap exponent gamma",
            "in [1, 10]",
            gamma,
        )?;
        self.gamma = gamma;
        Ok(self)
    }

    /// Seconds of a step at a global batch of `batch` samples.
    ///
    /// # Examples
    /// ```
    /// let model = adaptive_batch::ThroughputModel::new(0.01, 0.001, 0.05, 4, 32)?;
    /// // 2 passes of 32 samples on each of 4 devices, and one all-reduce.
    /// assert!((model.step_seconds(256) - (2.0 * 0.042 + 0.05)).abs() < 1e-12);
    /// # Ok::<(), adaptive_batch::Error>(())
    /// ```
    pub fn step_seconds(&self, batch: u64) -> f64 {
        let local = batch as f64 / self.replicas as f64;
        let passes = (local / self.most_samples as f64).ceil().max(1.0);
        let grad = self.alpha + self.beta * local / passes;
        let last = (grad.powf(self.gamma) + self.sync.powf(self.gamma)).powf(1.0 / self.gamma);
        (passes - 1.0) * grad + last
    }
}

/// The batch with the greatest goodput: samples per second times the worth of a sample (Pollux, eq. 6 and 7),
///
/// ```text
/// goodput(B) = B / t_step(B) x (B_simple + B0) / (B_simple + B)
/// ```
///
/// with the base batch B0 at which a sample is worth 1. Use it when time on given devices is what counts.
///
/// Tries every allowed batch if they are few, else 4,096 of them in geometric steps: within 1 % of the best batch up to
/// 10^17 samples. Computes in O(tried).
///
/// # Examples
/// ```
/// use adaptive_batch::{BatchLimits, GoodputController, ThroughputModel};
/// let model = ThroughputModel::new(0.01, 0.001, 0.05, 4, 32)?;
/// let controller = GoodputController::new(model, 64, BatchLimits::new(64, 4_096, 32)?)?;
/// // Where noise rules, a sample is worth the same at any batch, and the largest batch is the fastest.
/// assert_eq!(controller.best_batch(f64::INFINITY), 4_096);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SavedGoodput")]
pub struct GoodputController {
    throughput: ThroughputModel,
    base_batch: u64,
    limiter: Limiter,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct SavedGoodput {
    throughput: ThroughputModel,
    base_batch: u64,
    limiter: Limiter,
}

impl TryFrom<SavedGoodput> for GoodputController {
    type Error = Error;

    fn try_from(s: SavedGoodput) -> Result<Self> {
        Ok(Self {
            limiter: s.limiter,
            ..Self::new(s.throughput, s.base_batch, s.limiter.limits)?
        })
    }
}

/// Batches that are tried at most.
const MOST_TRIED: u64 = 4_096;

impl GoodputController {
    /// A controller for this throughput and base batch.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a base batch of 0.
    pub fn new(throughput: ThroughputModel, base_batch: u64, limits: BatchLimits) -> Result<Self> {
        require(base_batch > 0, "base batch", "at least 1", base_batch)?;
        Ok(Self {
            throughput,
            base_batch,
            limiter: Limiter::new(limits),
        })
    }

    /// Replaces the throughput model, as devices or measurements change.
    pub const fn set_throughput(&mut self, throughput: ThroughputModel) {
        self.throughput = throughput;
    }

    /// Useful samples per second at `batch`.
    pub fn goodput(&self, batch: u64, noise_scale: f64) -> f64 {
        let worth = if noise_scale.is_finite() {
            (noise_scale + self.base_batch as f64) / (noise_scale + batch as f64)
        } else {
            1.0
        };
        batch as f64 / self.throughput.step_seconds(batch) * worth
    }

    /// The allowed batch of greatest goodput, the smallest of equals.
    pub fn best_batch(&self, noise_scale: f64) -> u64 {
        let limits = self.limiter.limits;
        let (smallest, largest) = (limits.smallest(), limits.largest());
        let count = (largest - smallest) / limits.granularity();
        let tried = count.min(MOST_TRIED - 1);
        let mut best = (smallest, f64::NEG_INFINITY);
        for i in 0..=tried {
            let batch = if tried == count {
                smallest + i * limits.granularity()
            } else {
                let ratio = largest as f64 / smallest as f64;
                limits.nearest(smallest as f64 * ratio.powf(i as f64 / tried as f64))
            };
            let goodput = self.goodput(batch, noise_scale);
            if goodput > best.1 {
                best = (batch, goodput);
            }
        }
        best.0
    }
}

impl BatchSizeController for GoodputController {
    fn decide(&mut self, estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision {
        let target = if estimate.noise_scale.is_nan() {
            f64::NAN
        } else {
            self.best_batch(estimate.noise_scale) as f64
        };
        self.limiter.decide(target, state)
    }
}
