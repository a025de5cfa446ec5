//! The one error type of the crate.

use std::error::Error as StdError;
use std::ops::Range;

/// Everything that can go wrong in this crate; each variant names the thing, what was expected and what came.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two slices that must have the same length do not.
    #[error("{what} has {got} elements, expected {expected}")]
    Length {
        /// Which slice.
        what: String,
        /// Length that was expected.
        expected: usize,
        /// Length that came.
        got: usize,
    },
    /// A gradient holds a NaN or an infinite value.
    #[error(
        "{micro_batch} of shard `{shard}` holds {value} at element {element} (parameter `{parameter}`, {range:?})"
    )]
    NonFinite {
        /// Name of the shard.
        shard: String,
        /// Which gradient of the shard: a micro-batch or the summed one.
        micro_batch: GradientOf,
        /// Name of the parameter range that holds the element (the shard's name where it is not divided).
        parameter: String,
        /// That range, in elements of the shard.
        range: Range<usize>,
        /// First element that is not finite.
        element: usize,
        /// Its value, as `NaN`, `inf` or `-inf`.
        value: f64,
    },
    /// A shard index that the meter was not configured with.
    #[error("shard {shard} does not exist, the meter has {shards} shards")]
    UnknownShard {
        /// Index that came.
        shard: usize,
        /// Number of shards.
        shards: usize,
    },
    /// A shard of a micro-batch came twice.
    #[error("shard `{shard}` of micro-batch {micro_batch} was measured before")]
    RepeatedShard {
        /// Name of the shard.
        shard: String,
        /// Index of the micro-batch.
        micro_batch: u64,
    },
    /// A shard of a micro-batch did not come.
    #[error("shard `{shard}` of micro-batch {micro_batch} was not measured")]
    MissingShard {
        /// Name of the shard.
        shard: String,
        /// Index of the micro-batch.
        micro_batch: u64,
    },
    /// A part of the summed gradient was measured twice.
    #[error("elements {range:?} of the summed gradient of shard `{shard}` were measured before")]
    RepeatedSum {
        /// Name of the shard.
        shard: String,
        /// The part that came again.
        range: Range<usize>,
    },
    /// The summed gradient of a shard did not come.
    #[error("the summed gradient of shard `{shard}` was not measured")]
    MissingSum {
        /// Name of the shard.
        shard: String,
    },
    /// A part of a shard that reaches beyond its end.
    #[error("elements {range:?} lie outside of shard `{shard}` ({len} elements)")]
    OutOfShard {
        /// Name of the shard.
        shard: String,
        /// The part.
        range: Range<usize>,
        /// Length of the shard.
        len: usize,
    },
    /// Shards of one micro-batch came with different numbers of samples.
    #[error("micro-batch {micro_batch} has {expected} samples, shard `{shard}` came with {got}")]
    SampleCount {
        /// Name of the shard.
        shard: String,
        /// Index of the micro-batch.
        micro_batch: u64,
        /// Samples of the shards that came before.
        expected: u64,
        /// Samples of this shard.
        got: u64,
    },
    /// The samples of the micro-batches do not add up to what the weighting was told.
    #[error("the micro-batches hold {got} samples, the weighting expects {expected}")]
    BatchTotal {
        /// Samples that the weighting expects.
        expected: u64,
        /// Samples that were measured.
        got: u64,
    },
    /// The weights with which the micro-batches were accumulated are not proportional to their samples.
    #[error("micro-batches of different sizes were accumulated with equal weights: {detail}")]
    Weights {
        /// What differs.
        detail: String,
    },
    /// After the gather some gradients have not been measured, or not once.
    #[error("{what}: {measured} elements were measured over all ranks, expected {expected}")]
    Incomplete {
        /// Which gradients.
        what: &'static str,
        /// Elements that every rank's layout promises.
        expected: u64,
        /// Elements that were measured.
        measured: u64,
    },
    /// The statistics hold no micro-batch at all.
    #[error("no micro-batch was measured")]
    NoMicroBatch,
    /// One micro-batch tells nothing about the noise, and no previous gradient was kept.
    #[error(
        "one micro-batch of {samples} samples carries no information about the noise: accumulate at least two, or keep the previous gradient (`MeterConfig::keep_previous`) from the step before"
    )]
    SingleMicroBatch {
        /// Samples of the micro-batch.
        samples: u64,
    },
    /// Every gradient is exactly zero.
    #[error("all {micro_batches} micro-batch gradients are exactly zero")]
    ZeroGradient {
        /// Number of micro-batches.
        micro_batches: u64,
    },
    /// Statistics of different kinds cannot be merged or smoothed together.
    #[error("statistics differ in {what}: {left} and {right}")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// On the one side.
        left: String,
        /// On the other.
        right: String,
    },
    /// A number outside of its domain.
    #[error("{name} is {got}, expected {expected}")]
    Parameter {
        /// Name of the parameter.
        name: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What came.
        got: String,
    },
    /// A count that does not fit its type.
    #[error("{what} overflows 64 bits")]
    Overflow {
        /// Which count.
        what: &'static str,
    },
    /// No multiple of the granularity lies within the bounds.
    #[error("no batch size between {min} and {max} is a multiple of {granularity}")]
    NoBatch {
        /// Lower bound.
        min: u64,
        /// Upper bound.
        max: u64,
        /// Granularity.
        granularity: u64,
    },
    /// A call that needs an option of the meter which is off, or excludes one that is on.
    #[error("{call} needs {needs}")]
    Option {
        /// The call.
        call: &'static str,
        /// What it needs.
        needs: &'static str,
    },
    /// A meter was reconfigured in the middle of a step.
    #[error("{what} cannot change after {micro_batches} micro-batches of the step were measured")]
    MidStep {
        /// What was to change.
        what: &'static str,
        /// Micro-batches measured.
        micro_batches: usize,
    },
    /// The ranks could not add up their scalars.
    #[error("gathering the gradient statistics failed")]
    Gather(#[source] Box<dyn StdError + Send + Sync>),
    /// This rank's part is whole, but other ranks refused theirs.
    #[error("{ranks} of the ranks refused their part of the gradient statistics")]
    OtherRanks {
        /// How many.
        ranks: u64,
    },
    /// Observations of a forecaster must come in order.
    #[error("step {step} was observed after step {last}")]
    OutOfOrder {
        /// Step that came.
        step: u64,
        /// Step of the last observation.
        last: u64,
    },
    /// Too few observations to forecast from.
    #[error("a forecast needs {needed} observations, {got} were made")]
    TooFewObservations {
        /// Observations needed.
        needed: usize,
        /// Observations made.
        got: usize,
    },
    /// A tensor that cannot be measured.
    #[error("tensor cannot be measured: {reason}")]
    Tensor {
        /// Why.
        reason: String,
    },
}

/// Which gradient of a shard an error speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientOf {
    /// The gradient of the micro-batch with this index.
    MicroBatch(u64),
    /// The gradient summed over micro-batches and replicas.
    Sum,
}

impl std::fmt::Display for GradientOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::MicroBatch(index) => write!(f, "micro-batch {index}"),
            Self::Sum => f.write_str("the sum"),
        }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Refuses `value` unless `ok`, naming the parameter.
pub(crate) fn require(
    ok: bool,
    name: &'static str,
    expected: &'static str,
    value: impl std::fmt::Display,
) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(Error::Parameter {
            name,
            expected,
            got: format!("{value}"),
        })
    }
}
