//! A rank of the mesh: the thread that owns a stage's shard, its workers, and its share of the collectives.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::Device;

use super::config::{HybridConfig, ScheduleKind};
use super::groups::{Groups, TieLink, WorkerGroup};
use super::output::HybridTimings;
use super::partition::{Cuts, RankModel};
use super::stage::{BlockOf, Finding, StageWork, StepContext};
use super::state::{HybridState, LocalIndex, LocalTensor, gather};
use super::workload::{BlockModel, HybridWorkload};
use crate::bucket::{FlatGradient, ParameterStore, skeleton};
use crate::communicator::{Communicator, shard_range};
use crate::executor::agreement::{Agreement, Failure};
use crate::executor::{Mode, accumulate_weighted};
use crate::optimizer::{Optimizer, StepOptions, squared_norm};
use crate::pipeline::{Schedule, Sequential, TaskTiming, run};
use crate::reshard::RankState;
use crate::topology::BatchPlan;
use crate::worker::{panic_message, start_pool};
use crate::{
    BoxError, Coordinates, Error, MicroBatchObserver, MicroBatchRef, ParallelDims, ParameterLayout,
    Topology,
};

/// What the executor asks of a rank.
pub(super) enum Command {
    Step {
        samples: Arc<[u64]>,
        learning_rate: f64,
    },
    Evaluate {
        samples: Arc<[u64]>,
    },
    /// Put the state of all ranks together.
    Gather,
    /// Take over a state.
    Restore(Arc<HybridState>),
    /// This rank's shards.
    Local,
    /// This rank's shards in its flat buffers.
    Export,
    /// Take over the state of this rank, by rank.
    Import {
        states: Arc<Vec<RankState>>,
        step: u64,
    },
    /// Another world, after the old one failed.
    Reconnect(Box<dyn Communicator>),
}

/// What a rank answers.
pub(super) enum Payload {
    Done,
    Step(Box<RankStep>),
    Evaluated(f64),
    State(Box<HybridState>),
    Local(Vec<LocalTensor>),
    /// Tensors without values, in the order of the buffers.
    Exported(Vec<LocalTensor>, Box<RankState>),
}

/// A rank's part of a step's output.
pub(super) struct RankStep {
    pub(super) losses: Vec<f64>,
    pub(super) gradient_norm: f64,
    pub(super) clipped: bool,
    pub(super) timings: HybridTimings,
}

pub(super) struct Reply {
    pub(super) rank: usize,
    /// Steps that the rank has taken.
    pub(super) step: u64,
    pub(super) result: Result<Payload, Error>,
}

/// Settings that a rank keeps for life.
#[derive(Debug, Clone)]
pub(super) struct RankSettings {
    pub(super) dims: ParallelDims,
    pub(super) schedule: ScheduleKind,
    pub(super) clip_norm: Option<f64>,
    pub(super) recompute: bool,
    pub(super) sequence_parallel: bool,
    pub(super) seed: u64,
    pub(super) threads: usize,
    pub(super) observed: bool,
    /// Largest number of virtual workers of a replica.
    pub(super) workers_at_most: usize,
    /// Virtual workers of this rank's replica.
    pub(super) workers: usize,
    /// Micro-batches of each of them.
    pub(super) rounds: usize,
    pub(super) plan: BatchPlan,
}

pub(super) struct Rank<W: HybridWorkload> {
    workload: Arc<W>,
    settings: RankSettings,
    number: usize,
    at: Coordinates,
    groups: Groups,
    pools: Vec<rayon::ThreadPool>,
    pub(super) layout: Arc<ParameterLayout>,
    index: LocalIndex,
    /// By slot, whether this rank counts it in norms.
    pub(super) owned: Vec<bool>,
    skeleton: Sequential<Sequential<BlockOf<W>>>,
    parameters: ParameterStore,
    buffers: Vec<f32>,
    optimizer: Optimizer,
    observer: Box<dyn MicroBatchObserver>,
    schedule: Schedule,
    device: Device,
    step: u64,
    gradient: Vec<f32>,
    buffer_change: Vec<f32>,
    sent: Arc<AtomicU64>,
}

impl<W: HybridWorkload> Rank<W> {
    /// Makes the rank's part of the model, and its communicators: every rank of the world does so at the same time.
    pub(super) fn new(
        workload: Arc<W>,
        config: &HybridConfig,
        cuts: &Cuts,
        world: Box<dyn Communicator>,
    ) -> Result<Self, Error> {
        let dims = config.dims;
        let rank = world.rank();
        let at = Topology::new(dims, world.size())?.coordinates(rank)?;
        let device = Device::flex();
        let chunks = config.schedule.chunks();
        let made = RankModel::make(
            workload.model(),
            cuts,
            dims,
            chunks,
            at,
            config.seed,
            &device,
        )?;
        let layout = ParameterLayout::of(&made.model.clone().train(), config.bucket_bytes)?;
        let replica = config.layouts[at.dp];
        let settings = RankSettings {
            dims,
            schedule: config.schedule,
            clip_norm: config.clip_norm,
            recompute: config.recompute,
            sequence_parallel: config.sequence_parallel,
            seed: config.seed,
            threads: config.threads_per_worker,
            observed: config.observers.is_some(),
            workers_at_most: (config.layouts.iter())
                .map(|layout| layout.virtual_workers)
                .max()
                .unwrap_or(1),
            workers: replica.virtual_workers,
            rounds: replica.accumulation_steps,
            plan: BatchPlan::of(&config.layouts)?,
        };
        let sent = Arc::new(AtomicU64::new(0));
        let groups = Groups::connect(
            world,
            &settings,
            at,
            &workload.model().ties(),
            cuts,
            &layout,
            &made.placements,
            &sent,
        )?;
        let index = LocalIndex::new(&layout, &made.placements, at.tp == 0, |name| {
            let mut ties = groups.ties.iter().filter(|tie| !tie.owns);
            ties.find(|tie| tie.alias_name == name)
                .map(|tie| tie.owner_name.clone())
        })?;
        let owned = index.slots.iter().map(|slot| slot.owned).collect();
        let ranges: Vec<_> = layout
            .slots()
            .iter()
            .map(crate::ParameterSlot::range)
            .collect();
        let schedule = settings.schedule.schedule(dims.pp, settings.rounds)?;
        let pools = (0..settings.workers)
            .map(|worker| start_pool(rank, &format!("w{worker}"), settings.threads))
            .collect::<Result<_, _>>()?;
        let tracked = made.model.clone().train();
        Ok(Self {
            parameters: ParameterStore::new(layout.read_parameters(&made.model), &device),
            buffers: layout.read_buffers(&made.model),
            gradient: vec![0.0; layout.len()],
            buffer_change: vec![0.0; layout.buffer_len()],
            optimizer: config.optimizer.init(&ranges)?,
            skeleton: skeleton(&tracked, &layout),
            layout: Arc::new(layout),
            observer: Box::new(crate::executor::PlainAccumulation),
            workload,
            settings,
            number: rank,
            at,
            groups,
            pools,
            index,
            owned,
            schedule,
            device,
            step: 0,
            sent,
        })
    }

    pub(super) const fn place(&self) -> (usize, Coordinates) {
        (self.number, self.at)
    }

    pub(super) fn observe(&mut self, observer: Box<dyn MicroBatchObserver>) {
        self.observer = observer;
    }

    /// Serves commands until the executor is gone.
    pub(super) fn serve(mut self, commands: &Receiver<Command>, replies: &Sender<Reply>) {
        let rank = self.number;
        while let Ok(command) = commands.recv() {
            let result =
                catch_unwind(AssertUnwindSafe(|| self.execute(command))).unwrap_or_else(|panic| {
                    let message = panic_message(&*panic);
                    self.groups.world.abort(&format!("panic: {message}"));
                    Err(Error::RankPanicked { rank, message })
                });
            let reply = Reply {
                rank,
                step: self.step,
                result,
            };
            if replies.send(reply).is_err() {
                return;
            }
        }
    }

    fn execute(&mut self, command: Command) -> Result<Payload, Error> {
        let tp = (self.settings.dims.tp, self.at.tp);
        match command {
            Command::Step {
                samples,
                learning_rate,
            } => self
                .train(&samples, learning_rate)
                .map(|step| Payload::Step(Box::new(step))),
            Command::Evaluate { samples } => self.evaluate(&samples).map(Payload::Evaluated),
            Command::Gather => {
                let state = gather(
                    &*self.groups.world,
                    self.local(),
                    self.at.dp == 0,
                    tp,
                    self.step,
                )?;
                Ok(Payload::State(Box::new(state)))
            }
            Command::Restore(state) => {
                let names: Vec<_> = self.optimizer.state().moments.into_keys().collect();
                let (parameters, buffers, optimizer) =
                    self.index.import(&self.layout, &state, tp, &names)?;
                self.optimizer.restore(&optimizer)?;
                self.parameters.as_mut_slice().copy_from_slice(&parameters);
                self.buffers = buffers;
                self.step = state.step;
                Ok(Payload::Done)
            }
            Command::Local => Ok(Payload::Local(self.local())),
            Command::Export => {
                let tensors = self.index.slots.iter().chain(&self.index.buffers);
                let parameters = self.parameters.as_slice().to_vec();
                let state = RankState::new(parameters, self.buffers.clone())
                    .with_optimizer(self.optimizer.state());
                Ok(Payload::Exported(
                    tensors.cloned().collect(),
                    Box::new(state),
                ))
            }
            Command::Import { states, step } => {
                let state = &states[self.number];
                self.optimizer.restore(&state.optimizer())?;
                self.parameters
                    .as_mut_slice()
                    .copy_from_slice(&state.parameters);
                self.buffers.clone_from(&state.buffers);
                self.step = step;
                Ok(Payload::Done)
            }
            Command::Reconnect(world) => {
                self.groups
                    .reconnect(world, &self.settings, self.at, &self.sent)?;
                Ok(Payload::Done)
            }
        }
    }

    fn local(&self) -> Vec<LocalTensor> {
        self.index.export(
            &self.layout,
            self.parameters.as_slice(),
            &self.buffers,
            &self.optimizer.state(),
        )
    }

    fn train(&mut self, samples: &[u64], learning_rate: f64) -> Result<RankStep, Error> {
        let outcome = self.compute_and_reduce(samples);
        match outcome {
            Ok((losses, norm, mut timings)) => {
                self.observer.committed();
                let started = Instant::now();
                let limit = self.settings.clip_norm.filter(|limit| norm > *limit);
                let mut options = StepOptions::new(learning_rate);
                options.gradient_scale = limit.map_or(1.0, |limit| (limit / norm) as f32);
                let Self {
                    optimizer,
                    parameters,
                    gradient,
                    ..
                } = self;
                self.pools[0].install(|| {
                    optimizer.step_with(parameters.as_mut_slice(), gradient, options)
                })?;
                for (buffer, change) in self.buffers.iter_mut().zip(&self.buffer_change) {
                    *buffer += change;
                }
                self.step += 1;
                timings.update = started.elapsed();
                timings.bytes_sent = self.sent.swap(0, Ordering::Relaxed);
                Ok(RankStep {
                    losses,
                    gradient_norm: norm,
                    clipped: limit.is_some(),
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
    fn compute_and_reduce(
        &mut self,
        samples: &[u64],
    ) -> Result<(Vec<f64>, f64, HybridTimings), Error> {
        let begin = Instant::now();
        let (rank, micro_batches) = (self.number, self.settings.plan.micro_batches());
        self.gradient.fill(0.0);
        self.buffer_change.fill(0.0);
        // One number more than losses: the squared norm.
        let mut agreement =
            Agreement::new(self.settings.dims.world_size(), rank, micro_batches + 1);
        let first = self.settings.plan.per_rank[self.at.dp].start;
        let workers = self.settings.workers;
        // Dealt in turn, so that the order of accumulation is that of the global batch.
        let dealt = (0..workers)
            .map(|worker| {
                (0..self.settings.rounds)
                    .map(|round| first + round * workers + worker)
                    .collect()
            })
            .collect();
        let tasks = self
            .run_workers(samples, dealt, Mode::Train, &mut agreement)
            .map_err(|error| self.give_up(error))?;
        let compute = begin.elapsed();
        let started = Instant::now();
        self.reduce()?;
        let norm = self.owned_squared_norm();
        agreement.set_loss(micro_batches, norm);
        agreement.settle(&*self.groups.world)?;
        let mut losses = agreement.into_losses();
        let norm = losses.pop().unwrap_or(0.0).sqrt();
        if !norm.is_finite() {
            // Every rank sees this norm and does the same.
            return Err(Error::NonFiniteGradient {
                rank,
                micro_batch: None,
                parameter: "the norm of all parameters".to_owned(),
            });
        }
        self.observe_reduced()
            .map_err(|error| self.give_up(error))?;
        let timings = HybridTimings {
            rank,
            coordinates: self.at,
            tasks,
            compute,
            communicate: started.elapsed(),
            update: std::time::Duration::ZERO,
            bytes_sent: 0,
        };
        Ok((losses, norm, timings))
    }

    /// Ends the step on all ranks. A rank whose own part is at fault tells the others.
    fn give_up(&self, error: Error) -> Error {
        self.groups.world.abort(&error.to_string());
        error
    }

    /// Sums over the stages that share a tied parameter, then over replicas.
    fn reduce(&mut self) -> Result<(), Error> {
        for tie in &self.groups.ties {
            tie.link
                .all_reduce_sum(&mut self.gradient[tie.range.clone()])?;
        }
        if let Some(replicas) = &self.groups.replicas {
            for bucket in self.layout.buckets() {
                replicas.all_reduce_sum(&mut self.gradient[bucket.range.clone()])?;
            }
            if !self.buffer_change.is_empty() {
                replicas.all_reduce_sum(&mut self.buffer_change)?;
            }
        }
        Ok(())
    }

    /// This rank's part of the squared norm of the whole gradient: what it owns, on the first replica.
    fn owned_squared_norm(&self) -> f64 {
        if self.at.dp > 0 {
            return 0.0;
        }
        (self.layout.slots().iter().zip(&self.owned))
            .filter(|(_, owned)| **owned)
            .map(|(slot, _)| squared_norm(&self.gradient[slot.range()]))
            .sum()
    }

    fn observe_reduced(&mut self) -> Result<(), Error> {
        let failed = |error: BoxError| Error::Observer {
            rank: self.number,
            message: error.to_string(),
        };
        for bucket in self.layout.buckets() {
            self.observer
                .reduced(bucket, &self.gradient[bucket.range.clone()])
                .map_err(failed)?;
        }
        self.observer.gather(&*self.groups.world).map_err(failed)
    }

    /// Runs the schedule on every worker, and accumulates the gradients that they find in their order.
    fn run_workers(
        &mut self,
        samples: &[u64],
        dealt: Vec<Vec<usize>>,
        mode: Mode,
        agreement: &mut Agreement,
    ) -> Result<Vec<Vec<TaskTiming>>, Error> {
        let forward_only;
        let schedule = match mode {
            Mode::Train => &self.schedule,
            Mode::Evaluate => {
                let rounds = dealt.iter().map(Vec::len).max().unwrap_or(0);
                forward_only = Schedule::forward_only(
                    self.settings.dims.pp,
                    self.settings.schedule.chunks(),
                    rounds,
                );
                &forward_only
            }
        };
        let template = self
            .parameters
            .fill(&self.layout, self.skeleton.clone(), &self.buffers);
        let context = StepContext {
            workload: &*self.workload,
            layout: &self.layout,
            device: &self.device,
            rank: self.number,
            stage: self.at.pp,
            stages: self.settings.dims.pp,
            recompute: self.settings.recompute,
            deferred: self.settings.schedule == ScheduleKind::ZeroBubbleH1,
            seed: self.settings.seed,
            step: self.step,
            mode,
            samples,
            local_batch: self.settings.plan.local_batch,
        };
        let mut accumulation = Accumulation {
            layout: &self.layout,
            buffers: &self.buffers,
            gradient: &mut self.gradient,
            buffer_change: &mut self.buffer_change,
            observer: &mut *self.observer,
            ties: &self.groups.ties,
            observed: self.settings.observed,
            rank: self.number,
            global_batch: samples.len(),
            local_batch: self.settings.plan.local_batch,
            speaks: self.at.tp == 0,
            agreement,
        };
        let workers = dealt.len();
        thread::scope(|scope| {
            let (sender, findings) = channel();
            let handles: Vec<_> = dealt
                .into_iter()
                .zip(self.groups.workers.iter_mut())
                .zip(&self.pools)
                .enumerate()
                .map(|(worker, ((micro_batches, group), pool))| {
                    let sender = sender.clone();
                    let (context, template) = (&context, template.clone());
                    scope.spawn(move || {
                        pool.install(move || {
                            work(
                                context,
                                template,
                                schedule,
                                group,
                                (worker, micro_batches),
                                sender,
                            )
                        })
                    })
                })
                .collect();
            drop(sender);
            let accumulated = accumulation.collect(&findings, workers);
            let (timings, mut outcome) = join_workers(handles, context.rank);
            if let Err(error) = accumulated {
                outcome = first_cause(outcome, error);
            }
            outcome.map(|()| timings)
        })
    }

    /// Mean loss over samples, in micro-batches of the local batch that are dealt to the replicas.
    fn evaluate(&mut self, samples: &[u64]) -> Result<f64, Error> {
        let size = self.settings.plan.local_batch;
        let count = samples.len().div_ceil(size);
        let mut agreement = Agreement::new(self.settings.dims.world_size(), self.number, count);
        let mine = shard_range(count, self.settings.dims.dp, self.at.dp);
        self.run_workers(
            samples,
            vec![mine.collect()],
            Mode::Evaluate,
            &mut agreement,
        )
        .map_err(|error| self.give_up(error))?;
        agreement.settle(&*self.groups.world)?;
        let losses = agreement.into_losses();
        let total: f64 = losses
            .iter()
            .enumerate()
            .map(|(m, loss)| loss * (samples.len().min((m + 1) * size) - m * size) as f64)
            .sum();
        Ok(total / samples.len() as f64)
    }
}

/// Waits for the workers: the timings of those that succeeded, and the cause of the failure if one did not.
fn join_workers(
    handles: Vec<thread::ScopedJoinHandle<'_, Result<Vec<TaskTiming>, Error>>>,
    rank: usize,
) -> (Vec<Vec<TaskTiming>>, Result<(), Error>) {
    let mut timings = Vec::with_capacity(handles.len());
    let mut outcome = Ok(());
    for handle in handles {
        match handle.join() {
            Ok(Ok(tasks)) => timings.push(tasks),
            Ok(Err(error)) => outcome = first_cause(outcome, error),
            Err(panic) => {
                let message = panic_message(&*panic);
                outcome = first_cause(outcome, Error::RankPanicked { rank, message });
            }
        }
    }
    (timings, outcome)
}

/// The cause comes before what others saw of it.
fn first_cause(outcome: Result<(), Error>, error: Error) -> Result<(), Error> {
    match outcome {
        Err(first) if first.distance_from_cause() <= error.distance_from_cause() => Err(first),
        _ => Err(error),
    }
}

/// A worker's thread.
fn work<W: HybridWorkload>(
    context: &StepContext<'_, W>,
    template: Sequential<Sequential<BlockOf<W>>>,
    schedule: &Schedule,
    group: &mut WorkerGroup,
    (worker, micro_batches): (usize, Vec<usize>),
    findings: Sender<Finding>,
) -> Result<Vec<TaskTiming>, Error> {
    let mut stage = StageWork::new(
        context,
        template,
        &group.tensor,
        worker,
        micro_batches,
        findings,
    );
    let outcome = catch_unwind(AssertUnwindSafe(|| run(schedule, &*group.link, &mut stage)))
        .unwrap_or_else(|panic| {
            Err(Error::WorkerPanicked {
                rank: context.rank,
                micro_batch: stage.current,
                message: panic_message(&*panic),
            })
        });
    outcome.inspect_err(|error| {
        // Ranks that wait for this one learn it now.
        group.link.abort(&error.to_string());
    })
}

/// Where the findings of a rank's workers go.
struct Accumulation<'a> {
    layout: &'a ParameterLayout,
    buffers: &'a [f32],
    gradient: &'a mut [f32],
    buffer_change: &'a mut [f32],
    observer: &'a mut dyn MicroBatchObserver,
    ties: &'a [TieLink],
    observed: bool,
    rank: usize,
    global_batch: usize,
    local_batch: usize,
    /// Whether this rank reports losses for its tensor-parallel group.
    speaks: bool,
    agreement: &'a mut Agreement,
}

impl Accumulation<'_> {
    /// Takes the findings until all workers have ended: gradients by their number, of equal numbers the first worker's first. Since the workers do the
    /// same tasks with micro-batches that were dealt in turn, each slot sees its micro-batches in their order.
    fn collect(&mut self, findings: &Receiver<Finding>, workers: usize) -> Result<(), Error> {
        let mut early = BTreeMap::new();
        let mut next = (0, 0);
        for finding in findings {
            match finding {
                Finding::Loss { micro_batch, loss } => {
                    if self.speaks {
                        self.agreement.set_loss(micro_batch, f64::from(loss));
                    }
                    if !loss.is_finite() {
                        let error = Error::NonFiniteLoss {
                            rank: self.rank,
                            micro_batch,
                            loss,
                        };
                        self.agreement.fail(Failure::of(error, micro_batch));
                    }
                }
                Finding::Gradient {
                    micro_batch,
                    sequence,
                    chunk,
                    gradient,
                    buffers,
                    worker,
                } => {
                    early.insert((sequence, worker), (micro_batch, chunk, gradient, buffers));
                    while let Some((micro_batch, chunk, gradient, buffers)) = early.remove(&next) {
                        self.add(micro_batch, chunk, &gradient, &buffers)?;
                        next.1 += 1;
                        if next.1 == workers {
                            next = (next.0 + 1, 0);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        micro_batch: usize,
        chunk: usize,
        gradient: &FlatGradient,
        buffers: &[f32],
    ) -> Result<(), Error> {
        let samples = self.local_batch;
        let weight = samples as f32 / self.global_batch as f32;
        for bucket in self.layout.buckets() {
            for slot in bucket.slots.clone() {
                let range = self.layout.slots()[slot].range();
                let tie = self
                    .ties
                    .iter()
                    .find(|tie| self.observed && tie.slot == slot && tie.chunk == chunk);
                let summed;
                let slice = match (tie, gradient.slot(slot)) {
                    (None, None) => continue,
                    (None, Some(slice)) => slice,
                    (Some(tie), own) => {
                        let own = own.map_or_else(|| vec![0.0; range.len()], <[f32]>::to_vec);
                        match tie.exchange(own, micro_batch)? {
                            Some(sum) => {
                                summed = sum;
                                &summed
                            }
                            None => continue,
                        }
                    }
                };
                if !slice.iter().fold(true, |fine, x| fine & x.is_finite()) {
                    let error = Error::NonFiniteGradient {
                        rank: self.rank,
                        micro_batch: Some(micro_batch),
                        parameter: self.layout.slots()[slot].path.clone(),
                    };
                    self.agreement.fail(Failure::of(error, micro_batch));
                    continue;
                }
                let at = MicroBatchRef {
                    micro_batch,
                    samples,
                    global_batch: self.global_batch,
                    weight,
                    bucket: bucket.index,
                    slot,
                    offset: range.start,
                };
                let accumulator = &mut self.gradient[range];
                if self.observed {
                    self.observer
                        .accumulate(&at, accumulator, slice)
                        .map_err(|error| Error::Observer {
                            rank: self.rank,
                            message: error.to_string(),
                        })?;
                } else {
                    accumulate_weighted(accumulator, slice, weight);
                }
            }
        }
        let moved = self.buffer_change.iter_mut().zip(buffers).zip(self.buffers);
        for ((change, after), before) in moved {
            *change += weight * (after - before);
        }
        Ok(())
    }
}
