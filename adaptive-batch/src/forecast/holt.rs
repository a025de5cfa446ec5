//! Level and fading trend.

use serde::{Deserialize, Serialize};

use super::{BatchForecast, Forecaster, History};
use crate::error::{Error, Result, require};

/// Holt's linear trend with damping (Gardner and McKenzie 1985) on the logarithm of the batch.
///
/// ```text
/// forecast(h) = level + (phi + phi^2 + .. + phi^h) trend
/// level <- forecast(1) + alpha error        trend <- phi trend + alpha beta error
/// ```
///
/// All 48 combinations of a grid of (alpha, beta, phi) run side by side; the one with the smallest recent error forecasts. Errors are
/// taken relative to the mean over all of them at the same step, or one early jump would decide for a long time.
///
/// # Examples
/// ```
/// use adaptive_batch::{DampedHolt, Forecaster};
/// let mut forecaster = DampedHolt::new();
/// for epoch in 0..12u64 {
///     forecaster.observe(epoch, 64 << epoch)?;
/// }
/// let next = forecaster.forecast(&[12])?[0];
/// assert!(next.batch > 1.7 * f64::from(64 << 11));
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct DampedHolt {
    history: History,
    candidates: Vec<Candidate>,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct Saved {
    history: History,
    candidates: Vec<Candidate>,
}

impl TryFrom<Saved> for DampedHolt {
    type Error = Error;

    fn try_from(s: Saved) -> Result<Self> {
        require(
            !s.candidates.is_empty() && s.candidates.iter().all(Candidate::is_sound),
            "saved candidates",
            "at least one, alpha and beta in [0, 1], phi in (0, 1), and states that a batch can have",
            format!("{:?}", s.candidates),
        )?;
        Ok(Self {
            history: s.history,
            candidates: s.candidates,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Candidate {
    alpha: f64,
    beta: f64,
    phi: f64,
    level: f64,
    trend: f64,
    /// Discounted mean absolute error, each relative to the mean error of all candidates.
    error: f64,
}

impl Candidate {
    /// Whether the parameters lie in their domain and the state is one that observations can lead to.
    fn is_sound(&self) -> bool {
        let share = |x: f64| (0.0..=1.0).contains(&x);
        share(self.alpha)
            && share(self.beta)
            && self.phi > 0.0
            && self.phi < 1.0
            && self.level.abs() < 1e100
            && self.trend.abs() < 1e100
            && (0.0..1e100).contains(&self.error)
    }

    fn predict(&self, horizon: f64) -> f64 {
        // The geometric series for whole and broken horizons alike.
        let sum = self.phi * (1.0 - self.phi.powf(horizon)) / (1.0 - self.phi);
        self.level + sum * self.trend
    }

    fn update(&mut self, horizon: f64, log_batch: f64, weight: f64, typical: f64) {
        let forecast = self.predict(horizon);
        let error = log_batch - forecast;
        self.error += weight * (error.abs() / typical - self.error);
        self.level = forecast + self.alpha * error;
        self.trend = self.phi.powf(horizon) * self.trend
            + self.alpha * self.beta * error / horizon.max(1e-9);
    }
}

impl Default for DampedHolt {
    fn default() -> Self {
        let mut candidates = Vec::new();
        for alpha in [0.4, 0.6, 0.8, 1.0] {
            for beta in [0.0, 0.1, 0.3, 0.6] {
                for phi in [0.7, 0.85, 0.95] {
                    candidates.push(Candidate {
                        alpha,
                        beta,
                        phi,
                        level: 0.0,
                        trend: 0.0,
                        error: 0.0,
                    });
                }
            }
        }
        Self {
            history: History::default(),
            candidates,
        }
    }
}

impl DampedHolt {
    /// A forecaster that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    fn best(&self) -> &Candidate {
        self.candidates
            .iter()
            .min_by(|a, b| a.error.total_cmp(&b.error))
            .unwrap_or(&self.candidates[0])
    }

    fn predict(&self, step: u64) -> Option<(f64, f64)> {
        self.history.last?;
        let horizon = self.history.horizon(step);
        Some((
            self.best().predict(horizon),
            self.history.deviation(horizon),
        ))
    }
}

impl Forecaster for DampedHolt {
    fn observe(&mut self, step: u64, batch: u64) -> Result<()> {
        let log_batch = self.history.check(step, batch)?;
        let forecast = self.predict(step);
        let horizon = self.history.horizon(step);
        let seen = self.history.observations;
        let errors = self
            .candidates
            .iter()
            .map(|c| (log_batch - c.predict(horizon)).abs());
        let typical = errors.sum::<f64>() / self.candidates.len() as f64 + 1e-9;
        for candidate in &mut self.candidates {
            if seen == 0 {
                candidate.level = log_batch;
            } else {
                let weight = (1.0 / seen as f64).max(0.05);
                candidate.update(horizon, log_batch, weight, typical);
            }
        }
        self.history.learn(step, log_batch, forecast);
        Ok(())
    }

    fn forecast(&self, steps: &[u64]) -> Result<Vec<BatchForecast>> {
        self.history
            .forecast(steps, |step| self.predict(step).unwrap_or_default())
    }
}
