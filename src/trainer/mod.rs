//! The training loop: steps, decisions, records.

mod batch;
mod builder;

pub use builder::TrainerBuilder;

use crate::adapt::Adaptation;
use crate::devices::{Assignment, Devices};
use crate::error::Error;
use crate::observer::{Event, Observers};
use crate::record::{DecisionRecord, StepRecord, Termination, TrainingReport, ValidationRecord};
use crate::simulated::SimulatedCluster;
use crate::task::Task;
use batch::next_batch;
use iidp::{Executor, ShardedSampler};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks a run to end after the step that it is in. Cloning gives another handle to the same flag.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises it; a run that watches it ends after the step it is in.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How far a run goes and how often it looks up.
#[derive(Debug, Clone)]
struct Limits {
    samples: u64,
    steps: Option<u64>,
    validate_every: Option<u64>,
}

/// A run that is ready to start; made by [`Trainer::builder`].
///
/// # Examples
/// ```
/// use adaptive_batch::{BatchLimits, NoiseScaleController, ScalingRule};
/// use hpmd::{CharCorpus, CharGptConfig, CharGptTask, Trainer};
///
/// let corpus = CharCorpus::from_text(&"the quick brown fox jumps over the lazy dog. ".repeat(40), 16, 8, 0.2)?;
/// let shape = CharGptConfig { layers: 1, width: 16, heads: 2, dropout: 0.0 };
/// let limits = BatchLimits::new(8, 32, 4)?;
/// let report = Trainer::builder(CharGptTask::new(corpus, shape))
///     .device_speeds(vec![1.0, 0.5])
///     .local_batch(4)
///     .initial_batch(12)
///     .controller(NoiseScaleController::new(1.0, limits)?)
///     .scaling_rule(ScalingRule::Sqrt)
///     .interval(5)
///     .samples(240)
///     .build()?
///     .run()?;
/// assert_eq!(report.samples(), 240);
/// assert!(!report.decisions.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Trainer<T: Task> {
    executor: Executor<T>,
    devices: Devices,
    assignment: Assignment,
    adaptation: Adaptation,
    sampler: ShardedSampler,
    limits: Limits,
    local_batch: usize,
    observers: Observers,
    stop: StopFlag,
    report: TrainingReport,
}

impl<T: Task> Trainer<T> {
    /// Settings for training `task`; see [`TrainerBuilder`] for the defaults.
    pub fn builder(task: T) -> TrainerBuilder<T> {
        TrainerBuilder::new(task)
    }

    /// The simulated cluster with the plan that was chosen on it, if the run has one.
    pub fn simulated_cluster(&self) -> Option<&SimulatedCluster> {
        match &self.devices {
            Devices::Simulated(cluster) => Some(cluster),
            Devices::Local { .. } => None,
        }
    }

    /// Trains until all samples are consumed, the step limit is reached or the stop flag is raised; validates at the end.
    ///
    /// # Errors
    /// Of the executor (a step that failed was rolled back), of the gradient statistics, of an observer.
    pub fn run(mut self) -> Result<TrainingReport, Error> {
        self.observers.emit(&Event::Started {
            name: &self.report.name,
            samples: self.limits.samples,
            devices: &self.report.devices,
        })?;
        let mut validated = 0;
        self.report.termination = loop {
            if self.stop.is_raised() {
                break Termination::Interrupted;
            }
            let seen = self.report.samples();
            if seen >= self.limits.samples {
                break Termination::Completed;
            }
            if self
                .limits
                .steps
                .is_some_and(|limit| self.report.steps.len() as u64 >= limit)
            {
                break Termination::StepLimit;
            }
            self.step()?;
            if let Some(every) = self.limits.validate_every {
                let due = self.report.samples() / every;
                if due > validated {
                    validated = due;
                    self.validate()?;
                }
            }
        };
        if self.report.validations.last().map(|v| v.samples) != Some(self.report.samples()) {
            self.validate()?;
        }
        self.observers.emit(&Event::Finished(&self.report))?;
        Ok(self.report)
    }

    /// One optimizer step, and the decision after it where one is due.
    fn step(&mut self) -> Result<(), Error> {
        let seen = self.report.samples();
        let smallest = self.devices.ranks() * self.local_batch;
        let batch = next_batch(self.adaptation.batch, self.limits.samples - seen, smallest);
        self.lay_out(batch)?;

        let learning_rate = self.adaptation.learning_rate(seen);
        let keys = self.draw(batch)?;
        let output = self.executor.step(&keys, learning_rate)?;
        self.adaptation.observe()?;

        let (step, samples) = (self.report.steps.len() as u64 + 1, seen + batch as u64);
        let estimate = self.adaptation.estimate;
        let record = StepRecord {
            step,
            samples,
            loss: output.loss,
            batch,
            learning_rate,
            similarity: estimate.map(|e| e.similarity),
            noise_scale: estimate.map(|e| e.noise_scale),
            wall_seconds: output.timings.total.as_secs_f64(),
            simulated_seconds: self.assignment.simulated.map(|s| s.0),
            simulated_cost: self.assignment.simulated.map(|s| s.1),
        };
        self.observers.emit(&Event::Step(&record))?;
        self.report.steps.push(record);
        if samples < self.limits.samples {
            self.decide(step, samples)?;
        }
        Ok(())
    }

    /// The keys of the next `batch` samples; an epoch that ends within the batch is followed by the next one.
    fn draw(&mut self, batch: usize) -> Result<Vec<u64>, Error> {
        let positions = self.sampler.take(batch)?;
        let keys = self.executor.workload().training_samples();
        // The sampler was made for exactly these keys.
        Ok(positions.into_iter().map(|p| keys[p as usize]).collect())
    }

    /// Makes the ranks ready for a batch of this size, where it differs from the last one.
    fn lay_out(&mut self, batch: usize) -> Result<(), Error> {
        if batch != self.executor.global_batch() {
            self.assignment = self.devices.assign(batch)?;
            self.executor.reassign(self.assignment.layouts.clone())?;
        }
        Ok(())
    }

    fn decide(&mut self, step: u64, samples: u64) -> Result<(), Error> {
        let Some(decision) = self.adaptation.decide(step, samples)? else {
            return Ok(());
        };
        self.lay_out(decision.to_batch)?;
        let record = DecisionRecord {
            step,
            samples,
            from_batch: decision.from_batch,
            to_batch: decision.to_batch,
            learning_rate: self.adaptation.learning_rate(samples),
            similarity: decision.estimate.similarity,
            noise_scale: decision.estimate.noise_scale,
            micro_batches: self.assignment.micro_batches(),
            reason: decision.reason,
        };
        self.observers.emit(&Event::Decision(&record))?;
        self.report.decisions.push(record);
        Ok(())
    }

    fn validate(&mut self) -> Result<(), Error> {
        let keys = self.executor.workload().validation_samples().to_vec();
        let loss = self.executor.evaluate(&keys)?;
        let record = ValidationRecord {
            step: self.report.steps.len() as u64,
            samples: self.report.samples(),
            loss,
        };
        self.observers.emit(&Event::Validation(&record))?;
        self.report.validations.push(record);
        Ok(())
    }
}
