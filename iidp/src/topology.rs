//! Ranks, their place in the mesh, and how much each of them does in a step.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Error;

/// What one rank (one logical device) does in a step: `virtual_workers` workers, each of which computes
/// `accumulation_steps` micro-batches of `local_batch` samples.
///
/// Source: JABAS (`EuroSys` 2025), independent and identical data parallelism: every worker uses the same local
/// batch, and unequal devices differ in how many workers and micro-batches they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerLayout {
    /// Samples in one micro-batch.
    pub local_batch: usize,
    /// Replicas that run side by side on the device.
    pub virtual_workers: usize,
    /// Micro-batches that each replica computes before the update.
    pub accumulation_steps: usize,
}

impl WorkerLayout {
    /// `virtual_workers` replicas, each computing `accumulation_steps` micro-batches of `local_batch` samples.
    pub const fn new(
        local_batch: usize,
        virtual_workers: usize,
        accumulation_steps: usize,
    ) -> Self {
        Self {
            local_batch,
            virtual_workers,
            accumulation_steps,
        }
    }

    /// Micro-batches per step.
    pub const fn micro_batches(&self) -> usize {
        self.virtual_workers * self.accumulation_steps
    }

    /// Samples per step.
    pub const fn samples(&self) -> usize {
        self.local_batch * self.micro_batches()
    }
}

/// The sizes of the mesh of ranks: data parallel x pipeline parallel x tensor parallel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ParallelDims {
    /// Replicas of the model.
    pub dp: usize,
    /// Ranks that share each layer.
    pub tp: usize,
    /// Stages into which the layers are cut.
    pub pp: usize,
}

impl ParallelDims {
    /// A mesh of `dp` x `tp` x `pp` ranks.
    pub const fn new(dp: usize, tp: usize, pp: usize) -> Self {
        Self { dp, tp, pp }
    }

    /// Number of ranks.
    pub const fn world_size(&self) -> usize {
        self.dp * self.tp * self.pp
    }
}

/// A rank's place in the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Coordinates {
    /// Which replica of the model.
    pub dp: usize,
    /// Which stage.
    pub pp: usize,
    /// Which shard of each layer.
    pub tp: usize,
}

/// The mesh of ranks. Ranks are numbered with the tensor-parallel coordinate running fastest, then the stage,
/// then the replica, so that the ranks that talk most are neighbours.
///
/// # Examples
///
/// ```
/// use iidp::{ParallelDims, Topology};
///
/// let mesh = Topology::new(ParallelDims::new(2, 2, 3), 12)?;
/// let at = mesh.coordinates(7)?;
/// assert_eq!((at.dp, at.pp, at.tp), (1, 0, 1));
/// assert_eq!(mesh.rank(at), 7);
/// assert_eq!(mesh.data_parallel_group(7)?, vec![1, 7]);
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    dims: ParallelDims,
}

impl Topology {
    /// A mesh over exactly `world_size` ranks.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTopology`] if a dimension is zero or the product is not `world_size`.
    pub fn new(dims: ParallelDims, world_size: usize) -> Result<Self, Error> {
        let product = dims
            .dp
            .checked_mul(dims.tp)
            .and_then(|x| x.checked_mul(dims.pp));
        if product != Some(world_size) || world_size == 0 {
            return Err(Error::InvalidTopology {
                dp: dims.dp,
                tp: dims.tp,
                pp: dims.pp,
                world_size,
            });
        }
        Ok(Self { dims })
    }

    /// The sizes of the mesh.
    pub const fn dims(&self) -> ParallelDims {
        self.dims
    }

    /// Number of ranks.
    pub const fn world_size(&self) -> usize {
        self.dims.world_size()
    }

    /// The place of `rank`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRank`] if the mesh is smaller.
    pub fn coordinates(&self, rank: usize) -> Result<Coordinates, Error> {
        if rank >= self.world_size() {
            return Err(Error::NoSuchRank {
                rank,
                size: self.world_size(),
            });
        }
        let ParallelDims { tp, pp, .. } = self.dims;
        Ok(Coordinates {
            tp: rank % tp,
            pp: rank / tp % pp,
            dp: rank / (tp * pp),
        })
    }

    /// The rank at a place. Coordinates outside of the mesh give a rank outside of the world.
    pub const fn rank(&self, at: Coordinates) -> usize {
        (at.dp * self.dims.pp + at.pp) * self.dims.tp + at.tp
    }

    /// The ranks that hold the same part of the model as `rank`, and so sum their gradients, by replica.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRank`] if the mesh is smaller.
    pub fn data_parallel_group(&self, rank: usize) -> Result<Vec<usize>, Error> {
        let at = self.coordinates(rank)?;
        Ok((0..self.dims.dp)
            .map(|dp| self.rank(Coordinates { dp, ..at }))
            .collect())
    }

    /// The ranks that share the layers of `rank`'s stage, by shard.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRank`] if the mesh is smaller.
    pub fn tensor_parallel_group(&self, rank: usize) -> Result<Vec<usize>, Error> {
        let at = self.coordinates(rank)?;
        Ok((0..self.dims.tp)
            .map(|tp| self.rank(Coordinates { tp, ..at }))
            .collect())
    }

    /// The ranks through which a micro-batch of `rank`'s replica passes, by stage.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRank`] if the mesh is smaller.
    pub fn pipeline_group(&self, rank: usize) -> Result<Vec<usize>, Error> {
        let at = self.coordinates(rank)?;
        Ok((0..self.dims.pp)
            .map(|pp| self.rank(Coordinates { pp, ..at }))
            .collect())
    }
}

/// Which micro-batches of the global batch each rank computes: rank r takes a contiguous run of
/// `virtual_workers x accumulation_steps` of them, in rank order.
///
/// Micro-batch `m` is samples `m x local_batch .. (m + 1) x local_batch` of the global batch, whatever the layout.
/// This is what makes a step independent of the layout: the same micro-batches exist, only their places differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BatchPlan {
    pub(crate) local_batch: usize,
    /// Micro-batches per rank, by rank.
    pub(crate) per_rank: Vec<Range<usize>>,
}

impl BatchPlan {
    pub(crate) fn of(layouts: &[WorkerLayout]) -> Result<Self, Error> {
        let first = layouts.first().ok_or(Error::NoDevices)?;
        let mut per_rank = Vec::with_capacity(layouts.len());
        let mut next = 0;
        for (rank, layout) in layouts.iter().enumerate() {
            for (field, value) in [
                ("local_batch", layout.local_batch),
                ("virtual_workers", layout.virtual_workers),
                ("accumulation_steps", layout.accumulation_steps),
            ] {
                if value == 0 {
                    return Err(Error::ZeroInLayout { rank, field });
                }
            }
            if layout.local_batch != first.local_batch {
                return Err(Error::UnequalLocalBatch {
                    rank,
                    local_batch: layout.local_batch,
                    expected: first.local_batch,
                });
            }
            // Far above anything that can run, and far below what overflows.
            let end = (layout.virtual_workers)
                .checked_mul(layout.accumulation_steps)
                .and_then(|own| own.checked_add(next))
                .filter(|end| end.checked_mul(layout.local_batch).is_some())
                .ok_or_else(|| Error::Invalid {
                    what: "worker layouts",
                    problem: format!(
                        "the global batch overflows at rank {rank}, expected fewer samples"
                    ),
                })?;
            per_rank.push(next..end);
            next = end;
        }
        Ok(Self {
            local_batch: first.local_batch,
            per_rank,
        })
    }

    pub(crate) fn micro_batches(&self) -> usize {
        self.per_rank.last().map_or(0, |last| last.end)
    }

    pub(crate) fn global_batch(&self) -> usize {
        self.micro_batches() * self.local_batch
    }

    /// Samples of micro-batch `m` in a batch of `len` samples. Empty beyond the end of a partial batch.
    pub(crate) fn samples(&self, m: usize, len: usize) -> Range<usize> {
        let start = (m * self.local_batch).min(len);
        start..(start + self.local_batch).min(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_partition_the_mesh() {
        for (dp, tp, pp) in [(1, 1, 1), (2, 3, 4), (5, 1, 2), (1, 4, 1)] {
            let mesh = Topology::new(ParallelDims::new(dp, tp, pp), dp * tp * pp).unwrap();
            for rank in 0..mesh.world_size() {
                let at = mesh.coordinates(rank).unwrap();
                assert_eq!(mesh.rank(at), rank);
                for (group, size) in [
                    (mesh.data_parallel_group(rank).unwrap(), dp),
                    (mesh.tensor_parallel_group(rank).unwrap(), tp),
                    (mesh.pipeline_group(rank).unwrap(), pp),
                ] {
                    assert_eq!(group.len(), size);
                    assert!(group.contains(&rank));
                    assert!(group.windows(2).all(|w| w[0] < w[1]));
                }
            }
        }
    }

    #[test]
    fn refuses_a_mesh_of_another_size() {
        assert!(matches!(
            Topology::new(ParallelDims::new(2, 2, 2), 7),
            Err(Error::InvalidTopology { world_size: 7, .. })
        ));
        assert!(Topology::new(ParallelDims::new(0, 1, 1), 0).is_err());
        assert!(Topology::new(ParallelDims::new(usize::MAX, 2, 1), 4).is_err());
        let mesh = Topology::new(ParallelDims::new(2, 1, 1), 2).unwrap();
        assert!(matches!(
            mesh.coordinates(2),
            Err(Error::NoSuchRank { rank: 2, size: 2 })
        ));
    }

    #[test]
    fn a_plan_covers_the_batch_in_order() {
        let plan =
            BatchPlan::of(&[WorkerLayout::new(3, 2, 1), WorkerLayout::new(3, 1, 3)]).unwrap();
        assert_eq!(plan.per_rank, [0..2, 2..5]);
        assert_eq!(plan.global_batch(), 15);
        assert_eq!(plan.samples(4, 15), 12..15);
        assert_eq!(plan.samples(3, 10), 9..10);
        assert!(plan.samples(4, 10).is_empty());
    }

    #[test]
    fn refuses_layouts_that_cannot_be() {
        for layout in [
            WorkerLayout::new(1, usize::MAX, 2),
            WorkerLayout::new(usize::MAX, 1, 2),
        ] {
            assert_eq!(
                BatchPlan::of(&[layout]).unwrap_err().to_string(),
                "worker layouts: the global batch overflows at rank 0, expected fewer samples"
            );
        }
        assert!(matches!(BatchPlan::of(&[]), Err(Error::NoDevices)));
        assert!(matches!(
            BatchPlan::of(&[WorkerLayout::new(1, 0, 1)]),
            Err(Error::ZeroInLayout {
                rank: 0,
                field: "virtual_workers"
            })
        ));
        assert!(matches!(
            BatchPlan::of(&[WorkerLayout::new(4, 1, 1), WorkerLayout::new(2, 1, 1)]),
            Err(Error::UnequalLocalBatch {
                rank: 1,
                local_batch: 2,
                expected: 4
            })
        ));
    }
}
