//! The configuration problem, exactly.
//!
//! GPUs are configured in units of a fixed number of equal GPUs of one server. With a local batch b, a unit that runs v
//! virtual workers for r rounds contributes `v r` local batches per GPU, and the iteration takes as long as the slowest
//! unit. For every local batch and every set of units in use the least time is found by bisection over the times that
//! units can take: whether a time allows a given number of local batches is a subset-sum question over the counts that
//! each unit can do in that time, answered by a table of reachable sums.

use super::profile::JabasProfile;
use crate::error::{Error, Result};

/// Rules of the problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JabasOptions {
    /// GPUs configured alike; JABAS needs 2 because it compares the gradients of two equal halves.
    pub unit: u32,
    /// Whether GPUs may be left unused; JABAS's solver uses all it is given.
    pub may_leave_gpus: bool,
    /// Whether the global batch must be met exactly; JABAS takes the nearest multiple of the local batch, made even.
    pub exact_batch: bool,
}

impl Default for JabasOptions {
    fn default() -> Self {
        Self {
            unit: 2,
            may_leave_gpus: true,
            exact_batch: false,
        }
    }
}

/// Most local batches per GPU, summed over the units; time and memory grow with the square of their number.
const MOST_BATCHES: u64 = 4096;

/// What one unit of GPUs does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitPlan {
    /// Index of the server.
    pub server: usize,
    /// Virtual workers per GPU.
    pub workers: u32,
    /// Rounds per iteration: accumulation steps and the one that synchronises.
    pub rounds: u32,
}

/// The best configuration for a global batch.
#[derive(Debug, Clone, PartialEq)]
pub struct JabasPlan {
    /// Samples per virtual worker and round.
    pub local_batch: u32,
    /// Samples per iteration.
    pub global_batch: u64,
    /// Seconds per iteration.
    pub iteration_time: f64,
    /// Units in use.
    pub units: Vec<UnitPlan>,
}

impl JabasPlan {
    /// Samples per second.
    pub fn throughput(&self) -> f64 {
        self.global_batch as f64 / self.iteration_time
    }
}

/// How a unit can do a number of local batches per GPU fastest.
#[derive(Debug, Clone, Copy)]
struct Way {
    time: f64,
    workers: u32,
    rounds: u32,
}

impl JabasProfile {
    /// The configuration of greatest throughput for a global batch; of equal ones the smaller local batch and the fewer
    /// units.
    ///
    /// Computes in O(b s (log n) u n^2) for b local batches, s sets of units in use, u units and n local batches per unit.
    ///
    /// # Errors
    /// [`Error::BatchNotExpressible`] if no local batch and set of GPUs gives this batch, [`Error::Field`] if the unit is
    /// 0 or larger than every server, or if the batch is more than 4,096 times a unit of the smallest local batch.
    pub fn solve(&self, global_batch: u64, options: JabasOptions) -> Result<JabasPlan> {
        let units: Vec<u32> = self
            .servers
            .iter()
            .map(|server| server.gpus / options.unit.max(1))
            .collect();
        if options.unit == 0 || units.iter().sum::<u32>() == 0 {
            return Err(Error::field(
                "unit",
                options.unit,
                "1 to the GPUs of the largest server",
            ));
        }
        let smallest = self.local_batches().first().copied().unwrap_or(1);
        let most = MOST_BATCHES * u64::from(smallest) * u64::from(options.unit);
        if global_batch > most {
            return Err(Error::field(
                "global_batch",
                global_batch,
                format!(
                    "at most {most}, {MOST_BATCHES} of the smallest local batch per GPU of a unit"
                ),
            ));
        }
        let mut best: Option<JabasPlan> = None;
        for local_batch in self.local_batches() {
            let Some(batches) = local_batches(global_batch, local_batch, options) else {
                continue;
            };
            for used in sets(&units, options.may_leave_gpus) {
                let Some(plan) = self.fastest(local_batch, batches, &used, options.unit) else {
                    continue;
                };
                let better = best
                    .as_ref()
                    .is_none_or(|best| plan.throughput() > best.throughput());
                if better {
                    best = Some(plan);
                }
            }
        }
        best.ok_or_else(|| Error::BatchNotExpressible {
            global_batch,
            micro_batch: self.local_batches().first().copied().unwrap_or(0).into(),
            ranks: u64::from(options.unit),
            reason: "no profiled local batch and set of GPUs gives it".to_owned(),
        })
    }

    /// The least time for `batches` local batches per GPU summed over the units in use.
    fn fastest(
        &self,
        local_batch: u32,
        batches: u32,
        used: &[u32],
        unit: u32,
    ) -> Option<JabasPlan> {
        let in_use: Vec<usize> = (0..used.len()).filter(|&server| used[server] > 0).collect();
        let count: u32 = used.iter().sum();
        if count == 0 || batches < count {
            return None;
        }
        let most = batches - (count - 1);
        let ways: Vec<Vec<Option<Way>>> = in_use
            .iter()
            .map(|&server| self.ways(local_batch, server, most, count * unit, in_use.len() > 1))
            .collect();
        let mut times: Vec<f64> = ways
            .iter()
            .flatten()
            .flatten()
            .map(|way| way.time)
            .collect();
        times.sort_by(f64::total_cmp);
        times.dedup();
        let fits = |time: f64| Sums::new(&ways, &in_use, used, batches, time);
        let first = times.partition_point(|&time| fits(time).is_none());
        let sums = fits(*times.get(first)?)?;
        let mut units = Vec::new();
        let mut iteration_time = 0.0_f64;
        for (kind, n) in sums.choice() {
            let way = ways[kind][n as usize]?;
            iteration_time = iteration_time.max(way.time);
            units.push(UnitPlan {
                server: in_use[kind],
                workers: way.workers,
                rounds: way.rounds,
            });
        }
        Some(JabasPlan {
            local_batch,
            global_batch: u64::from(local_batch) * u64::from(batches) * u64::from(unit),
            iteration_time,
            units,
        })
    }

    /// For every number of local batches up to `most`, the fastest way of a unit of `server`; index 0 is empty.
    fn ways(
        &self,
        local_batch: u32,
        server: usize,
        most: u32,
        gpus: u32,
        several: bool,
    ) -> Vec<Option<Way>> {
        let mut ways: Vec<Option<Way>> = vec![None; most as usize + 1];
        for workers in 1..=self.most_workers(local_batch, server).min(most) {
            for rounds in 1..=most / workers {
                let time = self.iteration_time(local_batch, server, workers, rounds, gpus, several);
                let slot = &mut ways[(workers * rounds) as usize];
                if let Some(time) = time
                    && slot.is_none_or(|way| time < way.time)
                {
                    *slot = Some(Way {
                        time,
                        workers,
                        rounds,
                    });
                }
            }
        }
        ways
    }
}

/// Local batches per GPU of a unit that make up the global batch.
fn local_batches(global_batch: u64, local_batch: u32, options: JabasOptions) -> Option<u32> {
    let (size, unit) = (u64::from(local_batch), u64::from(options.unit));
    if options.exact_batch {
        return global_batch
            .is_multiple_of(size * unit)
            .then_some((global_batch / size / unit) as u32);
    }
    // Rounded half to even, then up to a multiple of the unit.
    let workers = (global_batch as f64 / size as f64).round_ties_even() as u64;
    Some(workers.div_ceil(unit) as u32)
}

/// Units used per server: all, or every choice.
fn sets(units: &[u32], may_leave: bool) -> Vec<Vec<u32>> {
    if !may_leave {
        return vec![units.to_vec()];
    }
    let mut all = vec![Vec::new()];
    for &most in units {
        all = all
            .iter()
            .flat_map(|taken: &Vec<u32>| {
                (0..=most).map(move |n| taken.iter().copied().chain([n]).collect())
            })
            .collect();
    }
    all.sort_by_key(|used| used.iter().sum::<u32>());
    all
}

/// Sums of local batches that the first units can reach in a time, with the last step to each.
struct Sums {
    /// Kind of each unit in turn.
    kinds: Vec<usize>,
    /// Per unit and sum, the number of the last unit plus one; 0 where the sum is out of reach.
    steps: Vec<Vec<u32>>,
}

impl Sums {
    /// `None` if `batches` is out of reach.
    fn new(
        ways: &[Vec<Option<Way>>],
        in_use: &[usize],
        used: &[u32],
        batches: u32,
        time: f64,
    ) -> Option<Self> {
        let width = batches as usize + 1;
        let mut reached = vec![false; width];
        reached[0] = true;
        let (mut kinds, mut steps) = (Vec::new(), Vec::new());
        for (kind, &server) in in_use.iter().enumerate() {
            let counts: Vec<u32> = ways[kind]
                .iter()
                .enumerate()
                .filter(|(_, way)| way.is_some_and(|way| way.time <= time))
                .map(|(n, _)| n as u32)
                .collect();
            for _ in 0..used[server] {
                let mut step = vec![0; width];
                for (sum, _) in reached.iter().enumerate().filter(|(_, reached)| **reached) {
                    for &n in counts.iter().take_while(|&&n| sum + (n as usize) < width) {
                        step[sum + n as usize] = n + 1;
                    }
                }
                reached = step.iter().map(|&n| n > 0).collect();
                kinds.push(kind);
                steps.push(step);
            }
        }
        reached[batches as usize].then_some(Self { kinds, steps })
    }

    /// Kind and local batches of each unit.
    fn choice(&self) -> Vec<(usize, u32)> {
        let mut sum = self.steps[0].len() - 1;
        let mut units: Vec<(usize, u32)> = self
            .kinds
            .iter()
            .zip(&self.steps)
            .rev()
            .map(|(&kind, step)| {
                let n = step[sum] - 1;
                sum -= n as usize;
                (kind, n)
            })
            .collect();
        units.reverse();
        units
    }
}
