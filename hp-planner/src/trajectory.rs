//! Plans over a forecast of the global batch: a configuration per interval, with what it costs to change.
//!
//! Every interval has candidates with a time and a price; between the choices of consecutive intervals lies a transition.
//! The front over total time and money follows by dynamic programming over (interval, candidate): each state keeps the
//! non-dominated (time, money) pairs that lead to it. That loses nothing, because what comes later depends on the state
//! only and adds the same to every pair. Of equal totals the one with fewer changes wins, so a plan changes only if
//! that pays.

use serde::{Deserialize, Serialize};

use crate::assign::{RankKind, assign};
use crate::error::{Error, Result};
use crate::pareto::ParetoFront;
use crate::plan::{Configuration, ParallelPlan, ReplicaGroup, Stage};
use crate::planner::Planner;
use crate::training::BatchInterval;

/// A sequence of choices: first by the number of changes, then by the choices.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Path {
    pub(crate) changes: u32,
    pub(crate) choices: Vec<u32>,
}

/// Seconds and money.
pub(crate) type Price = (f64, f64);

/// The front over sequences of choices.
///
/// `stay[i][c]` is what candidate c takes in interval i; `change(i, a, b)` what it takes to go from candidate a of interval
/// i to b of interval i + 1, and whether that counts as a change.
pub(crate) fn sequences(
    stay: &[Vec<Price>],
    change: impl Fn(usize, usize, usize) -> (Price, bool),
) -> Result<ParetoFront<Path>> {
    let mut states: Vec<ParetoFront<Path>> = Vec::new();
    for (interval, candidates) in stay.iter().enumerate() {
        let mut next = Vec::with_capacity(candidates.len());
        for (index, &(time, cost)) in candidates.iter().enumerate() {
            let mut front = ParetoFront::new();
            if interval == 0 {
                front.insert(
                    time,
                    cost,
                    Path {
                        changes: 0,
                        choices: vec![index as u32],
                    },
                )?;
            }
            for (before, state) in states.iter().enumerate() {
                let (price, changed) = change(interval - 1, before, index);
                for point in state {
                    let (time, cost) = (point.time + price.0 + time, point.cost + price.1 + cost);
                    if front.dominates(time, cost) {
                        continue;
                    }
                    let mut path = point.payload.clone();
                    path.changes += u32::from(changed);
                    path.choices.push(index as u32);
                    front.insert(time, cost, path)?;
                }
            }
            next.push(front);
        }
        states = next;
    }
    let mut all = ParetoFront::new();
    for state in states {
        all.merge(state);
    }
    Ok(all)
}

/// What a change of plan costs besides the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TransitionModel {
    /// Seconds to stop, start and warm up.
    pub restart_seconds: f64,
}

impl Default for TransitionModel {
    /// 30 s, about what elastic launchers take to restart workers.
    fn default() -> Self {
        Self {
            restart_seconds: 30.0,
        }
    }
}

/// A change of plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// Bytes of parameters and optimizer state that devices receive, summed.
    pub bytes: f64,
    /// Seconds during which nothing is trained.
    pub seconds: f64,
    /// Money for the new plan's GPUs in that time.
    pub money: f64,
}

/// One interval of a trajectory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IntervalPlan {
    /// The interval.
    pub interval: BatchInterval,
    /// Optimizer steps in it.
    pub iterations: u64,
    /// The plan it runs.
    pub plan: ParallelPlan,
    /// The change before it, if there is one.
    pub transition: Option<Transition>,
}

/// A plan for each interval.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrajectoryPlan {
    /// The intervals in order.
    pub intervals: Vec<IntervalPlan>,
    /// Changes of plan, those that only change the number of accumulation steps not counted.
    pub changes: u32,
}

/// The front over job time (seconds) and money of plans for the training's [`trajectory`](crate::TrainingSpec::trajectory).
///
/// Candidates of an interval are the plans on its own front, and those of the other intervals' fronts with the
/// micro-batches shared out anew, so that staying is always a choice. Computes in O(i k^2 f) for i intervals, k candidates
/// and fronts of f points.
///
/// # Errors
/// [`Error::Field`] if there is no trajectory, or those of [`Planner::plan`].
pub fn plan_trajectory(
    planner: &Planner,
    transitions: &TransitionModel,
) -> Result<ParetoFront<TrajectoryPlan>> {
    let intervals = &planner.training().trajectory;
    if intervals.is_empty() {
        return Err(Error::field(
            "trajectory",
            "empty",
            "one or more intervals of samples and global_batch",
        ));
    }
    let candidates = candidates(planner)?;
    let iterations = |interval: &BatchInterval| interval.samples.div_ceil(interval.global_batch);
    let stay: Vec<Vec<Price>> = candidates
        .iter()
        .zip(intervals)
        .map(|(plans, interval)| {
            let n = iterations(interval) as f64;
            plans
                .iter()
                .map(|plan| (n * plan.iteration_time(), n * plan.iteration_cost()))
                .collect()
        })
        .collect();
    let between = |i: usize, a: usize, b: usize| {
        transition(
            planner,
            *transitions,
            &candidates[i][a].configuration,
            &candidates[i + 1][b].configuration,
        )
    };
    let front = sequences(&stay, |i, a, b| match between(i, a, b) {
        Some(change) => ((change.seconds, change.money), true),
        None => ((0.0, 0.0), false),
    })?;
    Ok(front.map(|path| TrajectoryPlan {
        changes: path.changes,
        intervals: intervals
            .iter()
            .enumerate()
            .map(|(i, interval)| {
                let choice = path.choices[i] as usize;
                IntervalPlan {
                    interval: *interval,
                    iterations: iterations(interval),
                    plan: candidates[i][choice].clone(),
                    transition: (i > 0)
                        .then(|| between(i - 1, path.choices[i - 1] as usize, choice))
                        .flatten(),
                }
            })
            .collect(),
    }))
}

/// The plans that each interval can choose from.
fn candidates(planner: &Planner) -> Result<Vec<Vec<ParallelPlan>>> {
    let intervals = &planner.training().trajectory;
    let mut shapes: Vec<Configuration> = Vec::new();
    for interval in intervals {
        let report = planner
            .clone()
            .with_global_batch(interval.global_batch)
            .plan()?;
        for point in &report.front {
            let configuration = &point.payload.configuration;
            if !shapes.iter().any(|known| same_shape(known, configuration)) {
                shapes.push(configuration.clone());
            }
        }
    }
    Ok(intervals
        .iter()
        .map(|interval| {
            let planner = planner.clone().with_global_batch(interval.global_batch);
            shapes
                .iter()
                .filter_map(|shape| reshared(&planner, shape, interval.global_batch))
                .filter_map(|configuration| planner.evaluate(&configuration).ok())
                .collect()
        })
        .collect())
}

/// Replicas by their stages and virtual workers, whatever their share of the batch.
fn kinds(configuration: &Configuration) -> Vec<(&[Stage], u32, u32)> {
    let mut kinds: Vec<(&[Stage], u32, u32)> = Vec::new();
    for replicas in &configuration.replicas {
        match kinds
            .iter_mut()
            .find(|kind| kind.0 == replicas.stages && kind.1 == replicas.virtual_workers)
        {
            Some(kind) => kind.2 += replicas.count,
            None => kinds.push((&replicas.stages, replicas.virtual_workers, replicas.count)),
        }
    }
    kinds
}

/// Whether two configurations differ in the shares of the batch only.
fn same_shape(a: &Configuration, b: &Configuration) -> bool {
    let rest = |c: &Configuration| {
        (
            c.dims,
            c.micro_batch,
            c.schedule,
            c.recompute,
            c.zero,
            c.sequence_parallel,
        )
    };
    rest(a) == rest(b) && a.allocation == b.allocation && kinds(a) == kinds(b)
}

/// The shape with another global batch.
fn reshared(planner: &Planner, shape: &Configuration, global_batch: u64) -> Option<Configuration> {
    let micro_batch = u64::from(shape.micro_batch);
    if !global_batch.is_multiple_of(micro_batch) {
        return None;
    }
    let kinds = kinds(shape);
    let ranks: Vec<RankKind> = kinds
        .iter()
        .map(|&(stages, streams, ranks)| {
            let seconds = stages
                .iter()
                .map(|stage| planner.round_seconds(shape, stage, streams));
            RankKind {
                ranks,
                streams,
                round: seconds.fold(0.0, f64::max),
            }
        })
        .collect();
    let shares = assign(&ranks, global_batch / micro_batch)?;
    let mut configuration = shape.clone();
    configuration.replicas.clear();
    for (&(stages, virtual_workers, ranks), share) in kinds.iter().zip(shares) {
        for (count, accumulation_steps) in [
            (share.longer, share.rounds + 1),
            (ranks - share.longer, share.rounds),
        ] {
            if count > 0 {
                configuration.replicas.push(ReplicaGroup {
                    count,
                    stages: stages.to_vec(),
                    virtual_workers,
                    accumulation_steps,
                });
            }
        }
    }
    Some(configuration)
}

/// What it takes to go from one configuration to another; `None` if every device keeps what it has.
fn transition(
    planner: &Planner,
    model: TransitionModel,
    from: &Configuration,
    to: &Configuration,
) -> Option<Transition> {
    if from.allocation == to.allocation
        && kinds(from) == kinds(to)
        && from.dims == to.dims
        && from.zero == to.zero
    {
        return None;
    }
    let training = planner.training();
    let per_parameter = training.precision.bytes() + training.optimizer_bytes();
    let per_layer =
        planner.model().parameters() / f64::from(planner.model().depth()) * per_parameter;
    let (old, new) = (holdings(from), holdings(to));
    let (mut bytes, mut slowest) = (0.0, 0.0_f64);
    for (device, held) in &new {
        let kept = old
            .iter()
            .find(|(other, _)| other == device)
            .map_or(0.0, |(_, before)| held.overlap(before));
        let received = (held.size() - kept).max(0.0) * per_layer;
        bytes += received;
        let link = planner.cluster().inter(device.0);
        slowest = slowest.max(link.seconds(received));
    }
    let seconds = model.restart_seconds + slowest;
    let price: f64 = to
        .allocation
        .groups()
        .map(|(group, gpus)| f64::from(gpus) * planner.cluster().price_per_gpu_hour(group))
        .sum();
    Some(Transition {
        bytes,
        seconds,
        money: price * seconds / 3600.0,
    })
}

/// What a device holds: a range of layers, and of each the part of its tensor-parallel rank.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Holding {
    layers: (f64, f64),
    part: (f64, f64),
}

impl Holding {
    fn size(&self) -> f64 {
        (self.layers.1 - self.layers.0) * (self.part.1 - self.part.0)
    }

    fn overlap(&self, other: &Self) -> f64 {
        let common = |a: (f64, f64), b: (f64, f64)| (a.1.min(b.1) - a.0.max(b.0)).max(0.0);
        common(self.layers, other.layers) * common(self.part, other.part)
    }
}

/// Device (group, index in the group) and what it holds, with replicas laid out in order.
fn holdings(configuration: &Configuration) -> Vec<((usize, u32), Holding)> {
    let mut next = vec![0; configuration.allocation.gpus.len()];
    let mut held = Vec::new();
    for replicas in configuration.each_replica() {
        for stage in &replicas.stages {
            for rank in 0..stage.tp * configuration.dims.cp {
                let device = next[stage.group];
                next[stage.group] += 1;
                let part = f64::from(rank % stage.tp) / f64::from(stage.tp);
                held.push((
                    (stage.group, device),
                    Holding {
                        layers: (
                            f64::from(stage.first_layer),
                            f64::from(stage.first_layer + stage.layers),
                        ),
                        part: (part, part + 1.0 / f64::from(stage.tp)),
                    },
                ));
            }
        }
    }
    held.sort_by_key(|(device, _)| *device);
    held
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ClusterSpec, ModelSpec, Objective, TrainingSpec};

    /// All sequences one by one.
    fn brute(stay: &[Vec<Price>], change: &[Vec<Vec<(Price, bool)>>]) -> ParetoFront<Path> {
        let mut paths = vec![((0.0, 0.0), Path::default())];
        for (i, candidates) in stay.iter().enumerate() {
            let mut next = Vec::new();
            for ((time, cost), path) in &paths {
                for (c, price) in candidates.iter().enumerate() {
                    let mut path = path.clone();
                    let ((t, m), changed) = path
                        .choices
                        .last()
                        .map_or(((0.0, 0.0), false), |&last| change[i - 1][last as usize][c]);
                    path.choices.push(c as u32);
                    path.changes += u32::from(changed);
                    next.push(((time + t + price.0, cost + m + price.1), path));
                }
            }
            paths = next;
        }
        let mut front = ParetoFront::new();
        for ((time, cost), path) in paths {
            front.insert(time, cost, path).unwrap();
        }
        front
    }

    proptest! {
        // Whole numbers, so that sums are exact in any order and ties are common.
        #[test]
        fn equals_brute_force(
            stay in prop::collection::vec(prop::collection::vec((1u8..20, 1u8..20), 3), 1..6),
            change in prop::collection::vec(prop::collection::vec(prop::collection::vec((0u8..9, 0u8..9), 3), 3), 5),
        ) {
            let stay: Vec<Vec<Price>> =
                stay.iter().map(|c| c.iter().map(|p| (f64::from(p.0), f64::from(p.1))).collect()).collect();
            let change: Vec<Vec<Vec<(Price, bool)>>> = change
                .iter()
                .map(|i| {
                    i.iter()
                        .enumerate()
                        .map(|(a, row)| {
                            row.iter()
                                .enumerate()
                                .map(|(b, p)| if a == b { ((0.0, 0.0), false) } else { ((f64::from(p.0), f64::from(p.1)), true) })
                                .collect()
                        })
                        .collect()
                })
                .collect();
            let got = sequences(&stay, |i, a, b| change[i][a][b]).unwrap();
            prop_assert_eq!(got, brute(&stay, &change));
        }
    }

    fn planner(samples: u64) -> Planner {
        let cluster = ClusterSpec::homogeneous("V100-16", 4, 4).unwrap();
        let model = ModelSpec::gpt("small", 6, 512, 8, 10_000, 256);
        let mut training = TrainingSpec::new(64, 256).data_parallel(4);
        training.trajectory = [64, 256, 1024]
            .map(|global_batch| BatchInterval {
                samples,
                global_batch,
            })
            .to_vec();
        Planner::new(cluster, model, training)
    }

    #[test]
    fn changes_only_when_it_pays() {
        let fastest = |samples, restart_seconds| {
            let front =
                plan_trajectory(&planner(samples), &TransitionModel { restart_seconds }).unwrap();
            let choice = front.select(Objective::Fastest).unwrap();
            for plan in &choice.point.payload.intervals {
                assert_eq!(
                    plan.plan.configuration.global_batch(),
                    plan.interval.global_batch
                );
            }
            let parts: f64 = choice
                .point
                .payload
                .intervals
                .iter()
                .map(|i| {
                    i.iterations as f64 * i.plan.iteration_time()
                        + i.transition.map_or(0.0, |t| t.seconds)
                })
                .sum();
            assert!((parts - choice.point.time).abs() < 1e-6 * parts);
            (choice.point.payload.changes, choice.point.time)
        };
        // A week of restart is never worth it; a job long enough and a free restart may be.
        let (changes, slow) = fastest(100_000, 6e5);
        assert_eq!(changes, 0);
        let (_, quick) = fastest(100_000, 0.0);
        assert!(quick <= slow);
    }

    #[test]
    fn bytes_of_a_change_by_hand() {
        let planner = planner(1000);
        let report = planner.plan().unwrap();
        let whole = |gpus: u32| {
            report
                .front
                .iter()
                .map(|p| &p.payload.configuration)
                .find(|c| c.dims.dp == gpus)
                .cloned()
        };
        let shapes: Vec<Configuration> = [1, 2, 4, 8, 16].into_iter().filter_map(whole).collect();
        let (small, large) = (&shapes[0], &shapes[shapes.len() - 1]);
        let model = TransitionModel {
            restart_seconds: 10.0,
        };
        assert_eq!(transition(&planner, model, small, small), None);
        // Growing: the new devices get the whole state each; bf16 parameters with Adam are 2 + 12 bytes.
        let grown = transition(&planner, model, small, large).unwrap();
        let state = planner.model().parameters() * 14.0;
        let added = f64::from(large.dims.dp - small.dims.dp);
        assert!((grown.bytes - added * state).abs() < 1e-6 * grown.bytes);
        assert!((grown.seconds - 10.0 - planner.cluster().inter(0).seconds(state)).abs() < 1e-6);
        // Shrinking moves nothing.
        assert!(
            transition(&planner, model, large, small)
                .unwrap()
                .bytes
                .abs()
                < 1.0
        );
    }

    #[test]
    fn front_equals_all_sequences_of_plans() {
        for (samples, restart_seconds) in [(2_000, 0.5), (100_000, 0.0), (20_000, 3.0)] {
            let planner = planner(samples);
            let model = TransitionModel { restart_seconds };
            let candidates = candidates(&planner).unwrap();
            let intervals = &planner.training().trajectory;
            // Time and money of every way to go from interval to interval, with the changes made.
            let mut ways: Vec<(f64, f64, u32, usize)> = vec![(0.0, 0.0, 0, 0)];
            for (i, (plans, interval)) in candidates.iter().zip(intervals).enumerate() {
                let mut next = Vec::new();
                for &(time, cost, changes, last) in &ways {
                    for (index, plan) in plans.iter().enumerate() {
                        let change = (i > 0)
                            .then(|| {
                                let before = &candidates[i - 1][last].configuration;
                                transition(&planner, model, before, &plan.configuration)
                            })
                            .flatten();
                        let steps = interval.samples.div_ceil(interval.global_batch) as f64;
                        next.push((
                            time + change.map_or(0.0, |c| c.seconds)
                                + steps * plan.iteration_time(),
                            cost + change.map_or(0.0, |c| c.money) + steps * plan.iteration_cost(),
                            changes + u32::from(change.is_some()),
                            index,
                        ));
                    }
                }
                ways = next;
            }
            assert!(ways.len() > 50, "{} sequences", ways.len());
            let mut expected = ParetoFront::new();
            for &(time, cost, changes, _) in &ways {
                expected.insert(time, cost, changes).unwrap();
            }
            let found = plan_trajectory(&planner, &model).unwrap();
            let found = found.map(|plan| plan.changes);
            assert_eq!(found, expected);
        }
    }
}
