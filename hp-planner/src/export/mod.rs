//! Plans as the arguments of launchers, and fronts as pictures.
//!
//! Each launcher gets the options that it documents. What it cannot express - replicas of unequal shares, virtual workers, a
//! schedule or `ZeRO` stage that it lacks - is an error that says so, never left out silently.

mod deepspeed;
mod html;
mod iidp;
mod megatron;
mod torchtitan;

use std::fmt;
use std::str::FromStr;

pub use html::{html, svg};

use crate::cluster::ClusterSpec;
use crate::error::{Error, Infeasible, Result};
use crate::model::{ModelSpec, Transformer};
use crate::plan::{Configuration, ReplicaGroup};
use crate::training::TrainingSpec;

/// A training framework that plans can be written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Launcher {
    /// Flags of Megatron-LM's `pretrain_gpt.py`, one per line.
    Megatron,
    /// A `DeepSpeed` configuration, JSON.
    DeepSpeed,
    /// A torchtitan job configuration, TOML.
    Torchtitan,
    /// The layout of workers of the `iidp` executor, JSON.
    Iidp,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Megatron => "megatron",
            Self::DeepSpeed => "deepspeed",
            Self::Torchtitan => "torchtitan",
            Self::Iidp => "iidp",
        })
    }
}

impl FromStr for Launcher {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [
            Self::Megatron,
            Self::DeepSpeed,
            Self::Torchtitan,
            Self::Iidp,
        ]
        .into_iter()
        .find(|launcher| launcher.to_string() == text)
        .ok_or_else(|| {
            Error::field(
                "export",
                format!("{text:?}"),
                "megatron, deepspeed, torchtitan or iidp",
            )
        })
    }
}

/// The configuration as the launcher's input.
///
/// # Errors
/// [`Error::Infeasible`] with [`Infeasible::Unsupported`] naming what the launcher cannot express.
pub fn export(
    launcher: Launcher,
    configuration: &Configuration,
    cluster: &ClusterSpec,
    model: &ModelSpec,
    training: &TrainingSpec,
) -> Result<String> {
    match launcher {
        Launcher::Megatron => {
            megatron::flags(configuration, model, training).map(|flags| flags.join("\n") + "\n")
        }
        Launcher::DeepSpeed => deepspeed::json(configuration, training),
        Launcher::Torchtitan => torchtitan::toml(configuration, training),
        Launcher::Iidp => Ok(iidp::json(configuration, cluster)),
    }
}

fn unsupported<T>(launcher: Launcher, what: impl fmt::Display) -> Result<T> {
    Err(Error::Infeasible(Infeasible::Unsupported(format!(
        "{launcher} has no {what}"
    ))))
}

/// The one kind of replica of a configuration that has no other.
fn equal_replicas(launcher: Launcher, configuration: &Configuration) -> Result<&ReplicaGroup> {
    let [replicas] = configuration.replicas.as_slice() else {
        return unsupported(launcher, "replicas of unequal shape or share of the batch");
    };
    if replicas.virtual_workers > 1 {
        return unsupported(launcher, "virtual workers");
    }
    let tp = configuration.dims.tp;
    if replicas.stages.iter().any(|stage| stage.tp != tp) {
        return unsupported(launcher, "stages of unequal tensor-parallel degree");
    }
    Ok(replicas)
}

fn transformer(launcher: Launcher, model: &ModelSpec) -> Result<&Transformer> {
    match &model.transformer {
        Some(shape) => Ok(shape),
        None => unsupported(launcher, "models given as a list of layers"),
    }
}
