//! It stays as it is.

use serde::{Deserialize, Serialize};

use super::{BatchForecast, Forecaster, History};
use crate::error::Result;

/// The last batch size for ever: what any other forecaster has to beat.
///
/// # Examples
/// ```
/// use adaptive_batch::{Forecaster, Persistence};
/// let mut forecaster = Persistence::new();
/// forecaster.observe(1, 64)?;
/// assert!((forecaster.forecast(&[2])?[0].batch - 64.0).abs() < 1e-9);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Persistence {
    history: History,
}

impl Persistence {
    /// A forecaster that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    fn predict(&self, step: u64) -> Option<(f64, f64)> {
        let (_, last) = self.history.last?;
        Some((last, self.history.deviation(self.history.horizon(step))))
    }
}

impl Forecaster for Persistence {
    fn observe(&mut self, step: u64, batch: u64) -> Result<()> {
        let log_batch = self.history.check(step, batch)?;
        let forecast = self.predict(step);
        self.history.learn(step, log_batch, forecast);
        Ok(())
    }

    fn forecast(&self, steps: &[u64]) -> Result<Vec<BatchForecast>> {
        self.history
            .forecast(steps, |step| self.predict(step).unwrap_or_default())
    }
}
