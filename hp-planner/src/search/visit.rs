//! One shape: its bound, and the search below it.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::slice;
use std::sync::{Arc, Mutex};

use super::partition;
use super::space::{self, Family, Shape};
use crate::assign::{RankKind, Share, assign};
use crate::cost::{CostModel, Problem, schedule::splits_backward};
use crate::error::Infeasible;
use crate::pareto::ParetoFront;
use crate::plan::{Allocation, Configuration, ParallelDims, ParallelPlan, ReplicaGroup, Stage};
use crate::planner::Outcome;
use crate::training::{Recompute, Schedule};

/// Bounds are lowered by this fraction, so that rounding in sums can never lift one above what it bounds.
const SLACK: f64 = 1.0 - 1e-9;

/// What the times of layers depend on.
type Key = (usize, u32, u32, u32, u32, Recompute);

/// Cumulated seconds of the first layers on one group, remembered: many shapes share them.
#[derive(Debug)]
pub(super) struct LayerTimes<'a> {
    problem: Problem<'a>,
    cost: &'a dyn CostModel,
    /// Whether the cost model can tell how long stages take; without, nothing is excluded.
    bounded: bool,
    known: Mutex<BTreeMap<Key, Arc<[f64]>>>,
}

impl<'a> LayerTimes<'a> {
    pub(super) fn new(problem: &Problem<'a>, cost: &'a dyn CostModel) -> Self {
        let probe = Shape {
            family: Family::Within(vec![0]),
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            micro_batch: 1,
            recompute: problem.training.recompute[0],
        };
        let stage = Stage {
            group: 0,
            first_layer: 0,
            layers: 1,
            tp: 1,
        };
        let template = template(problem, &probe, problem.training.schedules[0], 1);
        Self {
            problem: *problem,
            cost,
            bounded: cost.round_seconds(problem, &template, &stage, 1).is_some(),
            known: Mutex::new(BTreeMap::new()),
        }
    }

    /// Seconds of one micro-batch in the first l layers of the model on `group`, for all l.
    fn prefix(&self, shape: &Shape, group: usize) -> Arc<[f64]> {
        let key = (
            group,
            shape.tp,
            shape.cp,
            shape.ep,
            shape.micro_batch,
            shape.recompute,
        );
        if let Ok(known) = self.known.lock()
            && let Some(prefix) = known.get(&key)
        {
            return prefix.clone();
        }
        let template = template(&self.problem, shape, Schedule::OneFOneB, 1);
        let mut sum = 0.0;
        let mut prefix = vec![0.0];
        for layer in 0..self.problem.model.depth() {
            let stage = Stage {
                group,
                first_layer: layer,
                layers: 1,
                tp: shape.tp,
            };
            // A model that cannot tell counts each layer as one.
            sum += self
                .cost
                .round_seconds(&self.problem, &template, &stage, 1)
                .unwrap_or(1.0);
            prefix.push(sum);
        }
        let prefix: Arc<[f64]> = prefix.into();
        if let Ok(mut known) = self.known.lock() {
            known.insert(key, prefix.clone());
        }
        prefix
    }
}

/// A shape to be searched, with bounds on everything below it.
#[derive(Debug)]
pub(super) struct Visit {
    shape: Shape,
    /// Seconds that no configuration of this shape beats.
    time: f64,
    /// Money that none of them beats.
    cost: f64,
}

impl Visit {
    /// `None` if the cluster or the batch has no room for a single replica.
    pub(super) fn new(problem: &Problem<'_>, times: &LayerTimes<'_>, shape: Shape) -> Option<Self> {
        let micro_batches = problem.training.global_batch / u64::from(shape.micro_batch);
        let per_stage = u64::from(shape.tp) * u64::from(shape.cp);
        let cluster = problem.cluster;
        let room = |group: usize, stages: u32| {
            (u64::from(cluster.groups[group].gpus()) / (per_stage * u64::from(stages)))
                .min(micro_batches)
        };
        let price = |group: usize, stages: u32| {
            per_stage as f64 * f64::from(stages) * cluster.price_per_gpu_hour(group) / 3600.0
        };
        // Micro-batches per second with all GPUs, and least money per micro-batch.
        let (rate, money) = match &shape.family {
            Family::Within(groups) => {
                let mut rate = 0.0;
                let mut money = f64::INFINITY;
                for &group in groups {
                    if room(group, shape.pp) == 0 {
                        return None;
                    }
                    let prefix = times.prefix(&shape, group);
                    let seconds = streams_discount(problem, times.cost, &shape, group, &prefix)
                        / f64::from(shape.pp);
                    rate += room(group, shape.pp) as f64 / seconds;
                    money = money.min(price(group, shape.pp) * seconds);
                }
                (rate, money)
            }
            Family::Across(stages) => {
                let replicas = stages
                    .iter()
                    .map(|&(group, n)| room(group, n))
                    .min()
                    .unwrap_or(0);
                if replicas == 0 {
                    return None;
                }
                let prefixes: Vec<_> = stages
                    .iter()
                    .map(|&(group, _)| times.prefix(&shape, group))
                    .collect();
                let layers = prefixes[0].len() - 1;
                // With weights 1 / (whole model on stage s), every layer adds at least its least weighted time.
                let whole: Vec<f64> = prefixes.iter().map(|p| p[layers]).collect();
                let shares: f64 = (0..layers)
                    .map(|l| {
                        let weighted = prefixes
                            .iter()
                            .zip(&whole)
                            .map(|(p, whole)| (p[l + 1] - p[l]) / whole);
                        weighted.fold(f64::INFINITY, f64::min)
                    })
                    .sum();
                let power: f64 = stages
                    .iter()
                    .zip(&whole)
                    .map(|(&(_, n), whole)| f64::from(n) / whole)
                    .sum();
                let seconds = shares / power;
                let all: f64 = stages.iter().map(|&(group, n)| price(group, n)).sum();
                (replicas as f64 / seconds, all * seconds)
            }
        };
        let bound = |value: f64| {
            if times.bounded && value.is_finite() {
                value * SLACK
            } else {
                0.0
            }
        };
        Some(Self {
            time: bound(micro_batches as f64 / rate),
            cost: bound(micro_batches as f64 * money),
            shape,
        })
    }

    /// Cheap and fast shapes first: their finds exclude the most.
    pub(super) fn order(a: &Self, b: &Self) -> Ordering {
        (a.time * a.cost)
            .total_cmp(&(b.time * b.cost))
            .then_with(|| a.time.total_cmp(&b.time))
    }

    /// All configurations of the shape that the bounds do not exclude.
    pub(super) fn run(
        &self,
        problem: &Problem<'_>,
        cost: &dyn CostModel,
        times: &LayerTimes<'_>,
        front: &ParetoFront<ParallelPlan>,
    ) -> Outcome {
        let mut found = Outcome::default();
        if front.dominates(self.time, self.cost) {
            return found;
        }
        let shape = &self.shape;
        let micro_batches = problem.training.global_batch / u64::from(shape.micro_batch);
        let allocations = space::allocations(problem, shape, micro_batches);
        let mut zero = problem.training.zero.clone();
        zero.sort_unstable();
        zero.dedup();
        let mut layouts_of = BTreeMap::new();
        for (schedule, chunks) in space::schedules(problem, shape.pp) {
            let layouts = layouts_of
                .entry(chunks)
                .or_insert_with(|| Layout::of(times, shape, chunks));
            let Some(layouts) = layouts else { continue };
            let below = Below {
                problem,
                cost,
                bounded: times.bounded,
                shape,
                front,
                micro_batches,
                schedule,
                chunks,
                zero: &zero,
            };
            for streams in stream_choices(problem, shape, layouts.len()) {
                let rounds: Vec<Round> = layouts
                    .iter()
                    .zip(&streams)
                    .map(|(layout, &streams)| below.round(layout, streams))
                    .collect();
                below.visit(layouts, &streams, &rounds, &allocations, &mut found);
            }
        }
        found
    }
}

/// The time of a micro-batch through the whole model on one GPU of `group`, at the number of virtual workers that serves
/// it best.
fn streams_discount(
    problem: &Problem<'_>,
    cost: &dyn CostModel,
    shape: &Shape,
    group: usize,
    prefix: &[f64],
) -> f64 {
    let layers = prefix.len() - 1;
    if shape.pp > 1 {
        return prefix[layers];
    }
    let template = template(problem, shape, Schedule::OneFOneB, 1);
    let stage = Stage {
        group,
        first_layer: 0,
        layers: layers as u32,
        tp: shape.tp,
    };
    (1..=problem.training.max_virtual_workers)
        .filter_map(|streams| {
            let seconds = cost.round_seconds(problem, &template, &stage, streams)?;
            Some(seconds / f64::from(streams))
        })
        .fold(prefix[layers], f64::min)
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

/// Seconds of a round of micro-batches on a kind of replica.
struct Round {
    /// On the busiest stage.
    busiest: f64,
    /// On each stage, and before the first micro-batch reaches it together with after the last one left it.
    ways: Vec<(f64, f64)>,
}

impl Round {
    /// Seconds that `steps` rounds take at least.
    fn least(&self, steps: u32) -> f64 {
        self.ways
            .iter()
            .map(|(seconds, way)| f64::from(steps) * seconds + way)
            .fold(0.0, f64::max)
    }
}

/// The stages of one kind of replica.
struct Layout {
    stages: Vec<Stage>,
}

impl Layout {
    /// One layout per group that holds whole replicas, or the one across groups; `None` if there are too few layers.
    fn of(times: &LayerTimes<'_>, shape: &Shape, chunks: u32) -> Option<Vec<Self>> {
        let orders: Vec<Vec<usize>> = match &shape.family {
            Family::Within(groups) => groups
                .iter()
                .map(|&group| vec![group; shape.pp as usize])
                .collect(),
            Family::Across(stages) => {
                vec![
                    stages
                        .iter()
                        .flat_map(|&(group, n)| std::iter::repeat_n(group, n as usize))
                        .collect(),
                ]
            }
        };
        orders
            .into_iter()
            .map(|groups| {
                // With several chunks per stage, layers are dealt out in bundles of as many.
                let mut known: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
                for &group in &groups {
                    known.entry(group).or_insert_with(|| {
                        times
                            .prefix(shape, group)
                            .iter()
                            .copied()
                            .step_by(chunks as usize)
                            .collect()
                    });
                }
                let prefix: Vec<&[f64]> =
                    groups.iter().map(|group| known[group].as_slice()).collect();
                let counts = partition::bottleneck(&prefix)?;
                let mut first_layer = 0;
                let stages = groups
                    .iter()
                    .zip(counts)
                    .map(|(&group, count)| {
                        let layers = count * chunks;
                        let stage = Stage {
                            group,
                            first_layer,
                            layers,
                            tp: shape.tp,
                        };
                        first_layer += layers;
                        stage
                    })
                    .collect();
                Some(Self { stages })
            })
            .collect()
    }
}

/// What is fixed while allocations, shares and `ZeRO` stages are tried.
struct Below<'a> {
    problem: &'a Problem<'a>,
    cost: &'a dyn CostModel,
    bounded: bool,
    shape: &'a Shape,
    front: &'a ParetoFront<ParallelPlan>,
    micro_batches: u64,
    schedule: Schedule,
    chunks: u32,
    zero: &'a [u8],
}

impl Below<'_> {
    /// Times of a round in every stage of a layout.
    fn round(&self, layout: &Layout, streams: u32) -> Round {
        let template = template(self.problem, self.shape, self.schedule, self.chunks);
        let stages = layout.stages.iter().map(|stage| {
            self.cost
                .round_seconds(self.problem, &template, stage, streams)
                .unwrap_or(1.0)
        });
        let mut busiest = 0.0_f64;
        let mut before = 0.0;
        let mut ways = Vec::with_capacity(layout.stages.len());
        for seconds in stages {
            busiest = busiest.max(seconds);
            // Zero-bubble schedules of consecutive iterations interlock, so that the way to a stage costs nothing.
            let way = if splits_backward(self.schedule) {
                0.0
            } else {
                before / f64::from(self.chunks)
            };
            ways.push((seconds, way));
            before += seconds;
        }
        Round { busiest, ways }
    }

    fn visit(
        &self,
        layouts: &[Layout],
        streams: &[u32],
        rounds: &[Round],
        allocations: &[Vec<u32>],
        found: &mut Outcome,
    ) {
        // More replicas never need more memory per device: in a list of falling numbers of equal replicas everything
        // behind one that does not fit does not fit either.
        let mut full = vec![false; self.zero.len()];
        // Money per hour and micro-batches per second of one replica of each kind.
        let each: Vec<(f64, f64)> = layouts
            .iter()
            .zip(streams)
            .zip(rounds)
            .map(|((layout, &streams), round)| {
                let price = self.price_per_hour(&self.allocation(slice::from_ref(layout), &[1]));
                (price, f64::from(streams) / round.busiest)
            })
            .collect();
        for counts in allocations {
            let total = |of: fn(&(f64, f64)) -> f64| -> f64 {
                counts
                    .iter()
                    .zip(&each)
                    .map(|(&n, each)| f64::from(n) * of(each))
                    .sum()
            };
            let price = total(|each| each.0);
            // First without whole rounds, which is cheaper to tell.
            if self.excluded(
                self.micro_batches as f64 / total(|each| each.1),
                price,
                found,
            ) {
                continue;
            }
            let kinds: Vec<RankKind> = counts
                .iter()
                .zip(rounds)
                .zip(streams)
                .map(|((&ranks, round), &streams)| RankKind {
                    ranks,
                    streams,
                    round: round.busiest,
                })
                .collect();
            let mut configuration = template(self.problem, self.shape, self.schedule, self.chunks);
            configuration.allocation = self.allocation(layouts, counts);
            configuration.dims.dp = counts.iter().sum();
            let Some(shares) = shares(&kinds, self.micro_batches) else {
                found.reject(Infeasible::Unsupported(format!(
                    "{} micro-batches are no sum of whole rounds of the ranks",
                    self.micro_batches
                )));
                continue;
            };
            let mut slowest = 0.0_f64;
            for (index, (kind, share)) in kinds.iter().zip(shares).enumerate() {
                for (count, steps) in [
                    (share.longer, share.rounds + 1),
                    (kind.ranks - share.longer, share.rounds),
                ] {
                    if count > 0 {
                        slowest = slowest.max(rounds[index].least(steps));
                        configuration.replicas.push(ReplicaGroup {
                            count,
                            stages: layouts[index].stages.clone(),
                            virtual_workers: kind.streams,
                            accumulation_steps: steps,
                        });
                    }
                }
            }
            if self.excluded(slowest, price, found) {
                continue;
            }
            if let Some(reason) = self.breaks_interleaving(&configuration) {
                found.reject(reason);
                continue;
            }
            for (index, &zero) in self.zero.iter().enumerate().rev() {
                configuration.zero = zero;
                if full[index] {
                    found.reject_more("memory", 1);
                    continue;
                }
                match self.cost.estimate(self.problem, &configuration) {
                    Ok(estimate) => found.offer_estimate(estimate, &configuration),
                    Err(reason) => {
                        if matches!(reason, Infeasible::Memory { .. }) && kinds.len() == 1 {
                            full[index] = true;
                        }
                        found.reject(reason);
                    }
                }
            }
        }
    }

    /// Whether something found is better than anything that takes `seconds` at least.
    fn excluded(&self, seconds: f64, price: f64, found: &Outcome) -> bool {
        if !self.bounded || !seconds.is_finite() {
            return false;
        }
        let time = seconds * SLACK;
        let cost = time * price / 3600.0 * SLACK;
        self.front.dominates(time, cost) || found.front.dominates(time, cost)
    }

    fn allocation(&self, layouts: &[Layout], counts: &[u32]) -> Allocation {
        let mut gpus = vec![0; self.problem.cluster.groups.len()];
        for (layout, &count) in layouts.iter().zip(counts) {
            for stage in &layout.stages {
                gpus[stage.group] += count * self.shape.tp * self.shape.cp;
            }
        }
        Allocation { gpus }
    }

    fn price_per_hour(&self, allocation: &Allocation) -> f64 {
        allocation
            .groups()
            .map(|(group, gpus)| f64::from(gpus) * self.problem.cluster.price_per_gpu_hour(group))
            .sum()
    }

    fn breaks_interleaving(&self, configuration: &Configuration) -> Option<Infeasible> {
        configuration.replicas.iter().find_map(|replicas| {
            crate::cost::schedule::check(
                self.schedule,
                self.shape.pp as usize,
                self.chunks as usize,
                replicas.micro_batches() as usize,
            )
            .err()
        })
    }
}

/// [`assign`], without its bisection where there is only one kind of rank.
fn shares(kinds: &[RankKind], micro_batches: u64) -> Option<Vec<Share>> {
    let [kind] = kinds else {
        return assign(kinds, micro_batches);
    };
    let (ranks, streams) = (u64::from(kind.ranks), u64::from(kind.streams));
    let rounds = micro_batches / streams;
    (micro_batches.is_multiple_of(streams) && rounds >= ranks).then(|| {
        vec![Share {
            rounds: (rounds / ranks) as u32,
            longer: (rounds % ranks) as u32,
        }]
    })
}

/// A configuration of the shape without replicas.
fn template(
    problem: &Problem<'_>,
    shape: &Shape,
    schedule: Schedule,
    chunks: u32,
) -> Configuration {
    Configuration {
        dims: ParallelDims {
            dp: 1,
            tp: shape.tp,
            pp: shape.pp,
            vpp: chunks,
            cp: shape.cp,
            ep: shape.ep,
        },
        allocation: Allocation { gpus: Vec::new() },
        replicas: Vec::new(),
        micro_batch: shape.micro_batch,
        schedule,
        recompute: shape.recompute,
        zero: 0,
        sequence_parallel: problem.training.sequence_parallel && shape.tp > 1,
    }
}
