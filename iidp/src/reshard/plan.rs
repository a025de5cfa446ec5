//! What has to move between two layouts.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::{Hash, Hasher};

use super::layout::{Component, StateLayout};
use super::region::{Placed, Region, Strided, without};
use crate::Error;

/// Regions that several ranks can send are cut into parts of at least this many elements.
const GRAIN: usize = 16 * 1024;

/// One rectangle that goes from one rank to another, or to another place on the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Move {
    /// The rank that has it.
    pub from: usize,
    /// The rank that needs it.
    pub to: usize,
    /// What it is a part of. One move of [`Component::Moments`] stands for the same region of every moment.
    pub component: Component,
    /// Position of the tensor in [`ModelSpec::tensors`](super::ModelSpec::tensors).
    pub tensor: usize,
    /// The rectangle of the whole tensor.
    pub region: Region,
    pub(super) source: Strided,
    pub(super) target: Strided,
}

/// How to get from one layout of a model's state to another, moving as little as possible.
///
/// A rank keeps what it has; what it lacks comes from the nearest rank that has it (one on the same machine, if machines are given), and among equally near ones from those that have least to
/// send. The bytes that are sent are therefore exactly those that the receivers lack: no plan that sends each of them to its receiver can do with less.
///
/// Planning computes in O(r t h) for r ranks with t tensors each, and h different shards of a tensor.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use iidp::reshard::{ModelSpec, RankState, ReshardPlan, StateLayout, TensorSpec};
/// use iidp::{ParallelDims, ShardSpec};
///
/// let tensors = vec![
///     TensorSpec::new("up.weight", [2, 4], ShardSpec::split(1), 0),
///     TensorSpec::new("down.weight", [4, 2], ShardSpec::split(0), 0),
/// ];
/// let model = Arc::new(ModelSpec::new(tensors, [""; 0])?);
/// let whole = StateLayout::whole(&model)?;
/// let halves = StateLayout::mesh(&model, ParallelDims::new(1, 2, 1), &[0])?;
/// let plan = ReshardPlan::new(&whole, &halves)?;
/// // Rank 1 gets half of each matrix, rank 0 keeps the other half.
/// assert_eq!(plan.bytes_sent(), 8 * 4);
///
/// let values: Vec<f32> = (0..16_u8).map(f32::from).collect();
/// let before = [RankState::new(values, vec![]).with_steps(vec![7, 7])];
/// let after = plan.apply_in_process(&before)?;
/// assert_eq!(*after[1].parameters, [2.0, 3.0, 6.0, 7.0, 12.0, 13.0, 14.0, 15.0]);
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReshardPlan {
    pub(super) from: StateLayout,
    pub(super) to: StateLayout,
    moves: Vec<Move>,
    /// By rank: what it copies from its old buffers to its new ones.
    kept: Vec<Vec<Move>>,
    /// By rank and component: whether the new buffer is the old one.
    unchanged: Vec<[bool; 3]>,
    fingerprint: u64,
}

impl ReshardPlan {
    /// Plans over ranks that are equally far from each other.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the layouts are of different models; [`Error::StateLost`] when no rank has what one needs.
    pub fn new(from: &StateLayout, to: &StateLayout) -> Result<Self, Error> {
        Self::between_machines(from, to, &[])
    }

    /// Plans over ranks of which rank r is on machine `machines[r]`: what a rank of the same machine has is taken from there. Ranks beyond the list are on
    /// machine 0.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn between_machines(
        from: &StateLayout,
        to: &StateLayout,
        machines: &[usize],
    ) -> Result<Self, Error> {
        check_same_model(from, to)?;
        let world = from.ranks().len().max(to.ranks().len());
        let machine = |rank: usize| machines.get(rank).copied().unwrap_or(0);
        let mut kept = vec![Vec::new(); world];
        let mut unchanged = vec![[false; 3]; world];
        let mut demands = Vec::new();
        for component in Component::ALL {
            if component == Component::Moments && from.model().moments().is_empty() {
                continue;
            }
            let sources = Sources::of(from, component);
            for rank in 0..to.ranks().len() {
                if sources.have_exactly(rank, to, component) {
                    unchanged[rank][component as usize] = true;
                    continue;
                }
                for (tensor, target) in to.placed(rank, component) {
                    let slot = Slot {
                        to: rank,
                        component,
                        tensor,
                        target,
                    };
                    let missing = sources.keep(&slot, &mut kept[rank]);
                    sources.demand(&slot, missing, &machine, &mut demands, from)?;
                }
            }
        }
        let mut moves = assign(demands, from, world);
        moves.sort_unstable();
        let mut hasher = Fnv::default();
        for layout in [from, to] {
            layout.model().hash(&mut hasher);
            layout.ranks().hash(&mut hasher);
        }
        machines.hash(&mut hasher);
        Ok(Self {
            from: from.clone(),
            to: to.clone(),
            moves,
            kept,
            unchanged,
            fingerprint: hasher.finish(),
        })
    }

    /// The layout that the state is in before.
    pub const fn from(&self) -> &StateLayout {
        &self.from
    }

    /// The layout that the state is in afterwards.
    pub const fn to(&self) -> &StateLayout {
        &self.to
    }

    /// What goes from rank to rank, by sender and receiver.
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// What `rank` copies to another place in its own memory; nothing for buffers that stay as they are.
    pub fn kept(&self, rank: usize) -> &[Move] {
        self.kept.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Whether a whole buffer of `rank` stays as it is, and is not even copied.
    pub fn is_unchanged(&self, rank: usize, component: Component) -> bool {
        self.unchanged
            .get(rank)
            .is_some_and(|components| components[component as usize])
    }

    /// Number of ranks that take part.
    pub fn world_size(&self) -> usize {
        self.kept.len()
    }

    /// Bytes of a move, over all the moments if it stands for several.
    pub fn bytes_of(&self, movement: &Move) -> usize {
        movement.region.elements() * self.copies(movement.component) * size_of::<f32>()
    }

    /// Bytes that go from one rank to another.
    pub fn bytes_sent(&self) -> usize {
        self.moves
            .iter()
            .map(|movement| self.bytes_of(movement))
            .sum()
    }

    /// Bytes that ranks copy within their own memory.
    pub fn bytes_kept(&self) -> usize {
        let moves = self.kept.iter().flatten();
        moves.map(|movement| self.bytes_of(movement)).sum()
    }

    /// Bytes that each rank sends.
    pub fn bytes_sent_by_rank(&self) -> Vec<usize> {
        self.bytes_by(|movement| movement.from)
    }

    /// Bytes that each rank receives.
    pub fn bytes_received_by_rank(&self) -> Vec<usize> {
        self.bytes_by(|movement| movement.to)
    }

    fn bytes_by(&self, rank: impl Fn(&Move) -> usize) -> Vec<usize> {
        let mut bytes = vec![0; self.world_size()];
        for movement in &self.moves {
            bytes[rank(movement)] += self.bytes_of(movement);
        }
        bytes
    }

    /// How many buffers a move stands for.
    pub(super) fn copies(&self, component: Component) -> usize {
        match component {
            Component::Moments => self.from.model().moments().len(),
            Component::Parameters | Component::Buffers => 1,
        }
    }

    /// A number that ranks with the same plan share.
    pub(super) const fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

impl fmt::Display for ReshardPlan {
    /// One line per pair of ranks that exchange something, then the sums.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for pair in self.moves.chunk_by(|a, b| (a.from, a.to) == (b.from, b.to)) {
            let bytes: usize = pair.iter().map(|movement| self.bytes_of(movement)).sum();
            writeln!(
                f,
                "rank {} to {}: {bytes} bytes in {} regions",
                pair[0].from,
                pair[0].to,
                pair.len()
            )?;
        }
        write!(
            f,
            "{} bytes sent, {} bytes copied in place, of {}",
            self.bytes_sent(),
            self.bytes_kept(),
            self.to.bytes()
        )
    }
}

fn check_same_model(from: &StateLayout, to: &StateLayout) -> Result<(), Error> {
    let (old, new) = (from.model(), to.model());
    if old == new {
        return Ok(());
    }
    let differs = old
        .tensors()
        .iter()
        .zip(new.tensors())
        .find(|(a, b)| a != b);
    Err(Error::Invalid {
        what: "layouts to re-shard between",
        problem: match differs {
            Some((a, b)) => format!(
                "tensor {} of shape {:?} in one, {} of shape {:?} in the other, expected layouts of one model",
                a.name, a.shape, b.name, b.shape
            ),
            None => format!(
                "{} tensors with moments {:?} in one, {} with {:?} in the other, expected layouts of one model",
                old.tensors().len(),
                old.moments(),
                new.tensors().len(),
                new.moments()
            ),
        },
    })
}

/// Where a receiver wants a rectangle of a tensor.
struct Slot {
    to: usize,
    component: Component,
    tensor: usize,
    target: Placed,
}

impl Slot {
    fn move_from(&self, from: usize, source: &Placed, region: Region) -> Move {
        Move {
            from,
            to: self.to,
            component: self.component,
            tensor: self.tensor,
            region,
            source: source.locate(&region),
            target: self.target.locate(&region),
        }
    }
}

/// A rectangle that a rank lacks, and the ranks that could send it.
struct Demand {
    slot: (usize, Component, usize),
    region: Region,
    target: Strided,
    /// Each with the place of the rectangle in its buffer.
    holders: Vec<(usize, Strided)>,
}

/// What all ranks have of one component.
struct Sources {
    /// By rank and tensor.
    placed: Vec<Vec<Vec<Placed>>>,
    /// By rank, in the order of the buffer.
    flat: Vec<Vec<(usize, Placed)>>,
    /// By tensor: the ranks that have the same of it, together.
    groups: Vec<Vec<Vec<usize>>>,
}

impl Sources {
    fn of(layout: &StateLayout, component: Component) -> Self {
        let tensors = layout.model().tensors().len();
        let flat: Vec<_> = (0..layout.ranks().len())
            .map(|rank| layout.placed(rank, component))
            .collect();
        let mut placed = vec![vec![Vec::new(); tensors]; flat.len()];
        let mut groups: Vec<Vec<Vec<usize>>> = vec![Vec::new(); tensors];
        for (rank, parts) in flat.iter().enumerate() {
            for (tensor, part) in parts {
                placed[rank][*tensor].push(*part);
            }
        }
        for (rank, of_rank) in placed.iter().enumerate() {
            for (tensor, parts) in of_rank.iter().enumerate().filter(|(_, p)| !p.is_empty()) {
                let regions =
                    |parts: &'_ [Placed]| parts.iter().map(|part| part.region).collect::<Vec<_>>();
                let own = regions(parts);
                let same = groups[tensor]
                    .iter_mut()
                    .find(|group| regions(&placed[group[0]][tensor]) == own);
                match same {
                    Some(group) => group.push(rank),
                    None => groups[tensor].push(vec![rank]),
                }
            }
        }
        Self {
            placed,
            flat,
            groups,
        }
    }

    /// Whether `rank` has this component just as it will need it.
    fn have_exactly(&self, rank: usize, to: &StateLayout, component: Component) -> bool {
        self.flat
            .get(rank)
            .is_some_and(|parts| *parts == to.placed(rank, component))
    }

    /// Records what the rank can take from its own buffer; returns the rest.
    fn keep(&self, slot: &Slot, kept: &mut Vec<Move>) -> Vec<Region> {
        let mut missing = vec![slot.target.region];
        if let Some(own) = self.placed.get(slot.to) {
            for source in &own[slot.tensor] {
                if let Some(both) = source.region.intersection(&slot.target.region) {
                    kept.push(slot.move_from(slot.to, source, both));
                    missing = without(&missing, &both);
                }
            }
        }
        missing
    }

    /// Finds the nearest holders of every part of `missing`.
    fn demand(
        &self,
        slot: &Slot,
        mut missing: Vec<Region>,
        machine: &impl Fn(usize) -> usize,
        demands: &mut Vec<Demand>,
        from: &StateLayout,
    ) -> Result<(), Error> {
        let here = machine(slot.to);
        for near in [true, false] {
            let mut still = Vec::new();
            for region in missing {
                self.offer(
                    slot,
                    region,
                    |rank| (machine(rank) == here) == near,
                    demands,
                    &mut still,
                );
            }
            missing = still;
        }
        match missing.first() {
            None => Ok(()),
            Some(region) => Err(Error::StateLost {
                tensor: from.model().tensors()[slot.tensor].name.clone(),
                rank: slot.to,
                elements: region.elements(),
            }),
        }
    }

    /// Cuts `region` along the borders of what the ranks chosen by `eligible` have. Cells that none of them has go to `still`.
    fn offer(
        &self,
        slot: &Slot,
        region: Region,
        eligible: impl Fn(usize) -> bool,
        demands: &mut Vec<Demand>,
        still: &mut Vec<Region>,
    ) {
        let mut holders: Vec<(Region, usize, usize)> = Vec::new();
        let mut rows = BTreeSet::from([region.first_row, region.end_row]);
        let mut columns = BTreeSet::from([region.first_column, region.end_column]);
        for (index, group) in self.groups[slot.tensor].iter().enumerate() {
            if !group.iter().any(|rank| eligible(*rank)) {
                continue;
            }
            for (part, placed) in self.placed[group[0]][slot.tensor].iter().enumerate() {
                if let Some(both) = placed.region.intersection(&region) {
                    rows.extend([both.first_row, both.end_row]);
                    columns.extend([both.first_column, both.end_column]);
                    holders.push((both, index, part));
                }
            }
        }
        let (rows, columns) = (Vec::from_iter(rows), Vec::from_iter(columns));
        for row in rows.windows(2) {
            for column in columns.windows(2) {
                let cell = Region::new(row[0]..row[1], column[0]..column[1]);
                let mut found = Vec::new();
                for (_, group, part) in holders
                    .iter()
                    .filter(|(has, ..)| has.intersection(&cell) == Some(cell))
                {
                    let ranks = &self.groups[slot.tensor][*group];
                    found.extend(
                        ranks.iter().filter(|rank| eligible(**rank)).map(|&rank| {
                            (rank, self.placed[rank][slot.tensor][*part].locate(&cell))
                        }),
                    );
                }
                if found.is_empty() {
                    still.push(cell);
                } else {
                    demands.push(Demand {
                        slot: (slot.to, slot.component, slot.tensor),
                        region: cell,
                        target: slot.target.locate(&cell),
                        holders: found,
                    });
                }
            }
        }
    }
}

/// Chooses the senders: first where there is no choice, then the largest regions, each from whoever has least to send.
fn assign(mut demands: Vec<Demand>, from: &StateLayout, world: usize) -> Vec<Move> {
    let moments = from.model().moments().len();
    demands.sort_by_key(|demand| {
        let single = demand.holders.len() == 1;
        (!single, std::cmp::Reverse(demand.region.elements()))
    });
    let mut load = vec![0_usize; world];
    let mut moves = Vec::with_capacity(demands.len());
    for demand in demands {
        let (to, component, tensor) = demand.slot;
        let parts = demand
            .holders
            .len()
            .min(demand.region.elements().div_ceil(GRAIN));
        for region in demand.region.cut(parts) {
            let Some(&(sender, source)) = demand
                .holders
                .iter()
                .min_by_key(|(rank, _)| (load[*rank], *rank))
            else {
                continue;
            };
            let copies = if component == Component::Moments {
                moments
            } else {
                1
            };
            load[sender] += region.elements() * copies;
            let within = |place| {
                Placed {
                    region: demand.region,
                    place,
                }
                .locate(&region)
            };
            moves.push(Move {
                from: sender,
                to,
                component,
                tensor,
                region,
                source: within(source),
                target: within(demand.target),
            });
        }
    }
    moves
}

/// The hash of Fowler, Noll and Vo in 64 bits: unlike the standard library's, it is fixed.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
