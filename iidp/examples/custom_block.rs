//! A block of your own between those of the library: a model for the hybrid executor made of an enum of blocks.
//!
//! ```text
//! cargo run --release -p iidp --example custom_block
//! ```

#![allow(clippy::print_stdout, reason = "an example")]

use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData, activation};
use iidp::hybrid::{BlockModel, HybridWorkload};
use iidp::pipeline::{Activation, StageContext, StageModule};
use iidp::tensor_parallel::{ColumnParallelLinear, RowParallelLinear, nested};
use iidp::{BoxError, Error, HybridConfig, MicroBatch, ParallelDims, ShardSpec, WorkerLayout};

/// A gated residual block, `x + (sigmoid(x G) * tanh(x U)) D`. `G` and `U` are cut by columns, `D` by rows: the product in the middle needs no communication.
#[derive(Module, Debug)]
struct Gated {
    gate: ColumnParallelLinear,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl StageModule for Gated {
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        let group = context.group;
        let x = x.into_tensor::<2>()?;
        let entered = group.copy(x.clone());
        let gate = activation::sigmoid(self.gate.forward(entered.clone(), group));
        let hidden = gate * self.up.forward(entered, group).tanh();
        Ok(Activation::new(x + self.down.forward_flat(hidden, group)))
    }

    /// Parameters that are not named are replicated.
    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        let mut specs = nested("gate", self.gate.shard_specs());
        specs.extend(nested("up", self.up.shard_specs()));
        specs.extend(nested("down", self.down.shard_specs()));
        specs
    }
}

/// The kinds of blocks of the model.
#[allow(
    clippy::large_enum_variant,
    reason = "a model has few blocks, and modules cannot be boxed"
)]
#[derive(Module, Debug)]
enum Block {
    Linear(Linear),
    Gated(Gated),
}

impl StageModule for Block {
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        match self {
            Self::Linear(linear) => Ok(Activation::new(linear.forward(x.into_tensor::<2>()?))),
            Self::Gated(block) => block.forward(x, context),
        }
    }

    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        match self {
            Self::Linear(_) => Vec::new(),
            Self::Gated(block) => block.shard_specs(),
        }
    }
}

/// A linear layer, `layers` gated blocks, a linear layer.
struct GatedNet {
    layers: usize,
    width: usize,
}

impl BlockModel for GatedNet {
    type Block = Block;

    fn blocks(&self) -> usize {
        self.layers + 2
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<Block, BoxError> {
        let width = self.width;
        let linear = |from, to| Block::Linear(LinearConfig::new(from, to).init(device));
        if index == 0 {
            return Ok(linear(2, width));
        }
        if index > self.layers {
            return Ok(linear(width, 1));
        }
        let initializer = Initializer::XavierNormal { gain: 1.0 };
        let column = || ColumnParallelLinear::new(width, 2 * width, true, &initializer, device);
        Ok(Block::Gated(Gated {
            gate: column(),
            up: column(),
            down: RowParallelLinear::new(2 * width, width, true, &initializer, device),
        }))
    }
}

/// Learns `sin(3 x) y` on points that are computed from their ids.
struct Surface(GatedNet);

impl Surface {
    fn points(batch: &MicroBatch<'_>) -> Vec<[f32; 2]> {
        let coordinate = |id: u64, step: u64| (id * step % 1000) as f32 / 500.0 - 1.0;
        batch
            .samples
            .iter()
            .map(|id| [coordinate(*id, 617), coordinate(*id, 271)])
            .collect()
    }
}

impl HybridWorkload for Surface {
    type Model = GatedNet;

    fn model(&self) -> &GatedNet {
        &self.0
    }

    fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError> {
        let points = Self::points(batch);
        let data = TensorData::new(points.concat(), [points.len(), 2]);
        Ok(Activation::new(Tensor::<2>::from_data(data, device)))
    }

    fn loss(&self, output: Activation, context: &StageContext<'_>) -> Result<Tensor<1>, BoxError> {
        let device = output.device();
        let heights: Vec<f32> = Self::points(&context.batch)
            .iter()
            .map(|[x, y]| (3.0 * x).sin() * y)
            .collect();
        let data = TensorData::new(heights, [context.batch.samples.len(), 1]);
        let error = output.into_tensor::<2>()? - Tensor::from_data(data, &device);
        Ok(error.square().mean())
    }
}

fn main() -> Result<(), Error> {
    for (dp, tp, pp) in [(1, 1, 1), (1, 2, 2), (2, 1, 3)] {
        let net = GatedNet {
            layers: 4,
            width: 16,
        };
        let layouts = vec![WorkerLayout::new(16, 1, 4 / dp); dp];
        let mut executor = HybridConfig::new(ParallelDims::new(dp, tp, pp), layouts)
            .with_seed(3)
            .init(Surface(net))?;
        let mut losses = Vec::new();
        for step in 0..200 {
            let ids: Vec<u64> = (0..64).map(|i| step * 64 + i).collect();
            losses.push(executor.step(&ids, 5e-3)?.loss);
        }
        println!(
            "dp {dp} x tp {tp} x pp {pp}: mean squared error {:.4} at first, {:.6} after 200 steps",
            losses[0], losses[199]
        );
    }
    Ok(())
}
