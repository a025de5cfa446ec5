//! A cluster that is not here: the planner's choice on it drives the worker layout, its model tells time and money.

use crate::devices::Assignment;
use crate::error::Error;
use crate::record::FrontView;
use crate::task::Task;
use hp_planner::{
    ClusterSpec, Configuration, ModelSpec, Objective, ParallelPlan, PlanReport, Planner, Precision,
    TrainingSpec,
};
use iidp::WorkerLayout;

/// The plan chosen on a described cluster. Gradients of a run on it are computed here, one logical device per GPU of the
/// allocation; seconds and money are the planner's, and are *simulated*.
///
/// Cloning lets several runs be compared on the same allocation.
#[derive(Debug, Clone)]
pub struct SimulatedCluster {
    cluster: ClusterSpec,
    planner: Planner,
    report: PlanReport,
    chosen: usize,
}

impl SimulatedCluster {
    /// Plans `training` of `model` on `cluster` and chooses a point of the Pareto front by `objective`.
    ///
    /// # Errors
    /// [`Error::Plan`] for descriptions that cannot be used, or if no configuration is feasible; [`Error::Setting`] if the chosen
    /// configuration is more than data parallel.
    pub fn plan(
        cluster: ClusterSpec,
        model: ModelSpec,
        training: TrainingSpec,
        objective: Objective,
    ) -> Result<Self, Error> {
        let planner = Planner::new(cluster.clone(), model, training);
        let report = planner.plan()?;
        let selection = report.front.select(objective)?;
        let chosen = selection.index;
        layouts(&selection.point.payload.configuration)?;
        Ok(Self {
            cluster,
            planner,
            report,
            chosen,
        })
    }

    /// [`plan`](Self::plan) for a task: data-parallel plans in single precision with micro-batches of `local_batch` samples and up to
    /// four virtual workers per GPU, as the executor runs them.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_for(
        task: &impl Task,
        cluster: ClusterSpec,
        batch: usize,
        local_batch: usize,
        objective: Objective,
    ) -> Result<Self, Error> {
        let training = training_spec(task, batch, local_batch, MAX_VIRTUAL_WORKERS);
        Self::plan(cluster, task.model_spec(), training, objective)
    }

    /// The planner's report, with the whole front.
    pub fn report(&self) -> &PlanReport {
        &self.report
    }

    /// The chosen point of the front.
    pub fn chosen(&self) -> &ParallelPlan {
        &self.report.front.points()[self.chosen].payload
    }

    /// Position of the chosen point on the front.
    pub fn chosen_index(&self) -> usize {
        self.chosen
    }

    /// The front for the HTML report.
    pub fn front_view(&self) -> FrontView {
        let points = self
            .report
            .front
            .iter()
            .map(|p| (p.time, p.cost, self.describe(&p.payload.configuration)));
        FrontView {
            points: points.collect(),
            chosen: self.chosen,
        }
    }

    /// A configuration in one line, such as `2x V100-16 (2 workers x 3 steps) + 1x T4 (1 x 2)`.
    pub fn describe(&self, configuration: &Configuration) -> String {
        let one = |r: &hp_planner::ReplicaGroup| {
            let gpu = r
                .stages
                .first()
                .map_or("?", |s| self.cluster.gpu_type(s.group).name.as_str());
            format!(
                "{}x {gpu} ({} workers x {} steps)",
                r.count, r.virtual_workers, r.accumulation_steps
            )
        };
        configuration
            .replicas
            .iter()
            .map(one)
            .collect::<Vec<_>>()
            .join(" + ")
    }

    /// Number of ranks: GPUs of the allocation.
    pub(crate) fn ranks(&self) -> usize {
        self.chosen().configuration.allocation.total() as usize
    }

    pub(crate) fn device_names(&self) -> Vec<String> {
        self.chosen()
            .configuration
            .each_replica()
            .filter_map(|r| r.stages.first())
            .map(|s| format!("simulated {}", self.cluster.gpu_type(s.group).name))
            .collect()
    }

    /// Divides `batch` over the chosen allocation by the planner's model of its devices.
    pub(crate) fn assign(&self, batch: usize) -> Result<Assignment, Error> {
        let plan = self
            .planner
            .reassign(&self.chosen().configuration.allocation, batch as u64)?;
        let layouts = layouts(&plan.configuration)?;
        Ok(Assignment {
            layouts,
            simulated: Some((plan.iteration_time(), plan.iteration_cost())),
        })
    }
}

/// Virtual workers per GPU that are planned for where nothing else is said.
pub(crate) const MAX_VIRTUAL_WORKERS: usize = 4;

/// What the planner is asked for: data-parallel plans in single precision, as the executor runs them.
pub(crate) fn training_spec(
    task: &impl Task,
    batch: usize,
    local_batch: usize,
    virtual_workers: usize,
) -> TrainingSpec {
    TrainingSpec {
        precision: Precision::Fp32,
        max_virtual_workers: virtual_workers as u32,
        flash_attention: false,
        ..TrainingSpec::new(batch as u64, task.sample_tokens()).data_parallel(local_batch as u32)
    }
}

/// One layout per GPU, in the order of the configuration's replicas.
fn layouts(configuration: &Configuration) -> Result<Vec<WorkerLayout>, Error> {
    if configuration.dims.tp * configuration.dims.pp * configuration.dims.cp != 1 {
        return Err(Error::setting(
            "cluster",
            format!("{:?}", configuration.dims),
            "data-parallel configurations only",
        ));
    }
    let layout = |r: &hp_planner::ReplicaGroup| {
        WorkerLayout::new(
            configuration.micro_batch as usize,
            r.virtual_workers as usize,
            r.accumulation_steps as usize,
        )
    };
    Ok(configuration.each_replica().map(layout).collect())
}
