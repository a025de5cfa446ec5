//! How long a schedule takes, without running it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Schedule, Task};
use crate::Error;

/// When a schedule's tasks run. Times are in the unit of the given costs.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleTiming {
    /// From the first task's start to the last one's end: the length of the critical path.
    pub makespan: f64,
    /// Time that each rank computes.
    pub busy: Vec<f64>,
    /// Start of each task of each rank, in the order of the schedule.
    pub starts: Vec<Vec<f64>>,
}

impl ScheduleTiming {
    /// The part of the ranks' time in which they wait: `1 - sum(busy) / (p x makespan)`.
    pub fn bubble(&self) -> f64 {
        let whole = self.makespan * self.busy.len() as f64;
        if whole > 0.0 {
            1.0 - self.busy.iter().sum::<f64>() / whole
        } else {
            0.0
        }
    }
}

impl Schedule {
    /// Plays the schedule with the given cost of each rank's tasks. A task starts as soon as its rank is free and what it needs is
    /// done, `transfer` later where that is on another rank.
    ///
    /// Computes in O(t log t) for t tasks.
    ///
    /// # Errors
    ///
    /// As [`Self::check`] for a schedule that was not made here (deserialised, say).
    pub fn timing(
        &self,
        mut cost: impl FnMut(usize, Task) -> f64,
        transfer: f64,
    ) -> Result<ScheduleTiming, Error> {
        self.check()?;
        let stages = self.stages();
        let listed: Vec<BTreeSet<Task>> = (0..stages)
            .map(|rank| self.tasks(rank).iter().copied().collect())
            .collect();
        let split = |rank: usize, whole: Task| !listed[rank].contains(&whole);
        let mut ends: Vec<BTreeMap<Task, f64>> = vec![BTreeMap::new(); stages];
        let mut starts: Vec<Vec<f64>> = vec![Vec::new(); stages];
        let mut free = vec![0.0_f64; stages];
        let mut busy = vec![0.0; stages];
        let total: usize = (0..stages).map(|rank| self.tasks(rank).len()).sum();
        let mut done = 0;
        while done < total {
            for rank in 0..stages {
                while let Some(&task) = self.tasks(rank).get(starts[rank].len()) {
                    let needed = self.requirements(rank, task, split);
                    let ready =
                        needed
                            .into_iter()
                            .flatten()
                            .try_fold(0.0_f64, |ready, (on, task)| {
                                let way = if on == rank { 0.0 } else { transfer };
                                ends[on].get(&task).map(|end| ready.max(end + way))
                            });
                    let Some(ready) = ready else { break };
                    let start = ready.max(free[rank]);
                    let took = cost(rank, task);
                    starts[rank].push(start);
                    busy[rank] += took;
                    free[rank] = start + took;
                    ends[rank].insert(task, start + took);
                    done += 1;
                }
            }
        }
        Ok(ScheduleTiming {
            makespan: free.into_iter().fold(0.0, f64::max),
            busy,
            starts,
        })
    }
}
