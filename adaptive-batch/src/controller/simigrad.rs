//! SimiGrad's own rule.

use serde::{Deserialize, Serialize};

use super::{
    BatchLimits, BatchSizeController, BatchSizeDecision, DecisionReason, Limiter, TrainingState,
};
use crate::error::{Error, Result, require};
use crate::estimate::GradientEstimate;

/// Every `interval` steps the batch grows by the factor `1 + rate` if the half-batch cosine is below the target `gamma`, and shrinks
/// by `1 - rate` if it is above (SimiGrad, NeurIPS 2021, algorithm 1).
///
/// The cosine is the one that a [`HalfSplit`](crate::HalfSplit) measured, or the equivalent from the micro-batches. The
/// unrounded batch is kept between decisions, so small rates add up even where the granularity is coarse.
///
/// # Examples
/// ```
/// use adaptive_batch::{BatchLimits, SimiGradController};
/// let limits = BatchLimits::new(32, 4_096, 32)?;
/// let controller = SimiGradController::new(0.5, 0.1, 10, limits)?;
/// assert!(SimiGradController::new(1.0, 0.1, 10, limits).is_err());
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct SimiGradController {
    gamma: f64,
    rate: f64,
    interval: u64,
    limiter: Limiter,
    /// Unrounded batch size, and the size that was decided from it.
    ideal: Option<(f64, u64)>,
    last_decision: Option<u64>,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct Saved {
    gamma: f64,
    rate: f64,
    interval: u64,
    limiter: Limiter,
    ideal: Option<(f64, u64)>,
    last_decision: Option<u64>,
}

impl TryFrom<Saved> for SimiGradController {
    type Error = Error;

    fn try_from(s: Saved) -> Result<Self> {
        let new = Self::new(s.gamma, s.rate, s.interval, s.limiter.limits)?;
        if let Some((ideal, _)) = s.ideal {
            require(
                ideal > 0.0 && ideal.is_finite(),
                "saved unrounded batch",
                "positive and finite",
                ideal,
            )?;
        }
        Ok(Self {
            limiter: s.limiter,
            ideal: s.ideal,
            last_decision: s.last_decision,
            ..new
        })
    }
}

impl SimiGradController {
    /// The rule with this target cosine, rate and interval in steps.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless `gamma` and `rate` lie in (0, 1) and `interval` is at least 1.
    pub fn new(gamma: f64, rate: f64, interval: u64, limits: BatchLimits) -> Result<Self> {
        require(
            gamma > 0.0 && gamma < 1.0,
            "similarity target",
            "in (0, 1)",
            gamma,
        )?;
        require(
            rate > 0.0 && rate < 1.0,
            "rate of change",
            "in (0, 1)",
            rate,
        )?;
        require(interval > 0, "interval", "at least 1 step", interval)?;
        Ok(Self {
            gamma,
            rate,
            interval,
            limiter: Limiter::new(limits),
            ideal: None,
            last_decision: None,
        })
    }
}

impl BatchSizeController for SimiGradController {
    fn decide(&mut self, estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision {
        let ideal = match self.ideal {
            Some((ideal, decided)) if decided == state.batch_size => ideal,
            // The first decision, or someone else changed the batch.
            _ => state.batch_size as f64,
        };
        if self
            .last_decision
            .is_some_and(|last| state.step < last.saturating_add(self.interval))
        {
            return self.limiter.hold(ideal, state, DecisionReason::Interval);
        }
        let cosine = estimate.half_cosine;
        if cosine.is_nan() {
            return self
                .limiter
                .hold(f64::NAN, state, DecisionReason::NoEstimate);
        }
        self.last_decision = Some(state.step);
        let factor = if cosine < self.gamma {
            1.0 + self.rate
        } else {
            1.0 - self.rate
        };
        let target = ideal * factor;
        let decision = self.limiter.decide(target, state);
        // Held inside the bounds, or it would take as long to come back as it ran away.
        let limits = self.limiter.limits;
        let kept = target.clamp(limits.smallest() as f64, limits.largest() as f64);
        self.ideal = Some((kept, decision.batch_size));
        decision
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::tests::estimate;

    #[test]
    fn small_rates_add_up_and_the_interval_is_kept() {
        let limits = BatchLimits::new(32, 96, 32).unwrap();
        let mut controller = SimiGradController::new(0.5, 0.1, 10, limits).unwrap();
        let noisy = estimate(1.0, 1e4, 64, 4);
        let mut batch = 32;
        let mut history = Vec::new();
        for step in 0..100 {
            let decision = controller.decide(&noisy, &TrainingState::new(step, 0, batch));
            batch = decision.batch_size;
            if decision.changed {
                history.push((step, batch));
            }
        }
        // 32 x 1.1^5 = 51.5 rounds to 64 at the fifth decision, 1.1^10 to 96 at the tenth.
        assert_eq!(history, [(40, 64), (90, 96)]);
        let clear = estimate(1.0, 1e-4, 64, 4);
        let decision = controller.decide(&clear, &TrainingState::new(100, 0, 96));
        assert!(decision.target < 96.0);
    }
}
