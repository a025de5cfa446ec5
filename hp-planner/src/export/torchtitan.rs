//! torchtitan: the sections of its job configuration.

use serde::Serialize;

use super::{Launcher, equal_replicas, unsupported};
use crate::error::{Error, Place, Result};
use crate::plan::Configuration;
use crate::training::{Precision, Recompute, Schedule, TrainingSpec};

const LAUNCHER: Launcher = Launcher::Torchtitan;

#[derive(Serialize)]
struct Job {
    training: Training,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
}

#[derive(Serialize)]
struct Training {
    local_batch_size: u64,
    global_batch_size: u64,
    seq_len: u32,
    mixed_precision_param: &'static str,
    mixed_precision_reduce: &'static str,
}

#[derive(Serialize)]
struct Parallelism {
    data_parallel_replicate_degree: u32,
    data_parallel_shard_degree: u32,
    fsdp_reshard_after_forward: &'static str,
    tensor_parallel_degree: u32,
    pipeline_parallel_degree: u32,
    context_parallel_degree: u32,
    expert_parallel_degree: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline_parallel_schedule: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline_parallel_microbatch_size: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline_parallel_layers_per_stage: Option<u32>,
}

#[derive(Serialize)]
struct ActivationCheckpoint {
    mode: &'static str,
}

pub(super) fn toml(configuration: &Configuration, training: &TrainingSpec) -> Result<String> {
    let replicas = equal_replicas(LAUNCHER, configuration)?;
    let dims = &configuration.dims;
    let layers = replicas.stages[0].layers;
    let pipeline = dims.pp > 1;
    if pipeline && replicas.stages.iter().any(|stage| stage.layers != layers) {
        return unsupported(LAUNCHER, "stages with unequal numbers of layers");
    }
    // Sharding the optimizer alone has no setting; full sharding keeps or drops the gathered parameters after use.
    let (replicate, shard, reshard) = match configuration.zero {
        0 => (dims.dp, 1, "default"),
        2 => (1, dims.dp, "never"),
        3 => (1, dims.dp, "always"),
        stage => return unsupported(LAUNCHER, format!("ZeRO stage {stage}")),
    };
    let schedule = match (configuration.schedule, dims.vpp) {
        (Schedule::GPipe, _) => "GPipe",
        (Schedule::OneFOneB, 1) => "1F1B",
        (Schedule::OneFOneB, _) => "Interleaved1F1B",
        (Schedule::ZbV, _) => "ZBVZeroBubble",
        (other, _) => return unsupported(LAUNCHER, format!("pipeline schedule {other:?}")),
    };
    let micro_batches = if pipeline {
        replicas.micro_batches()
    } else {
        1
    };
    let job = Job {
        training: Training {
            local_batch_size: micro_batches * u64::from(configuration.micro_batch),
            global_batch_size: configuration.global_batch(),
            seq_len: training.seq,
            mixed_precision_param: match training.precision {
                Precision::Fp32 | Precision::Tf32 => "float32",
                Precision::Bf16 => "bfloat16",
                Precision::Fp16 | Precision::Fp8 | Precision::Fp4 => {
                    return unsupported(
                        LAUNCHER,
                        format!("parameters in {:?}", training.precision),
                    );
                }
            },
            mixed_precision_reduce: "float32",
        },
        parallelism: Parallelism {
            data_parallel_replicate_degree: replicate,
            data_parallel_shard_degree: shard,
            fsdp_reshard_after_forward: reshard,
            tensor_parallel_degree: dims.tp,
            pipeline_parallel_degree: dims.pp,
            context_parallel_degree: dims.cp,
            expert_parallel_degree: dims.ep,
            pipeline_parallel_schedule: pipeline.then_some(schedule),
            pipeline_parallel_microbatch_size: pipeline.then_some(configuration.micro_batch),
            pipeline_parallel_layers_per_stage: pipeline.then_some(layers / dims.vpp),
        },
        activation_checkpoint: ActivationCheckpoint {
            mode: match configuration.recompute {
                Recompute::None => "none",
                Recompute::Selective => "selective",
                Recompute::Full => "full",
            },
        },
    };
    toml::to_string(&job).map_err(|error| Error::Syntax {
        place: Place::default(),
        message: error.to_string(),
    })
}
