//! Which samples come next: every sample exactly once per epoch, whatever batches and layouts they are cut into.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::executor::mix;
use crate::permutation::Permutation;

/// What happens when an epoch has fewer samples left than a batch asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LastBatch {
    /// The batch is filled up from the next epoch: all batches are full, and every sample is still drawn once per epoch.
    #[default]
    Fill,
    /// The batch is short: it holds what the epoch has left.
    Short,
    /// What the epoch has left is skipped; these samples are not drawn in this epoch.
    Skip,
}

/// Draws samples `0..n` in a seeded order, a new one each epoch, on any number of ranks.
///
/// The order is a function of the seed, the epoch and the position in it, computed in constant memory (a Feistel permutation of the positions). Batches are cut from
/// it one after the other, so their sizes and the layout that computes them may change at every step: the samples stay in the same order and none is
/// missed or repeated. Every rank may keep a sampler of its own and draw only its part of each batch
/// ([`take_shard`](Self::take_shard)).
///
/// The sampler is its own state: copy or serialise it to resume at exactly the next sample.
///
/// # Examples
///
/// ```
/// use iidp::ShardedSampler;
///
/// let mut sampler = ShardedSampler::new(10, 42)?;
/// let mut epoch = [sampler.take(4)?, sampler.take(1)?, sampler.take(5)?].concat();
/// epoch.sort();
/// assert_eq!(epoch, Vec::from_iter(0..10));
/// assert_eq!((sampler.epoch(), sampler.offset()), (1, 0));
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "State", into = "State")]
pub struct ShardedSampler {
    state: State,
    /// The order of the current epoch.
    order: Permutation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename = "ShardedSampler")]
struct State {
    samples: u64,
    seed: u64,
    last_batch: LastBatch,
    epoch: u64,
    offset: u64,
}

impl ShardedSampler {
    /// A sampler of `0..samples`, at the start of epoch 0, that fills batches up across epochs.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when there are no samples.
    pub fn new(samples: u64, seed: u64) -> Result<Self, Error> {
        State {
            samples,
            seed,
            last_batch: LastBatch::default(),
            epoch: 0,
            offset: 0,
        }
        .try_into()
    }

    /// Sets what happens at the end of an epoch.
    #[must_use]
    pub const fn with_last_batch(mut self, last_batch: LastBatch) -> Self {
        self.state.last_batch = last_batch;
        self
    }

    /// Number of samples.
    pub const fn samples(&self) -> u64 {
        self.state.samples
    }

    /// The epoch that the next sample belongs to, unless the policy skips the rest of it.
    pub const fn epoch(&self) -> u64 {
        self.state.epoch
    }

    /// Samples of this epoch that have been drawn.
    pub const fn offset(&self) -> u64 {
        self.state.offset
    }

    /// Samples that the epoch has left.
    pub const fn remaining(&self) -> u64 {
        self.state.samples - self.state.offset
    }

    /// Continues at sample `offset` of `epoch`.
    ///
    /// Computes in O(1).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the epoch has no such sample.
    pub fn seek(&mut self, epoch: u64, offset: u64) -> Result<(), Error> {
        *self = State {
            epoch,
            offset,
            ..self.state
        }
        .try_into()?;
        Ok(())
    }

    /// The sample at `offset` of `epoch`, without moving.
    ///
    /// Computes in O(1).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the epoch has no such sample.
    pub fn at(&self, epoch: u64, offset: u64) -> Result<u64, Error> {
        let there = Self::try_from(State {
            epoch,
            offset,
            ..self.state
        })?;
        Ok(there.order.apply(offset))
    }

    /// Draws the next batch.
    ///
    /// It has `batch` samples, or fewer at the end of an epoch under [`LastBatch::Short`]. Computes in O(`batch`).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an empty batch, and under [`LastBatch::Skip`] for one that no epoch can fill; the sampler is as it was then.
    pub fn take(&mut self, batch: usize) -> Result<Vec<u64>, Error> {
        self.take_shard(batch, 0..batch)
    }

    /// Draws the next batch like [`take`](Self::take), but returns only the samples at positions `shard` of it, those of one rank.
    ///
    /// Of a short batch only the positions that exist are returned. Computes in O(length of `shard`).
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take), and [`Error::Invalid`] for a shard that is not part of the batch.
    pub fn take_shard(&mut self, batch: usize, shard: Range<usize>) -> Result<Vec<u64>, Error> {
        let samples = self.state.samples;
        if batch == 0 {
            return Err(Error::Invalid {
                what: "batch",
                problem: "0 samples, expected at least 1".into(),
            });
        }
        if shard.start > shard.end || shard.end > batch {
            let problem = format!(
                "{}..{}, expected a part of 0..{batch}",
                shard.start, shard.end
            );
            return Err(Error::Invalid {
                what: "shard of a batch",
                problem,
            });
        }
        let mut length = batch as u64;
        match self.state.last_batch {
            LastBatch::Short => length = length.min(self.remaining()),
            LastBatch::Skip if length > samples => {
                let problem = format!(
                    "{batch} samples, expected at most the {samples} of an epoch, since partial batches are skipped"
                );
                return Err(Error::Invalid {
                    what: "batch",
                    problem,
                });
            }
            LastBatch::Skip if length > self.remaining() => self.jump(self.remaining()),
            LastBatch::Skip | LastBatch::Fill => {}
        }
        let (start, end) = (
            (shard.start as u64).min(length),
            (shard.end as u64).min(length),
        );
        let mut at = *self;
        at.jump(start);
        let drawn = (start..end)
            .map(|_| {
                let sample = at.order.apply(at.state.offset);
                at.jump(1);
                sample
            })
            .collect();
        self.jump(length);
        Ok(drawn)
    }

    /// Moves on by `count` samples.
    fn jump(&mut self, count: u64) {
        let remaining = self.remaining();
        if count < remaining {
            self.state.offset += count;
        } else {
            let rest = count - remaining;
            self.state.epoch = self.state.epoch.wrapping_add(1 + rest / self.state.samples);
            self.state.offset = rest % self.state.samples;
            self.order = self.state.order();
        }
    }
}

impl State {
    fn order(&self) -> Permutation {
        // Mixed one after the other: neighbouring seeds and epochs have unrelated orders.
        Permutation::new(self.samples, mix(mix(self.seed) ^ self.epoch))
    }
}

impl TryFrom<State> for ShardedSampler {
    type Error = Error;

    fn try_from(state: State) -> Result<Self, Error> {
        if state.samples == 0 {
            return Err(Error::Invalid {
                what: "sampler",
                problem: "0 samples, expected at least 1".into(),
            });
        }
        if state.offset >= state.samples {
            let problem = format!("sample {} of an epoch of {}", state.offset, state.samples);
            return Err(Error::Invalid {
                what: "position of a sampler",
                problem,
            });
        }
        Ok(Self {
            state,
            order: state.order(),
        })
    }
}

impl From<ShardedSampler> for State {
    fn from(sampler: ShardedSampler) -> Self {
        sampler.state
    }
}
