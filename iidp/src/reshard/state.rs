//! What one rank holds, in flat buffers.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::layout::{Component, StateLayout};
use crate::Error;
use crate::optimizer::OptimizerState;

/// The state of one rank: its part of the parameters, of the other tensors and of the optimizer's moments, as its
/// [`RankLayout`](super::RankLayout) orders them.
///
/// Buffers are shared, not copied, when the state is cloned; a buffer that re-sharding leaves as it is passes from the old state to the new.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RankState {
    /// Trained tensors, one after the other.
    pub parameters: Arc<Vec<f32>>,
    /// Frozen tensors and running statistics.
    pub buffers: Arc<Vec<f32>>,
    /// The optimizer's moments by name, each for the part of `parameters` whose moments this rank keeps.
    pub moments: BTreeMap<String, Arc<Vec<f32>>>,
    /// Updates of each trained tensor.
    pub steps: Vec<u64>,
}

impl RankState {
    /// A state without moments and with no steps counted.
    pub fn new(parameters: Vec<f32>, buffers: Vec<f32>) -> Self {
        Self {
            parameters: Arc::new(parameters),
            buffers: Arc::new(buffers),
            ..Self::default()
        }
    }

    /// With the number of updates of each trained tensor.
    #[must_use]
    pub fn with_steps(mut self, steps: Vec<u64>) -> Self {
        self.steps = steps;
        self
    }

    /// With a moment.
    #[must_use]
    pub fn with_moment(mut self, name: impl Into<String>, values: Vec<f32>) -> Self {
        self.moments.insert(name.into(), Arc::new(values));
        self
    }

    /// With what an optimizer remembers of this rank's parameters.
    #[must_use]
    pub fn with_optimizer(mut self, state: OptimizerState) -> Self {
        self.steps = state.steps;
        self.moments = state
            .moments
            .into_iter()
            .map(|(name, values)| (name, Arc::new(values)))
            .collect();
        self
    }

    /// What an optimizer of this rank's parameters has to remember. O(moments).
    pub fn optimizer(&self) -> OptimizerState {
        OptimizerState {
            steps: self.steps.clone(),
            moments: self
                .moments
                .iter()
                .map(|(name, values)| (name.clone(), values.as_ref().clone()))
                .collect(),
        }
    }

    /// Checks that this is the state of `rank` under `layout`.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] for a buffer of another length, [`Error::Invalid`] for other moments than the model's.
    pub fn check(&self, layout: &StateLayout, rank: usize) -> Result<(), Error> {
        let length = |what: &str, got: usize, expected: usize| {
            if got == expected {
                return Ok(());
            }
            Err(Error::LengthMismatch {
                what: format!("{what} of rank {rank}"),
                got,
                expected,
            })
        };
        length(
            "parameters",
            self.parameters.len(),
            layout.trained_elements(rank),
        )?;
        length("buffers", self.buffers.len(), layout.buffer_elements(rank))?;
        length(
            "step counts",
            self.steps.len(),
            layout.trained_tensors(rank).count(),
        )?;
        let expected = layout.moment_elements(rank);
        let names = layout.model().moments();
        // A rank that holds nothing need not name the moments.
        let none = expected == 0 && self.moments.is_empty();
        if !none && !self.moments.keys().eq(names) {
            return Err(Error::Invalid {
                what: "moments of a rank",
                problem: format!(
                    "rank {rank} has {:?}, expected {names:?}",
                    self.moments.keys().collect::<Vec<_>>()
                ),
            });
        }
        for (name, values) in &self.moments {
            length(name, values.len(), expected)?;
        }
        Ok(())
    }

    /// The buffers in the order of [`buffers_of`].
    pub(super) fn slices(&self) -> Vec<&Arc<Vec<f32>>> {
        let moments = self.moments.values();
        [&self.parameters, &self.buffers]
            .into_iter()
            .chain(moments)
            .collect()
    }

    /// The state of these buffers, in the order of [`buffers_of`].
    pub(super) fn from_buffers(
        buffers: Vec<Arc<Vec<f32>>>,
        names: &[String],
        steps: Vec<u64>,
    ) -> Self {
        let mut buffers = buffers.into_iter();
        Self {
            parameters: buffers.next().unwrap_or_default(),
            buffers: buffers.next().unwrap_or_default(),
            moments: names.iter().cloned().zip(buffers).collect(),
            steps,
        }
    }
}

/// Positions of a component's buffers among all buffers of a rank: parameters, the other tensors, then each moment.
pub(super) fn buffers_of(component: Component, moments: usize) -> std::ops::Range<usize> {
    match component {
        Component::Parameters => 0..1,
        Component::Buffers => 1..2,
        Component::Moments => 2..2 + moments,
    }
}
