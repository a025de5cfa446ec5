//! Key distribution divergence between two parts of a stream.

use alloc::vec;

use super::cell;
use super::options::{check_bins, check_smoothing};
use crate::Error;

/// The divergence in nats of the keys `later` from the keys `earlier`, over `bins` equal bins of
/// the key space that both span, with `smoothing` added to each bin's count; defined in the
/// [module](super). Order within a part does not matter, repeats count.
///
/// Computes in O(|earlier| + |later| + bins).
///
/// # Errors
///
/// [`Error::Parameter`] for `bins` outside `1..=1048576`,
/// [`Error::Smoothing`] for a bad constant, [`Error::EmptyPart`] when a part has no
/// keys.
///
/// # Examples
///
/// ```
/// use dytis::dynamics::divergence;
///
/// let (low, high): (Vec<u64>, Vec<u64>) = ((0..500).collect(), (500..1000).collect());
/// assert_eq!(divergence(&low, &low, 10, 0.5)?, 0.0);
/// // Disjoint halves of 10 bins: 5 bins of 100.5 against 0.5 and 5 the other way round,
/// // of 505 in all, so 500/505 * ln 201.
/// let expected = 500.0 / 505.0 * 201_f64.ln();
/// assert!((divergence(&low, &high, 10, 0.5)? - expected).abs() < 1e-12);
/// # Ok::<(), dytis::Error>(())
/// ```
pub fn divergence(
    earlier: &[u64],
    later: &[u64],
    bins: usize,
    smoothing: f64,
) -> Result<f64, Error> {
    check_bins(bins)?;
    check_smoothing(smoothing)?;
    for (which, part) in [("earlier", earlier), ("later", later)] {
        if part.is_empty() {
            return Err(Error::EmptyPart { which });
        }
    }
    Ok(divergence_of(earlier, later, bins, smoothing))
}

/// The divergence; arguments already checked.
pub(super) fn divergence_of(earlier: &[u64], later: &[u64], bins: usize, smoothing: f64) -> f64 {
    let bounds = earlier
        .iter()
        .chain(later)
        .fold((u64::MAX, 0), |(low, high), &key| {
            (key.min(low), key.max(high))
        });
    let count = |part: &[u64]| {
        let mut counts = vec![0_usize; bins];
        for &key in part {
            counts[cell(key, bounds.0, bounds.1, bins)] += 1;
        }
        counts
    };
    let total = |part: &[u64]| part.len() as f64 + smoothing * bins as f64;
    let (before, after) = (total(earlier), total(later));
    let sum: f64 = count(earlier)
        .into_iter()
        .zip(count(later))
        .map(|(p, q)| {
            let p = (p as f64 + smoothing) / before;
            let q = (q as f64 + smoothing) / after;
            q * (q / p).ln()
        })
        .sum();
    // Rounding may leave a hair below the bound that holds exactly.
    sum.max(0.0)
}
