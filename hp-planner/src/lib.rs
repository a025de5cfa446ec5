//! Which hybrid-parallel configuration, on which devices, at what price.
//!
//! Given a cluster (possibly of mixed GPU types) with prices, a model and a training, the planner predicts time, memory and
//! money of configurations and returns the Pareto front over time and money.

#![forbid(unsafe_code)]

mod assign;
mod calibration;
mod catalogue;
mod cluster;
pub mod cost;
mod document;
mod error;
mod evaluation;
pub mod export;
pub mod jabas;
mod model;
mod pareto;
mod plan;
mod planner;
mod profile;
mod report;
mod search;
pub mod simulate;
mod training;
mod trajectory;

pub use assign::{RankKind, Share, assign};
pub use calibration::{Calibration, Fit, FitKind, LayerProfile, MemoryFit, Prediction};
pub use cluster::{ClusterSpec, GpuType, Link, NodeGroup, PeakRates};
pub use cost::analytic::AnalyticCost;
pub use cost::constants::Constants;
pub use cost::memory::MemoryConstants;
pub use cost::{CostModel, Problem, ReplicaKind, ShapeChoice, ShapeCost};
pub use error::{Error, Infeasible, Place, Result};
pub use evaluation::{ErrorSummary, Evaluation, Evaluator, Regret, split};
pub use model::{Head, Latent, Layer, ModelSpec, Transformer};
pub use pareto::{FrontPoint, Objective, ParetoFront, Selection};
pub use plan::{
    Allocation, Configuration, DeviceMemory, Estimate, MemoryBreakdown, ParallelDims, ParallelPlan,
    Rejection, ReplicaGroup, Stage, StopReason, TimeBreakdown,
};
pub use planner::Planner;
pub use profile::{Case, CaseKey, MeasuredRow, Profile};
pub use report::{PlanReport, SCHEMA_VERSION};
pub use training::{BatchInterval, Optimizer, Precision, Recompute, Schedule, TrainingSpec};
pub use trajectory::{IntervalPlan, TrajectoryPlan, Transition, TransitionModel, plan_trajectory};
