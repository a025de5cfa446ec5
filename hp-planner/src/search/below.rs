//! Below a shape: numbers of replicas, their shares of the batch, schedules and `ZeRO` stages.

use super::layers::{LayerTimes, template};
use super::space::{self, Counts, Shape};
use super::visit::{SLACK, Visit};
use crate::assign::{RankKind, Share, assign_after};
use crate::cost::{CostModel, Problem, ReplicaKind, ShapeChoice, ShapeCost};
use crate::error::Infeasible;
use crate::pareto::ParetoFront;
use crate::plan::{Allocation, Configuration, ParallelPlan, ReplicaGroup, Stage};
use crate::planner::Outcome;
use crate::training::Schedule;

/// What is fixed below a shape.
#[derive(Debug)]
pub(super) struct Below<'a> {
    problem: &'a Problem<'a>,
    cost: &'a dyn CostModel,
    bounded: bool,
    shape: &'a Shape,
    /// What was found before.
    front: &'a ParetoFront<ParallelPlan>,
    micro_batches: u64,
    counts: Counts,
    /// For each row of `counts` the seconds without fill and drain that no division of the layers beats, and the price per
    /// hour.
    coarse: Vec<(f64, f64)>,
    rest: f64,
    zero: Vec<u8>,
}

/// A kind of replica whose layers are divided.
struct Kind<'a> {
    stages: &'a [Stage],
    streams: u32,
    /// Seconds of a round on the busiest stage, and on the others together.
    busiest: f64,
    rest: f64,
    /// Money per hour of one replica.
    price: f64,
}

impl<'a> Below<'a> {
    pub(super) fn new(
        problem: &'a Problem<'a>,
        cost: &'a dyn CostModel,
        times: &LayerTimes<'_>,
        visit: &'a Visit,
        front: &'a ParetoFront<ParallelPlan>,
    ) -> Self {
        let shape = &visit.shape;
        let micro_batches = problem.training.global_batch / u64::from(shape.micro_batch);
        let counts = space::allocations(problem, shape, micro_batches);
        let coarse = counts
            .rows()
            .map(|row| {
                let (mut rate, mut price) = (0.0, 0.0);
                for (&n, kind) in row.iter().zip(&visit.kinds) {
                    rate += f64::from(n) / kind.seconds;
                    price += f64::from(n) * kind.price;
                }
                (micro_batches as f64 / rate, price)
            })
            .collect();
        let mut zero = problem.training.zero.clone();
        zero.sort_unstable();
        zero.dedup();
        Self {
            problem,
            cost,
            bounded: times.bounded,
            shape,
            front,
            micro_batches,
            counts,
            coarse,
            rest: visit.rest,
            zero,
        }
    }

    /// The rows of `counts` that a schedule may make something of, whatever the division of the layers.
    pub(super) fn open(&self, schedule: Schedule, chunks: u32, found: &Outcome) -> Vec<usize> {
        let idle = self.cost.fill(schedule, chunks) * self.rest;
        (0..self.coarse.len())
            .filter(|&index| {
                let (seconds, price) = self.coarse[index];
                !self.excluded(seconds + idle, price, found)
            })
            .collect()
    }

    /// Tries the open rows of each schedule with stages and virtual workers fixed.
    pub(super) fn visit(
        &self,
        chunks: u32,
        layouts: &[Vec<Stage>],
        streams: &[u32],
        open: &[(Schedule, Vec<usize>)],
        found: &mut Outcome,
    ) {
        let mut template = template(self.problem, self.shape, chunks);
        template.allocation = self.allocation(layouts, &vec![1; layouts.len()]);
        let replicas: Vec<ReplicaKind<'_>> = layouts
            .iter()
            .zip(streams)
            .map(|(stages, &virtual_workers)| ReplicaKind {
                stages,
                virtual_workers,
            })
            .collect();
        let mut shape = match self.cost.shape(self.problem, &template, &replicas) {
            None => None,
            Some(Ok(shape)) => Some(shape),
            Some(Err(reason)) => {
                let rows: usize = open.iter().map(|(_, rows)| rows.len()).sum();
                found.reject_all(reason, (rows * self.zero.len()) as u64);
                return;
            }
        };
        let kinds: Vec<Kind<'_>> = replicas
            .iter()
            .enumerate()
            .map(|(index, kind)| {
                let (busiest, through) = shape
                    .as_ref()
                    .map_or_else(|| self.round(&template, kind), |shape| shape.round(index));
                let gpus = self.allocation(&layouts[index..=index], &[1]);
                Kind {
                    stages: kind.stages,
                    streams: kind.virtual_workers,
                    busiest,
                    rest: through - busiest,
                    price: self.price_per_hour(&gpus),
                }
            })
            .collect();
        for (schedule, rows) in open {
            template.schedule = *schedule;
            self.rows(&template, &kinds, &mut shape, rows, found);
        }
    }

    /// Seconds of a round on the busiest stage, and summed over the stages.
    fn round(&self, template: &Configuration, kind: &ReplicaKind<'_>) -> (f64, f64) {
        let (mut busiest, mut through) = (0.0_f64, 0.0);
        for stage in kind.stages {
            let seconds =
                self.cost
                    .round_seconds(self.problem, template, stage, kind.virtual_workers);
            busiest = busiest.max(seconds.unwrap_or(1.0));
            through += seconds.unwrap_or(1.0);
        }
        (busiest, through)
    }

    /// Tries rows of numbers of replicas under one schedule.
    fn rows(
        &self,
        template: &Configuration,
        kinds: &[Kind<'_>],
        shape: &mut Option<Box<dyn ShapeCost + '_>>,
        rows: &[usize],
        found: &mut Outcome,
    ) {
        let (schedule, chunks) = (template.schedule, template.dims.vpp);
        let fill = self.cost.fill(schedule, chunks);
        let idle: Vec<f64> = kinds.iter().map(|kind| fill * kind.rest).collect();
        let least_idle = idle.iter().copied().fold(f64::INFINITY, f64::min);
        // More replicas never need more memory per device: in a list of falling numbers of equal replicas everything
        // behind one that does not fit does not fit either.
        let mut full = vec![false; self.zero.len()];
        let mut ranks: Vec<RankKind> = Vec::with_capacity(kinds.len());
        let mut rounds: Vec<(usize, u32)> = Vec::with_capacity(2 * kinds.len());
        for &row in rows {
            let counts = self.counts.row(row);
            let (mut rate, mut price) = (0.0, 0.0);
            for (&n, kind) in counts.iter().zip(kinds) {
                rate += f64::from(n * kind.streams) / kind.busiest;
                price += f64::from(n) * kind.price;
            }
            // First without whole rounds, which is cheaper to tell.
            if self.excluded(self.micro_batches as f64 / rate + least_idle, price, found) {
                continue;
            }
            ranks.clear();
            ranks.extend(counts.iter().zip(kinds).map(|(&ranks, kind)| RankKind {
                ranks,
                streams: kind.streams,
                round: kind.busiest,
            }));
            let Some(shares) = assign_after(&ranks, &idle, self.micro_batches) else {
                found.reject(Infeasible::Unsupported(format!(
                    "{} micro-batches are no sum of whole rounds of the ranks",
                    self.micro_batches
                )));
                continue;
            };
            rounds.clear();
            let mut slowest = 0.0_f64;
            for (index, (kind, share)) in kinds.iter().zip(&shares).enumerate() {
                for (count, steps) in parts(counts[index], share) {
                    if count > 0 {
                        slowest = slowest.max(f64::from(steps) * kind.busiest + idle[index]);
                        rounds.push((index, steps));
                    }
                }
            }
            if self.excluded(slowest, price, found) {
                continue;
            }
            let uneven = rounds.iter().find_map(|&(index, steps)| {
                let micro_batches = kinds[index].streams as usize * steps as usize;
                let stages = self.shape.pp as usize;
                crate::cost::schedule::check(schedule, stages, chunks as usize, micro_batches).err()
            });
            if let Some(reason) = uneven {
                found.reject(reason);
                continue;
            }
            let dp: u32 = counts.iter().sum();
            for (index, &zero) in self.zero.iter().enumerate().rev() {
                if full[index] {
                    found.reject_more("memory", 1);
                    continue;
                }
                if let Some(shape) = shape {
                    let choice = ShapeChoice {
                        schedule,
                        zero,
                        dp,
                        rounds: &rounds,
                    };
                    if self.excluded(shape.seconds(&choice), price, found) {
                        found.examined += 1;
                        continue;
                    }
                    if !shape.fits(&choice) {
                        full[index] = kinds.len() == 1;
                        if found.reject_more("memory", 1) {
                            continue;
                        }
                    }
                }
                let configuration = self.configuration(template, kinds, counts, &shares, zero);
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

    fn configuration(
        &self,
        template: &Configuration,
        kinds: &[Kind<'_>],
        counts: &[u32],
        shares: &[Share],
        zero: u8,
    ) -> Configuration {
        let mut configuration = template.clone();
        configuration.zero = zero;
        configuration.dims.dp = counts.iter().sum();
        let mut gpus = vec![0; self.problem.cluster.groups.len()];
        for ((kind, &n), share) in kinds.iter().zip(counts).zip(shares) {
            for stage in kind.stages {
                gpus[stage.group] += n * self.shape.tp * self.shape.cp;
            }
            for (count, accumulation_steps) in parts(n, share) {
                if count > 0 {
                    configuration.replicas.push(ReplicaGroup {
                        count,
                        stages: kind.stages.to_vec(),
                        virtual_workers: kind.streams,
                        accumulation_steps,
                    });
                }
            }
        }
        configuration.allocation = Allocation { gpus };
        configuration
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

    fn allocation(&self, layouts: &[Vec<Stage>], counts: &[u32]) -> Allocation {
        let mut gpus = vec![0; self.problem.cluster.groups.len()];
        for (stages, &count) in layouts.iter().zip(counts) {
            for stage in stages {
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
}

/// Numbers of equal replicas with their rounds.
fn parts(replicas: u32, share: &Share) -> [(u32, u32); 2] {
    [
        (share.longer, share.rounds + 1),
        (replicas - share.longer, share.rounds),
    ]
}
