//! Who sees each micro-batch's gradient on its way into the accumulator.

use std::fmt;

use crate::communicator::Communicator;
use crate::{BoxError, GradientBucket, ParameterLayout, WorkerLayout};

/// Which slice of which micro-batch's gradient is being accumulated.
#[derive(Debug, Clone, Copy)]
pub struct MicroBatchRef {
    /// Position of the micro-batch in the global batch.
    pub micro_batch: usize,
    /// Samples in the micro-batch.
    pub samples: usize,
    /// Samples in the global batch.
    pub global_batch: usize,
    /// What the gradient is multiplied with: `samples / global_batch`. The gradient is that of the micro-batch's mean loss.
    pub weight: f32,
    /// Index of the bucket.
    pub bucket: usize,
    /// Index of the parameter's slot in the layout.
    pub slot: usize,
    /// First element of the slice in the flat gradient.
    pub offset: usize,
}

/// What an observer's factory is told about the rank that the observer is for.
#[derive(Debug)]
pub struct ObserverContext<'a> {
    /// The rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// What the rank does in a step.
    pub layout: WorkerLayout,
    /// Where each parameter lies in the flat gradient.
    pub parameters: &'a ParameterLayout,
}

/// Sees the gradients of a rank. One observer per rank, called on the rank's thread only.
///
/// The calls of a step are: [`accumulate`](Self::accumulate) for each slice of each micro-batch of the rank (for each slice the micro-batches come in order; the
/// slices of a micro-batch come in order of offset, except with overlap, where those of each worker's last micro-batches come as they are computed), [`reduced`](Self::reduced) for each bucket, [`gather`](Self::gather), and then
/// either [`committed`](Self::committed) or [`discarded`](Self::discarded). Results travel to the caller of the step through
/// whatever the factory lets the observer share (an `Arc<Mutex<..>>`, a channel).
///
/// An error of an observer ends the step on every rank.
pub trait MicroBatchObserver: Send {
    /// The accumulation pass: adds `at.weight` times `gradient` to `accumulator`. An observer that measures the
    /// gradient overrides this and does both in one pass; what it leaves in `accumulator` is what is reduced and applied.
    ///
    /// The two slices have the same length. A slice that a micro-batch does not use is not passed: its gradient is zero.
    ///
    /// # Errors
    ///
    /// The observer's own.
    fn accumulate(
        &mut self,
        at: &MicroBatchRef,
        accumulator: &mut [f32],
        gradient: &[f32],
    ) -> Result<(), BoxError> {
        accumulate_weighted(accumulator, gradient, at.weight);
        Ok(())
    }

    /// The gradient of `bucket`, summed over all ranks: the gradient of the global batch's mean loss, before clipping.
    ///
    /// # Errors
    ///
    /// The observer's own.
    fn reduced(&mut self, bucket: &GradientBucket, gradient: &[f32]) -> Result<(), BoxError> {
        let _ = (bucket, gradient);
        Ok(())
    }

    /// Exchanges what was measured with the other ranks' observers. Every rank calls it once per step, after all
    /// buckets were reduced, so collectives match if all observers do the same.
    ///
    /// # Errors
    ///
    /// The observer's own, or the communicator's.
    fn gather(&mut self, communicator: &dyn Communicator) -> Result<(), BoxError> {
        let _ = communicator;
        Ok(())
    }

    /// Every rank agreed that the step is good, and this rank has updated its parameters.
    fn committed(&mut self) {}

    /// The step was rolled back: forget what was measured in it.
    fn discarded(&mut self) {}
}

/// `accumulator += weight x gradient`, element by element. Computes in one pass over both.
pub fn accumulate_weighted(accumulator: &mut [f32], gradient: &[f32], weight: f32) {
    for (sum, g) in accumulator.iter_mut().zip(gradient) {
        *sum += weight * g;
    }
}

/// The observer of those who observe nothing: only accumulates.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainAccumulation;

impl MicroBatchObserver for PlainAccumulation {}

/// Makes the observer of each rank.
pub(crate) type ObserverFactory =
    Box<dyn FnMut(&ObserverContext<'_>) -> Box<dyn MicroBatchObserver> + Send>;

/// `dyn MicroBatchObserver` and factories have no `Debug` of their own.
pub(crate) struct Opaque<T>(pub(crate) T);

impl<T> fmt::Debug for Opaque<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}
