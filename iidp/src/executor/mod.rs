//! The executor: one step of data-parallel training on unequal devices.
//!
//! A step is the same computation under any layout. The global batch is cut into micro-batches of `local_batch` samples,
//! in order; rank r computes a contiguous run of them on its virtual workers. Each rank accumulates
//! `samples / global_batch x gradient` of its micro-batches in their order, the ranks sum their accumulators
//! bucket by bucket in rank order, and every rank applies the same fused update to its copy of the parameters. Two
//! layouts therefore differ by the order of a floating-point sum at most, and on one rank not at all.
//!
//! Before the update the ranks agree that every part of the step was good. If one was not (a loss that is not finite, a
//! workload's error, a panic), no rank updates anything and [`Executor::step`] returns the cause: the executor goes on from the same state.

mod accumulation;
pub(crate) mod agreement;
mod config;
mod cuts;
mod jobs;
mod observer;
mod output;
mod rank;
mod rank_optimizer;
mod reducer;
mod state;
mod workload;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Device;

pub use config::ExecutorConfig;
pub(crate) use cuts::{BackwardPass, Cuts};
pub use observer::{
    MicroBatchObserver, MicroBatchRef, ObserverContext, PlainAccumulation, accumulate_weighted,
};
pub use output::{BucketTiming, MicroBatchTiming, RankTimings, StepOutput, StepTimings};
pub use state::ExecutorState;
pub(crate) use workload::mix;
pub use workload::{BoxError, MicroBatch, Mode, Workload};

use crate::bucket::skeleton;
use crate::communicator::Communicator;
use crate::seeding::with_seed;
use crate::topology::BatchPlan;
use crate::worker::WorkerContext;
use crate::{Error, ParameterLayout, WorkerLayout};
use config::{check_speeds, local_group};
use rank::{Command, Payload, Rank, RankSeed, RankSettings, RankStep, Reply};

/// Trains a [`Workload`] on a set of ranks. Made by [`ExecutorConfig::init`].
pub struct Executor<W: Workload> {
    config: ExecutorConfig,
    workload: Arc<W>,
    layout: Arc<ParameterLayout>,
    plan: BatchPlan,
    /// Devices without automatic differentiation, by rank.
    devices: Vec<Device>,
    ranks: Vec<RankHandle>,
    replies: Receiver<Reply<W::Model>>,
    /// Whether the communicators were made here, and can be made again.
    local: bool,
    health: Health,
    step: u64,
}

#[derive(Debug, Clone)]
enum Health {
    Good,
    /// The communicators failed; no rank had updated.
    Disconnected,
    /// Nothing can be done any more.
    Lost(Box<Error>),
}

#[derive(Debug)]
struct RankHandle {
    rank: usize,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl<W: Workload> fmt::Debug for Executor<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("config", &self.config)
            .field("parameters", &self.layout.len())
            .field("step", &self.step)
            .field("health", &self.health)
            .finish_non_exhaustive()
    }
}

impl<W: Workload> Executor<W> {
    fn start(
        config: ExecutorConfig,
        workload: Arc<W>,
        communicators: Option<Vec<Box<dyn Communicator>>>,
    ) -> Result<Self, Error> {
        let plan = BatchPlan::of(&config.layouts)?;
        let devices = match &config.devices {
            Some(devices) => devices.iter().cloned().map(Device::inner).collect(),
            None => vec![Device::flex(); config.layouts.len()],
        };
        let local = communicators.is_none();
        let communicators = match communicators {
            Some(communicators) => communicators,
            None => local_group(config.layouts.len(), config.timeout)?,
        };
        let first = communicators
            .first()
            .map_or(0, |communicator| communicator.rank());
        let (model, layout) = make_model(&*workload, &devices[first].clone().autodiff(), &config)?;
        let layout = Arc::new(layout);
        let parameters = layout.read_parameters(&model);
        let buffers = layout.read_buffers(&model.valid());
        let (_, replies) = channel();
        let mut executor = Self {
            config,
            workload,
            layout,
            plan,
            devices,
            ranks: Vec::new(),
            replies,
            local,
            health: Health::Good,
            step: 0,
        };
        executor.start_ranks(&model, &parameters, &buffers, communicators)?;
        if !local {
            executor.ask_all(|_| Ok(Command::Broadcast))?;
        }
        Ok(executor)
    }

    /// Starts the threads of the ranks that `communicators` belong to.
    fn start_ranks(
        &mut self,
        model: &W::Model,
        parameters: &[f32],
        buffers: &[f32],
        communicators: Vec<Box<dyn Communicator>>,
    ) -> Result<(), Error> {
        let (sender, replies) = channel();
        let mut ranks = Vec::with_capacity(communicators.len());
        for communicator in communicators {
            let rank = communicator.rank();
            let seed = RankSeed {
                context: WorkerContext {
                    workload: Arc::clone(&self.workload),
                    layout: Arc::clone(&self.layout),
                    device: self.devices[rank].clone().autodiff(),
                    rank,
                    seed: self.config.seed,
                    threads: self.config.threads_per_worker,
                    speed: self.speed(rank),
                },
                settings: RankSettings {
                    overlap: self.config.overlap.unwrap_or(!self.local),
                    overlap_depth: self.config.overlap_depth,
                    sharded_optimizer: self.config.sharded_optimizer,
                    clip_norm: self.config.clip_norm,
                    timeout: self.config.timeout,
                },
                communicator,
                observer: self.observer(rank),
                layout: self.config.layouts[rank],
                plan: self.plan.clone(),
                skeleton: skeleton(model, &self.layout).to_device(&self.devices[rank]),
                parameters: parameters.to_vec(),
                buffers: buffers.to_vec(),
                optimizer: self.config.optimizer,
            };
            let owner = Rank::new(seed)?;
            let (commands, inbox) = channel();
            let sender = sender.clone();
            let thread = std::thread::Builder::new()
                .name(format!("iidp-r{rank}"))
                .spawn(move || owner.serve(&inbox, &sender))
                .map_err(|error| Error::ThreadStart {
                    what: "rank",
                    rank,
                    reason: error.to_string(),
                })?;
            ranks.push(RankHandle {
                rank,
                commands,
                thread: Some(thread),
            });
        }
        self.ranks = ranks;
        self.replies = replies;
        Ok(())
    }

    fn speed(&self, rank: usize) -> f64 {
        self.config
            .speeds
            .as_ref()
            .map_or(1.0, |speeds| speeds[rank])
    }

    fn observer(&mut self, rank: usize) -> Box<dyn MicroBatchObserver> {
        let context = ObserverContext {
            rank,
            ranks: self.config.layouts.len(),
            layout: self.config.layouts[rank],
            parameters: &self.layout,
        };
        (self.config.observers.0)(&context)
    }

    /// Trains on one global batch: `samples` are its dataset ids, in order; there are [`Self::global_batch`] of them.
    ///
    /// The update is that of one device with the same micro-batches, whatever the layout.
    ///
    /// # Errors
    ///
    /// [`Error::BatchMismatch`] and [`Error::EmptyBatch`] before anything happens; [`Error::Workload`],
    /// [`Error::RankPanicked`], [`Error::NonFiniteLoss`], [`Error::NonFiniteGradient`] and [`Error::Observer`] after the step was rolled
    /// back on every rank (the executor can go on); [`Error::RankTimeout`] and communication errors when a rank does not answer, and
    /// [`Error::ExecutorLost`] on every later call when it cannot go on.
    pub fn step(&mut self, samples: &[u64], learning_rate: f64) -> Result<StepOutput, Error> {
        let begin = Instant::now();
        self.check_batch(samples)?;
        if !learning_rate.is_finite() {
            return Err(Error::Invalid {
                what: "learning rate",
                problem: format!("got {learning_rate}, expected a finite number"),
            });
        }
        let samples: Arc<[u64]> = samples.into();
        let answers = self.ask_all(|_| {
            Ok(Command::Step {
                samples: Arc::clone(&samples),
                learning_rate,
                called: begin,
            })
        })?;
        let mut steps: Vec<RankStep> = answers
            .into_iter()
            .filter_map(|payload| {
                if let Payload::Step(step) = payload {
                    Some(step)
                } else {
                    None
                }
            })
            .collect();
        let ranks = steps
            .iter_mut()
            .map(|step| std::mem::take(&mut step.timings))
            .collect();
        let first = steps.swap_remove(0);
        let mut losses = first.losses;
        losses.truncate(samples.len().div_ceil(self.plan.local_batch));
        let total: f64 = losses
            .iter()
            .enumerate()
            .map(|(m, loss)| loss * self.plan.samples(m, samples.len()).len() as f64)
            .sum();
        let output = StepOutput {
            step: self.step,
            loss: total / samples.len() as f64,
            samples: samples.len(),
            micro_batch_losses: losses,
            gradient_norm: first.gradient_norm,
            clipped: first.clipped,
            timings: StepTimings {
                total: begin.elapsed(),
                ranks,
            },
        };
        self.step += 1;
        Ok(output)
    }

    /// Mean loss over `samples` on all ranks, without gradients and without dropout. Any number of samples.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyBatch`]; otherwise as [`Self::step`].
    pub fn evaluate(&mut self, samples: &[u64]) -> Result<f64, Error> {
        if samples.is_empty() {
            return Err(Error::EmptyBatch);
        }
        let samples: Arc<[u64]> = samples.into();
        let answers = self.ask_all(|_| {
            Ok(Command::Evaluate {
                samples: Arc::clone(&samples),
            })
        })?;
        Ok(answers
            .into_iter()
            .find_map(|p| {
                if let Payload::Evaluated { loss } = p {
                    Some(loss)
                } else {
                    None
                }
            })
            .unwrap_or(f64::NAN))
    }

    /// Changes what each rank does, and how many ranks there are, keeping parameters and optimizer state. Observers are made anew.
    ///
    /// With as many ranks as before, they and their devices stay; otherwise ranks are started anew from the present
    /// state, on the same device if all had the same, and at full speed if no speeds are emulated.
    ///
    /// # Errors
    ///
    /// As [`ExecutorConfig::init`], with nothing changed; [`Error::Invalid`] when the number of ranks changes and
    /// their devices or speeds are not known, or under communicators that were given from outside: use [`Self::reassign_with`].
    pub fn reassign(&mut self, layouts: Vec<WorkerLayout>) -> Result<(), Error> {
        let ranks = layouts.len();
        let missing = |what, got: usize| Error::Invalid {
            what,
            problem: format!(
                "{got} given for {ranks} ranks, expected as many as ranks (see `reassign_with`)"
            ),
        };
        let uniform = self.devices.windows(2).all(|pair| pair[0] == pair[1]);
        let devices = match self.devices.first() {
            Some(device) if uniform => vec![device.clone(); ranks],
            _ if self.devices.len() == ranks => self.devices.clone(),
            _ => return Err(missing("devices", self.devices.len())),
        };
        if let Some(speeds) = self
            .config
            .speeds
            .as_ref()
            .filter(|speeds| speeds.len() != ranks)
        {
            return Err(missing("emulated speeds", speeds.len()));
        }
        self.reassign_with(layouts, devices, self.config.speeds.clone())
    }

    /// [`Self::reassign`] with the device and the emulated speed of each rank.
    ///
    /// # Errors
    ///
    /// As [`Self::reassign`].
    pub fn reassign_with(
        &mut self,
        layouts: Vec<WorkerLayout>,
        devices: Vec<Device>,
        speeds: Option<Vec<f64>>,
    ) -> Result<(), Error> {
        let plan = BatchPlan::of(&layouts)?;
        let devices: Vec<_> = devices.into_iter().map(Device::inner).collect();
        for (what, got) in [
            ("devices", devices.len()),
            (
                "emulated speeds",
                speeds.as_ref().map_or(layouts.len(), Vec::len),
            ),
        ] {
            if got != layouts.len() {
                return Err(Error::LengthMismatch {
                    what: format!("{what} (one per rank)"),
                    got,
                    expected: layouts.len(),
                });
            }
        }
        check_speeds(speeds.as_deref().unwrap_or(&[]))?;
        let same_places = devices == self.devices;
        if !same_places && !self.local {
            return Err(Error::Invalid {
                what: "reassignment",
                problem: "the ranks' communicators were given from outside; ranks and devices cannot change, only layouts".to_owned(),
            });
        }
        self.ready()?;
        let before = if same_places {
            None
        } else {
            Some((self.state()?, self.model()?))
        };
        self.config.layouts = layouts;
        self.config.speeds = speeds;
        self.plan = plan;
        self.devices = devices;
        match before {
            None => {
                let commands = (0..self.ranks.len())
                    .map(|index| {
                        let rank = self.ranks[index].rank;
                        Command::Relayout {
                            layout: self.config.layouts[rank],
                            plan: self.plan.clone(),
                            speed: self.speed(rank),
                            observer: self.observer(rank),
                        }
                    })
                    .collect::<Vec<_>>();
                let mut commands = commands.into_iter();
                self.ask_all(|rank| commands.next().ok_or(Error::NoSuchRank { rank, size: 0 }))?;
            }
            Some((state, model)) => {
                self.stop_ranks();
                let communicators = local_group(self.config.layouts.len(), self.config.timeout)?;
                self.start_ranks(&model, &state.parameters, &state.buffers, communicators)?;
                self.restore(state)?;
            }
        }
        Ok(())
    }

    /// A copy of the run's state. O(parameters). With communicators from outside every process calls it.
    ///
    /// # Errors
    ///
    /// When the ranks do not answer.
    pub fn state(&mut self) -> Result<ExecutorState, Error> {
        let first = self.ranks.first().map(|handle| handle.rank);
        let answers = self.ask_all(|rank| {
            Ok(Command::Export {
                answer: Some(rank) == first,
            })
        })?;
        let state = answers.into_iter().find_map(|payload| match payload {
            Payload::State(state) => Some(*state),
            _ => None,
        });
        state.ok_or(Error::NoSuchRank {
            rank: 0,
            size: self.ranks.len(),
        })
    }

    /// Goes on from `state`, which any layout may have exported.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] if it belongs to another model, with nothing changed.
    pub fn restore(&mut self, state: ExecutorState) -> Result<(), Error> {
        state.check(&self.layout)?;
        let state = Arc::new(state);
        self.ask_all(|_| Ok(Command::Restore(Arc::clone(&state))))?;
        self.step = state.step;
        Ok(())
    }

    /// The trainable tensors, flattened in the order of [`ParameterLayout::slots`]. O(parameters).
    ///
    /// # Errors
    ///
    /// When the ranks do not answer.
    pub fn parameters(&mut self) -> Result<Vec<f32>, Error> {
        self.state().map(|state| state.parameters)
    }

    /// The model with the current weights and without gradient tracking, to use or to save. Shares the weights' storage until the
    /// next step, which then copies them.
    ///
    /// # Errors
    ///
    /// When the ranks do not answer.
    pub fn model(&mut self) -> Result<W::Model, Error> {
        match self.ask_first(Command::Model)? {
            Payload::Model(model) => Ok(*model),
            _ => Err(Error::NoSuchRank {
                rank: 0,
                size: self.ranks.len(),
            }),
        }
    }

    /// Where each parameter lies in the flat vectors.
    pub fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    /// What each rank does in a step.
    pub fn worker_layouts(&self) -> &[WorkerLayout] {
        &self.config.layouts
    }

    /// Samples per step.
    pub fn global_batch(&self) -> usize {
        self.plan.global_batch()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The workload.
    pub fn workload(&self) -> &W {
        &self.workload
    }

    fn check_batch(&self, samples: &[u64]) -> Result<(), Error> {
        let expected = self.plan.global_batch();
        let workers = self
            .config
            .layouts
            .iter()
            .map(|layout| layout.virtual_workers)
            .sum();
        match samples.len() {
            0 => Err(Error::EmptyBatch),
            n if n == expected || (n < expected && self.config.partial_batches) => Ok(()),
            n if n < workers => Err(Error::BatchTooSmall {
                samples: n,
                workers,
                expected,
            }),
            n => Err(Error::BatchMismatch {
                samples: n,
                expected,
                local_batch: self.plan.local_batch,
            }),
        }
    }

    /// Makes sure that ranks can be asked, with new communicators if the old ones failed.
    fn ready(&mut self) -> Result<(), Error> {
        match &self.health {
            Health::Good => Ok(()),
            Health::Lost(cause) => Err(Error::ExecutorLost {
                cause: cause.to_string(),
            }),
            Health::Disconnected => {
                let mut group =
                    local_group(self.config.layouts.len(), self.config.timeout)?.into_iter();
                self.health = Health::Good;
                self.ask_all(|rank| {
                    group
                        .next()
                        .map(Command::Reconnect)
                        .ok_or(Error::NoSuchRank { rank, size: 0 })
                })?;
                Ok(())
            }
        }
    }

    fn ask_first(&mut self, command: Command) -> Result<Payload<W::Model>, Error> {
        self.ready()?;
        self.send(0, command)?;
        let mut answers = self.collect(1)?;
        answers.swap_remove(0).result
    }

    /// Sends every rank of this process its command and waits for all answers, by rank.
    fn ask_all(
        &mut self,
        mut command: impl FnMut(usize) -> Result<Command, Error>,
    ) -> Result<Vec<Payload<W::Model>>, Error> {
        self.ready()?;
        for index in 0..self.ranks.len() {
            let command = command(self.ranks[index].rank)?;
            self.send(index, command)?;
        }
        let answers = self.collect(self.ranks.len())?;
        let even = answers
            .iter()
            .all(|answer| answer.step == answers[0].step && !answer.torn);
        let mut payloads = Vec::with_capacity(answers.len());
        let mut errors = Vec::new();
        for answer in answers {
            match answer.result {
                Ok(payload) => payloads.push(payload),
                Err(error) => errors.push(error),
            }
        }
        let Some(cause) = errors
            .iter()
            .min_by_key(|error| error.distance_from_cause())
            .cloned()
        else {
            return Ok(payloads);
        };
        if !even {
            // Some parameters are updated and some are not: only a state from outside can help.
            self.health = Health::Lost(Box::new(cause.clone()));
        } else if errors.iter().any(Error::ends_communication) {
            self.health = if self.local {
                Health::Disconnected
            } else {
                Health::Lost(Box::new(cause.clone()))
            };
        }
        Err(cause)
    }

    fn send(&mut self, index: usize, command: Command) -> Result<(), Error> {
        let handle = &self.ranks[index];
        handle.commands.send(command).map_err(|_| {
            let cause = Error::RankGone { rank: handle.rank };
            self.health = Health::Lost(Box::new(cause.clone()));
            cause
        })
    }

    fn collect(&mut self, count: usize) -> Result<Vec<Reply<W::Model>>, Error> {
        // Ranks notice a late peer after the time-out and then answer; the slack lets them say so.
        let deadline = Instant::now()
            + self.config.timeout
            + self.config.timeout / 2
            + Duration::from_millis(200);
        let mut answers: Vec<Reply<W::Model>> = Vec::with_capacity(count);
        while answers.len() < count {
            match self
                .replies
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(answer) => answers.push(answer),
                Err(reason) => {
                    let silent: Vec<usize> = (self.ranks.iter().map(|handle| handle.rank))
                        .filter(|rank| answers.iter().all(|answer| answer.rank != *rank))
                        .collect();
                    let cause = match reason {
                        RecvTimeoutError::Timeout => Error::RankTimeout {
                            ranks: silent,
                            timeout: self.config.timeout,
                        },
                        RecvTimeoutError::Disconnected => Error::RankGone {
                            rank: silent.first().copied().unwrap_or(0),
                        },
                    };
                    self.health = Health::Lost(Box::new(cause.clone()));
                    return Err(cause);
                }
            }
        }
        answers.sort_by_key(|answer| answer.rank);
        Ok(answers)
    }

    /// Ends the ranks' threads. Threads of a lost executor may hang in a workload: they are left alone.
    fn stop_ranks(&mut self) {
        let join = !matches!(self.health, Health::Lost(_));
        for handle in self.ranks.drain(..) {
            drop(handle.commands);
            if let Some(thread) = handle.thread.filter(|_| join) {
                // A rank's thread catches panics; there is nothing to learn from its end.
                let _ = thread.join();
            }
        }
    }
}

/// Makes the model with initial weights from the configured seed.
fn make_model<W: Workload>(
    workload: &W,
    device: &Device,
    config: &ExecutorConfig,
) -> Result<(W::Model, ParameterLayout), Error> {
    with_seed(device, config.seed, || {
        let model = workload.init(device).map_err(|error| Error::ModelInit {
            message: error.to_string(),
        })?;
        // This looks at all weights.
        let layout = ParameterLayout::of(&model, config.bucket_bytes)?;
        Ok((model, layout))
    })
}

impl<W: Workload> Drop for Executor<W> {
    fn drop(&mut self) {
        self.stop_ranks();
    }
}
