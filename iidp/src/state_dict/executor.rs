//! The state of a data-parallel [`Executor`](crate::Executor) by name.

use std::sync::Arc;

use super::{StateDict, mismatch};
use crate::executor::ExecutorState;
use crate::reshard::{ModelSpec, RankState, TensorSpec};
use crate::{Error, ParameterLayout, ShardSpec};

/// The steps taken, among the metadata.
pub(super) const STEP: &str = "step";

impl StateDict {
    /// The state of an executor: its [`layout`](crate::Executor::layout) and [`state`](crate::Executor::state). The steps taken go to the metadata,
    /// as `step`.
    ///
    /// # Errors
    ///
    /// When the state is not of that layout.
    pub fn from_executor(layout: &ParameterLayout, state: &ExecutorState) -> Result<Self, Error> {
        let model = model_of(layout, state.optimizer.moments.keys())?;
        let whole = RankState::new(state.parameters.clone(), state.buffers.clone())
            .with_optimizer(state.optimizer.clone());
        let mut dict = Self::from_whole(&model, &whole)?;
        dict.metadata.insert(STEP.into(), state.step.to_string());
        Ok(dict)
    }

    /// What an executor of that layout can [`restore`](crate::Executor::restore).
    ///
    /// # Errors
    ///
    /// As [`Self::to_whole`]; [`Error::StateTensor`] when the metadata have no `step`.
    pub fn to_executor(&self, layout: &ParameterLayout) -> Result<ExecutorState, Error> {
        let step = steps_taken(self)?;
        let whole = self.to_whole(&model_of(layout, self.moments.keys())?)?;
        let optimizer = whole.optimizer();
        let values = |buffer: Arc<Vec<f32>>| Arc::unwrap_or_clone(buffer);
        Ok(ExecutorState {
            step,
            parameters: values(whole.parameters),
            buffers: values(whole.buffers),
            optimizer,
        })
    }
}

/// The steps taken, from the metadata.
pub(super) fn steps_taken(dict: &StateDict) -> Result<u64, Error> {
    let step = dict.metadata.get(STEP);
    step.and_then(|text| text.parse().ok())
        .ok_or_else(|| mismatch(STEP, format!("metadata {step:?}, expected a number")))
}

/// The tensors of an executor's model, which every rank has whole.
fn model_of<'a>(
    layout: &ParameterLayout,
    moments: impl Iterator<Item = &'a String>,
) -> Result<ModelSpec, Error> {
    let spec = |slot: &crate::ParameterSlot| {
        TensorSpec::new(
            slot.path.clone(),
            slot.shape.clone(),
            ShardSpec::Replicated,
            0,
        )
    };
    let trained = layout.slots().iter().map(spec);
    let buffers = layout.buffers().iter().map(|slot| spec(slot).buffer());
    ModelSpec::new(trained.chain(buffers).collect(), moments.cloned())
}
