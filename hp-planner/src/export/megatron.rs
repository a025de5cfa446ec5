//! Megatron-LM: flags of `megatron/training/arguments.py`.

use super::{Launcher, equal_replicas, transformer, unsupported};
use crate::error::Result;
use crate::model::{Head, ModelSpec};
use crate::plan::Configuration;
use crate::training::{Precision, Recompute, Schedule, TrainingSpec};

const LAUNCHER: Launcher = Launcher::Megatron;

#[allow(clippy::too_many_lines, reason = "one flag after the other")]
pub(super) fn flags(
    configuration: &Configuration,
    model: &ModelSpec,
    training: &TrainingSpec,
) -> Result<Vec<String>> {
    let replicas = equal_replicas(LAUNCHER, configuration)?;
    let shape = transformer(LAUNCHER, model)?;
    if shape.head != Head::Language {
        return unsupported(LAUNCHER, "language-model script for classifiers");
    }
    let dims = &configuration.dims;
    if dims.pp > 1 && configuration.schedule != Schedule::OneFOneB {
        return unsupported(
            LAUNCHER,
            format!("pipeline schedule {:?}", configuration.schedule),
        );
    }
    if configuration.zero > 1 {
        return unsupported(
            LAUNCHER,
            format!(
                "ZeRO stage {} in its distributed optimizer",
                configuration.zero
            ),
        );
    }
    let mut flags = Vec::new();
    let mut value = |name: &str, value: u64| flags.push(format!("--{name} {value}"));
    value("num-layers", shape.layers.into());
    value("hidden-size", shape.hidden.into());
    value("ffn-hidden-size", shape.ffn().into());
    value("num-attention-heads", shape.heads.into());
    if shape.kv_heads() != shape.heads {
        value("num-query-groups", shape.kv_heads().into());
    }
    value("seq-length", training.seq.into());
    value(
        "max-position-embeddings",
        shape.max_positions.max(training.seq).into(),
    );
    value("micro-batch-size", configuration.micro_batch.into());
    value("global-batch-size", configuration.global_batch());
    value("tensor-model-parallel-size", dims.tp.into());
    value("pipeline-model-parallel-size", dims.pp.into());
    if dims.cp > 1 {
        value("context-parallel-size", dims.cp.into());
    }
    if shape.experts > 0 {
        value("num-experts", shape.experts.into());
        value("moe-router-topk", shape.experts_per_token.into());
        value("expert-model-parallel-size", dims.ep.into());
    }
    let layers: Vec<u32> = replicas.stages.iter().map(|stage| stage.layers).collect();
    let even = layers.windows(2).all(|pair| pair[0] == pair[1]);
    if dims.vpp > 1 {
        if !even {
            return unsupported(
                LAUNCHER,
                "interleaving of stages with unequal numbers of layers",
            );
        }
        value(
            "num-layers-per-virtual-pipeline-stage",
            u64::from(layers[0] / dims.vpp),
        );
    } else if !even {
        // Only the two end stages may differ from the others.
        let middle = &layers[1..layers.len() - 1];
        if middle.windows(2).any(|pair| pair[0] != pair[1]) {
            return unsupported(LAUNCHER, "unequal numbers of layers in the middle stages");
        }
        value("decoder-first-pipeline-num-layers", layers[0].into());
        value(
            "decoder-last-pipeline-num-layers",
            layers[layers.len() - 1].into(),
        );
    }
    let mut set = |flag: &str| flags.push(format!("--{flag}"));
    if shape.kv_heads() != shape.heads {
        set("group-query-attention");
    }
    if shape.gated_mlp {
        set("swiglu");
    }
    if !shape.tied_embeddings {
        set("untie-embeddings-and-output-weights");
    }
    if !shape.biases {
        set("disable-bias-linear");
    }
    if shape.max_positions == 0 {
        set("position-embedding-type rope");
    }
    if configuration.sequence_parallel {
        set("sequence-parallel");
    }
    if training.flash_attention {
        set("use-flash-attn");
    }
    match configuration.recompute {
        Recompute::None => {}
        Recompute::Selective => set("recompute-granularity selective"),
        Recompute::Full => {
            set("recompute-granularity full");
            set("recompute-method uniform");
            set("recompute-num-layers 1");
        }
    }
    if configuration.zero == 1 {
        set("use-distributed-optimizer");
    }
    if training.overlap_reduce && dims.dp > 1 {
        set("overlap-grad-reduce");
    }
    match training.precision {
        Precision::Bf16 => set("bf16"),
        Precision::Fp16 => set("fp16"),
        Precision::Fp8 => {
            set("bf16");
            set("fp8-format hybrid");
        }
        Precision::Fp32 | Precision::Tf32 => {}
        Precision::Fp4 => return unsupported(LAUNCHER, "4-bit training under these flags"),
    }
    Ok(flags)
}
