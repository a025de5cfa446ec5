//! What is trained: a model, and the loss of a micro-batch.

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::Cuts;

/// An error of the caller's own code (a workload, an observer).
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Whether a loss is computed to learn from it or to judge the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Gradients follow; dropout is on.
    Train,
    /// No gradients; dropout is off.
    Evaluate,
}

/// One micro-batch: which samples, and everything that a loss may depend on besides the model.
///
/// Nothing here tells where the micro-batch runs: a loss that uses only these fields is the same under any layout.
#[derive(Debug, Clone, Copy)]
pub struct MicroBatch<'a> {
    /// Dataset ids of the samples.
    pub samples: &'a [u64],
    /// Position of the micro-batch in the global batch.
    pub index: usize,
    /// Number of the step, from zero.
    pub step: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Training or evaluation.
    pub mode: Mode,
    cuts: Option<&'a Cuts>,
}

impl<'a> MicroBatch<'a> {
    /// The first micro-batch of step 0 with seed 0: for calling a workload's loss without an executor.
    pub fn new(samples: &'a [u64], mode: Mode) -> Self {
        Self {
            samples,
            index: 0,
            step: 0,
            seed: 0,
            mode,
            cuts: None,
        }
    }

    pub(crate) fn with_cuts(self, cuts: &'a Cuts) -> Self {
        Self {
            cuts: Some(cuts),
            ..self
        }
    }

    /// Cuts the graph of the loss at `x`, so that the gradients of what comes later are reduced while those of what came before are
    /// computed. What follows must use the returned tensor in place of `x`, and nothing else that was
    /// computed before the cut except parameters. The gradients are the same, bit for bit. Does nothing where no
    /// overlap is asked for.
    pub fn cut<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.cuts {
            Some(cuts) => cuts.cut(x),
            None => x,
        }
    }
}

impl MicroBatch<'_> {
    /// A seed for sample `position` of this micro-batch (dropout, augmentation): it depends on the run's seed, the step and the sample's
    /// id, and so not on the layout.
    ///
    /// # Panics
    ///
    /// If `position` is not a position of [`Self::samples`].
    pub fn sample_seed(&self, position: usize) -> u64 {
        mix(mix(mix(self.seed) ^ self.step) ^ self.samples[position])
    }
}

/// `SplitMix64`'s output function (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
pub(crate) const fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A model and its loss. The executor calls it from many threads at once.
pub trait Workload: Send + Sync + 'static {
    /// The model: any Burn module. Trainable tensors are those that require a gradient after [`Self::init`]; they must be `f32`.
    type Model: Module + 'static;

    /// A fresh model on `device`, which tracks gradients. Called once per process; every rank gets rank 0's values.
    ///
    /// # Errors
    ///
    /// Whatever keeps the model from being made.
    fn init(&self, device: &Device) -> Result<Self::Model, BoxError>;

    /// The **mean** loss over the samples of `batch`, a tensor of one element.
    ///
    /// `device` tracks gradients when training and does not when evaluating; make the inputs there. The loss must
    /// not depend on anything but `model` and `batch`, or layouts will not agree. A loss must not call the
    /// executor.
    ///
    /// # Errors
    ///
    /// Whatever keeps the loss from being computed (an unknown sample); the step is then rolled back on every rank.
    fn loss(
        &self,
        model: &Self::Model,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError>;
}
