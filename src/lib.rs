//! Adaptive deep-learning training on Burn: while a job trains, its global batch size, its learning rate and the division of work
//! among unequal devices follow what the gradients say.
//!
//! A [`Trainer`] composes four crates that know nothing of each other:
//!
//! - [`iidp`] runs a step on many logical devices with the convergence of one;
//! - [`adaptive_batch`] measures each micro-batch's gradient on its way into the accumulator and chooses the batch size;
//! - [`hp_planner`] predicts time and money on a described cluster and picks a point of the Pareto front;
//! - [`dytis`] keeps the samples of a [`CharCorpus`] in an ordered index.
//!
//! What is trained is a [`Task`]; [`CharGptTask`] is one. Decisions, steps and validations are recorded in a [`TrainingReport`] and
//! shown to [`observer`]s. Seconds and money on a cluster that is not here are always labelled *simulated*.
//!
//! Start with `examples/adaptive_training.rs`.

#![forbid(unsafe_code)]

mod adapt;
mod backend;
mod corpus;
mod devices;
mod error;
mod gpt_task;
mod measure;
pub mod observer;
mod record;
mod simulated;
mod task;
mod trainer;

pub use backend::Backend;
pub use corpus::{CharCorpus, Window};
pub use error::Error;
pub use gpt_task::{CharGptConfig, CharGptTask};
pub use record::{
    DecisionRecord, FrontView, StepRecord, Termination, TrainingReport, ValidationRecord,
};
pub use simulated::SimulatedCluster;
pub use task::Task;
pub use trainer::{StopFlag, Trainer, TrainerBuilder};

pub use adaptive_batch;
pub use dytis;
pub use hp_planner;
pub use iidp;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
