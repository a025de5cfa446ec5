//! The known schedules.

use super::{Pass, Schedule, Task};
use crate::Error;

/// What a rank has done of a zero-bubble schedule: times of its forward passes and input gradients by micro-batch, number of its weight gradients.
#[derive(Clone, Default)]
struct Done {
    forward: Vec<usize>,
    input: Vec<usize>,
    weights: usize,
}

impl Schedule {
    /// All forward passes, then all backward passes.
    ///
    /// Source: `GPipe` (Huang et al. 2019, section 2.3); the backward passes run in the order of the micro-batches, so that gradients are added in
    /// the same order under every schedule.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] without stages or micro-batches.
    pub fn gpipe(stages: usize, micro_batches: usize) -> Result<Self, Error> {
        check_counts(&[("stages", stages), ("micro-batches", micro_batches)])?;
        let all = |pass| (0..micro_batches).map(move |m| Task::new(pass, 0, m));
        let tasks: Vec<_> = all(Pass::Forward).chain(all(Pass::Backward)).collect();
        Self::from_tasks(1, micro_batches, vec![tasks; stages])
    }

    /// 1F1B: rank `s` starts with `p - s - 1` forward passes, then alternates forward and backward. A rank holds at most `p - s` micro-batches.
    ///
    /// Source: Narayanan et al. 2021, section 2.2.1 (`PipeDream`-flush).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] without stages or micro-batches.
    pub fn one_forward_one_backward(stages: usize, micro_batches: usize) -> Result<Self, Error> {
        check_counts(&[("stages", stages), ("micro-batches", micro_batches)])?;
        let order: Vec<_> = (0..micro_batches).map(|m| (0, m)).collect();
        let ranks = (0..stages)
            .map(|rank| alternate(&order, &order, stages - 1 - rank))
            .collect();
        Self::from_tasks(1, micro_batches, ranks)
    }

    /// Interleaved 1F1B: each rank holds `chunks` chunks of the model, through which groups of about `p` micro-batches pass one after the other. The
    /// bubble is `v` times smaller than with one chunk, for `v` times as many messages.
    ///
    /// Source: Narayanan et al. 2021, section 2.2.2, which asks for a multiple of `p` micro-batches. Here any number does: the micro-batches
    /// are dealt evenly to as many groups of at least `p` as there can be, or to one group if they are fewer.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] without stages, chunks or micro-batches.
    pub fn interleaved(stages: usize, chunks: usize, micro_batches: usize) -> Result<Self, Error> {
        check_counts(&[
            ("stages", stages),
            ("chunks", chunks),
            ("micro-batches", micro_batches),
        ])?;
        if chunks == 1 {
            return Self::one_forward_one_backward(stages, micro_batches);
        }
        let groups = (micro_batches / stages).max(1);
        let (each, rest) = (micro_batches / groups, micro_batches % groups);
        let mut start = 0;
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for group in 0..groups {
            let end = start + each + usize::from(group < rest);
            for chunk in 0..chunks {
                forward.extend((start..end).map(|m| (chunk, m)));
                backward.extend((start..end).map(|m| (chunks - 1 - chunk, m)));
            }
            start = end;
        }
        let first_group = each + usize::from(rest > 0);
        let ranks = (0..stages)
            .map(|rank| {
                let ahead = 2 * (stages - 1 - rank) + (chunks - 1) * first_group;
                alternate(&forward, &backward, ahead)
            })
            .collect();
        Self::from_tasks(chunks, micro_batches, ranks)
    }

    /// Zero-bubble H1: the backward pass is split, so that the stage before gets its gradient earlier, and gradients of weights fill the waits. No rank
    /// holds more micro-batches than the first rank of 1F1B.
    ///
    /// Source: Qi et al. 2023, section 2.2. The order is found by playing the schedule with equal times for all three passes: a rank prefers a forward
    /// pass as long as 1F1B would do one (fewer than `p - s` without a gradient) and it holds fewer than `p` micro-batches, then the gradient of an
    /// input, then the gradients of weights.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] without stages or micro-batches.
    pub fn zero_bubble_h1(stages: usize, micro_batches: usize) -> Result<Self, Error> {
        check_counts(&[("stages", stages), ("micro-batches", micro_batches)])?;
        let mut done = vec![Done::default(); stages];
        let mut ranks = vec![Vec::new(); stages];
        // Every rank does one task per unit of time; what was done in this unit counts for others from the next one on.
        for now in 0.. {
            if done.iter().all(|done| done.weights == micro_batches) {
                break;
            }
            let was = |times: &[usize], m: usize| times.get(m).is_some_and(|time| *time < now);
            for rank in 0..stages {
                let (f, b, w) = {
                    let done = &done[rank];
                    (done.forward.len(), done.input.len(), done.weights)
                };
                let input_ready = b < f && (rank + 1 == stages || was(&done[rank + 1].input, b));
                let forward_ready = f < micro_batches
                    && f - b < stages - rank
                    && f - w < stages
                    && (rank == 0 || was(&done[rank - 1].forward, f));
                let done = &mut done[rank];
                let task = if forward_ready {
                    done.forward.push(now);
                    Task::new(Pass::Forward, 0, f)
                } else if input_ready {
                    done.input.push(now);
                    Task::new(Pass::BackwardInput, 0, b)
                } else if w < b {
                    done.weights += 1;
                    Task::new(Pass::BackwardWeight, 0, w)
                } else {
                    continue;
                };
                ranks[rank].push(task);
            }
        }
        Self::from_tasks(1, micro_batches, ranks)
    }
}

impl Schedule {
    /// Forward passes alone, each micro-batch through all chunks before the next one starts. Not a schedule to train with: it does not pass the check.
    pub(crate) fn forward_only(stages: usize, chunks: usize, micro_batches: usize) -> Self {
        let tasks: Vec<_> = (0..micro_batches)
            .flat_map(|m| (0..chunks).map(move |chunk| Task::new(Pass::Forward, chunk, m)))
            .collect();
        Self {
            chunks,
            micro_batches,
            ranks: vec![tasks; stages],
        }
    }
}

/// `ahead` forward passes, then a forward and a backward pass in turn, then the rest of the backward passes.
fn alternate(forward: &[(usize, usize)], backward: &[(usize, usize)], ahead: usize) -> Vec<Task> {
    let ahead = ahead.min(forward.len());
    let task = |pass, (chunk, m): &(usize, usize)| Task::new(pass, *chunk, *m);
    let mut tasks: Vec<_> = forward[..ahead]
        .iter()
        .map(|at| task(Pass::Forward, at))
        .collect();
    let mut rest = forward[ahead..].iter();
    for at in backward {
        tasks.extend(rest.next().map(|at| task(Pass::Forward, at)));
        tasks.push(task(Pass::Backward, at));
    }
    tasks
}

fn check_counts(counts: &[(&'static str, usize)]) -> Result<(), Error> {
    match counts.iter().find(|(_, count)| *count == 0) {
        None => Ok(()),
        Some((what, _)) => Err(Error::Invalid {
            what: "schedule",
            problem: format!("0 {what}, expected at least 1"),
        }),
    }
}
