//! What is trained: a list of blocks, and data.

use burn::tensor::{Device, Tensor};

use crate::pipeline::{Activation, StageContext, StageModule};
use crate::{BoxError, Error, MicroBatch, ParallelDims};

/// A model as a list of blocks, each of which can be made by itself.
///
/// Blocks are numbered from the input. Parameter `p` of block `i` has the canonical name `blocks.i.p`, whatever the layout.
pub trait BlockModel: Send + Sync + 'static {
    /// A block: an enum if there are several kinds.
    type Block: StageModule;

    /// Number of blocks.
    fn blocks(&self) -> usize;

    /// Block `index` as a whole, freshly initialised on `device`, which tracks gradients. Its weights may depend on nothing but the index and Burn's generator,
    /// which has been seeded for this block.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being made.
    fn init_block(&self, index: usize, device: &Device) -> Result<Self::Block, BoxError>;

    /// Parameters that are the same tensor in two blocks.
    fn ties(&self) -> Vec<Tie> {
        Vec::new()
    }

    /// Checks the model's settings, and that it can be laid out over `dims`. That there are enough blocks for the stages is checked elsewhere.
    ///
    /// # Errors
    ///
    /// [`Error::Indivisible`] that names what `dims.tp` does not divide; errors of the settings.
    fn check(&self, dims: ParallelDims) -> Result<(), Error> {
        let _ = dims;
        Ok(())
    }
}

/// A parameter that two blocks share. Both must be cut in the same way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tie {
    /// Block that gives the initial value, the one nearer to the input.
    pub owner_block: usize,
    /// Path of the parameter in that block.
    pub owner_path: String,
    /// The other block.
    pub alias_block: usize,
    /// Path of the parameter in the other block.
    pub alias_path: String,
}

impl Tie {
    /// Parameter `alias_path` of block `alias_block` is parameter `owner_path` of block `owner_block`.
    pub fn new(
        owner_block: usize,
        owner_path: impl Into<String>,
        alias_block: usize,
        alias_path: impl Into<String>,
    ) -> Self {
        Self {
            owner_block,
            owner_path: owner_path.into(),
            alias_block,
            alias_path: alias_path.into(),
        }
    }
}

/// A model, the input of its first block, and the loss of its last block's output. The ranks' threads call it at the same time.
pub trait HybridWorkload: Send + Sync + 'static {
    /// The model.
    type Model: BlockModel;

    /// The model.
    fn model(&self) -> &Self::Model;

    /// What the first block gets for a micro-batch, on `device`.
    ///
    /// # Errors
    ///
    /// Whatever keeps the input from being made (an unknown sample).
    fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError>;

    /// The **mean** loss over the samples of the micro-batch for the output of the last block, a tensor of one element; the same on every rank of the
    /// tensor-parallel group.
    ///
    /// # Errors
    ///
    /// Whatever keeps the loss from being computed.
    fn loss(&self, output: Activation, context: &StageContext<'_>) -> Result<Tensor<1>, BoxError>;
}
