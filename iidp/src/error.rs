//! The crate's error type.

use std::time::Duration;

use crate::communicator::CollectiveCall;

/// Everything that can go wrong in this crate.
///
/// Ranks in communication errors are ranks of the world (of the communicator that was created first), also
/// where the failure happened in a communicator made by [`split`](crate::communicator::Communicator::split): all ranks of the
/// world see the same error.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank panicked, or ended while others still waited for it.
    #[error("rank {rank} {loss}, noticed {noticed}")]
    RankLost {
        /// The rank that ended.
        rank: usize,
        /// How it ended.
        loss: Loss,
        /// Where that was noticed, such as `in barrier by rank 1`.
        noticed: String,
    },
    /// A rank gave up on purpose.
    #[error("rank {rank} aborted: {reason}")]
    Aborted {
        /// The rank that called [`abort`](crate::communicator::Communicator::abort).
        rank: usize,
        /// The reason it gave.
        reason: String,
    },
    /// Two ranks entered different collectives, or the same with different lengths.
    #[error(
        "collective {sequence}: rank {rank} called {got} where rank {expected_rank} called {expected}"
    )]
    CollectiveMismatch {
        /// Number of the collective on this communicator, from 0.
        sequence: u64,
        /// The rank that differs.
        rank: usize,
        /// What it called.
        got: CollectiveCall,
        /// The lowest rank of the communicator.
        expected_rank: usize,
        /// What that rank called.
        expected: CollectiveCall,
    },
    /// A wait took longer than the communicator's time-out.
    #[error("rank {rank} waited longer than {timeout:?} for ranks {missing:?} in {operation}")]
    Timeout {
        /// The rank that stopped waiting.
        rank: usize,
        /// The ranks that had not arrived.
        missing: Vec<usize>,
        /// What it waited in.
        operation: String,
        /// The configured limit.
        timeout: Duration,
    },
    /// A rank number outside its communicator.
    #[error("rank {rank} named rank {got} in {operation}, expected 0..{size}")]
    RankOutOfRange {
        /// The calling rank.
        rank: usize,
        /// The number it gave.
        got: usize,
        /// The communicator's size.
        size: usize,
        /// The operation it was given to.
        operation: String,
    },
    /// A buffer of the wrong length.
    #[error("{what} has {got} elements, expected {expected}")]
    LengthMismatch {
        /// The buffer.
        what: String,
        /// Its length.
        got: usize,
        /// The length it should have.
        expected: usize,
    },
    /// A setting or argument that cannot be used.
    #[error("{what}: {problem}")]
    Invalid {
        /// The setting.
        what: &'static str,
        /// What is wrong and what would work.
        problem: String,
    },
    /// No assignment of virtual workers and accumulation steps can serve the global batch.
    #[error("global batch of {global_batch} samples with local batch {local_batch}: {problem}")]
    Unassignable {
        /// Requested global batch in samples.
        global_batch: usize,
        /// Local batch in samples.
        local_batch: usize,
        /// Why not, and what would work.
        problem: String,
    },
}

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// Its thread panicked.
    Panicked,
    /// It dropped its communicator.
    Left,
    /// Its process ended or its machine could not be reached.
    Disconnected,
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Panicked => "panicked",
            Self::Left => "left",
            Self::Disconnected => "disconnected",
        })
    }
}
