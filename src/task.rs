//! What a trainer trains.

use hp_planner::ModelSpec;
use iidp::Workload;

/// A workload with its data: the model and the loss of a micro-batch come from [`Workload`], the sample keys from here.
///
/// Keys are `u64`, such as positions or times in an ordered index; the trainer never looks into them.
pub trait Task: Workload {
    /// Keys of the training samples. Every epoch visits each exactly once, in an order that depends on the seed only.
    fn training_samples(&self) -> &[u64];

    /// Keys of the validation samples.
    fn validation_samples(&self) -> &[u64];

    /// The model as the planner sees it: what time and money on a simulated cluster are predicted from.
    fn model_spec(&self) -> ModelSpec;

    /// Tokens per sample; 1 for a model that reads no sequence.
    fn sample_tokens(&self) -> u32;
}
