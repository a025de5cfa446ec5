//! One batch size.

use serde::{Deserialize, Serialize};

use super::{BatchLimits, BatchSizeController, BatchSizeDecision, Limiter, TrainingState};
use crate::error::{Error, Result, require};
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
#[serde(try_from = "Saved")]
pub struct FixedController {
    limiter: Limiter,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct Saved {
    limiter: Limiter,
}

impl TryFrom<Saved> for FixedController {
    type Error = Error;

    fn try_from(s: Saved) -> Result<Self> {
        let (smallest, largest) = (s.limiter.limits.smallest(), s.limiter.limits.largest());
        require(
            smallest == largest,
            "bounds of a fixed batch",
            "equal",
            format!("{smallest} and {largest}"),
        )?;
        Ok(Self { limiter: s.limiter })
    }
}

impl FixedController {
    /// A controller that always decides on `batch_size`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for 0.
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
