//! The planner: choice of allocation, virtual workers and micro-batches for data parallelism over mixed GPU types.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::assign::{RankKind, assign};
use crate::cluster::ClusterSpec;
use crate::cost::analytic::AnalyticCost;
use crate::cost::{CostModel, Problem};
use crate::error::{Error, Infeasible, Result};
use crate::model::ModelSpec;
use crate::pareto::ParetoFront;
use crate::plan::{
    Allocation, Configuration, ParallelDims, ParallelPlan, Rejection, ReplicaGroup, Stage,
    StopReason,
};
use crate::report::PlanReport;
use crate::search::search;
use crate::training::TrainingSpec;

/// Plans a training on a cluster.
///
/// ```
/// use hp_planner::{ClusterSpec, ModelSpec, Objective, Planner, TrainingSpec};
///
/// let cluster = ClusterSpec::from_toml(
///     r#"
///     [[groups]]
///     gpu = "V100-16"
///     nodes = 1
///     gpus_per_node = 2
///     [[groups]]
///     gpu = "T4"
///     nodes = 2
///     gpus_per_node = 1
///     "#,
/// )?;
/// let model = ModelSpec::gpt("small", 12, 768, 12, 50_257, 1024);
/// let training = TrainingSpec::new(64, 1024).data_parallel(2);
/// let planner = Planner::new(cluster, model, training);
/// let report = planner.plan()?;
/// let choice = report.select(Objective::Knee)?;
/// let plan = &choice.point.payload;
/// assert_eq!(plan.configuration.global_batch(), 64);
///
/// // The batch grows: the same GPUs, a new distribution of micro-batches.
/// let larger = planner.reassign(&plan.configuration.allocation, 96)?;
/// assert_eq!(larger.configuration.global_batch(), 96);
/// # Ok::<(), hp_planner::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Planner {
    cluster: ClusterSpec,
    model: ModelSpec,
    training: TrainingSpec,
    cost: Arc<dyn CostModel>,
    time_limit: Option<Duration>,
}

impl Planner {
    /// A planner with the analytic cost model and the catalogue's constants.
    pub fn new(cluster: ClusterSpec, model: ModelSpec, training: TrainingSpec) -> Self {
        Self {
            cluster,
            model,
            training,
            cost: Arc::new(AnalyticCost::new()),
            time_limit: None,
        }
    }

    /// Ends the search after this time: the front is then that of what was looked at, and [`PlanReport::stop`] says so.
    #[must_use]
    pub fn with_time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Uses another cost model, for example a calibrated one.
    #[must_use]
    pub fn with_cost_model(mut self, cost: impl CostModel + 'static) -> Self {
        self.cost = Arc::new(cost);
        self
    }

    /// Replaces the global batch (samples per optimizer step).
    #[must_use]
    pub fn with_global_batch(mut self, global_batch: u64) -> Self {
        self.training.global_batch = global_batch;
        self
    }

    /// The cluster.
    pub fn cluster(&self) -> &ClusterSpec {
        &self.cluster
    }

    /// The model.
    pub fn model(&self) -> &ModelSpec {
        &self.model
    }

    /// The training.
    pub fn training(&self) -> &TrainingSpec {
        &self.training
    }

    fn validate(&self) -> Result<()> {
        self.cluster.validate()?;
        self.model.validate()?;
        self.training.validate()
    }

    /// The Pareto front over iteration time and money.
    ///
    /// # Errors
    /// [`Error::Field`] if an input is not valid, [`Error::NothingFeasible`] if no configuration can run,
    /// [`Error::TimeLimit`] if none was found in time.
    pub fn plan(&self) -> Result<PlanReport> {
        self.validate()?;
        let (total, stop) = search(&self.problem(), self.cost.as_ref(), self.time_limit);
        if total.front.is_empty() {
            return Err(match stop {
                StopReason::TimeLimit => Error::TimeLimit {
                    examined: total.examined,
                },
                StopReason::Complete => total.nothing(),
            });
        }
        Ok(PlanReport::new(
            self,
            total.front,
            total.rejections.into_values().collect(),
            total.examined,
            stop,
        ))
    }

    /// The fastest distribution of `global_batch` samples over the GPUs of an allocation: what to do when the batch changes and
    /// the GPUs stay. Takes microseconds for a few groups.
    ///
    /// # Errors
    /// [`Error::Field`] if an input is not valid, [`Error::NothingFeasible`] if the batch does not fit the allocation.
    pub fn reassign(&self, allocation: &Allocation, global_batch: u64) -> Result<ParallelPlan> {
        self.validate()?;
        crate::cluster::count("global_batch", global_batch, 1, 1 << 40)?;
        if allocation.gpus.len() != self.cluster.groups.len() {
            return Err(Error::field(
                "allocation.gpus",
                format!("of length {}", allocation.gpus.len()),
                format!("one count for each of {} groups", self.cluster.groups.len()),
            ));
        }
        for (index, (&gpus, group)) in allocation.gpus.iter().zip(&self.cluster.groups).enumerate()
        {
            crate::cluster::count(
                &format!("allocation.gpus[{index}]"),
                u64::from(gpus),
                0,
                u64::from(group.gpus()),
            )?;
        }
        let mut outcome = Outcome::default();
        self.examine(allocation, global_batch, &mut outcome);
        let nothing = outcome.nothing();
        outcome
            .front
            .into_points()
            .into_iter()
            .next()
            .map(|point| point.payload)
            .ok_or(nothing)
    }

    /// Predicts one configuration.
    ///
    /// # Errors
    /// [`Error::Infeasible`] with the reason if it cannot run.
    pub fn evaluate(&self, configuration: &Configuration) -> Result<ParallelPlan> {
        Ok(ParallelPlan {
            estimate: self.cost.estimate(&self.problem(), configuration)?,
            configuration: configuration.clone(),
        })
    }

    /// Seconds of a round on a stage; 1 for a cost model that cannot tell.
    pub(crate) fn round_seconds(
        &self,
        configuration: &Configuration,
        stage: &Stage,
        virtual_workers: u32,
    ) -> f64 {
        self.cost
            .round_seconds(&self.problem(), configuration, stage, virtual_workers)
            .unwrap_or(1.0)
    }

    fn problem(&self) -> Problem<'_> {
        Problem {
            cluster: &self.cluster,
            model: &self.model,
            training: &self.training,
        }
    }

    /// All data-parallel configurations of an allocation.
    fn examine(&self, allocation: &Allocation, global_batch: u64, outcome: &mut Outcome) {
        let sizes = TrainingSpec {
            global_batch,
            ..self.training.clone()
        }
        .micro_batch_choices();
        if sizes.is_empty() {
            outcome.reject(Infeasible::Exceeds {
                what: "samples for a micro-batch".to_owned(),
                need: u64::from(
                    self.training
                        .micro_batches
                        .iter()
                        .copied()
                        .min()
                        .unwrap_or(1),
                ),
                have: global_batch,
            });
        }
        for micro_batch in sizes {
            for &recompute in &self.training.recompute {
                for &zero in &self.training.zero {
                    let template = Configuration {
                        dims: ParallelDims::data(allocation.total()),
                        allocation: allocation.clone(),
                        replicas: Vec::new(),
                        micro_batch,
                        schedule: self.training.schedules[0],
                        recompute,
                        zero,
                        sequence_parallel: false,
                    };
                    self.examine_streams(&template, global_batch, outcome);
                }
            }
        }
    }

    /// All choices of virtual workers per group.
    fn examine_streams(&self, template: &Configuration, global_batch: u64, outcome: &mut Outcome) {
        if !global_batch.is_multiple_of(u64::from(template.micro_batch)) {
            outcome.reject(Infeasible::Divisibility {
                what: "global batch".to_owned(),
                value: global_batch,
                divisor: u64::from(template.micro_batch),
                of: "micro-batch".to_owned(),
            });
            return;
        }
        let micro_batches = global_batch / u64::from(template.micro_batch);
        let used: Vec<(usize, u32)> = template.allocation.groups().collect();
        if micro_batches < u64::from(template.allocation.total()) {
            outcome.reject(Infeasible::Exceeds {
                what: "micro-batches for the ranks".to_owned(),
                need: u64::from(template.allocation.total()),
                have: micro_batches,
            });
            return;
        }
        // Seconds per round of each group at each number of virtual workers that fits its memory.
        let rounds: Vec<Vec<(u32, f64)>> = used
            .iter()
            .map(|&(group, _)| {
                (1..=self.training.max_virtual_workers)
                    .map_while(|streams| match self.round(template, group, streams) {
                        Ok(seconds) => Some((streams, seconds)),
                        Err(reason) => {
                            outcome.reject(reason);
                            None
                        }
                    })
                    .collect()
            })
            .collect();
        let combinations: usize = rounds.iter().map(Vec::len).product();
        for mut code in 0..combinations {
            let kinds: Vec<RankKind> = rounds
                .iter()
                .zip(&used)
                .map(|(choices, &(_, ranks))| {
                    let (streams, round) = choices[code % choices.len()];
                    code /= choices.len();
                    RankKind {
                        ranks,
                        streams,
                        round,
                    }
                })
                .collect();
            let Some(shares) = assign(&kinds, micro_batches) else {
                outcome.reject(Infeasible::Unsupported(format!(
                    "{micro_batches} micro-batches are no sum of whole rounds of the ranks"
                )));
                continue;
            };
            let mut configuration = template.clone();
            for ((kind, share), &(group, ranks)) in kinds.iter().zip(shares).zip(&used) {
                for (count, steps) in [
                    (share.longer, share.rounds + 1),
                    (ranks - share.longer, share.rounds),
                ] {
                    if count > 0 {
                        configuration.replicas.push(ReplicaGroup {
                            count,
                            stages: vec![self.whole(group)],
                            virtual_workers: kind.streams,
                            accumulation_steps: steps,
                        });
                    }
                }
            }
            outcome.consider(
                self.cost.estimate(&self.problem(), &configuration),
                configuration,
            );
        }
    }

    /// Seconds of a round of `streams` micro-batches on one GPU of a group; the reason if it does not fit.
    fn round(
        &self,
        template: &Configuration,
        group: usize,
        streams: u32,
    ) -> Result<f64, Infeasible> {
        let mut gpus = vec![0; self.cluster.groups.len()];
        gpus[group] = 1;
        let mut alone = template.clone();
        alone.allocation = Allocation { gpus };
        alone.dims = ParallelDims::data(1);
        alone.replicas = vec![ReplicaGroup {
            count: 1,
            stages: vec![self.whole(group)],
            virtual_workers: streams,
            accumulation_steps: 1,
        }];
        // Sharded state is smaller with more ranks, so memory is judged on the whole configuration later.
        alone.zero = 0;
        let relaxed;
        let problem = if template.zero == 0 {
            self.problem()
        } else {
            relaxed = self.with_unbounded_memory();
            Problem {
                cluster: &relaxed,
                ..self.problem()
            }
        };
        let time = self.cost.estimate(&problem, &alone)?.time;
        Ok(time.compute + time.model_parallel + time.bubble)
    }

    fn with_unbounded_memory(&self) -> ClusterSpec {
        let mut cluster = self.cluster.clone();
        cluster.gpu_types = (0..cluster.groups.len())
            .map(|group| {
                let mut gpu = self.cluster.gpu_type(group).clone();
                gpu.memory_gib = f64::MAX / 1e20;
                gpu
            })
            .collect();
        cluster
    }

    fn whole(&self, group: usize) -> Stage {
        Stage {
            group,
            first_layer: 0,
            layers: self.model.depth(),
            tp: 1,
        }
    }
}

/// What the search has found so far; merging is independent of order.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub front: ParetoFront<ParallelPlan>,
    pub rejections: BTreeMap<&'static str, Rejection>,
    pub examined: u64,
}

impl Outcome {
    /// Nothing found yet, but with the examples of reasons that are known already.
    pub(crate) fn following(&self) -> Self {
        let mut rejections = self.rejections.clone();
        for rejection in rejections.values_mut() {
            rejection.count = 0;
        }
        Self {
            rejections,
            ..Self::default()
        }
    }

    pub(crate) fn reject(&mut self, reason: Infeasible) {
        self.examined += 1;
        self.rejections
            .entry(reason.kind())
            .and_modify(|rejection| rejection.count += 1)
            .or_insert(Rejection {
                count: 1,
                example: reason,
            });
    }

    pub(crate) fn consider(
        &mut self,
        estimate: Result<crate::plan::Estimate, Infeasible>,
        configuration: Configuration,
    ) {
        match estimate {
            Ok(estimate) => {
                self.examined += 1;
                let plan = ParallelPlan {
                    configuration,
                    estimate,
                };
                self.offer(plan);
            }
            Err(reason) => self.reject(reason),
        }
    }

    /// A prediction for `configuration`, which is copied only if it gets onto the front.
    pub(crate) fn offer_estimate(
        &mut self,
        estimate: crate::plan::Estimate,
        configuration: &Configuration,
    ) {
        self.examined += 1;
        if !self
            .front
            .dominates(estimate.iteration_time(), estimate.iteration_cost())
        {
            self.offer(ParallelPlan {
                configuration: configuration.clone(),
                estimate,
            });
        }
    }

    /// Counts configurations that are known to be rejected for a reason met before; `false` if it was not.
    pub(crate) fn reject_more(&mut self, kind: &'static str, count: u64) -> bool {
        let Some(rejection) = self.rejections.get_mut(kind) else {
            return false;
        };
        rejection.count += count;
        self.examined += count;
        true
    }

    /// Counts configurations that are rejected for the same reason.
    pub(crate) fn reject_all(&mut self, reason: Infeasible, count: u64) {
        if count > 0 {
            let kind = reason.kind();
            self.reject(reason);
            self.reject_more(kind, count - 1);
        }
    }

    fn offer(&mut self, plan: ParallelPlan) {
        let (time, cost) = (plan.iteration_time(), plan.iteration_cost());
        // Times are sums and products of finite positive numbers; a cost model that yields anything else offers nothing.
        let _ = self.front.insert_by(time, cost, plan, |a, b| {
            a.configuration.cmp(&b.configuration)
        });
    }

    pub(crate) fn absorb(&mut self, other: Self) {
        self.examined += other.examined;
        for point in other.front.into_points() {
            self.offer(point.payload);
        }
        for (kind, rejection) in other.rejections {
            self.rejections
                .entry(kind)
                .and_modify(|known| known.count += rejection.count)
                .or_insert(rejection);
        }
    }

    pub(crate) fn nothing(&self) -> Error {
        let mut reasons: Vec<(Infeasible, u64)> = self
            .rejections
            .values()
            .map(|rejection| (rejection.example.clone(), rejection.count))
            .collect();
        reasons.sort_by_key(|reason| std::cmp::Reverse(reason.1));
        Error::NothingFeasible {
            examined: self.examined,
            reasons,
        }
    }
}
