//! Virtual workers: replicas of the model that run side by side on one device.
//!
//! A [`VirtualWorker`] owns a rayon pool, on whose thread it runs, and gets for each step a *template* of the
//! model: untracked tensors that are views of the device's parameter storage. `Module::train` turns it into a
//! replica with leaves of its own, at the cost of no copy. Replicas must never share leaves (a cloned module
//! does): Burn's autodiff graphs lock each other where leaves are shared, and threads deadlock.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::Error;
use crate::bucket::{FlatGradient, ParameterLayout};
use crate::executor::{MicroBatch, Mode, Workload};

/// One micro-batch to compute.
pub(crate) struct Job<M> {
    /// Position in the global batch.
    pub(crate) micro_batch: usize,
    /// The global batch.
    pub(crate) samples: Arc<[u64]>,
    /// The samples of this micro-batch.
    pub(crate) range: Range<usize>,
    /// Number of the step.
    pub(crate) step: u64,
    pub(crate) mode: Mode,
    /// Untracked model with the current weights.
    pub(crate) template: M,
}

/// What a worker computed.
#[derive(Debug)]
pub(crate) struct Computed {
    /// Mean loss over the samples of the micro-batch.
    pub(crate) loss: f32,
    /// `None` when evaluating.
    pub(crate) gradient: Option<FlatGradient>,
    /// Buffers after the forward pass; empty if the model has none or when evaluating.
    pub(crate) buffers: Vec<f32>,
}

/// A worker's answer to a job.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) worker: usize,
    pub(crate) micro_batch: usize,
    pub(crate) result: Result<Computed, Error>,
    pub(crate) start: Instant,
    pub(crate) duration: Duration,
}

/// A replica's thread: takes jobs in order, answers each of them.
pub(crate) struct VirtualWorker<M> {
    jobs: Sender<Job<M>>,
    /// Kept so that the threads live as long as the worker.
    _pool: rayon::ThreadPool,
}

impl<M> std::fmt::Debug for VirtualWorker<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualWorker").finish_non_exhaustive()
    }
}

/// What every worker of a rank needs to know.
pub(crate) struct WorkerContext<W: Workload> {
    pub(crate) workload: Arc<W>,
    pub(crate) layout: Arc<ParameterLayout>,
    /// Device with automatic differentiation.
    pub(crate) device: Device,
    pub(crate) rank: usize,
    pub(crate) seed: u64,
    pub(crate) threads: usize,
    /// The rank's speed relative to the machine's, at most 1: a worker rests after each micro-batch to keep to it.
    pub(crate) speed: f64,
}

impl<W: Workload> Clone for WorkerContext<W> {
    fn clone(&self) -> Self {
        Self {
            workload: Arc::clone(&self.workload),
            layout: Arc::clone(&self.layout),
            device: self.device.clone(),
            ..*self
        }
    }
}

impl<M: Module + 'static> VirtualWorker<M> {
    /// Starts worker `index` of a rank, with a pool of its own.
    pub(crate) fn start<W: Workload<Model = M>>(
        context: &WorkerContext<W>,
        index: usize,
        answers: Sender<Answer>,
    ) -> Result<Self, Error> {
        let pool = start_pool(context.rank, &format!("w{index}"), context.threads)?;
        let (jobs, inbox) = channel();
        let context = context.clone();
        pool.spawn(move || serve(&context, index, &inbox, &answers));
        Ok(Self { jobs, _pool: pool })
    }

    /// Queues a job. Returns false if the worker is gone.
    pub(crate) fn submit(&self, job: Job<M>) -> bool {
        self.jobs.send(job).is_ok()
    }
}

/// A pool of a rank's own; `role` is part of its threads' names.
pub(crate) fn start_pool(
    rank: usize,
    role: &str,
    threads: usize,
) -> Result<rayon::ThreadPool, Error> {
    let name = format!("iidp-r{rank}-{role}");
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |thread| format!("{name}-{thread}"))
        .build()
        .map_err(|error| Error::ThreadStart {
            what: "worker",
            rank,
            reason: error.to_string(),
        })
}

fn serve<W: Workload>(
    context: &WorkerContext<W>,
    worker: usize,
    jobs: &Receiver<Job<W::Model>>,
    answers: &Sender<Answer>,
) {
    while let Ok(job) = jobs.recv() {
        let micro_batch = job.micro_batch;
        let start = Instant::now();
        let result =
            catch_unwind(AssertUnwindSafe(|| compute(context, job))).unwrap_or_else(|panic| {
                Err(Error::WorkerPanicked {
                    rank: context.rank,
                    micro_batch,
                    message: panic_message(&*panic),
                })
            });
        if context.speed < 1.0 {
            std::thread::sleep(start.elapsed().mul_f64(1.0 / context.speed - 1.0));
        }
        let answer = Answer {
            worker,
            micro_batch,
            result,
            start,
            duration: start.elapsed(),
        };
        if answers.send(answer).is_err() {
            return;
        }
    }
}

fn compute<W: Workload>(context: &WorkerContext<W>, job: Job<W::Model>) -> Result<Computed, Error> {
    let micro_batch = MicroBatch {
        samples: &job.samples[job.range.clone()],
        index: job.micro_batch,
        step: job.step,
        seed: context.seed,
        mode: job.mode,
    };
    let loss_of = |model: &W::Model, device: &Device| -> Result<(Tensor<1>, f32), Error> {
        let loss = context
            .workload
            .loss(model, &micro_batch, device)
            .map_err(|error| Error::Workload {
                rank: context.rank,
                micro_batch: job.micro_batch,
                message: error.to_string(),
            })?;
        let elements = loss.shape().num_elements();
        if elements != 1 {
            return Err(Error::LossNotScalar {
                micro_batch: job.micro_batch,
                elements,
            });
        }
        let value: f32 = loss.clone().into_scalar();
        if value.is_finite() {
            Ok((loss, value))
        } else {
            Err(Error::NonFiniteLoss {
                rank: context.rank,
                micro_batch: job.micro_batch,
                loss: value,
            })
        }
    };
    if job.mode == Mode::Evaluate {
        let (_, loss) = loss_of(&job.template, &context.device.clone().inner())?;
        return Ok(Computed {
            loss,
            gradient: None,
            buffers: Vec::new(),
        });
    }
    let replica = job.template.train();
    let (loss, value) = loss_of(&replica, &context.device)?;
    if !loss.is_tracked() {
        return Err(Error::LossNotTracked {
            micro_batch: job.micro_batch,
        });
    }
    let mut gradients = loss.backward();
    drop(loss);
    let gradient = context.layout.take_gradients(&replica, &mut gradients);
    let buffers = if context.layout.buffer_len() == 0 {
        Vec::new()
    } else {
        // `valid` first folds what this thread's forward pass left in the running statistics.
        context.layout.read_buffers(&replica.valid())
    };
    Ok(Computed {
        loss: value,
        gradient: Some(gradient),
        buffers,
    })
}

/// The text of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}
