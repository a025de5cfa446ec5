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
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::Error;
use crate::bucket::{FlatGradient, ParameterLayout};
use crate::executor::{BackwardPass, Cuts, MicroBatch, Mode, Workload};

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
    /// What the segment that has just ended completed.
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

/// A replica's thread: takes rounds of jobs in order, answers each job.
pub(crate) struct VirtualWorker<M> {
    rounds: Sender<Vec<Job<M>>>,
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
    /// The rank's speed relative to the machine's, at most 1: a worker rests after each piece of work to keep to it.
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
        let (rounds, inbox) = channel();
        let context = context.clone();
        pool.spawn(move || {
            while let Ok(round) = inbox.recv() {
                if !serve(&context, index, round, &replies) {
                    return;
                }
            }
        });
        Ok(Self {
            rounds,
            _pool: pool,
        })
    }

    /// Queues a round of jobs: their forward passes run one after the other, then their backward passes, side by side if they come
    /// in segments. Returns false if the worker is gone.
    pub(crate) fn submit(&self, round: Vec<Job<M>>) -> bool {
        self.rounds.send(round).is_ok()
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

/// Computes a round and answers each of its jobs. Returns false if nobody waits for answers any more.
fn serve<W: Workload>(
    context: &WorkerContext<W>,
    worker: usize,
    round: Vec<Job<W::Model>>,
    replies: &Sender<WorkerReply>,
) -> bool {
    let answer = |micro_batch, start: Instant, result| {
        let answer = Answer {
            worker,
            micro_batch,
            result,
            start,
            duration: start.elapsed(),
        };
        replies.send(WorkerReply::Answer(answer)).is_ok()
    };
    let mut open = Vec::with_capacity(round.len());
    for job in round {
        let (micro_batch, start) = (job.micro_batch, Instant::now());
        let result = match paced(context, micro_batch, || forward(context, job)) {
            Ok(Forward::Open(one)) => {
                open.push((start, one));
                continue;
            }
            Ok(Forward::Evaluated(computed)) => Ok(computed),
            Err(error) => Err(error),
        };
        if !answer(micro_batch, start, result) {
            return false;
        }
    }
    // One segment of each in turn: what is complete of all of them can be reduced while the rest is computed.
    while !open.is_empty() {
        let mut still_open = Vec::with_capacity(open.len());
        for (start, mut one) in open {
            let micro_batch = one.micro_batch;
            let advanced = paced(context, micro_batch, || one.advance(context, replies));
            let result = match advanced {
                Ok(true) => {
                    still_open.push((start, one));
                    continue;
                }
                Ok(false) => paced(context, micro_batch, || Ok(one.finish(context))),
                Err(error) => {
                    // Nobody must hold a view of the weights once the answer is out.
                    drop(one);
                    Err(error)
                }
            };
            if !answer(micro_batch, start, result) {
                return false;
            }
        }
        open = still_open;
    }
    true
}

/// Computes at the rank's speed, and turns a panic into an error.
fn paced<W: Workload, T>(
    context: &WorkerContext<W>,
    micro_batch: usize,
    compute: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let start = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(compute)).unwrap_or_else(|panic| {
        Err(Error::WorkerPanicked {
            rank: context.rank,
            micro_batch,
            message: panic_message(&*panic),
        })
    });
    if context.speed < 1.0 {
        std::thread::sleep(start.elapsed().mul_f64(1.0 / context.speed - 1.0));
    }
    result
}

/// What a forward pass leaves.
enum Forward<M> {
    Evaluated(Computed),
    Open(Box<OpenMicroBatch<M>>),
}

fn forward<W: Workload>(
    context: &WorkerContext<W>,
    job: Job<W::Model>,
) -> Result<Forward<W::Model>, Error> {
    if job.mode == Mode::Evaluate {
        let device = context.device.clone().inner();
        let (_, loss) = loss_of(context, &job, &job.template, &Cuts::new(false), &device)?;
        return Ok(Forward::Evaluated(Computed {
            loss,
            gradient: None,
            readiness: None,
            buffers: Vec::new(),
        }));
    }
    let cuts = Cuts::new(!matches!(job.delivery, Delivery::Whole));
    let replica = job.template.clone().train();
    let (loss, value) = loss_of(context, &job, &replica, &cuts, &context.device)?;
    if !loss.is_tracked() {
        return Err(Error::LossNotTracked {
            micro_batch: job.micro_batch,
        });
    }
    Ok(Forward::Open(Box::new(OpenMicroBatch {
        micro_batch: job.micro_batch,
        delivery: job.delivery,
        replica,
        loss: value,
        pass: cuts.backward(loss),
        gradient: FlatGradient::empty(&context.layout),
        met: vec![None; context.layout.slots().len()],
        segment: 0,
    })))
}

/// The loss of a job, as a tensor and as a number.
fn loss_of<W: Workload>(
    context: &WorkerContext<W>,
    job: &Job<W::Model>,
    model: &W::Model,
    cuts: &Cuts,
    device: &Device,
) -> Result<(Tensor<1>, f32), Error> {
    let mut micro_batch = MicroBatch::new(&job.samples[job.range.clone()], job.mode);
    micro_batch.index = job.micro_batch;
    micro_batch.step = job.step;
    micro_batch.seed = context.seed;
    let loss = context
        .workload
        .loss(model, &micro_batch.with_cuts(cuts), device)
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
    if !value.is_finite() {
        return Err(Error::NonFiniteLoss {
            rank: context.rank,
            micro_batch: job.micro_batch,
            loss: value,
        });
    }
    Ok((loss, value))
}

/// A micro-batch whose backward pass is not over.
struct OpenMicroBatch<M> {
    micro_batch: usize,
    delivery: Delivery,
    replica: M,
    loss: f32,
    pass: BackwardPass,
    /// What is computed and not handed over.
    gradient: FlatGradient,
    /// The last segment in which each slot was met.
    met: Vec<Option<usize>>,
    /// Segments that are computed.
    segment: usize,
}

impl<M: Module> OpenMicroBatch<M> {
    /// Computes the next segment and hands over what is complete then. Returns false if there was none left.
    fn advance<W: Workload<Model = M>>(
        &mut self,
        context: &WorkerContext<W>,
        replies: &Sender<WorkerReply>,
    ) -> Result<bool, Error> {
        let Some(gradients) = self.pass.next_segment() else {
            return Ok(false);
        };
        let segment = self.segment;
        let (met, delivery) = (&mut self.met, &self.delivery);
        let mut late = None;
        context
            .layout
            .take_gradients(&self.replica, gradients, &mut self.gradient, |slot| {
                if let Delivery::Stream(ready) = delivery
                    && ready[slot] < segment
                {
                    late.get_or_insert(slot);
                }
                met[slot] = Some(segment);
            });
        if let Some(slot) = late {
            return Err(Error::LateGradient {
                micro_batch: self.micro_batch,
                parameter: context.layout.slots()[slot].path.clone(),
            });
        }
        if let Delivery::Stream(ready) = &self.delivery {
            let gradient = self.gradient.take_if(|slot| ready[slot] <= segment);
            // A rank that is gone needs no gradient.
            let _ = replies.send(WorkerReply::Piece(Piece {
                micro_batch: self.micro_batch,
                gradient,
            }));
        }
        self.segment += 1;
        Ok(true)
    }

    fn finish<W: Workload<Model = M>>(self, context: &WorkerContext<W>) -> Computed {
        let last = self.segment.saturating_sub(1);
        let readiness = matches!(self.delivery, Delivery::Learn).then(|| {
            // What no segment meets is complete after the last.
            self.met.iter().map(|met| met.unwrap_or(last)).collect()
        });
        let buffers = if context.layout.buffer_len() == 0 {
            Vec::new()
        } else {
            // `valid` first folds what this thread's forward pass left in the running statistics.
            context.layout.read_buffers(&self.replica.valid())
        };
        Computed {
            loss: self.loss,
            gradient: Some(self.gradient),
            readiness,
            buffers,
        }
    }
}

/// The text of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}
