//! Everything that a run needs to go on elsewhere.

use serde::{Deserialize, Serialize};

use crate::optimizer::OptimizerState;
use crate::{Error, ParameterLayout};

/// Parameters, buffers, optimizer state and step number of a run. It does not depend on the layout that it was exported from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExecutorState {
    /// Steps taken.
    pub step: u64,
    /// Trainable tensors, flattened in the order of [`ParameterLayout::slots`].
    pub parameters: Vec<f32>,
    /// Frozen tensors and running statistics, in the order of [`ParameterLayout::buffers`].
    pub buffers: Vec<f32>,
    /// The optimizer's moments and counters.
    pub optimizer: OptimizerState,
}

impl ExecutorState {
    pub(super) fn check(&self, layout: &ParameterLayout) -> Result<(), Error> {
        for (what, got, expected) in [
            (
                "parameters of the state",
                self.parameters.len(),
                layout.len(),
            ),
            (
                "buffers of the state",
                self.buffers.len(),
                layout.buffer_len(),
            ),
        ] {
            if got != expected {
                return Err(Error::LengthMismatch {
                    what: what.to_owned(),
                    got,
                    expected,
                });
            }
        }
        Ok(())
    }
}
