//! Where the batch size is going: what a planner needs to know before it moves a job to other devices.
//!
//! All forecasters work on the logarithm of the batch, where growth by a factor is a line. Steps are whatever unit the
//! observations come in (optimizer steps, epochs); gaps may be uneven. Forecasts are medians, with an interval meant to hold the
//! batch in 80 % of all cases. Its width is learned online: every observation that falls outside of the interval forecast
//! for it widens the next ones, every one inside narrows them (Gibbs and Candes 2021, adaptive conformal inference, on the
//! scale of the interval).
//!
//! | forecaster | idea | cost of an observation |
//! |---|---|---|
//! | [`Persistence`] | it stays as it is: the base line | O(1) |
//! | [`DampedHolt`] | level and a trend that fades, parameters by recent error | O(1) |
//! | [`GaussianProcess`] | local level and trend with noise, exact, by marginal likelihood | O(1), bounded window |
//! | [`Ensemble`] | the others, weighted by their recent error | their sum |

mod ensemble;
mod gaussian_process;
mod holt;
mod persistence;

pub use ensemble::Ensemble;
pub use gaussian_process::GaussianProcess;
pub use holt::DampedHolt;
pub use persistence::Persistence;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, require};

/// Share of cases that an interval is meant to hold.
const COVERAGE: f64 = 0.8;
/// 80 % of a normal distribution lie within this many standard deviations.
const NORMAL_80: f64 = 1.2816;

/// Logarithm of the largest batch that can be observed: no forecast lies beyond it, and none below one sample.
const LARGEST_LOG: f64 = 64.0 * std::f64::consts::LN_2;

/// A forecast for one step, in samples; from 1 to 2^64.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchForecast {
    /// The step.
    pub step: u64,
    /// The median.
    pub batch: f64,
    /// Lower end of the 80 % interval.
    pub lower: f64,
    /// Upper end of the 80 % interval.
    pub upper: f64,
}

/// Forecasts the batch size from the sizes so far.
pub trait Forecaster: std::fmt::Debug + Send {
    /// Takes in the batch size at a step.
    ///
    /// # Errors
    /// [`Error::OutOfOrder`] unless the step lies after the one before, [`Error::Parameter`] for a batch of 0. Nothing
    /// changes then.
    fn observe(&mut self, step: u64, batch: u64) -> Result<()>;

    /// Forecasts the batch size at later steps.
    ///
    /// # Errors
    /// [`Error::TooFewObservations`] before the first observation, [`Error::OutOfOrder`] for a step that does not lie after the last one.
    fn forecast(&self, steps: &[u64]) -> Result<Vec<BatchForecast>>;
}

/// The part that all forecasters share: the order of observations, the typical gap, and the width of the interval.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SavedHistory")]
struct History {
    last: Option<(u64, f64)>,
    observations: usize,
    /// Average gap between observations, by which horizons are measured.
    gap: f64,
    /// Average squared error of the forecasts for the next observation, in log units.
    error_sq: f64,
    errors: usize,
    /// Logarithm of the factor on the interval that the coverage so far asks for.
    widen: f64,
}

/// Bound of `widen`, either way.
const LARGEST_WIDEN: f64 = 3.0;

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct SavedHistory {
    last: Option<(u64, f64)>,
    observations: usize,
    gap: f64,
    error_sq: f64,
    errors: usize,
    widen: f64,
}

impl TryFrom<SavedHistory> for History {
    type Error = Error;

    fn try_from(s: SavedHistory) -> Result<Self> {
        require(
            (s.observations > 0) == s.last.is_some() && s.errors <= s.observations,
            "saved observations",
            "above 0 with a last one, and at least the errors",
            format!(
                "{} with {:?} and {} errors",
                s.observations, s.last, s.errors
            ),
        )?;
        for (name, value) in [
            ("saved gap of observations", s.gap),
            ("saved squared error of forecasts", s.error_sq),
        ] {
            let ok = value >= 0.0 && value.is_finite();
            require(ok, name, "at least 0 and finite", value)?;
        }
        require(
            s.widen.abs() <= LARGEST_WIDEN,
            "saved width of forecasts",
            "in [-3, 3]",
            s.widen,
        )?;
        if let Some((_, log_batch)) = s.last {
            check_log(log_batch)?;
        }
        Ok(Self {
            last: s.last,
            observations: s.observations,
            gap: s.gap,
            error_sq: s.error_sq,
            errors: s.errors,
            widen: s.widen,
        })
    }
}

/// Refuses a saved logarithm that is not one of a batch.
fn check_log(log_batch: f64) -> Result<()> {
    require(
        (0.0..=LARGEST_LOG + 1e-9).contains(&log_batch),
        "saved logarithm of a batch",
        "from 0 to that of 2^64",
        log_batch,
    )
}

impl History {
    /// Checks an observation and returns it as a logarithm.
    fn check(&self, step: u64, batch: u64) -> Result<f64> {
        require(batch > 0, "observed batch", "at least 1", batch)?;
        match self.last {
            Some((last, _)) if step <= last => Err(Error::OutOfOrder { step, last }),
            _ => Ok((batch as f64).ln()),
        }
    }

    /// Elapsed gaps from the last observation to `step`.
    fn horizon(&self, step: u64) -> f64 {
        self.last.map_or(1.0, |(last, _)| {
            if self.gap > 0.0 {
                step.saturating_sub(last) as f64 / self.gap
            } else {
                1.0
            }
        })
    }

    /// Learns from the forecast (mean, standard deviation) that was made for this observation, then takes it in.
    fn learn(&mut self, step: u64, log_batch: f64, forecast: Option<(f64, f64)>) {
        if let Some((mean, deviation)) = forecast {
            let error = log_batch - mean;
            if self.errors > 0 {
                let inside = error.abs() <= deviation * self.widen.exp() * NORMAL_80;
                let rate = 0.25 / (1.0 + self.errors as f64 / 50.0);
                self.widen += rate * if inside { COVERAGE - 1.0 } else { COVERAGE };
                self.widen = self.widen.clamp(-LARGEST_WIDEN, LARGEST_WIDEN);
            }
            // The first errors count as they come, later ones fade over about ten.
            let weight = (1.0 / (self.errors as f64 + 1.0)).max(0.1);
            self.error_sq += weight * (error * error - self.error_sq);
            self.errors = self.errors.saturating_add(1);
        }
        if let Some((last, _)) = self.last {
            let gap = (step - last) as f64;
            let weight = (1.0 / self.observations as f64).max(0.1);
            self.gap += weight * (gap - self.gap);
        }
        self.last = Some((step, log_batch));
        self.observations = self.observations.saturating_add(1);
    }

    /// Standard deviation of a forecast `horizon` gaps ahead by past errors alone.
    fn deviation(&self, horizon: f64) -> f64 {
        // Before the first error nothing is known: a factor of two either way.
        let one = if self.errors == 0 {
            0.5
        } else {
            self.error_sq.sqrt().max(1e-3)
        };
        one * horizon.max(1.0).sqrt()
    }

    /// Runs `predict` (mean and standard deviation by horizon, in log units) for each step.
    fn forecast(
        &self,
        steps: &[u64],
        mut predict: impl FnMut(u64) -> (f64, f64),
    ) -> Result<Vec<BatchForecast>> {
        let Some((last, _)) = self.last else {
            return Err(Error::TooFewObservations { needed: 1, got: 0 });
        };
        steps
            .iter()
            .map(|&step| {
                if step <= last {
                    return Err(Error::OutOfOrder { step, last });
                }
                let (mean, deviation) = predict(step);
                let batch = |log_batch: f64| log_batch.clamp(0.0, LARGEST_LOG).exp();
                let half = NORMAL_80 * deviation * self.widen.exp();
                Ok(BatchForecast {
                    step,
                    batch: batch(mean),
                    lower: batch(mean - half),
                    upper: batch(mean + half),
                })
            })
            .collect()
    }
}
