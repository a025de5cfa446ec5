//! `ZeRO` stage 1: every rank keeps the moments of its shard only.

use std::ops::Range;

use super::{Optimizer, OptimizerConfig, OptimizerState, StepOptions, check_length};
use crate::communicator::{Communicator, shard_range};
use crate::error::Error;

/// An optimizer whose moments are cut over the ranks of a communicator, each rank updating [`shard_range`] of the flat buffer
/// (Rajbhandari et al., "`ZeRO`: memory optimizations toward training trillion parameter models", 2020, section 5.1).
///
/// A step moves as many bytes as an all-reduce of the gradients. Its result has the bits of the unsharded optimizer's for SGD, Adam and `AdamW`; LAMB's and LARS's norms
/// are added in another order, in double precision.
#[derive(Debug, Clone)]
pub struct ShardedOptimizer {
    /// Over the shard; parameters that lie elsewhere are empty ranges.
    shard: Optimizer,
    range: Range<usize>,
    whole: usize,
    rank: usize,
    size: usize,
}

impl ShardedOptimizer {
    /// This rank's part of `optimizer`, with its settings and state.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when `rank` is not in `0..size`.
    pub fn new(optimizer: &Optimizer, rank: usize, size: usize) -> Result<Self, Error> {
        if rank >= size {
            return Err(Error::Invalid {
                what: "rank of a sharded optimizer",
                problem: format!("{rank}, expected 0..{size}"),
            });
        }
        let whole = optimizer.len();
        let range = shard_range(whole, size, rank);
        let local = |at: usize| at.clamp(range.start, range.end) - range.start;
        let parameters: Vec<_> = optimizer
            .parameters
            .iter()
            .map(|p| local(p.start)..local(p.end))
            .collect();
        let mut shard = Optimizer::new(optimizer.config, &parameters)?;
        shard.decayed.clone_from(&optimizer.decayed);
        shard.restore_part(&optimizer.state(), range.clone(), whole)?;
        Ok(Self {
            shard,
            range,
            whole,
            rank,
            size,
        })
    }

    /// The elements of the flat buffer that this rank updates.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The settings.
    pub fn config(&self) -> &OptimizerConfig {
        self.shard.config()
    }

    /// Sums `gradients` over the ranks, updates this rank's shard of `values` and gathers the others': a reduce-scatter and an all-gather.
    ///
    /// # Errors
    ///
    /// When a buffer has the wrong length, `communicator` is of another rank or size, or the communication fails. After a failed communication
    /// the values of this step are incomplete.
    pub fn step(
        &mut self,
        communicator: &dyn Communicator,
        values: &mut [f32],
        gradients: &mut [f32],
        options: StepOptions<'_>,
    ) -> Result<(), Error> {
        self.check(communicator)?;
        check_length("parameter buffer", values.len(), self.whole)?;
        check_length("gradient buffer", gradients.len(), self.whole)?;
        communicator.reduce_scatter_sum(gradients)?;
        self.step_reduced(communicator, values, gradients, options)
    }

    /// [`step`](Self::step) where `gradients` holds the sum already, at least in this rank's [`range`](Self::range).
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub fn step_reduced(
        &mut self,
        communicator: &dyn Communicator,
        values: &mut [f32],
        gradients: &[f32],
        options: StepOptions<'_>,
    ) -> Result<(), Error> {
        self.check(communicator)?;
        check_length("parameter buffer", values.len(), self.whole)?;
        check_length("gradient buffer", gradients.len(), self.whole)?;
        let own = &mut values[self.range.clone()];
        self.shard
            .step_reducing(own, &gradients[self.range.clone()], options, |norms| {
                communicator.all_reduce_sum_f64(norms)
            })?;
        communicator.all_gather(values)
    }

    /// The state of all shards together, the same on every rank.
    ///
    /// # Errors
    ///
    /// When `communicator` is of another rank or size, or the communication fails.
    pub fn state(&self, communicator: &dyn Communicator) -> Result<OptimizerState, Error> {
        self.check(communicator)?;
        let mut state = self.shard.state();
        for moment in state.moments.values_mut() {
            let mut whole = vec![0.0; self.whole];
            whole[self.range.clone()].copy_from_slice(moment);
            communicator.all_gather(&mut whole)?;
            *moment = whole;
        }
        Ok(state)
    }

    /// Continues from this rank's part of a whole state.
    ///
    /// # Errors
    ///
    /// As [`Optimizer::restore`].
    pub fn restore(&mut self, state: &OptimizerState) -> Result<(), Error> {
        self.shard
            .restore_part(state, self.range.clone(), self.whole)
    }

    fn check(&self, communicator: &dyn Communicator) -> Result<(), Error> {
        let (rank, size) = (communicator.rank(), communicator.size());
        if (rank, size) == (self.rank, self.size) {
            return Ok(());
        }
        Err(Error::Invalid {
            what: "communicator of a sharded optimizer",
            problem: format!(
                "rank {rank} of {size}, expected rank {} of {}",
                self.rank, self.size
            ),
        })
    }
}
