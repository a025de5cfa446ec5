//! Memory of one device: parameters, gradients, optimizer state (`ZeRO`, Rajbhandari et al. 2020) and activations
//! (Korthikanti et al. 2022, section 4).

use crate::cost::compute::Shard;
use crate::model::{Head, Layer, Transformer};
use crate::plan::MemoryBreakdown;
use crate::training::{Recompute, TrainingSpec};

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
    let q = f64::from(shape.heads * shape.head_dim());
    let kv = f64::from(shape.kv_heads() * shape.head_dim());
    // Inputs of the two norms and of the first products of the two parts, and two dropout masks of a byte.
    let stream = tokens * h * (4.0 * e + 2.0) / split;
    // Query, key, value and the context that enters the projection.
    let heads = tokens * (2.0 * q + 2.0 * kv) * e / shard.tp;
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
        routed * h * 2.0 * e
            + inner(routed, f64::from(shape.expert_ffn()))
            + inner(tokens, f64::from(shape.shared_experts * shape.expert_ffn()))
    } else {
        inner(tokens, f64::from(shape.ffn()))
    };
    stream + heads + scores + mlp
}

/// Bytes that the part after the last block keeps for one micro-batch: logits in 32 bits and in the precision's format.
pub fn head_activations(shape: &Transformer, shard: &Shard) -> f64 {
    let rows = match shape.head {
        Head::Language => shard.tokens(),
        Head::Classifier => shard.samples,
    };
    rows * f64::from(shape.vocab) / shard.tp * (4.0 + shard.element)
        + shard.tokens() * f64::from(shape.hidden) * 2.0 * shard.element
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
    fn zero_shards_sixteen_bytes_per_parameter() {
        // Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 ranks need 120, 31.4, 16.6 and 1.9 GB.
        let training = TrainingSpec::new(1, 1);
        for (zero, gigabytes) in [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)] {
            let bytes = model_state(7.5e9, zero, 64.0, 1.0, &training).total();
            assert!((bytes / 1e9 - gigabytes).abs() < 0.06, "{zero}: {bytes}");
        }
    }
}
