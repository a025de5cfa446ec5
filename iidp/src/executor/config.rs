//! Settings of an executor, validated once in `init`.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;

use super::observer::{ObserverFactory, Opaque, PlainAccumulation};
use super::{Executor, Workload};
use crate::communicator::{Communicator, LocalCommunicator};
use crate::optimizer::OptimizerConfig;
use crate::topology::BatchPlan;
use crate::{Error, MicroBatchObserver, ObserverContext, WorkerLayout};

/// Settings of an [`Executor`].
///
/// # Examples
///
/// Two unequal devices: the first runs two replicas of three micro-batches each, the second one replica of two.
///
/// ```
/// use iidp::{AdamWConfig, ExecutorConfig, WorkerLayout};
///
/// let config = ExecutorConfig::new(vec![WorkerLayout::new(4, 2, 3), WorkerLayout::new(4, 1, 2)])
///     .with_optimizer(AdamWConfig::new())
///     .with_clip_norm(1.0)
///     .with_seed(7);
/// # let _ = config;
/// ```
#[derive(Debug)]
pub struct ExecutorConfig {
    pub(super) layouts: Vec<WorkerLayout>,
    pub(super) devices: Option<Vec<Device>>,
    pub(super) optimizer: OptimizerConfig,
    pub(super) clip_norm: Option<f64>,
    pub(super) timeout: Duration,
    pub(super) bucket_bytes: usize,
    pub(super) threads_per_worker: usize,
    pub(super) speeds: Option<Vec<f64>>,
    pub(super) seed: u64,
    pub(super) partial_batches: bool,
    pub(super) overlap: Option<bool>,
    pub(super) overlap_depth: usize,
    pub(super) sharded_optimizer: bool,
    pub(super) observers: Opaque<ObserverFactory>,
}

impl ExecutorConfig {
    /// One rank per layout, each on the flex backend, with one thread per worker; no clipping, a time-out of 5 minutes, buckets
    /// of 1 MiB, `AdamW` with Burn's default settings.
    pub fn new(layouts: Vec<WorkerLayout>) -> Self {
        Self {
            layouts,
            devices: None,
            optimizer: crate::optimizer::AdamWConfig::new().into(),
            clip_norm: None,
            timeout: Duration::from_mins(5),
            bucket_bytes: 1 << 20,
            threads_per_worker: 1,
            speeds: None,
            seed: 0,
            partial_batches: false,
            overlap: None,
            overlap_depth: 1,
            sharded_optimizer: false,
            observers: Opaque(Box::new(|_| Box::new(PlainAccumulation))),
        }
    }

    /// The device of each rank, by rank; several ranks may name the same one. Flex by default.
    #[must_use]
    pub fn with_devices(mut self, devices: Vec<Device>) -> Self {
        self.devices = Some(devices);
        self
    }

    /// The optimizer.
    #[must_use]
    pub fn with_optimizer(mut self, optimizer: impl Into<OptimizerConfig>) -> Self {
        self.optimizer = optimizer.into();
        self
    }

    /// Scales the gradient down to this L2 norm where it is longer.
    #[must_use]
    pub fn with_clip_norm(mut self, norm: f64) -> Self {
        self.clip_norm = Some(norm);
        self
    }

    /// How long a rank waits for others, and the caller for a step, before it gives up with an error.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Gradients are reduced in buckets of about this many bytes.
    #[must_use]
    pub fn with_bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }

    /// Threads in the pool of each virtual worker.
    #[must_use]
    pub fn with_threads_per_worker(mut self, threads: usize) -> Self {
        self.threads_per_worker = threads;
        self
    }

    /// Models unequal devices on equal hardware: rank r runs at `speeds[r]` (at most 1) times the machine's speed, by
    /// resting after each micro-batch. Without it every rank runs as fast as it can.
    #[must_use]
    pub fn with_emulated_speeds(mut self, speeds: Vec<f64>) -> Self {
        self.speeds = Some(speeds);
        self
    }

    /// Seed of the initial weights (Burn's generator is seeded with it before [`Workload::init`]) and of
    /// [`MicroBatch::sample_seed`](crate::MicroBatch::sample_seed). 0 by default.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether a step may get fewer samples than the layout's global batch (the end of an epoch). The last micro-batch is
    /// then smaller, and workers without samples idle; the loss stays the mean over all samples. Off by default.
    #[must_use]
    pub fn with_partial_batches(mut self, allowed: bool) -> Self {
        self.partial_batches = allowed;
        self
    }

    /// Whether a thread per rank reduces buckets while the backward passes of each worker's last micro-batches are still under way, as far as the model
    /// [cuts](crate::MicroBatch::cut) its graph. By default only with communicators from outside: among the threads of a process
    /// communication is work for the same cores.
    #[must_use]
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// With overlap: how many of each worker's last micro-batches go through their backward passes together, segment by segment. With more
    /// of them communication begins earlier, and has more compute to hide behind; the activations of all of them
    /// are held at a time. 1 by default.
    #[must_use]
    pub fn with_overlap_depth(mut self, micro_batches: usize) -> Self {
        self.overlap_depth = micro_batches;
        self
    }

    /// Whether each rank keeps the optimizer's moments of its share of the parameters only and gets the other shares' updates from the other
    /// ranks (`ZeRO` stage 1, see [`ShardedOptimizer`](crate::optimizer::ShardedOptimizer)). The result is that of the whole
    /// optimizer. If a rank is lost during the update, the run can only be continued from an [`ExecutorState`](crate::ExecutorState). Off by default.
    #[must_use]
    pub fn with_sharded_optimizer(mut self, sharded: bool) -> Self {
        self.sharded_optimizer = sharded;
        self
    }

    /// Makes an observer for each rank. It is called for every rank at the start and after each change of layout.
    #[must_use]
    pub fn with_observers<F>(mut self, factory: F) -> Self
    where
        F: FnMut(&ObserverContext<'_>) -> Box<dyn MicroBatchObserver> + Send + 'static,
    {
        self.observers = Opaque(Box::new(factory));
        self
    }

    /// Makes the model and starts the ranks as threads of this process.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevices`], [`Error::ZeroInLayout`], [`Error::UnequalLocalBatch`], [`Error::Invalid`] and
    /// [`Error::LengthMismatch`] for settings that cannot be; errors of [`Workload::init`]; [`Error::UnsupportedDType`] and
    /// [`Error::NoTrainableParameters`] for models that cannot be trained here.
    pub fn init<W: Workload>(self, workload: W) -> Result<Executor<W>, Error> {
        self.validate()?;
        Executor::start(self, Arc::new(workload), None)
    }

    /// Makes the model and starts those ranks that run in this process: one for each of `communicators`, which belong to a
    /// world of as many ranks as there are layouts (processes under MPI, say). Every process calls it with
    /// the same settings, and then the same methods in the same order.
    ///
    /// # Errors
    ///
    /// As [`Self::init`]; [`Error::LengthMismatch`] if the world has another size.
    pub fn init_with<W: Workload>(
        self,
        workload: W,
        communicators: Vec<Box<dyn Communicator>>,
    ) -> Result<Executor<W>, Error> {
        self.validate()?;
        if communicators.is_empty() {
            return Err(Error::NoDevices);
        }
        for communicator in &communicators {
            if communicator.size() != self.layouts.len() {
                return Err(Error::LengthMismatch {
                    what: "layouts (one per rank of the world)".to_owned(),
                    got: self.layouts.len(),
                    expected: communicator.size(),
                });
            }
        }
        Executor::start(self, Arc::new(workload), Some(communicators))
    }

    fn validate(&self) -> Result<(), Error> {
        BatchPlan::of(&self.layouts)?;
        let ranks = self.layouts.len();
        let per_rank = |what: &str, got: usize| {
            if got == ranks {
                Ok(())
            } else {
                Err(Error::LengthMismatch {
                    what: format!("{what} (one per rank)"),
                    got,
                    expected: ranks,
                })
            }
        };
        if let Some(devices) = &self.devices {
            per_rank("devices", devices.len())?;
        }
        if let Some(speeds) = &self.speeds {
            per_rank("emulated speeds", speeds.len())?;
            check_speeds(speeds)?;
        }
        let positive = |what: &'static str, fine: bool, got: String| {
            if fine {
                Ok(())
            } else {
                Err(Error::Invalid {
                    what,
                    problem: format!("got {got}, expected more than zero"),
                })
            }
        };
        positive(
            "time-out",
            !self.timeout.is_zero(),
            format!("{:?}", self.timeout),
        )?;
        positive(
            "bucket size in bytes",
            self.bucket_bytes > 0,
            self.bucket_bytes.to_string(),
        )?;
        positive(
            "overlap depth",
            self.overlap_depth > 0,
            self.overlap_depth.to_string(),
        )?;
        positive(
            "threads per worker",
            self.threads_per_worker > 0,
            self.threads_per_worker.to_string(),
        )?;
        if let Some(norm) = self.clip_norm {
            positive(
                "clip norm",
                norm > 0.0 && norm.is_finite(),
                norm.to_string(),
            )?;
        }
        Ok(())
    }
}

pub(super) fn check_speeds(speeds: &[f64]) -> Result<(), Error> {
    match speeds
        .iter()
        .position(|speed| !(*speed > 0.0 && *speed <= 1.0))
    {
        None => Ok(()),
        Some(rank) => Err(Error::Invalid {
            what: "emulated speed",
            problem: format!(
                "rank {rank} has {}, expected more than 0 and at most 1",
                speeds[rank]
            ),
        }),
    }
}

/// The ends of a group of `ranks` threads.
pub(super) fn local_group(
    ranks: usize,
    timeout: Duration,
) -> Result<Vec<Box<dyn Communicator>>, Error> {
    let group = LocalCommunicator::group(ranks, timeout)?;
    Ok(group
        .into_iter()
        .map(|end| Box::new(end) as Box<dyn Communicator>)
        .collect())
}
