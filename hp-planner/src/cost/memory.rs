//! Memory of one device: parameters, gradients, optimizer state (`ZeRO`, Rajbhandari et al. 2020) and activations
//! (Korthikanti et al. 2022, section 4).

use serde::{Deserialize, Serialize};

use crate::cluster::GIB;
use crate::cost::compute::Shard;
use crate::cost::constants::{Bound, bound};
use crate::model::{Head, Layer, Transformer};
use crate::plan::MemoryBreakdown;
use crate::training::{Recompute, TrainingSpec};

/// What allocators and frameworks make of the counted tensors; every constant has physical bounds ([`MEMORY_BOUNDS`]).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MemoryConstants {
    /// Fixed GiB: context, library workspaces, communication buffers.
    pub fixed_gib: f64,
    /// Kept activations in fact over those counted: fused or reused buffers save, fragmentation adds.
    pub activation_factor: f64,
    /// Model state in fact over that counted: gradients in another format, buffers of flattened parameters.
    pub state_factor: f64,
    /// Bytes per logit while the loss is computed: 4 with a fused loss, 10 and more with 32-bit copies.
    pub logit_bytes: f64,
    /// Gradients of activations alive at a time in the backward pass, in residual streams of a micro-batch.
    pub stream_gradients: f64,
    /// Gathered inputs and outputs of sequence-parallel products alive at a time, in whole residual streams.
    pub gathered_streams: f64,
    /// Weight gradients in the format of the products that exist beside the accumulated ones, in blocks (with the head where it is).
    pub weight_gradients: f64,
    /// Fraction of a block's activations that selective recomputation keeps when a fused attention kernel leaves no scores to
    /// drop: 1 where only the attention core is recomputed, less where every second product is.
    pub selective_kept: f64,
}

/// Number of [`MemoryConstants`].
pub const MEMORY_COUNT: usize = 8;

/// Their bounds and the widths of their priors, in the order of [`MemoryConstants::to_array`].
pub const MEMORY_BOUNDS: [Bound; MEMORY_COUNT] = [
    bound("fixed_gib", 0.0, 16.0, 1.0),
    bound("activation_factor", 0.3, 3.0, 0.1),
    bound("state_factor", 0.7, 2.0, 0.1),
    bound("logit_bytes", 0.0, 16.0, 2.0),
    bound("stream_gradients", 0.0, 30.0, 3.0),
    bound("gathered_streams", 0.0, 12.0, 1.5),
    bound("weight_gradients", 0.0, 2.0, 0.25),
    bound("selective_kept", 0.1, 1.0, 0.25),
];

impl Default for MemoryConstants {
    /// Values at which Megatron-core's largest allocation is met: a fused loss, one block's weight gradients.
    fn default() -> Self {
        Self::from_array([0.1, 1.0, 1.0, 3.0, 8.5, 3.5, 1.0, 1.0])
    }
}

impl MemoryConstants {
    /// The constants as numbers, in the order of [`MEMORY_BOUNDS`].
    pub const fn to_array(&self) -> [f64; MEMORY_COUNT] {
        [
            self.fixed_gib,
            self.activation_factor,
            self.state_factor,
            self.logit_bytes,
            self.stream_gradients,
            self.gathered_streams,
            self.weight_gradients,
            self.selective_kept,
        ]
    }

    /// The inverse of [`to_array`](Self::to_array); values are clamped to their bounds.
    pub fn from_array(values: [f64; MEMORY_COUNT]) -> Self {
        let mut clamped = values;
        for (value, bound) in clamped.iter_mut().zip(&MEMORY_BOUNDS) {
            *value = value.clamp(bound.least, bound.most);
        }
        let [
            fixed_gib,
            activation_factor,
            state_factor,
            logit_bytes,
            stream_gradients,
            gathered_streams,
            weight_gradients,
            selective_kept,
        ] = clamped;
        Self {
            fixed_gib,
            activation_factor,
            state_factor,
            logit_bytes,
            stream_gradients,
            gathered_streams,
            weight_gradients,
            selective_kept,
        }
    }

    /// Bytes of the tensors that `units` counts.
    pub fn bytes(&self, units: &MemoryUnits) -> MemoryBreakdown {
        let kept = units.kept
            * if units.selective {
                self.selective_kept
            } else {
                1.0
            };
        MemoryBreakdown {
            parameters: self.state_factor * units.state.parameters,
            gradients: self.state_factor * units.state.gradients,
            optimizer: self.state_factor * units.state.optimizer,
            activations: self.activation_factor * (kept + units.recomputed)
                + self.logit_bytes * units.logits
                + self.stream_gradients * units.stream,
            buffers: units.state.buffers
                + self.gathered_streams * units.gathered
                + self.weight_gradients * units.weights
                + self.fixed_gib * GIB,
        }
    }
}

/// Tensors of one device at its fullest moment, in bytes unless stated.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MemoryUnits {
    /// Parameters, gradients, optimizer state, and parameters gathered for a while.
    pub state: MemoryBreakdown,
    /// Activations kept for all micro-batches in flight.
    pub kept: f64,
    /// Whether `kept` is under selective recomputation with fused attention.
    pub selective: bool,
    /// A block that is being recomputed.
    pub recomputed: f64,
    /// Logits, as a number of elements.
    pub logits: f64,
    /// The residual stream of a micro-batch on this device.
    pub stream: f64,
    /// The whole residual stream of a micro-batch where sequence parallelism gathers it; else 0.
    pub gathered: f64,
    /// Weights of the largest block, and of the head where it is, as their products compute with them.
    pub weights: f64,
}

/// Bytes of activations that one block keeps for one micro-batch until its backward pass.
///
/// Without tensor parallelism, fused attention or recomputation this is `s b h (34 + 5 a s / h)` for a GPT block in 16 bits
/// (Korthikanti et al. 2022, equation 1); the terms are kept apart here because gates, grouped heads and experts change them.
pub fn block_activations(shape: &Transformer, layer: u32, shard: &Shard) -> f64 {
    let h = f64::from(shape.hidden);
    let tokens = shard.tokens();
    let e = shard.element;
    let split = if shard.sequence_parallel {
        shard.tp
    } else {
        1.0
    };
    let input = tokens * h * e / split;
    if shard.recompute == Recompute::Full {
        return input;
    }
    // Inputs of the two norms and of the first products of the two parts, and two dropout masks of a byte; models without biases
    // are trained without dropout.
    let masks = if shape.biases { 2.0 } else { 0.0 };
    let stream = tokens * h * (4.0 * e + masks) / split;
    // Query, key, value and the context that enters the projection.
    let heads = if let Some(latent) = &shape.latent {
        let down = f64::from(latent.query_rank + latent.kv_rank);
        let small = 2.0 * down + f64::from(latent.rope_dim);
        let wide = f64::from(shape.heads)
            * f64::from(2 * (shape.head_dim() + latent.rope_dim) + 2 * latent.value_dim);
        tokens * (small + wide / shard.tp) * e
    } else {
        let q = f64::from(shape.heads * shape.head_dim());
        let kv = f64::from(shape.kv_heads() * shape.head_dim());
        tokens * (2.0 * q + 2.0 * kv) * e / shard.tp
    };
    let scores = if shard.flash || shard.recompute == Recompute::Selective {
        // One 32-bit number per row and head.
        tokens * f64::from(shape.heads) * 4.0 / shard.tp
    } else {
        // Softmax, its dropout and mask.
        tokens * shard.seq * f64::from(shape.heads) * (2.0 * e + 1.0) / shard.tp
    };
    let inner = |rows: f64, f: f64| {
        // Input of the activation (two with a gate) and its output.
        rows * f * if shape.gated_mlp { 3.0 } else { 2.0 } * e / shard.tp
    };
    let mlp = if shape.is_moe(layer) {
        let routed = tokens * f64::from(shape.experts_per_token);
        // The router's logits, and the tokens in the order of their experts.
        tokens * f64::from(shape.experts) * 4.0
            + routed * h * e
            + inner(routed, f64::from(shape.expert_ffn()))
            + inner(tokens, f64::from(shape.shared_experts * shape.expert_ffn()))
    } else {
        inner(tokens, f64::from(shape.ffn()))
    };
    stream + heads + scores + mlp
}

/// Number of logits of one micro-batch on a device of the last stage.
pub fn logits(shape: &Transformer, shard: &Shard) -> f64 {
    let rows = match shape.head {
        Head::Language => shard.tokens(),
        Head::Classifier => shard.samples,
    };
    rows * f64::from(shape.vocab) / shard.tp
}

/// Bytes that an explicit layer keeps for one micro-batch.
pub fn layer_activations(layer: &Layer, shard: &Shard) -> f64 {
    let kept = if shard.recompute == Recompute::Full {
        layer.output_bytes
    } else {
        layer.activation_bytes
    };
    shard.samples * kept * shard.element / 2.0 / shard.tp
}

/// Bytes of model state for `parameters` on a device, sharded over `ranks` data-parallel ranks by `zero`, with `copies`
/// of parameters and gradients (one per virtual worker).
pub fn model_state(
    parameters: f64,
    zero: u8,
    ranks: f64,
    copies: f64,
    training: &TrainingSpec,
) -> MemoryBreakdown {
    let shard = |from: u8| if zero >= from { 1.0 / ranks } else { 1.0 };
    MemoryBreakdown {
        parameters: copies * parameters * training.precision.bytes() * shard(3),
        gradients: copies * parameters * training.gradient_element_bytes() * shard(2),
        optimizer: parameters * training.optimizer_bytes() * shard(1),
        activations: 0.0,
        buffers: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_follow_korthikanti() {
        let shape = Transformer::new(1, 4096, 32, 50_000);
        let mut shard = Shard {
            samples: 3.0,
            seq: 2048.0,
            tp: 1.0,
            cp: 1.0,
            ep: 1.0,
            sequence_parallel: false,
            flash: false,
            element: 2.0,
            recompute: Recompute::None,
        };
        let (s, b, h, a) = (2048.0, 3.0, 4096.0, 32.0);
        let close =
            |left: f64, right: f64| assert!((left / right - 1.0).abs() < 1e-12, "{left} {right}");
        close(
            block_activations(&shape, 0, &shard),
            s * b * h * (34.0 + 5.0 * a * s / h),
        );
        shard.recompute = Recompute::Full;
        close(block_activations(&shape, 0, &shard), 2.0 * s * b * h);
        // Equation 2 and table 2: tensor parallelism alone leaves 10 s b h on every rank, with sequence parallelism all is split.
        shard.recompute = Recompute::None;
        shard.tp = 8.0;
        close(
            block_activations(&shape, 0, &shard),
            s * b * h * (10.0 + 24.0 / 8.0 + 5.0 * a * s / h / 8.0),
        );
        shard.sequence_parallel = true;
        close(
            block_activations(&shape, 0, &shard),
            s * b * h / 8.0 * (34.0 + 5.0 * a * s / h),
        );
    }

    #[test]
    fn the_largest_allocation_of_megatron_is_met() {
        // SimuMax v1.2, docs/b200/b200_release_v1.2_summary.json, measured maximum over ranks: 12 layers of Llama 3 70B at tp 4 and
        // dp 2 (39.07 GiB), 4 layers of Llama 3 405B at tp 8 (38.57 GiB) and at tp 1, cp 8 with 32,768 tokens (139.22 GiB); bf16
        // with 32-bit gradients, optimizer sharded over dp x cp, micro-batch 1, no recomputation.
        let measured = [
            (12, 8192, 64, 28_672, 4.0, 2.0, 1.0, 4096.0, 39.07),
            (4, 16_384, 128, 53_248, 8.0, 1.0, 1.0, 4096.0, 38.57),
            (4, 16_384, 128, 53_248, 1.0, 1.0, 8.0, 32_768.0, 139.22),
        ];
        for (layers, hidden, heads, ffn, tp, dp, cp, seq, gib) in measured {
            let model = crate::ModelSpec::llama("", layers, hidden, heads, 8, ffn, 128_256);
            let shape = model.transformer.as_ref().unwrap();
            let shard = Shard {
                samples: 1.0,
                seq,
                tp,
                cp,
                ep: 1.0,
                sequence_parallel: tp > 1.0,
                flash: true,
                element: 2.0,
                recompute: Recompute::None,
            };
            let mut training = TrainingSpec::new(1, 1);
            training.gradient_bytes = 4;
            let stream = seq / cp * f64::from(hidden) * 2.0;
            let block = shape.block_parameters(0);
            let head = f64::from(shape.vocab) * f64::from(hidden);
            let units = MemoryUnits {
                state: model_state(model.parameters() / tp, 1, dp * cp, 1.0, &training),
                kept: f64::from(layers) * block_activations(shape, 0, &shard),
                logits: logits(shape, &shard),
                stream: stream / tp,
                gathered: if tp > 1.0 { stream } else { 0.0 },
                weights: (block + head) / tp * 2.0,
                ..MemoryUnits::default()
            };
            let got = MemoryConstants::default().bytes(&units).total() / GIB;
            assert!((got / gib - 1.0).abs() < 0.01, "{got} against {gib}");
        }
    }

    #[test]
    fn latent_attention_keeps_its_ranks() {
        // DeepSeek-V2: per token in bf16 two ranks before and after their norms, the shared positions, and per head query and key of
        // 128 + 64, value and context of 128: 2 (2 * 2048 + 64 + 128 * 640) bytes; streams 8 h, one statistic per head.
        let mut shape = Transformer::new(1, 5120, 128, 102_400);
        shape.biases = false;
        shape.gated_mlp = true;
        shape.ffn = 12_288;
        shape.head_dim = 128;
        shape.latent = Some(crate::Latent {
            query_rank: 1536,
            kv_rank: 512,
            rope_dim: 64,
            value_dim: 128,
        });
        let shard = Shard {
            samples: 1.0,
            seq: 1.0,
            tp: 1.0,
            cp: 1.0,
            ep: 1.0,
            sequence_parallel: false,
            flash: true,
            element: 2.0,
            recompute: Recompute::None,
        };
        let expected = 8.0 * 5120.0
            + 2.0 * (2.0 * 2048.0 + 64.0 + 128.0 * 640.0)
            + 4.0 * 128.0
            + 6.0 * 12_288.0;
        assert!((block_activations(&shape, 0, &shard) / expected - 1.0).abs() < 1e-12);
    }

    #[test]
    fn zero_shards_sixteen_bytes_per_parameter() {
        // Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 ranks need 120, 31.4, 16.6 and 1.9 GB.
        let training = TrainingSpec::new(1, 1);
        for (zero, gigabytes) in [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)] {
            let bytes = model_state(7.5e9, zero, 64.0, 1.0, &training).total();
            assert!((bytes / 1e9 - gigabytes).abs() < 0.06, "{zero}: {bytes}");
        }
    }
}
