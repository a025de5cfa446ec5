//! Batch sizes that are planned ahead.

use serde::{Deserialize, Serialize};

use super::{BatchLimits, BatchSizeController, BatchSizeDecision, Limiter, TrainingState};
use crate::error::{Error, Result, require};
use crate::estimate::GradientEstimate;

/// A plan for the batch size, whatever the gradient says: by steps, or the token ramp that large language models use.
///
/// # Examples
/// ```
/// use adaptive_batch::{BatchLimits, ScheduleController};
/// let limits = BatchLimits::new(32, 1_024, 32)?;
/// let by_step = ScheduleController::steps(&[(0, 64), (1_000, 128), (4_000, 512)], limits)?;
/// // From 32 to 1,024 samples, linearly over the first 10^9 tokens.
/// let ramp = ScheduleController::token_ramp(32, 1_024, 1_000_000_000, limits)?;
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct ScheduleController {
    plan: Plan,
    limiter: Limiter,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct Saved {
    plan: Plan,
    limiter: Limiter,
}

impl TryFrom<Saved> for ScheduleController {
    type Error = Error;

    fn try_from(s: Saved) -> Result<Self> {
        let limits = s.limiter.limits;
        let new = match s.plan {
            Plan::Steps(stages) => Self::steps(&stages, limits)?,
            Plan::TokenRamp { from, to, tokens } => Self::token_ramp(from, to, tokens, limits)?,
        };
        Ok(Self {
            limiter: s.limiter,
            ..new
        })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Plan {
    /// (first step, batch), by step.
    Steps(Vec<(u64, u64)>),
    TokenRamp {
        from: u64,
        to: u64,
        tokens: u64,
    },
}

impl ScheduleController {
    /// Batch sizes by stages (first step, batch); before the first stage its batch holds too.
    ///
    /// # Errors
    /// [`Error::Parameter`] for no stage, steps that do not ascend, or a batch of 0.
    pub fn steps(stages: &[(u64, u64)], limits: BatchLimits) -> Result<Self> {
        require(
            !stages.is_empty(),
            "stages of the schedule",
            "at least one",
            0,
        )?;
        require(
            stages.iter().all(|s| s.1 > 0),
            "batch of a stage",
            "at least 1",
            0,
        )?;
        let ascending = stages.windows(2).all(|w| w[0].0 < w[1].0);
        require(
            ascending,
            "first steps of the stages",
            "ascending",
            format!("{stages:?}"),
        )?;
        Ok(Self {
            plan: Plan::Steps(stages.to_vec()),
            limiter: Limiter::new(limits),
        })
    }

    /// Batch sizes that go linearly from `from` to `to` over the first `tokens` tokens, as GPT-3 (Brown et al. 2020, appendix B) and Megatron-LM's
    /// batch ramp do it.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a batch or a number of tokens of 0.
    pub fn token_ramp(from: u64, to: u64, tokens: u64, limits: BatchLimits) -> Result<Self> {
        require(
            from > 0 && to > 0,
            "batch of the ramp",
            "at least 1",
            from.min(to),
        )?;
        require(tokens > 0, "tokens of the ramp", "at least 1", tokens)?;
        Ok(Self {
            plan: Plan::TokenRamp { from, to, tokens },
            limiter: Limiter::new(limits),
        })
    }

    fn target(&self, state: &TrainingState) -> f64 {
        match &self.plan {
            Plan::Steps(stages) => {
                let reached = stages.partition_point(|(first, _)| *first <= state.step);
                stages[reached.saturating_sub(1)].1 as f64
            }
            Plan::TokenRamp { from, to, tokens } => {
                let done = (state.tokens as f64 / *tokens as f64).min(1.0);
                *from as f64 + (*to as f64 - *from as f64) * done
            }
        }
    }
}

impl BatchSizeController for ScheduleController {
    fn decide(&mut self, _estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision {
        self.limiter.decide(self.target(state), state)
    }
}
