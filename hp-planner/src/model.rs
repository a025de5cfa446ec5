//! The model: a transformer by its shape, or an explicit list of layers.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cluster::{count, positive};
use crate::document::{self, Validate};
use crate::error::{Error, Result};

/// A model: exactly one of `transformer` and `layers` describes it.
///
/// ```
/// use hp_planner::ModelSpec;
///
/// let gpt3 = ModelSpec::gpt("GPT-3 175B", 96, 12_288, 96, 50_257, 2048);
/// assert!((gpt3.parameters() / 174.6e9 - 1.0).abs() < 0.01);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Name for reports.
    #[serde(default)]
    pub name: String,
    /// Shape of a transformer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transformer: Option<Transformer>,
    /// Explicit layers, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<Layer>,
}

/// What the last layer computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Head {
    /// Logits over the vocabulary at every position.
    #[default]
    Language,
    /// Logits over `vocab` classes once per sample.
    Classifier,
}

/// Shape of a transformer.
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent yes-or-no properties, each a field of the input file"
)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transformer {
    /// Number of blocks.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Attention heads.
    pub heads: u32,
    /// Heads of keys and values (grouped-query attention); 0 means as many as `heads`.
    #[serde(default)]
    pub kv_heads: u32,
    /// Width of one head; 0 means `hidden / heads`.
    #[serde(default)]
    pub head_dim: u32,
    /// Inner width of the feed-forward part; 0 means `4 * hidden`.
    #[serde(default)]
    pub ffn: u32,
    /// Vocabulary, or number of classes for a classifier head.
    pub vocab: u32,
    /// Whether the feed-forward part has a gate, as `SwiGLU`: three matrices instead of two.
    #[serde(default)]
    pub gated_mlp: bool,
    /// Learned position embeddings; 0 for rotary or other computed positions.
    #[serde(default)]
    pub max_positions: u32,
    /// Whether the output projection is the transposed input embedding.
    #[serde(default = "yes")]
    pub tied_embeddings: bool,
    /// Whether linear layers have biases and norms have shifts.
    #[serde(default = "yes")]
    pub biases: bool,
    /// Whether attention is causal.
    #[serde(default = "yes")]
    pub causal: bool,
    /// Last layer.
    #[serde(default)]
    pub head: Head,
    /// Width of the input patches for models that embed by a projection (`ViT`); 0 for a token embedding.
    #[serde(default)]
    pub patch_inputs: u32,
    /// Number of experts per block; 0 for a dense feed-forward part.
    #[serde(default)]
    pub experts: u32,
    /// Experts that see each token.
    #[serde(default)]
    pub experts_per_token: u32,
    /// Inner width of one expert; 0 means `ffn`.
    #[serde(default)]
    pub expert_ffn: u32,
    /// Experts that see every token.
    #[serde(default)]
    pub shared_experts: u32,
    /// Leading blocks with a dense feed-forward part although the model has experts.
    #[serde(default)]
    pub dense_layers: u32,
    /// Queries, keys and values through a low rank (multi-head latent attention); `head_dim` is then the part of a head without
    /// positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<Latent>,
}

/// Multi-head latent attention (`DeepSeek-AI` 2024, `DeepSeek-V2`, section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latent {
    /// Rank of the queries; 0 if they are projected directly.
    #[serde(default)]
    pub query_rank: u32,
    /// Rank that keys and values share.
    pub kv_rank: u32,
    /// Width of the part of a head that carries positions; the keys of all heads share it.
    pub rope_dim: u32,
    /// Width of a head's values.
    pub value_dim: u32,
}

/// A matrix product over all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttentionProduct {
    pub inputs: f64,
    pub outputs: f64,
    pub split: Split,
}

/// Side of a weight that tensor parallelism splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    Inputs,
    Outputs,
    No,
}

fn yes() -> bool {
    true
}

/// One layer of an explicit model; all quantities are per sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Name for reports.
    #[serde(default)]
    pub name: String,
    /// Trainable parameters.
    pub parameters: f64,
    /// Floating-point operations of the forward pass of one sample (a multiply-add counts two).
    pub forward_flops: f64,
    /// Bytes kept for the backward pass of one sample, at 2 bytes per element.
    pub activation_bytes: f64,
    /// Bytes passed to the next layer per sample, at 2 bytes per element.
    pub output_bytes: f64,
    /// Bytes read and written by the forward pass of one sample by kernels that are bound by memory; 0 means twice `activation_bytes`.
    #[serde(default)]
    pub traffic_bytes: f64,
    /// Kernels launched by the forward pass.
    #[serde(default = "default_kernels")]
    pub kernels: u32,
    /// Greatest tensor-parallel degree; degrees must divide it.
    #[serde(default = "one")]
    pub tp_divisor: u32,
    /// Backward over forward time.
    #[serde(default = "default_backward_ratio")]
    pub backward_ratio: f64,
}

fn default_kernels() -> u32 {
    4
}

fn one() -> u32 {
    1
}

fn default_backward_ratio() -> f64 {
    2.0
}

impl Transformer {
    /// A dense decoder with tied embeddings, biases, rotary or no positions and an ungated feed-forward part of width `4 * hidden`.
    pub fn new(layers: u32, hidden: u32, heads: u32, vocab: u32) -> Self {
        Self {
            layers,
            hidden,
            heads,
            kv_heads: 0,
            head_dim: 0,
            ffn: 0,
            vocab,
            gated_mlp: false,
            max_positions: 0,
            tied_embeddings: true,
            biases: true,
            causal: true,
            head: Head::Language,
            patch_inputs: 0,
            experts: 0,
            experts_per_token: 0,
            expert_ffn: 0,
            shared_experts: 0,
            dense_layers: 0,
            latent: None,
        }
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> u32 {
        if self.kv_heads == 0 {
            self.heads
        } else {
            self.kv_heads
        }
    }

    /// Width of one head.
    pub fn head_dim(&self) -> u32 {
        if self.head_dim == 0 {
            self.hidden / self.heads
        } else {
            self.head_dim
        }
    }

    /// Inner width of the dense feed-forward part.
    pub fn ffn(&self) -> u32 {
        if self.ffn == 0 {
            4 * self.hidden
        } else {
            self.ffn
        }
    }

    /// Inner width of one expert.
    pub fn expert_ffn(&self) -> u32 {
        if self.expert_ffn == 0 {
            self.ffn()
        } else {
            self.expert_ffn
        }
    }

    /// Whether block `layer` has experts.
    pub fn is_moe(&self, layer: u32) -> bool {
        self.experts > 0 && layer >= self.dense_layers
    }

    /// Parameters of the attention part of a block, its norm included.
    pub fn attention_parameters(&self) -> f64 {
        let h = f64::from(self.hidden);
        if self.latent.is_some() {
            let products: f64 = self
                .attention_products()
                .iter()
                .map(|product| product.inputs * product.outputs)
                .sum();
            // The block's norm and those of the low ranks.
            let ranks = self.latent.map_or(0, |l| l.query_rank + l.kv_rank);
            return products + h + f64::from(ranks);
        }
        let q = f64::from(self.heads) * f64::from(self.head_dim());
        let kv = f64::from(self.kv_heads()) * f64::from(self.head_dim());
        let bias = if self.biases {
            q + 2.0 * kv + 2.0 * h
        } else {
            0.0
        };
        h * (q + 2.0 * kv) + q * h + h + bias
    }

    /// Matrix products of the attention part around its core.
    pub(crate) fn attention_products(&self) -> Vec<AttentionProduct> {
        let h = f64::from(self.hidden);
        let a = f64::from(self.heads);
        let d = f64::from(self.head_dim());
        let product = |inputs, outputs, split| AttentionProduct {
            inputs,
            outputs,
            split,
        };
        let Some(latent) = &self.latent else {
            let q = a * d;
            let kv = f64::from(self.kv_heads()) * d;
            return vec![
                product(h, q + 2.0 * kv, Split::Outputs),
                product(q, h, Split::Inputs),
            ];
        };
        let [query, kv, rope, value] = [
            latent.query_rank,
            latent.kv_rank,
            latent.rope_dim,
            latent.value_dim,
        ]
        .map(f64::from);
        let mut products = Vec::with_capacity(5);
        if query > 0.0 {
            products.push(product(h, query, Split::No));
            products.push(product(query, a * (d + rope), Split::Outputs));
        } else {
            products.push(product(h, a * (d + rope), Split::Outputs));
        }
        products.push(product(h, kv + rope, Split::No));
        products.push(product(kv, a * (d + value), Split::Outputs));
        products.push(product(a * value, h, Split::Inputs));
        products
    }

    /// Widths of a head in the scores' product and in the weighted sum.
    pub(crate) fn core_widths(&self) -> (f64, f64) {
        let d = f64::from(self.head_dim());
        self.latent.as_ref().map_or((d, d), |latent| {
            (d + f64::from(latent.rope_dim), f64::from(latent.value_dim))
        })
    }

    /// Parameters of one feed-forward network of inner width `ffn`.
    pub fn mlp_parameters(&self, ffn: u32) -> f64 {
        let h = f64::from(self.hidden);
        let f = f64::from(ffn);
        let matrices = if self.gated_mlp { 3.0 } else { 2.0 };
        let bias = if self.biases {
            (matrices - 1.0) * f + h
        } else {
            0.0
        };
        matrices * h * f + bias
    }

    /// Parameters of the feed-forward part of block `layer` outside its routed experts, its norm included.
    pub fn shared_ffn_parameters(&self, layer: u32) -> f64 {
        let h = f64::from(self.hidden);
        let norm = if self.biases { 2.0 * h } else { h };
        if self.is_moe(layer) {
            norm + h * f64::from(self.experts)
                + f64::from(self.shared_experts) * self.mlp_parameters(self.expert_ffn())
        } else {
            norm + self.mlp_parameters(self.ffn())
        }
    }

    /// Parameters of all routed experts of block `layer`.
    pub fn expert_parameters(&self, layer: u32) -> f64 {
        if self.is_moe(layer) {
            f64::from(self.experts) * self.mlp_parameters(self.expert_ffn())
        } else {
            0.0
        }
    }

    /// Parameters of block `layer`.
    pub fn block_parameters(&self, layer: u32) -> f64 {
        self.attention_parameters()
            + self.shared_ffn_parameters(layer)
            + self.expert_parameters(layer)
    }

    /// Parameters before the first block.
    pub fn embedding_parameters(&self) -> f64 {
        let h = f64::from(self.hidden);
        let input = if self.patch_inputs > 0 {
            f64::from(self.patch_inputs) + 1.0
        } else {
            f64::from(self.vocab)
        };
        (input + f64::from(self.max_positions)) * h
    }

    /// Parameters after the last block, without a tied projection.
    pub fn head_parameters(&self) -> f64 {
        let h = f64::from(self.hidden);
        let norm = if self.biases { 2.0 * h } else { h };
        let tied = self.tied_embeddings && self.patch_inputs == 0 && self.head == Head::Language;
        norm + if tied { 0.0 } else { h * f64::from(self.vocab) }
    }

    fn validate(&self) -> Result<()> {
        count("layers", u64::from(self.layers), 1, 100_000)?;
        count("hidden", u64::from(self.hidden), 1, 1 << 24)?;
        count("heads", u64::from(self.heads), 1, 1 << 16)?;
        count("vocab", u64::from(self.vocab), 1, 1 << 28)?;
        for (field, value) in [
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("max_positions", self.max_positions),
            ("patch_inputs", self.patch_inputs),
            ("experts", self.experts),
            ("expert_ffn", self.expert_ffn),
            ("shared_experts", self.shared_experts),
        ] {
            count(field, u64::from(value), 0, 1 << 28)?;
        }
        if self.head_dim == 0 && !self.hidden.is_multiple_of(self.heads) {
            return Err(Error::field(
                "heads",
                self.heads,
                format!(
                    "a divisor of hidden = {}, or head_dim stated as well",
                    self.hidden
                ),
            ));
        }
        if !self.heads.is_multiple_of(self.kv_heads()) {
            return Err(Error::field(
                "kv_heads",
                self.kv_heads,
                format!("a divisor of heads = {}", self.heads),
            ));
        }
        if self.experts > 0 {
            count(
                "experts_per_token",
                u64::from(self.experts_per_token),
                1,
                u64::from(self.experts),
            )?;
        }
        if let Some(latent) = &self.latent {
            count(
                "latent.query_rank",
                u64::from(latent.query_rank),
                0,
                1 << 24,
            )?;
            count("latent.kv_rank", u64::from(latent.kv_rank), 1, 1 << 24)?;
            count("latent.value_dim", u64::from(latent.value_dim), 1, 1 << 24)?;
            count("latent.rope_dim", u64::from(latent.rope_dim), 0, 1 << 24)?;
        }
        if self.dense_layers > self.layers {
            return Err(Error::field(
                "dense_layers",
                self.dense_layers,
                format!("at most layers = {}", self.layers),
            ));
        }
        Ok(())
    }
}

impl Layer {
    fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("parameters", self.parameters),
            ("forward_flops", self.forward_flops),
            ("activation_bytes", self.activation_bytes),
            ("output_bytes", self.output_bytes),
            ("traffic_bytes", self.traffic_bytes),
        ] {
            positive(name, value, 0.0, 1e24, "per sample")?;
        }
        count("tp_divisor", u64::from(self.tp_divisor), 1, 1 << 20)?;
        positive(
            "backward_ratio",
            self.backward_ratio,
            0.0,
            10.0,
            "times the forward time",
        )
    }
}

impl ModelSpec {
    /// A transformer of the given shape.
    pub fn transformer(name: impl Into<String>, shape: Transformer) -> Self {
        Self {
            name: name.into(),
            transformer: Some(shape),
            layers: Vec::new(),
        }
    }

    /// An explicit list of layers.
    pub fn layers(name: impl Into<String>, layers: Vec<Layer>) -> Self {
        Self {
            name: name.into(),
            transformer: None,
            layers,
        }
    }

    /// GPT-2/GPT-3: learned positions, biases, tied embeddings, `4 * hidden` feed-forward.
    pub fn gpt(
        name: impl Into<String>,
        layers: u32,
        hidden: u32,
        heads: u32,
        vocab: u32,
        max_positions: u32,
    ) -> Self {
        Self::transformer(
            name,
            Transformer {
                max_positions,
                ..Transformer::new(layers, hidden, heads, vocab)
            },
        )
    }

    /// Llama: rotary positions, grouped-query attention, `SwiGLU`, no biases, untied embeddings.
    pub fn llama(
        name: impl Into<String>,
        layers: u32,
        hidden: u32,
        heads: u32,
        kv_heads: u32,
        ffn: u32,
        vocab: u32,
    ) -> Self {
        Self::transformer(
            name,
            Transformer {
                kv_heads,
                ffn,
                gated_mlp: true,
                tied_embeddings: false,
                biases: false,
                ..Transformer::new(layers, hidden, heads, vocab)
            },
        )
    }

    /// BERT: bidirectional, learned positions, masked-language head with tied embeddings.
    pub fn bert(name: impl Into<String>, layers: u32, hidden: u32, heads: u32, vocab: u32) -> Self {
        Self::transformer(
            name,
            Transformer {
                max_positions: 512,
                causal: false,
                ..Transformer::new(layers, hidden, heads, vocab)
            },
        )
    }

    /// `ViT`: `patch` x `patch` RGB patches, `tokens` learned positions, one classification per sample.
    pub fn vit(
        name: impl Into<String>,
        layers: u32,
        hidden: u32,
        heads: u32,
        patch: u32,
        tokens: u32,
        classes: u32,
    ) -> Self {
        Self::transformer(
            name,
            Transformer {
                max_positions: tokens,
                patch_inputs: 3 * patch * patch,
                causal: false,
                head: Head::Classifier,
                tied_embeddings: false,
                ..Transformer::new(layers, hidden, heads, classes)
            },
        )
    }

    /// Reads a TOML (or, by its extension, JSON) file.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Syntax`] or [`Error::Field`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        document::read(path.as_ref())
    }

    /// Parses a TOML text.
    ///
    /// # Errors
    /// [`Error::Syntax`] or [`Error::Field`].
    pub fn from_toml(text: &str) -> Result<Self> {
        document::parse_toml(text, None)
    }

    /// Parses a JSON text.
    ///
    /// # Errors
    /// [`Error::Syntax`] or [`Error::Field`].
    pub fn from_json(text: &str) -> Result<Self> {
        document::parse_json(text, None)
    }

    /// Number of layers that a pipeline can divide: blocks of a transformer or explicit layers.
    pub fn depth(&self) -> u32 {
        match &self.transformer {
            Some(shape) => shape.layers,
            None => self.layers.len() as u32,
        }
    }

    /// Trainable parameters of the whole model.
    pub fn parameters(&self) -> f64 {
        match &self.transformer {
            Some(shape) => {
                shape.embedding_parameters()
                    + (0..shape.layers)
                        .map(|layer| shape.block_parameters(layer))
                        .sum::<f64>()
                    + shape.head_parameters()
            }
            None => self.layers.iter().map(|layer| layer.parameters).sum(),
        }
    }

    /// Checks all fields; the readers have already done so.
    ///
    /// # Errors
    /// [`Error::Field`] for the first field that is not allowed.
    pub fn validate(&self) -> Result<()> {
        match (&self.transformer, self.layers.as_slice()) {
            (Some(shape), []) => shape
                .validate()
                .map_err(|error| error.within("transformer")),
            (None, layers) if !layers.is_empty() => {
                for (index, layer) in layers.iter().enumerate() {
                    layer
                        .validate()
                        .map_err(|error| error.within(&format!("layers[{index}]")))?;
                }
                Ok(())
            }
            (Some(_), _) => Err(Error::field(
                "layers",
                "given beside `transformer`",
                "one of the two",
            )),
            (None, _) => Err(Error::field(
                "transformer",
                "missing",
                "a [transformer] table or [[layers]]",
            )),
        }
    }
}

impl Validate for ModelSpec {
    fn validate(&self) -> Result<()> {
        Self::validate(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_known_models() {
        // GPT-2 small has 124.4 M parameters, Llama-2 7B 6.738 B, ViT-B/16 86.6 M (their papers and checkpoints).
        let close = |model: &ModelSpec, expected: f64| {
            let ratio = model.parameters() / expected;
            assert!((ratio - 1.0).abs() < 2e-3, "{}: {ratio}", model.name);
        };
        close(&ModelSpec::gpt("gpt2", 12, 768, 12, 50_257, 1024), 124.44e6);
        close(
            &ModelSpec::llama("llama2-7b", 32, 4096, 32, 32, 11_008, 32_000),
            6.738e9,
        );
        close(
            &ModelSpec::llama("llama3-8b", 32, 4096, 32, 8, 14_336, 128_256),
            8.030e9,
        );
        close(
            &ModelSpec::vit("vit-b16", 12, 768, 12, 16, 197, 1000),
            86.57e6,
        );
    }

    #[test]
    fn mixture_of_experts_counts_all_experts() {
        // Mixtral 8x7B: 46.7 B parameters.
        let mut model = ModelSpec::llama("mixtral", 32, 4096, 32, 8, 14_336, 32_000);
        let shape = model.transformer.as_mut().unwrap();
        shape.experts = 8;
        shape.experts_per_token = 2;
        assert!((model.parameters() / 46.70e9 - 1.0).abs() < 2e-3);
    }

    #[test]
    fn latent_attention_counts_its_ranks() {
        // DeepSeek-V2 (2024), section 2 and table 1: 60 layers of width 5120, 236 B parameters.
        let mut model = ModelSpec::llama("deepseek-v2", 60, 5120, 128, 128, 12_288, 102_400);
        let shape = model.transformer.as_mut().unwrap();
        shape.head_dim = 128;
        shape.experts = 160;
        shape.experts_per_token = 6;
        shape.expert_ffn = 1536;
        shape.shared_experts = 2;
        shape.dense_layers = 1;
        shape.latent = Some(Latent {
            query_rank: 1536,
            kv_rank: 512,
            rope_dim: 64,
            value_dim: 128,
        });
        assert!(
            (model.parameters() / 235.7e9 - 1.0).abs() < 3e-3,
            "{}",
            model.parameters()
        );
    }

    #[test]
    fn heads_must_divide() {
        let error = ModelSpec::from_toml(
            "name = \"x\"\n[transformer]\nlayers = 2\nhidden = 100\nheads = 3\nvocab = 10\n",
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "line 5: field `transformer.heads` is 3, allowed is a divisor of hidden = 100, or head_dim stated as well"
        );
    }
}
