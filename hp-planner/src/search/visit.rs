//! One shape: its bound, and the search below it.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::below::Below;
use super::layers::LayerTimes;
use super::space::{self, Family, Shape};
use crate::cost::{CostModel, Problem};
use crate::planner::Outcome;
use crate::training::Schedule;

/// Bounds are lowered by this fraction, so that rounding in sums can never lift one above what it bounds.
pub(super) const SLACK: f64 = 1.0 - 1e-9;

/// A kind of replica before its layers are divided into stages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coarse {
    /// Seconds per micro-batch that no division of the layers beats on the busiest stage.
    pub(super) seconds: f64,
    /// Money per hour of one replica.
    pub(super) price: f64,
}

/// A shape to be searched, with bounds on everything below it.
#[derive(Debug)]
pub(super) struct Visit {
    pub(super) shape: Shape,
    pub(super) kinds: Vec<Coarse>,
    /// Seconds that one micro-batch spends outside the busiest stage at least.
    pub(super) rest: f64,
    /// Seconds that no configuration of this shape beats.
    time: f64,
    /// Money that none of them beats.
    cost: f64,
}

impl Visit {
    /// `None` if the cluster or the batch has no room for a single replica.
    pub(super) fn new(
        problem: &Problem<'_>,
        cost: &dyn CostModel,
        times: &LayerTimes<'_>,
        shape: Shape,
    ) -> Option<Self> {
        let micro_batches = problem.training.global_batch / u64::from(shape.micro_batch);
        let per_stage = u64::from(shape.tp) * u64::from(shape.cp);
        let cluster = problem.cluster;
        let room = |group: usize, stages: u32| {
            (u64::from(cluster.groups[group].gpus()) / (per_stage * u64::from(stages)))
                .min(micro_batches)
        };
        let price = |group: usize, stages: u32| {
            per_stage as f64 * f64::from(stages) * cluster.price_per_gpu_hour(group)
        };
        // Most replicas of each kind.
        let mut most = Vec::new();
        let mut kinds = Vec::new();
        let mut rest = f64::INFINITY;
        match &shape.family {
            Family::Within(groups) => {
                for &group in groups {
                    most.push(room(group, shape.pp));
                    let whole = times.whole(&shape, group);
                    let seconds = whole / f64::from(shape.pp);
                    rest = rest.min(whole - seconds);
                    kinds.push(Coarse {
                        seconds,
                        price: price(group, shape.pp),
                    });
                }
            }
            Family::Across(stages) => {
                let room = stages.iter().map(|&(group, n)| room(group, n));
                most.push(room.min().unwrap_or(0));
                let (seconds, least) = across(times, &shape, stages);
                rest = rest.min(least - seconds);
                kinds.push(Coarse {
                    seconds,
                    price: stages.iter().map(|&(group, n)| price(group, n)).sum(),
                });
            }
        }
        if most.contains(&0) {
            return None;
        }
        let mut fill = f64::INFINITY;
        for (schedule, chunks) in space::schedules(problem, shape.pp) {
            fill = fill.min(cost.fill(schedule, chunks));
        }
        let idle = if rest > 0.0 && fill.is_finite() {
            fill * rest
        } else {
            0.0
        };
        // Micro-batches per second with all GPUs, and least money per micro-batch.
        let rate: f64 = kinds
            .iter()
            .zip(&most)
            .map(|(kind, &most)| most as f64 / kind.seconds)
            .sum();
        let money = kinds
            .iter()
            .map(|kind| kind.price * kind.seconds)
            .fold(f64::INFINITY, f64::min);
        let each: f64 = kinds.iter().map(|kind| kind.price).sum();
        let bound = |value: f64| {
            if times.bounded && value.is_finite() {
                value * SLACK
            } else {
                0.0
            }
        };
        Some(Self {
            time: bound(micro_batches as f64 / rate + idle),
            cost: bound((micro_batches as f64 * money + idle * each) / 3600.0),
            rest: rest.max(0.0),
            kinds,
            shape,
        })
    }

    /// Cheap and fast shapes first: their finds exclude the most.
    pub(super) fn order(a: &Self, b: &Self) -> Ordering {
        (a.time * a.cost)
            .total_cmp(&(b.time * b.cost))
            .then_with(|| a.time.total_cmp(&b.time))
    }

    /// All configurations of the shape that the bounds do not exclude, or what was found of them until it was `late`.
    pub(super) fn run(
        &self,
        problem: &Problem<'_>,
        cost: &dyn CostModel,
        times: &LayerTimes<'_>,
        before: &Outcome,
        late: &(dyn Fn() -> bool + Sync),
    ) -> Outcome {
        if before.front.dominates(self.time, self.cost) || late() {
            return Outcome::default();
        }
        let mut found = before.following();
        let below = Below::new(problem, cost, times, self, &before.front, late);
        let mut schedules_of: BTreeMap<u32, Vec<Schedule>> = BTreeMap::new();
        for (schedule, chunks) in space::schedules(problem, self.shape.pp) {
            schedules_of.entry(chunks).or_default().push(schedule);
        }
        for (chunks, schedules) in schedules_of {
            let open: Vec<(Schedule, Vec<usize>)> = schedules
                .into_iter()
                .map(|schedule| (schedule, below.open(schedule, chunks, &found)))
                .filter(|(_, open)| !open.is_empty())
                .collect();
            if open.is_empty() {
                continue;
            }
            let Some(layouts) = times.layouts(&self.shape, chunks) else {
                continue;
            };
            for streams in stream_choices(problem, &self.shape, layouts.len()) {
                below.visit(chunks, &layouts, &streams, &open, &mut found);
            }
        }
        found
    }
}

/// Seconds per micro-batch that the busiest stage and that all stages together take at least, for a pipeline with so many
/// stages on each of several groups.
fn across(times: &LayerTimes<'_>, shape: &Shape, stages: &[(usize, u32)]) -> (f64, f64) {
    let prefixes: Vec<_> = stages
        .iter()
        .map(|&(group, _)| times.prefix(shape, group))
        .collect();
    let layers = prefixes[0].len() - 1;
    // With weights 1 / (whole model on stage s), every layer adds at least its least weighted time.
    let whole: Vec<f64> = prefixes.iter().map(|p| p[layers]).collect();
    let (mut shares, mut least) = (0.0, 0.0);
    for l in 0..layers {
        let (mut weighted, mut plain) = (f64::INFINITY, f64::INFINITY);
        for (prefix, whole) in prefixes.iter().zip(&whole) {
            let seconds = prefix[l + 1] - prefix[l];
            weighted = weighted.min(seconds / whole);
            plain = plain.min(seconds);
        }
        shares += weighted;
        least += plain;
    }
    let power: f64 = stages
        .iter()
        .zip(&whole)
        .map(|(&(_, n), whole)| f64::from(n) / whole)
        .sum();
    (shares / power, least)
}

/// Virtual workers per layout: all combinations without a pipeline, one with.
fn stream_choices(problem: &Problem<'_>, shape: &Shape, layouts: usize) -> Vec<Vec<u32>> {
    let most = if shape.pp == 1 && shape.tp == 1 {
        problem.training.max_virtual_workers
    } else {
        1
    };
    let mut all = vec![Vec::new()];
    for _ in 0..layouts {
        all = all
            .iter()
            .flat_map(|taken: &Vec<u32>| {
                (1..=most).map(move |n| taken.iter().copied().chain([n]).collect())
            })
            .collect();
    }
    all
}
