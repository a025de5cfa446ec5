//! How many virtual workers and accumulation steps each rank gets, so that all finish a global batch together.
//!
//! A rank that runs v workers side by side finishes a round of v micro-batches in t(v) seconds; a rounds serve v a micro-batches in
//! o + a t(v). Within T seconds a rank can hence serve exactly the numbers v a with a <= (T - o) / t(v) for some v. The solver looks for the least T at which one such number per rank
//! can be chosen so that they add up to the batch (a parametric search: feasibility is monotonous in T and changes only where some o + a t(v) = T):
//!
//! 1. The least T at which the largest numbers reach the batch is a lower bound, found by bisection over those values.
//! 2. There, the surplus is taken off again, a step at a time from the rank that finishes last. That settles almost every case, and proves the bound optimal.
//! 3. Where the numbers leave gaps (7 micro-batches on pairs of workers), whether the surplus can be taken off exactly is decided by a subset-sum over bit sets;
//!    if it cannot, the search goes on above the bound.

mod solve;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::topology::WorkerLayout;
use solve::Problem;

/// What a rank costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankCost {
    /// Seconds that one virtual worker alone takes for a micro-batch, forward and backward.
    pub micro_batch_seconds: f64,
    /// Seconds per step that do not depend on the number of micro-batches (aggregation, update).
    pub overhead_seconds: f64,
    /// At index v - 1 the concurrency efficiency of v workers: their throughput over v times that of one, in (0, 1]. It starts with 1; its length is the
    /// largest number of workers that fit.
    pub efficiency: Vec<f64>,
}

impl RankCost {
    /// A rank for one worker, without overhead.
    pub fn new(micro_batch_seconds: f64) -> Self {
        Self {
            micro_batch_seconds,
            overhead_seconds: 0.0,
            efficiency: vec![1.0],
        }
    }

    /// Sets the overhead of a step.
    #[must_use]
    pub fn with_overhead(mut self, seconds: f64) -> Self {
        self.overhead_seconds = seconds;
        self
    }

    /// Sets the efficiency of 1, 2, .. workers.
    #[must_use]
    pub fn with_efficiency(mut self, efficiency: impl Into<Vec<f64>>) -> Self {
        self.efficiency = efficiency.into();
        self
    }

    /// Largest number of virtual workers.
    pub fn max_virtual_workers(&self) -> usize {
        self.efficiency.len()
    }

    /// Seconds for `virtual_workers` workers with `accumulation_steps` micro-batches each: `overhead + steps * micro_batch / efficiency`.
    ///
    /// # Panics
    ///
    /// When there are no or more than [`max_virtual_workers`](Self::max_virtual_workers) workers.
    pub fn seconds(&self, virtual_workers: usize, accumulation_steps: usize) -> f64 {
        let round = self.micro_batch_seconds / self.efficiency[virtual_workers - 1];
        self.overhead_seconds + accumulation_steps as f64 * round
    }

    fn check(&self, rank: usize) -> Result<(), Error> {
        let refuse = |what, got: f64, expected: &str| {
            Err(Error::Invalid {
                what,
                problem: format!("rank {rank} has {got}, expected {expected}"),
            })
        };
        if !(self.micro_batch_seconds.is_finite() && self.micro_batch_seconds > 0.0) {
            return refuse(
                "seconds per micro-batch",
                self.micro_batch_seconds,
                "more than 0",
            );
        }
        if !(self.overhead_seconds.is_finite() && self.overhead_seconds >= 0.0) {
            return refuse("overhead in seconds", self.overhead_seconds, "0 or more");
        }
        match self.efficiency.iter().find(|e| !(**e > 0.0 && **e <= 1.0)) {
            Some(efficiency) => refuse(
                "concurrency efficiency",
                *efficiency,
                "more than 0 and at most 1",
            ),
            None if self.efficiency.is_empty() => {
                refuse("number of virtual workers", 0.0, "at least 1")
            }
            None if self.efficiency[0] < 1.0 => refuse(
                "concurrency efficiency of one worker",
                self.efficiency[0],
                "1",
            ),
            None => Ok(()),
        }
    }
}

/// What [`assign_workers`] finds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// What each rank does.
    pub layouts: Vec<WorkerLayout>,
    /// Seconds until each rank is done.
    pub rank_seconds: Vec<f64>,
    /// Seconds until the last rank is done, the least possible.
    pub step_seconds: f64,
}

/// Spreads a global batch over ranks of unequal speed so that the step ends as early as possible.
///
/// Every rank serves at least one micro-batch, all together exactly the global batch. The result is the true optimum of this cost model, the same on every machine: of assignments
/// that are equally fast one is found that takes work from the ranks that finish last, each rank uses the fewest workers among equally fast choices.
///
/// Usually O(n V log(n V)) for n ranks with up to V workers; the gaps of numbers without a fitting divisor can cost up to O(n V B) for
/// a batch of B micro-batches in each of the O(log(n V B)) steps of the search.
///
/// Source: JABAS (`EuroSys` 2025), which solves a similar model for a GPU type at a time; here ranks differ freely and the sum is met exactly.
///
/// # Errors
///
/// [`Error::Unassignable`] when the batch is not a multiple of the local batch or smaller than one micro-batch per rank, [`Error::Invalid`] for a cost that
/// makes no sense.
///
/// # Examples
///
/// ```
/// use iidp::{RankCost, assign_workers};
///
/// // The second device is three times as fast, and runs two workers at 75 % efficiency each.
/// let costs = [RankCost::new(0.3), RankCost::new(0.1).with_efficiency([1.0, 0.75])];
/// let assignment = assign_workers(160, 16, &costs)?;
/// assert_eq!(assignment.layouts.iter().map(|l| l.samples()).collect::<Vec<_>>(), [32, 128]);
/// assert_eq!((assignment.layouts[1].virtual_workers, assignment.layouts[1].accumulation_steps), (2, 4));
/// # Ok::<(), iidp::Error>(())
/// ```
pub fn assign_workers(
    global_batch: usize,
    local_batch: usize,
    costs: &[RankCost],
) -> Result<Assignment, Error> {
    let refuse = |problem| {
        Err(Error::Unassignable {
            global_batch,
            local_batch,
            problem,
        })
    };
    if costs.is_empty() {
        return refuse("no ranks, expected at least 1".into());
    }
    if local_batch == 0 {
        return refuse("the local batch is 0, expected at least 1".into());
    }
    let ranks = costs.len();
    let batch = global_batch / local_batch;
    if batch < ranks {
        let least = ranks.saturating_mul(local_batch);
        let fewer = if batch == 0 {
            String::new()
        } else {
            format!(", or no more ranks than {batch}")
        };
        return refuse(format!(
            "{ranks} ranks need a micro-batch each, expected at least {least} samples{fewer}"
        ));
    }
    if !global_batch.is_multiple_of(local_batch) {
        let below = batch * local_batch;
        let above = below.saturating_add(local_batch);
        return refuse(format!(
            "not a multiple of the local batch, {below} or {above} would be"
        ));
    }
    for (rank, cost) in costs.iter().enumerate() {
        cost.check(rank)?;
    }
    let problem = Problem::new(batch, costs);
    let layouts: Vec<_> = problem
        .solve()
        .into_iter()
        .zip(costs)
        .map(|(served, cost)| {
            // The first of equals is the one with the fewest workers.
            let workers = (1..=cost.max_virtual_workers())
                .filter(|v| served.is_multiple_of(*v))
                .min_by(|a, b| {
                    cost.seconds(*a, served / a)
                        .total_cmp(&cost.seconds(*b, served / b))
                })
                .unwrap_or(1);
            WorkerLayout::new(local_batch, workers, served / workers)
        })
        .collect();
    let seconds = |(layout, cost): (&WorkerLayout, &RankCost)| {
        cost.seconds(layout.virtual_workers, layout.accumulation_steps)
    };
    let rank_seconds: Vec<f64> = layouts.iter().zip(costs).map(seconds).collect();
    let step_seconds = rank_seconds.iter().copied().fold(0.0, f64::max);
    Ok(Assignment {
        layouts,
        rank_seconds,
        step_seconds,
    })
}
