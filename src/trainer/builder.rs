//! The trainer's settings, checked once.

use super::{Limits, StopFlag, Trainer};
use crate::adapt::Adaptation;
use crate::devices::Devices;
use crate::error::Error;
use crate::measure::Measured;
use crate::observer::Observers;
use crate::record::{Termination, TrainingReport};
use crate::simulated::{MAX_VIRTUAL_WORKERS, SimulatedCluster, training_spec};
use crate::task::Task;
use adaptive_batch::{
    BatchSizeController, EmaEstimator, FixedController, LearningRate, ScalingRule,
};
use burn::tensor::Device;
use hp_planner::{ClusterSpec, Objective};
use iidp::{AdamWConfig, ExecutorConfig, OptimizerConfig, ShardedSampler};

/// Where the ranks of a run come from.
#[derive(Debug)]
enum Allocation {
    Local(Vec<f64>),
    Cluster(Box<ClusterSpec>),
    Planned(Box<SimulatedCluster>),
}

/// Collects the settings of a run; [`build`](Self::build) checks them.
#[derive(Debug)]
pub struct TrainerBuilder<T: Task> {
    task: T,
    name: String,
    allocation: Allocation,
    objective: Objective,
    device: Option<Device>,
    controller: Option<Box<dyn BatchSizeController>>,
    scaling_rule: ScalingRule,
    optimizer: OptimizerConfig,
    clip_norm: Option<f64>,
    learning_rate: f64,
    warmup_samples: u64,
    initial_batch: usize,
    local_batch: usize,
    virtual_workers: usize,
    smoothing: f64,
    interval: u64,
    samples: Option<u64>,
    step_limit: Option<u64>,
    validate_every: Option<u64>,
    seed: u64,
    observers: Observers,
    stop: StopFlag,
}

impl<T: Task> TrainerBuilder<T> {
    pub(super) fn new(task: T) -> Self {
        Self {
            task,
            name: "training".to_owned(),
            allocation: Allocation::Local(vec![1.0]),
            objective: Objective::Knee,
            device: None,
            controller: None,
            scaling_rule: ScalingRule::Sqrt,
            optimizer: AdamWConfig::new().into(),
            clip_norm: None,
            learning_rate: 1e-3,
            warmup_samples: 0,
            initial_batch: 32,
            local_batch: 8,
            virtual_workers: MAX_VIRTUAL_WORKERS,
            smoothing: 0.95,
            interval: 100,
            samples: None,
            step_limit: None,
            validate_every: None,
            seed: 0,
            observers: Observers::none(),
            stop: StopFlag::new(),
        }
    }

    /// Name of the run in outputs; `training` by default.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Plans on a described cluster and computes here, on one logical device per GPU of the chosen allocation; time and money are
    /// *simulated*. See [`objective`](Self::objective).
    #[must_use]
    pub fn cluster(mut self, cluster: ClusterSpec) -> Self {
        self.allocation = Allocation::Cluster(Box::new(cluster));
        self
    }

    /// As [`cluster`](Self::cluster), with a choice that was made before.
    #[must_use]
    pub fn planned(mut self, cluster: SimulatedCluster) -> Self {
        self.allocation = Allocation::Planned(Box::new(cluster));
        self
    }

    /// Equal logical devices of this machine; one by default.
    #[must_use]
    pub fn local_devices(self, devices: usize) -> Self {
        self.device_speeds(vec![1.0; devices])
    }

    /// Logical devices of this machine with relative speeds: micro-batches are divided so that all finish together.
    #[must_use]
    pub fn device_speeds(mut self, speeds: Vec<f64>) -> Self {
        self.allocation = Allocation::Local(speeds);
        self
    }

    /// How a point of the Pareto front is chosen under [`cluster`](Self::cluster); the knee by default.
    #[must_use]
    pub fn objective(mut self, objective: Objective) -> Self {
        self.objective = objective;
        self
    }

    /// The Burn device that all ranks compute on; flex (the CPU) by default.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// What decides the batch size; the batch stays fixed by default.
    #[must_use]
    pub fn controller(mut self, controller: impl BatchSizeController + 'static) -> Self {
        self.controller = Some(Box::new(controller));
        self
    }

    /// How the learning rate follows the batch size; the square-root rule by default.
    #[must_use]
    pub fn scaling_rule(mut self, rule: ScalingRule) -> Self {
        self.scaling_rule = rule;
        self
    }

    /// The optimizer; `AdamW` by default.
    #[must_use]
    pub fn optimizer(mut self, optimizer: impl Into<OptimizerConfig>) -> Self {
        self.optimizer = optimizer.into();
        self
    }

    /// Clips the global batch's gradient to this L2 norm; no clipping by default.
    #[must_use]
    pub fn clip_norm(mut self, norm: f64) -> Self {
        self.clip_norm = Some(norm);
        self
    }

    /// Learning rate at the initial batch size; 0.001 by default.
    #[must_use]
    pub fn learning_rate(mut self, rate: f64) -> Self {
        self.learning_rate = rate;
        self
    }

    /// Samples over which the learning rate rises linearly from zero; none by default.
    #[must_use]
    pub fn warmup_samples(mut self, samples: u64) -> Self {
        self.warmup_samples = samples;
        self
    }

    /// Global batch size to begin with, in samples; 32 by default.
    #[must_use]
    pub fn initial_batch(mut self, batch: usize) -> Self {
        self.initial_batch = batch;
        self
    }

    /// Samples per micro-batch: what a virtual worker computes at once; 8 by default. Global batches are multiples of it.
    #[must_use]
    pub fn local_batch(mut self, samples: usize) -> Self {
        self.local_batch = samples;
        self
    }

    /// Greatest number of virtual workers per GPU that the planner may choose under [`cluster`](Self::cluster); 4 by default.
    #[must_use]
    pub fn max_virtual_workers(mut self, workers: usize) -> Self {
        self.virtual_workers = workers;
        self
    }

    /// Decay per step of the moving averages under the estimates, in [0, 1); 0.95 by default.
    #[must_use]
    pub fn smoothing(mut self, decay: f64) -> Self {
        self.smoothing = decay;
        self
    }

    /// Steps between decisions; 100 by default.
    #[must_use]
    pub fn interval(mut self, steps: u64) -> Self {
        self.interval = steps;
        self
    }

    /// Samples to train on, a multiple of the local batch; by default one epoch, rounded down to that.
    #[must_use]
    pub fn samples(mut self, samples: u64) -> Self {
        self.samples = Some(samples);
        self
    }

    /// Ends the run after this many steps even if samples are left.
    #[must_use]
    pub fn step_limit(mut self, steps: u64) -> Self {
        self.step_limit = Some(steps);
        self
    }

    /// Validates whenever this many training samples were seen, and at the end; by default at the end only.
    #[must_use]
    pub fn validate_every(mut self, samples: u64) -> Self {
        self.validate_every = Some(samples);
        self
    }

    /// Seed of everything random: initial weights, order of samples, dropout; 0 by default.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Who watches; nobody by default.
    #[must_use]
    pub fn observers(mut self, observers: Observers) -> Self {
        self.observers = observers;
        self
    }

    /// A flag that ends the run when raised.
    #[must_use]
    pub fn stop_flag(mut self, flag: StopFlag) -> Self {
        self.stop = flag;
        self
    }

    /// Checks the settings, plans, and starts the ranks.
    ///
    /// # Errors
    /// [`Error::Setting`] naming the setting, its value and what would do; [`Error::Data`] without samples; errors of the
    /// planner and of the executor.
    pub fn build(mut self) -> Result<Trainer<T>, Error> {
        let samples = self.check()?;
        let devices = self.allocate()?;
        let smallest = devices.ranks() * self.local_batch;
        if self.initial_batch < smallest {
            let expected = format!(
                "at least {smallest}, one micro-batch of {} for each of the {} workers",
                self.local_batch,
                devices.ranks()
            );
            return Err(Error::setting(
                "initial_batch",
                self.initial_batch,
                expected,
            ));
        }
        let assignment = devices.assign(self.initial_batch)?;
        let names = devices.names();

        let measured = Measured::default();
        let observer = measured.clone();
        let mut config = ExecutorConfig::new(assignment.layouts.clone())
            .with_optimizer(self.optimizer)
            .with_seed(self.seed)
            .with_observers(move |context| observer.observer(context));
        if let Some(device) = self.device {
            config = config.with_devices(vec![device; names.len()]);
        }
        if let Some(norm) = self.clip_norm {
            config = config.with_clip_norm(norm);
        }
        let training = self.task.training_samples().len() as u64;
        let batch = self.initial_batch as u64;
        let controller = match self.controller {
            Some(controller) => controller,
            None => Box::new(FixedController::new(batch)?),
        };
        let adaptation = Adaptation {
            measured,
            estimator: EmaEstimator::new(self.smoothing)?,
            estimate: None,
            controller,
            learning_rate: LearningRate::new(self.learning_rate, batch, self.scaling_rule)?,
            warmup_samples: self.warmup_samples,
            interval: self.interval,
            batch: self.initial_batch,
        };
        Ok(Trainer {
            executor: config.init(self.task)?,
            assignment,
            adaptation,
            sampler: ShardedSampler::new(training, self.seed)?,
            limits: Limits {
                samples,
                steps: self.step_limit,
                validate_every: self.validate_every,
            },
            local_batch: self.local_batch,
            observers: self.observers,
            stop: self.stop,
            report: TrainingReport {
                name: self.name,
                termination: Termination::Interrupted,
                devices: names,
                front: match &devices {
                    Devices::Simulated(cluster) => Some(cluster.front_view()),
                    Devices::Local { .. } => None,
                },
                steps: Vec::new(),
                validations: Vec::new(),
                decisions: Vec::new(),
            },
            devices,
        })
    }

    /// Checks all that needs no other crate; returns the samples to train on.
    fn check(&self) -> Result<u64, Error> {
        let positive = |field, value: usize| {
            if value == 0 {
                Err(Error::setting(field, value, "at least 1"))
            } else {
                Ok(())
            }
        };
        positive("local_batch", self.local_batch)?;
        positive("initial_batch", self.initial_batch)?;
        positive("max_virtual_workers", self.virtual_workers)?;
        positive("interval", self.interval as usize)?;
        positive(
            "validate_every",
            self.validate_every.map_or(1, |v| v as usize),
        )?;
        if !self.initial_batch.is_multiple_of(self.local_batch) {
            let expected = format!("a multiple of the local batch of {}", self.local_batch);
            return Err(Error::setting(
                "initial_batch",
                self.initial_batch,
                expected,
            ));
        }
        if let Allocation::Local(speeds) = &self.allocation {
            if speeds.is_empty() {
                return Err(Error::setting("devices", 0, "at least one device"));
            }
            if let Some(speed) = speeds.iter().find(|s| !(**s > 0.0 && s.is_finite())) {
                return Err(Error::setting(
                    "device_speeds",
                    speed,
                    "positive and finite",
                ));
            }
        }
        for (what, keys) in [
            ("training data", self.task.training_samples()),
            ("validation data", self.task.validation_samples()),
        ] {
            if keys.is_empty() {
                return Err(Error::Data {
                    what: what.to_owned(),
                    reason: "there is no sample".to_owned(),
                });
            }
        }
        let local = self.local_batch as u64;
        let samples = self
            .samples
            .unwrap_or(self.task.training_samples().len() as u64 / local * local);
        if samples < self.initial_batch as u64 || !samples.is_multiple_of(local) {
            let expected = format!(
                "a multiple of the local batch of {local}, and at least one global batch of {}",
                self.initial_batch
            );
            return Err(Error::setting("samples", samples, expected));
        }
        Ok(samples)
    }

    fn allocate(&mut self) -> Result<Devices, Error> {
        let allocation = std::mem::replace(&mut self.allocation, Allocation::Local(Vec::new()));
        Ok(match allocation {
            Allocation::Local(speeds) => Devices::Local {
                speeds,
                local_batch: self.local_batch,
            },
            Allocation::Planned(cluster) => Devices::Simulated(cluster),
            Allocation::Cluster(cluster) => {
                let training = training_spec(
                    &self.task,
                    self.initial_batch,
                    self.local_batch,
                    self.virtual_workers,
                );
                Devices::Simulated(Box::new(SimulatedCluster::plan(
                    *cluster,
                    self.task.model_spec(),
                    training,
                    self.objective,
                )?))
            }
        })
    }
}
