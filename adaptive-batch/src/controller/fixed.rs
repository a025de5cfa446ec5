//! One batch size.

use serde::{Deserialize, Serialize};

use super::{BatchLimits, BatchSizeController, BatchSizeDecision, Limiter, TrainingState};
use crate::error::Result;
use crate::estimate::GradientEstimate;

/// Keeps one batch size: the base line that every other controller is compared with.
///
/// # Examples
/// ```
/// use adaptive_batch::FixedController;
/// assert_eq!(FixedController::new(256)?.batch_size(), 256);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FixedController {
    limiter: Limiter,
}

impl FixedController {
    /// A controller that always decides on `batch_size`.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for 0.
    pub fn new(batch_size: u64) -> Result<Self> {
        let limits = BatchLimits::new(batch_size, batch_size, batch_size.max(1))?;
        Ok(Self {
            limiter: Limiter::new(limits),
        })
    }

    /// The batch size.
    pub const fn batch_size(&self) -> u64 {
        self.limiter.limits.smallest()
    }
}

impl BatchSizeController for FixedController {
    fn decide(&mut self, _estimate: &GradientEstimate, state: &TrainingState) -> BatchSizeDecision {
        self.limiter.decide(self.batch_size() as f64, state)
    }
}
