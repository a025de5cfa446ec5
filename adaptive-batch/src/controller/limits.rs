//! What every controller keeps to.

use serde::{Deserialize, Serialize};

use super::{BatchSizeDecision, DecisionReason, TrainingState};
use crate::error::{Error, Result, require};

/// Bounds, granularity and inertia of the batch size.
///
/// # Examples
/// ```
/// use adaptive_batch::BatchLimits;
/// // 4 replicas that accumulate micro-batches of 8: only multiples of 32 can be had.
/// let limits = BatchLimits::new(50, 4_010, 32)?.hysteresis(0.1)?.cool_down(50).largest_change(2.0)?;
/// assert_eq!((limits.smallest(), limits.largest()), (64, 4_000));
/// assert!(BatchLimits::new(33, 63, 32).is_err());
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SavedLimits")]
pub struct BatchLimits {
    min: u64,
    max: u64,
    granularity: u64,
    hysteresis: f64,
    cool_down: u64,
    #[serde(with = "crate::estimate::infinite_as_null")]
    largest_change: f64,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct SavedLimits {
    min: u64,
    max: u64,
    granularity: u64,
    hysteresis: f64,
    cool_down: u64,
    #[serde(with = "crate::estimate::infinite_as_null")]
    largest_change: f64,
}

impl TryFrom<SavedLimits> for BatchLimits {
    type Error = Error;

    fn try_from(s: SavedLimits) -> Result<Self> {
        Ok(Self::new(s.min, s.max, s.granularity)?
            .hysteresis(s.hysteresis)?
            .largest_change(s.largest_change)?
            .cool_down(s.cool_down))
    }
}

impl BatchLimits {
    /// Batch sizes from `min` to `max` samples, both included, that are multiples of `granularity` (micro-batch times replicas);
    /// without hysteresis, cool-down or largest change.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a granularity or lower bound of 0, [`Error::NoBatch`] if nothing lies within the bounds.
    pub fn new(min: u64, max: u64, granularity: u64) -> Result<Self> {
        require(granularity > 0, "granularity", "at least 1", granularity)?;
        require(min > 0, "smallest batch size", "at least 1", min)?;
        let first = min.div_ceil(granularity).checked_mul(granularity);
        if first.is_none_or(|first| first > max) {
            return Err(Error::NoBatch {
                min,
                max,
                granularity,
            });
        }
        Ok(Self {
            min,
            max,
            granularity,
            hysteresis: 0.0,
            cool_down: 0,
            largest_change: f64::INFINITY,
        })
    }

    /// Relative distance between the target and the batch in use up to which nothing changes.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless at least 0 and finite.
    pub fn hysteresis(mut self, hysteresis: f64) -> Result<Self> {
        require(
            hysteresis >= 0.0 && hysteresis.is_finite(),
            "hysteresis",
            "at least 0",
            hysteresis,
        )?;
        self.hysteresis = hysteresis;
        Ok(self)
    }

    /// Steps after a change during which there is no other.
    #[must_use]
    pub const fn cool_down(mut self, steps: u64) -> Self {
        self.cool_down = steps;
        self
    }

    /// Factor by which one decision may at most grow or shrink the batch (one granule is always allowed).
    ///
    /// # Errors
    /// [`Error::Parameter`] unless above 1.
    pub fn largest_change(mut self, factor: f64) -> Result<Self> {
        require(factor > 1.0, "largest change", "above 1", factor)?;
        self.largest_change = factor;
        Ok(self)
    }

    /// The smallest batch size allowed.
    pub const fn smallest(&self) -> u64 {
        self.min.div_ceil(self.granularity) * self.granularity
    }

    /// The largest batch size allowed.
    pub const fn largest(&self) -> u64 {
        self.max / self.granularity * self.granularity
    }

    /// Samples between neighbouring batch sizes.
    pub const fn granularity(&self) -> u64 {
        self.granularity
    }

    /// The allowed batch size nearest to `target`, the smaller one of two.
    pub fn nearest(&self, target: f64) -> u64 {
        if target >= self.largest() as f64 {
            return self.largest();
        }
        // Truncation of a negative or NaN target gives 0.
        let below = (target as u64 / self.granularity) * self.granularity;
        let up = target - below as f64 > self.granularity as f64 / 2.0;
        (below + if up { self.granularity } else { 0 }).clamp(self.smallest(), self.largest())
    }

    /// Whether `batch` is an allowed size.
    pub const fn allows(&self, batch: u64) -> bool {
        batch.is_multiple_of(self.granularity) && batch >= self.min && batch <= self.max
    }
}

/// Applies the limits to a controller's target and remembers the last change.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Limiter {
    pub(crate) limits: BatchLimits,
    last_change: Option<u64>,
}

impl Limiter {
    pub(crate) const fn new(limits: BatchLimits) -> Self {
        Self {
            limits,
            last_change: None,
        }
    }

    /// The batch in use, for the reason given - unless the limits do not allow it.
    pub(crate) fn hold(
        &mut self,
        target: f64,
        state: &TrainingState,
        reason: DecisionReason,
    ) -> BatchSizeDecision {
        if self.limits.allows(state.batch_size) {
            return BatchSizeDecision {
                batch_size: state.batch_size,
                changed: false,
                target,
                reason,
            };
        }
        let batch_size = self.limits.nearest(state.batch_size as f64);
        self.last_change = Some(state.step);
        BatchSizeDecision {
            batch_size,
            changed: true,
            target,
            reason: DecisionReason::OutOfLimits,
        }
    }

    /// Moves towards `target` as far as the limits allow.
    pub(crate) fn decide(&mut self, target: f64, state: &TrainingState) -> BatchSizeDecision {
        let limits = self.limits;
        let current = state.batch_size;
        if target.is_nan() {
            return self.hold(target, state, DecisionReason::NoEstimate);
        }
        if !limits.allows(current) {
            return self.hold(target, state, DecisionReason::OutOfLimits);
        }
        let aim = limits.nearest(target);
        if aim == current {
            let reason = if target > limits.max as f64 {
                DecisionReason::AtMaximum
            } else if target < limits.min as f64 {
                DecisionReason::AtMinimum
            } else {
                DecisionReason::OnTarget
            };
            return self.hold(target, state, reason);
        }
        let current_f = current as f64;
        if (target / current_f - 1.0).abs() <= limits.hysteresis {
            return self.hold(target, state, DecisionReason::Hysteresis);
        }
        if self
            .last_change
            .is_some_and(|last| state.step < last.saturating_add(limits.cool_down))
        {
            return self.hold(target, state, DecisionReason::CoolDown);
        }
        let (batch_size, reason) = if aim > current {
            let most = limits.nearest(current_f * limits.largest_change);
            (
                aim.min(most.max(current + limits.granularity)),
                DecisionReason::Grow,
            )
        } else {
            let least = limits.nearest(current_f / limits.largest_change);
            (
                aim.max(least.min(current - limits.granularity)),
                DecisionReason::Shrink,
            )
        };
        self.last_change = Some(state.step);
        BatchSizeDecision {
            batch_size,
            changed: true,
            target,
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state(step: u64, batch_size: u64) -> TrainingState {
        TrainingState::new(step, 0, batch_size)
    }

    #[test]
    fn nearest_rounds_and_stays_inside() {
        let limits = BatchLimits::new(10, 100, 8).unwrap();
        assert_eq!((limits.smallest(), limits.largest()), (16, 96));
        for (target, batch) in [
            (f64::NAN, 16),
            (-5.0, 16),
            (20.0, 16),
            (20.1, 24),
            (95.0, 96),
            (1e300, 96),
            (f64::INFINITY, 96),
        ] {
            assert_eq!(limits.nearest(target), batch, "{target}");
        }
    }

    #[test]
    fn limits_that_allow_nothing_are_refused() {
        assert!(matches!(
            BatchLimits::new(33, 63, 32),
            Err(Error::NoBatch { .. })
        ));
        assert!(matches!(
            BatchLimits::new(u64::MAX, u64::MAX, 2),
            Err(Error::NoBatch { .. })
        ));
        assert!(BatchLimits::new(0, 8, 1).is_err() && BatchLimits::new(1, 8, 0).is_err());
        let saved = r#"{"min":33,"max":63,"granularity":32,"hysteresis":0.0,"cool_down":0,"largest_change":null}"#;
        assert!(serde_json::from_str::<BatchLimits>(saved).is_err());
    }

    #[test]
    fn hysteresis_cool_down_and_largest_change_hold_back() {
        let limits = BatchLimits::new(10, 1_000, 10)
            .unwrap()
            .hysteresis(0.2)
            .unwrap()
            .cool_down(5)
            .largest_change(2.0)
            .unwrap();
        let mut limiter = Limiter::new(limits);
        assert_eq!(
            limiter.decide(119.0, &state(0, 100)).reason,
            DecisionReason::Hysteresis
        );
        let grown = limiter.decide(900.0, &state(1, 100));
        assert_eq!(
            (grown.batch_size, grown.reason),
            (200, DecisionReason::Grow)
        );
        assert_eq!(
            limiter.decide(900.0, &state(5, 200)).reason,
            DecisionReason::CoolDown
        );
        let shrunk = limiter.decide(12.0, &state(6, 200));
        assert_eq!(
            (shrunk.batch_size, shrunk.reason),
            (100, DecisionReason::Shrink)
        );
        assert_eq!(
            limiter.decide(f64::NAN, &state(20, 100)).reason,
            DecisionReason::NoEstimate
        );
        assert_eq!(
            limiter.decide(5e9, &state(30, 1_000)).reason,
            DecisionReason::AtMaximum
        );
        assert_eq!(
            limiter.decide(0.1, &state(30, 10)).reason,
            DecisionReason::AtMinimum
        );
        // One granule is always possible, or small batches could never grow.
        let tight = BatchLimits::new(10, 100, 10)
            .unwrap()
            .largest_change(1.1)
            .unwrap();
        assert_eq!(
            Limiter::new(tight).decide(50.0, &state(0, 10)).batch_size,
            20
        );
    }

    proptest! {
        #[test]
        fn no_decision_leaves_the_limits(
            min in 1u64..1_000,
            span in 0u64..5_000,
            granularity in 1u64..300,
            hysteresis in 0.0f64..1.0,
            change in 1.001f64..8.0,
            steps in proptest::collection::vec((0u64..10, prop_oneof![
                any::<f64>(), 0.0f64..10_000.0, Just(f64::INFINITY), Just(f64::NAN)]), 1..40),
            start in 0u64..10_000,
        ) {
            let Ok(limits) = BatchLimits::new(min, min + span, granularity) else {
                prop_assert!((min..=min + span).all(|b| b % granularity != 0));
                return Ok(());
            };
            let limits = limits.hysteresis(hysteresis).unwrap().largest_change(change).unwrap().cool_down(3);
            let mut limiter = Limiter::new(limits);
            let (mut batch, mut step) = (start, 0);
            for (gap, target) in steps {
                step += gap;
                let decision = limiter.decide(target, &state(step, batch));
                prop_assert!(limits.allows(decision.batch_size));
                prop_assert_eq!(decision.changed, decision.batch_size != batch);
                batch = decision.batch_size;
            }
        }
    }
}
