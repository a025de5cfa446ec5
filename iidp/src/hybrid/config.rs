//! Settings of a hybrid executor, validated once in `init`.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{HybridExecutor, HybridWorkload};
use crate::communicator::{Communicator, LocalCommunicator};
use crate::executor::PlainAccumulation;
use crate::optimizer::OptimizerConfig;
use crate::pipeline::Schedule;
use crate::topology::BatchPlan;
use crate::{
    Coordinates, Error, MicroBatchObserver, ParallelDims, ParameterLayout, Topology, WorkerLayout,
};

/// Which schedule the stages follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum ScheduleKind {
    /// [`Schedule::gpipe`].
    Gpipe,
    /// [`Schedule::one_forward_one_backward`].
    #[default]
    OneForwardOneBackward,
    /// [`Schedule::interleaved`].
    Interleaved {
        /// Chunks of the model on each stage.
        chunks: usize,
    },
    /// [`Schedule::zero_bubble_h1`]: gradients of the weights of the layers in [`tensor_parallel`](crate::tensor_parallel) are computed later than
    /// those of their inputs.
    ZeroBubbleH1,
}

impl ScheduleKind {
    /// Chunks of the model on each stage.
    pub const fn chunks(self) -> usize {
        match self {
            Self::Interleaved { chunks } => chunks,
            _ => 1,
        }
    }

    /// The schedule for a number of micro-batches.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] without stages, chunks or micro-batches.
    pub fn schedule(self, stages: usize, micro_batches: usize) -> Result<Schedule, Error> {
        match self {
            Self::Gpipe => Schedule::gpipe(stages, micro_batches),
            Self::OneForwardOneBackward => {
                Schedule::one_forward_one_backward(stages, micro_batches)
            }
            Self::Interleaved { chunks } => Schedule::interleaved(stages, chunks, micro_batches),
            Self::ZeroBubbleH1 => Schedule::zero_bubble_h1(stages, micro_batches),
        }
    }
}

/// What an observer's factory is told about the rank that the observer is for.
///
/// A statistic over all parameters, such as a squared norm, is the sum over ranks of what each rank finds in the slots that it owns: every element of the model is owned by one rank of
/// each replica. A micro-batch is computed by one replica; the reduced gradient is the same on all replicas, so count it on the first.
#[derive(Debug)]
pub struct HybridObserverContext<'a> {
    /// The rank.
    pub rank: usize,
    /// Its place in the mesh.
    pub coordinates: Coordinates,
    /// The sizes of the mesh.
    pub dims: ParallelDims,
    /// What the rank's replica does in a step.
    pub layout: WorkerLayout,
    /// Where each parameter of the rank lies in its flat gradient.
    pub parameters: &'a ParameterLayout,
    /// For each slot whether the rank owns it: shards are owned by their rank, replicated parameters by the first rank of the tensor-parallel group, tied
    /// ones by the stage nearer to the input. A slot that is tied and not owned is never passed to `accumulate`; its gradient is in the owner's.
    pub owned: &'a [bool],
}

type ObserverFactory =
    Box<dyn FnMut(&HybridObserverContext<'_>) -> Box<dyn MicroBatchObserver> + Send>;

/// Settings of a [`HybridExecutor`].
#[derive(Clone)]
pub struct HybridConfig {
    pub(super) dims: ParallelDims,
    pub(super) layouts: Vec<WorkerLayout>,
    pub(super) optimizer: OptimizerConfig,
    pub(super) clip_norm: Option<f64>,
    pub(super) timeout: Duration,
    pub(super) bucket_bytes: usize,
    pub(super) threads_per_worker: usize,
    pub(super) seed: u64,
    pub(super) schedule: ScheduleKind,
    pub(super) cuts: Option<Vec<usize>>,
    pub(super) recompute: bool,
    pub(super) sequence_parallel: bool,
    /// Shared, since settings are copied when the layout changes.
    pub(super) observers: Option<Arc<Mutex<ObserverFactory>>>,
}

impl fmt::Debug for HybridConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HybridConfig")
            .field("dims", &self.dims)
            .field("layouts", &self.layouts)
            .field("schedule", &self.schedule)
            .field("cuts", &self.cuts)
            .field("recompute", &self.recompute)
            .field("sequence_parallel", &self.sequence_parallel)
            .finish_non_exhaustive()
    }
}

impl HybridConfig {
    /// A mesh, and what each replica does in a step: `layouts[r]` says how many virtual workers replica `r` has, each of which is a pipeline through all
    /// its stages, and how many micro-batches each of them computes. They need not be equal.
    ///
    /// 1F1B, even stages, no recompute, no clipping, a time-out of 5 minutes, buckets of 1 MiB, one thread per worker, `AdamW` with Burn's default settings.
    pub fn new(dims: ParallelDims, layouts: Vec<WorkerLayout>) -> Self {
        Self {
            dims,
            layouts,
            optimizer: crate::optimizer::AdamWConfig::new().into(),
            clip_norm: None,
            timeout: Duration::from_mins(5),
            bucket_bytes: 1 << 20,
            threads_per_worker: 1,
            seed: 0,
            schedule: ScheduleKind::default(),
            cuts: None,
            recompute: false,
            sequence_parallel: false,
            observers: None,
        }
    }

    /// The optimizer.
    #[must_use]
    pub fn with_optimizer(mut self, optimizer: impl Into<OptimizerConfig>) -> Self {
        self.optimizer = optimizer.into();
        self
    }

    /// Scales the gradient down to this L2 norm where it is longer. The norm is that of the whole model: every element counts once.
    #[must_use]
    pub fn with_clip_norm(mut self, norm: f64) -> Self {
        self.clip_norm = Some(norm);
        self
    }

    /// How long a rank waits for others before it gives up with an error; the caller waits twice as long for the ranks. Choose it above the time of the longest step.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Gradients are reduced over replicas in buckets of about this many bytes.
    #[must_use]
    pub fn with_bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// Threads in the pool of each virtual worker of each rank.
    #[must_use]
    pub fn with_threads_per_worker(mut self, threads: usize) -> Self {
        self.threads_per_worker = threads;
        self
    }

    /// Seed of the initial weights and of [`MicroBatch::sample_seed`](crate::MicroBatch::sample_seed). 0 by default.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The schedule of the stages.
    #[must_use]
    pub fn with_schedule(mut self, schedule: ScheduleKind) -> Self {
        self.schedule = schedule;
        self
    }

    /// Where the model is cut: the first block of each position of the pipeline but the first. Position `c p + s` is chunk `c` of stage `s`.
    #[must_use]
    pub fn with_cuts(mut self, cuts: Vec<usize>) -> Self {
        self.cuts = Some(cuts);
        self
    }

    /// Whether a stage keeps only the input of a micro-batch, and computes the forward pass again before the backward pass.
    #[must_use]
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }

    /// Whether tensor-parallel groups are [sequence-parallel](crate::tensor_parallel::TensorParallel::with_sequence_parallel). The model's blocks must allow it.
    #[must_use]
    pub fn with_sequence_parallel(mut self, sequence_parallel: bool) -> Self {
        self.sequence_parallel = sequence_parallel;
        self
    }

    /// Makes an observer for each rank. With observers, the two stages of a tied parameter exchange its gradient in every micro-batch instead of once per step.
    #[must_use]
    pub fn with_observers<F>(mut self, factory: F) -> Self
    where
        F: FnMut(&HybridObserverContext<'_>) -> Box<dyn MicroBatchObserver> + Send + 'static,
    {
        self.observers = Some(Arc::new(Mutex::new(Box::new(factory))));
        self
    }

    /// Makes the model and starts the ranks as threads of this process.
    ///
    /// # Errors
    ///
    /// [`Error::Indivisible`] for a mesh that does not divide the model, [`Error::LengthMismatch`] unless there is one layout per replica,
    /// [`Error::Invalid`] and the like for settings that cannot be, [`Error::ModelInit`] and [`Error::NoTrainableParameters`] for models that cannot be
    /// trained here.
    pub fn init<W: HybridWorkload>(self, workload: W) -> Result<HybridExecutor<W>, Error> {
        self.validate(workload.model())?;
        let communicators = local_world(self.dims.world_size(), self.timeout)?;
        HybridExecutor::start(self, Arc::new(workload), communicators, true)
    }

    /// Makes the model and starts those ranks that run in this process: one for each of `communicators`, which belong to a world of `dp x tp x pp` ranks
    /// (processes under MPI, say). Every process calls it with the same settings, and then the same methods in the same order.
    ///
    /// # Errors
    ///
    /// As [`Self::init`]; [`Error::InvalidTopology`] if the world has another size.
    pub fn init_with<W: HybridWorkload>(
        self,
        workload: W,
        communicators: Vec<Box<dyn Communicator>>,
    ) -> Result<HybridExecutor<W>, Error> {
        self.validate(workload.model())?;
        if communicators.is_empty() {
            return Err(Error::NoDevices);
        }
        for communicator in &communicators {
            Topology::new(self.dims, communicator.size())?;
        }
        HybridExecutor::start(self, Arc::new(workload), communicators, false)
    }

    pub(super) fn validate(&self, model: &impl super::BlockModel) -> Result<(), Error> {
        Topology::new(self.dims, self.dims.world_size())?;
        BatchPlan::of(&self.layouts)?;
        if self.layouts.len() != self.dims.dp {
            return Err(Error::LengthMismatch {
                what: "layouts (one per replica)".to_owned(),
                got: self.layouts.len(),
                expected: self.dims.dp,
            });
        }
        let invalid = |what, problem: String| Err(Error::Invalid { what, problem });
        if self.schedule.chunks() > 1 && self.dims.pp == 1 {
            return invalid(
                "interleaved schedule",
                format!(
                    "{} chunks on one stage, expected pp of at least 2",
                    self.schedule.chunks()
                ),
            );
        }
        if self.recompute && self.schedule == ScheduleKind::ZeroBubbleH1 {
            return invalid(
                "recompute",
                "with the zero-bubble schedule, expected another schedule".to_owned(),
            );
        }
        for (what, fine, got) in [
            (
                "time-out",
                !self.timeout.is_zero(),
                format!("{:?}", self.timeout),
            ),
            (
                "bucket size in bytes",
                self.bucket_bytes > 0,
                self.bucket_bytes.to_string(),
            ),
            (
                "threads per worker",
                self.threads_per_worker > 0,
                self.threads_per_worker.to_string(),
            ),
            (
                "clip norm",
                self.clip_norm
                    .is_none_or(|norm| norm > 0.0 && norm.is_finite()),
                format!("{:?}", self.clip_norm),
            ),
        ] {
            if !fine {
                return invalid(what, format!("got {got}, expected more than zero"));
            }
        }
        self.schedule.schedule(self.dims.pp, 1)?;
        model.check(self.dims)
    }

    /// The observer of a rank.
    pub(super) fn observe(
        &self,
        rank: usize,
        coordinates: Coordinates,
        parameters: &ParameterLayout,
        owned: &[bool],
    ) -> Box<dyn MicroBatchObserver> {
        let context = HybridObserverContext {
            rank,
            coordinates,
            dims: self.dims,
            layout: self.layouts[coordinates.dp],
            parameters,
            owned,
        };
        match &self.observers {
            Some(factory) => {
                let mut factory = factory.lock().unwrap_or_else(PoisonError::into_inner);
                factory(&context)
            }
            None => Box::new(PlainAccumulation),
        }
    }
}

/// The ends of a world of threads.
pub(super) fn local_world(
    ranks: usize,
    timeout: Duration,
) -> Result<Vec<Box<dyn Communicator>>, Error> {
    let group = LocalCommunicator::group(ranks, timeout)?;
    Ok(group
        .into_iter()
        .map(|end| Box::new(end) as Box<dyn Communicator>)
        .collect())
}
