//! The crate's error.

use std::path::{Path, PathBuf};

/// What can go wrong in a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A setting of the builder cannot be used.
    #[error("{field} = {value}: {expected}")]
    Setting {
        /// The builder's method.
        field: &'static str,
        /// The value given.
        value: String,
        /// What it has to be.
        expected: String,
    },
    /// The data cannot be trained on.
    #[error("{what}: {reason}")]
    Data {
        /// The data set or file.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The planner failed.
    #[error(transparent)]
    Plan(#[from] hp_planner::Error),
    /// The executor failed.
    #[error(transparent)]
    Execution(#[from] iidp::Error),
    /// The gradient statistics or the controller failed.
    #[error(transparent)]
    Batch(#[from] adaptive_batch::Error),
}

impl Error {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn setting(
        field: &'static str,
        value: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Setting {
            field,
            value: value.to_string(),
            expected: expected.into(),
        }
    }
}
