//! Communication among the ranks of a job.
//!
//! [`Communicator`] is what the executor is written against; [`LocalCommunicator`] connects the threads of one
//! process. All implementations keep the same promises:
//!
//! - **Every call is checked.** A collective carries its operation, its number on this communicator and its length; every rank
//!   compares all of them, and a difference ends in the same [`Error::CollectiveMismatch`] on every rank.
//! - **Nothing hangs.** Every wait has a time-out. A rank that panics, drops its communicator, aborts or stops calling ends in
//!   one error, the same on every rank of the world, and every later call on any communicator of that world returns it again.
//! - **Results are reproducible.** Sums are taken in rank order, element by element, whatever the timing: two runs give
//!   the same bits, and all ranks hold the same bits.
//!
//! Buffers are cut among ranks by [`shard_range`].

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::Error;

#[cfg(feature = "cuda")]
mod device;
mod hierarchical;
mod local;
#[cfg(feature = "mpi")]
mod mpi;

#[cfg(feature = "cuda")]
pub use device::DeviceCommunicator;
pub use hierarchical::HierarchicalCommunicator;
pub use local::LocalCommunicator;
#[cfg(feature = "mpi")]
pub use mpi::MpiCommunicator;

/// One rank's end of a group of ranks that communicate.
///
/// An end belongs to one thread at a time: it can be moved to another thread but not shared. All ranks must call the same collectives in the same
/// order; point-to-point messages are matched by sender and tag, in the order sent.
///
/// Every method returns the world's failure, once there is one.
pub trait Communicator: Send + fmt::Debug {
    /// This rank, in `0..size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Replaces `data` by its element-wise sum over all ranks, added in rank order.
    ///
    /// Each rank moves `2 (n - 1) / n` times the buffer and adds `1 / n` of it.
    ///
    /// # Errors
    ///
    /// When ranks disagree about the call or its length, when a rank is lost or late.
    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error>;

    /// [`all_reduce_sum`](Self::all_reduce_sum) in double precision, for scalars such as losses and norms.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error>;

    /// Sums `data` over all ranks, keeping on each rank only its own shard: on return `data[range]` holds the sum, where
    /// `range` is the returned [`shard_range`] of this rank; the rest of `data` is as it was.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error>;

    /// Completes `data` from the shards of all ranks: rank r contributes `data[shard_range(len, size, r)]`.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error>;

    /// Collects one message of any length from every rank, in rank order.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_sum`](Self::all_reduce_sum), without a check of the lengths.
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// Replaces `data` on every rank by that of rank `root`.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_sum`](Self::all_reduce_sum); [`Error::RankOutOfRange`] on every rank when `root` is not a rank.
    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error>;

    /// Sends `data` to rank `to`; returns without waiting for the receiver.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`] when `to` is not a rank, [`Error::RankLost`] when it has ended.
    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error>;

    /// Waits for the next message with this tag from rank `from`.
    ///
    /// # Errors
    ///
    /// [`Error::RankOutOfRange`] when `from` is not a rank, [`Error::RankLost`] when it ended without sending,
    /// [`Error::Timeout`] when nothing comes.
    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error>;

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    ///
    /// When a rank calls something else, is lost or late.
    fn barrier(&self) -> Result<(), Error>;

    /// Makes a communicator of all ranks that give the same `color`, ordered by `key` and then by rank.
    ///
    /// # Errors
    ///
    /// When a rank calls something else, is lost or late.
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error>;

    /// Ends the communication of the whole world: every rank's current wait and every later call returns the same error,
    /// which is returned here too (the earlier failure if there was one).
    fn abort(&self, reason: &str) -> Error;
}

/// The elements of a buffer of `len` elements that belong to `rank` of `size` ranks: contiguous, in rank order, the first `len % size` ranks
/// holding one more than the others.
///
/// # Panics
///
/// When `rank` is not in `0..size`.
///
/// # Examples
///
/// ```
/// use iidp::communicator::shard_range;
///
/// assert_eq!(shard_range(10, 3, 0), 0..4);
/// assert_eq!(shard_range(10, 3, 1), 4..7);
/// assert_eq!(shard_range(10, 3, 2), 7..10);
/// assert!(shard_range(1, 3, 2).is_empty());
/// ```
pub fn shard_range(len: usize, size: usize, rank: usize) -> Range<usize> {
    assert!(rank < size, "rank {rank} is not in 0..{size}");
    let (each, rest) = (len / size, len % size);
    let start = rank * each + rank.min(rest);
    start..start + each + usize::from(rank < rest)
}

/// The ranks of the group that a split makes of those with `color`, given each rank's color and key: ordered by key and then by rank.
fn group_of_color(places: &[[usize; 2]], color: usize) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..places.len())
        .filter(|rank| places[*rank][0] == color)
        .collect();
    ranks.sort_by_key(|rank| (places[*rank][1], *rank));
    ranks
}

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Collective {
    /// [`Communicator::all_reduce_sum`].
    AllReduceSum,
    /// [`Communicator::all_reduce_sum_f64`].
    AllReduceSumF64,
    /// [`Communicator::reduce_scatter_sum`].
    ReduceScatterSum,
    /// [`Communicator::all_gather`].
    AllGather,
    /// [`Communicator::all_gather_bytes`].
    AllGatherBytes,
    /// [`Communicator::broadcast`].
    Broadcast {
        /// The rank whose data is sent.
        root: usize,
    },
    /// [`Communicator::barrier`].
    Barrier,
    /// [`Communicator::split`].
    Split,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduceSum => f.write_str("all_reduce_sum"),
            Self::AllReduceSumF64 => f.write_str("all_reduce_sum_f64"),
            Self::ReduceScatterSum => f.write_str("reduce_scatter_sum"),
            Self::AllGather => f.write_str("all_gather"),
            Self::AllGatherBytes => f.write_str("all_gather_bytes"),
            Self::Broadcast { root } => write!(f, "broadcast(root {root})"),
            Self::Barrier => f.write_str("barrier"),
            Self::Split => f.write_str("split"),
        }
    }
}

/// A collective as one rank called it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveCall {
    /// The operation.
    pub collective: Collective,
    /// Elements in the buffer; 0 where ranks may differ.
    pub length: usize,
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.collective {
            Collective::Barrier | Collective::Split | Collective::AllGatherBytes => {
                self.collective.fmt(f)
            }
            collective => write!(f, "{collective} of {} elements", self.length),
        }
    }
}
