//! `DeepSpeed`: the keys of its configuration JSON.

use serde_json::json;

use super::{Launcher, equal_replicas, unsupported};
use crate::error::Result;
use crate::plan::Configuration;
use crate::training::{Precision, Recompute, Schedule, TrainingSpec};

const LAUNCHER: Launcher = Launcher::DeepSpeed;

pub(super) fn json(configuration: &Configuration, training: &TrainingSpec) -> Result<String> {
    let replicas = equal_replicas(LAUNCHER, configuration)?;
    let dims = &configuration.dims;
    if dims.cp > 1 || dims.ep > 1 || dims.vpp > 1 {
        return unsupported(
            LAUNCHER,
            "context parallelism, expert parallelism or interleaving in its configuration file",
        );
    }
    if dims.pp > 1 && (configuration.zero > 1 || configuration.schedule != Schedule::OneFOneB) {
        return unsupported(
            LAUNCHER,
            "pipeline with ZeRO above stage 1 or a schedule other than 1F1B",
        );
    }
    if dims.pp > 1 && dims.tp > 1 {
        return unsupported(LAUNCHER, "pipeline with automatic tensor parallelism");
    }
    if configuration.recompute == Recompute::Selective {
        return unsupported(
            LAUNCHER,
            "selective recomputation in its configuration file",
        );
    }
    // The three batch sizes are checked against each other by the launcher: their product relation must hold.
    let mut document = json!({
        "train_batch_size": configuration.global_batch(),
        "train_micro_batch_size_per_gpu": configuration.micro_batch,
        "gradient_accumulation_steps": replicas.accumulation_steps,
        "zero_optimization": {
            "stage": configuration.zero,
            "overlap_comm": training.overlap_reduce,
        },
        "bf16": {"enabled": matches!(training.precision, Precision::Bf16)},
        "fp16": {"enabled": matches!(training.precision, Precision::Fp16)},
    });
    if matches!(training.precision, Precision::Fp8 | Precision::Fp4) {
        return unsupported(
            LAUNCHER,
            "8-bit or 4-bit training in its configuration file",
        );
    }
    if dims.pp > 1 {
        document["pipeline"] = json!({
            "stages": dims.pp,
            "activation_checkpoint_interval": u32::from(configuration.recompute == Recompute::Full),
        });
    }
    if dims.tp > 1 {
        document["tensor_parallel"] = json!({"autotp_size": dims.tp});
    }
    Ok(format!("{document:#}\n"))
}
