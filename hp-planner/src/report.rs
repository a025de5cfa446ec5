//! The result of planning: front, choice, reasons, as data and as a text table.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::pareto::{Objective, ParetoFront, Selection};
use crate::plan::{ParallelPlan, Rejection, StopReason};
use crate::planner::Planner;

/// Version of the JSON form of [`PlanReport`]; it changes when a field changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

/// Result of [`Planner::plan`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// Version of this form, [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Name of the cluster.
    pub cluster: String,
    /// GPU type of each node group, in order.
    pub gpus: Vec<String>,
    /// Name of the model.
    pub model: String,
    /// Samples per iteration planned for.
    pub global_batch: u64,
    /// Plans that no other plan beats in both time and money, the fastest first.
    pub front: ParetoFront<ParallelPlan>,
    /// Configurations rejected, by kind of reason.
    pub rejections: Vec<Rejection>,
    /// Configurations examined, with those rejected.
    pub examined: u64,
    /// Whether the search was complete.
    pub stop: StopReason,
}

impl PlanReport {
    pub(crate) fn new(
        planner: &Planner,
        front: ParetoFront<ParallelPlan>,
        rejections: Vec<Rejection>,
        examined: u64,
        stop: StopReason,
    ) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            cluster: planner.cluster().name.clone(),
            gpus: planner
                .cluster()
                .groups
                .iter()
                .map(|group| group.gpu.clone())
                .collect(),
            model: planner.model().name.clone(),
            global_batch: planner.training().global_batch,
            front,
            rejections,
            examined,
            stop,
        }
    }

    /// The plan that an objective asks for.
    ///
    /// # Errors
    /// As [`ParetoFront::select`].
    pub fn select(&self, objective: Objective) -> Result<Selection<'_, ParallelPlan>> {
        self.front.select(objective)
    }

    /// GPUs of a plan in words, as `2 x V100-16 + 1 x T4`.
    pub fn devices(&self, plan: &ParallelPlan) -> String {
        plan.configuration
            .allocation
            .groups()
            .map(|(group, gpus)| {
                let gpu = self.gpus.get(group).map_or("?", String::as_str);
                format!("{gpus} x {gpu}")
            })
            .collect::<Vec<_>>()
            .join(" + ")
    }
}

/// The front as a table of one line per plan, and the reasons for rejection.
impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<[String; 7]> = self
            .front
            .iter()
            .map(|point| self.row(&point.payload))
            .collect();
        let header = [
            "devices",
            "dp x tp x pp",
            "micro-batch",
            "micro-batches per rank",
            "s/iteration",
            "money/iteration",
            "GiB",
        ];
        let mut width = header.map(str::len);
        for row in &rows {
            for (width, cell) in width.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let line = |f: &mut fmt::Formatter<'_>, cells: &[String]| {
            for (index, (cell, width)) in cells.iter().zip(width).enumerate() {
                if index < 4 {
                    write!(f, "{cell:<width$}  ")?;
                } else {
                    write!(f, "{cell:>width$}  ")?;
                }
            }
            writeln!(f)
        };
        line(f, &header.map(str::to_owned))?;
        for row in &rows {
            line(f, row)?;
        }
        writeln!(
            f,
            "{} configurations examined, {} on the front",
            self.examined,
            self.front.len()
        )?;
        for rejection in &self.rejections {
            writeln!(
                f,
                "{} rejected, for example {}",
                rejection.count, rejection.example
            )?;
        }
        Ok(())
    }
}

/// Seconds with four decimals, or four digits where those would say little.
fn seconds(value: f64) -> String {
    if value != 0.0 && value < 0.1 {
        format!("{value:.3e}")
    } else {
        format!("{value:.4}")
    }
}

/// Money with six decimals, or four digits where those would say little.
fn money(value: f64) -> String {
    if value != 0.0 && value < 0.001 {
        format!("{value:.3e}")
    } else {
        format!("{value:.6}")
    }
}

impl PlanReport {
    fn row(&self, plan: &ParallelPlan) -> [String; 7] {
        let configuration = &plan.configuration;
        let dims = &configuration.dims;
        let shares = configuration
            .replicas
            .iter()
            .map(|group| {
                let rounds = group.accumulation_steps;
                if group.virtual_workers > 1 {
                    format!("{} x {}w x {rounds}", group.count, group.virtual_workers)
                } else {
                    format!("{} x {rounds}", group.count)
                }
            })
            .collect::<Vec<_>>()
            .join(" + ");
        [
            self.devices(plan),
            format!("{} x {} x {}", dims.dp, dims.tp, dims.pp),
            configuration.micro_batch.to_string(),
            shares,
            seconds(plan.iteration_time()),
            money(plan.iteration_cost()),
            format!("{:.2}", plan.estimate.peak_memory() / crate::cluster::GIB),
        ]
    }
}
