//! Tensor parallelism: layers whose weights are cut over a group of ranks.
//!
//! Every rank of a group computes the same micro-batch with its shard of each weight. Layers come in pairs: the first one of a pair is cut by columns
//! (outputs), the second one by rows (inputs), so that what lies between them needs no communication:
//!
//! ```text
//! Y = act(X A) B,   A = [A_1 .. A_t],   B = [B_1; ..; B_t]   =>   Y = sum_r act(X A_r) B_r
//! ```
//!
//! Two operators make this differentiable (Shoeybi et al. 2019, section 3): **f** is the identity forward and sums gradients backward, **g** sums
//! forward and is the identity backward. With *sequence parallelism* (Korthikanti et al. 2022, section 4.2.2) what
//! lies between the pairs (norms, residual stream) holds only its rank's part of the tokens: f becomes an all-gather (backward a
//! reduce-scatter), g a reduce-scatter (backward an all-gather).
//!
//! Parameters that are not cut are [`Replicated`](crate::ShardSpec::Replicated). Every rank gets their whole gradient, with equal bits, so they stay equal;
//! inside a sequence-parallel region f around the parameter sums the ranks' parts.
//!
//! The modules hold nothing but weights: they are made whole, cut by [`shard_module`](crate::hybrid::shard_module), and told in `forward` which
//! group they belong to by a [`TensorParallel`].

mod attention;
mod deferred;
mod exchange;
mod group;
mod layers;
mod loss;
mod mlp;

pub use attention::{AttentionConfig, ParallelAttention, RotaryEmbedding};
pub use deferred::DeferredGradients;
pub use group::TensorParallel;
pub use layers::{
    ColumnParallelLinear, ParallelLayerNorm, RowParallelLinear, VocabParallelEmbedding,
};
pub use loss::parallel_cross_entropy;
pub use mlp::{Activate, ParallelMlp};

use crate::ShardSpec;

/// Puts the specifications of a part of a module under the name of the part.
///
/// # Examples
///
/// ```
/// use iidp::ShardSpec;
/// use iidp::tensor_parallel::nested;
///
/// let specs = nested("up", vec![("weight".to_owned(), ShardSpec::split(1))]);
/// assert_eq!(specs[0].0, "up.weight");
/// ```
pub fn nested(part: &str, specs: Vec<(String, ShardSpec)>) -> Vec<(String, ShardSpec)> {
    specs
        .into_iter()
        .map(|(path, spec)| (format!("{part}.{path}"), spec))
        .collect()
}
