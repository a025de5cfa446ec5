//! A rank: the thread that owns one logical device, its workers, its share of the collectives and its copy of the state.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use burn::module::Module;

use super::accumulation::{Accumulation, Readiness, Stream};
use super::agreement::{Agreement, Failure};
use super::jobs::{News, rounds, run_jobs};
use super::output::RankTimings;
use super::rank_optimizer::RankOptimizer;
use super::reducer::Reducer;
use super::state::ExecutorState;
use super::{MicroBatchObserver, Mode, Workload};
use crate::bucket::ParameterStore;
use crate::communicator::Communicator;
use crate::optimizer::{OptimizerConfig, StepOptions, squared_norm};
use crate::topology::BatchPlan;
use crate::worker::{
    Delivery, Job, VirtualWorker, WorkerContext, WorkerReply, panic_message, start_pool,
};
use crate::{Error, WorkerLayout};

/// What the executor asks of a rank.
pub(super) enum Command {
    /// Train on the global batch.
    Step {
        samples: Arc<[u64]>,
        learning_rate: f64,
        called: Instant,
    },
    /// Mean loss over the samples, without learning.
    Evaluate { samples: Arc<[u64]> },
    /// Take rank 0's parameters and buffers.
    Broadcast,
    /// Copy out the state, a collective of all ranks; those that are not to answer with it only take part.
    Export { answer: bool },
    /// Take over a state.
    Restore(Arc<ExecutorState>),
    /// An untracked model with the current weights.
    Model,
    /// Another amount of work.
    Relayout {
        layout: WorkerLayout,
        plan: BatchPlan,
        speed: f64,
        observer: Box<dyn MicroBatchObserver>,
    },
    /// Another communicator, after the old one failed.
    Reconnect(Box<dyn Communicator>),
}

/// What a rank answers.
pub(super) enum Payload<M> {
    Done,
    Step(RankStep),
    Evaluated { loss: f64 },
    State(Box<ExecutorState>),
    Model(Box<M>),
}

/// A rank's part of a step's output.
pub(super) struct RankStep {
    pub(super) losses: Vec<f64>,
    pub(super) gradient_norm: f64,
    pub(super) clipped: bool,
    pub(super) timings: RankTimings,
}

pub(super) struct Reply<M> {
    pub(super) rank: usize,
    /// Steps that the rank has taken: the executor checks that ranks agree.
    pub(super) step: u64,
    /// Whether an update was begun and not finished.
    pub(super) torn: bool,
    pub(super) result: Result<Payload<M>, Error>,
}

/// Settings that a rank keeps for life.
pub(super) struct RankSettings {
    pub(super) overlap: bool,
    pub(super) overlap_depth: usize,
    pub(super) sharded_optimizer: bool,
    pub(super) clip_norm: Option<f64>,
    pub(super) timeout: Duration,
}

pub(super) struct Rank<W: Workload> {
    pub(super) context: WorkerContext<W>,
    pub(super) settings: RankSettings,
    pub(super) communicator: Box<dyn Communicator>,
    pub(super) observer: Box<dyn MicroBatchObserver>,
    workers: Vec<VirtualWorker<W::Model>>,
    replies: Receiver<WorkerReply>,
    /// As many threads as the workers have, which idle while parameters are updated.
    pool: rayon::ThreadPool,
    plan: BatchPlan,
    /// The model without its tensors' storage.
    skeleton: W::Model,
    /// The model with the current weights; `None` while they change.
    template: Option<W::Model>,
    parameters: ParameterStore,
    buffers: Vec<f32>,
    optimizer: RankOptimizer,
    step: u64,
    torn: bool,
    gradient: Vec<f32>,
    /// Mean change of the buffers over the micro-batches.
    buffer_change: Vec<f32>,
    /// The communication thread, with overlap.
    reducer: Option<Reducer>,
    readiness: Option<Readiness>,
}

/// The parts of a rank that move into its thread.
pub(super) struct RankSeed<W: Workload> {
    pub(super) context: WorkerContext<W>,
    pub(super) settings: RankSettings,
    pub(super) communicator: Box<dyn Communicator>,
    pub(super) observer: Box<dyn MicroBatchObserver>,
    pub(super) layout: WorkerLayout,
    pub(super) plan: BatchPlan,
    pub(super) skeleton: W::Model,
    pub(super) parameters: Vec<f32>,
    pub(super) buffers: Vec<f32>,
    pub(super) optimizer: OptimizerConfig,
}

impl<W: Workload> Rank<W> {
    pub(super) fn new(seed: RankSeed<W>) -> Result<Self, Error> {
        let (workers, replies, pool) = start_workers(&seed.context, seed.layout.virtual_workers)?;
        let layout = &seed.context.layout;
        let tensors = layout
            .slots()
            .iter()
            .map(crate::bucket::ParameterSlot::range)
            .collect::<Vec<_>>();
        Ok(Self {
            workers,
            replies,
            pool,
            plan: seed.plan,
            skeleton: seed.skeleton,
            template: None,
            optimizer: RankOptimizer::new(
                seed.optimizer,
                &tensors,
                (seed.settings.sharded_optimizer).then_some(&*seed.communicator),
            )?,
            gradient: vec![0.0; layout.len()],
            buffer_change: vec![0.0; layout.buffer_len()],
            reducer: None,
            readiness: None,
            parameters: ParameterStore::new(seed.parameters, &seed.context.device),
            buffers: seed.buffers,
            step: 0,
            torn: false,
            context: seed.context,
            settings: seed.settings,
            communicator: seed.communicator,
            observer: seed.observer,
        })
    }

    /// Serves commands until the executor is gone.
    pub(super) fn serve(mut self, commands: &Receiver<Command>, replies: &Sender<Reply<W::Model>>) {
        let rank = self.context.rank;
        while let Ok(command) = commands.recv() {
            let result =
                catch_unwind(AssertUnwindSafe(|| self.execute(command))).unwrap_or_else(|panic| {
                    let message = panic_message(&*panic);
                    self.communicator.abort(&format!("panic: {message}"));
                    Err(Error::RankPanicked { rank, message })
                });
            if replies
                .send(Reply {
                    rank,
                    step: self.step,
                    torn: self.torn,
                    result,
                })
                .is_err()
            {
                return;
            }
        }
    }

    fn execute(&mut self, command: Command) -> Result<Payload<W::Model>, Error> {
        match command {
            Command::Step {
                samples,
                learning_rate,
                called,
            } => {
                let begin = called.elapsed();
                let mut step = self.train(&samples, learning_rate)?;
                step.timings.begin = begin;
                Ok(Payload::Step(step))
            }
            Command::Evaluate { samples } => self
                .evaluate(&samples)
                .map(|loss| Payload::Evaluated { loss }),
            Command::Broadcast => {
                self.template = None;
                self.communicator
                    .broadcast(self.parameters.as_mut_slice(), 0)?;
                self.communicator.broadcast(&mut self.buffers, 0)?;
                Ok(Payload::Done)
            }
            Command::Export { answer } => {
                let optimizer = self.optimizer.state(&*self.communicator)?;
                if !answer {
                    return Ok(Payload::Done);
                }
                Ok(Payload::State(Box::new(ExecutorState {
                    step: self.step,
                    parameters: self.parameters.as_slice().to_vec(),
                    buffers: self.buffers.clone(),
                    optimizer,
                })))
            }
            Command::Restore(state) => self.restore(&state).map(|()| Payload::Done),
            Command::Model => Ok(Payload::Model(Box::new(self.template().valid()))),
            Command::Relayout {
                layout,
                plan,
                speed,
                observer,
            } => {
                self.context.speed = speed;
                (self.workers, self.replies, self.pool) =
                    start_workers(&self.context, layout.virtual_workers)?;
                self.plan = plan;
                self.observer = observer;
                Ok(Payload::Done)
            }
            Command::Reconnect(communicator) => {
                self.reducer = None;
                self.communicator = communicator;
                // A worker that was given up may still answer, to nobody: the next step gets other workers.
                (self.workers, self.replies, self.pool) =
                    start_workers(&self.context, self.workers.len())?;
                Ok(Payload::Done)
            }
        }
    }

    fn restore(&mut self, state: &ExecutorState) -> Result<(), Error> {
        let layout = &self.context.layout;
        state.check(layout)?;
        self.optimizer.restore(&state.optimizer)?;
        self.template = None;
        self.parameters
            .as_mut_slice()
            .copy_from_slice(&state.parameters);
        self.buffers.copy_from_slice(&state.buffers);
        self.step = state.step;
        Ok(())
    }

    /// The model with the current weights.
    fn template(&mut self) -> W::Model {
        self.template
            .get_or_insert_with(|| {
                self.parameters
                    .fill(&self.context.layout, self.skeleton.clone(), &self.buffers)
            })
            .clone()
    }

    fn train(&mut self, samples: &Arc<[u64]>, learning_rate: f64) -> Result<RankStep, Error> {
        let begin = Instant::now();
        match self.compute_and_reduce(samples, begin) {
            Ok((agreement, norm, mut timings)) => {
                timings.update_start = begin.elapsed();
                let clipped = match self.update(norm, learning_rate, &mut timings) {
                    Ok(clipped) => clipped,
                    Err(error) => {
                        self.observer.discarded();
                        return Err(error);
                    }
                };
                self.observer.committed();
                Ok(RankStep {
                    losses: agreement.into_losses(),
                    gradient_norm: norm,
                    clipped,
                    timings,
                })
            }
            Err(error) => {
                self.observer.discarded();
                Err(error)
            }
        }
    }

    /// Everything of a step up to the point where all ranks know that it is good.
    #[allow(clippy::too_many_lines, reason = "a step reads from top to bottom")]
    fn compute_and_reduce(
        &mut self,
        samples: &Arc<[u64]>,
        begin: Instant,
    ) -> Result<(Agreement, f64, RankTimings), Error> {
        if self.settings.overlap && self.reducer.is_none() {
            self.reducer = Some(Reducer::start(&*self.communicator)?);
        }
        let jobs = self.jobs(samples);
        let streams: BTreeMap<_, _> = jobs
            .iter()
            .filter(|job| matches!(job.delivery, Delivery::Stream(_)))
            .map(|job| (job.micro_batch, Stream::of(job.range.len())))
            .collect();
        let whole_left = jobs.len() - streams.len();
        let rounds = rounds(jobs, self.workers.len(), self.depth());
        self.gradient.fill(0.0);
        self.buffer_change.fill(0.0);
        let rank = self.context.rank;
        let Self {
            workers,
            replies,
            communicator,
            plan,
            ..
        } = self;
        let buckets = self.context.layout.buckets().len();
        let mut accumulation = Accumulation {
            rank,
            layout: &self.context.layout,
            observer: &mut *self.observer,
            gradient: &mut self.gradient,
            buffers: &self.buffers,
            buffer_change: &mut self.buffer_change,
            global_batch: samples.len(),
            begin,
            agreement: Agreement::new(communicator.size(), rank, plan.micro_batches()),
            timings: RankTimings {
                rank,
                ..RankTimings::default()
            },
            flow: self.reducer.as_mut().map(|reducer| (reducer, buckets)),
            readiness: self.readiness.clone(),
            learnt: None,
            streams,
            whole_left,
            segments: 0,
        };
        let computed = run_jobs(
            workers,
            replies,
            rounds,
            self.settings.timeout,
            rank,
            |news| match news {
                News::Piece(piece) => accumulation.piece(piece),
                News::Answer(answer) => {
                    let size = plan.samples(answer.micro_batch, samples.len()).len();
                    accumulation.answer(answer, size)
                }
            },
        );
        let reduced = computed
            .and_then(|()| accumulation.reduce(&**communicator))
            .and_then(|()| {
                let norm = squared_norm(accumulation.gradient).sqrt();
                accumulation.check_norm(norm);
                // Observers measure only what all ranks found good, or they would report what a lost micro-batch leaves behind.
                accumulation.agreement.settle(&**communicator)?;
                accumulation.observe_reduced(&**communicator)?;
                Ok(norm)
            });
        let Accumulation {
            agreement,
            mut timings,
            learnt,
            ..
        } = accumulation;
        match reduced {
            Ok(norm) => {
                if learnt.is_some() {
                    self.readiness = learnt;
                }
                timings.communicate = begin.elapsed().saturating_sub(timings.communicate_start);
                Ok((agreement, norm, timings))
            }
            Err(error) => {
                // What was learnt of the graph may be what was wrong.
                self.readiness = None;
                Err(self.give_up(error))
            }
        }
    }

    /// How many of each worker's last micro-batches go through their backward passes together.
    fn depth(&self) -> usize {
        match (&self.readiness, self.settings.overlap) {
            (Some(_), true) => self.settings.overlap_depth,
            _ => 1,
        }
    }

    /// The rank's micro-batches of a step. With overlap the gradients of the last ones come in parts; the first time the very last one
    /// finds out in which.
    fn jobs(&mut self, samples: &Arc<[u64]>) -> Vec<Job<W::Model>> {
        let template = self.template();
        let mine = self.plan.per_rank[self.context.rank].clone();
        let mut jobs: Vec<_> = mine
            .map(|m| (m, self.plan.samples(m, samples.len())))
            .filter(|(_, range)| !range.is_empty())
            .map(|(micro_batch, range)| Job {
                micro_batch,
                samples: Arc::clone(samples),
                range,
                step: self.step,
                mode: Mode::Train,
                delivery: Delivery::Whole,
                template: template.clone(),
            })
            .collect();
        if self.settings.overlap {
            match &self.readiness {
                None => {
                    if let Some(last) = jobs.last_mut() {
                        last.delivery = Delivery::Learn;
                    }
                }
                Some(readiness) => {
                    let streams = self.workers.len() * self.depth();
                    for job in jobs.iter_mut().rev().take(streams) {
                        job.delivery = Delivery::Stream(Arc::clone(readiness));
                    }
                }
            }
        }
        jobs
    }

    /// Ends the communication of all ranks if this one can no longer take part in its collectives.
    fn give_up(&self, error: Error) -> Error {
        if error.ends_communication() {
            self.communicator.abort(&error.to_string());
        }
        error
    }

    /// Clips the gradient and updates the parameters; returns whether it was clipped.
    fn update(
        &mut self,
        norm: f64,
        learning_rate: f64,
        timings: &mut RankTimings,
    ) -> Result<bool, Error> {
        let started = Instant::now();
        let limit = self.settings.clip_norm.filter(|&limit| norm > limit);
        let mut options = StepOptions::new(learning_rate);
        options.gradient_scale = limit.map_or(1.0, |limit| (limit / norm) as f32);
        // The views of the weights go first, so that the update happens in place.
        self.template = None;
        self.torn = true;
        let Self {
            pool,
            optimizer,
            parameters,
            gradient,
            communicator,
            ..
        } = self;
        // The pool's thread has the communicator to itself meanwhile.
        let communicator = &mut *communicator;
        pool.install(move || {
            optimizer.step(
                &**communicator,
                parameters.as_mut_slice(),
                gradient,
                options,
            )
        })?;
        for (buffer, change) in self.buffers.iter_mut().zip(&self.buffer_change) {
            *buffer += change;
        }
        self.step += 1;
        self.torn = false;
        timings.update = started.elapsed();
        Ok(limit.is_some())
    }

    fn evaluate(&mut self, samples: &Arc<[u64]>) -> Result<f64, Error> {
        let rank = self.context.rank;
        let size = self.plan.local_batch;
        let chunks = samples.len().div_ceil(size);
        let mut agreement = Agreement::new(self.communicator.size(), rank, chunks);
        let template = self.template();
        // Chunks go round the ranks in the proportion of their training work.
        let mine = self.plan.per_rank[rank].clone();
        let jobs: Vec<_> = (0..chunks)
            .filter(|chunk| mine.contains(&(chunk % self.plan.micro_batches())))
            .map(|chunk| Job {
                micro_batch: chunk,
                samples: Arc::clone(samples),
                range: chunk * size..((chunk + 1) * size).min(samples.len()),
                step: self.step,
                mode: Mode::Evaluate,
                delivery: Delivery::Whole,
                template: template.clone(),
            })
            .collect();
        run_jobs(
            &self.workers,
            &self.replies,
            rounds(jobs, self.workers.len(), 1),
            self.settings.timeout,
            rank,
            |news| {
                if let News::Answer(answer) = news {
                    match answer.result {
                        Ok(computed) => {
                            agreement.set_loss(answer.micro_batch, f64::from(computed.loss));
                        }
                        Err(error) => agreement.fail(Failure::of(error, answer.micro_batch)),
                    }
                }
                Ok(())
            },
        )
        .map_err(|error| self.give_up(error))?;
        agreement.settle(&*self.communicator)?;
        let losses = agreement.into_losses();
        let weighted = losses.iter().enumerate().map(|(chunk, loss)| {
            let range = chunk * size..((chunk + 1) * size).min(samples.len());
            loss * range.len() as f64
        });
        Ok(weighted.sum::<f64>() / samples.len() as f64)
    }
}

type Workers<M> = (
    Vec<VirtualWorker<M>>,
    Receiver<WorkerReply>,
    rayon::ThreadPool,
);

fn start_workers<W: Workload>(
    context: &WorkerContext<W>,
    count: usize,
) -> Result<Workers<W::Model>, Error> {
    let (sender, receiver) = channel();
    let workers = (0..count)
        .map(|index| VirtualWorker::start(context, index, sender.clone()))
        .collect::<Result<_, _>>()?;
    let pool = start_pool(context.rank, "u", count * context.threads)?;
    Ok((workers, receiver, pool))
}
