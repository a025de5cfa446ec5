//! The similarity of SimiGrad itself: the cosine of the mean gradients of two halves of the batch.

use crate::error::{Error, Result};
use crate::fused::check_len;
use crate::layout::Shard;

/// The accumulator of the second half of the batch, for comparison with SimiGrad and JABAS.
///
/// Micro-batches with an odd index go here, those with an even index into the usual accumulator. After both were summed
/// over the replicas, [`GradientMeter::summed_halves`](crate::GradientMeter::summed_halves) takes the cosine and joins them.
/// This is the measure that costs a second copy of the gradient (and its all-reduce); the
/// pairwise similarity of the micro-batches has the same expectation once solved for the noise scale, a smaller variance,
/// and no copy.
///
/// # Examples
/// ```
/// use adaptive_batch::{HalfSplit, MeterConfig, MicroBatch, Shard};
/// let shards = [Shard::new("all", 2)];
/// let mut meter = MeterConfig::new(shards.clone()).build()?;
/// let mut halves = HalfSplit::new(&shards);
/// let mut first = [0.0f32; 2];
/// for (index, grad) in [[1.0f32, 0.0], [1.0, 1.0]].into_iter().enumerate() {
///     let micro_batch = MicroBatch { index: index as u64, samples: 4 };
///     let acc = halves.accumulator(0, micro_batch.index, &mut first)?;
///     meter.accumulate(0, micro_batch, acc, &grad)?;
/// }
/// meter.summed_halves(0, &mut first, &halves)?;
/// assert_eq!(first, [2.0, 1.0]);
/// let estimate = meter.finish()?.estimate()?;
/// assert!((estimate.half_cosine - 0.5f64.sqrt()).abs() < 1e-12);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct HalfSplit {
    second: Vec<Vec<f32>>,
}

impl HalfSplit {
    /// One zeroed buffer per shard.
    pub fn new(shards: &[Shard]) -> Self {
        Self {
            second: shards.iter().map(|shard| vec![0.0; shard.len()]).collect(),
        }
    }

    /// The accumulator that micro-batch `index` of the shard belongs into: `first` or this buffer.
    ///
    /// # Errors
    /// [`Error::UnknownShard`], [`Error::Length`] for a `first` of another length.
    pub fn accumulator<'a>(
        &'a mut self,
        shard: usize,
        index: u64,
        first: &'a mut [f32],
    ) -> Result<&'a mut [f32]> {
        let second = self.second_mut(shard)?;
        check_len("accumulator of the first half", second.len(), first.len())?;
        Ok(if index.is_multiple_of(2) {
            first
        } else {
            second
        })
    }

    /// The buffer of a shard, to be summed over the replicas.
    ///
    /// # Errors
    /// [`Error::UnknownShard`].
    pub fn second(&self, shard: usize) -> Result<&[f32]> {
        let shards = self.second.len();
        self.second
            .get(shard)
            .map(Vec::as_slice)
            .ok_or(Error::UnknownShard { shard, shards })
    }

    /// The same, mutable.
    ///
    /// # Errors
    /// [`Error::UnknownShard`].
    pub fn second_mut(&mut self, shard: usize) -> Result<&mut [f32]> {
        let shards = self.second.len();
        self.second
            .get_mut(shard)
            .map(Vec::as_mut_slice)
            .ok_or(Error::UnknownShard { shard, shards })
    }

    /// Zeroes the buffers for the next step.
    pub fn clear(&mut self) {
        for second in &mut self.second {
            second.fill(0.0);
        }
    }
}
