//! What the crate's fallible functions report.

/// Why a map could not be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter of [`DytisBuilder`](crate::DytisBuilder) is out of its range.
    #[error("{name} must lie in {min}..={max}, got {value}")]
    Parameter {
        /// The parameter, named as in its `with_*` method.
        name: &'static str,
        /// What was asked for.
        value: usize,
        /// Least value.
        min: usize,
        /// Greatest value.
        max: usize,
    },
    /// The pairs given to `from_sorted_iter` or `bulk_load` do not strictly ascend.
    #[error(
        "keys must strictly ascend, but the one at position {position} is not above its predecessor"
    )]
    Unsorted {
        /// Number of the first offending pair, counted from 0.
        position: usize,
    },
}
