//! Schedules as data.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Error;

/// A direction in which a micro-batch passes a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Pass {
    /// From the input to the output.
    Forward,
    /// From the gradient of the output to those of the input and of the weights.
    Backward,
    /// The part of [`Self::Backward`] that the stage before waits for: the gradient of the input.
    BackwardInput,
    /// The rest of [`Self::Backward`]: the gradients of the weights.
    BackwardWeight,
}

/// One pass of one micro-batch through one chunk of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Task {
    /// The pass.
    pub pass: Pass,
    /// Which of the rank's chunks of the model.
    pub chunk: usize,
    /// Which micro-batch.
    pub micro_batch: usize,
}

impl Task {
    /// The pass of a micro-batch through a chunk.
    pub const fn new(pass: Pass, chunk: usize, micro_batch: usize) -> Self {
        Self {
            pass,
            chunk,
            micro_batch,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::BackwardInput => "backward (input)",
            Pass::BackwardWeight => "backward (weights)",
        };
        write!(
            f,
            "{pass} of micro-batch {} through chunk {}",
            self.micro_batch, self.chunk
        )
    }
}

/// The order in which each rank of a pipeline does its tasks.
///
/// # Examples
///
/// ```
/// use iidp::pipeline::{Pass, Schedule};
///
/// let schedule = Schedule::one_forward_one_backward(4, 8)?;
/// // The first stage keeps four micro-batches in flight, the last one.
/// assert_eq!((schedule.peak_in_flight(0), schedule.peak_in_flight(3)), (4, 1));
/// // Forward takes 1, backward 2: the bubble is (p - 1) / (m + p - 1).
/// let timing = schedule.timing(|_, task| if task.pass == Pass::Forward { 1.0 } else { 2.0 }, 0.0)?;
/// assert!((timing.bubble() - 3.0 / 11.0).abs() < 1e-12);
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    pub(super) chunks: usize,
    pub(super) micro_batches: usize,
    pub(super) ranks: Vec<Vec<Task>>,
}

impl Schedule {
    /// A schedule of one's own: `ranks[s]` lists the tasks of rank `s`, each of which holds `chunks` chunks.
    ///
    /// # Errors
    ///
    /// What [`Self::check`] finds.
    pub fn from_tasks(
        chunks: usize,
        micro_batches: usize,
        ranks: Vec<Vec<Task>>,
    ) -> Result<Self, Error> {
        let schedule = Self {
            chunks,
            micro_batches,
            ranks,
        };
        schedule.check()?;
        Ok(schedule)
    }

    /// Number of ranks, `p`.
    pub fn stages(&self) -> usize {
        self.ranks.len()
    }

    /// Chunks of the model per rank, `v`.
    pub const fn chunks(&self) -> usize {
        self.chunks
    }

    /// Number of micro-batches, `m`.
    pub const fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// The tasks of a rank in their order; none for a rank that does not exist.
    pub fn tasks(&self, rank: usize) -> &[Task] {
        self.ranks.get(rank).map_or(&[], Vec::as_slice)
    }

    /// How many forward passes of a rank wait for their backward pass (for its second half, if it is split) at the worst moment: the
    /// activations that the rank must be able to hold, in units of one chunk's activations for one micro-batch.
    pub fn peak_in_flight(&self, rank: usize) -> usize {
        let mut now = 0_usize;
        let mut peak = 0;
        for task in self.tasks(rank) {
            match task.pass {
                Pass::Forward => now += 1,
                Pass::Backward | Pass::BackwardWeight => now = now.saturating_sub(1),
                Pass::BackwardInput => {}
            }
            peak = peak.max(now);
        }
        peak
    }

    /// The tasks that must be done before `task` of `rank` can start, wherever they are done, as `(rank, task)`; `split` says
    /// whether the backward pass of a chunk of a rank is split in two.
    pub(super) fn requirements(
        &self,
        rank: usize,
        task: Task,
        split: impl Fn(usize, Task) -> bool,
    ) -> [Option<(usize, Task)>; 2] {
        let stages = self.stages();
        let Task {
            pass,
            chunk,
            micro_batch,
        } = task;
        let before = if rank > 0 {
            Some((rank - 1, chunk))
        } else {
            chunk.checked_sub(1).map(|chunk| (stages - 1, chunk))
        };
        let after = if rank + 1 < stages {
            Some((rank + 1, chunk))
        } else {
            (chunk + 1 < self.chunks).then_some((0, chunk + 1))
        };
        let own = |pass| Some((rank, Task::new(pass, chunk, micro_batch)));
        match pass {
            Pass::Forward => [
                before.map(|(rank, chunk)| (rank, Task::new(pass, chunk, micro_batch))),
                None,
            ],
            Pass::Backward | Pass::BackwardInput => {
                let from = after.map(|(rank, chunk)| {
                    let whole = Task::new(Pass::Backward, chunk, micro_batch);
                    if split(rank, whole) {
                        (
                            rank,
                            Task {
                                pass: Pass::BackwardInput,
                                ..whole
                            },
                        )
                    } else {
                        (rank, whole)
                    }
                });
                [own(Pass::Forward), from]
            }
            Pass::BackwardWeight => [own(Pass::BackwardInput), None],
        }
    }
}
