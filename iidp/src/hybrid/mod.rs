//! Data, tensor and pipeline parallelism together.
//!
//! A [`HybridExecutor`] lays a [`BlockModel`] out over a mesh of `dp x pp x tp` ranks: the blocks are cut into stages, the weights of
//! each stage into shards, and the whole is repeated `dp` times. A step is the same computation under any layout: micro-batch `m` is samples
//! `m b .. (m + 1) b` of the global batch; replica `r` computes a contiguous run of micro-batches, as many as its [`WorkerLayout`] says; each of its virtual workers is a
//! pipeline through all stages with its own share of them. Gradients are accumulated in the order of the micro-batches, summed over replicas in
//! rank order, and applied by one fused update on every rank. Layouts differ by the order of floating-point sums only.
//!
//! # Owners
//!
//! Of every element of the model one rank of each replica is the owner, and global norms and statistics count what it owns: a shard belongs to its rank, a
//! [replicated](crate::ShardSpec::Replicated) parameter to the first rank of its tensor-parallel group, a parameter that is tied between two stages to the one nearer to
//! the input. The gradients of the two ends of a tie are summed, so both ends make the same update and stay equal.
//!
//! # Failures
//!
//! As with the data-parallel [`Executor`](crate::Executor): a loss or gradient that is not finite rolls the step back on every rank, and the
//! executor goes on. An error or a panic in the middle of a schedule ends the communication of all ranks at once, so nobody waits for what will not come; no
//! rank has updated anything, and among threads of one process the next call connects the ranks anew.
//!
//! # Examples
//!
//! A model of three stages on six ranks, two replicas of which the second computes three times as much:
//!
//! ```
//! use burn::tensor::{Device, Tensor, TensorData};
//! use iidp::hybrid::{HybridConfig, HybridWorkload};
//! use iidp::models::{BlockMlp, BlockMlpConfig};
//! use iidp::pipeline::{Activation, StageContext};
//! use iidp::{BoxError, MicroBatch, ParallelDims, WorkerLayout};
//!
//! struct Sums(BlockMlpConfig);
//!
//! impl HybridWorkload for Sums {
//!     type Model = BlockMlpConfig;
//!
//!     fn model(&self) -> &BlockMlpConfig {
//!         &self.0
//!     }
//!
//!     fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError> {
//!         let values: Vec<f32> = batch.samples.iter().flat_map(|id| [*id as f32 / 8.0, 1.0]).collect();
//!         let shape = [batch.samples.len(), 2];
//!         Ok(Activation::new(Tensor::<2>::from_data(TensorData::new(values, shape), device)))
//!     }
//!
//!     fn loss(&self, output: Activation, _: &StageContext<'_>) -> Result<Tensor<1>, BoxError> {
//!         Ok((output.into_tensor::<2>()? - 1.0).square().mean())
//!     }
//! }
//!
//! let model = BlockMlpConfig::new(2, 8, 1, 1);
//! let layouts = vec![WorkerLayout::new(2, 1, 1), WorkerLayout::new(2, 1, 3)];
//! let mut executor = HybridConfig::new(ParallelDims::new(2, 1, 3), layouts).init(Sums(model))?;
//! let first = executor.step(&[0, 1, 2, 3, 4, 5, 6, 7], 1e-2)?.loss;
//! let second = executor.step(&[0, 1, 2, 3, 4, 5, 6, 7], 1e-2)?.loss;
//! assert!(second < first);
//! # Ok::<(), iidp::Error>(())
//! ```

mod config;
mod groups;
mod output;
mod partition;
mod rank;
mod reconfigure;
mod stage;
mod state;
mod traffic;
mod workload;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use config::{HybridConfig, HybridObserverContext, ScheduleKind};
pub use output::{HybridOutput, HybridTimings};
pub use partition::{init_whole, shard_module};
pub use state::{HybridState, LocalTensor, ParameterState};
pub use workload::{BlockModel, HybridWorkload, Tie};

use crate::communicator::Communicator;
use crate::topology::BatchPlan;
use crate::{Error, ParallelDims, WorkerLayout};
use config::local_world;
use partition::Cuts;
use rank::{Command, Payload, Rank, RankStep, Reply};

/// Trains a [`HybridWorkload`] on a mesh of ranks. Made by [`HybridConfig::init`].
pub struct HybridExecutor<W: HybridWorkload> {
    config: HybridConfig,
    workload: Arc<W>,
    plan: BatchPlan,
    ranks: Vec<RankHandle>,
    replies: Receiver<Reply>,
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
    Lost(Box<Error>),
}

#[derive(Debug)]
struct RankHandle {
    rank: usize,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl<W: HybridWorkload> fmt::Debug for HybridExecutor<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HybridExecutor")
            .field("config", &self.config)
            .field("step", &self.step)
            .field("health", &self.health)
            .finish_non_exhaustive()
    }
}

impl<W: HybridWorkload> HybridExecutor<W> {
    fn start(
        config: HybridConfig,
        workload: Arc<W>,
        communicators: Vec<Box<dyn Communicator>>,
        local: bool,
    ) -> Result<Self, Error> {
        let (sender, replies) = channel();
        let mut executor = Self {
            plan: BatchPlan::of(&config.layouts)?,
            config,
            workload,
            ranks: Vec::new(),
            replies,
            local,
            health: Health::Good,
            step: 0,
        };
        let config = &executor.config;
        let cuts = Cuts::new(
            executor.workload.model().blocks(),
            config.dims.pp,
            config.schedule.chunks(),
            config.cuts.as_deref(),
        )?;
        // Ranks make their communicators together, so each does it on a thread of its own.
        let workload = &executor.workload;
        let made: Vec<Result<Rank<W>, Error>> = std::thread::scope(|scope| {
            let threads: Vec<_> = communicators
                .into_iter()
                .map(|world| {
                    let (workload, cuts) = (Arc::clone(workload), &cuts);
                    scope.spawn(move || Rank::new(workload, config, cuts, world))
                })
                .collect();
            threads
                .into_iter()
                .enumerate()
                .map(|(rank, thread)| {
                    thread.join().unwrap_or_else(|panic| {
                        Err(Error::RankPanicked {
                            rank,
                            message: crate::worker::panic_message(&*panic),
                        })
                    })
                })
                .collect()
        });
        let mut ranks = Vec::with_capacity(made.len());
        let mut cause = None;
        for made in made {
            match made {
                Ok(rank) => ranks.push(rank),
                Err(error) => cause = Some(nearer_cause(cause, error)),
            }
        }
        if let Some(error) = cause {
            return Err(error);
        }
        for mut rank in ranks {
            let (number, at) = rank.place();
            let observer = executor
                .config
                .observe(number, at, &rank.layout, &rank.owned);
            rank.observe(observer);
            let (commands, inbox) = channel();
            let sender = sender.clone();
            let thread = std::thread::Builder::new()
                .name(format!("iidp-h{number}"))
                .spawn(move || rank.serve(&inbox, &sender))
                .map_err(|error| Error::ThreadStart {
                    what: "rank",
                    rank: number,
                    reason: error.to_string(),
                })?;
            executor.ranks.push(RankHandle {
                rank: number,
                commands,
                thread: Some(thread),
            });
        }
        Ok(executor)
    }

    /// Trains on one global batch: `samples` are its dataset ids, in order; there are [`Self::global_batch`] of them.
    ///
    /// # Errors
    ///
    /// [`Error::BatchMismatch`] and [`Error::Invalid`] before anything happens; [`Error::NonFiniteLoss`], [`Error::NonFiniteGradient`],
    /// [`Error::Workload`], [`Error::WorkerPanicked`], [`Error::Observer`] and communication errors with nothing updated, and
    /// [`Error::ExecutorLost`] on every later call when the executor cannot go on.
    pub fn step(&mut self, samples: &[u64], learning_rate: f64) -> Result<HybridOutput, Error> {
        let begin = Instant::now();
        if samples.is_empty() {
            return Err(Error::EmptyBatch);
        }
        if samples.len() != self.global_batch() {
            return Err(Error::BatchMismatch {
                samples: samples.len(),
                expected: self.global_batch(),
                local_batch: self.plan.local_batch,
            });
        }
        if !learning_rate.is_finite() {
            return Err(Error::Invalid {
                what: "learning rate",
                problem: format!("got {learning_rate}, expected a finite number"),
            });
        }
        let samples: Arc<[u64]> = samples.into();
        let answers = self.ask_all(|_| Command::Step {
            samples: Arc::clone(&samples),
            learning_rate,
        })?;
        let mut steps: Vec<RankStep> = answers
            .into_iter()
            .filter_map(|payload| match payload {
                Payload::Step(step) => Some(*step),
                _ => None,
            })
            .collect();
        let first = steps.remove(0);
        let ranks = std::iter::once(first.timings)
            .chain(steps.into_iter().map(|step| step.timings))
            .collect();
        let output = HybridOutput {
            step: self.step,
            loss: first.losses.iter().sum::<f64>() / first.losses.len() as f64,
            samples: samples.len(),
            micro_batch_losses: first.losses,
            gradient_norm: first.gradient_norm,
            clipped: first.clipped,
            total: begin.elapsed(),
            ranks,
        };
        self.step += 1;
        Ok(output)
    }

    /// Mean loss over `samples`, without gradients. Any number of samples.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyBatch`]; otherwise as [`Self::step`].
    pub fn evaluate(&mut self, samples: &[u64]) -> Result<f64, Error> {
        if samples.is_empty() {
            return Err(Error::EmptyBatch);
        }
        let samples: Arc<[u64]> = samples.into();
        let answers = self.ask_all(|_| Command::Evaluate {
            samples: Arc::clone(&samples),
        })?;
        Ok(answers
            .into_iter()
            .find_map(|payload| match payload {
                Payload::Evaluated(loss) => Some(loss),
                _ => None,
            })
            .unwrap_or(f64::NAN))
    }

    /// The state of the run, gathered from all ranks. O(parameters).
    ///
    /// # Errors
    ///
    /// When the ranks do not answer.
    pub fn state(&mut self) -> Result<HybridState, Error> {
        let answers = self.ask_all(|_| Command::Gather)?;
        Ok(answers
            .into_iter()
            .find_map(|payload| match payload {
                Payload::State(state) => Some(*state),
                _ => None,
            })
            .unwrap_or_default())
    }

    /// Goes on from `state`, which any layout may have exported.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] and [`Error::LengthMismatch`] if it belongs to another model.
    pub fn restore(&mut self, state: HybridState) -> Result<(), Error> {
        let step = state.step;
        let state = Arc::new(state);
        self.ask_all(|_| Command::Restore(Arc::clone(&state)))?;
        self.step = step;
        Ok(())
    }

    /// The shards that each rank of this process holds, by rank.
    ///
    /// # Errors
    ///
    /// When the ranks do not answer.
    pub fn local_tensors(&mut self) -> Result<Vec<Vec<LocalTensor>>, Error> {
        let answers = self.ask_all(|_| Command::Local)?;
        Ok(answers
            .into_iter()
            .filter_map(|payload| match payload {
                Payload::Local(tensors) => Some(tensors),
                _ => None,
            })
            .collect())
    }

    /// Samples per step.
    pub fn global_batch(&self) -> usize {
        self.plan.global_batch()
    }

    /// The sizes of the mesh.
    pub const fn dims(&self) -> ParallelDims {
        self.config.dims
    }

    /// What each replica does in a step.
    pub fn worker_layouts(&self) -> &[WorkerLayout] {
        &self.config.layouts
    }

    /// Steps taken.
    pub const fn steps(&self) -> u64 {
        self.step
    }

    /// The workload.
    pub fn workload(&self) -> &W {
        &self.workload
    }

    /// Sends every rank of this process its command and waits for all answers, by rank.
    fn ask_all(&mut self, command: impl Fn(usize) -> Command) -> Result<Vec<Payload>, Error> {
        match &self.health {
            Health::Good => {}
            Health::Lost(cause) => {
                return Err(Error::ExecutorLost {
                    cause: cause.to_string(),
                });
            }
            Health::Disconnected => {
                self.health = Health::Good;
                let worlds = local_world(self.ranks.len(), self.config.timeout)?;
                let commands = worlds.into_iter().map(Command::Reconnect).collect();
                self.exchange(commands)?;
            }
        }
        let commands = self
            .ranks
            .iter()
            .map(|handle| command(handle.rank))
            .collect();
        self.exchange(commands)
    }

    fn exchange(&mut self, commands: Vec<Command>) -> Result<Vec<Payload>, Error> {
        for (handle, command) in self.ranks.iter().zip(commands) {
            if handle.commands.send(command).is_err() {
                let cause = Error::RankGone { rank: handle.rank };
                self.health = Health::Lost(Box::new(cause.clone()));
                return Err(cause);
            }
        }
        let answers = self.collect()?;
        let even = answers.iter().all(|answer| answer.step == answers[0].step);
        let mut payloads = Vec::with_capacity(answers.len());
        let mut cause = None;
        let mut disconnected = false;
        for answer in answers {
            match answer.result {
                Ok(payload) => payloads.push(payload),
                Err(error) => {
                    disconnected |= error.ends_communication()
                        || matches!(error, Error::Workload { .. } | Error::WorkerPanicked { .. });
                    cause = Some(nearer_cause(cause, error));
                }
            }
        }
        let Some(cause) = cause else {
            return Ok(payloads);
        };
        if !even || (disconnected && !self.local) {
            self.health = Health::Lost(Box::new(cause.clone()));
        } else if disconnected {
            self.health = Health::Disconnected;
        }
        Err(cause)
    }

    fn collect(&mut self) -> Result<Vec<Reply>, Error> {
        let mut answers: Vec<Reply> = Vec::with_capacity(self.ranks.len());
        while answers.len() < self.ranks.len() {
            // A rank that waits for a lost one answers after the time-out, counted from when it began to wait.
            let limit = self.config.timeout * 2 + Duration::from_millis(200);
            match self.replies.recv_timeout(limit) {
                Ok(answer) => answers.push(answer),
                Err(reason) => {
                    let silent: Vec<usize> = (self.ranks.iter().map(|handle| handle.rank))
                        .filter(|rank| answers.iter().all(|answer| answer.rank != *rank))
                        .collect();
                    let cause = match reason {
                        RecvTimeoutError::Timeout => Error::RankTimeout {
                            ranks: silent,
                            timeout: limit,
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
}

/// Of two errors of one failure the one that tells more of its cause.
fn nearer_cause(first: Option<Error>, other: Error) -> Error {
    // A loss that is not finite comes before the gradients that it makes not finite.
    let distance = |error: &Error| {
        let follows = matches!(error, Error::NonFiniteGradient { .. });
        (error.distance_from_cause(), follows)
    };
    match first {
        Some(first) if distance(&first) <= distance(&other) => first,
        _ => other,
    }
}

impl<W: HybridWorkload> Drop for HybridExecutor<W> {
    fn drop(&mut self) {
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
