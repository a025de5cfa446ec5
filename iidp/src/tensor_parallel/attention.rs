//! The attention half of a transformer layer.

use burn::module::{Initializer, Module};
use burn::tensor::{Bool, Device, Tensor, TensorData, activation};

use super::{ColumnParallelLinear, RowParallelLinear, TensorParallel, nested};
use crate::shard::check_divides;
use crate::{Error, ShardSpec};

/// Settings of a [`ParallelAttention`].
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Channels of the residual stream.
    pub width: usize,
    /// Heads of the queries; they divide the width.
    pub heads: usize,
    /// Heads of keys and values, each shared by `heads / kv_heads` heads of queries.
    pub kv_heads: usize,
    /// Whether a token sees only those up to it.
    pub causal: bool,
    /// Whether positions are told by rotating queries and keys.
    pub rotary: bool,
    /// Whether the linear layers have biases.
    pub bias: bool,
}

impl AttentionConfig {
    /// Causal multi-head attention with biases and without rotation.
    pub const fn new(width: usize, heads: usize) -> Self {
        Self {
            width,
            heads,
            kv_heads: heads,
            causal: true,
            rotary: false,
            bias: true,
        }
    }

    /// Checks the sizes, and that a group of `tp` ranks can share the heads.
    ///
    /// # Errors
    ///
    /// [`Error::Indivisible`] if the heads do not divide the width, the key-value heads not the heads, or `tp` not both kinds of heads; [`Error::Invalid`]
    /// for rotation with an odd number of channels per head.
    pub fn check(&self, tp: usize) -> Result<(), Error> {
        check_divides("width", self.width, "heads", self.heads)?;
        check_divides("heads", self.heads, "key-value heads", self.kv_heads)?;
        check_divides("heads", self.heads, "tp", tp)?;
        check_divides("key-value heads", self.kv_heads, "tp", tp)?;
        let head_width = self.width / self.heads;
        if self.rotary && !head_width.is_multiple_of(2) {
            return Err(Error::Invalid {
                what: "rotary positions",
                problem: format!("heads of {head_width} channels, expected an even number"),
            });
        }
        Ok(())
    }

    /// The whole layer; `residual` initialises the output projection.
    ///
    /// # Errors
    ///
    /// As [`Self::check`] for one rank.
    pub fn init(
        &self,
        initializer: &Initializer,
        residual: &Initializer,
        device: &Device,
    ) -> Result<ParallelAttention, Error> {
        self.check(1)?;
        let head_width = self.width / self.heads;
        let column = |heads: usize| {
            ColumnParallelLinear::new(
                self.width,
                heads * head_width,
                self.bias,
                initializer,
                device,
            )
        };
        Ok(ParallelAttention {
            query: column(self.heads),
            key: column(self.kv_heads),
            value: column(self.kv_heads),
            projection: RowParallelLinear::new(self.width, self.width, self.bias, residual, device),
            head_width,
            causal: self.causal,
            rotary: self.rotary,
        })
    }
}

/// Attention whose heads are cut over the ranks.
///
/// Sources: Vaswani et al. 2017, section 3.2; grouped queries: Ainslie et al. 2023; rotary positions: Su et al. 2021.
#[derive(Module, Debug)]
pub struct ParallelAttention {
    /// `[width, heads x head width]`.
    pub query: ColumnParallelLinear,
    /// `[width, key-value heads x head width]`.
    pub key: ColumnParallelLinear,
    /// `[width, key-value heads x head width]`.
    pub value: ColumnParallelLinear,
    /// `[heads x head width, width]`.
    pub projection: RowParallelLinear,
    head_width: usize,
    causal: bool,
    rotary: bool,
}

impl ParallelAttention {
    /// `[samples, tokens, width]` for the same.
    pub fn forward(&self, x: Tensor<3>, group: &TensorParallel) -> Tensor<3> {
        let x = group.enter(x);
        let [samples, tokens, _] = x.dims();
        let split = |y: Tensor<3>| -> Tensor<4> {
            let heads = y.dims()[2] / self.head_width;
            y.reshape([samples, tokens, heads, self.head_width])
                .swap_dims(1, 2)
        };
        let mut query = split(self.query.forward(x.clone(), group));
        let mut key = split(self.key.forward(x.clone(), group));
        let value = split(self.value.forward(x, group));
        if self.rotary {
            let rotation = RotaryEmbedding::new(tokens, self.head_width, &query.device());
            query = rotation.apply(query);
            key = rotation.apply(key);
        }
        let heads = query.dims()[1];
        let (key, value) = (repeat_heads(key, heads), repeat_heads(value, heads));
        let query = query.mul_scalar((self.head_width as f32).sqrt().recip());
        let mut scores = query.matmul(key.swap_dims(2, 3));
        if self.causal {
            let future = Tensor::<2, Bool>::tril_mask([tokens, tokens], 0, &scores.device());
            scores = scores.mask_fill(future.unsqueeze::<4>(), f32::NEG_INFINITY);
        }
        let mixed = activation::softmax(scores, 3)
            .matmul(value)
            .swap_dims(1, 2)
            .reshape([samples, tokens, heads * self.head_width]);
        self.projection.forward(mixed, group)
    }

    /// How the parameters are cut.
    pub fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        let mut specs = nested("query", self.query.shard_specs());
        specs.extend(nested("key", self.key.shard_specs()));
        specs.extend(nested("value", self.value.shard_specs()));
        specs.extend(nested("projection", self.projection.shard_specs()));
        specs
    }
}

/// `[samples, heads, tokens, head width]` for fewer heads, each taken `heads / kv` times in a row.
fn repeat_heads(x: Tensor<4>, heads: usize) -> Tensor<4> {
    let [samples, kv, tokens, width] = x.dims();
    if kv == heads {
        return x;
    }
    x.unsqueeze_dim::<5>(2)
        .repeat_dim(2, heads / kv)
        .reshape([samples, heads, tokens, width])
}

/// Rotation of pairs of channels by angles that grow with the position: channels `i` and `i + d / 2` of token `n` by `n theta^(-2 i / d)`, theta = 10000.
///
/// Source: Su et al. 2021 (`RoFormer`), equations 15 and 34; pairs are taken from the two halves, as GPT-NeoX does, instead of neighbours.
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    /// `[1, 1, tokens, d / 2]`.
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl RotaryEmbedding {
    /// For tokens `0..tokens` and heads of `head_width` channels, an even number.
    pub fn new(tokens: usize, head_width: usize, device: &Device) -> Self {
        let half = head_width / 2;
        let table = |f: fn(f64) -> f64| -> Tensor<4> {
            let values: Vec<f32> = (0..tokens)
                .flat_map(|n| {
                    (0..half).map(move |i| {
                        let frequency = 10_000_f64.powf(-2.0 * i as f64 / head_width as f64);
                        f(n as f64 * frequency) as f32
                    })
                })
                .collect();
            Tensor::from_data(TensorData::new(values, [1, 1, tokens, half]), device)
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    /// Rotates `[samples, heads, tokens, head width]`.
    #[must_use]
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let half = x.dims()[3] / 2;
        let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let (cos, sin) = (&self.cos, &self.sin);
        Tensor::cat(
            vec![
                first.clone() * cos.clone() - second.clone() * sin.clone(),
                first * sin.clone() + second * cos.clone(),
            ],
            3,
        )
    }
}
