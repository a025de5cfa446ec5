//! The errors of this crate.

/// What can be wrong with an input or a request; each message names the thing, what was expected and what came.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A coordinate of a Pareto point is NaN, infinite or negative.
    #[error("{what} of a front point must be finite and not negative, got {value}")]
    FrontValue {
        /// `time` or `cost`.
        what: &'static str,
        /// The value given.
        value: f64,
    },
    /// A list read as a front is not strictly increasing in time and decreasing in cost.
    #[error("point {at} of the front is not slower and cheaper than the one before it")]
    FrontOrder {
        /// Position in the list, from 0.
        at: usize,
    },
    /// A point was asked of a front that has none.
    #[error("the front has no point to select from")]
    EmptyFront,
    /// A number of an objective is NaN, infinite, negative or (for the sum of the weights) zero.
    #[error("{what} must be finite and not negative (weights not all zero), got {value}")]
    ObjectiveValue {
        /// Which number.
        what: &'static str,
        /// The value given.
        value: f64,
    },
    /// Text is not an objective.
    #[error(
        "unknown objective {got:?}, expected fastest, cheapest, knee, budget=MONEY, deadline=SECONDS, \
         weighted=TIME,COST or min-product"
    )]
    ObjectiveSyntax {
        /// The text given.
        got: String,
    },
}
