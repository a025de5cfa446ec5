//! What is chosen and what it is predicted to cost: configurations, estimates, plans and the report.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Infeasible, Result};
use crate::training::{Recompute, Schedule};

/// Degrees of parallelism; `gpus()` is their product without `vpp` and `ep`, which subdivide others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParallelDims {
    /// Data-parallel replicas.
    pub dp: u32,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Model chunks per pipeline stage (1 without interleaving).
    pub vpp: u32,
    /// Context-parallel degree.
    pub cp: u32,
    /// Expert-parallel degree, a divisor of `dp * cp * tp`.
    pub ep: u32,
}

impl ParallelDims {
    /// Data parallelism only.
    pub const fn data(dp: u32) -> Self {
        Self {
            dp,
            tp: 1,
            pp: 1,
            vpp: 1,
            cp: 1,
            ep: 1,
        }
    }

    /// Data, tensor and pipeline parallelism.
    pub const fn new(dp: u32, tp: u32, pp: u32) -> Self {
        Self {
            dp,
            tp,
            pp,
            vpp: 1,
            cp: 1,
            ep: 1,
        }
    }

    /// Number of GPUs: `dp * tp * pp * cp`.
    pub const fn gpus(&self) -> u64 {
        self.dp as u64 * self.tp as u64 * self.pp as u64 * self.cp as u64
    }

    /// GPUs of one replica: `tp * pp * cp`.
    pub const fn replica_gpus(&self) -> u64 {
        self.tp as u64 * self.pp as u64 * self.cp as u64
    }

    /// Checks that no degree is 0, that `ep` divides the ranks it is laid over and that chunks need a pipeline.
    ///
    /// # Errors
    /// [`Error::Field`].
    pub fn validate(&self) -> Result<()> {
        for (name, degree) in [
            ("dp", self.dp),
            ("tp", self.tp),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("cp", self.cp),
            ("ep", self.ep),
        ] {
            if degree == 0 {
                return Err(Error::field(name, 0, "1 or more"));
            }
        }
        let ranks = u64::from(self.dp) * u64::from(self.cp) * u64::from(self.tp);
        if !ranks.is_multiple_of(u64::from(self.ep)) {
            return Err(Error::field(
                "ep",
                self.ep,
                format!("a divisor of dp * cp * tp = {ranks}"),
            ));
        }
        if self.vpp > 1 && self.pp == 1 {
            return Err(Error::field("vpp", self.vpp, "1 without pipeline stages"));
        }
        Ok(())
    }
}

/// GPUs taken from each node group of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Allocation {
    /// GPUs taken per group, in the order of [`ClusterSpec::groups`](crate::ClusterSpec); 0 where a group is not used.
    pub gpus: Vec<u32>,
}

impl Allocation {
    /// Number of GPUs.
    pub fn total(&self) -> u32 {
        self.gpus.iter().sum()
    }

    /// Groups of which GPUs are used.
    pub fn groups(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.gpus
            .iter()
            .copied()
            .enumerate()
            .filter(|&(_, gpus)| gpus > 0)
    }
}

/// A pipeline stage of a replica: which layers on which kind of GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stage {
    /// Index of the node group whose GPUs hold the stage.
    pub group: usize,
    /// First layer of the model; with `vpp > 1` the stage's layers are equal chunks that alternate with the other stages.
    pub first_layer: u32,
    /// Number of layers of the model.
    pub layers: u32,
    /// Tensor-parallel degree of the stage.
    pub tp: u32,
}

/// Equal data-parallel replicas: their shape and their share of the global batch.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReplicaGroup {
    /// Number of equal replicas.
    pub count: u32,
    /// Pipeline stages, one for plain data parallelism.
    pub stages: Vec<Stage>,
    /// Virtual workers that share each GPU, each with its own micro-batch (JABAS's virtual stream workers).
    pub virtual_workers: u32,
    /// Rounds of micro-batches per optimizer step.
    pub accumulation_steps: u32,
}

impl ReplicaGroup {
    /// Micro-batches per optimizer step of one replica.
    pub fn micro_batches(&self) -> u64 {
        u64::from(self.virtual_workers) * u64::from(self.accumulation_steps)
    }
}

/// Everything that is chosen.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Configuration {
    /// Degrees of parallelism.
    pub dims: ParallelDims,
    /// GPUs taken.
    pub allocation: Allocation,
    /// Replicas, grouped by equal shape and share; their counts sum to `dims.dp`.
    pub replicas: Vec<ReplicaGroup>,
    /// Samples per micro-batch.
    pub micro_batch: u32,
    /// Pipeline schedule.
    pub schedule: Schedule,
    /// Recomputation.
    pub recompute: Recompute,
    /// `ZeRO` stage, 0 to 3.
    pub zero: u8,
    /// Whether activations are split over the sequence between tensor-parallel regions.
    pub sequence_parallel: bool,
}

impl Configuration {
    /// Samples per optimizer step: micro-batch times the micro-batches of all replicas.
    pub fn global_batch(&self) -> u64 {
        u64::from(self.micro_batch)
            * self
                .replicas
                .iter()
                .map(|group| u64::from(group.count) * group.micro_batches())
                .sum::<u64>()
    }

    /// Replicas one by one, in the order of `replicas`.
    pub fn each_replica(&self) -> impl Iterator<Item = &ReplicaGroup> + '_ {
        self.replicas
            .iter()
            .flat_map(|group| std::iter::repeat_n(group, group.count as usize))
    }
}

/// Where the time of one iteration goes, in seconds. The terms add up to the iteration time: what is hidden behind
/// other work is not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeBreakdown {
    /// Forward and backward passes on the slowest replica's busiest stage.
    pub compute: f64,
    /// Tensor-, sequence-, context- and expert-parallel collectives there.
    pub model_parallel: f64,
    /// Idle time of that stage: pipeline fill and drain, and waiting for transfers.
    pub bubble: f64,
    /// Data-parallel reduction that does not hide behind the backward pass, and gathering of sharded parameters.
    pub data_parallel: f64,
    /// Optimizer update.
    pub update: f64,
    /// Fixed cost per iteration of the framework.
    pub overhead: f64,
}

impl TimeBreakdown {
    /// Sum of the terms.
    pub fn total(&self) -> f64 {
        self.compute
            + self.model_parallel
            + self.bubble
            + self.data_parallel
            + self.update
            + self.overhead
    }
}

/// Where the memory of one device goes, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryBreakdown {
    /// Parameters.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// Optimizer state and master weights.
    pub optimizer: f64,
    /// Activations at the fullest moment, logits included.
    pub activations: f64,
    /// Communication buffers and temporary space.
    pub buffers: f64,
}

impl MemoryBreakdown {
    /// Sum of the terms.
    pub fn total(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
    }
}

/// Memory of the devices of one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Index into [`Configuration::replicas`].
    pub replicas: usize,
    /// Pipeline stage.
    pub stage: usize,
    /// Node group.
    pub group: usize,
    /// Bytes used.
    pub bytes: MemoryBreakdown,
    /// Bytes that may be used: device memory less the margin.
    pub usable: f64,
}

/// Prediction for one configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Seconds per iteration, by cause.
    pub time: TimeBreakdown,
    /// Memory per kind of device.
    pub memory: Vec<DeviceMemory>,
    /// Money per hour for all GPUs taken.
    pub price_per_hour: f64,
}

impl Estimate {
    /// Seconds per iteration.
    pub fn iteration_time(&self) -> f64 {
        self.time.total()
    }

    /// Money per iteration.
    pub fn iteration_cost(&self) -> f64 {
        self.price_per_hour * self.iteration_time() / 3600.0
    }

    /// Bytes used on the fullest device.
    pub fn peak_memory(&self) -> f64 {
        self.memory
            .iter()
            .map(|device| device.bytes.total())
            .fold(0.0, f64::max)
    }
}

/// A configuration with its prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParallelPlan {
    /// What is chosen.
    pub configuration: Configuration,
    /// What it is predicted to take.
    pub estimate: Estimate,
}

impl ParallelPlan {
    /// Seconds per iteration.
    pub fn iteration_time(&self) -> f64 {
        self.estimate.iteration_time()
    }

    /// Money per iteration.
    pub fn iteration_cost(&self) -> f64 {
        self.estimate.iteration_cost()
    }

    /// Samples per second.
    pub fn throughput(&self) -> f64 {
        self.configuration.global_batch() as f64 / self.iteration_time()
    }
}

/// Why a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StopReason {
    /// Every configuration was examined or excluded by a bound: the front is complete.
    Complete,
    /// The time limit was reached: the front is of what had been examined.
    TimeLimit,
}

/// Number of configurations rejected for one kind of reason, with one example.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rejection {
    /// Configurations rejected.
    pub count: u64,
    /// The reason of the first of them.
    pub example: Infeasible,
}
