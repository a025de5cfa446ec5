//! A small residual network as a list of blocks.

use burn::module::{Initializer, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor, activation};

use super::check_sizes;
use crate::hybrid::BlockModel;
use crate::pipeline::{Activation, StageContext, StageModule};
use crate::shard::check_divides;
use crate::tensor_parallel::{TensorParallel, nested};
use crate::{BoxError, Error, ParallelDims, ShardSpec};

/// Settings of a small residual network: a 3x3 convolution, residual blocks of two 3x3 convolutions, a global average and a linear layer.
///
/// Source: He et al. 2016, section 4.2 (basic blocks). Norms are over groups of channels of one sample (Wu and He 2018) instead of over the batch, so that a
/// sample's result depends neither on the micro-batch that it is in nor on whether a pass is computed again. Between the two convolutions of a block the channels are cut over tensor-parallel
/// ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResNetConfig {
    channels: usize,
    widths: Vec<usize>,
    per_group: usize,
    classes: usize,
}

impl ResNetConfig {
    /// Images of `channels` channels, one residual block per entry of `widths` with that many channels, and `classes` classes. A block whose width differs
    /// from the one before halves height and width. Four channels make a group of a norm.
    pub fn new(channels: usize, widths: impl Into<Vec<usize>>, classes: usize) -> Self {
        Self {
            channels,
            widths: widths.into(),
            per_group: 4,
            classes,
        }
    }

    /// Channels in a group of a norm; they divide every width.
    #[must_use]
    pub const fn with_channels_per_group(mut self, per_group: usize) -> Self {
        self.per_group = per_group;
        self
    }
}

impl BlockModel for ResNetConfig {
    type Block = ResNetBlock;

    fn blocks(&self) -> usize {
        self.widths.len() + 2
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<ResNetBlock, BoxError> {
        let norm = |width| GroupedNorm::new(width, self.per_group, device);
        Ok(if index == 0 {
            let width = self.widths[0];
            ResNetBlock::Stem(Stem {
                conv: Convolution::new(self.channels, width, 3, 1, device),
                norm: norm(width),
            })
        } else if index <= self.widths.len() {
            let to = self.widths[index - 1];
            let from = self.widths[index.saturating_sub(2)];
            let stride = if from == to { 1 } else { 2 };
            ResNetBlock::Residual(ResidualBlock {
                conv1: Convolution::new(from, to, 3, stride, device),
                norm1: norm(to),
                conv2: Convolution::new(to, to, 3, 1, device),
                norm2: norm(to),
                skip: (from != to).then(|| Convolution::new(from, to, 1, stride, device)),
            })
        } else {
            let width = self.widths[self.widths.len() - 1];
            ResNetBlock::Head(LinearConfig::new(width, self.classes).init(device))
        })
    }

    fn check(&self, dims: ParallelDims) -> Result<(), Error> {
        check_sizes(&[
            ("resnet channels", self.channels),
            ("resnet classes", self.classes),
            ("resnet channels per group", self.per_group),
            ("number of residual blocks", self.widths.len()),
        ])?;
        for width in &self.widths {
            check_sizes(&[("resnet width", *width)])?;
            check_divides("resnet width", *width, "channels per group", self.per_group)?;
            check_divides("groups of channels", width / self.per_group, "tp", dims.tp)?;
        }
        Ok(())
    }
}

/// A block of the network.
#[allow(
    clippy::large_enum_variant,
    reason = "a model has few blocks, and modules cannot be boxed"
)]
#[derive(Module, Debug)]
pub enum ResNetBlock {
    /// The first convolution.
    Stem(Stem),
    /// Two convolutions and a way around them.
    Residual(ResidualBlock),
    /// Global average and linear layer.
    Head(Linear),
}

impl StageModule for ResNetBlock {
    /// Images `[samples, channels, height, width]` to logits `[samples, classes]`.
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        let x = x.into_tensor::<4>()?;
        Ok(match self {
            Self::Stem(stem) => {
                Activation::new(activation::relu(stem.norm.forward(stem.conv.forward(x))))
            }
            Self::Residual(block) => Activation::new(block.forward(x, context.group)),
            Self::Head(linear) => {
                let pooled: Tensor<2> = x.flatten::<3>(2, 3).mean_dim(2).flatten(1, 2);
                Activation::new(linear.forward(pooled))
            }
        })
    }

    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        match self {
            Self::Residual(_) => {
                let mut specs = nested("conv1", vec![("weight".to_owned(), ShardSpec::split(0))]);
                specs.push(("conv2.weight".to_owned(), ShardSpec::split(1)));
                specs.push(("norm1.gamma".to_owned(), ShardSpec::split(0)));
                specs.push(("norm1.beta".to_owned(), ShardSpec::split(0)));
                specs
            }
            Self::Stem(_) | Self::Head(_) => Vec::new(),
        }
    }
}

/// Convolution and norm at the input.
#[derive(Module, Debug)]
pub struct Stem {
    conv: Convolution,
    norm: GroupedNorm,
}

/// Two convolutions and a way around them.
#[derive(Module, Debug)]
pub struct ResidualBlock {
    /// Output channels are cut.
    conv1: Convolution,
    norm1: GroupedNorm,
    /// Input channels are cut.
    conv2: Convolution,
    norm2: GroupedNorm,
    skip: Option<Convolution>,
}

impl ResidualBlock {
    fn forward(&self, x: Tensor<4>, group: &TensorParallel) -> Tensor<4> {
        let hidden = self.conv1.forward(group.copy(x.clone()));
        let hidden = activation::relu(self.norm1.forward(hidden));
        let y = self.norm2.forward(group.reduce(self.conv2.forward(hidden)));
        let around = match &self.skip {
            Some(conv) => conv.forward(x),
            None => x,
        };
        activation::relu(y + around)
    }
}

/// A square convolution without bias that keeps the size, but for its stride.
#[derive(Module, Debug)]
pub struct Convolution {
    /// `[outputs, inputs, size, size]`.
    weight: Param<Tensor<4>>,
    stride: usize,
}

impl Convolution {
    fn new(from: usize, to: usize, size: usize, stride: usize, device: &Device) -> Self {
        let he = Initializer::KaimingNormal {
            gain: std::f64::consts::SQRT_2,
            fan_out_only: false,
        };
        Self {
            weight: he.init_with(
                [to, from, size, size],
                Some(from * size * size),
                Some(to * size * size),
                device,
            ),
            stride,
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let weight = self.weight.val();
        let padding = weight.dims()[2] / 2;
        let options = ConvOptions::new([self.stride; 2], [padding; 2], [1, 1], 1);
        conv2d(x, weight, None, options)
    }
}

/// Norm over the groups of channels of each sample.
#[derive(Module, Debug)]
pub struct GroupedNorm {
    /// `[channels]`.
    gamma: Param<Tensor<1>>,
    /// `[channels]`.
    beta: Param<Tensor<1>>,
    per_group: usize,
}

impl GroupedNorm {
    fn new(channels: usize, per_group: usize, device: &Device) -> Self {
        Self {
            gamma: Initializer::Ones.init([channels], device),
            beta: Initializer::Zeros.init([channels], device),
            per_group,
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let [samples, channels, height, width] = x.dims();
        let grouped = x.reshape([
            samples,
            channels / self.per_group,
            self.per_group * height * width,
        ]);
        let centred = grouped.clone() - grouped.mean_dim(2);
        let variance = centred.clone().square().mean_dim(2);
        let normal =
            (centred / (variance + 1e-5).sqrt()).reshape([samples, channels, height, width]);
        let shape = [1, channels, 1, 1];
        normal * self.gamma.val().reshape(shape) + self.beta.val().reshape(shape)
    }
}
