//! Exact Gaussian-process regression.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{BatchForecast, Forecaster, History, check_log};
use crate::error::{Error, Result, require};

/// Observations that the exact solution uses at most: bounds an observation to `GRID` Cholesky factors of this size.
const WINDOW: usize = 20;
/// Variances of noise and of the trend, each relative to the variance of the level's steps.
const NOISE: [f64; 5] = [0.03, 0.3, 1.0, 4.0, 16.0];
/// A change beyond this many median changes of the window counts as one of that size.
const LARGEST_CHANGE: f64 = 4.0;
const TREND: [f64; 4] = [0.0, 0.01, 0.1, 1.0];

/// A Gaussian process on the logarithm of the batch over time t, measured in gaps.
///
/// Kernel: a Wiener process for the level, an integrated Wiener process for the trend, and noise,
///
/// ```text
/// k(s, t) = v [ c + min(s, t) + q m^2 (3 M - m) / 6 + r delta(s, t) ],   m = min(s, t), M = max(s, t)
/// ```
///
/// with a large constant c for the unknown start. (A stationary kernel would pull every forecast back to a mean that a growing
/// batch does not have.) r and q are those of a grid of 20 that maximise the marginal likelihood (Rasmussen and Williams 2006,
/// eq. 5.8), with the best v in closed form. Only the last 20 observations are used, so an observation costs 20
/// factorisations of a 20 x 20 matrix. Changes between neighbours are clipped at four times their median first: a jump at the start of
/// a run would pass for a restless level, under which no noise is seen.
///
/// # Examples
/// ```
/// use adaptive_batch::{Forecaster, GaussianProcess};
/// let mut forecaster = GaussianProcess::new();
/// for epoch in 1..20u64 {
///     forecaster.observe(epoch, 100 + 10 * epoch + epoch % 2)?;
/// }
/// let next = forecaster.forecast(&[20])?[0];
/// assert!(next.lower < 300.0 && next.batch > 285.0 && next.upper > next.batch);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct GaussianProcess {
    history: History,
    window: VecDeque<(u64, f64)>,
    /// Follows from the other two, so it is not stored.
    #[serde(skip)]
    fit: Option<Fit>,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct Saved {
    history: History,
    window: VecDeque<(u64, f64)>,
}

impl TryFrom<Saved> for GaussianProcess {
    type Error = Error;

    fn try_from(s: Saved) -> Result<Self> {
        let steps = || s.window.iter().map(|(step, _)| *step);
        require(
            s.window.len() == s.history.observations.min(WINDOW)
                && steps().zip(steps().skip(1)).all(|(a, b)| a < b)
                && s.window.back() == s.history.last.as_ref(),
            "saved window",
            "the newest observations, in order, up to the last",
            format!("{:?} with {:?}", s.window, s.history),
        )?;
        for (_, log_batch) in &s.window {
            check_log(*log_batch)?;
        }
        let mut forecaster = Self {
            history: s.history,
            window: s.window,
            fit: None,
        };
        forecaster.refit();
        Ok(forecaster)
    }
}

/// The solution for the window, with the hyper-parameters of the greatest marginal likelihood.
#[derive(Debug, Clone, PartialEq)]
struct Fit {
    noise: f64,
    trend: f64,
    /// v.
    scale: f64,
    /// Time zero, one gap before the first observation of the window, and the gap.
    origin: f64,
    gap: f64,
    times: Vec<f64>,
    mean: f64,
    /// Lower triangle of the Cholesky factor, row by row.
    factor: Vec<f64>,
    /// K^-1 (y - mean).
    weights: Vec<f64>,
}

fn kernel(trend: f64, s: f64, t: f64) -> f64 {
    let (m, large) = (s.min(t), s.max(t));
    100.0 + m + trend * m * m * (3.0 * large - m) / 6.0
}

/// The window with its changes clipped, summed up backwards from the newest observation, which stays as it is.
fn clipped(window: &VecDeque<(u64, f64)>) -> VecDeque<(u64, f64)> {
    let changes: Vec<f64> = window
        .iter()
        .zip(window.iter().skip(1))
        .map(|((_, before), (_, after))| after - before)
        .collect();
    let mut sizes: Vec<f64> = changes.iter().map(|c| c.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let largest = LARGEST_CHANGE * sizes.get(sizes.len() / 2).copied().unwrap_or(0.0).max(1e-9);
    let mut level = window.back().map_or(0.0, |(_, y)| *y);
    let mut result = VecDeque::with_capacity(window.len());
    let changes_back = changes.iter().rev().map(Some).chain([None]);
    for ((step, _), change) in window.iter().rev().zip(changes_back) {
        result.push_front((*step, level));
        level -= change.map_or(0.0, |c| c.clamp(-largest, largest));
    }
    result
}

impl Fit {
    /// Solves the window for one pair of hyper-parameters; returns the fit and its log marginal likelihood.
    fn new(window: &VecDeque<(u64, f64)>, gap: f64, noise: f64, trend: f64) -> Option<(Self, f64)> {
        let n = window.len();
        let origin = window.front()?.0 as f64 - gap;
        let times: Vec<f64> = window
            .iter()
            .map(|(step, _)| (*step as f64 - origin) / gap)
            .collect();
        let mean = window.iter().map(|(_, y)| y).sum::<f64>() / n as f64;
        let mut factor = vec![0.0; n * (n + 1) / 2];
        let row = |i: usize| i * (i + 1) / 2;
        let mut log_det = 0.0;
        for i in 0..n {
            for j in 0..=i {
                let mut sum = kernel(trend, times[i], times[j]);
                for k in 0..j {
                    sum -= factor[row(i) + k] * factor[row(j) + k];
                }
                if i == j {
                    let pivot = sum + noise;
                    if pivot <= 0.0 {
                        return None;
                    }
                    factor[row(i) + i] = pivot.sqrt();
                    log_det += pivot.ln();
                } else {
                    factor[row(i) + j] = sum / factor[row(j) + j];
                }
            }
        }
        let centred: Vec<f64> = window.iter().map(|(_, y)| y - mean).collect();
        let mut fit = Self {
            noise,
            trend,
            scale: 1.0,
            origin,
            gap,
            times,
            mean,
            factor,
            weights: Vec::new(),
        };
        let half = fit.solve_lower(centred);
        let quadratic: f64 = half.iter().map(|x| x * x).sum();
        fit.scale = (quadratic / n as f64).max(1e-8);
        fit.weights = fit.solve_upper(half);
        let likelihood = -0.5 * (n as f64 * fit.scale.ln() + log_det);
        Some((fit, likelihood))
    }

    fn row(i: usize) -> usize {
        i * (i + 1) / 2
    }

    fn solve_lower(&self, mut b: Vec<f64>) -> Vec<f64> {
        for i in 0..b.len() {
            for k in 0..i {
                b[i] -= self.factor[Self::row(i) + k] * b[k];
            }
            b[i] /= self.factor[Self::row(i) + i];
        }
        b
    }

    fn solve_upper(&self, mut b: Vec<f64>) -> Vec<f64> {
        for i in (0..b.len()).rev() {
            for k in i + 1..b.len() {
                b[i] -= self.factor[Self::row(k) + i] * b[k];
            }
            b[i] /= self.factor[Self::row(i) + i];
        }
        b
    }

    /// Mean and standard deviation of an observation at `step`.
    fn predict(&self, step: u64) -> (f64, f64) {
        let t = (step as f64 - self.origin) / self.gap;
        let cross: Vec<f64> = self
            .times
            .iter()
            .map(|&s| kernel(self.trend, s, t))
            .collect();
        let mean = self.mean
            + cross
                .iter()
                .zip(&self.weights)
                .map(|(k, w)| k * w)
                .sum::<f64>();
        let explained: f64 = self.solve_lower(cross).iter().map(|x| x * x).sum();
        let variance = kernel(self.trend, t, t) + self.noise - explained;
        (mean, (self.scale * variance.max(1e-12)).sqrt())
    }
}

impl GaussianProcess {
    /// A forecaster that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    fn refit(&mut self) {
        // Two hyper-parameters and a scale want a few points.
        if self.window.len() < 4 {
            return;
        }
        let gap = self.history.gap.max(1e-9);
        let window = clipped(&self.window);
        self.fit = NOISE
            .iter()
            .flat_map(|&noise| TREND.iter().map(move |&trend| (noise, trend)))
            .filter_map(|(noise, trend)| Fit::new(&window, gap, noise, trend))
            .filter(|(_, likelihood)| likelihood.is_finite())
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(fit, _)| fit);
    }

    fn predict(&self, step: u64) -> Option<(f64, f64)> {
        let (_, last) = self.history.last?;
        Some(match &self.fit {
            Some(fit) => fit.predict(step),
            None => (last, self.history.deviation(self.history.horizon(step))),
        })
    }
}

impl Forecaster for GaussianProcess {
    fn observe(&mut self, step: u64, batch: u64) -> Result<()> {
        let log_batch = self.history.check(step, batch)?;
        let forecast = self.predict(step);
        self.history.learn(step, log_batch, forecast);
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back((step, log_batch));
        self.refit();
        Ok(())
    }

    fn forecast(&self, steps: &[u64]) -> Result<Vec<BatchForecast>> {
        self.history
            .forecast(steps, |step| self.predict(step).unwrap_or_default())
    }
}
