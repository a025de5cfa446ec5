//! Cross-entropy of logits that are cut by vocabulary.

use burn::tensor::{Int, Tensor};

use super::TensorParallel;
use super::layers::local_ids;

/// Mean cross-entropy, in nats, of `logits` `[n, vocabulary / t]`, of which each rank holds its part of the vocabulary, against classes `[n]`. All ranks
/// get the same bits.
///
/// The logits are never gathered: the ranks exchange one maximum, one sum of exponentials and one logit per row, `3 n` numbers instead of
/// `n x vocabulary`. With `m = max_j z_j`, `loss = log(sum_j exp(z_j - m)) - (z_target - m)`.
///
/// Source: Shoeybi et al. 2019, section 3.
pub fn parallel_cross_entropy(
    logits: Tensor<2>,
    classes: Tensor<1, Int>,
    group: &TensorParallel,
) -> Tensor<1> {
    let [rows, held] = logits.dims();
    let max = group.max(logits.clone().detach().max_dim(1));
    let shifted = logits - max;
    let sum = shifted.clone().exp().sum_dim(1);
    let (classes, here) = local_ids(classes.reshape([rows, 1]), held, group);
    let target = shifted.gather(1, classes) * here;
    let both = group.reduce(Tensor::cat(vec![sum, target], 1));
    let (sum, target) = (both.clone().narrow(1, 0, 1), both.narrow(1, 1, 1));
    (sum.log() - target).mean()
}
