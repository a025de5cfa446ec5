//! The norm test.

use serde::{Deserialize, Serialize};

use super::{
    BatchLimits, BatchSizeController, BatchSizeDecision, DecisionReason, Limiter, TrainingState,
};
use crate::error::{Error, Result, require};
use crate::estimate::GradientEstimate;

/// Grows the batch when the gradient's relative variance fails a test: `tr / B <= theta^2 |G|^2` (Byrd et al. 2012, eq. 3.3; with
/// adaptive step sizes: AdAdaGrad, Lau et al. 2024).
///
/// Where it fails, B = tr / (theta^2 |G|^2). The batch never shrinks: the theory wants that growth, and
/// the variance seldom falls. Use it where a convergence guarantee matters more than the number of samples.
///
/// # Examples
/// ```
/// use adaptive_batch::{BatchLimits, NormTestController};
/// let limits = BatchLimits::new(32, 4_096, 32)?;
/// assert!(NormTestController::new(0.9, limits).is_ok());
/// assert!(NormTestController::new(1.0, limits).is_err());
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct NormTestController {
    theta: f64,
    limiter: Limiter,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct Saved {
    theta: f64,
    limiter: Limiter,
}

impl TryFrom<Saved> for NormTestController {
    type Error = Error;

    fn try_from(s: Saved) -> Result<Self> {
        Ok(Self {
            limiter: s.limiter,
            ..Self::new(s.theta, s.limiter.limits)?
        })
    }
}

impl NormTestController {
    /// A controller that tests with this theta.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless theta lies in (0, 1).
    pub fn new(theta: f64, limits: BatchLimits) -> Result<Self> {
        require(
            theta > 0.0 && theta < 1.0,
            "theta of the norm test",
            "in (0, 1)",
            theta,
        )?;
        Ok(Self {
            theta,
            limiter: Limiter::new(limits),
        })
    }
}

impl BatchSizeController for NormTestController {
    fn decide(&mut self, estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision {
        let needed = estimate.noise_scale / (self.theta * self.theta);
        if needed <= state.batch_size as f64 {
            return self.limiter.hold(needed, state, DecisionReason::OnTarget);
        }
        // Up to the granularity: rounding down would fail the test.
        let granularity = self.limiter.limits.granularity() as f64;
        self.limiter
            .decide((needed / granularity).ceil() * granularity, state)
    }
}
