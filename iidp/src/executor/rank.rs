//! A rank: the thread that owns one logical device, its workers, its share of the collectives and its copy of the state.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use burn::module::Module;

use super::agreement::{Agreement, Failure};
use super::observer::MicroBatchRef;
use super::output::{MicroBatchTiming, RankTimings};
use super::state::ExecutorState;
use super::{BoxError, MicroBatchObserver, Mode, Workload};
use crate::bucket::ParameterStore;
use crate::communicator::Communicator;
use crate::optimizer::{Optimizer, OptimizerConfig, StepOptions, squared_norm};
use crate::topology::BatchPlan;
use crate::worker::{Answer, Job, VirtualWorker, WorkerContext, panic_message, start_pool};
use crate::{Error, WorkerLayout};

/// What the executor asks of a rank.
pub(super) enum Command {
    /// Train on the global batch.
    Step {
        samples: Arc<[u64]>,
        learning_rate: f64,
    },
    /// Mean loss over the samples, without learning.
    Evaluate { samples: Arc<[u64]> },
    /// Take rank 0's parameters and buffers.
    Broadcast,
    /// Copy out the state.
    Export,
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
    pub(super) result: Result<Payload<M>, Error>,
}

/// Settings that a rank keeps for life.
pub(super) struct RankSettings {
    pub(super) clip_norm: Option<f64>,
    pub(super) timeout: Duration,
}

pub(super) struct Rank<W: Workload> {
    pub(super) context: WorkerContext<W>,
    pub(super) settings: RankSettings,
    pub(super) communicator: Box<dyn Communicator>,
    pub(super) observer: Box<dyn MicroBatchObserver>,
    workers: Vec<VirtualWorker<W::Model>>,
    answers: Receiver<Answer>,
    /// As many threads as the workers have, which idle while parameters are updated.
    pool: rayon::ThreadPool,
    plan: BatchPlan,
    /// The model without its tensors' storage.
    skeleton: W::Model,
    /// The model with the current weights; `None` while they change.
    template: Option<W::Model>,
    parameters: ParameterStore,
    buffers: Vec<f32>,
    optimizer: Optimizer,
    step: u64,
    gradient: Vec<f32>,
    /// Mean change of the buffers over the micro-batches.
    buffer_change: Vec<f32>,
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
        let (workers, answers, pool) = start_workers(&seed.context, seed.layout)?;
        let layout = &seed.context.layout;
        let tensors = layout
            .slots()
            .iter()
            .map(crate::bucket::ParameterSlot::range)
            .collect::<Vec<_>>();
        Ok(Self {
            workers,
            answers,
            pool,
            plan: seed.plan,
            skeleton: seed.skeleton,
            template: None,
            optimizer: seed.optimizer.init(&tensors)?,
            gradient: vec![0.0; layout.len()],
            buffer_change: vec![0.0; layout.buffer_len()],
            parameters: ParameterStore::new(seed.parameters, &seed.context.device),
            buffers: seed.buffers,
            step: 0,
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
            } => self.train(&samples, learning_rate).map(Payload::Step),
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
            Command::Export => Ok(Payload::State(Box::new(ExecutorState {
                step: self.step,
                parameters: self.parameters.as_slice().to_vec(),
                buffers: self.buffers.clone(),
                optimizer: self.optimizer.state(),
            }))),
            Command::Restore(state) => self.restore(&state).map(|()| Payload::Done),
            Command::Model => Ok(Payload::Model(Box::new(self.template().valid()))),
            Command::Relayout {
                layout,
                plan,
                speed,
                observer,
            } => {
                self.context.speed = speed;
                (self.workers, self.answers, self.pool) = start_workers(&self.context, layout)?;
                self.plan = plan;
                self.observer = observer;
                Ok(Payload::Done)
            }
            Command::Reconnect(communicator) => {
                self.communicator = communicator;
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
        let step = self.compute_and_reduce(samples);
        match step {
            Ok((agreement, norm, mut timings)) => {
                self.observer.committed();
                let clipped = self.update(norm, learning_rate, &mut timings)?;
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
    ) -> Result<(Agreement, f64, RankTimings), Error> {
        let begin = Instant::now();
        let rank = self.context.rank;
        let template = self.template();
        let layout = Arc::clone(&self.context.layout);
        let mut agreement =
            Agreement::new(self.communicator.size(), rank, self.plan.micro_batches());
        let mut timings = RankTimings {
            rank,
            ..RankTimings::default()
        };
        self.gradient.fill(0.0);
        self.buffer_change.fill(0.0);

        let mine = self.plan.per_rank[rank].clone();
        let jobs: Vec<_> = mine
            .map(|m| (m, self.plan.samples(m, samples.len())))
            .filter(|(_, range)| !range.is_empty())
            .map(|(micro_batch, range)| Job {
                micro_batch,
                samples: Arc::clone(samples),
                range,
                step: self.step,
                mode: Mode::Train,
                template: template.clone(),
            })
            .collect();
        drop(template);
        let sizes: Vec<usize> = jobs.iter().map(|job| job.range.len()).collect();
        let mut size_of = sizes.into_iter();
        let Self {
            workers,
            answers,
            observer,
            gradient,
            buffers,
            buffer_change,
            settings,
            ..
        } = self;
        let outcome = run_jobs(workers, answers, jobs, settings.timeout, rank, |answer| {
            let size = size_of.next().unwrap_or(0);
            timings.micro_batches.push(MicroBatchTiming {
                micro_batch: answer.micro_batch,
                worker: answer.worker,
                start: answer.start.saturating_duration_since(begin),
                duration: answer.duration,
            });
            timings.compute = timings
                .compute
                .max((answer.start + answer.duration).saturating_duration_since(begin));
            let computed = match answer.result {
                Ok(computed) => computed,
                Err(error) => {
                    agreement.fail(Failure::of(error, answer.micro_batch));
                    return Ok(());
                }
            };
            agreement.set_loss(answer.micro_batch, f64::from(computed.loss));
            let started = Instant::now();
            let weight = size as f32 / samples.len() as f32;
            let Some(micro_gradient) = computed.gradient else {
                return Ok(());
            };
            for bucket in layout.buckets() {
                for slot in bucket.slots.clone() {
                    let Some(slice) = micro_gradient.slot(slot) else {
                        continue;
                    };
                    if !all_finite(slice) {
                        let error = Error::NonFiniteGradient {
                            rank,
                            micro_batch: Some(answer.micro_batch),
                            parameter: layout.slots()[slot].path.clone(),
                        };
                        agreement.fail(Failure::of(error, answer.micro_batch));
                        return Ok(());
                    }
                    let range = layout.slots()[slot].range();
                    let at = MicroBatchRef {
                        micro_batch: answer.micro_batch,
                        samples: size,
                        global_batch: samples.len(),
                        weight,
                        bucket: bucket.index,
                        slot,
                        offset: range.start,
                    };
                    observer
                        .accumulate(&at, &mut gradient[range], slice)
                        .map_err(|error| observer_error(rank, &error))?;
                }
            }
            for ((change, after), before) in buffer_change
                .iter_mut()
                .zip(&computed.buffers)
                .zip(&*buffers)
            {
                *change += weight * (after - before);
            }
            timings.accumulate += started.elapsed();
            Ok(())
        });
        outcome.map_err(|error| self.give_up(error))?;

        let started = Instant::now();
        for bucket in layout.buckets() {
            self.communicator
                .all_reduce_sum(&mut self.gradient[bucket.range.clone()])?;
        }
        if !self.buffer_change.is_empty() {
            self.communicator.all_reduce_sum(&mut self.buffer_change)?;
        }
        let norm = squared_norm(&self.gradient).sqrt();
        if !norm.is_finite() && !agreement.failed() {
            let parameter = first_non_finite(&layout, &self.gradient);
            agreement.fail(Failure::of(
                Error::NonFiniteGradient {
                    rank,
                    micro_batch: None,
                    parameter,
                },
                0,
            ));
        }
        // Observers measure only what all ranks found good, or they would report what a lost micro-batch leaves behind.
        agreement.settle(&*self.communicator)?;
        self.observe_reduced()
            .map_err(|error| self.give_up(error))?;
        timings.communicate = started.elapsed();
        Ok((agreement, norm, timings))
    }

    fn observe_reduced(&mut self) -> Result<(), Error> {
        let rank = self.context.rank;
        for bucket in self.context.layout.buckets() {
            self.observer
                .reduced(bucket, &self.gradient[bucket.range.clone()])
                .map_err(|error| observer_error(rank, &error))?;
        }
        self.observer
            .gather(&*self.communicator)
            .map_err(|error| observer_error(rank, &error))
    }

    /// Ends the step on all ranks: this one can no longer take part in its collectives.
    fn give_up(&self, error: Error) -> Error {
        self.communicator.abort(&error.to_string());
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
        let Self {
            pool,
            optimizer,
            parameters,
            gradient,
            ..
        } = self;
        pool.install(|| optimizer.step_with(parameters.as_mut_slice(), gradient, options))?;
        for (buffer, change) in self.buffers.iter_mut().zip(&self.buffer_change) {
            *buffer += change;
        }
        self.step += 1;
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
                template: template.clone(),
            })
            .collect();
        run_jobs(
            &self.workers,
            &self.answers,
            jobs,
            self.settings.timeout,
            rank,
            |answer| {
                match answer.result {
                    Ok(computed) => {
                        agreement.set_loss(answer.micro_batch, f64::from(computed.loss));
                    }
                    Err(error) => agreement.fail(Failure::of(error, answer.micro_batch)),
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

type Workers<M> = (Vec<VirtualWorker<M>>, Receiver<Answer>, rayon::ThreadPool);

fn start_workers<W: Workload>(
    context: &WorkerContext<W>,
    layout: WorkerLayout,
) -> Result<Workers<W::Model>, Error> {
    let (sender, receiver) = channel();
    let workers = (0..layout.virtual_workers)
        .map(|index| VirtualWorker::start(context, index, sender.clone()))
        .collect::<Result<_, _>>()?;
    let pool = start_pool(context.rank, "u", layout.virtual_workers * context.threads)?;
    Ok((workers, receiver, pool))
}

/// Gives the jobs to the workers in turn and hands the answers on in the order of the jobs, whatever the order in which they come.
///
/// A worker is at most one job ahead of what was handed on, so that at most two gradients per worker exist. After a
/// failed job the jobs that have not been given out are left undone.
fn run_jobs<M: Module + 'static>(
    workers: &[VirtualWorker<M>],
    answers: &Receiver<Answer>,
    jobs: Vec<Job<M>>,
    timeout: Duration,
    rank: usize,
    mut hand_on: impl FnMut(Answer) -> Result<(), Error>,
) -> Result<(), Error> {
    let order: Vec<usize> = jobs.iter().map(|job| job.micro_batch).collect();
    let mut waiting = jobs.into_iter().enumerate();
    let mut submitted = 0;
    let mut early: BTreeMap<usize, Answer> = BTreeMap::new();
    let mut failed = false;
    for (handed_on, &next) in order.iter().enumerate() {
        while !failed && submitted < handed_on + 2 * workers.len() {
            let Some((index, job)) = waiting.next() else {
                break;
            };
            if !workers[index % workers.len()].submit(job) {
                return Err(Error::WorkerGone {
                    rank,
                    worker: index % workers.len(),
                });
            }
            submitted += 1;
        }
        if handed_on >= submitted {
            break;
        }
        let answer = loop {
            if let Some(answer) = early.remove(&next) {
                break answer;
            }
            match answers.recv_timeout(timeout) {
                Ok(answer) => early.insert(answer.micro_batch, answer),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Error::WorkerTimeout {
                        rank,
                        micro_batch: next,
                        timeout,
                    });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::WorkerGone {
                        rank,
                        worker: handed_on % workers.len(),
                    });
                }
            };
        };
        failed |= answer.result.is_err();
        hand_on(answer)?;
    }
    Ok(())
}

fn observer_error(rank: usize, error: &BoxError) -> Error {
    Error::Observer {
        rank,
        message: error.to_string(),
    }
}

fn all_finite(values: &[f32]) -> bool {
    // Without a branch per element the loop vectorises.
    values
        .chunks(1024)
        .all(|chunk| chunk.iter().fold(true, |fine, x| fine & x.is_finite()))
}

fn first_non_finite(layout: &crate::ParameterLayout, gradient: &[f32]) -> String {
    layout
        .slots()
        .iter()
        .find(|slot| !all_finite(&gradient[slot.range()]))
        .map_or_else(
            || "the norm of all parameters".to_owned(),
            |slot| slot.path.clone(),
        )
}
