//! A GPT: a decoder-only transformer with pre-norm blocks.

use burn::module::{Initializer, Module};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData, activation};

use super::{SampleDropout, check_sizes, fused};
use crate::{Error, MicroBatch, Mode};

/// Settings of a [`Gpt`]. Weights start as in GPT-2: normal with deviation 0.02, projections into the residual stream
/// smaller by the square root of their number (Radford et al. 2019, section 2.3).
#[derive(Debug, Clone, PartialEq)]
pub struct GptConfig {
    vocabulary: usize,
    context: usize,
    layers: usize,
    width: usize,
    heads: usize,
    dropout: f64,
    tied: bool,
}

impl GptConfig {
    /// A model of `layers` blocks over `width` channels in `heads` heads, for sequences of at most `context` tokens out of
    /// `vocabulary`. Without dropout; with an output layer of its own.
    pub fn new(
        vocabulary: usize,
        context: usize,
        layers: usize,
        width: usize,
        heads: usize,
    ) -> Self {
        Self {
            vocabulary,
            context,
            layers,
            width,
            heads,
            dropout: 0.0,
            tied: false,
        }
    }

    /// Probability of dropping an element of the embedding and of each block's two outputs.
    #[must_use]
    pub fn with_dropout(mut self, probability: f64) -> Self {
        self.dropout = probability;
        self
    }

    /// Whether the output layer uses the token embedding's weights.
    #[must_use]
    pub fn with_tied(mut self, tied: bool) -> Self {
        self.tied = tied;
        self
    }

    /// Makes the model.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a size of zero, a width that the heads do not divide, or a dropout probability outside of 0..1.
    pub fn init(&self, device: &Device) -> Result<Gpt, Error> {
        check_sizes(&[
            ("gpt vocabulary", self.vocabulary),
            ("gpt context", self.context),
            ("gpt layers", self.layers),
            ("gpt width", self.width),
            ("gpt heads", self.heads),
        ])?;
        if !self.width.is_multiple_of(self.heads) {
            return Err(Error::Invalid {
                what: "gpt heads",
                problem: format!(
                    "width {} is not a multiple of {} heads",
                    self.width, self.heads
                ),
            });
        }
        SampleDropout::new(self.dropout, &[])?;
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        let embedding = |rows| {
            EmbeddingConfig::new(rows, self.width)
                .with_initializer(normal.clone())
                .init(device)
        };
        Ok(Gpt {
            tokens: embedding(self.vocabulary),
            positions: embedding(self.context),
            blocks: (0..self.layers)
                .map(|_| Block::new(self, &normal, device))
                .collect(),
            norm: layer_norm(self.width, device),
            head: (!self.tied).then(|| {
                LinearConfig::new(self.width, self.vocabulary)
                    .with_bias(false)
                    .with_initializer(normal.clone())
                    .init(device)
            }),
            dropout: self.dropout,
        })
    }
}

/// Added to variances.
const EPSILON: f32 = 1e-5;

fn layer_norm(width: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(width)
        .with_epsilon(f64::from(EPSILON))
        .init(device)
}

/// Pre-norm block: attention and a feed-forward layer with GELU, each added to the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    norm1: LayerNorm,
    qkv: Linear,
    projection: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    heads: usize,
}

impl Block {
    fn new(config: &GptConfig, normal: &Initializer, device: &Device) -> Self {
        let width = config.width;
        let residual = Initializer::Normal {
            mean: 0.0,
            std: 0.02 / (2.0 * config.layers as f64).sqrt(),
        };
        let linear = |from, to, initializer: &Initializer| {
            LinearConfig::new(from, to)
                .with_initializer(initializer.clone())
                .init(device)
        };
        Self {
            norm1: layer_norm(width, device),
            qkv: linear(width, 3 * width, normal),
            projection: linear(width, width, &residual),
            norm2: layer_norm(width, device),
            up: linear(width, 4 * width, normal),
            down: linear(4 * width, width, &residual),
            heads: config.heads,
        }
    }

    /// `cut` cuts the graph before attention and before the feed-forward layer.
    fn forward(
        &self,
        x: Tensor<3>,
        dropout: &mut SampleDropout<'_>,
        cut: impl Fn(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let x = cut(x);
        let qkv = self
            .qkv
            .forward(fused::layer_norm(&self.norm1, EPSILON, x.clone()));
        let attended = self.projection.forward(fused::attention(qkv, self.heads));
        let x = cut(x + dropout.apply(attended));
        let normed = fused::layer_norm(&self.norm2, EPSILON, x.clone());
        let hidden = fused::gelu(self.up.forward(normed));
        x + dropout.apply(self.down.forward(hidden))
    }
}

/// A decoder-only transformer.
#[derive(Module, Debug)]
pub struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Option<Linear>,
    dropout: f64,
}

impl Gpt {
    /// Logits `[samples, tokens, vocabulary]` for token ids `[samples, tokens]`, where at most `context` tokens are given.
    /// `seeds` holds one seed per sample for dropout, and is empty for none
    /// (see [`MicroBatch::sample_seed`](crate::MicroBatch::sample_seed)).
    ///
    /// # Panics
    ///
    /// If the number of seeds is neither zero nor the number of samples, or if there are more tokens than the context.
    pub fn forward(&self, ids: Tensor<2, Int>, seeds: &[u64]) -> Tensor<3> {
        self.forward_cut(ids, seeds, None)
    }

    /// [`Self::forward`] with the graph cut twice in each block and before the output layer.
    fn forward_cut(
        &self,
        ids: Tensor<2, Int>,
        seeds: &[u64],
        batch: Option<&MicroBatch<'_>>,
    ) -> Tensor<3> {
        let cut = |x: Tensor<3>| match batch {
            Some(batch) => batch.cut(x),
            None => x,
        };
        let [_, tokens] = ids.dims();
        let device = ids.device();
        let mut dropout = SampleDropout::new(self.dropout, seeds).unwrap_or(SampleDropout::off());
        let positions = Tensor::<1, Int>::arange(0..tokens as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(ids) + self.positions.forward(positions);
        let mut x = dropout.apply(x);
        for block in &self.blocks {
            x = block.forward(x, &mut dropout, cut);
        }
        let x = fused::layer_norm(&self.norm, EPSILON, cut(x));
        match &self.head {
            Some(head) => head.forward(x),
            None => x.matmul(self.tokens.weight.val().transpose().unsqueeze()),
        }
    }

    /// Mean cross-entropy in nats per token: `ids` `[samples, tokens]` predict `targets` `[samples, tokens]`.
    ///
    /// # Panics
    ///
    /// As [`Self::forward`].
    pub fn loss(&self, ids: Tensor<2, Int>, targets: Tensor<2, Int>, seeds: &[u64]) -> Tensor<1> {
        Self::cross_entropy(self.forward(ids, seeds), targets)
    }

    fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
        let [samples, tokens, vocabulary] = logits.dims();
        let log_probabilities =
            activation::log_softmax(logits.reshape([samples * tokens, vocabulary]), 1);
        let chosen = log_probabilities.gather(1, targets.reshape([samples * tokens, 1]));
        chosen.mean().neg()
    }

    /// Loss of a micro-batch of windows of a text: sample s is `windows[s]`, one token longer than what the model sees at once; each
    /// token predicts the next. Dropout is on when training, with the samples' seeds, and the graph is
    /// [cut](MicroBatch::cut) twice in each block, so that gradients can be reduced while others are computed.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there are no windows, or they are shorter than two tokens or of unequal length, and
    /// [`Error::LengthMismatch`] if they are longer than the context allows, or if there is not one window per sample.
    pub fn batch_loss(
        &self,
        windows: &[&[u8]],
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, Error> {
        if windows.len() != batch.samples.len() {
            return Err(Error::LengthMismatch {
                what: "text windows (one per sample)".to_owned(),
                got: windows.len(),
                expected: batch.samples.len(),
            });
        }
        let seeds: Vec<u64> = match batch.mode {
            Mode::Train if self.dropout > 0.0 => (0..windows.len())
                .map(|position| batch.sample_seed(position))
                .collect(),
            _ => Vec::new(),
        };
        let [ids, targets] = self.tokens_of(windows, device)?;
        Ok(Self::cross_entropy(
            self.forward_cut(ids, &seeds, Some(batch)),
            targets,
        ))
    }

    /// Inputs and targets, each `[samples, tokens]`.
    fn tokens_of(&self, windows: &[&[u8]], device: &Device) -> Result<[Tensor<2, Int>; 2], Error> {
        let length = windows.first().map_or(0, |window| window.len());
        if length < 2 || windows.iter().any(|window| window.len() != length) {
            return Err(Error::Invalid {
                what: "text windows",
                problem: format!(
                    "got {} windows, the first of {length} tokens; expected at least one, all of the same length of at least 2",
                    windows.len()
                ),
            });
        }
        let [context, _] = self.positions.weight.dims();
        if length - 1 > context {
            return Err(Error::LengthMismatch {
                what: "text window".to_owned(),
                got: length,
                expected: context + 1,
            });
        }
        let tokens = length - 1;
        let tensor = |offset: usize| {
            let ids: Vec<i32> = windows
                .iter()
                .flat_map(|window| &window[offset..offset + tokens])
                .map(|id| i32::from(*id))
                .collect();
            Tensor::<2, Int>::from_data(TensorData::new(ids, [windows.len(), tokens]), device)
        };
        Ok([tensor(0), tensor(1)])
    }
}
