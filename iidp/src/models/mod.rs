//! Models to start from: a character-level or token-level [`Gpt`], an [`Mlp`], and a small convolutional network with batch norm ([`Cnn`]).
//!
//! They are plain Burn modules without a dataset; a [`Workload`](crate::Workload) adds that. Dropout draws its masks from
//! [sample seeds](crate::MicroBatch::sample_seed), so a sample meets the same mask under any layout.
//!
//! Models in **blocks** can also be cut over stages and tensor-parallel ranks, for the [hybrid executor](crate::hybrid): GPT ([`BlockGptConfig`]), residual
//! perceptron ([`BlockMlpConfig`]), small residual network ([`ResNetConfig`]), small vision transformer ([`VitConfig`]). Each is a
//! [`BlockModel`](crate::hybrid::BlockModel): a list of blocks that name how their parameters are cut. [`init_whole`](crate::hybrid::init_whole) makes one module of them.

mod block_gpt;
mod block_mlp;
mod cnn;
mod dropout;
mod fused;
mod gpt;
mod kernels;
mod mlp;
mod resnet;
mod vit;

pub use block_gpt::{BlockGptConfig, GptBlock, GptEmbedding, GptHead, Positions, TransformerLayer};
pub use block_mlp::{BlockMlp, BlockMlpConfig, ResidualPair};
pub use cnn::{Cnn, CnnConfig, ConvBlock};
pub use dropout::SampleDropout;
pub use gpt::{Block, Gpt, GptConfig};
pub use mlp::{Mlp, MlpConfig};
pub use resnet::{Convolution, GroupedNorm, ResNetBlock, ResNetConfig, ResidualBlock, Stem};
pub use vit::{PatchEmbedding, VitBlock, VitConfig, VitHead};

use crate::Error;

/// Refuses settings of zero.
fn check_sizes(sizes: &[(&'static str, usize)]) -> Result<(), Error> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((what, _)) => Err(Error::Invalid {
            what,
            problem: "got 0, expected at least 1".to_owned(),
        }),
    }
}
