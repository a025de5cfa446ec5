//! Several forecasters as one.

use std::collections::VecDeque;

use super::{
    BatchForecast, DampedHolt, Forecaster, GaussianProcess, History, LARGEST_LOG, Persistence,
};
use crate::error::{Result, require};

/// Averages its members' forecasts in the log domain, weighted by the inverse of their recent absolute errors to the eighth power:
/// near-equals are averaged, which cancels some of their errors, and one that is a third worse has a tenth of the say. The first member is
/// the base line that the others have to beat while there are few observations: clearly where these are rough, barely where they are smooth.
///
/// # Examples
/// ```
/// use adaptive_batch::{Ensemble, Forecaster};
/// let mut forecaster = Ensemble::standard();
/// for epoch in 1..10u64 {
///     forecaster.observe(epoch, 100)?;
/// }
/// assert!((forecaster.forecast(&[10, 20])?[1].batch - 100.0).abs() < 1.0);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug)]
pub struct Ensemble {
    history: History,
    members: Vec<Member>,
    /// The newest observations in log units, by which roughness is judged.
    recent: VecDeque<f64>,
}

#[derive(Debug)]
struct Member {
    forecaster: Box<dyn Forecaster>,
    /// Discounted mean absolute error, in log units.
    error: f64,
}

/// Power of the inverse errors.
const POWER: i32 = 8;
/// Members after the first have to earn trust: after n observations their errors count `1 + (DOUBT r^2 / n)^2` times, with the
/// roughness r of the series.
const DOUBT: f64 = 10.0;
/// Observations by which roughness is judged.
const RECENT: usize = 8;
/// Ratio of the mean second to the mean first difference, in absolute values: sqrt(3) for noise around a level, sqrt(2) for
/// a random walk, near 0 for smooth growth. Here it counts as 1.
const ROUGH: f64 = 1.5;
/// Errors below this, in log units, are all alike.
const FLOOR: f64 = 1e-5;
/// Share of the newest error in the average: a memory of about ten observations.
const NEWEST: f64 = 0.1;

/// Logarithm of a member's forecast, which may come from outside of this crate: below 1 or not a number counts as 1.
fn log_batch_of(forecast: &BatchForecast) -> f64 {
    forecast.batch.max(1.0).ln().min(LARGEST_LOG)
}

impl Ensemble {
    /// [`Persistence`], [`DampedHolt`] and [`GaussianProcess`].
    pub fn standard() -> Self {
        let members: [Box<dyn Forecaster>; 3] = [
            Box::new(Persistence::new()),
            Box::new(DampedHolt::new()),
            Box::new(GaussianProcess::new()),
        ];
        Self::from_members(members)
    }

    /// An ensemble of these forecasters, which must have seen the same observations as each other, or none.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for no member.
    pub fn new(members: impl IntoIterator<Item = Box<dyn Forecaster>>) -> Result<Self> {
        let ensemble = Self::from_members(members);
        require(
            !ensemble.members.is_empty(),
            "members of an ensemble",
            "at least one",
            0,
        )?;
        Ok(ensemble)
    }

    fn from_members(members: impl IntoIterator<Item = Box<dyn Forecaster>>) -> Self {
        let members = members
            .into_iter()
            .map(|forecaster| Member {
                forecaster,
                error: 0.0,
            })
            .collect();
        Self {
            history: History::default(),
            members,
            recent: VecDeque::with_capacity(RECENT),
        }
    }

    /// Roughness of the newest observations; 1 while there are too few.
    fn roughness(&self) -> f64 {
        if self.recent.len() < 3 {
            return 1.0;
        }
        let differences =
            |values: &[f64]| -> Vec<f64> { values.windows(2).map(|w| w[1] - w[0]).collect() };
        let size =
            |values: &[f64]| values.iter().map(|v| v.abs()).sum::<f64>() / values.len() as f64;
        let values: Vec<f64> = self.recent.iter().copied().collect();
        let first = differences(&values);
        let second = differences(&first);
        size(&second) / (size(&first) + 1e-9) / ROUGH
    }

    /// The members' weights, in their order; they add up to 1.
    pub fn weights(&self) -> Vec<f64> {
        let seen = self.history.observations.max(1) as f64;
        let doubt = 1.0 + (DOUBT * self.roughness().powi(2) / seen).powi(2);
        let raw: Vec<f64> = self
            .members
            .iter()
            .enumerate()
            .map(|(i, m)| ((m.error + FLOOR) * if i == 0 { 1.0 } else { doubt }).powi(-POWER))
            .collect();
        let total: f64 = raw.iter().sum();
        raw.iter().map(|w| w / total).collect()
    }

    fn predict(&self, step: u64) -> Result<(f64, f64)> {
        let mut mean = 0.0;
        for (member, weight) in self.members.iter().zip(self.weights()) {
            for forecast in member.forecaster.forecast(&[step])? {
                mean += weight * log_batch_of(&forecast);
            }
        }
        Ok((mean, self.history.deviation(self.history.horizon(step))))
    }
}

impl Forecaster for Ensemble {
    fn observe(&mut self, step: u64, batch: u64) -> Result<()> {
        let log_batch = self.history.check(step, batch)?;
        let forecast = if self.history.last.is_some() {
            Some(self.predict(step)?)
        } else {
            None
        };
        let weight = (1.0 / self.history.observations.max(1) as f64).max(NEWEST);
        for member in &mut self.members {
            let forecasts = match forecast {
                Some(_) => member.forecaster.forecast(&[step])?,
                None => Vec::new(),
            };
            member.forecaster.observe(step, batch)?;
            for forecast in &forecasts {
                let error = (log_batch - log_batch_of(forecast)).abs();
                member.error += weight * (error - member.error);
            }
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(log_batch);
        self.history.learn(step, log_batch, forecast);
        Ok(())
    }

    fn forecast(&self, steps: &[u64]) -> Result<Vec<BatchForecast>> {
        let mut predictions = Vec::with_capacity(steps.len());
        if let Some((last, _)) = self.history.last
            && steps.iter().all(|step| *step > last)
        {
            for &step in steps {
                predictions.push(self.predict(step)?);
            }
        }
        let mut predictions = predictions.into_iter();
        self.history
            .forecast(steps, |_| predictions.next().unwrap_or_default())
    }
}
