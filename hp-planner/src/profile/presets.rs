//! Shapes of public models, for rows that give a name instead of a shape. Numbers are those of the models' published
//! configurations.

use crate::model::{Latent, ModelSpec, Transformer};

/// name part, layers, hidden, heads, kv heads, head width, ffn, vocabulary, experts, per token, expert ffn, shared, dense layers.
type Row = (&'static str, [u32; 12]);

/// The more specific name first.
const MODELS: &[Row] = &[
    (
        "qwen3_30b_a3b",
        [48, 2048, 32, 4, 128, 6144, 151_936, 128, 8, 768, 0, 0],
    ),
    (
        "qwen3_235b_a22b",
        [94, 4096, 64, 4, 128, 12_288, 151_936, 128, 8, 1536, 0, 0],
    ),
    (
        "deepseekv3",
        [61, 7168, 128, 0, 128, 18_432, 129_280, 256, 8, 2048, 1, 3],
    ),
    (
        "deepseekv2",
        [60, 5120, 128, 0, 128, 12_288, 102_400, 160, 6, 1536, 2, 1],
    ),
    (
        "gptoss120b",
        [36, 2880, 64, 8, 64, 2880, 201_088, 128, 4, 2880, 0, 0],
    ),
    (
        "kimik2",
        [61, 7168, 64, 0, 128, 18_432, 163_840, 384, 8, 2048, 1, 1],
    ),
];

/// The shape of a public model whose name contains a known one; `layers` replaces its depth.
pub(crate) fn find(name: &str, layers: Option<u32>) -> Option<ModelSpec> {
    let plain = |text: &str| {
        text.chars()
            .filter(char::is_ascii_alphanumeric)
            .collect::<String>()
            .to_lowercase()
    };
    let wanted = plain(name);
    let (_, row) = MODELS
        .iter()
        .find(|(known, _)| wanted.contains(&plain(known)))?;
    let &[
        depth,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        experts,
        per_token,
        expert_ffn,
        shared,
        dense,
    ] = row;
    // The models of this list with leading dense blocks are those with latent attention, all of the same ranks.
    let latent = dense > 0;
    Some(ModelSpec::transformer(
        name,
        Transformer {
            kv_heads,
            head_dim,
            ffn,
            gated_mlp: true,
            tied_embeddings: false,
            biases: false,
            experts,
            experts_per_token: per_token,
            expert_ffn,
            shared_experts: shared,
            // A cut model keeps its dense blocks in proportion, at least one.
            dense_layers: (dense * layers.unwrap_or(depth)).div_ceil(depth),
            latent: latent.then_some(Latent {
                query_rank: 1536,
                kv_rank: 512,
                rope_dim: 64,
                value_dim: 128,
            }),
            ..Transformer::new(layers.unwrap_or(depth), hidden, heads, vocab)
        },
    ))
}
