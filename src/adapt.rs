//! From measured statistics to the next batch size and learning rate.

use crate::error::Error;
use crate::measure::Measured;
use adaptive_batch::{
    BatchSizeController, BatchSizeDecision, DecisionReason, EmaEstimator, GradientEstimate,
    LearningRate, TrainingState,
};

/// A decision, with what it was taken on.
#[derive(Debug)]
pub(crate) struct Decision {
    pub(crate) from_batch: usize,
    pub(crate) to_batch: usize,
    pub(crate) estimate: GradientEstimate,
    pub(crate) reason: String,
}

/// Smooths the measurements, asks the controller, keeps the batch size and the learning rate that follows it.
#[derive(Debug)]
pub(crate) struct Adaptation {
    pub(crate) measured: Measured,
    pub(crate) estimator: EmaEstimator,
    pub(crate) estimate: Option<GradientEstimate>,
    pub(crate) controller: Box<dyn BatchSizeController>,
    pub(crate) learning_rate: LearningRate,
    /// Samples over which the learning rate rises linearly from zero.
    pub(crate) warmup_samples: u64,
    /// Steps between decisions.
    pub(crate) interval: u64,
    /// The controller's batch size. The last step of a run may use another one.
    pub(crate) batch: usize,
}

impl Adaptation {
    /// The rate of a step that begins after `seen` samples.
    pub(crate) fn learning_rate(&self, seen: u64) -> f64 {
        let done = seen + self.batch as u64;
        let warmup = if done >= self.warmup_samples {
            1.0
        } else {
            done as f64 / self.warmup_samples as f64
        };
        warmup * self.learning_rate.at(seen)
    }

    /// Takes in what the ranks gathered in the step that has just been committed. A step of a single micro-batch tells nothing
    /// about noise; the estimate stays as it was.
    pub(crate) fn observe(&mut self) -> Result<(), Error> {
        if let Some(stats) = self.measured.take()
            && stats.micro_batches() > 1
        {
            self.estimate = Some(self.estimator.observe(&stats)?);
        }
        Ok(())
    }

    /// The decision that is due after `step` steps and `samples` samples; `None` between the intervals and before the first estimate.
    ///
    /// The clock is not consulted: equal measurements give equal decisions.
    pub(crate) fn decide(&mut self, step: u64, samples: u64) -> Result<Option<Decision>, Error> {
        let Some(estimate) = self.estimate.filter(|_| step.is_multiple_of(self.interval)) else {
            return Ok(None);
        };
        let state = TrainingState::new(step, samples, self.batch as u64);
        let decision = self.controller.decide(&estimate, &state);
        let from_batch = std::mem::replace(&mut self.batch, decision.batch_size as usize);
        self.learning_rate
            .set_batch(decision.batch_size, samples, Some(&estimate))?;
        Ok(Some(Decision {
            from_batch,
            to_batch: self.batch,
            estimate,
            reason: explain(&decision),
        }))
    }
}

/// The controller's reason in words.
fn explain(decision: &BatchSizeDecision) -> String {
    let target = decision.target;
    match decision.reason {
        DecisionReason::Grow => format!("grow towards {target:.0}"),
        DecisionReason::Shrink => format!("shrink towards {target:.0}"),
        DecisionReason::OnTarget => "on target".to_owned(),
        DecisionReason::Hysteresis => format!("target {target:.0} is within the hysteresis"),
        DecisionReason::CoolDown => {
            format!("target {target:.0}, but the last change is too recent")
        }
        DecisionReason::Interval => "the controller's interval has not passed".to_owned(),
        DecisionReason::AtMaximum => format!("target {target:.0} is above the upper bound"),
        DecisionReason::AtMinimum => format!("target {target:.0} is below the lower bound"),
        DecisionReason::OutOfLimits => "the batch in use was out of limits".to_owned(),
        DecisionReason::NoEstimate => "the estimate says nothing".to_owned(),
        other => format!("{other:?}"),
    }
}
