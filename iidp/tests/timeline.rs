//! The timeline of a step, and the profiler on real steps.

mod common;

use std::time::Duration;

use common::{GptTask, MlpTask, batch};
use iidp::{Communicator, ExecutorConfig, LocalCommunicator, Profiler, WorkerLayout};

#[test]
fn a_timeline_shows_every_micro_batch_once_on_its_worker() {
    let layouts = vec![WorkerLayout::new(2, 2, 2), WorkerLayout::new(2, 1, 1)];
    let mut executor = ExecutorConfig::new(layouts).init(MlpTask).unwrap();
    let timings = executor.step(&batch(0, 10), 1e-3).unwrap().timings;
    let events = timings.chrome_trace();
    let events = events.as_array().unwrap();
    let mut names: Vec<_> = events
        .iter()
        .map(|event| event["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    let micro_batches = (0..5).map(|m| format!("micro-batch {m}"));
    let mut expected: Vec<_> = ["all-reduce", "all-reduce", "update", "update"]
        .map(str::to_owned)
        .to_vec();
    expected.splice(2..2, micro_batches);
    assert_eq!(names, expected);
    for event in events {
        assert_eq!(event["ph"], "X");
        let end = event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
        assert!(
            end <= timings.total.as_secs_f64() * 1e6,
            "{event} ends after the step"
        );
    }
    // Micro-batches of one worker follow each other.
    for rank in &timings.ranks {
        for worker in 0..2 {
            let mut free = Duration::ZERO;
            for one in rank.micro_batches.iter().filter(|one| one.worker == worker) {
                assert!(
                    one.start >= free,
                    "micro-batch {} overlaps",
                    one.micro_batch
                );
                free = one.start + one.duration;
            }
        }
    }
}

#[test]
fn the_profiler_measures_steps_and_all_reduces() {
    let profiler = Profiler::new(1, 3).unwrap();
    assert!(Profiler::new(1, 0).is_err());
    let layouts: Vec<_> = [(1, 1), (4, 1), (2, 2), (4, 2)]
        .map(|(b, a)| WorkerLayout::new(b, 1, a))
        .to_vec();
    let workload = GptTask {
        tied: false,
        dropout: 0.0,
    };
    let samples: Vec<u64> = (0..8).collect();
    let mut profile = profiler
        .steps(workload, |config| config, &samples, &layouts)
        .unwrap();
    assert_eq!(profile.steps.len(), 4);
    assert!(profile.steps.iter().all(|step| step.seconds > 0.0));
    assert!(profile.step_seconds(WorkerLayout::new(3, 1, 3)).is_some());

    let group = LocalCommunicator::group(2, Duration::from_secs(20)).unwrap();
    let sizes = [1 << 10, 1 << 14, 1 << 18];
    let mut measured = std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .map(|end| {
                scope.spawn(move || {
                    profiler
                        .all_reduces(&end as &dyn Communicator, &sizes)
                        .unwrap()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    profile.all_reduces = measured.swap_remove(0);
    assert_eq!(
        profile
            .all_reduces
            .iter()
            .map(|row| row.bytes)
            .collect::<Vec<_>>(),
        sizes
    );
    let text = serde_json::to_string(&profile).unwrap();
    let read: iidp::profiler::StepProfile = serde_json::from_str(&text).unwrap();
    assert_eq!(read.steps.len(), profile.steps.len());
}
