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
pub(super) struct Below<'a> {
    problem: &'a Problem<'a>,
    cost: &'a dyn CostModel,
    bounded: bool,
    shape: &'a Shape,
    /// What was found before.
    front: &'a ParetoFront<ParallelPlan>,
    late: &'a (dyn Fn() -> bool + Sync),
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
        late: &'a (dyn Fn() -> bool + Sync),
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
            late,
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
        let mut after = After::new(self.coarse.len(), &self.zero);
        for (schedule, rows) in open {
            template.schedule = *schedule;
            self.rows(&template, &kinds, &mut shape, &mut after, rows, found);
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
        after: &mut After<'_>,
        rows: &[usize],
        found: &mut Outcome,
    ) {
        let (schedule, chunks) = (template.schedule, template.dims.vpp);
        let fill = self.cost.fill(schedule, chunks);
        let idle: Vec<f64> = kinds.iter().map(|kind| fill * kind.rest).collect();
        let least_idle = idle.iter().copied().fold(f64::INFINITY, f64::min);
        // More replicas never need more memory per device: in a list of falling numbers of equal replicas everything
        // behind one that does not fit does not fit either.
        let mut full = self.never_fits(schedule, kinds, shape.as_deref(), rows, found);
        let mut ranks: Vec<RankKind> = Vec::with_capacity(kinds.len());
        let mut rounds: Vec<(usize, u32)> = Vec::with_capacity(2 * kinds.len());
        for (position, &row) in rows.iter().enumerate() {
            if full.iter().all(|&full| full) {
                return;
            }
            let counts = self.counts.row(row);
            let (mut rate, mut price) = (0.0, 0.0);
            for (&n, kind) in counts.iter().zip(kinds) {
                rate += f64::from(n * kind.streams) / kind.busiest;
                price += f64::from(n) * kind.price;
            }
            // First without whole rounds, which is cheaper to tell.
            let least = self.micro_batches as f64 / rate + least_idle;
            if self.excluded(least, price, found) {
                continue;
            }
            let dp: u32 = counts.iter().sum();
            let after = after.of(row, dp, shape.as_deref_mut());
            let quickest = after
                .iter()
                .zip(&full)
                .filter_map(|(&seconds, &full)| (!full).then_some(seconds))
                .fold(f64::INFINITY, f64::min);
            if self.excluded(least + quickest, price, found) {
                continue;
            }
            if (self.late)() {
                return;
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
                for (count, steps) in parts(counts[index], *share) {
                    if count > 0 {
                        slowest = slowest.max(f64::from(steps) * kind.busiest + idle[index]);
                        rounds.push((index, steps));
                    }
                }
            }
            if self.excluded(slowest + quickest, price, found) {
                continue;
            }
            if let Some(reason) = self.breaks_interleaving(template, kinds, &rounds) {
                found.reject(reason);
                continue;
            }
            for (index, &zero) in self.zero.iter().enumerate().rev() {
                if full[index] {
                    continue;
                }
                if self.excluded(slowest + after[index], price, found) {
                    continue;
                }
                let choice = ShapeChoice {
                    schedule,
                    zero,
                    dp,
                    rounds: &rounds,
                };
                let row = Row {
                    counts,
                    shares: &shares,
                    price,
                };
                if !self.fits(template, kinds, &row, &choice, shape, found) && kinds.len() == 1 {
                    full[index] = true;
                    found.reject_more("memory", (rows.len() - position - 1) as u64);
                }
            }
        }
    }

    /// Why the schedule does not take these numbers of micro-batches, if so.
    fn breaks_interleaving(
        &self,
        template: &Configuration,
        kinds: &[Kind<'_>],
        rounds: &[(usize, u32)],
    ) -> Option<Infeasible> {
        rounds.iter().find_map(|&(index, steps)| {
            let micro_batches = kinds[index].streams as usize * steps as usize;
            let (stages, chunks) = (self.shape.pp as usize, template.dims.vpp as usize);
            crate::cost::schedule::check(template.schedule, stages, chunks, micro_batches).err()
        })
    }

    /// Evaluates one configuration; `false` if its memory does not suffice.
    fn fits(
        &self,
        template: &Configuration,
        kinds: &[Kind<'_>],
        row: &Row<'_>,
        choice: &ShapeChoice<'_>,
        shape: &mut Option<Box<dyn ShapeCost + '_>>,
        found: &mut Outcome,
    ) -> bool {
        if let Some(shape) = shape {
            if self.excluded(shape.seconds(choice), row.price, found) {
                found.examined += 1;
                return true;
            }
            // The first of its kind is estimated, so that there is an example.
            if !shape.fits(choice) && found.reject_more("memory", 1) {
                return false;
            }
        }
        let configuration = self.configuration(template, kinds, row, choice.zero);
        match self.cost.estimate(self.problem, &configuration) {
            Ok(estimate) => {
                found.offer_estimate(estimate, &configuration);
                true
            }
            Err(reason) => {
                let fits = !matches!(reason, Infeasible::Memory { .. });
                found.reject(reason);
                fits
            }
        }
    }

    /// The `ZeRO` stages at which not even the most replicas with the fewest rounds fit into memory.
    fn never_fits(
        &self,
        schedule: Schedule,
        kinds: &[Kind<'_>],
        shape: Option<&(dyn ShapeCost + '_)>,
        rows: &[usize],
        found: &mut Outcome,
    ) -> Vec<bool> {
        let Some(shape) = shape else {
            return vec![false; self.zero.len()];
        };
        let replicas = |row: &usize| self.counts.row(*row).iter().sum::<u32>();
        let dp = rows.iter().map(replicas).max().unwrap_or(1);
        let rounds: Vec<(usize, u32)> = if let [kind] = kinds {
            let each = u64::from(dp) * u64::from(kind.streams);
            vec![(0, (self.micro_batches / each).max(1) as u32)]
        } else {
            (0..kinds.len()).map(|kind| (kind, 1)).collect()
        };
        let choice = |zero| ShapeChoice {
            schedule,
            zero,
            dp,
            rounds: &rounds,
        };
        // Without an example of the reason there has to be one estimate.
        self.zero
            .iter()
            .map(|&zero| {
                !shape.fits(&choice(zero)) && found.reject_more("memory", rows.len() as u64)
            })
            .collect()
    }

    fn configuration(
        &self,
        template: &Configuration,
        kinds: &[Kind<'_>],
        row: &Row<'_>,
        zero: u8,
    ) -> Configuration {
        let mut configuration = template.clone();
        configuration.zero = zero;
        configuration.dims.dp = row.counts.iter().sum();
        let mut gpus = vec![0; self.problem.cluster.groups.len()];
        for ((kind, &n), share) in kinds.iter().zip(row.counts).zip(row.shares) {
            for stage in kind.stages {
                gpus[stage.group] += n * self.shape.tp * self.shape.cp;
            }
            for (count, accumulation_steps) in parts(n, *share) {
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

/// Numbers of replicas of each kind with their shares of the batch.
struct Row<'a> {
    counts: &'a [u32],
    shares: &'a [Share],
    price: f64,
}

/// Seconds after the rounds of an iteration, by row of numbers of replicas and `ZeRO` stage, computed when asked for.
struct After<'a> {
    zero: &'a [u8],
    /// NaN where not known yet.
    seconds: Vec<f64>,
}

impl<'a> After<'a> {
    fn new(rows: usize, zero: &'a [u8]) -> Self {
        Self {
            zero,
            seconds: vec![f64::NAN; rows * zero.len()],
        }
    }

    /// One number per `ZeRO` stage; 0 if the cost model cannot tell.
    fn of(&mut self, row: usize, dp: u32, shape: Option<&mut (dyn ShapeCost + '_)>) -> &[f64] {
        let width = self.zero.len();
        let here = &mut self.seconds[row * width..(row + 1) * width];
        if here[0].is_nan() {
            here.fill(0.0);
            if let Some(shape) = shape {
                for (seconds, &zero) in here.iter_mut().zip(self.zero) {
                    *seconds = shape.after(zero, dp);
                }
            }
        }
        here
    }
}

/// Numbers of equal replicas with their rounds.
fn parts(replicas: u32, share: Share) -> [(u32, u32); 2] {
    [
        (share.longer, share.rounds + 1),
        (replicas - share.longer, share.rounds),
    ]
}
