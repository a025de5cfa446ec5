//! The batch follows the noise scale.

use serde::{Deserialize, Serialize};

use super::{BatchLimits, BatchSizeController, BatchSizeDecision, Limiter, TrainingState};
use crate::error::{Error, Result, require};
use crate::estimate::GradientEstimate;

/// B = multiple x `B_simple`.
///
/// At B = `B_simple` a step makes half the progress of one with the true gradient, and a run needs twice the fewest possible
/// steps and twice the fewest possible samples (McCandlish et al. 2018, section 2.3). A smaller multiple spends fewer samples, a larger one
/// fewer steps. In SimiGrad's terms a target gamma for the half-batch cosine is the multiple 2 gamma / (1 - gamma):
/// [`for_similarity`](Self::for_similarity).
///
/// # Examples
/// ```
/// use adaptive_batch::{BatchLimits, NoiseScaleController};
/// let limits = BatchLimits::new(32, 4_096, 32)?.hysteresis(0.2)?.cool_down(20);
/// assert_eq!(NoiseScaleController::for_similarity(0.5, limits)?, NoiseScaleController::new(2.0, limits)?);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct NoiseScaleController {
    multiple: f64,
    limiter: Limiter,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct Saved {
    multiple: f64,
    limiter: Limiter,
}

impl TryFrom<Saved> for NoiseScaleController {
    type Error = Error;

    fn try_from(s: Saved) -> Result<Self> {
        Ok(Self {
            limiter: s.limiter,
            ..Self::new(s.multiple, s.limiter.limits)?
        })
    }
}

impl NoiseScaleController {
    /// A batch of `multiple` noise scales, within the limits.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless the multiple is positive and finite.
    pub fn new(multiple: f64, limits: BatchLimits) -> Result<Self> {
        let ok = multiple > 0.0 && multiple.is_finite();
        require(
            ok,
            "multiple of the noise scale",
            "positive and finite",
            multiple,
        )?;
        Ok(Self {
            multiple,
            limiter: Limiter::new(limits),
        })
    }

    /// The batch at which the cosine of two half-batches is expected to be `gamma`.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless `gamma` lies in (0, 1).
    pub fn for_similarity(gamma: f64, limits: BatchLimits) -> Result<Self> {
        require(
            gamma > 0.0 && gamma < 1.0,
            "similarity target",
            "in (0, 1)",
            gamma,
        )?;
        Self::new(2.0 * gamma / (1.0 - gamma), limits)
    }
}

impl BatchSizeController for NoiseScaleController {
    fn decide(&mut self, estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision {
        self.limiter
            .decide(self.multiple * estimate.noise_scale, state)
    }
}
