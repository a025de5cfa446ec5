//! Schedules are complete and free of deadlock; the checker tells those that are not.

use std::thread;
use std::time::Duration;

use iidp::communicator::LocalCommunicator;
use iidp::pipeline::{Message, Pass, Schedule, ScheduleProblem, StageTasks, Task, run};
use iidp::{Communicator, Error};
use proptest::prelude::*;

/// Every schedule there is for the given sizes.
fn schedules(stages: usize, chunks: usize, micro_batches: usize) -> Vec<Schedule> {
    [
        Schedule::gpipe(stages, micro_batches),
        Schedule::one_forward_one_backward(stages, micro_batches),
        Schedule::interleaved(stages, chunks, micro_batches),
        Schedule::zero_bubble_h1(stages, micro_batches),
    ]
    .into_iter()
    .map(|schedule| schedule.expect("the schedule passes its check"))
    .collect()
}

/// Forward 1, backward 2 in all.
fn unit_cost(_: usize, task: Task) -> f64 {
    if task.pass == Pass::Backward {
        2.0
    } else {
        1.0
    }
}

/// The tasks that a complete schedule has, counted by hand.
fn assert_complete(schedule: &Schedule) {
    for rank in 0..schedule.stages() {
        let mut got = schedule.tasks(rank).to_vec();
        got.sort();
        let split = got.iter().any(|task| task.pass == Pass::BackwardInput);
        let passes: &[Pass] = if split {
            &[Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight]
        } else {
            &[Pass::Forward, Pass::Backward]
        };
        let mut expected = Vec::new();
        for &pass in passes {
            for chunk in 0..schedule.chunks() {
                expected.extend((0..schedule.micro_batches()).map(|m| Task::new(pass, chunk, m)));
            }
        }
        expected.sort();
        assert_eq!(got, expected);
    }
}

proptest! {
    #[test]
    fn every_schedule_is_complete_and_ends(stages in 1_usize..9, chunks in 1_usize..5, micro_batches in 1_usize..24) {
        for schedule in schedules(stages, chunks, micro_batches) {
            assert_complete(&schedule);
            // The timing plays the schedule by other means than the checker.
            let timing = schedule.timing(unit_cost, 0.0).unwrap();
            let work = (3 * micro_batches * schedule.chunks()) as f64;
            prop_assert!(timing.busy.iter().all(|busy| *busy == work));
            prop_assert!(timing.makespan >= work);
        }
    }

    #[test]
    fn memory_stays_within_the_bounds(stages in 1_usize..9, chunks in 2_usize..5, micro_batches in 1_usize..24) {
        let (p, v, m) = (stages, chunks, micro_batches);
        let all = schedules(p, v, m);
        for rank in 0..p {
            prop_assert_eq!(all[0].peak_in_flight(rank), m);
            prop_assert_eq!(all[1].peak_in_flight(rank), (p - rank).min(m));
            if m % p == 0 {
                prop_assert_eq!(all[2].peak_in_flight(rank), (2 * (p - rank - 1) + (v - 1) * p + 1).min(m * v));
            }
            prop_assert!(all[3].peak_in_flight(rank) <= p.min(m));
        }
    }

    #[test]
    fn bubbles_are_as_published(stages in 1_usize..9, chunks in 2_usize..5, groups in 1_usize..4) {
        let (p, v, m) = (stages, chunks, stages * groups);
        let makespans: Vec<f64> = schedules(p, v, m)
            .iter()
            .map(|schedule| schedule.timing(unit_cost, 0.0).unwrap().makespan)
            .collect();
        let (work, idle) = ((3 * m) as f64, (p - 1) as f64);
        prop_assert_eq!(makespans[0], work + 3.0 * idle);
        prop_assert_eq!(makespans[1], work + 3.0 * idle);
        // One chunk costs 1 / v of a stage, so all times are in units of a chunk.
        prop_assert_eq!(makespans[2], work * v as f64 + 3.0 * idle);
        // F + B - W = 1.
        prop_assert_eq!(makespans[3], work + idle);
    }

    /// A schedule with one task taken away, doubled, or moved, is refused for that reason, or can still be played to its end.
    #[test]
    fn broken_schedules_are_refused(
        kind in 0_usize..4,
        stages in 1_usize..5,
        micro_batches in 1_usize..7,
        rank in any::<prop::sample::Index>(),
        from in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(),
    ) {
        let schedule = &schedules(stages, 2, micro_batches)[kind];
        let ranks: Vec<Vec<Task>> = (0..stages).map(|rank| schedule.tasks(rank).to_vec()).collect();
        let rank = rank.index(stages);
        let at = from.index(ranks[rank].len());
        let task = ranks[rank][at];
        let remake = |ranks| Schedule::from_tasks(schedule.chunks(), micro_batches, ranks);

        let mut without = ranks.clone();
        without[rank].remove(at);
        let named = matches!(
            remake(without),
            Err(Error::InvalidSchedule { rank: on, problem: ScheduleProblem::Missing { task: missing } }) if on == rank && missing == task
        );
        prop_assert!(named);

        let mut twice = ranks.clone();
        let place = to.index(ranks[rank].len() + 1);
        twice[rank].insert(place, task);
        prop_assert_eq!(
            remake(twice).unwrap_err(),
            Error::InvalidSchedule { rank, problem: ScheduleProblem::Duplicate { task } }
        );

        let mut moved = ranks;
        let task = moved[rank].remove(at);
        let place = to.index(moved[rank].len() + 1);
        moved[rank].insert(place, task);
        match remake(moved.clone()) {
            Ok(schedule) => prop_assert!(plays(&schedule)),
            Err(Error::InvalidSchedule { problem: ScheduleProblem::Order { .. } | ScheduleProblem::Deadlock { .. }, .. }) => {
                prop_assert!(!plays_tasks(schedule.chunks(), &moved));
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

fn plays(schedule: &Schedule) -> bool {
    let ranks: Vec<_> = (0..schedule.stages())
        .map(|rank| schedule.tasks(rank).to_vec())
        .collect();
    plays_tasks(schedule.chunks(), &ranks)
}

/// Whether tokens that travel over the model's positions bring every rank to its end: a model of the execution that knows
/// nothing of the checker.
fn plays_tasks(chunks: usize, ranks: &[Vec<Task>]) -> bool {
    let stages = ranks.len();
    let last = stages * chunks - 1;
    // Passes done, by (pass, position, micro-batch).
    let mut done: std::collections::BTreeSet<(u8, usize, usize)> =
        std::collections::BTreeSet::new();
    let mut next = vec![0; stages];
    loop {
        let mut moved = false;
        for (rank, tasks) in ranks.iter().enumerate() {
            let Some(task) = tasks.get(next[rank]) else {
                continue;
            };
            let (at, m) = (task.chunk * stages + rank, task.micro_batch);
            let ready = match task.pass {
                Pass::Forward => at == 0 || done.contains(&(0, at - 1, m)),
                Pass::Backward | Pass::BackwardInput => {
                    done.contains(&(0, at, m)) && (at == last || done.contains(&(1, at + 1, m)))
                }
                Pass::BackwardWeight => done.contains(&(1, at, m)),
            };
            if ready {
                let code = match task.pass {
                    Pass::Forward => 0,
                    Pass::Backward | Pass::BackwardInput => 1,
                    Pass::BackwardWeight => 2,
                };
                done.insert((code, at, m));
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            return next
                .iter()
                .zip(ranks)
                .all(|(next, tasks)| *next == tasks.len());
        }
    }
}

#[test]
fn a_circle_of_waits_is_named() {
    let f = |m| Task::new(Pass::Forward, 0, m);
    let b = |m| Task::new(Pass::Backward, 0, m);
    // Rank 1 wants the backward pass of micro-batch 1 first, whose forward pass rank 0 only does after the backward pass of micro-batch 0.
    let error = Schedule::from_tasks(
        1,
        2,
        vec![vec![f(0), b(0), f(1), b(1)], vec![f(0), f(1), b(0), b(1)]],
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "schedule of rank 0: backward of micro-batch 0 through chunk 0 waits forever for rank 1 to do backward of micro-batch 0 through chunk 0"
    );
    let order = Schedule::from_tasks(1, 1, vec![vec![b(0), f(0)]]).unwrap_err();
    assert!(matches!(
        order,
        Error::InvalidSchedule {
            rank: 0,
            problem: ScheduleProblem::Order { .. }
        }
    ));
    let beyond = Schedule::from_tasks(1, 1, vec![vec![f(0), b(0), f(1)]]).unwrap_err();
    assert!(matches!(
        beyond,
        Error::InvalidSchedule {
            problem: ScheduleProblem::OutOfRange {
                micro_batches: 1,
                ..
            },
            ..
        }
    ));
    let halves = vec![vec![
        f(0),
        b(0),
        Task::new(Pass::BackwardInput, 0, 0),
        Task::new(Pass::BackwardWeight, 0, 0),
    ]];
    assert!(matches!(
        Schedule::from_tasks(1, 1, halves),
        Err(Error::InvalidSchedule {
            problem: ScheduleProblem::WholeAndSplit { .. },
            ..
        })
    ));
    assert!(Schedule::from_tasks(0, 1, vec![vec![]]).is_err());
    assert!(Schedule::gpipe(0, 3).is_err());
    assert!(Schedule::interleaved(2, 2, 0).is_err());
}

/// Positions add their number to a counter on the way forward, and to another on the way back.
struct Counter {
    rank: usize,
    stages: usize,
    last: usize,
    /// Sums that came back to position 0, and that reached the last position, by micro-batch.
    finished: Vec<(usize, f32)>,
    weights_due: Vec<(usize, usize)>,
}

impl StageTasks for Counter {
    fn forward(
        &mut self,
        chunk: usize,
        micro_batch: usize,
        input: Option<Message>,
    ) -> Result<Option<Message>, Error> {
        let at = chunk * self.stages + self.rank;
        assert_eq!(input.is_none(), at == 0);
        let sum = input.map_or(100.0 * micro_batch as f32, |message| message.values[0]) + at as f32;
        if at == self.last {
            self.finished.push((micro_batch, sum));
            return Ok(None);
        }
        Ok(Some(Message {
            values: vec![sum; 6],
            shape: vec![2, 3],
        }))
    }

    fn backward(
        &mut self,
        task: Task,
        gradient: Option<Message>,
    ) -> Result<Option<Message>, Error> {
        let at = task.chunk * self.stages + self.rank;
        assert_eq!(gradient.is_none(), at == self.last);
        let sum = gradient.map_or(0.0, |message| {
            assert!(message.shape.is_empty());
            message.values[0]
        }) + at as f32;
        if task.pass == Pass::BackwardInput {
            self.weights_due.push((task.chunk, task.micro_batch));
        }
        if at == 0 {
            self.finished.push((task.micro_batch, sum));
            return Ok(None);
        }
        Ok(Some(Message {
            values: vec![sum],
            shape: vec![],
        }))
    }

    fn backward_weight(&mut self, chunk: usize, micro_batch: usize) -> Result<(), Error> {
        let at = self
            .weights_due
            .iter()
            .position(|due| *due == (chunk, micro_batch));
        self.weights_due
            .remove(at.expect("the first half was done"));
        Ok(())
    }
}

#[test]
fn messages_take_their_way() {
    for (stages, chunks, micro_batches) in [(1, 1, 3), (1, 3, 2), (2, 1, 5), (3, 2, 4), (4, 3, 3)] {
        for schedule in schedules(stages, chunks, micro_batches) {
            let last = stages * schedule.chunks() - 1;
            let group = LocalCommunicator::group(stages, Duration::from_secs(5)).unwrap();
            let finished: Vec<(usize, f32)> = thread::scope(|scope| {
                let ranks: Vec<_> = group
                    .into_iter()
                    .map(|link| {
                        let schedule = &schedule;
                        scope.spawn(move || {
                            let mut tasks = Counter {
                                rank: link.rank(),
                                stages,
                                last,
                                finished: Vec::new(),
                                weights_due: Vec::new(),
                            };
                            let timings = run(schedule, &link, &mut tasks).unwrap();
                            assert_eq!(timings.len(), schedule.tasks(link.rank()).len());
                            assert!(tasks.weights_due.is_empty());
                            tasks.finished
                        })
                    })
                    .collect();
                ranks
                    .into_iter()
                    .flat_map(|rank| rank.join().unwrap())
                    .collect()
            });
            let way = (last * (last + 1) / 2) as f32;
            assert_eq!(finished.len(), 2 * micro_batches);
            for (m, sum) in finished {
                assert!(sum == way || sum == way + 100.0 * m as f32, "{m}: {sum}");
            }
        }
    }
}
