//! How a parameter is cut over the ranks of a tensor-parallel group.
//!
//! A [`ShardSpec`] belongs to a parameter of the whole model and says which elements each of `tp` ranks holds. It
//! knows nothing of stages and replicas: a parameter lies on the stage that holds its block, and on every replica.
//!
//! Source: Megatron-LM (Shoeybi et al. 2019, section 3): the first matrix of a pair is cut by columns, the second by rows,
//! the embedding by vocabulary.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Which part of a parameter each tensor-parallel rank holds.
///
/// Weights have Burn's shape `[inputs, outputs]`: a column-parallel linear layer splits dimension 1 of its weight and dimension 0 of its
/// bias, a row-parallel one dimension 0 of its weight, an embedding `[vocabulary, width]` dimension 0.
///
/// # Examples
///
/// ```
/// use iidp::ShardSpec;
///
/// let columns = ShardSpec::split(1);
/// assert_eq!(columns.ranges(&[6, 8], 2, 1)?, [4..8]);
/// assert_eq!(columns.local_shape(&[6, 8], 2)?, [6, 4]);
/// // Queries, keys and values in one matrix: each rank holds its heads of all three.
/// let fused = ShardSpec::split_sections(1, [8, 4, 4]);
/// assert_eq!(fused.ranges(&[6, 16], 2, 1)?, [4..8, 10..12, 14..16]);
/// assert!(ShardSpec::split(1).local_shape(&[6, 8], 3).is_err());
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ShardSpec {
    /// Every rank holds the whole tensor, and gets the whole gradient for it.
    #[default]
    Replicated,
    /// Each rank holds an equal part of one dimension.
    Split {
        /// The dimension that is cut.
        dim: usize,
        /// Lengths of consecutive sections of that dimension, each of which is cut by itself; empty for one section.
        sections: Vec<usize>,
    },
}

impl ShardSpec {
    /// Equal consecutive parts of dimension `dim`.
    pub const fn split(dim: usize) -> Self {
        Self::Split {
            dim,
            sections: Vec::new(),
        }
    }

    /// Dimension `dim` consists of sections, and each rank holds its part of every one of them, in their order.
    pub fn split_sections(dim: usize, sections: impl Into<Vec<usize>>) -> Self {
        Self::Split {
            dim,
            sections: sections.into(),
        }
    }

    /// The dimension that is cut, if any.
    pub const fn dim(&self) -> Option<usize> {
        match self {
            Self::Replicated => None,
            Self::Split { dim, .. } => Some(*dim),
        }
    }

    /// The ranges of the cut dimension that rank `rank` of `tp` holds, in the order in which they lie in its shard; empty for a replicated
    /// tensor, which is held whole. Adjacent ranges are not joined: there is one per section.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the tensor of the given shape has no such dimension or the sections are not as long as it;
    /// [`Error::Indivisible`] if `tp` does not divide a section; [`Error::NoSuchRank`] if `rank` is not in `0..tp`.
    pub fn ranges(
        &self,
        shape: &[usize],
        tp: usize,
        rank: usize,
    ) -> Result<Vec<Range<usize>>, Error> {
        if rank >= tp {
            return Err(Error::NoSuchRank { rank, size: tp });
        }
        let Self::Split { dim, sections } = self else {
            return Ok(Vec::new());
        };
        let Some(&length) = shape.get(*dim) else {
            return Err(Error::Invalid {
                what: "shard specification",
                problem: format!("dimension {dim} of a tensor of shape {shape:?} is to be cut"),
            });
        };
        let whole = [length];
        let sections = if sections.is_empty() {
            &whole[..]
        } else {
            sections
        };
        if sections.iter().sum::<usize>() != length {
            return Err(Error::Invalid {
                what: "shard specification",
                problem: format!(
                    "sections {sections:?} of dimension {dim}, expected a sum of {length} for shape {shape:?}"
                ),
            });
        }
        let mut start = 0;
        sections
            .iter()
            .map(|&section| {
                check_divides(&format!("dimension {dim}"), section, "tp", tp)?;
                let each = section / tp;
                let range = start + rank * each..start + (rank + 1) * each;
                start += section;
                Ok(range)
            })
            .collect()
    }

    /// Shape of each rank's shard of a tensor of the given shape.
    ///
    /// # Errors
    ///
    /// As [`Self::ranges`].
    pub fn local_shape(&self, shape: &[usize], tp: usize) -> Result<Vec<usize>, Error> {
        let ranges = self.ranges(shape, tp, 0)?;
        let mut local = shape.to_vec();
        if let Some(dim) = self.dim() {
            local[dim] = ranges.iter().map(Range::len).sum();
        }
        Ok(local)
    }

    /// The runs of consecutive elements, in row-major order of the whole tensor, that make up the shard of `rank`, in the order in
    /// which they lie in it. Computes in O(runs): `rows before the dimension x sections`.
    ///
    /// # Errors
    ///
    /// As [`Self::ranges`].
    pub fn runs(
        &self,
        shape: &[usize],
        tp: usize,
        rank: usize,
    ) -> Result<Vec<Range<usize>>, Error> {
        let ranges = self.ranges(shape, tp, rank)?;
        let len: usize = shape.iter().product();
        let Some(dim) = self.dim() else {
            return Ok(std::iter::once(0..len).collect());
        };
        let inner: usize = shape[dim + 1..].iter().product();
        let row = shape[dim] * inner;
        let rows: usize = shape[..dim].iter().product();
        let runs = (0..rows).flat_map(|index| {
            ranges.iter().map(move |range| {
                index * row + range.start * inner..index * row + range.end * inner
            })
        });
        Ok(runs.collect())
    }

    /// The shard that `rank` holds of a whole tensor in row-major order.
    ///
    /// # Errors
    ///
    /// As [`Self::ranges`]; [`Error::LengthMismatch`] if `whole` is not as long as the shape says.
    pub fn cut(
        &self,
        whole: &[f32],
        shape: &[usize],
        tp: usize,
        rank: usize,
    ) -> Result<Vec<f32>, Error> {
        check_length("whole tensor", whole.len(), shape.iter().product())?;
        let mut local = Vec::with_capacity(whole.len() / tp.max(1));
        for run in self.runs(shape, tp, rank)? {
            local.extend_from_slice(&whole[run]);
        }
        Ok(local)
    }

    /// Writes the shard of `rank` to its places in the whole tensor.
    ///
    /// # Errors
    ///
    /// As [`Self::ranges`]; [`Error::LengthMismatch`] if a buffer is not as long as the shape says.
    pub fn place(
        &self,
        local: &[f32],
        whole: &mut [f32],
        shape: &[usize],
        tp: usize,
        rank: usize,
    ) -> Result<(), Error> {
        check_length("whole tensor", whole.len(), shape.iter().product())?;
        let runs = self.runs(shape, tp, rank)?;
        check_length("shard", local.len(), runs.iter().map(Range::len).sum())?;
        let mut rest = local;
        for run in runs {
            let (now, later) = rest.split_at(run.len());
            whole[run].copy_from_slice(now);
            rest = later;
        }
        Ok(())
    }
}

fn check_length(what: &str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::LengthMismatch {
            what: what.to_owned(),
            got,
            expected,
        })
    }
}

/// Refuses a size that the parts do not divide, naming the nearest number of parts that would.
///
/// # Errors
///
/// [`Error::Indivisible`].
pub(crate) fn check_divides(
    dimension: &str,
    size: usize,
    parts_name: &'static str,
    parts: usize,
) -> Result<(), Error> {
    if parts > 0 && size > 0 && size.is_multiple_of(parts) {
        return Ok(());
    }
    Err(Error::Indivisible {
        dimension: dimension.to_owned(),
        size,
        parts_name,
        parts,
        nearest_parts: nearest_divisor(size, parts),
        nearest_size: size.max(1).next_multiple_of(parts.max(1)),
    })
}

/// The divisor of `size` that is nearest to `parts`, the smaller one of two.
fn nearest_divisor(size: usize, parts: usize) -> usize {
    (1..=size)
        .filter(|divisor| size.is_multiple_of(*divisor))
        .min_by_key(|divisor| divisor.abs_diff(parts))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_indivisible_dimension_names_what_would_do() {
        let error = ShardSpec::split(0).ranges(&[10, 3], 4, 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "dimension 0 of 10 cannot be cut into tp = 4 equal parts: tp = 5 or a size of 12 would do"
        );
        assert!(matches!(
            ShardSpec::split(2).ranges(&[10, 3], 2, 0),
            Err(Error::Invalid { .. })
        ));
        assert!(matches!(
            ShardSpec::split_sections(0, [4, 4]).ranges(&[10], 2, 0),
            Err(Error::Invalid { .. })
        ));
        assert!(matches!(
            ShardSpec::Replicated.ranges(&[10], 2, 2),
            Err(Error::NoSuchRank { rank: 2, size: 2 })
        ));
    }

    proptest! {
        /// Shards are disjoint, cover the tensor, and come back to the bit.
        #[test]
        fn shards_make_up_the_tensor(
            tp in 1_usize..5,
            before in 1_usize..4,
            after in 1_usize..4,
            parts in prop::collection::vec(1_usize..4, 1..4),
            replicated in any::<bool>(),
        ) {
            let sections: Vec<usize> = parts.iter().map(|part| part * tp).collect();
            let shape = [before, sections.iter().sum(), after];
            let spec = if replicated { ShardSpec::Replicated } else { ShardSpec::split_sections(1, sections) };
            let len: usize = shape.iter().product();
            let whole: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut back = vec![f32::NAN; len];
            let mut held = 0;
            for rank in 0..tp {
                let local = spec.cut(&whole, &shape, tp, rank).unwrap();
                prop_assert_eq!(local.len(), spec.local_shape(&shape, tp).unwrap().iter().product::<usize>());
                held += local.len();
                spec.place(&local, &mut back, &shape, tp, rank).unwrap();
            }
            prop_assert_eq!(held, if replicated { len * tp } else { len });
            prop_assert_eq!(back, whole);
        }
    }
}
