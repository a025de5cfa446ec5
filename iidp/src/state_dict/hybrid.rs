//! The state of a [`HybridExecutor`](crate::HybridExecutor) by name.

use std::collections::BTreeMap;

use super::executor::{STEP, steps_taken};
use super::{OPTIMIZER, StateDict, StateTensor, mismatch};
use crate::Error;
use crate::hybrid::{HybridState, ParameterState};

impl StateDict {
    /// The [`state`](crate::HybridExecutor::state) of a hybrid executor. The steps taken go to the metadata, as `step`.
    pub fn from_hybrid(state: &HybridState) -> Self {
        let mut dict = Self::default();
        dict.metadata.insert(STEP.into(), state.step.to_string());
        for (name, parameter) in state.parameters.iter().chain(&state.buffers) {
            let tensor = StateTensor {
                shape: parameter.shape.clone(),
                values: parameter.values.clone(),
            };
            dict.tensors.insert(name.clone(), tensor);
        }
        for (name, parameter) in &state.parameters {
            dict.steps.insert(name.clone(), parameter.updates);
            for (moment, values) in &parameter.moments {
                let by_name = dict.moments.entry(moment.clone()).or_default();
                by_name.insert(name.clone(), values.clone());
            }
        }
        dict
    }

    /// What a hybrid executor can [`restore`](crate::HybridExecutor::restore), which checks names and shapes against its model. Tensors whose updates are counted are
    /// parameters, the others buffers.
    ///
    /// # Errors
    ///
    /// [`Error::StateTensor`] for a parameter without one of the moments, and when the metadata have no `step`.
    pub fn to_hybrid(&self) -> Result<HybridState, Error> {
        let mut state = HybridState {
            step: steps_taken(self)?,
            ..HybridState::default()
        };
        for (name, tensor) in &self.tensors {
            let mut parameter = ParameterState {
                shape: tensor.shape.clone(),
                values: tensor.values.clone(),
                moments: BTreeMap::new(),
                updates: 0,
            };
            let Some(updates) = self.steps.get(name) else {
                state.buffers.insert(name.clone(), parameter);
                continue;
            };
            parameter.updates = *updates;
            for (moment, by_name) in &self.moments {
                let values = by_name.get(name).ok_or_else(|| {
                    mismatch(&format!("{OPTIMIZER}{moment}.{name}"), "missing".into())
                })?;
                parameter.moments.insert(moment.clone(), values.clone());
            }
            state.parameters.insert(name.clone(), parameter);
        }
        Ok(state)
    }
}
