//! A residual multi-layer perceptron as a list of blocks.

use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation};

use super::check_sizes;
use crate::hybrid::BlockModel;
use crate::pipeline::{Activation, StageContext, StageModule};
use crate::shard::check_divides;
use crate::tensor_parallel::{ColumnParallelLinear, RowParallelLinear, TensorParallel, nested};
use crate::{BoxError, Error, ParallelDims, ShardSpec};

/// Settings of a perceptron in blocks: a layer that reads `inputs` numbers, `layers` residual pairs `x + relu(x U) D` with twice the width between them, and a
/// layer that gives `outputs` numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockMlpConfig {
    inputs: usize,
    width: usize,
    layers: usize,
    outputs: usize,
}

impl BlockMlpConfig {
    /// A perceptron of `layers + 2` blocks.
    pub const fn new(inputs: usize, width: usize, layers: usize, outputs: usize) -> Self {
        Self {
            inputs,
            width,
            layers,
            outputs,
        }
    }
}

impl BlockModel for BlockMlpConfig {
    type Block = BlockMlp;

    fn blocks(&self) -> usize {
        self.layers + 2
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<BlockMlp, BoxError> {
        let width = self.width;
        Ok(if index == 0 {
            BlockMlp::Input(LinearConfig::new(self.inputs, width).init(device))
        } else if index <= self.layers {
            let he = Initializer::KaimingNormal {
                gain: 1.0,
                fan_out_only: false,
            };
            BlockMlp::Pair(ResidualPair {
                up: ColumnParallelLinear::new(width, 2 * width, true, &he, device),
                down: RowParallelLinear::new(2 * width, width, true, &he, device),
            })
        } else {
            BlockMlp::Output(LinearConfig::new(width, self.outputs).init(device))
        })
    }

    fn check(&self, dims: ParallelDims) -> Result<(), Error> {
        check_sizes(&[
            ("mlp inputs", self.inputs),
            ("mlp width", self.width),
            ("mlp outputs", self.outputs),
        ])?;
        check_divides("hidden width", 2 * self.width, "tp", dims.tp)
    }
}

/// A block of the perceptron.
#[allow(
    clippy::large_enum_variant,
    reason = "a model has few blocks, and modules cannot be boxed"
)]
#[derive(Module, Debug)]
pub enum BlockMlp {
    /// The first one, `relu(x W + b)`.
    Input(Linear),
    /// A residual pair.
    Pair(ResidualPair),
    /// The last one.
    Output(Linear),
}

impl StageModule for BlockMlp {
    /// `[samples, outputs]` for `[samples, inputs]`.
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        let x = x.into_tensor::<2>()?;
        Ok(Activation::new(match self {
            Self::Input(linear) => activation::relu(linear.forward(x)),
            Self::Pair(pair) => pair.forward(x, context.group),
            Self::Output(linear) => linear.forward(x),
        }))
    }

    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        match self {
            Self::Pair(pair) => {
                let mut specs = nested("up", pair.up.shard_specs());
                specs.extend(nested("down", pair.down.shard_specs()));
                specs
            }
            Self::Input(_) | Self::Output(_) => Vec::new(),
        }
    }
}

/// `x + relu(x U + a) D + b`.
#[derive(Module, Debug)]
pub struct ResidualPair {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl ResidualPair {
    fn forward(&self, x: Tensor<2>, group: &TensorParallel) -> Tensor<2> {
        let hidden = activation::relu(self.up.forward(group.copy(x.clone()), group));
        x + self.down.forward_flat(hidden, group)
    }
}
