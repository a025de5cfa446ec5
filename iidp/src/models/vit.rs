//! A small vision transformer as a list of blocks.

use burn::module::{Initializer, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::{TransformerLayer, check_sizes};
use crate::hybrid::BlockModel;
use crate::pipeline::{Activation, StageContext, StageModule};
use crate::shard::check_divides;
use crate::tensor_parallel::{
    Activate, AttentionConfig, ParallelLayerNorm, ParallelMlp, TensorParallel,
};
use crate::{BoxError, Error, ParallelDims, ShardSpec};

/// Settings of a small vision transformer: patches become tokens, pass `layers` transformer layers in which each sees all others, and their mean is classified.
///
/// Source: Dosovitskiy et al. 2021; the mean over the tokens takes the place of the class token (their appendix D.3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VitConfig {
    channels: usize,
    side: usize,
    patch: usize,
    layers: usize,
    width: usize,
    heads: usize,
    classes: usize,
}

impl VitConfig {
    /// For square images of `side` x `side` pixels and `channels` channels in patches of `patch` x `patch`; `layers` layers over `width` channels in `heads` heads;
    /// `classes` classes.
    pub const fn new(
        [channels, side, patch]: [usize; 3],
        [layers, width, heads]: [usize; 3],
        classes: usize,
    ) -> Self {
        Self {
            channels,
            side,
            patch,
            layers,
            width,
            heads,
            classes,
        }
    }

    fn attention(&self) -> AttentionConfig {
        AttentionConfig {
            causal: false,
            ..AttentionConfig::new(self.width, self.heads)
        }
    }
}

impl BlockModel for VitConfig {
    type Block = VitBlock;

    fn blocks(&self) -> usize {
        self.layers + 2
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<VitBlock, BoxError> {
        Ok(if index == 0 {
            let tokens = (self.side / self.patch).pow(2);
            let pixels = self.channels * self.patch * self.patch;
            let normal = Initializer::Normal {
                mean: 0.0,
                std: 0.02,
            };
            VitBlock::Patches(PatchEmbedding {
                projection: LinearConfig::new(pixels, self.width).init(device),
                positions: normal.init([tokens, self.width], device),
                patch: self.patch,
            })
        } else if index <= self.layers {
            VitBlock::Layer(TransformerLayer::new(
                &self.attention(),
                4 * self.width,
                Activate::Gelu,
                self.layers,
                device,
            )?)
        } else {
            VitBlock::Head(VitHead {
                norm: ParallelLayerNorm::new(self.width, device),
                linear: LinearConfig::new(self.width, self.classes).init(device),
            })
        })
    }

    fn check(&self, dims: ParallelDims) -> Result<(), Error> {
        check_sizes(&[
            ("vit channels", self.channels),
            ("vit image side", self.side),
            ("vit patch", self.patch),
            ("vit layers", self.layers),
            ("vit width", self.width),
            ("vit heads", self.heads),
            ("vit classes", self.classes),
        ])?;
        check_divides("image side", self.side, "patch", self.patch)?;
        self.attention().check(dims.tp)?;
        ParallelMlp::check(4 * self.width, dims.tp)
    }
}

/// A block of the transformer.
#[allow(
    clippy::large_enum_variant,
    reason = "a model has few blocks, and modules cannot be boxed"
)]
#[derive(Module, Debug)]
pub enum VitBlock {
    /// The first one: images to tokens.
    Patches(PatchEmbedding),
    /// Attention and feed-forward.
    Layer(TransformerLayer),
    /// The last one: tokens to logits.
    Head(VitHead),
}

impl StageModule for VitBlock {
    /// Images `[samples, channels, side, side]` to logits `[samples, classes]`.
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        let group = context.group;
        Ok(match self {
            Self::Patches(block) => Activation::new(block.forward(x.into_tensor()?, group)?),
            Self::Layer(block) => Activation::new(block.forward(x.into_tensor()?, group)),
            Self::Head(block) => Activation::new(block.forward(x.into_tensor()?, group)),
        })
    }

    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        match self {
            Self::Layer(block) => block.shard_specs(),
            Self::Patches(_) | Self::Head(_) => Vec::new(),
        }
    }
}

/// A linear map of each patch, and a learned vector per position.
#[derive(Module, Debug)]
pub struct PatchEmbedding {
    projection: Linear,
    positions: Param<Tensor<2>>,
    patch: usize,
}

impl PatchEmbedding {
    /// `[samples, tokens, width]` for `[samples, channels, side, side]`.
    fn forward(&self, x: Tensor<4>, group: &TensorParallel) -> Result<Tensor<3>, Error> {
        let [samples, channels, height, width] = x.dims();
        let (rows, columns) = (height / self.patch, width / self.patch);
        let tokens = rows * columns;
        if tokens != self.positions.val().dims()[0] {
            return Err(Error::LengthMismatch {
                what: "patches of an image".to_owned(),
                got: tokens,
                expected: self.positions.val().dims()[0],
            });
        }
        group.check_tokens(tokens)?;
        let patches = x
            .reshape([samples, channels, rows, self.patch, columns, self.patch])
            .permute([0, 2, 4, 1, 3, 5])
            .reshape([samples, tokens, channels * self.patch * self.patch]);
        let x = self.projection.forward(patches) + self.positions.val().unsqueeze::<3>();
        Ok(if group.is_sequence_parallel() {
            group.split_tokens(x)
        } else {
            x
        })
    }
}

/// Norm, mean over the tokens, linear layer.
#[derive(Module, Debug)]
pub struct VitHead {
    norm: ParallelLayerNorm,
    linear: Linear,
}

impl VitHead {
    /// `[samples, classes]` for `[samples, tokens, width]`.
    fn forward(&self, x: Tensor<3>, group: &TensorParallel) -> Tensor<2> {
        let x = self.norm.forward(x, group);
        let x = if group.is_sequence_parallel() {
            group.collect_tokens(x)
        } else {
            x
        };
        self.linear.forward(x.mean_dim(1).flatten(1, 2))
    }
}
