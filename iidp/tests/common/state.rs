//! Random models, layouts and states, and a plain account of who holds what.
#![allow(
    dead_code,
    reason = "each test file uses its part of the common helpers"
)]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use iidp::reshard::{ModelSpec, Piece, RankLayout, RankState, StateLayout, TensorSpec};
use iidp::{Communicator, Error, LocalCommunicator, ParallelDims, ReshardPlan, ShardSpec};

/// The generator of Steele, Lea and Flood (`SplitMix64`).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn within(&mut self, range: Range<usize>) -> usize {
        range.start + self.below(range.len())
    }

    pub(crate) fn flip(&mut self) -> bool {
        self.below(2) == 0
    }

    pub(crate) fn shuffled(&mut self, mut items: Vec<usize>) -> Vec<usize> {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
        items
    }
}

/// Two to eight tensors of one to three dimensions in up to four blocks. What is split can be cut into two or three equal parts.
pub(crate) fn random_model(random: &mut Random) -> Arc<ModelSpec> {
    let blocks = random.within(1..5);
    let tensors = (0..random.within(2..9)).map(|index| {
        let mut shape: Vec<usize> = (0..random.within(1..4))
            .map(|_| random.within(1..5))
            .collect();
        let dim = random.below(shape.len());
        let spec = match random.below(3) {
            0 => ShardSpec::Replicated,
            1 => {
                shape[dim] = 6 * random.within(1..4);
                ShardSpec::split(dim)
            }
            _ => {
                let sections: Vec<usize> = (0..random.within(1..4))
                    .map(|_| 6 * random.within(1..3))
                    .collect();
                shape[dim] = sections.iter().sum();
                ShardSpec::split_sections(dim, sections)
            }
        };
        let mut tensor = TensorSpec::new(format!("t{index}"), shape, spec, random.below(blocks));
        if random.below(4) == 0 {
            tensor = tensor.tied_to(random.below(blocks));
        }
        if random.below(5) == 0 {
            tensor = tensor.buffer();
        }
        tensor
    });
    let tensors = tensors.collect();
    let moments = [&["moment_1", "moment_2"][..], &["velocity"], &[]][random.below(3)];
    Arc::new(ModelSpec::new(tensors, moments.iter().copied()).unwrap())
}

/// A mesh of up to 27 ranks, somewhere in a world that may be larger, or ranges of uneven length anywhere.
pub(crate) fn random_layout(random: &mut Random, model: &Arc<ModelSpec>) -> StateLayout {
    if random.below(3) == 0 {
        return uneven_layout(random, model);
    }
    let dims = ParallelDims::new(
        random.within(1..4),
        random.within(1..4),
        random.within(1..4),
    );
    let stages: Vec<usize> = (0..model.blocks()).map(|_| random.below(dims.pp)).collect();
    let mut layout = StateLayout::mesh(model, dims, &stages).unwrap();
    if random.flip() {
        layout = layout.with_sharded_moments().unwrap();
    }
    if random.flip() {
        return layout;
    }
    let world = dims.world_size() + random.below(3);
    let places = random.shuffled((0..world).collect());
    layout.on(&places[..dims.world_size()], world).unwrap()
}

fn uneven_layout(random: &mut Random, model: &Arc<ModelSpec>) -> StateLayout {
    let ranks = random.within(1..5);
    let mut layouts = vec![RankLayout::default(); ranks];
    let order = random.shuffled((0..model.tensors().len()).collect());
    for tensor in order {
        let spec = &model.tensors()[tensor];
        let extent = spec.shard.dim().map_or(1, |dim| spec.shape[dim]);
        let mut cuts: Vec<usize> = (0..ranks - 1).map(|_| random.below(extent + 1)).collect();
        cuts.extend([0, extent]);
        cuts.sort_unstable();
        let owners = random.shuffled((0..ranks).collect());
        for (part, owner) in cuts.windows(2).zip(owners) {
            layouts[owner].pieces.push(Piece {
                tensor,
                ranges: std::iter::once(part[0]..part[1]).collect(),
            });
        }
    }
    for rank in &mut layouts {
        rank.moments = 0..flat(model, rank, true).len();
    }
    StateLayout::new(model, layouts).unwrap()
}

/// The elements of a rank's flat buffer, as (tensor, element in row-major order), found by walking each tensor's indices.
pub(crate) fn flat(model: &ModelSpec, rank: &RankLayout, trainable: bool) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for piece in &rank.pieces {
        let tensor = &model.tensors()[piece.tensor];
        if tensor.trainable != trainable {
            continue;
        }
        let Some(dim) = tensor.shard.dim() else {
            if piece.ranges.contains(&(0..1)) {
                found.extend((0..tensor.elements()).map(|element| (piece.tensor, element)));
            }
            continue;
        };
        let after: usize = tensor.shape[dim + 1..].iter().product();
        for outer in 0..tensor.shape[..dim].iter().product() {
            for index in piece.ranges.iter().cloned().flatten() {
                for inner in 0..after {
                    found.push((
                        piece.tensor,
                        (outer * tensor.shape[dim] + index) * after + inner,
                    ));
                }
            }
        }
    }
    found
}

/// The value of an element of a buffer: any bits, among them those of NaNs.
pub(crate) fn value(buffer: usize, (tensor, element): (usize, usize)) -> f32 {
    let mut random = Random(((buffer << 48) | (tensor << 40) | element) as u64);
    f32::from_bits(random.next() as u32)
}

/// The state of every rank under a layout.
pub(crate) fn states(layout: &StateLayout) -> Vec<RankState> {
    let model = layout.model();
    let of_rank = |rank: &RankLayout| {
        if rank.pieces.is_empty() {
            return RankState::default();
        }
        let trained = flat(model, rank, true);
        let values = |buffer: usize, elements: &[(usize, usize)]| {
            elements
                .iter()
                .map(|at| value(buffer, *at))
                .collect::<Vec<_>>()
        };
        let tensors = rank.pieces.iter().map(|piece| piece.tensor);
        let steps = tensors
            .filter(|tensor| model.tensors()[*tensor].trainable)
            .map(|tensor| 100 + tensor as u64);
        let mut state = RankState::new(values(0, &trained), values(1, &flat(model, rank, false)))
            .with_steps(steps.collect());
        for (index, name) in model.moments().iter().enumerate() {
            let kept = &trained[rank.moments.clone()];
            state = state.with_moment(name.clone(), values(2 + index, kept));
        }
        state
    };
    layout.ranks().iter().map(of_rank).collect()
}

/// The bytes that receivers lack, counted element by element.
pub(crate) fn lower_bound(from: &StateLayout, to: &StateLayout) -> usize {
    let model = from.model();
    let nothing = RankLayout::default();
    let mut bytes = 0;
    for (rank, needs) in to.ranks().iter().enumerate() {
        let has = from.ranks().get(rank).unwrap_or(&nothing);
        let lacking = |needs: &[(usize, usize)], has: &[(usize, usize)]| {
            let has: BTreeSet<_> = has.iter().collect();
            4 * needs
                .iter()
                .filter(|element| !has.contains(element))
                .count()
        };
        let (old, new) = (flat(model, has, true), flat(model, needs, true));
        bytes += lacking(&new, &old);
        bytes += lacking(&flat(model, needs, false), &flat(model, has, false));
        bytes +=
            model.moments().len() * lacking(&new[needs.moments.clone()], &old[has.moments.clone()]);
    }
    bytes
}

/// Whether two states have the same bits.
pub(crate) fn assert_same_bits(got: &[RankState], expected: &[RankState]) {
    let bits = |values: &[f32]| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    let nothing = RankState::default();
    for rank in 0..got.len().max(expected.len()) {
        let got = got.get(rank).unwrap_or(&nothing);
        let expected = expected.get(rank).unwrap_or(&nothing);
        assert_eq!(got.steps, expected.steps, "steps of rank {rank}");
        assert_eq!(
            bits(&got.parameters),
            bits(&expected.parameters),
            "parameters of rank {rank}"
        );
        assert_eq!(
            bits(&got.buffers),
            bits(&expected.buffers),
            "buffers of rank {rank}"
        );
        assert!(
            got.moments.keys().eq(expected.moments.keys()),
            "moments of rank {rank}"
        );
        for (name, values) in &got.moments {
            assert_eq!(
                bits(values),
                bits(&expected.moments[name]),
                "{name} of rank {rank}"
            );
        }
    }
}

/// Runs `work` on a thread per rank; a rank that panics counts as `None`.
pub(crate) fn on_ranks<T: Send>(
    communicators: Vec<LocalCommunicator>,
    work: impl Fn(LocalCommunicator) -> T + Sync,
) -> Vec<Option<T>> {
    thread::scope(|scope| {
        let threads: Vec<_> = communicators
            .into_iter()
            .map(|communicator| scope.spawn(|| work(communicator)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().ok())
            .collect()
    })
}

/// Carries a plan out among threads.
pub(crate) fn apply(plan: &ReshardPlan, before: &[RankState]) -> Vec<Result<RankState, Error>> {
    let group = LocalCommunicator::group(plan.world_size(), Duration::from_secs(30)).unwrap();
    let nothing = RankState::default();
    on_ranks(group, |communicator| {
        plan.apply(
            &communicator,
            before.get(communicator.rank()).unwrap_or(&nothing),
        )
    })
    .into_iter()
    .map(|result| result.expect("no rank panics"))
    .collect()
}
