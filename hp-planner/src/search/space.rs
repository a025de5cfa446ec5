//! What the search chooses from: shapes, allocations, schedules.

use crate::cost::Problem;
use crate::training::{Recompute, Schedule};

/// Most allocations of one shape to several groups that are looked at; beyond it counts of replicas are thinned.
const ALLOCATIONS: usize = 256;

/// Most node groups that one configuration mixes.
const MIXED: usize = 4;

/// Most sets of node groups; where there are more, fewer groups are mixed.
const SETS: u128 = 2600;

/// Where the replicas of a configuration live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Family {
    /// Every replica inside one of these groups; how many in each is chosen later.
    Within(Vec<usize>),
    /// Every replica over all these groups, with so many pipeline stages in each.
    Across(Vec<(usize, u32)>),
}

/// A shape of replicas with its micro-batch: what is fixed before layers, schedule and numbers of replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) family: Family,
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) cp: u32,
    pub(super) ep: u32,
    pub(super) micro_batch: u32,
    pub(super) recompute: Recompute,
}

/// All shapes, in a fixed order.
pub(super) fn shapes(problem: &Problem<'_>) -> Vec<Shape> {
    let training = problem.training;
    let cluster = problem.cluster;
    let depth = match training.max_pp {
        0 => problem.model.depth(),
        most => most.min(problem.model.depth()),
    };
    let experts = problem
        .model
        .transformer
        .as_ref()
        .map_or(0, |shape| shape.experts);
    let micro_batches: Vec<u32> = training
        .micro_batch_choices()
        .into_iter()
        .filter(|&size| training.global_batch.is_multiple_of(u64::from(size)))
        .collect();
    let mut recompute = training.recompute.clone();
    recompute.sort_unstable();
    recompute.dedup();
    let mut shapes = Vec::new();
    let mut add = |family: &Family, tp: u32, pp: u32| {
        for cp in powers(training.max_cp) {
            for ep in expert_degrees(training.max_ep, experts) {
                for &micro_batch in &micro_batches {
                    for &recompute in &recompute {
                        shapes.push(Shape {
                            family: family.clone(),
                            tp,
                            pp,
                            cp,
                            ep,
                            micro_batch,
                            recompute,
                        });
                    }
                }
            }
        }
    };
    for groups in subsets(cluster.groups.len()) {
        let node = groups
            .iter()
            .map(|&g| u64::from(cluster.groups[g].gpus_per_node))
            .fold(0, gcd) as u32;
        let fewest = groups
            .iter()
            .map(|&g| cluster.groups[g].gpus())
            .min()
            .unwrap_or(0);
        let most_tp = if training.max_tp == 0 {
            node
        } else {
            training.max_tp.min(node)
        };
        for tp in (1..=most_tp).filter(|tp| node.is_multiple_of(*tp)) {
            for pp in depths(problem.model.depth(), depth.min(fewest / tp)) {
                add(&Family::Within(groups.clone()), tp, pp);
            }
            if groups.len() > 1 {
                for stages in compositions(&groups, depth, |g| cluster.groups[g].gpus() / tp) {
                    let pp = stages.iter().map(|s| s.1).sum();
                    add(&Family::Across(stages), tp, pp);
                }
            }
        }
    }
    shapes
}

/// Most groups in one set: as many as [`MIXED`], fewer where the sets would be more than [`SETS`].
fn most_mixed(groups: usize) -> usize {
    let mut sets = 0_u128;
    let mut of_size = 1_u128;
    (1..=MIXED)
        .take_while(|&size| {
            of_size = of_size * groups.saturating_sub(size - 1) as u128 / size as u128;
            sets += of_size;
            size == 1 || sets <= SETS
        })
        .last()
        .unwrap_or(1)
}

/// Non-empty sets of groups, the small ones first.
fn subsets(groups: usize) -> Vec<Vec<usize>> {
    let mixed = most_mixed(groups);
    let mut sets = vec![Vec::new()];
    for group in 0..groups {
        let with: Vec<Vec<usize>> = sets
            .iter()
            .filter(|set| set.len() < mixed)
            .map(|set: &Vec<usize>| set.iter().copied().chain([group]).collect())
            .collect();
        sets.extend(with);
    }
    sets.retain(|set| !set.is_empty());
    sets.sort_by_key(|set| (set.len(), set.clone()));
    sets
}

/// Pipeline depths up to `most`: of those that leave the fullest stage equally many of `layers`, the least.
fn depths(layers: u32, most: u32) -> Vec<u32> {
    (1..=most)
        .filter(|&pp| pp == 1 || layers.div_ceil(pp) < layers.div_ceil(pp - 1))
        .collect()
}

/// Numbers of stages per group for pipelines across groups: all up to 4, then every half octave; powers of two for three
/// groups and more.
fn compositions(
    groups: &[usize],
    depth: u32,
    room: impl Fn(usize) -> u32,
) -> Vec<Vec<(usize, u32)>> {
    let counts: &[u32] = if groups.len() == 2 {
        &[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    } else {
        &[1, 2, 4, 8, 16, 32]
    };
    let mut all = vec![Vec::new()];
    for &group in groups {
        all = all
            .iter()
            .flat_map(|taken: &Vec<(usize, u32)>| {
                let used: u32 = taken.iter().map(|s| s.1).sum();
                let room = room(group).min(depth.saturating_sub(used));
                counts
                    .iter()
                    .take_while(move |&&n| n <= room)
                    .map(move |&n| {
                        let mut taken = taken.clone();
                        taken.push((group, n));
                        taken
                    })
            })
            .collect();
    }
    all
}

fn powers(most: u32) -> impl Iterator<Item = u32> + Clone {
    (0..31)
        .map(|power| 1 << power)
        .take_while(move |&n| n <= most.max(1))
}

fn expert_degrees(most: u32, experts: u32) -> impl Iterator<Item = u32> + Clone {
    let most = if most == 0 {
        experts
    } else {
        most.min(experts)
    };
    powers(most).filter(move |&ep| ep == 1 || experts.is_multiple_of(ep))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Schedules with their number of model chunks per stage that a pipeline of `pp` stages can run.
pub(super) fn schedules(problem: &Problem<'_>, pp: u32) -> Vec<(Schedule, u32)> {
    let training = problem.training;
    if pp == 1 {
        return vec![(training.schedules[0], 1)];
    }
    let depth = problem.model.depth();
    let mut all = Vec::new();
    for &schedule in &training.schedules {
        match schedule {
            Schedule::OneFOneB => all.extend(
                (1..=training.max_vpp)
                    .filter(|&chunks| depth.is_multiple_of(chunks) && depth / chunks >= pp)
                    .map(|chunks| (schedule, chunks)),
            ),
            Schedule::ZbV => {
                if depth.is_multiple_of(2) && depth / 2 >= pp {
                    all.push((schedule, 2));
                }
            }
            Schedule::GPipe | Schedule::ZbH1 | Schedule::Zb2p => all.push((schedule, 1)),
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// Numbers of replicas per group of a family, as rows of one array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Counts {
    width: usize,
    flat: Vec<u32>,
}

impl Counts {
    /// The rows, one number per kind of replica.
    pub(super) fn rows(&self) -> std::slice::ChunksExact<'_, u32> {
        self.flat.chunks_exact(self.width)
    }

    /// The row at `index`.
    pub(super) fn row(&self, index: usize) -> &[u32] {
        &self.flat[index * self.width..(index + 1) * self.width]
    }
}

/// Numbers of replicas per group of the family to try, the most replicas first.
///
/// GPUs are taken within one node or as whole nodes.
pub(super) fn allocations(problem: &Problem<'_>, shape: &Shape, micro_batches: u64) -> Counts {
    let groups = &problem.cluster.groups;
    let each = u64::from(shape.tp) * u64::from(shape.cp);
    let most = u64::from(u32::MAX).min(micro_batches);
    match &shape.family {
        Family::Across(stages) => {
            let parts: Vec<(u64, u64, u64)> = stages
                .iter()
                .map(|&(group, n)| {
                    let group = &groups[group];
                    let (node, all) = (u64::from(group.gpus_per_node), u64::from(group.gpus()));
                    (each * u64::from(n), node, all)
                })
                .collect();
            let mut flat = replicas(&parts, most);
            flat.reverse();
            Counts { width: 1, flat }
        }
        Family::Within(within) => {
            let each = each * u64::from(shape.pp);
            let mut choices: Vec<Vec<u32>> = within
                .iter()
                .map(|&group| {
                    let group = &groups[group];
                    let (node, all) = (u64::from(group.gpus_per_node), u64::from(group.gpus()));
                    replicas(&[(each, node, all)], most)
                })
                .collect();
            if let [counts] = choices.as_mut_slice() {
                counts.reverse();
                return Counts {
                    width: 1,
                    flat: std::mem::take(counts),
                };
            }
            let mut steps = 16;
            while choices.iter().map(Vec::len).product::<usize>() > ALLOCATIONS && steps > 0 {
                choices = choices
                    .into_iter()
                    .map(|counts| thinned(counts, steps))
                    .collect();
                steps /= 2;
            }
            let mut all = vec![Vec::new()];
            for counts in &choices {
                all = all
                    .iter()
                    .flat_map(|taken: &Vec<u32>| {
                        counts
                            .iter()
                            .map(move |&dp| taken.iter().copied().chain([dp]).collect())
                    })
                    .collect();
            }
            let replicas = |counts: &[u32]| counts.iter().map(|&dp| u64::from(dp)).sum::<u64>();
            all.retain(|counts| replicas(counts) <= micro_batches);
            all.sort_by(|a, b| replicas(b).cmp(&replicas(a)).then_with(|| a.cmp(b)));
            Counts {
                width: within.len(),
                flat: all.concat(),
            }
        }
    }
}

/// Numbers of replicas up to `most` whose GPUs in every group are within a node or whole nodes, ascending. Of each group are
/// given the GPUs that a replica takes, the GPUs of a node, and all.
fn replicas(parts: &[(u64, u64, u64)], most: u64) -> Vec<u32> {
    let limit = parts
        .iter()
        .map(|&(each, _, all)| all / each)
        .fold(most, u64::min);
    // More replicas than a node has GPUs take whole nodes of every group.
    let (mut step, mut small) = (1, 0);
    for &(each, node, _) in parts {
        let whole = node / gcd(each, node);
        step = step / gcd(step, whole) * whole;
        small = small.max(node);
    }
    let fits = |dp: u64| {
        parts.iter().all(|&(each, node, _)| {
            let gpus = dp * each;
            gpus <= node || gpus.is_multiple_of(node)
        })
    };
    let first = (small / step + 1) * step;
    (1..=small.min(limit))
        .filter(|&dp| fits(dp))
        .chain((first..=limit).step_by(step as usize))
        .map(|dp| dp as u32)
        .collect()
}

/// Keeps about `steps` counts per octave, the least and the greatest among them.
fn thinned(counts: Vec<u32>, steps: u32) -> Vec<u32> {
    let last = counts.last().copied();
    let mut previous = None;
    counts
        .into_iter()
        .filter(|&count| {
            let step = (f64::from(count).log2() * f64::from(steps)).floor() as i64;
            let keep = previous != Some(step) || Some(count) == last;
            previous = Some(step);
            keep
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_groups_mix_fewer_at_a_time() {
        let mixed = [1, 4, 16, 17, 25, 64, 1000].map(most_mixed);
        assert_eq!(mixed, [4, 4, 4, 3, 2, 2, 1]);
        assert_eq!(subsets(3).len(), 7);
        assert_eq!(subsets(64).len(), 64 + 64 * 63 / 2);
        assert_eq!(subsets(1000).len(), 1000);
    }

    #[test]
    fn depths_drop_those_that_only_add_idle_stages() {
        assert_eq!(depths(12, 12), [1, 2, 3, 4, 6, 12]);
        assert_eq!(depths(7, 4), [1, 2, 3, 4]);
        assert_eq!(depths(4, 9), [1, 2, 4]);
    }

    #[test]
    fn replicas_fill_part_of_a_node_or_whole_nodes() {
        for each in 1..20_u64 {
            for (node, nodes) in [(1, 9), (4, 5), (8, 7), (6, 4)] {
                for other in [None, Some((2, 4, 40)), Some((3, 1, 30))] {
                    let parts: Vec<_> = [(each, node, node * nodes)]
                        .into_iter()
                        .chain(other)
                        .collect();
                    let expected: Vec<u32> = (1..=37)
                        .filter(|dp| {
                            parts.iter().all(|&(each, node, all)| {
                                let gpus = dp * each;
                                gpus <= all && (gpus <= node || gpus.is_multiple_of(node))
                            })
                        })
                        .map(|dp| dp as u32)
                        .collect();
                    assert_eq!(replicas(&parts, 37), expected, "{parts:?}");
                }
            }
        }
    }

    #[test]
    fn thinning_keeps_the_ends() {
        let kept = thinned((1..=1000).collect(), 4);
        assert_eq!((kept[0], kept[kept.len() - 1]), (1, 1000));
        assert!(kept.len() < 50);
        assert_eq!(thinned(vec![1, 2, 3, 4], 16), [1, 2, 3, 4]);
    }

    #[test]
    fn subsets_of_three() {
        let sets = subsets(3);
        assert_eq!(sets.len(), 7);
        assert_eq!(sets[0], [0]);
        assert_eq!(sets[6], [0, 1, 2]);
    }
}
