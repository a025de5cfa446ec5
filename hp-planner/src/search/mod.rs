//! Branch and bound over shapes, layers, schedules, allocations and shares.
//!
//! # The space
//!
//! A *shape* fixes where replicas live, their tensor, pipeline, context and expert degrees, the micro-batch and the
//! recomputation. Replicas live either each within one of up to four node groups (fewer beyond 16 groups, so that the
//! sets of groups stay below 2,600), or each across all of them, the stages of
//! a group next to each other. Tensor degrees divide the GPUs of a node; of pipeline depths with equally many layers in the
//! fullest stage the least is tried; across groups the number of stages per group is one of a fixed list. Below a shape
//! follow
//!
//! - schedules and chunks per stage, which divide the layers evenly;
//! - the division of the layers: the least time of the slowest stage, then the fewest layers in front;
//! - virtual workers, where there is neither a pipeline nor tensor parallelism;
//! - numbers of replicas per group, with GPUs within one node or whole nodes (thinned beyond 256 combinations);
//! - the share of each replica: the earliest finish, idle time counted; then the fewest rounds for the kinds with the most
//!   virtual workers, of equals for the first group;
//! - the `ZeRO` stage.
//!
//! # Bounds
//!
//! Four bounds on time follow each other from cheap to exact, each for one number of replicas of each kind; with the price of
//! the GPUs each bounds the money, too:
//!
//! 1. before the layers are divided: all replicas busy all the time at an even division, and the idle time of the schedule;
//! 2. the same with the division known, and what comes after the rounds (reduction, update, fixed costs);
//! 3. the same in whole rounds;
//! 4. the time itself, if the cost model can tell it without a configuration ([`ShapeCost`](crate::ShapeCost)).
//!
//! A configuration is dropped only if a point already found is strictly better in time or money and no worse in the other than
//! its bound, so that every point of the front, and every tie on it, survives: the result equals that of exhaustive
//! enumeration. Only what no bound drops becomes a [`Configuration`](crate::Configuration) and is estimated.
//!
//! # Order
//!
//! Shapes are visited in the order of their bounds, in rounds of fixed numbers. Inside a round each shape sees the front of the
//! rounds before and its own finds, so neither the result nor the counts depend on the number of threads. Memory holds the
//! shapes, the fronts and one shape's numbers of replicas per thread.

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

/// Shapes in the first round and in the largest: each is twice as long as the one before, because what the first shapes find
/// excludes most of the others.
const ROUNDS: (usize, usize) = (4, 256);

/// The front over the whole space of `problem`, and whether the search came to its end before `limit`. Past the limit every
/// thread stops at the next row of numbers of replicas.
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
        .filter_map(|shape: Shape| {
            // What is left out here is never visited, because the first round is late, too.
            (!late()).then(|| Visit::new(problem, cost, &times, shape))?
        })
        .collect();
    visits.sort_by(Visit::order);
    let (mut length, longest) = ROUNDS;
    let mut rest = visits.as_slice();
    loop {
        if late() {
            return (found, StopReason::TimeLimit);
        }
        if rest.is_empty() {
            return (found, StopReason::Complete);
        }
        let round;
        (round, rest) = rest.split_at(length.min(rest.len()));
        length = longest.min(2 * length);
        let finds: Vec<Outcome> = round
            .par_iter()
            .map(|visit| visit.run(problem, cost, &times, &found, &late))
            .collect();
        for find in finds {
            found.absorb(find);
        }
    }
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
