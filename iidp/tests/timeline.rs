//! The timeline of a step, and the profiler on real steps.

mod common;

use std::ops::Range;
use std::time::Duration;

use common::{GptTask, MlpTask, batch};
use iidp::{Communicator, Error, ExecutorConfig, LocalCommunicator, Profiler, WorkerLayout};

#[test]
fn a_timeline_shows_every_micro_batch_once_on_its_worker() {
    let layouts = vec![WorkerLayout::new(2, 2, 2), WorkerLayout::new(2, 1, 1)];
    let mut executor = ExecutorConfig::new(layouts).init(MlpTask).unwrap();
    let timings = executor.step(&batch(0, 10), 1e-3).unwrap().timings;
    let events = timings.chrome_trace();
    let events = events.as_array().unwrap();
    let named = |prefix: &str| -> Vec<&str> {
        let mut names: Vec<_> = events
            .iter()
            .filter_map(|event| event["name"].as_str())
            .filter(|name| name.starts_with(prefix))
            .collect();
        names.sort_unstable();
        names
    };
    assert_eq!(named("update"), ["update"; 2]);
    assert_eq!(named("wait for ranks"), ["wait for ranks"; 2]);
    assert_eq!(named("all-reduce"), ["all-reduce 0"; 2]);
    assert_eq!(
        named("micro-batch"),
        [
            "micro-batch 0 (worker 0)",
            "micro-batch 1 (worker 1)",
            "micro-batch 2 (worker 0)",
            "micro-batch 3 (worker 1)",
            "micro-batch 4 (worker 0)",
        ]
    );
    assert_eq!(events.len(), 2 + 2 + 2 + 5);
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

/// A communicator whose all-reduces of gradients take long.
#[derive(Debug)]
struct Slow(Box<dyn Communicator>);

impl Communicator for Slow {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        std::thread::sleep(Duration::from_millis(5));
        self.0.all_reduce_sum(data)
    }

    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.0.all_reduce_sum_f64(data)
    }

    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error> {
        self.0.reduce_scatter_sum(data)
    }

    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        self.0.all_gather(data)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.0.all_gather_bytes(bytes)
    }

    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        self.0.broadcast(data, root)
    }

    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error> {
        self.0.send(to, tag, data)
    }

    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        self.0.recv(from, tag)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.0.barrier()
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        Ok(Box::new(Self(self.0.split(color, key)?)))
    }

    fn abort(&self, reason: &str) -> Error {
        self.0.abort(reason)
    }
}

#[test]
fn with_overlap_buckets_are_reduced_beside_the_backward_passes() {
    // A slow rank, so that there is something to hide behind on a fast machine too.
    for depth in [1, 2] {
        let layouts = vec![WorkerLayout::new(1, 2, 2), WorkerLayout::new(1, 1, 2)];
        let ends = LocalCommunicator::group(2, Duration::from_mins(1)).unwrap();
        let ends = ends
            .into_iter()
            .map(|end| Box::new(Slow(Box::new(end))) as Box<dyn Communicator>);
        let mut executor = ExecutorConfig::new(layouts)
            .with_overlap(true)
            .with_overlap_depth(depth)
            .with_bucket_bytes(4096)
            .with_emulated_speeds(vec![0.05, 0.05])
            .init_with(
                GptTask {
                    tied: false,
                    dropout: 0.0,
                },
                ends.collect(),
            )
            .unwrap();
        let buckets = executor.layout().buckets().len();
        assert!(buckets > 4);
        // The first step learns the order of the gradients and overlaps nothing.
        for (step, overlaps) in [(0, false), (1, true)] {
            let timings = executor.step(&batch(step, 6), 1e-3).unwrap().timings;
            for rank in &timings.ranks {
                let order: Vec<_> = rank.buckets.iter().map(|one| one.bucket).collect();
                let expected: Vec<_> = (0..buckets).rev().collect();
                assert_eq!(order, expected, "from the last bucket to the first");
                let begun = rank.buckets[0].start < rank.compute;
                assert_eq!(begun, overlaps, "step {step} of rank {}", rank.rank);
                // A bucket waits for all of the rank's micro-batches.
                if overlaps && depth == 2 {
                    let first = &rank.micro_batches[0];
                    assert!(
                        rank.buckets[0].start < first.start + first.duration,
                        "all micro-batches of the rank are under way when its first bucket leaves"
                    );
                }
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
