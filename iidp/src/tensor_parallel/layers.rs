//! Linear layers, embedding and norm.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Int, Tensor};

use super::TensorParallel;
use super::deferred::linear_deferred;
use crate::ShardSpec;

/// A linear layer whose outputs are cut over the ranks: `y_r = x W_r + b_r`.
///
/// Its input has passed [`TensorParallel::enter`] (once for all column-parallel layers that share it), its output stays on the rank.
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    /// `[inputs, outputs]`, cut by columns.
    pub weight: Param<Tensor<2>>,
    /// `[outputs]`, cut.
    pub bias: Option<Param<Tensor<1>>>,
}

impl ColumnParallelLinear {
    /// The whole layer, with weights from `initializer` and a bias of zero.
    pub fn new(
        inputs: usize,
        outputs: usize,
        bias: bool,
        initializer: &Initializer,
        device: &Device,
    ) -> Self {
        Self {
            weight: weight(inputs, outputs, initializer, device),
            bias: bias.then(|| Initializer::Zeros.init([outputs], device)),
        }
    }

    /// `[.., outputs / t]` for `[.., inputs]`. Does not communicate.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, group: &TensorParallel) -> Tensor<D> {
        linear(x, &self.weight, self.bias.as_ref(), group)
    }

    /// How the parameters are cut.
    pub fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        vec![
            ("weight".to_owned(), ShardSpec::split(1)),
            ("bias".to_owned(), ShardSpec::split(0)),
        ]
    }
}

/// A linear layer whose inputs are cut over the ranks: `y = sum_r x_r W_r + b`.
///
/// Its input is the output of layers cut by columns.
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    /// `[inputs, outputs]`, cut by rows.
    pub weight: Param<Tensor<2>>,
    /// `[outputs]`, replicated and added once.
    pub bias: Option<Param<Tensor<1>>>,
}

impl RowParallelLinear {
    /// The whole layer, with weights from `initializer` and a bias of zero.
    pub fn new(
        inputs: usize,
        outputs: usize,
        bias: bool,
        initializer: &Initializer,
        device: &Device,
    ) -> Self {
        Self {
            weight: weight(inputs, outputs, initializer, device),
            bias: bias.then(|| Initializer::Zeros.init([outputs], device)),
        }
    }

    /// `[samples, tokens, outputs]` (in a sequence-parallel group this rank's tokens) for `[samples, tokens, inputs / t]`.
    pub fn forward(&self, x: Tensor<3>, group: &TensorParallel) -> Tensor<3> {
        let sum = group.leave(linear(x, &self.weight, None, group));
        match &self.bias {
            Some(bias) => sum + group.between(bias.val()).unsqueeze::<3>(),
            None => sum,
        }
    }

    /// `[samples, outputs]` for `[samples, inputs / t]`; there are no tokens to divide.
    pub fn forward_flat(&self, x: Tensor<2>, group: &TensorParallel) -> Tensor<2> {
        let sum = group.reduce(linear(x, &self.weight, None, group));
        match &self.bias {
            Some(bias) => sum + bias.val().unsqueeze::<2>(),
            None => sum,
        }
    }

    /// How the parameters are cut.
    pub fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        vec![("weight".to_owned(), ShardSpec::split(0))]
    }
}

/// An embedding whose vocabulary is cut over the ranks: each looks up the tokens it holds, the sum is the embedding.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// `[vocabulary, width]`, cut by vocabulary.
    pub weight: Param<Tensor<2>>,
}

impl VocabParallelEmbedding {
    /// The whole embedding.
    pub fn new(
        vocabulary: usize,
        width: usize,
        initializer: &Initializer,
        device: &Device,
    ) -> Self {
        Self {
            weight: weight(vocabulary, width, initializer, device),
        }
    }

    /// `[samples, tokens, width]` (in a sequence-parallel group this rank's tokens) for ids `[samples, tokens]`.
    pub fn forward(&self, ids: Tensor<2, Int>, group: &TensorParallel) -> Tensor<3> {
        let weight = self.weight.val();
        if group.size() == 1 {
            return burn::tensor::module::embedding(weight, ids);
        }
        let (ids, held) = local_ids(ids, weight.dims()[0], group);
        let rows = burn::tensor::module::embedding(weight, ids);
        group.leave(rows * held.unsqueeze_dim::<3>(2))
    }

    /// How the parameters are cut.
    pub fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        vec![("weight".to_owned(), ShardSpec::split(0))]
    }
}

/// Ids counted from the first one that the rank holds, of which there are `held`; and 1 where it does hold the id, else 0 beside an id of 0.
pub(super) fn local_ids<const D: usize>(
    ids: Tensor<D, Int>,
    held: usize,
    group: &TensorParallel,
) -> (Tensor<D, Int>, Tensor<D>) {
    let first = (group.rank() * held) as i64;
    let ids = ids.sub_scalar(first);
    let outside = ids
        .clone()
        .lower_elem(0)
        .bool_or(ids.clone().greater_equal_elem(held as i64));
    let here = outside.clone().bool_not().float();
    (ids.mask_fill(outside, 0), here)
}

/// Layer norm over the last dimension, with replicated parameters. Between the pairs of cut layers, on the rank's tokens if the group is sequence-parallel.
///
/// Source: Ba et al. 2016, equation 4.
#[derive(Module, Debug)]
pub struct ParallelLayerNorm {
    /// `[width]`.
    pub gamma: Param<Tensor<1>>,
    /// `[width]`.
    pub beta: Param<Tensor<1>>,
    epsilon: f64,
}

impl ParallelLayerNorm {
    /// Scale 1, offset 0, 1e-5 added to the variance.
    pub fn new(width: usize, device: &Device) -> Self {
        Self {
            gamma: Initializer::Ones.init([width], device),
            beta: Initializer::Zeros.init([width], device),
            epsilon: 1e-5,
        }
    }

    /// `[samples, tokens, width]` for the same.
    pub fn forward(&self, x: Tensor<3>, group: &TensorParallel) -> Tensor<3> {
        let gamma = group.between(self.gamma.val());
        let beta = group.between(self.beta.val());
        burn::tensor::module::layer_norm(x, gamma, Some(beta), self.epsilon)
    }
}

fn linear<const D: usize>(
    x: Tensor<D>,
    weight: &Param<Tensor<2>>,
    bias: Option<&Param<Tensor<1>>>,
    group: &TensorParallel,
) -> Tensor<D> {
    let bias = bias.map(Param::val);
    match group.deferred() {
        None => burn::tensor::module::linear(x, weight.val(), bias),
        Some(gradients) => {
            let product = linear_deferred(x, weight, gradients);
            match bias {
                Some(bias) => product + bias.unsqueeze::<D>(),
                None => product,
            }
        }
    }
}

fn weight(
    inputs: usize,
    outputs: usize,
    initializer: &Initializer,
    device: &Device,
) -> Param<Tensor<2>> {
    initializer.init_with([inputs, outputs], Some(inputs), Some(outputs), device)
}
