//! Variance of skewness: how unevenly linear models are spread over the key space.

use super::cell;
use super::options::{check_error_bound, check_slices};
use crate::Error;

/// A slope as an exact fraction, ranks over key distance.
#[derive(Debug, Clone, Copy)]
struct Slope {
    rise: u64,
    run: u64,
}

impl Slope {
    fn below(self, other: Self) -> bool {
        u128::from(self.rise) * u128::from(other.run)
            < u128::from(other.rise) * u128::from(self.run)
    }
}

/// Greedy piecewise linear regression over ascending keys, counting models as it goes.
///
/// The state is the model's first key and the cone of slopes that still keep every covered point
/// within the bound. Slopes are compared as fractions, so the count is exact and the same on
/// every machine.
#[derive(Debug)]
pub(super) struct GreedyModels {
    error_bound: u64,
    models: usize,
    origin: u64,
    /// Rank of the next key, counted from the model's first key.
    rank: u64,
    lowest: Slope,
    highest: Option<Slope>,
}

impl GreedyModels {
    pub(super) fn new(error_bound: usize) -> Self {
        Self {
            error_bound: error_bound as u64,
            models: 0,
            origin: 0,
            rank: 0,
            lowest: Slope { rise: 0, run: 1 },
            highest: None,
        }
    }

    /// Takes the next key; it must be above the one before it.
    pub(super) fn push(&mut self, key: u64) {
        if self.models > 0 && self.extend(key) {
            return;
        }
        self.models += 1;
        self.origin = key;
        self.rank = 1;
        self.lowest = Slope { rise: 0, run: 1 };
        self.highest = None;
    }

    /// Narrows the cone to the slopes that reach `key` too; `false` when there is none.
    fn extend(&mut self, key: u64) -> bool {
        let run = key - self.origin;
        // A falling line fits nothing better than a level one, so the cone may start at 0.
        let low = Slope {
            rise: self.rank.saturating_sub(self.error_bound),
            run,
        };
        let high = Slope {
            rise: self.rank + self.error_bound,
            run,
        };
        let lowest = if self.lowest.below(low) {
            low
        } else {
            self.lowest
        };
        let highest = match self.highest {
            Some(old) if old.below(high) => old,
            _ => high,
        };
        if highest.below(lowest) {
            return false;
        }
        self.lowest = lowest;
        self.highest = Some(highest);
        self.rank += 1;
        true
    }

    pub(super) fn models(&self) -> usize {
        self.models
    }
}

fn check_ascending(keys: &[u64]) -> Result<(), Error> {
    match keys.windows(2).position(|pair| pair[0] >= pair[1]) {
        Some(before) => Err(Error::Unsorted {
            position: before + 1,
        }),
        None => Ok(()),
    }
}

/// Number of linear models that the distinct ascending `keys` need when each may be off by
/// `error_bound` ranks: greedy piecewise linear regression as defined in the [module](super).
///
/// Computes in O(n), in exact integer arithmetic.
///
/// # Errors
///
/// [`Error::Parameter`] for an error bound outside `1..=4294967295`,
/// [`Error::Unsorted`] with the position of the first key out of order.
///
/// # Examples
///
/// ```
/// use dytis::dynamics::linear_models;
///
/// let line: Vec<u64> = (0..1000).map(|i| 40 + 3 * i).collect();
/// assert_eq!(linear_models(&line, 8)?, 1);
///
/// // Two runs of different density need two models.
/// let bent: Vec<u64> = (0..1000).chain((1..1000).map(|i| 1000 + 100 * i)).collect();
/// assert_eq!(linear_models(&bent, 8)?, 2);
/// # Ok::<(), dytis::Error>(())
/// ```
pub fn linear_models(keys: &[u64], error_bound: usize) -> Result<usize, Error> {
    check_error_bound(error_bound)?;
    check_ascending(keys)?;
    let mut models = GreedyModels::new(error_bound);
    for &key in keys {
        models.push(key);
    }
    Ok(models.models())
}

/// Variance over `slices` equal slices of the key space of the number of linear models each needs
/// (population variance, in models squared), for one part of a stream given as distinct ascending
/// keys; defined in the [module](super).
///
/// Computes in O(n + slices).
///
/// # Errors
///
/// [`Error::Parameter`] for `slices` outside `1..=65536` or a bad error bound,
/// [`Error::EmptyPart`] without keys, [`Error::Unsorted`] with the position
/// of the first key out of order.
///
/// # Examples
///
/// ```
/// use dytis::dynamics::skewness_variance;
///
/// let even: Vec<u64> = (0..4096).collect();
/// assert_eq!(skewness_variance(&even, 16, 8)?, 0.0);
///
/// // All keys but one in the first of 4 slices, on one line: 1, 0, 0, 1 models.
/// let uneven: Vec<u64> = (0..1000).chain([1_000_000]).collect();
/// assert_eq!(skewness_variance(&uneven, 4, 8)?, 0.25);
/// # Ok::<(), dytis::Error>(())
/// ```
pub fn skewness_variance(keys: &[u64], slices: usize, error_bound: usize) -> Result<f64, Error> {
    check_slices(slices)?;
    check_error_bound(error_bound)?;
    if keys.is_empty() {
        return Err(Error::EmptyPart { which: "only" });
    }
    check_ascending(keys)?;
    Ok(variance_and_models(keys, slices, error_bound).0)
}

/// The variance and the total number of models; arguments already checked, `keys` not empty.
pub(super) fn variance_and_models(keys: &[u64], slices: usize, error_bound: usize) -> (f64, usize) {
    let (low, high) = (keys[0], keys[keys.len() - 1]);
    let (mut sum, mut squares) = (0_usize, 0_u128);
    let mut rest = keys;
    while let Some(&first) = rest.first() {
        let slice = cell(first, low, high, slices);
        let len = rest.partition_point(|&key| cell(key, low, high, slices) == slice);
        let mut models = GreedyModels::new(error_bound);
        for &key in &rest[..len] {
            models.push(key);
        }
        sum += models.models();
        squares += (models.models() as u128).pow(2);
        rest = &rest[len..];
    }
    // (s * sum m^2 - (sum m)^2) / s^2 in integers: exactly 0 when all slices are alike.
    let spread = slices as u128 * squares - (sum as u128).pow(2);
    (spread as f64 / (slices as f64).powi(2), sum)
}
