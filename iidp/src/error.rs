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
    /// A dimension that cannot be cut into as many equal parts as a layout asks for.
    #[error(
        "{dimension} of {size} cannot be cut into {parts_name} = {parts} equal parts: {parts_name} = {nearest_parts} or a size of {nearest_size} would do"
    )]
    Indivisible {
        /// What is to be cut, such as `heads` or `vocabulary`.
        dimension: String,
        /// Its size.
        size: usize,
        /// The dimension of the layout, such as `tp`.
        parts_name: &'static str,
        /// Its size in the layout.
        parts: usize,
        /// The nearest size of the layout's dimension that would do.
        nearest_parts: usize,
        /// The nearest size, from there upwards, that could be cut.
        nearest_size: usize,
    },
    /// A pipeline schedule that is not complete or would deadlock.
    #[error("schedule of rank {rank}: {problem}")]
    InvalidSchedule {
        /// The rank.
        rank: usize,
        /// What is wrong.
        problem: crate::pipeline::ScheduleProblem,
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
    /// An executor, or a list of layouts, without devices.
    #[error("0 devices given, expected at least one worker layout")]
    NoDevices,
    /// A device that is not there.
    #[error("{kind} device: {problem}")]
    DeviceUnavailable {
        /// The kind of device.
        kind: String,
        /// Why not, and what would work.
        problem: String,
    },
    /// A worker layout with a zero in it.
    #[error("rank {rank} has {field} = 0, expected at least 1")]
    ZeroInLayout {
        /// The rank.
        rank: usize,
        /// The field of the layout.
        field: &'static str,
    },
    /// Ranks with different local batches.
    #[error(
        "rank {rank} has a local batch of {local_batch} samples, expected {expected} as on rank 0: give unequal devices unequal numbers of workers or accumulation steps"
    )]
    UnequalLocalBatch {
        /// The rank.
        rank: usize,
        /// Its local batch.
        local_batch: usize,
        /// The local batch of rank 0.
        expected: usize,
    },
    /// A mesh whose dimensions do not multiply to the number of ranks.
    #[error(
        "mesh of dp {dp} x tp {tp} x pp {pp} over {world_size} ranks: expected dimensions of at least 1 whose product is the number of ranks"
    )]
    InvalidTopology {
        /// Data-parallel size.
        dp: usize,
        /// Tensor-parallel size.
        tp: usize,
        /// Pipeline-parallel size.
        pp: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A rank that does not exist.
    #[error("no rank {rank}, expected 0..{size}")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        size: usize,
    },
    /// A batch without samples.
    #[error("0 samples given, expected at least one")]
    EmptyBatch,
    /// A batch that cannot occupy the workers.
    #[error(
        "{samples} samples for {workers} virtual workers: the layout takes {expected}; give more samples or fewer workers"
    )]
    BatchTooSmall {
        /// Samples given.
        samples: usize,
        /// Virtual workers on all ranks.
        workers: usize,
        /// The layout's global batch.
        expected: usize,
    },
    /// A batch that does not fit the layout.
    #[error(
        "{samples} samples given, expected the layout's global batch of {expected} (micro-batches of {local_batch}): reassign the workers, or allow partial batches for fewer"
    )]
    BatchMismatch {
        /// Samples given.
        samples: usize,
        /// The layout's global batch.
        expected: usize,
        /// Samples per micro-batch.
        local_batch: usize,
    },
    /// A model tensor in a number format that cannot be trained here.
    #[error("tensor {path} is {dtype}, expected F32")]
    UnsupportedDType {
        /// Path of the tensor in the model.
        path: String,
        /// Its format.
        dtype: String,
    },
    /// A model that asks for no gradient.
    #[error(
        "the model has no trainable parameters: all its tensors are frozen, or it was made on a device without autodiff"
    )]
    NoTrainableParameters,
    /// A workload could not make its model.
    #[error("the model could not be made: {message}")]
    ModelInit {
        /// The workload's message.
        message: String,
    },
    /// A rank cannot take part in a re-sharding. No rank has done anything, and their communicators are good.
    #[error("rank {rank} cannot take part in the re-sharding: {problem}")]
    ReshardRefused {
        /// The rank.
        rank: usize,
        /// What is wrong with its state or its plan.
        problem: String,
    },
    /// A part of the state that no rank has.
    #[error("{elements} elements of {tensor} that rank {rank} needs are on no rank")]
    StateLost {
        /// The tensor, by its canonical name.
        tensor: String,
        /// A rank that needs the part.
        rank: usize,
        /// Size of the first missing part.
        elements: usize,
    },
    /// A file of state that cannot be read or written.
    #[error("{}: {problem}", path.display())]
    StateFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A tensor of a stored state that does not fit, or is not there.
    #[error("tensor {tensor}: {problem}")]
    StateTensor {
        /// Its name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// A thread could not be started.
    #[error("{what} thread of rank {rank} could not be started: {reason}")]
    ThreadStart {
        /// What the thread is for.
        what: &'static str,
        /// The rank.
        rank: usize,
        /// The system's reason.
        reason: String,
    },
    /// A workload could not compute a loss. The step was rolled back.
    #[error("micro-batch {micro_batch} on rank {rank}: {message}")]
    Workload {
        /// The rank.
        rank: usize,
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
        /// The workload's message.
        message: String,
    },
    /// An observer failed. The step was rolled back.
    #[error("observer of rank {rank}: {message}")]
    Observer {
        /// The rank.
        rank: usize,
        /// The observer's message.
        message: String,
    },
    /// A panic in a workload or the backend while a micro-batch was computed. The step was rolled back.
    #[error("micro-batch {micro_batch} on rank {rank} panicked: {message}")]
    WorkerPanicked {
        /// The rank.
        rank: usize,
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
        /// The panic's message.
        message: String,
    },
    /// A panic on a rank's own thread (in an observer). The step was rolled back.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A loss of more or fewer than one element.
    #[error("the loss of micro-batch {micro_batch} has {elements} elements, expected 1")]
    LossNotScalar {
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
        /// Elements of the loss.
        elements: usize,
    },
    /// A loss that does not depend on a trainable parameter.
    #[error(
        "the loss of micro-batch {micro_batch} depends on no trainable parameter: was it computed from the model on the given device?"
    )]
    LossNotTracked {
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
    },
    /// A parameter got a gradient in a later segment of the backward pass than in the step before, when its bucket was
    /// already under way. The step was rolled back, and the next one learns the order anew.
    #[error(
        "gradient of {parameter} in micro-batch {micro_batch} came after its bucket was sent: the graph is cut differently than in the last step"
    )]
    LateGradient {
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
        /// Path of the parameter.
        parameter: String,
    },
    /// A loss that is NaN or infinite. The step was rolled back.
    #[error("the loss of micro-batch {micro_batch} on rank {rank} is {loss}")]
    NonFiniteLoss {
        /// The rank.
        rank: usize,
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
        /// The loss.
        loss: f32,
    },
    /// A gradient that is NaN or infinite. The step was rolled back.
    #[error("the gradient of {parameter} is not finite: {}", place(*rank, *micro_batch))]
    NonFiniteGradient {
        /// The rank.
        rank: usize,
        /// Position of the micro-batch in the global batch; `None` if only the sum over micro-batches overflowed.
        micro_batch: Option<usize>,
        /// Path of the first such parameter.
        parameter: String,
    },
    /// Another rank's part of the step failed, so nothing was updated anywhere.
    #[error("step rolled back: {reason} at micro-batch {micro_batch} on rank {rank}")]
    StepRolledBack {
        /// The rank that failed.
        rank: usize,
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
        /// What happened there.
        reason: &'static str,
    },
    /// A worker did not finish a micro-batch in time.
    #[error("micro-batch {micro_batch} on rank {rank} took longer than {timeout:?}")]
    WorkerTimeout {
        /// The rank.
        rank: usize,
        /// Position of the micro-batch in the global batch.
        micro_batch: usize,
        /// The configured limit.
        timeout: Duration,
    },
    /// A worker's thread has ended.
    #[error("virtual worker {worker} of rank {rank} has ended")]
    WorkerGone {
        /// The rank.
        rank: usize,
        /// The worker.
        worker: usize,
    },
    /// Ranks did not answer in time.
    #[error("ranks {ranks:?} did not answer within {timeout:?}")]
    RankTimeout {
        /// The silent ranks.
        ranks: Vec<usize>,
        /// The configured limit.
        timeout: Duration,
    },
    /// A rank's thread has ended.
    #[error("rank {rank} has ended")]
    RankGone {
        /// The rank.
        rank: usize,
    },
    /// An executor that can no longer be used, after an earlier error.
    #[error("the executor cannot go on; start a new one from the last state: {cause}")]
    ExecutorLost {
        /// The earlier error.
        cause: String,
    },
}

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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

fn place(rank: usize, micro_batch: Option<usize>) -> String {
    match micro_batch {
        Some(m) => format!("micro-batch {m} on rank {rank}"),
        None => "only the sum over the global batch, each micro-batch is finite".to_owned(),
    }
}

impl Error {
    /// Whether the communicators of the world are of no more use.
    pub(crate) fn ends_communication(&self) -> bool {
        matches!(
            self,
            Self::RankLost { .. }
                | Self::Aborted { .. }
                | Self::CollectiveMismatch { .. }
                | Self::Timeout { .. }
                | Self::Observer { .. }
                | Self::RankPanicked { .. }
                | Self::WorkerTimeout { .. }
                | Self::WorkerGone { .. }
        )
    }

    /// Orders the errors that ranks report for one failure: what happened on a rank itself comes before what that
    /// rank's neighbours saw of it.
    pub(crate) fn distance_from_cause(&self) -> u8 {
        match self {
            Self::StepRolledBack { .. } => 2,
            Self::RankLost { .. } | Self::Aborted { .. } | Self::Timeout { .. } => 1,
            _ => 0,
        }
    }
}
