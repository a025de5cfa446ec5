//! Branch and bound over shapes, layers, schedules, allocations and shares.
//!
//! A *shape* fixes where replicas live, their tensor, pipeline, context and expert degrees, the micro-batch and the
//! recomputation. From the cost model's time of each layer follow the partition of the layers into stages and, for every
//! number of replicas, how the micro-batches are shared out; from these a time that the configuration cannot beat: the
//! slowest replica's rounds on its busiest stage and, except for zero-bubble schedules, the way of the first micro-batch
//! there. With the price of the GPUs it bounds the money, too. A subtree is dropped only if a point already found is
//! strictly better in one of the two and no worse in the other than this bound, so that every point of the front, and
//! every tie on it, survives: the result equals that of exhaustive enumeration.
//!
//! Shapes are visited in the order of their bounds, in rounds of a fixed number. Inside a round each shape sees the front
//! of the rounds before and its own finds, so neither the result nor the counts depend on the number of threads. Memory
//! holds the shapes, the fronts and one shape's allocations per thread.

mod below;
mod layers;
mod partition;
mod space;
mod visit;

use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::cost::{CostModel, Problem};
use crate::error::Infeasible;
use crate::plan::StopReason;
use crate::planner::Outcome;
use layers::LayerTimes;
use space::Shape;
use visit::Visit;

/// Shapes per round.
const ROUND: usize = 64;

/// The front over the whole space of `problem`, and whether the search came to its end before `limit`.
pub(crate) fn search(
    problem: &Problem<'_>,
    cost: &dyn CostModel,
    limit: Option<Duration>,
) -> (Outcome, StopReason) {
    let started = Instant::now();
    let late = || limit.is_some_and(|limit| started.elapsed() >= limit);
    let mut found = Outcome::default();
    reject_batches(problem, &mut found);
    // Only the GPU types in use, and in the file's own list: the catalogue is long and this is asked millions of times.
    let mut cluster = problem.cluster.clone();
    cluster.gpu_types = (0..cluster.groups.len())
        .map(|group| problem.cluster.gpu_type(group).clone())
        .collect();
    let problem = &Problem {
        cluster: &cluster,
        ..*problem
    };
    let times = LayerTimes::new(problem, cost);
    let mut visits: Vec<Visit> = space::shapes(problem)
        .into_par_iter()
        .filter_map(|shape: Shape| Visit::new(problem, cost, &times, shape))
        .collect();
    visits.sort_by(Visit::order);
    for round in visits.chunks(ROUND) {
        let finds: Vec<Outcome> = round
            .par_iter()
            .map(|visit| {
                if late() {
                    return Outcome::default();
                }
                visit.run(problem, cost, &times, &found.front)
            })
            .collect();
        for find in finds {
            found.absorb(find);
        }
        if late() {
            return (found, StopReason::TimeLimit);
        }
    }
    (found, StopReason::Complete)
}

/// Says which micro-batches the global batch is no multiple of.
fn reject_batches(problem: &Problem<'_>, found: &mut Outcome) {
    let batch = problem.training.global_batch;
    let choices = problem.training.micro_batch_choices();
    if choices.is_empty() {
        let least = problem
            .training
            .micro_batches
            .iter()
            .copied()
            .min()
            .unwrap_or(1);
        found.reject(Infeasible::Exceeds {
            what: "samples for a micro-batch".to_owned(),
            need: u64::from(least),
            have: batch,
        });
    }
    for size in choices
        .into_iter()
        .filter(|&size| !batch.is_multiple_of(u64::from(size)))
    {
        found.reject(Infeasible::Divisibility {
            what: "global batch".to_owned(),
            value: batch,
            divisor: u64::from(size),
            of: "micro-batch".to_owned(),
        });
    }
}
