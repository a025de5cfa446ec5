//! The learning rate that belongs to a batch size.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, require};
use crate::estimate::GradientEstimate;

/// How the learning rate follows the batch size B, from a rate that was tuned at a base batch B0; S = B / B0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[non_exhaustive]
pub enum ScalingRule {
    /// Factor 1.
    None,
    /// Factor S (Goyal et al. 2017): for SGD far below the noise scale.
    Linear,
    /// Factor sqrt(S) (Krizhevsky 2014; for Adam: Malladi et al. 2022): keeps the variance of the update.
    #[default]
    Sqrt,
    /// Factor r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2), the gain of AdaScale (Johnson et al., ICML 2020, eq. 3), with
    /// sigma^2 = tr / B0 the variance of the gradient at the base batch and mu^2 = |G|^2. Between 1 and S: S while noise
    /// rules, 1 once it is gone. One step at B counts for r steps of the base schedule.
    AdaScale,
    /// Factor sqrt(S), and a linear warm-up over `warmup_epochs` x S epochs (LEGW: You et al. 2019, "Large-batch training
    /// for LSTM and beyond"), with the warm-up of the base batch.
    Legw {
        /// Epochs of warm-up at the base batch.
        warmup_epochs: f64,
    },
}

impl ScalingRule {
    /// Factor on the learning rate (without any warm-up) at `batch`, for a rate tuned at `base_batch`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a batch of 0, and for AdaScale without an estimate.
    ///
    /// # Examples
    /// ```
    /// use adaptive_batch::ScalingRule;
    /// assert_eq!(ScalingRule::Sqrt.factor(64, 256, None)?, 2.0);
    /// assert_eq!(ScalingRule::Linear.factor(64, 256, None)?, 4.0);
    /// # Ok::<(), adaptive_batch::Error>(())
    /// ```
    pub fn factor(
        self,
        base_batch: u64,
        batch: u64,
        estimate: Option<&GradientEstimate>,
    ) -> Result<f64> {
        require(base_batch > 0, "base batch", "at least 1", base_batch)?;
        require(batch > 0, "batch", "at least 1", batch)?;
        let s = batch as f64 / base_batch as f64;
        Ok(match self {
            Self::None => 1.0,
            Self::Linear => s,
            Self::Sqrt | Self::Legw { .. } => s.sqrt(),
            Self::AdaScale => {
                let estimate = estimate.ok_or_else(|| Error::Parameter {
                    name: "gradient estimate",
                    expected: "given: AdaScale's gain depends on the noise",
                    got: "none".to_owned(),
                })?;
                adascale_gain(s, estimate, base_batch)
            }
        })
    }

    /// Epochs of warm-up that belong to `batch`; 0 but for LEGW.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a batch of 0, or base epochs of warm-up that are negative or not finite.
    pub fn warmup_epochs(self, base_batch: u64, batch: u64) -> Result<f64> {
        require(base_batch > 0, "base batch", "at least 1", base_batch)?;
        require(batch > 0, "batch", "at least 1", batch)?;
        self.check()?;
        Ok(match self {
            Self::Legw { warmup_epochs } => warmup_epochs * batch as f64 / base_batch as f64,
            _ => 0.0,
        })
    }

    fn check(self) -> Result<()> {
        match self {
            Self::Legw { warmup_epochs } => require(
                warmup_epochs >= 0.0 && warmup_epochs.is_finite(),
                "warm-up epochs",
                "at least 0 and finite",
                warmup_epochs,
            ),
            _ => Ok(()),
        }
    }
}

fn adascale_gain(s: f64, estimate: &GradientEstimate, base_batch: u64) -> f64 {
    let sigma_sq = estimate.variance / base_batch as f64;
    // An unbiased |G|^2 may be negative: then all is noise and the gain is S.
    let mu_sq = estimate.grad_sq_norm.max(0.0);
    if sigma_sq + mu_sq > 0.0 {
        (sigma_sq + mu_sq) / (sigma_sq / s + mu_sq)
    } else {
        1.0
    }
}

/// The learning rate over a run: a [`ScalingRule`], with a warm-up at the start and after every jump of the batch.
///
/// After a change of the batch the factor moves linearly, in samples seen, from where it was to where the rule wants it. Adaptive
/// batches jump by factors that would make the rate of an abrupt rule overshoot.
///
/// # Examples
/// ```
/// use adaptive_batch::{LearningRate, ScalingRule};
/// let mut rate = LearningRate::new(0.1, 64, ScalingRule::Sqrt)?.jump_warmup(1_000);
/// rate.set_batch(64, 0, None)?;
/// assert_eq!(rate.at(0), 0.1);
/// rate.set_batch(256, 5_000, None)?;
/// assert_eq!(rate.at(5_000), 0.1);
/// assert!((rate.at(5_500) - 0.15).abs() < 1e-12);
/// assert_eq!(rate.at(6_000), 0.2);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SavedRate")]
pub struct LearningRate {
    base_rate: f64,
    base_batch: u64,
    rule: ScalingRule,
    jump_warmup: u64,
    epoch_samples: Option<u64>,
    /// Factor at the start of the ramp, and where the ramp starts, in samples.
    from: f64,
    since: u64,
    /// Factor at the end of the ramp, and its length.
    to: f64,
    length: f64,
    batch: u64,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct SavedRate {
    base_rate: f64,
    base_batch: u64,
    rule: ScalingRule,
    jump_warmup: u64,
    epoch_samples: Option<u64>,
    from: f64,
    since: u64,
    to: f64,
    length: f64,
    batch: u64,
}

impl TryFrom<SavedRate> for LearningRate {
    type Error = Error;

    fn try_from(s: SavedRate) -> Result<Self> {
        let mut rate = Self::new(s.base_rate, s.base_batch, s.rule)?.jump_warmup(s.jump_warmup);
        if let Some(samples) = s.epoch_samples {
            rate = rate.start_warmup(samples)?;
        }
        require(s.batch > 0, "saved batch", "at least 1", s.batch)?;
        for (name, value) in [
            ("saved factor at the start of a warm-up", s.from),
            ("saved factor at the end of a warm-up", s.to),
            ("saved length of a warm-up", s.length),
        ] {
            let ok = value >= 0.0 && value.is_finite();
            require(ok, name, "at least 0 and finite", value)?;
        }
        Ok(Self {
            from: s.from,
            since: s.since,
            to: s.to,
            length: s.length,
            batch: s.batch,
            ..rate
        })
    }
}

impl LearningRate {
    /// The rate `base_rate` at `base_batch`, changed by `rule` at other sizes.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless the rate is positive and finite and the batch at least 1.
    pub fn new(base_rate: f64, base_batch: u64, rule: ScalingRule) -> Result<Self> {
        require(
            base_rate > 0.0 && base_rate.is_finite(),
            "base learning rate",
            "positive and finite",
            base_rate,
        )?;
        require(base_batch > 0, "base batch", "at least 1", base_batch)?;
        rule.check()?;
        Ok(Self {
            base_rate,
            base_batch,
            rule,
            jump_warmup: 0,
            epoch_samples: None,
            from: 1.0,
            since: 0,
            to: 1.0,
            length: 0.0,
            batch: base_batch,
        })
    }

    /// Samples over which the factor moves after a jump of the batch; 0 by default.
    #[must_use]
    pub const fn jump_warmup(mut self, samples: u64) -> Self {
        self.jump_warmup = samples;
        self
    }

    /// Starts with LEGW's warm-up from 0, whose length follows the batch; needs the samples of an epoch.
    ///
    /// # Errors
    /// [`Error::Parameter`] for an epoch of 0 samples.
    pub fn start_warmup(mut self, epoch_samples: u64) -> Result<Self> {
        require(
            epoch_samples > 0,
            "samples of an epoch",
            "at least 1",
            epoch_samples,
        )?;
        self.epoch_samples = Some(epoch_samples);
        Ok(self)
    }

    /// Tells the batch in use from `samples` seen on (and, for AdaScale, the newest estimate; call it at every estimate).
    ///
    /// # Errors
    /// As [`ScalingRule::factor`]; nothing changes then.
    pub fn set_batch(
        &mut self,
        batch: u64,
        samples: u64,
        estimate: Option<&GradientEstimate>,
    ) -> Result<()> {
        let to = self.rule.factor(self.base_batch, batch, estimate)?;
        let jumped = batch != self.batch;
        let here = self.factor(samples);
        self.batch = batch;
        if samples == 0 {
            (self.from, self.to, self.length, self.since) = (to, to, 0.0, 0);
        } else if jumped {
            (self.from, self.to, self.length, self.since) =
                (here, to, self.jump_warmup as f64, samples);
        } else {
            self.to = to;
        }
        Ok(())
    }

    /// The learning rate after `samples` samples.
    pub fn at(&self, samples: u64) -> f64 {
        self.base_rate * self.factor(samples) * self.warmup(samples)
    }

    fn factor(&self, samples: u64) -> f64 {
        let gone = samples.saturating_sub(self.since) as f64;
        if gone >= self.length {
            self.to
        } else {
            self.from + (self.to - self.from) * gone / self.length
        }
    }

    /// LEGW's warm-up from the start of the run, by the batch now in use.
    fn warmup(&self, samples: u64) -> f64 {
        let (Some(epoch), ScalingRule::Legw { warmup_epochs }) = (self.epoch_samples, self.rule)
        else {
            return 1.0;
        };
        let s = self.batch as f64 / self.base_batch as f64;
        let length = warmup_epochs * s * epoch as f64;
        // The first step is already taken at a rate above 0.
        let position = samples as f64 + self.batch as f64;
        if position >= length {
            1.0
        } else {
            position / length
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::tests::estimate;

    #[test]
    fn adascale_lies_between_one_and_s() {
        let rule = |tr, grad_sq| {
            ScalingRule::AdaScale
                .factor(16, 256, Some(&estimate(grad_sq, tr, 256, 4)))
                .unwrap()
        };
        assert!((rule(1e9, 1e-3) - 16.0).abs() < 1e-3);
        assert!((rule(1e-9, 1.0) - 1.0).abs() < 1e-6);
        // sigma^2 = 32 / 16 = 2, mu^2 = 1: (2 + 1) / (2 / 16 + 1).
        assert!((rule(32.0, 1.0) - 3.0 / 1.125).abs() < 1e-12);
        assert!((rule(32.0, -1.0) - 16.0).abs() < 1e-12);
        assert!(ScalingRule::AdaScale.factor(16, 256, None).is_err());
    }

    #[test]
    fn legw_warms_up_longer_at_larger_batches() {
        let rule = ScalingRule::Legw { warmup_epochs: 0.5 };
        assert!((rule.warmup_epochs(32, 128).unwrap() - 2.0).abs() < 1e-12);
        let mut rate = LearningRate::new(1.0, 32, rule)
            .unwrap()
            .start_warmup(1_024)
            .unwrap();
        rate.set_batch(128, 0, None).unwrap();
        // sqrt(4) = 2 at the end of 2 x 1,024 samples; the first step is one batch into the ramp.
        assert!((rate.at(0) - 2.0 * 128.0 / 2_048.0).abs() < 1e-12);
        assert!((rate.at(1_024 - 128) - 1.0).abs() < 1e-12);
        assert!((rate.at(3_000) - 2.0).abs() < 1e-12);
        assert!(
            LearningRate::new(
                1.0,
                32,
                ScalingRule::Legw {
                    warmup_epochs: -1.0
                }
            )
            .is_err()
        );
    }

    #[test]
    fn a_second_jump_starts_where_the_first_ramp_stands() {
        let mut rate = LearningRate::new(1.0, 1, ScalingRule::Linear)
            .unwrap()
            .jump_warmup(100);
        rate.set_batch(1, 0, None).unwrap();
        rate.set_batch(3, 1_000, None).unwrap();
        rate.set_batch(5, 1_050, None).unwrap();
        assert!((rate.at(1_050) - 2.0).abs() < 1e-12);
        assert!((rate.at(1_100) - 3.5).abs() < 1e-12);
        assert!((rate.at(1_150) - 5.0).abs() < 1e-12);
        let saved = serde_json::to_string(&rate).unwrap();
        assert_eq!(serde_json::from_str::<LearningRate>(&saved).unwrap(), rate);
    }
}
