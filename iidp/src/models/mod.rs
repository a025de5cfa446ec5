//! Models to start from: a character-level or token-level [`Gpt`], an [`Mlp`], and a small convolutional network with batch norm ([`Cnn`]).
//!
//! They are plain Burn modules without a dataset; a [`Workload`](crate::Workload) adds that. Dropout draws its masks from
//! [sample seeds](crate::MicroBatch::sample_seed), so a sample meets the same mask under any layout.

mod cnn;
mod dropout;
mod fused;
mod gpt;
mod kernels;
mod mlp;

pub use cnn::{Cnn, CnnConfig, ConvBlock};
pub use dropout::SampleDropout;
pub use gpt::{Block, Gpt, GptConfig};
pub use mlp::{Mlp, MlpConfig};

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
