//! What the crate's fallible functions report.

/// Why a map could not be built, or a stream of keys not be profiled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter of [`DytisBuilder`](crate::DytisBuilder) or of a profile is out of its range.
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
    /// The pairs given to `from_sorted_iter` or `bulk_load`, or the keys of a measure, do not strictly ascend.
    #[error(
        "keys must strictly ascend, but the one at position {position} is not above its predecessor"
    )]
    Unsorted {
        /// Number of the first offending pair, counted from 0.
        position: usize,
    },
    /// The smoothing constant of a divergence is not above 0 and at most 1,000,000.
    #[error("smoothing must be above 0 and at most 1000000, got {value}")]
    Smoothing {
        /// What was asked for.
        value: f64,
    },
    /// A stream is shorter than two parts, so that nothing in it can have changed.
    #[error("a profile needs at least {needed} keys (two parts of {part_len}), got {got}")]
    TooFewKeys {
        /// Keys needed.
        needed: usize,
        /// Keys in a part.
        part_len: usize,
        /// Keys given.
        got: usize,
    },
    /// A part of a stream has no keys.
    #[error("the {which} part is empty")]
    EmptyPart {
        /// Which of the parts: `earlier`, `later` or `only`.
        which: &'static str,
    },
}
