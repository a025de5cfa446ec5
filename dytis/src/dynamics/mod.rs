//! How dynamic a stream of keys is: two measures and a profile.
//!
//! A learned index is easy to build for keys that are all known. What makes a stream hard is
//! change of two kinds (the paper on `DyTIS`, section 2, names both):
//!
//! - **Variance of skewness**: at one time, some slices of the key space need many linear models
//!   and others one or none, so that one shape for the whole space fits nowhere.
//! - **Key distribution divergence (KDD)**: over time, the next keys come from another
//!   distribution than the last ones, so that what was learned stops being true.
//!
//! # Definitions
//!
//! Keys are taken by their order-preserving bits. The stream is cut into *parts* `P_1, P_2, ..`
//! of `n` successive keys ([`ProfileOptions::with_part_len`]); a rest of fewer than `n` keys is
//! not measured.
//!
//! *Linear models.* For distinct ascending keys `x_0 < x_1 < ..` with ranks `0, 1, ..`, a model
//! starts at the first key that no earlier model covers, `x_a`, and is extended as long as one
//! line through `(x_a, a)` stays within `e` ranks of every `(x_i, i)` it covers: the greedy
//! piecewise linear regression with a shrinking cone. `m` is the number of models
//! ([`linear_models`]).
//!
//! *Variance of skewness of a part.* Cut `[min P, max P]` into `s` slices of equal width, let
//! `m_j` be the number of models that the distinct keys of slice `j` need on their own (0 when
//! the slice is empty), and `m` their mean. Then
//!
//! ```text
//! skewness(P) = 1/s * sum_j (m_j - m)^2          (skewness_variance)
//! ```
//!
//! 0 when every slice is equally easy, as for uniform keys. The stream's value is the mean over
//! its parts.
//!
//! *Divergence of two parts.* Cut `[min(P u Q), max(P u Q)]` into `b` bins of equal width, let
//! `p_j`, `q_j` be the counts of keys (repeats included) in bin `j`, each smoothed by `a`. Then
//!
//! ```text
//! kdd(P, Q) = sum_j Q_j ln(Q_j / P_j),   P_j = (p_j + a) / (|P| + a b),   Q_j alike   (divergence)
//! ```
//!
//! the Kullback-Leibler divergence, in nats, of the later part from the earlier one. The stream's
//! value is the mean over pairs of successive parts. Two samples of one distribution are not
//! exactly alike: about `(b - 1) / n` remains of a distribution that fills all bins, and that is
//! the measure's floor ([`ProfileOptions::kdd_floor`]).
//!
//! The paper measures over the range of the whole data set. Here the range is that of the one or
//! two parts at hand, so that the incremental form needs no second pass, gives exactly the
//! offline numbers, and one far outlier early in the stream does not flatten all that follows.
//!
//! # Examples
//!
//! ```
//! use dytis::dynamics::{DynamicClass, DynamicProfile};
//!
//! // A clock: each part of the stream lies behind the one before it.
//! let clock = DynamicProfile::of((0..100_000_u64).map(|i| 1_000_000 + 7 * i))?;
//! assert_eq!(clock.class(), DynamicClass::Drifting);
//! assert_eq!(clock.skewness, 0.0);
//!
//! // The same keys in scrambled order (a full cycle of a linear congruence): nothing moves.
//! let mixed = DynamicProfile::of((0..100_000_u64).map(|i| 1_000_000 + 7 * (i * 61_803 % 100_000)))?;
//! assert_eq!(mixed.class(), DynamicClass::Steady);
//! assert!(mixed.kdd * 10.0 < clock.kdd);
//! # Ok::<(), dytis::Error>(())
//! ```

mod divergence;
mod options;
mod profile;
mod profiler;
mod skewness;
#[cfg(test)]
mod tests;

pub use divergence::divergence;
pub use options::ProfileOptions;
pub use profile::{DynamicClass, DynamicProfile};
pub use profiler::{DynamicProfiler, PartMeasure};
pub use skewness::{linear_models, skewness_variance};

/// The index of the cell of `x` when `[low, high]` is cut into `cells` cells of equal width.
///
/// Exact for every range up to the whole of `u64`: cell `j` holds the offsets
/// `ceil(j w / cells) ..` with `w = high - low + 1`.
fn cell(x: u64, low: u64, high: u64, cells: usize) -> usize {
    let width = u128::from(high - low) + 1;
    (u128::from(x - low) * cells as u128 / width) as usize
}
