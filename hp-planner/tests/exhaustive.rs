//! The search against an enumeration of its own: every shape, every division and every number by plain loops, each evaluated
//! by the public cost function. Nothing here calls the planner but the test itself.
//!
//! The space is the one that the documentation of the search describes; where it says "the best" (division of the layers,
//! shares of the batch) all are tried here.

mod support;

use std::collections::BTreeMap;

use hp_planner::{
    Allocation, AnalyticCost, Configuration, CostModel, Estimate, Infeasible, ParallelDims,
    Planner, Problem, Recompute, ReplicaGroup, ReplicaKind, Schedule, ShapeChoice, Stage,
};
use support::space;

/// Something that can run: seconds, money, and what it is.
type Point = (f64, f64, Configuration);

struct Brute<'a> {
    problem: Problem<'a>,
    cost: AnalyticCost,
    points: Vec<Point>,
    tried: usize,
}

/// Degrees, micro-batch and recomputation.
#[derive(Clone, Copy)]
struct Degrees {
    tp: u32,
    cp: u32,
    ep: u32,
    micro_batch: u32,
    recompute: Recompute,
}

impl Brute<'_> {
    fn everything(&mut self) {
        let training = self.problem.training;
        let groups = &self.problem.cluster.groups;
        let experts = self
            .problem
            .model
            .transformer
            .as_ref()
            .map_or(0, |t| t.experts);
        for mask in 1_u32..1 << groups.len() {
            let used: Vec<usize> = (0..groups.len()).filter(|g| (mask >> g) & 1 == 1).collect();
            if used.len() > 4 {
                continue;
            }
            for tp in 1..=groups[used[0]].gpus_per_node {
                if used
                    .iter()
                    .any(|&g| !groups[g].gpus_per_node.is_multiple_of(tp))
                {
                    continue;
                }
                for cp in 1..=training.max_cp {
                    for ep in 1..=training.max_ep.max(1) {
                        if !cp.is_power_of_two() || !ep.is_power_of_two() {
                            continue;
                        }
                        if ep > 1 && (experts == 0 || !experts.is_multiple_of(ep)) {
                            continue;
                        }
                        for &micro_batch in &training.micro_batches {
                            for &recompute in &training.recompute {
                                let degrees = Degrees {
                                    tp,
                                    cp,
                                    ep,
                                    micro_batch,
                                    recompute,
                                };
                                self.families(&used, degrees);
                            }
                        }
                    }
                }
            }
        }
    }

    fn families(&mut self, used: &[usize], degrees: Degrees) {
        if !self
            .problem
            .training
            .global_batch
            .is_multiple_of(u64::from(degrees.micro_batch))
        {
            return;
        }
        let layers = self.problem.model.depth();
        let gpus = |g: usize| self.problem.cluster.groups[g].gpus();
        // Whole replicas within each group. A pipeline that is deeper without a smaller fullest stage is left out.
        let fewest = used.iter().map(|&g| gpus(g) / degrees.tp).min().unwrap();
        let within: Vec<Vec<Vec<usize>>> = (1..=layers.min(fewest))
            .filter(|&pp| pp == 1 || layers.div_ceil(pp) < layers.div_ceil(pp - 1))
            .map(|pp| used.iter().map(|&g| vec![g; pp as usize]).collect())
            .collect();
        // Replicas across all groups, the stages of a group next to each other.
        let mut across: Vec<Vec<(usize, u32)>> = vec![Vec::new()];
        if used.len() > 1 {
            for &g in used {
                let mut longer = Vec::new();
                for stages in &across {
                    let taken: u32 = stages.iter().map(|s| s.1).sum();
                    for n in [1, 2, 3, 4, 6] {
                        let allowed = used.len() == 2 || (n != 3 && n != 6);
                        if allowed && taken + n <= layers && n <= gpus(g) / degrees.tp {
                            longer.push([stages.as_slice(), &[(g, n)]].concat());
                        }
                    }
                }
                across = longer;
            }
        } else {
            across.clear();
        }
        let across = across.iter().map(|stages| {
            let each = |&(g, n): &(usize, u32)| vec![g; n as usize];
            vec![stages.iter().flat_map(each).collect::<Vec<usize>>()]
        });
        for kinds in within.into_iter().chain(across) {
            self.schedules(&kinds, degrees);
        }
    }

    /// `kinds` has the group of each stage for each kind of replica.
    fn schedules(&mut self, kinds: &[Vec<usize>], degrees: Degrees) {
        let training = self.problem.training;
        let layers = self.problem.model.depth();
        let pp = kinds[0].len() as u32;
        let mut schedules: Vec<(Schedule, u32)> = Vec::new();
        for &schedule in &training.schedules {
            for chunks in 1..=training.max_vpp.max(2) {
                let allowed = match schedule {
                    Schedule::OneFOneB => chunks <= training.max_vpp,
                    Schedule::ZbV => chunks == 2,
                    _ => chunks == 1,
                };
                // Chunks are equal, and every stage has a layer in each.
                if allowed && layers.is_multiple_of(chunks) && layers / chunks >= pp {
                    schedules.push((schedule, chunks));
                }
            }
        }
        if pp == 1 {
            schedules = vec![(training.schedules[0], 1)];
        }
        for (schedule, chunks) in schedules {
            let stages: Option<Vec<Vec<Stage>>> = kinds
                .iter()
                .map(|groups| self.division(groups, degrees, chunks))
                .collect();
            if let Some(stages) = stages {
                self.numbers(&stages, degrees, schedule, chunks);
            }
        }
    }

    fn template(&self, degrees: Degrees, pp: u32, vpp: u32) -> Configuration {
        Configuration {
            dims: ParallelDims {
                dp: 1,
                tp: degrees.tp,
                pp,
                vpp,
                cp: degrees.cp,
                ep: degrees.ep,
            },
            allocation: Allocation {
                gpus: vec![0; self.problem.cluster.groups.len()],
            },
            replicas: Vec::new(),
            micro_batch: degrees.micro_batch,
            schedule: Schedule::OneFOneB,
            recompute: degrees.recompute,
            zero: 0,
            sequence_parallel: self.problem.training.sequence_parallel && degrees.tp > 1,
        }
    }

    fn seconds(&self, template: &Configuration, stage: &Stage, workers: u32) -> f64 {
        self.cost
            .round_seconds(&self.problem, template, stage, workers)
            .unwrap()
    }

    /// Of all divisions of the layers into stages, those with the least time of the slowest stage, and of these the one with the
    /// fewest layers in front.
    fn division(&self, groups: &[usize], degrees: Degrees, chunks: u32) -> Option<Vec<Stage>> {
        let template = self.template(degrees, groups.len() as u32, 1);
        let depth = self.problem.model.depth();
        let mut sums: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for &group in groups {
            sums.entry(group).or_insert_with(|| {
                let mut sums = vec![0.0];
                for first_layer in 0..depth {
                    let stage = Stage {
                        group,
                        first_layer,
                        layers: 1,
                        tp: degrees.tp,
                    };
                    sums.push(sums[first_layer as usize] + self.seconds(&template, &stage, 1));
                }
                sums
            });
        }
        let mut divisions: Vec<Vec<u32>> = vec![Vec::new()];
        for position in 0..groups.len() {
            let mut longer = Vec::new();
            for ends in &divisions {
                let start = ends.last().copied().unwrap_or(0);
                for end in (start + chunks..=depth).step_by(chunks as usize) {
                    if (position + 1 == groups.len()) == (end == depth) {
                        longer.push([ends.as_slice(), &[end]].concat());
                    }
                }
            }
            divisions = longer;
        }
        let slowest = |ends: &Vec<u32>| {
            let mut start = 0;
            let mut most = 0.0_f64;
            for (group, &end) in groups.iter().zip(ends) {
                most = most.max(sums[group][end as usize] - sums[group][start as usize]);
                start = end;
            }
            most
        };
        let best = divisions
            .into_iter()
            .min_by(|a, b| slowest(a).total_cmp(&slowest(b)).then_with(|| a.cmp(b)))?;
        let mut first_layer = 0;
        Some(
            groups
                .iter()
                .zip(best)
                .map(|(&group, end)| {
                    let layers = end - first_layer;
                    let stage = Stage {
                        group,
                        first_layer,
                        layers,
                        tp: degrees.tp,
                    };
                    first_layer = end;
                    stage
                })
                .collect(),
        )
    }

    /// Numbers of replicas and virtual workers of each kind.
    fn numbers(&mut self, kinds: &[Vec<Stage>], degrees: Degrees, schedule: Schedule, chunks: u32) {
        let training = self.problem.training;
        let pp = kinds[0].len() as u32;
        let micro_batches = training.global_batch / u64::from(degrees.micro_batch);
        let most = if pp == 1 && degrees.tp == 1 {
            training.max_virtual_workers
        } else {
            1
        };
        let mut choices: Vec<Vec<(u32, u32)>> = vec![Vec::new()];
        for stages in kinds {
            let mut longer = Vec::new();
            for chosen in &choices {
                for count in 1..=micro_batches as u32 {
                    let fits = self
                        .problem
                        .cluster
                        .groups
                        .iter()
                        .enumerate()
                        .all(|(g, group)| {
                            let here =
                                stages.iter().filter(|stage| stage.group == g).count() as u32;
                            let gpus = count * degrees.tp * degrees.cp * here;
                            let node = group.gpus_per_node;
                            gpus <= group.gpus() && (gpus <= node || gpus.is_multiple_of(node))
                        });
                    if fits {
                        for workers in 1..=most {
                            longer.push([chosen.as_slice(), &[(count, workers)]].concat());
                        }
                    }
                }
            }
            choices = longer;
        }
        let mut template = self.template(degrees, pp, chunks);
        template.schedule = schedule;
        for chosen in choices {
            let replicas: u64 = chosen.iter().map(|c| u64::from(c.0)).sum();
            if replicas <= micro_batches {
                self.shares(&template, kinds, &chosen, micro_batches);
            }
        }
    }

    /// Rounds of each kind: of all that make up the batch those that finish first, and of these the one that gives the
    /// kinds with the most virtual workers (of equals the first) the fewest rounds.
    fn shares(
        &mut self,
        template: &Configuration,
        kinds: &[Vec<Stage>],
        chosen: &[(u32, u32)],
        micro_batches: u64,
    ) {
        let fill = self.cost.fill(template.schedule, template.dims.vpp);
        // Seconds of a round on the busiest stage, and idle.
        let speeds: Vec<(f64, f64)> = kinds
            .iter()
            .zip(chosen)
            .map(|(stages, &(_, workers))| {
                let times = stages.iter().map(|s| self.seconds(template, s, workers));
                let (busiest, all) = times.fold((0.0_f64, 0.0), |(b, a), t| (b.max(t), a + t));
                (busiest, fill * (all - busiest))
            })
            .collect();
        let mut totals: Vec<Vec<u64>> = vec![Vec::new()];
        for &(count, workers) in chosen {
            let mut longer = Vec::new();
            for taken in &totals {
                for rounds in u64::from(count)..=micro_batches / u64::from(workers) {
                    longer.push([taken.as_slice(), &[rounds]].concat());
                }
            }
            totals = longer;
        }
        totals.retain(|totals| {
            let all = totals.iter().zip(chosen).map(|(&t, c)| t * u64::from(c.1));
            all.sum::<u64>() == micro_batches
        });
        let finish = |totals: &Vec<u64>| {
            let each = totals.iter().zip(chosen).zip(&speeds);
            each.map(|((&total, &(count, _)), (busiest, idle))| {
                total.div_ceil(u64::from(count)) as f64 * busiest + idle
            })
            .fold(0.0, f64::max)
        };
        let mut order: Vec<usize> = (0..kinds.len()).collect();
        order.sort_by_key(|&kind| std::cmp::Reverse(chosen[kind].1));
        let filled = |totals: &Vec<u64>| order.iter().map(|&k| totals[k]).collect::<Vec<u64>>();
        let Some(best) = totals.iter().min_by(|a, b| {
            let first = finish(a).total_cmp(&finish(b));
            first.then_with(|| filled(a).cmp(&filled(b)))
        }) else {
            return;
        };
        let mut configuration = template.clone();
        configuration.dims.dp = chosen.iter().map(|c| c.0).sum();
        for ((stages, &(count, workers)), &total) in kinds.iter().zip(chosen).zip(best) {
            for stage in stages {
                configuration.allocation.gpus[stage.group] +=
                    count * template.dims.tp * template.dims.cp;
            }
            let (rounds, longer) = (total / u64::from(count), (total % u64::from(count)) as u32);
            for (count, steps) in [(longer, rounds + 1), (count - longer, rounds)] {
                if count > 0 {
                    configuration.replicas.push(ReplicaGroup {
                        count,
                        stages: stages.clone(),
                        virtual_workers: workers,
                        accumulation_steps: steps as u32,
                    });
                }
            }
        }
        let interleaves = configuration.replicas.iter().all(|replicas| {
            template.schedule != Schedule::OneFOneB
                || template.dims.vpp == 1
                || replicas
                    .micro_batches()
                    .is_multiple_of(u64::from(template.dims.pp))
        });
        if !interleaves {
            return;
        }
        for &zero in &self.problem.training.zero {
            configuration.zero = zero;
            self.tried += 1;
            let estimate = self.cost.estimate(&self.problem, &configuration);
            let least = finish(best);
            self.shape_agrees(&configuration, kinds, chosen, least, &estimate);
            if let Ok(estimate) = estimate {
                self.points.push((
                    estimate.iteration_time(),
                    estimate.iteration_cost(),
                    configuration.clone(),
                ));
            }
        }
    }

    /// Compares what the cost model says about a shape with its estimate of the configuration.
    fn shape_agrees(
        &self,
        configuration: &Configuration,
        kinds: &[Vec<Stage>],
        chosen: &[(u32, u32)],
        finish: f64,
        estimate: &Result<Estimate, Infeasible>,
    ) {
        let kinds: Vec<ReplicaKind<'_>> = kinds
            .iter()
            .zip(chosen)
            .map(|(stages, &(_, virtual_workers))| ReplicaKind {
                stages,
                virtual_workers,
            })
            .collect();
        let shape = self.cost.shape(&self.problem, configuration, &kinds);
        let Ok(mut shape) = shape.unwrap() else {
            assert!(estimate.is_err(), "{configuration:?}");
            return;
        };
        let kind_of = |replicas: &ReplicaGroup| {
            let kind = kinds.iter().position(|kind| {
                kind.stages == replicas.stages && kind.virtual_workers == replicas.virtual_workers
            });
            (kind.unwrap(), replicas.accumulation_steps)
        };
        let rounds: Vec<(usize, u32)> = configuration.replicas.iter().map(kind_of).collect();
        let choice = ShapeChoice {
            schedule: configuration.schedule,
            zero: configuration.zero,
            dp: configuration.dims.dp,
            rounds: &rounds,
        };
        match estimate {
            Ok(estimate) => {
                let seconds = estimate.iteration_time();
                assert_eq!(shape.seconds(&choice), seconds, "{configuration:?}");
                let bound = finish + shape.after(choice.zero, choice.dp);
                assert!(
                    bound <= seconds * (1.0 + 1e-12),
                    "{bound} {configuration:?}"
                );
                assert!(shape.fits(&choice), "{configuration:?}");
            }
            Err(Infeasible::Memory { .. }) => assert!(!shape.fits(&choice), "{configuration:?}"),
            Err(_) => {}
        }
    }

    /// What nothing beats, the fastest first; of equal points the least configuration.
    fn front(mut self) -> Vec<Point> {
        self.points.sort_by(|a, b| {
            let by_time = a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
            by_time.then_with(|| a.2.cmp(&b.2))
        });
        let mut front: Vec<Point> = Vec::new();
        for point in self.points {
            if front.last().is_none_or(|last| point.1 < last.1) {
                front.push(point);
            }
        }
        front
    }
}

#[test]
fn front_equals_plain_enumeration_on_200_spaces() {
    let (mut feasible, mut mixed, mut tied, mut several) = (0, 0, 0, 0);
    for seed in 0..200 {
        let (cluster, model, training) = space(seed);
        let mut brute = Brute {
            problem: Problem {
                cluster: &cluster,
                model: &model,
                training: &training,
            },
            cost: AnalyticCost::new(),
            points: Vec::new(),
            tried: 0,
        };
        brute.everything();
        let tried = brute.tried;
        let all: Vec<(u64, u64)> = {
            let bits = |point: &Point| (point.0.to_bits(), point.1.to_bits());
            brute.points.iter().map(bits).collect()
        };
        let expected = brute.front();
        let planner = Planner::new(cluster.clone(), model.clone(), training.clone());
        let report = match planner.plan() {
            Ok(report) => report,
            Err(error) => {
                assert!(expected.is_empty(), "space {seed}: {error}");
                continue;
            }
        };
        assert!(report.examined <= tried as u64 * 2 + 100, "space {seed}");
        let found: Vec<Point> = report
            .front
            .into_points()
            .into_iter()
            .map(|point| (point.time, point.cost, point.payload.configuration))
            .collect();
        assert_eq!(found, expected, "space {seed}");
        feasible += 1;
        several += u32::from(found.len() > 2);
        mixed += u32::from(found.iter().any(|p| p.2.allocation.groups().count() > 1));
        // Whether some point of the front can be reached in two ways, so that the order of configurations decided.
        tied += u32::from(found.iter().any(|point| {
            let bits = (point.0.to_bits(), point.1.to_bits());
            all.iter().filter(|&&other| other == bits).count() > 1
        }));
    }
    assert!(feasible > 150, "{feasible} spaces have a front");
    assert!(mixed > 30, "{mixed} fronts mix groups");
    assert!(tied > 20, "{tied} fronts have a tie");
    assert!(several > 50, "{several} fronts have more than two points");
}
