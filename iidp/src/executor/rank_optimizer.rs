//! The optimizer of a rank: a whole one, or its shard of one.

use std::ops::Range;

use crate::Error;
use crate::communicator::Communicator;
use crate::optimizer::{Optimizer, OptimizerConfig, OptimizerState, ShardedOptimizer, StepOptions};

/// Updates a rank's copy of the parameters.
#[derive(Debug)]
pub(super) enum RankOptimizer {
    /// Every rank computes the whole update.
    Whole(Optimizer),
    /// Every rank keeps the moments of its shard, updates that, and gathers the others (`ZeRO` stage 1).
    Sharded(ShardedOptimizer),
}

impl RankOptimizer {
    pub(super) fn new(
        config: OptimizerConfig,
        parameters: &[Range<usize>],
        sharded_over: Option<&dyn Communicator>,
    ) -> Result<Self, Error> {
        let whole = config.init(parameters)?;
        Ok(match sharded_over {
            None => Self::Whole(whole),
            Some(ranks) => {
                Self::Sharded(ShardedOptimizer::new(&whole, ranks.rank(), ranks.size())?)
            }
        })
    }

    /// Updates `values` with the reduced gradient. A collective of all ranks if sharded; if that fails `values` are incomplete.
    pub(super) fn step(
        &mut self,
        communicator: &dyn Communicator,
        values: &mut [f32],
        gradient: &[f32],
        options: StepOptions<'_>,
    ) -> Result<(), Error> {
        match self {
            Self::Whole(optimizer) => optimizer.step_with(values, gradient, options),
            Self::Sharded(optimizer) => {
                optimizer.step_reduced(communicator, values, gradient, options)
            }
        }
    }

    /// The whole state. A collective of all ranks if sharded.
    pub(super) fn state(&self, communicator: &dyn Communicator) -> Result<OptimizerState, Error> {
        match self {
            Self::Whole(optimizer) => Ok(optimizer.state()),
            Self::Sharded(optimizer) => optimizer.state(communicator),
        }
    }

    pub(super) fn restore(&mut self, state: &OptimizerState) -> Result<(), Error> {
        match self {
            Self::Whole(optimizer) => optimizer.restore(state),
            Self::Sharded(optimizer) => optimizer.restore(state),
        }
    }
}
