//! The main job's task: a GPT that predicts the next character.

use crate::corpus::CharCorpus;
use crate::task::Task;
use burn::tensor::{Device, Tensor};
use hp_planner::ModelSpec;
use iidp::models::{Gpt, GptConfig};
use iidp::{BoxError, MicroBatch, Workload};

/// Shape of the model; the vocabulary and the context come from the corpus.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CharGptConfig {
    /// Transformer blocks.
    pub layers: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Attention heads; must divide the width.
    pub heads: usize,
    /// Probability of dropout.
    pub dropout: f64,
}

/// A character-level GPT on a [`CharCorpus`]; the loss is in nats per character.
#[derive(Debug)]
pub struct CharGptTask {
    corpus: CharCorpus,
    shape: CharGptConfig,
    model: GptConfig,
}

impl CharGptTask {
    /// The task of predicting each character of the corpus' windows from those before it.
    pub fn new(corpus: CharCorpus, shape: CharGptConfig) -> Self {
        let CharGptConfig {
            layers,
            width,
            heads,
            dropout,
        } = shape;
        let model = GptConfig::new(
            corpus.vocabulary().len(),
            corpus.context(),
            layers,
            width,
            heads,
        )
        .with_dropout(dropout)
        .with_tied(true);
        Self {
            corpus,
            shape,
            model,
        }
    }

    /// The data.
    pub fn corpus(&self) -> &CharCorpus {
        &self.corpus
    }
}

impl Workload for CharGptTask {
    type Model = Gpt;

    fn init(&self, device: &Device) -> Result<Gpt, BoxError> {
        Ok(self.model.init(device)?)
    }

    fn loss(
        &self,
        model: &Gpt,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let windows = batch
            .samples
            .iter()
            .map(|&key| self.corpus.sample(key))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(model.batch_loss(&windows, batch, device)?)
    }
}

impl Task for CharGptTask {
    fn training_samples(&self) -> &[u64] {
        self.corpus.training_samples()
    }

    fn validation_samples(&self) -> &[u64] {
        self.corpus.validation_samples()
    }

    fn model_spec(&self) -> ModelSpec {
        let CharGptConfig {
            layers,
            width,
            heads,
            ..
        } = self.shape;
        let (vocabulary, context) = (
            self.corpus.vocabulary().len() as u32,
            self.corpus.context() as u32,
        );
        ModelSpec::gpt(
            "char-gpt",
            layers as u32,
            width as u32,
            heads as u32,
            vocabulary,
            context,
        )
    }

    fn sample_tokens(&self) -> u32 {
        self.corpus.context() as u32
    }
}
