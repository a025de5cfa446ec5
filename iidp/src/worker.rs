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
use crate::executor::{Cuts, MicroBatch, Mode, Workload};

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
    /// How its gradient comes out.
    pub(crate) delivery: Delivery,
    /// Untracked model with the current weights.
    pub(crate) template: M,
}

/// How the gradient of a micro-batch is computed and handed over.
#[derive(Debug, Clone)]
pub(crate) enum Delivery {
    /// By one backward pass, as a whole.
    Whole,
    /// By one backward pass per segment of the graph, as a whole, with the segment after which each slot was complete.
    Learn,
    /// By one backward pass per segment, each slot as soon as it is complete, which is known from before.
    Stream(Arc<[usize]>),
}

/// A part of a micro-batch's gradient.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) micro_batch: usize,
    /// The segment of the backward pass that has just ended, counted from the loss.
    pub(crate) segment: usize,
    pub(crate) gradient: FlatGradient,
}

/// What a worker sends back.
#[derive(Debug)]
pub(crate) enum WorkerReply {
    Piece(Piece),
    Answer(Answer),
}

/// What a worker computed.
#[derive(Debug)]
pub(crate) struct Computed {
    /// Mean loss over the samples of the micro-batch.
    pub(crate) loss: f32,
    /// The gradient, or what was not handed over before; `None` when evaluating.
    pub(crate) gradient: Option<FlatGradient>,
    /// After which segment each slot was complete, if that was to be learnt.
    pub(crate) readiness: Option<Arc<[usize]>>,
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
        replies: Sender<WorkerReply>,
    ) -> Result<Self, Error> {
        let pool = start_pool(context.rank, &format!("w{index}"), context.threads)?;
        let (jobs, inbox) = channel();
        let context = context.clone();
        pool.spawn(move || serve(&context, index, &inbox, &replies));
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
    replies: &Sender<WorkerReply>,
) {
    while let Ok(job) = jobs.recv() {
        let micro_batch = job.micro_batch;
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| compute(context, job, replies)))
            .unwrap_or_else(|panic| {
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
        if replies.send(WorkerReply::Answer(answer)).is_err() {
            return;
        }
    }
}

fn compute<W: Workload>(
    context: &WorkerContext<W>,
    job: Job<W::Model>,
    replies: &Sender<WorkerReply>,
) -> Result<Computed, Error> {
    let cuts = Cuts::new(!matches!(job.delivery, Delivery::Whole));
    let samples = &job.samples[job.range.clone()];
    let mut micro_batch = MicroBatch::new(samples, job.mode);
    micro_batch.index = job.micro_batch;
    micro_batch.step = job.step;
    micro_batch.seed = context.seed;
    let micro_batch = micro_batch.with_cuts(&cuts);
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
            readiness: None,
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
    // The last segment in which each slot was met; what no segment meets is complete after the last.
    let mut met: Vec<Option<usize>> = vec![None; context.layout.slots().len()];
    let mut segment = 0;
    let mut gradient = FlatGradient::empty(&context.layout);
    cuts.backward(&loss, |gradients| {
        let mut late = None;
        context
            .layout
            .take_gradients(&replica, gradients, &mut gradient, |slot| {
                if let Delivery::Stream(ready) = &job.delivery
                    && ready[slot] < segment
                {
                    late.get_or_insert(slot);
                }
                met[slot] = Some(segment);
            });
        if let Some(slot) = late {
            let parameter = context.layout.slots()[slot].path.clone();
            return Err(Error::LateGradient {
                micro_batch: job.micro_batch,
                parameter,
            });
        }
        if let Delivery::Stream(ready) = &job.delivery {
            let gradient = gradient.take_if(|slot| ready[slot] <= segment);
            let piece = Piece {
                micro_batch: job.micro_batch,
                segment,
                gradient,
            };
            // A rank that is gone needs no gradient.
            let _ = replies.send(WorkerReply::Piece(piece));
        }
        segment += 1;
        Ok(())
    })?;
    drop(loss);
    let readiness = matches!(job.delivery, Delivery::Learn).then(|| {
        met.into_iter()
            .map(|met| met.unwrap_or(segment.saturating_sub(1)))
            .collect()
    });
    let buffers = if context.layout.buffer_len() == 0 {
        Vec::new()
    } else {
        // `valid` first folds what this thread's forward pass left in the running statistics.
        context.layout.read_buffers(&replica.valid())
    };
    Ok(Computed {
        loss: value,
        gradient: Some(gradient),
        readiness,
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
