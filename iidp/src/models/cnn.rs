//! A small convolutional network with batch norm.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::{Device, Int, Tensor, activation};

use super::check_sizes;
use crate::Error;

/// Settings of a [`Cnn`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CnnConfig {
    channels: usize,
    widths: Vec<usize>,
    classes: usize,
}

impl CnnConfig {
    /// Images of `channels` channels, convolution blocks of `widths` output channels, and `classes` classes.
    pub fn new(channels: usize, widths: impl Into<Vec<usize>>, classes: usize) -> Self {
        Self {
            channels,
            widths: widths.into(),
            classes,
        }
    }

    /// Makes the model.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for no block or a size of zero.
    pub fn init(&self, device: &Device) -> Result<Cnn, Error> {
        check_sizes(&[
            ("cnn channels", self.channels),
            ("cnn classes", self.classes),
            ("number of cnn blocks", self.widths.len()),
        ])?;
        check_sizes(
            &self
                .widths
                .iter()
                .map(|width| ("cnn block width", *width))
                .collect::<Vec<_>>(),
        )?;
        let inputs = std::iter::once(self.channels).chain(self.widths.iter().copied());
        let blocks = inputs
            .zip(&self.widths)
            .map(|(from, to)| ConvBlock::new(from, *to, device))
            .collect();
        let last = self.widths[self.widths.len() - 1];
        Ok(Cnn {
            blocks,
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(last, self.classes).init(device),
        })
    }
}

/// 3x3 convolution, batch norm, `ReLU`, 2x2 max pool.
#[derive(Module, Debug)]
pub struct ConvBlock {
    conv: Conv2d,
    norm: BatchNorm,
    pool: MaxPool2d,
}

impl ConvBlock {
    fn new(from: usize, to: usize, device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .with_bias(false)
                .init(device),
            norm: BatchNormConfig::new(to).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.pool
            .forward(activation::relu(self.norm.forward(self.conv.forward(x))))
    }
}

/// Convolution blocks, a global average, and a linear classifier.
///
/// Batch norm is **local to the micro-batch**: it normalises with the statistics of the micro-batch's own samples, and the running
/// statistics of a step are the mean over its micro-batches. Since micro-batches are the same under any layout, so is the model.
#[derive(Module, Debug)]
pub struct Cnn {
    blocks: Vec<ConvBlock>,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl Cnn {
    /// Logits `[samples, classes]` for images `[samples, channels, height, width]`; each block halves height and width.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(self.pool.forward(x).flatten(1, 3))
    }

    /// Mean cross-entropy of images against classes `[samples]`, in nats.
    pub fn loss(&self, x: Tensor<4>, classes: Tensor<1, Int>) -> Tensor<1> {
        let logits = self.forward(x);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, classes)
    }
}
