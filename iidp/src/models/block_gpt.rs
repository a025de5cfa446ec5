//! A GPT as a list of blocks that can be cut over stages and tensor-parallel ranks.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Int, Tensor};

use super::check_sizes;
use crate::hybrid::{BlockModel, Tie};
use crate::pipeline::{Activation, StageContext, StageModule};
use crate::shard::check_divides;
use crate::tensor_parallel::{
    Activate, AttentionConfig, ParallelAttention, ParallelLayerNorm, ParallelMlp, TensorParallel,
    VocabParallelEmbedding, nested, parallel_cross_entropy,
};
use crate::{BoxError, Error, ParallelDims, ShardSpec};

/// How a model learns where a token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum Positions {
    /// A learned vector per position is added to the embedding.
    #[default]
    Learned,
    /// Queries and keys are [rotated](crate::tensor_parallel::RotaryEmbedding).
    Rotary,
}

/// Settings of a GPT in blocks: embedding, `layers` pre-norm transformer layers, head. Weights start as those of the [`Gpt`](super::Gpt).
///
/// # Examples
///
/// ```
/// use iidp::hybrid::BlockModel;
/// use iidp::models::{BlockGptConfig, Positions};
/// use iidp::tensor_parallel::Activate;
/// use iidp::ParallelDims;
///
/// let model = BlockGptConfig::new(96, 64, 4, 48, 6)
///     .with_kv_heads(3)
///     .with_activation(Activate::SwiGlu)
///     .with_positions(Positions::Rotary)
///     .with_tied(true);
/// assert_eq!(model.blocks(), 6);
/// model.check(ParallelDims::new(1, 3, 2))?;
/// // Two ranks cannot share three heads of keys and values.
/// assert!(model.check(ParallelDims::new(1, 2, 2)).is_err());
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct BlockGptConfig {
    vocabulary: usize,
    context: usize,
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    activation: Activate,
    positions: Positions,
    tied: bool,
}

impl BlockGptConfig {
    /// A model of `layers` layers over `width` channels in `heads` heads, for sequences of at most `context` tokens out of `vocabulary`. As many heads of keys and
    /// values as of queries, four times the width between the linear layers, GELU, learned positions, an output layer of its own.
    pub const fn new(
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
            kv_heads: heads,
            hidden: 4 * width,
            activation: Activate::Gelu,
            positions: Positions::Learned,
            tied: false,
        }
    }

    /// Heads of keys and values.
    #[must_use]
    pub const fn with_kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = kv_heads;
        self
    }

    /// Channels between the two linear layers.
    #[must_use]
    pub const fn with_hidden(mut self, hidden: usize) -> Self {
        self.hidden = hidden;
        self
    }

    /// What lies between the two linear layers.
    #[must_use]
    pub const fn with_activation(mut self, activation: Activate) -> Self {
        self.activation = activation;
        self
    }

    /// How positions are told.
    #[must_use]
    pub const fn with_positions(mut self, positions: Positions) -> Self {
        self.positions = positions;
        self
    }

    /// Whether the output layer uses the token embedding's weights.
    #[must_use]
    pub const fn with_tied(mut self, tied: bool) -> Self {
        self.tied = tied;
        self
    }

    /// Tokens that the model knows.
    pub const fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn attention(&self) -> AttentionConfig {
        AttentionConfig {
            width: self.width,
            heads: self.heads,
            kv_heads: self.kv_heads,
            causal: true,
            rotary: self.positions == Positions::Rotary,
            bias: self.activation == Activate::Gelu,
        }
    }

    /// Mean cross-entropy, in nats per token, of the head's output `[samples, tokens, vocabulary / t]` against targets `[samples, tokens]`.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] if the output is not the head's.
    pub fn loss(
        output: Activation,
        targets: Tensor<2, Int>,
        group: &TensorParallel,
    ) -> Result<Tensor<1>, Error> {
        let logits = output.into_tensor::<3>()?;
        let [samples, tokens, held] = logits.dims();
        let rows = samples * tokens;
        if targets.dims() != [samples, tokens] {
            return Err(Error::LengthMismatch {
                what: "targets".to_owned(),
                got: targets.shape().num_elements(),
                expected: rows,
            });
        }
        Ok(parallel_cross_entropy(
            logits.reshape([rows, held]),
            targets.reshape([rows]),
            group,
        ))
    }
}

const NORMAL: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.02,
};

/// For what is added to the residual stream `2 layers` times.
pub(super) fn residual_initializer(layers: usize) -> Initializer {
    Initializer::Normal {
        mean: 0.0,
        std: 0.02 / (2.0 * layers as f64).sqrt(),
    }
}

impl BlockModel for BlockGptConfig {
    type Block = GptBlock;

    fn blocks(&self) -> usize {
        self.layers + 2
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<GptBlock, BoxError> {
        Ok(if index == 0 {
            let learned = self.positions == Positions::Learned;
            GptBlock::Embedding(GptEmbedding {
                tokens: VocabParallelEmbedding::new(self.vocabulary, self.width, &NORMAL, device),
                positions: learned.then(|| NORMAL.init([self.context, self.width], device)),
                context: self.context,
            })
        } else if index <= self.layers {
            GptBlock::Layer(TransformerLayer::new(
                &self.attention(),
                self.hidden,
                self.activation,
                self.layers,
                device,
            )?)
        } else {
            GptBlock::Head(GptHead {
                norm: ParallelLayerNorm::new(self.width, device),
                output: NORMAL.init([self.vocabulary, self.width], device),
            })
        })
    }

    fn ties(&self) -> Vec<Tie> {
        if self.tied {
            vec![Tie::new(0, "tokens.weight", self.layers + 1, "output")]
        } else {
            Vec::new()
        }
    }

    fn check(&self, dims: ParallelDims) -> Result<(), Error> {
        check_sizes(&[
            ("gpt vocabulary", self.vocabulary),
            ("gpt context", self.context),
            ("gpt layers", self.layers),
            ("gpt width", self.width),
            ("gpt heads", self.heads),
            ("gpt key-value heads", self.kv_heads),
            ("gpt hidden width", self.hidden),
        ])?;
        self.attention().check(dims.tp)?;
        ParallelMlp::check(self.hidden, dims.tp)?;
        check_divides("vocabulary", self.vocabulary, "tp", dims.tp)
    }
}

/// A block of the GPT.
#[allow(
    clippy::large_enum_variant,
    reason = "a model has few blocks, and modules cannot be boxed"
)]
#[derive(Module, Debug)]
pub enum GptBlock {
    /// The first one: ids to channels.
    Embedding(GptEmbedding),
    /// Attention and feed-forward.
    Layer(TransformerLayer),
    /// The last one: channels to logits.
    Head(GptHead),
}

impl StageModule for GptBlock {
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        let group = context.group;
        Ok(match self {
            Self::Embedding(block) => Activation::new(block.forward(x.into_tensor()?, group)?),
            Self::Layer(block) => Activation::new(block.forward(x.into_tensor()?, group)),
            Self::Head(block) => Activation::new(block.forward(x.into_tensor()?, group)),
        })
    }

    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        match self {
            Self::Embedding(block) => nested("tokens", block.tokens.shard_specs()),
            Self::Layer(block) => block.shard_specs(),
            Self::Head(_) => vec![("output".to_owned(), ShardSpec::split(0))],
        }
    }
}

/// Embedding of tokens and, unless they are rotated, of positions.
#[derive(Module, Debug)]
pub struct GptEmbedding {
    tokens: VocabParallelEmbedding,
    positions: Option<Param<Tensor<2>>>,
    context: usize,
}

impl GptEmbedding {
    /// `[samples, tokens, width]` for ids `[samples, tokens]`.
    fn forward(&self, ids: Tensor<2>, group: &TensorParallel) -> Result<Tensor<3>, Error> {
        let [_, tokens] = ids.dims();
        if tokens > self.context {
            return Err(Error::LengthMismatch {
                what: "sequence".to_owned(),
                got: tokens,
                expected: self.context,
            });
        }
        group.check_tokens(tokens)?;
        let x = self.tokens.forward(ids.int(), group);
        Ok(match &self.positions {
            None => x,
            Some(positions) => {
                let positions = positions.val().narrow(0, 0, tokens).unsqueeze::<3>();
                x + if group.is_sequence_parallel() {
                    group.split_tokens(positions)
                } else {
                    positions
                }
            }
        })
    }
}

/// A pre-norm transformer layer: attention and feed-forward, each added to the residual stream.
#[derive(Module, Debug)]
pub struct TransformerLayer {
    norm1: ParallelLayerNorm,
    attention: ParallelAttention,
    norm2: ParallelLayerNorm,
    mlp: ParallelMlp,
}

impl TransformerLayer {
    /// One of `layers` layers.
    ///
    /// # Errors
    ///
    /// As [`AttentionConfig::check`].
    pub fn new(
        attention: &AttentionConfig,
        hidden: usize,
        activation: Activate,
        layers: usize,
        device: &Device,
    ) -> Result<Self, Error> {
        let residual = residual_initializer(layers);
        Ok(Self {
            norm1: ParallelLayerNorm::new(attention.width, device),
            attention: attention.init(&NORMAL, &residual, device)?,
            norm2: ParallelLayerNorm::new(attention.width, device),
            mlp: ParallelMlp::new(
                attention.width,
                hidden,
                activation,
                &NORMAL,
                &residual,
                device,
            ),
        })
    }

    /// `[samples, tokens, width]` for the same.
    pub fn forward(&self, x: Tensor<3>, group: &TensorParallel) -> Tensor<3> {
        let attended = self
            .attention
            .forward(self.norm1.forward(x.clone(), group), group);
        let x = x + attended;
        let hidden = self.norm2.forward(x.clone(), group);
        x + self.mlp.forward(hidden, group)
    }

    /// How the parameters are cut.
    pub fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        let mut specs = nested("attention", self.attention.shard_specs());
        specs.extend(nested("mlp", self.mlp.shard_specs()));
        specs
    }
}

/// The last norm and the output layer.
#[derive(Module, Debug)]
pub struct GptHead {
    norm: ParallelLayerNorm,
    /// `[vocabulary, width]`, cut by vocabulary.
    output: Param<Tensor<2>>,
}

impl GptHead {
    /// Logits `[samples, tokens, vocabulary / t]` for `[samples, tokens, width]`.
    fn forward(&self, x: Tensor<3>, group: &TensorParallel) -> Tensor<3> {
        let x = group.enter(self.norm.forward(x, group));
        x.matmul(self.output.val().transpose().unsqueeze())
    }
}
