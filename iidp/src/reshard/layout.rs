//! Which rank holds what.

use std::ops::Range;
use std::sync::Arc;

use super::model::{ModelSpec, TensorSpec};
use super::region::{Placed, Region, Strided};
use crate::communicator::shard_range;
use crate::{Error, ParallelDims, Topology};

/// One tensor as a rank holds it: ranges of the split dimension, side by side in this order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Position in [`ModelSpec::tensors`].
    pub tensor: usize,
    /// Ranges of the split dimension; `0..1` for a tensor that is not split.
    pub ranges: Vec<Range<usize>>,
}

/// What one rank holds: its tensors in the order of its flat buffers, and the part of the moments that it keeps.
///
/// Trained tensors lie one after the other in one buffer, others in a second. A moment is a buffer that corresponds element by element to `moments` of the first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct RankLayout {
    /// The tensors.
    pub pieces: Vec<Piece>,
    /// Elements of the flat buffer of trained tensors whose moments this rank keeps: all, or its shard under `ZeRO` stage 1.
    pub moments: Range<usize>,
}

/// Which rank holds which part of a model's state.
///
/// Ranks are those of the communicator over which the state moves. A layout may leave ranks out: they hold nothing. Two layouts of different
/// size are therefore layouts of the same, larger world.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use iidp::reshard::{ModelSpec, StateLayout, TensorSpec};
/// use iidp::{ParallelDims, ShardSpec};
///
/// let tensors = (0..4)
///     .map(|block| TensorSpec::new(format!("blocks.{block}.weight"), [8, 8], ShardSpec::split(1), block))
///     .collect();
/// let model = Arc::new(ModelSpec::new(tensors, ["velocity"])?);
/// // Two replicas of two stages; the first stage has one block, the second three.
/// let layout = StateLayout::mesh(&model, ParallelDims::new(2, 1, 2), &[0, 1, 1, 1])?;
/// assert_eq!(layout.ranks()[1].pieces.len(), 3);
/// // The moments are cut over the replicas.
/// assert_eq!(layout.with_sharded_moments()?.ranks()[1].moments, 0..96);
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    model: Arc<ModelSpec>,
    ranks: Vec<RankLayout>,
    /// Groups of ranks with equal parts, if the layout is a mesh.
    replicas: Option<Vec<Vec<usize>>>,
}

impl StateLayout {
    /// The layout of a mesh of ranks where block b lies on stage `stages[b]` and tensors are split as their [`ShardSpec`](crate::ShardSpec) says. Every
    /// rank keeps the moments of all that it holds.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] when `stages` has not one entry per block, [`Error::Invalid`] for a stage beyond
    /// `dims.pp`, and the errors of [`ShardSpec::ranges`](crate::ShardSpec::ranges) when `dims.tp` does not fit a tensor.
    pub fn mesh(
        model: &Arc<ModelSpec>,
        dims: ParallelDims,
        stages: &[usize],
    ) -> Result<Self, Error> {
        let topology = Topology::new(dims, dims.world_size())?;
        check_length("stages (one per block)", stages.len(), model.blocks())?;
        if let Some((block, &stage)) = stages.iter().enumerate().find(|(_, s)| **s >= dims.pp) {
            return Err(Error::Invalid {
                what: "stages of the layout",
                problem: format!("block {block} on stage {stage}, expected 0..{}", dims.pp),
            });
        }
        let mut ranks = Vec::with_capacity(topology.world_size());
        for rank in 0..topology.world_size() {
            let at = topology.coordinates(rank)?;
            if at.dp > 0 {
                let first: &RankLayout = &ranks[rank - at.dp * dims.tp * dims.pp];
                ranks.push(first.clone());
                continue;
            }
            let mut pieces = Vec::new();
            for (index, tensor) in model.tensors().iter().enumerate() {
                if tensor.blocks.iter().any(|block| stages[*block] == at.pp) {
                    let ranges = ranges_of(tensor, dims.tp, at.tp)?;
                    pieces.push(Piece {
                        tensor: index,
                        ranges,
                    });
                }
            }
            let moments = 0..trained_elements(model, &pieces);
            ranks.push(RankLayout { pieces, moments });
        }
        let replicas = (0..dims.tp * dims.pp)
            .map(|first| topology.data_parallel_group(first))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            model: Arc::clone(model),
            ranks,
            replicas: Some(replicas),
        })
    }

    /// The layout of one rank that holds everything: what a checkpoint is, seen as a layout.
    ///
    /// # Errors
    ///
    /// As [`Self::mesh`].
    pub fn whole(model: &Arc<ModelSpec>) -> Result<Self, Error> {
        Self::mesh(model, ParallelDims::new(1, 1, 1), &vec![0; model.blocks()])
    }

    /// A layout of any shape, by rank: uneven splits, tensors in another order, other shards of the moments.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when a rank names a tensor that is not there or names one twice, a range beyond the split dimension or ranges that overlap, or moments
    /// beyond its trained elements.
    pub fn new(model: &Arc<ModelSpec>, ranks: Vec<RankLayout>) -> Result<Self, Error> {
        for (rank, layout) in ranks.iter().enumerate() {
            let invalid = |problem: String| {
                Err(Error::Invalid {
                    what: "layout of a rank",
                    problem: format!("rank {rank}: {problem}"),
                })
            };
            let mut seen = vec![false; model.tensors().len()];
            for piece in &layout.pieces {
                let Some(tensor) = model.tensors().get(piece.tensor) else {
                    return invalid(format!(
                        "tensor {}, expected less than {}",
                        piece.tensor,
                        model.tensors().len()
                    ));
                };
                if std::mem::replace(&mut seen[piece.tensor], true) {
                    return invalid(format!("tensor {} is given twice", tensor.name));
                }
                let mut ranges: Vec<_> = piece.ranges.iter().collect();
                ranges.sort_by_key(|range| range.start);
                let end = tensor.extent();
                let fits = ranges.iter().all(|r| r.start <= r.end && r.end <= end);
                if !fits || ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
                    return invalid(format!(
                        "ranges {:?} of tensor {}, expected separate ranges in 0..{end}",
                        piece.ranges, tensor.name
                    ));
                }
            }
            let trained = trained_elements(model, &layout.pieces);
            if layout.moments.start > layout.moments.end || layout.moments.end > trained {
                return invalid(format!(
                    "moments {:?}, expected a range in 0..{trained}",
                    layout.moments
                ));
            }
        }
        Ok(Self {
            model: Arc::clone(model),
            ranks,
            replicas: None,
        })
    }

    /// The same with the moments of each rank cut over its replicas by [`shard_range`] (`ZeRO` stage 1), as
    /// [`ShardedOptimizer`](crate::optimizer::ShardedOptimizer) cuts them.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the layout was not made by [`Self::mesh`], and so has no replicas.
    pub fn with_sharded_moments(mut self) -> Result<Self, Error> {
        let Some(replicas) = &self.replicas else {
            return Err(Error::Invalid {
                what: "layout with sharded moments",
                problem: "its replicas are not known, expected a layout that was made from a mesh"
                    .into(),
            });
        };
        for group in replicas {
            for (replica, &rank) in group.iter().enumerate() {
                let layout = &mut self.ranks[rank];
                let trained = trained_elements(&self.model, &layout.pieces);
                layout.moments = shard_range(trained, group.len(), replica);
            }
        }
        Ok(self)
    }

    /// The same on other ranks: rank r of the layout becomes rank `ranks[r]` of a world of `world_size`. The others hold nothing.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] when `ranks` has not one entry per rank; [`Error::NoSuchRank`] for one outside the world;
    /// [`Error::Invalid`] when two are the same.
    pub fn on(self, ranks: &[usize], world_size: usize) -> Result<Self, Error> {
        let ranks: Vec<_> = ranks.iter().copied().map(Some).collect();
        self.surviving(&ranks, world_size)
    }

    /// [`on`](Self::on) where some ranks are lost (`None`), and what they held with them. A plan from here takes everything from the survivors.
    ///
    /// # Errors
    ///
    /// As [`on`](Self::on).
    pub fn surviving(self, ranks: &[Option<usize>], world_size: usize) -> Result<Self, Error> {
        check_length("ranks of the layout", ranks.len(), self.ranks.len())?;
        let mut placed = vec![None; world_size];
        for (&rank, layout) in ranks.iter().zip(self.ranks) {
            let Some(rank) = rank else { continue };
            let Some(place) = placed.get_mut(rank) else {
                return Err(Error::NoSuchRank {
                    rank,
                    size: world_size,
                });
            };
            if place.replace(layout).is_some() {
                return Err(Error::Invalid {
                    what: "ranks of the layout",
                    problem: format!("rank {rank} is given twice"),
                });
            }
        }
        let relocate = |group: Vec<usize>| group.into_iter().map(|rank| ranks[rank]).collect();
        Ok(Self {
            model: self.model,
            ranks: placed.into_iter().map(Option::unwrap_or_default).collect(),
            // Without one of its ranks the mesh is none any more.
            replicas: self
                .replicas
                .and_then(|groups| groups.into_iter().map(relocate).collect()),
        })
    }

    /// The model.
    pub const fn model(&self) -> &Arc<ModelSpec> {
        &self.model
    }

    /// What each rank holds.
    pub fn ranks(&self) -> &[RankLayout] {
        &self.ranks
    }

    /// Elements of the flat buffer of trained tensors of `rank`; 0 for a rank beyond the layout.
    pub fn trained_elements(&self, rank: usize) -> usize {
        self.elements(rank, true)
    }

    /// Elements of the flat buffer of the other tensors of `rank`; 0 for a rank beyond the layout.
    pub fn buffer_elements(&self, rank: usize) -> usize {
        self.elements(rank, false)
    }

    fn elements(&self, rank: usize, trainable: bool) -> usize {
        self.ranks
            .get(rank)
            .map_or(0, |layout| elements(&self.model, &layout.pieces, trainable))
    }

    /// Elements of one moment on `rank`; 0 for a rank beyond the layout.
    pub fn moment_elements(&self, rank: usize) -> usize {
        self.ranks
            .get(rank)
            .map_or(0, |layout| layout.moments.len())
    }

    /// Bytes that all ranks hold together.
    pub fn bytes(&self) -> usize {
        let moments = self.model.moments().len();
        (0..self.ranks.len())
            .map(|rank| {
                self.trained_elements(rank)
                    + self.buffer_elements(rank)
                    + moments * self.moment_elements(rank)
            })
            .sum::<usize>()
            * size_of::<f32>()
    }

    /// The trained tensors of `rank`, in order.
    pub(super) fn trained_tensors(&self, rank: usize) -> impl Iterator<Item = usize> {
        let pieces = self
            .ranks
            .get(rank)
            .map_or(&[][..], |layout| &layout.pieces);
        pieces
            .iter()
            .map(|piece| piece.tensor)
            .filter(|tensor| self.model.tensors()[*tensor].trainable)
    }

    /// Where each part of a component lies on `rank`, by tensor.
    pub(super) fn placed(&self, rank: usize, component: Component) -> Vec<(usize, Placed)> {
        let Some(layout) = self.ranks.get(rank) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut base = 0;
        for piece in &layout.pieces {
            let tensor = &self.model.tensors()[piece.tensor];
            if tensor.trainable == (component == Component::Buffers) {
                continue;
            }
            let local = LocalMatrix::of(tensor, piece, base);
            let end = local.base + local.rows * local.columns;
            let window = match component {
                Component::Moments => base.max(layout.moments.start)..end.min(layout.moments.end),
                Component::Parameters | Component::Buffers => base..end,
            };
            let shift = if component == Component::Moments {
                layout.moments.start
            } else {
                0
            };
            local.place(&window, shift, |placed| found.push((piece.tensor, placed)));
            base = end;
        }
        found
    }
}

/// A part of a rank's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Component {
    /// Trained tensors.
    Parameters,
    /// The other tensors.
    Buffers,
    /// Every moment; all of them are cut alike.
    Moments,
}

impl Component {
    pub(super) const ALL: [Self; 3] = [Self::Parameters, Self::Buffers, Self::Moments];
}

/// A piece as a matrix in a rank's flat buffer.
struct LocalMatrix {
    base: usize,
    rows: usize,
    columns: usize,
    /// Columns of the whole tensor, in their local order.
    ranges: Vec<Range<usize>>,
}

impl LocalMatrix {
    fn of(tensor: &TensorSpec, piece: &Piece, base: usize) -> Self {
        let width = tensor.columns_per_index();
        let ranges: Vec<_> = piece
            .ranges
            .iter()
            .map(|range| range.start * width..range.end * width)
            .collect();
        Self {
            base,
            rows: tensor.matrix().0,
            columns: ranges.iter().map(Range::len).sum(),
            ranges,
        }
    }

    /// Cuts the elements `window` of the flat buffer into rectangles of the whole tensor. Offsets are given less `shift`.
    fn place(&self, window: &Range<usize>, shift: usize, mut found: impl FnMut(Placed)) {
        if window.is_empty() || self.columns == 0 {
            return;
        }
        let (start, end) = (window.start - self.base, window.end - self.base);
        let (first, last) = (start / self.columns, end / self.columns);
        let (head, tail) = (start % self.columns, end % self.columns);
        if first == last {
            return self.place_band(first..first + 1, head..tail, shift, &mut found);
        }
        let middle = if head == 0 { first } else { first + 1 };
        if head > 0 {
            self.place_band(first..first + 1, head..self.columns, shift, &mut found);
        }
        self.place_band(middle..last, 0..self.columns, shift, &mut found);
        self.place_band(last..last + 1, 0..tail, shift, &mut found);
    }

    fn place_band(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        shift: usize,
        found: &mut impl FnMut(Placed),
    ) {
        let mut offset = 0;
        for range in &self.ranges {
            let start = offset.max(columns.start);
            let end = (offset + range.len()).min(columns.end);
            if start < end && !rows.is_empty() {
                let at = range.start + start - offset;
                found(Placed {
                    region: Region::new(rows.clone(), at..at + end - start),
                    place: Strided {
                        offset: self.base + rows.start * self.columns + start - shift,
                        stride: self.columns,
                    },
                });
            }
            offset += range.len();
        }
    }
}

fn ranges_of(tensor: &TensorSpec, tp: usize, rank: usize) -> Result<Vec<Range<usize>>, Error> {
    let named = |error: Error| match error {
        Error::Indivisible {
            dimension,
            size,
            parts_name,
            parts,
            nearest_parts,
            nearest_size,
        } => Error::Indivisible {
            dimension: format!("{dimension} of {}", tensor.name),
            size,
            parts_name,
            parts,
            nearest_parts,
            nearest_size,
        },
        other => other,
    };
    let ranges = tensor
        .shard
        .ranges(&tensor.shape, tp, rank)
        .map_err(named)?;
    if tensor.shard.dim().is_none() {
        return Ok(std::iter::once(0..1).collect());
    }
    // Sections whose parts meet are one range: fewer, longer copies.
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    Ok(joined)
}

fn trained_elements(model: &ModelSpec, pieces: &[Piece]) -> usize {
    elements(model, pieces, true)
}

fn elements(model: &ModelSpec, pieces: &[Piece], trainable: bool) -> usize {
    pieces
        .iter()
        .map(|piece| (&model.tensors()[piece.tensor], piece))
        .filter(|(tensor, _)| tensor.trainable == trainable)
        .map(|(tensor, piece)| {
            let local = LocalMatrix::of(tensor, piece, 0);
            local.rows * local.columns
        })
        .sum()
}

fn check_length(what: &str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::LengthMismatch {
        what: what.into(),
        got,
        expected,
    })
}
