//! A multi-layer perceptron.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, activation};

use super::check_sizes;
use crate::Error;

/// Settings of an [`Mlp`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlpConfig {
    sizes: Vec<usize>,
}

impl MlpConfig {
    /// Layer sizes from the input to the output: at least two.
    pub fn new(sizes: impl Into<Vec<usize>>) -> Self {
        Self {
            sizes: sizes.into(),
        }
    }

    /// Makes the model.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for fewer than two sizes or a size of zero.
    pub fn init(&self, device: &Device) -> Result<Mlp, Error> {
        if self.sizes.len() < 2 {
            return Err(Error::Invalid {
                what: "mlp sizes",
                problem: format!(
                    "got {}, expected at least an input and an output size",
                    self.sizes.len()
                ),
            });
        }
        check_sizes(
            &self
                .sizes
                .iter()
                .map(|size| ("mlp layer size", *size))
                .collect::<Vec<_>>(),
        )?;
        let layers = self
            .sizes
            .windows(2)
            .map(|pair| LinearConfig::new(pair[0], pair[1]).init(device))
            .collect();
        Ok(Mlp { layers })
    }
}

/// Linear layers with `ReLU` between them.
#[derive(Module, Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    /// Outputs `[samples, outputs]` for inputs `[samples, inputs]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let last = self.layers.len() - 1;
        self.layers.iter().enumerate().fold(x, |x, (index, layer)| {
            let y = layer.forward(x);
            if index < last { activation::relu(y) } else { y }
        })
    }

    /// Mean cross-entropy of inputs `[samples, inputs]` against classes `[samples]`, in nats.
    pub fn loss(&self, x: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
        let logits = self.forward(x);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, classes)
    }
}
