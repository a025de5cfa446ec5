//! Errors of the crate, and the reasons for which a configuration cannot run.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with an input or a request.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot open {}: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        message: String,
    },
    /// A file or text is not the TOML, JSON or CSV that was expected.
    #[error("{place}: {message}")]
    Syntax {
        /// Where: file, line and column as far as known.
        place: Place,
        /// What the parser said, on one line.
        message: String,
    },
    /// A field has a value that is not allowed.
    #[error("{place}: field `{field}` is {value}, allowed is {allowed}")]
    Field {
        /// Where: file and line as far as known.
        place: Place,
        /// Path of the field, as `groups[1].nodes`.
        field: String,
        /// The value found, as text.
        value: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A global batch cannot be composed of whole micro-batches on the given ranks.
    #[error(
        "global batch of {global_batch} samples cannot be expressed: {reason} (micro-batch {micro_batch}, {ranks} ranks)"
    )]
    BatchNotExpressible {
        /// Samples asked for.
        global_batch: u64,
        /// Samples per micro-batch.
        micro_batch: u64,
        /// Data-parallel ranks that must each get at least one micro-batch.
        ranks: u64,
        /// Which rule is broken.
        reason: String,
    },
    /// No configuration at all can run.
    #[error(
        "no feasible configuration among {examined} examined: {}",
        summarise(reasons)
    )]
    NothingFeasible {
        /// Configurations looked at.
        examined: u64,
        /// Each reason with the number of configurations it rejected, the most frequent first.
        reasons: Vec<(Infeasible, u64)>,
    },
    /// The time limit was reached before anything was found that can run.
    #[error("time limit reached with nothing feasible found, {examined} configurations examined")]
    TimeLimit {
        /// Configurations looked at.
        examined: u64,
    },
    /// A configuration contradicts the cluster or the model.
    #[error(transparent)]
    Infeasible(#[from] Infeasible),
    /// A fit or an estimate needs more or other data than were given.
    #[error("not enough data for {what}: {need} needed, {have} given")]
    Data {
        /// What was to be computed.
        what: String,
        /// Rows or points needed.
        need: usize,
        /// Rows or points given.
        have: usize,
    },
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

impl Error {
    /// An [`Error::Field`] whose place is filled in later by [`Error::at`].
    pub(crate) fn field(
        field: impl Into<String>,
        value: impl fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Field {
            place: Place::default(),
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }

    /// Puts `prefix` before the path of the field, if this is an [`Error::Field`].
    pub(crate) fn within(mut self, prefix: &str) -> Self {
        if let Self::Field { field, .. } = &mut self {
            *field = format!("{prefix}.{field}");
        }
        self
    }
}

fn summarise(reasons: &[(Infeasible, u64)]) -> String {
    reasons
        .iter()
        .map(|(reason, count)| format!("{count} x {reason}"))
        .collect::<Vec<_>>()
        .join("; ")
}

/// Where in which input something was found; unknown parts are left out of the text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// The file, if the input came from one.
    pub path: Option<PathBuf>,
    /// One-based line.
    pub line: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.path, self.line) {
            (Some(path), Some(line)) => write!(f, "{}, line {line}", path.display()),
            (Some(path), None) => write!(f, "{}", path.display()),
            (None, Some(line)) => write!(f, "line {line}"),
            (None, None) => write!(f, "input"),
        }
    }
}

/// Why a configuration cannot run; the text is for people, the fields are for counting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "reason", content = "detail", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Infeasible {
    /// A device would need more memory than it has.
    #[error("memory: {need_gib:.2} GiB needed, {have_gib:.2} GiB usable at {at}")]
    Memory {
        /// GiB needed at the fullest device.
        need_gib: f64,
        /// GiB usable there.
        have_gib: f64,
        /// Which device, as `stage 0 on V100-16`.
        at: String,
    },
    /// Two counts do not divide.
    #[error("divisibility: {what} of {value} is not a multiple of {divisor} ({of})")]
    Divisibility {
        /// What is to be divided.
        what: String,
        /// Its value.
        value: u64,
        /// What it must be a multiple of.
        divisor: u64,
        /// Where the divisor comes from, as `tensor parallelism`.
        of: String,
    },
    /// More of something is asked for than there is.
    #[error("{what}: {need} needed, {have} available")]
    Exceeds {
        /// What is short, as `layers for pipeline stages`.
        what: String,
        /// Count needed.
        need: u64,
        /// Count available.
        have: u64,
    },
    /// The feature is not supported in this combination.
    #[error("unsupported: {0}")]
    Unsupported(String),
}

impl Infeasible {
    /// Name of the kind of reason, for counting.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "memory",
            Self::Divisibility { .. } => "divisibility",
            Self::Exceeds { .. } => "exceeds",
            Self::Unsupported(_) => "unsupported",
        }
    }
}
