//! Proof that a schedule can run to its end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Pass, Schedule, Task};
use crate::Error;

/// What is wrong with a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleProblem {
    /// A task that no rank is given.
    #[error("{task} is missing")]
    Missing {
        /// The task.
        task: Task,
    },
    /// A task that is listed again.
    #[error("{task} is listed twice")]
    Duplicate {
        /// The task.
        task: Task,
    },
    /// A chunk or micro-batch that does not exist.
    #[error("{task} is listed, where there are {chunks} chunks and {micro_batches} micro-batches")]
    OutOfRange {
        /// The task.
        task: Task,
        /// Chunks per rank.
        chunks: usize,
        /// Number of micro-batches.
        micro_batches: usize,
    },
    /// A backward pass both as a whole and in halves.
    #[error("{task} is listed beside its halves")]
    WholeAndSplit {
        /// The whole backward pass.
        task: Task,
    },
    /// A task before one on the same rank that it needs.
    #[error("{task} comes before {needed}")]
    Order {
        /// The task that comes too early.
        task: Task,
        /// What it needs.
        needed: Task,
    },
    /// A task that waits for one of another rank, which waits for it in turn.
    #[error("{task} waits forever for rank {other} to do {needed}")]
    Deadlock {
        /// The task.
        task: Task,
        /// The rank that it waits for.
        other: usize,
        /// What that rank would have to do.
        needed: Task,
    },
}

impl Schedule {
    /// Proves that every rank does each forward and each backward pass exactly once, and that no rank waits forever.
    ///
    /// Sends do not wait for their receivers, so a schedule deadlocks only if tasks wait for each other in a circle: along the order on a
    /// rank, and from stage to stage. Playing it decides that: ranks go on as long as what their next task needs is done; if all come to
    /// their end, there is no circle. Computes in O(t log t) for t tasks.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if it is empty, [`Error::InvalidSchedule`] with the first problem found.
    pub fn check(&self) -> Result<(), Error> {
        for (what, count) in [
            ("stages", self.stages()),
            ("chunks", self.chunks),
            ("micro-batches", self.micro_batches),
        ] {
            if count == 0 {
                return Err(Error::Invalid {
                    what: "schedule",
                    problem: format!("0 {what}, expected at least 1"),
                });
            }
        }
        let mut places = Vec::with_capacity(self.stages());
        for rank in 0..self.stages() {
            let problem = |problem| Error::InvalidSchedule { rank, problem };
            let place = self.place_tasks(rank).map_err(problem)?;
            self.check_complete(&place).map_err(problem)?;
            self.check_order(rank, &place).map_err(problem)?;
            places.push(place);
        }
        self.play(&places)
    }

    /// Position of each task on the rank.
    fn place_tasks(&self, rank: usize) -> Result<BTreeMap<Task, usize>, ScheduleProblem> {
        let mut place = BTreeMap::new();
        for (position, &task) in self.tasks(rank).iter().enumerate() {
            if task.chunk >= self.chunks || task.micro_batch >= self.micro_batches {
                return Err(ScheduleProblem::OutOfRange {
                    task,
                    chunks: self.chunks,
                    micro_batches: self.micro_batches,
                });
            }
            if place.insert(task, position).is_some() {
                return Err(ScheduleProblem::Duplicate { task });
            }
        }
        Ok(place)
    }

    fn check_complete(&self, place: &BTreeMap<Task, usize>) -> Result<(), ScheduleProblem> {
        for chunk in 0..self.chunks {
            for m in 0..self.micro_batches {
                let task = |pass| Task::new(pass, chunk, m);
                let has = |pass| place.contains_key(&task(pass));
                let missing = |pass| Err(ScheduleProblem::Missing { task: task(pass) });
                if !has(Pass::Forward) {
                    return missing(Pass::Forward);
                }
                let halves = [Pass::BackwardInput, Pass::BackwardWeight].map(has);
                match (has(Pass::Backward), halves) {
                    (true, [false, false]) | (false, [true, true]) => {}
                    (true, _) => {
                        return Err(ScheduleProblem::WholeAndSplit {
                            task: task(Pass::Backward),
                        });
                    }
                    (false, [true, false]) => return missing(Pass::BackwardWeight),
                    (false, [false, true]) => return missing(Pass::BackwardInput),
                    (false, [false, false]) => return missing(Pass::Backward),
                }
            }
        }
        Ok(())
    }

    fn check_order(
        &self,
        rank: usize,
        place: &BTreeMap<Task, usize>,
    ) -> Result<(), ScheduleProblem> {
        for (position, &task) in self.tasks(rank).iter().enumerate() {
            for (on, needed) in self
                .requirements(rank, task, |_, _| false)
                .into_iter()
                .flatten()
            {
                // A stage's own forward pass and first half; with one stage also its neighbours in the model, which may be split.
                if on == rank && place.get(&needed).is_some_and(|at| *at > position) {
                    return Err(ScheduleProblem::Order { task, needed });
                }
            }
        }
        Ok(())
    }

    fn play(&self, places: &[BTreeMap<Task, usize>]) -> Result<(), Error> {
        let split = |rank: usize, whole: Task| !places[rank].contains_key(&whole);
        let mut next = vec![0; self.stages()];
        let blocker = |next: &[usize], rank: usize| {
            let task = *self.tasks(rank).get(next[rank])?;
            self.requirements(rank, task, split)
                .into_iter()
                .flatten()
                .find(|(on, needed)| places[*on].get(needed).is_none_or(|at| *at >= next[*on]))
                .map(|(other, needed)| ScheduleProblem::Deadlock {
                    task,
                    other,
                    needed,
                })
        };
        loop {
            let mut moved = false;
            for rank in 0..self.stages() {
                while next[rank] < self.tasks(rank).len() && blocker(&next, rank).is_none() {
                    next[rank] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        match (0..self.stages()).find_map(|rank| Some((rank, blocker(&next, rank)?))) {
            None => Ok(()),
            Some((rank, problem)) => Err(Error::InvalidSchedule { rank, problem }),
        }
    }
}
