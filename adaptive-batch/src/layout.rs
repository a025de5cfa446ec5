//! What a rank holds of the gradient, and who counts what several ranks hold.
//!
//! A *replica* is a whole copy of the model; data parallelism runs several. Within a replica, tensor parallelism cuts
//! layers and pipeline parallelism assigns them to stages. What one rank holds comes in *shards* (the buckets in which an
//! executor accumulates and reduces), and a shard may be divided into parameter ranges with an owner rule each.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, require};

/// Where a rank stands: which replica, and which tensor-parallel rank and pipeline stage within it.
///
/// `ZeRO` needs no coordinate of its own: its partitions lie over the replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SavedPlacement")]
pub struct Placement {
    replica: usize,
    replicas: usize,
    tensor: usize,
    stage: usize,
}

/// The fields as they are stored, before they are checked.
#[derive(Deserialize)]
struct SavedPlacement {
    replica: usize,
    replicas: usize,
    tensor: usize,
    stage: usize,
}

impl TryFrom<SavedPlacement> for Placement {
    type Error = Error;

    fn try_from(s: SavedPlacement) -> Result<Self> {
        Ok(Self::data_parallel(s.replica, s.replicas)?.at(s.tensor, s.stage))
    }
}

impl Placement {
    /// A rank that holds the whole model, the only one.
    pub const fn single() -> Self {
        Self {
            replica: 0,
            replicas: 1,
            tensor: 0,
            stage: 0,
        }
    }

    /// A rank that holds the whole model, one of `replicas`.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless `replica < replicas`.
    pub fn data_parallel(replica: usize, replicas: usize) -> Result<Self> {
        require(
            replica < replicas,
            "replica",
            "less than the number of replicas",
            format!("{replica} of {replicas}"),
        )?;
        Ok(Self {
            replica,
            replicas,
            tensor: 0,
            stage: 0,
        })
    }

    /// The same replica, at tensor-parallel rank `tensor` of pipeline stage `stage`.
    #[must_use]
    pub const fn at(self, tensor: usize, stage: usize) -> Self {
        Self {
            tensor,
            stage,
            ..self
        }
    }

    /// Index of the replica.
    pub const fn replica(self) -> usize {
        self.replica
    }

    /// Number of replicas.
    pub const fn replicas(self) -> usize {
        self.replicas
    }

    /// Exactly one rank of each replica reports what belongs to the replica as a whole (micro-batches, samples).
    pub(crate) const fn leads_replica(self) -> bool {
        self.tensor == 0 && self.stage == 0
    }
}

/// Which rank of a replica counts a parameter range that several of them may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OwnerRule {
    /// No other rank of the replica holds these elements: whoever holds them counts them.
    #[default]
    Partitioned,
    /// All tensor-parallel ranks of the stage hold the same elements (norms, biases after row-parallel layers):
    /// tensor rank 0 counts them. With sequence parallelism reduce such gradients over the tensor-parallel ranks first.
    ReplicatedOverTensor,
    /// Several stages hold the same elements (tied embeddings): the stage named here counts them. Its gradient must be
    /// the sum over the stages that use the parameter; where that sum is only formed for the whole batch, use
    /// [`Excluded`](Self::Excluded): the squared norm of a sum cannot be had from its parts.
    TiedOverStages {
        /// The stage that counts.
        owner: usize,
    },
    /// Both at once: tensor rank 0 of the stage named here counts them.
    ReplicatedAndTied {
        /// The stage that counts.
        owner: usize,
    },
    /// Nobody counts them: they are accumulated and left out of all statistics.
    Excluded,
}

impl OwnerRule {
    /// Whether the rank at `placement` counts the elements under this rule.
    pub const fn counts_at(self, placement: Placement) -> bool {
        match self {
            Self::Partitioned => true,
            Self::ReplicatedOverTensor => placement.tensor == 0,
            Self::TiedOverStages { owner } => placement.stage == owner,
            Self::ReplicatedAndTied { owner } => placement.tensor == 0 && placement.stage == owner,
            Self::Excluded => false,
        }
    }
}

/// One parameter's elements within a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ParameterRange {
    name: String,
    range: Range<usize>,
    owner: OwnerRule,
}

/// A contiguous piece of this rank's gradient, for instance one bucket of the all-reduce.
///
/// # Examples
/// ```
/// use adaptive_batch::{OwnerRule, Shard};
/// let bucket = Shard::new("bucket 0", 1_000)
///     .parameter("layers.0.mlp.weight", 0..960, OwnerRule::Partitioned)
///     .parameter("layers.0.norm.gamma", 960..1_000, OwnerRule::ReplicatedOverTensor);
/// assert_eq!(bucket.len(), 1_000);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    name: String,
    len: usize,
    parameters: Vec<ParameterRange>,
}

impl Shard {
    /// A shard of `len` elements that this rank counts whole.
    pub fn new(name: impl Into<String>, len: usize) -> Self {
        Self {
            name: name.into(),
            len,
            parameters: Vec::new(),
        }
    }

    /// Names a range of the shard and says who counts it. Elements outside of all ranges are
    /// [`Partitioned`](OwnerRule::Partitioned). Ranges are checked when the meter is built.
    #[must_use]
    pub fn parameter(
        mut self,
        name: impl Into<String>,
        range: Range<usize>,
        owner: OwnerRule,
    ) -> Self {
        self.parameters.push(ParameterRange {
            name: name.into(),
            range,
            owner,
        });
        self
    }

    /// Name of the shard.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Elements of the shard, counted here or not.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the shard has no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Name and range of the parameter that holds `element`; the shard itself where no parameter is named.
    pub(crate) fn parameter_at(&self, element: usize) -> (&str, Range<usize>) {
        self.parameters
            .iter()
            .find(|p| p.range.contains(&element))
            .map_or((&self.name, 0..self.len), |p| (&p.name, p.range.clone()))
    }

    /// Cuts the shard into maximal runs that are counted at `placement` or not.
    pub(crate) fn segments(&self, placement: Placement) -> Result<Vec<Segment>> {
        let mut parameters: Vec<&ParameterRange> = self.parameters.iter().collect();
        parameters.sort_by_key(|p| (p.range.start, p.range.end));
        let mut segments: Vec<Segment> = Vec::new();
        let mut push = |range: Range<usize>, counted: bool| {
            if range.is_empty() {
                return;
            }
            match segments.last_mut() {
                Some(last) if last.counted == counted => last.range.end = range.end,
                _ => segments.push(Segment { range, counted }),
            }
        };
        let mut position = 0;
        for p in parameters {
            if p.range.start > p.range.end || p.range.end > self.len {
                return Err(Error::OutOfShard {
                    shard: format!("{}`, parameter `{}", self.name, p.name),
                    range: p.range.clone(),
                    len: self.len,
                });
            }
            require(
                p.range.start >= position,
                "parameter ranges of a shard",
                "disjoint",
                format!(
                    "overlapping at `{}` {:?} of shard `{}`",
                    p.name, p.range, self.name
                ),
            )?;
            push(position..p.range.start, true);
            push(p.range.clone(), p.owner.counts_at(placement));
            position = p.range.end;
        }
        push(position..self.len, true);
        Ok(segments)
    }
}

/// A run of elements that this rank counts, or does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) range: Range<usize>,
    pub(crate) counted: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_merge_neighbours_and_fill_gaps() {
        let shard = Shard::new("s", 10)
            .parameter("b", 4..6, OwnerRule::ReplicatedOverTensor)
            .parameter("a", 1..3, OwnerRule::Partitioned)
            .parameter("c", 6..7, OwnerRule::Excluded);
        let at = |tensor| shard.segments(Placement::single().at(tensor, 0)).unwrap();
        let seg = |range, counted| Segment { range, counted };
        assert_eq!(at(0), [seg(0..6, true), seg(6..7, false), seg(7..10, true)]);
        assert_eq!(at(1), [seg(0..4, true), seg(4..7, false), seg(7..10, true)]);
        assert_eq!(shard.parameter_at(5), ("b", 4..6));
        assert_eq!(shard.parameter_at(9), ("s", 0..10));
    }

    #[test]
    fn ranges_outside_or_overlapping_are_refused() {
        let outside = Shard::new("s", 4).parameter("a", 2..5, OwnerRule::Partitioned);
        let message = outside
            .segments(Placement::single())
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("2..5") && message.contains("`a`"),
            "{message}"
        );
        let overlapping = Shard::new("s", 4)
            .parameter("a", 0..3, OwnerRule::Partitioned)
            .parameter("b", 2..4, OwnerRule::Partitioned);
        let message = overlapping
            .segments(Placement::single())
            .unwrap_err()
            .to_string();
        assert!(message.contains("overlapping at `b`"), "{message}");
    }

    #[test]
    fn one_rank_of_a_replica_counts_each_shared_range() {
        let rules = [
            OwnerRule::ReplicatedOverTensor,
            OwnerRule::TiedOverStages { owner: 1 },
            OwnerRule::ReplicatedAndTied { owner: 1 },
        ];
        let counted = |rule: OwnerRule, placements: &[(usize, usize)]| {
            placements
                .iter()
                .filter(|(t, s)| rule.counts_at(Placement::single().at(*t, *s)))
                .count()
        };
        assert_eq!(counted(rules[0], &[(0, 1), (1, 1), (2, 1)]), 1);
        assert_eq!(counted(rules[1], &[(1, 0), (1, 1)]), 1);
        assert_eq!(counted(rules[2], &[(0, 0), (1, 0), (0, 1), (1, 1)]), 1);
        assert_eq!(counted(OwnerRule::Excluded, &[(0, 0)]), 0);
    }
}
