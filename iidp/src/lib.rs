//! Executor for data-parallel training with identical convergence on unequal devices, on Burn.
//!
//! See [`Executor`] for what a step does, [`Workload`] for what you write, and [`models`] for models to start from.

#![cfg_attr(not(feature = "mpi"), forbid(unsafe_code))]

mod assign;
mod bucket;
pub mod communicator;
mod devices;
mod error;
mod executor;
pub mod hybrid;
pub mod models;
pub mod optimizer;
mod permutation;
pub mod pipeline;
pub mod profiler;
pub mod reshard;
pub mod sampler;
mod seeding;
mod shard;
pub mod state_dict;
pub mod tensor_parallel;
mod topology;
mod worker;

pub use assign::{Assignment, RankCost, assign_workers};
pub use bucket::{GradientBucket, ParameterLayout, ParameterSlot};
#[cfg(feature = "mpi")]
pub use communicator::MpiCommunicator;
pub use communicator::{Communicator, LocalCommunicator};
pub use devices::devices;
pub use error::{Error, Loss};
pub use executor::{
    BoxError, BucketTiming, Executor, ExecutorConfig, ExecutorState, MicroBatch,
    MicroBatchObserver, MicroBatchRef, MicroBatchTiming, Mode, ObserverContext, PlainAccumulation,
    RankTimings, StepOutput, StepTimings, Workload, accumulate_weighted,
};
pub use hybrid::{HybridConfig, HybridExecutor, HybridWorkload};
pub use optimizer::{AdamWConfig, OptimizerConfig};
pub use pipeline::{Schedule, StageModule};
pub use profiler::Profiler;
pub use reshard::ReshardPlan;
pub use sampler::ShardedSampler;
pub use shard::ShardSpec;
pub use state_dict::StateDict;
pub use topology::{Coordinates, ParallelDims, Topology, WorkerLayout};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
