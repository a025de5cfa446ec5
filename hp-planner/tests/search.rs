//! The search against exhaustive enumeration, and its determinism.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hp_planner::{
    AnalyticCost, Configuration, CostModel, Error, Estimate, Infeasible, ModelSpec, Planner,
    Problem, Recompute, Schedule, Stage, StopReason, TrainingSpec,
};
use support::{cluster, group, space};

/// The analytic model with bounds that exclude nothing and without the reason that lets the search skip.
///
/// Times are scaled by a power of two, so that layers and micro-batches are divided as before to the last bit.
#[derive(Debug)]
struct Boundless(AnalyticCost);

impl CostModel for Boundless {
    fn estimate(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<Estimate, Infeasible> {
        self.0
            .estimate(problem, configuration)
            .map_err(|reason| match reason {
                Infeasible::Memory { .. } => Infeasible::Unsupported("memory".to_owned()),
                other => other,
            })
    }

    fn round_seconds(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
        virtual_workers: u32,
    ) -> Option<f64> {
        let seconds = self
            .0
            .round_seconds(problem, configuration, stage, virtual_workers)?;
        Some(seconds * 0.5_f64.powi(60))
    }
}

#[test]
fn front_equals_exhaustive_enumeration_on_200_spaces() {
    let (mut feasible, mut fewer) = (0, 0);
    for seed in 0..200 {
        let (cluster, model, training) = space(seed);
        let planner = Planner::new(cluster, model, training);
        let bounded = planner.plan();
        let exhaustive = planner
            .with_cost_model(Boundless(AnalyticCost::new()))
            .plan();
        match (bounded, exhaustive) {
            (Ok(bounded), Ok(exhaustive)) => {
                assert_eq!(bounded.front, exhaustive.front, "space {seed}");
                feasible += 1;
                fewer += u32::from(bounded.examined < exhaustive.examined);
            }
            (Err(_), Err(_)) => {}
            (bounded, exhaustive) => panic!("space {seed}: {bounded:?} against {exhaustive:?}"),
        }
    }
    assert!(feasible > 100, "only {feasible} spaces have a front");
    assert!(
        fewer > 50,
        "bounds excluded something in {fewer} spaces only"
    );
}

#[test]
fn same_bytes_on_any_number_of_threads() {
    let bytes = |threads: usize, seed: u64| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let (cluster, model, training) = space(seed);
        pool.install(|| {
            Planner::new(cluster, model, training)
                .plan()
                .map(|report| serde_json::to_string(&report).unwrap())
                .map_err(|error| error.to_string())
        })
    };
    for seed in 0..12 {
        let one = bytes(1, seed);
        assert_eq!(one, bytes(1, seed));
        assert_eq!(one, bytes(3, seed));
        assert_eq!(one, bytes(8, seed));
    }
}

#[test]
fn a_time_limit_gives_a_part_of_the_front_or_nothing() {
    let (cluster, model, training) = space(3);
    let planner = Planner::new(cluster, model, training);
    let whole = planner.plan().unwrap();
    assert_eq!(whole.stop, StopReason::Complete);
    let hour = planner
        .clone()
        .with_time_limit(Duration::from_secs(u64::MAX))
        .plan()
        .unwrap();
    assert_eq!(hour, whole);
    // No time at all: whatever comes back is marked, and no plan in it beats the whole front.
    match planner.with_time_limit(Duration::ZERO).plan() {
        Ok(part) => {
            assert_eq!(part.stop, StopReason::TimeLimit);
            for point in &part.front {
                let on_front = whole.front.iter().any(|p| p == point);
                assert!(on_front || whole.front.dominates(point.time, point.cost));
            }
        }
        Err(error) => assert!(matches!(error, Error::TimeLimit { .. }), "{error}"),
    }
}

/// A mixed cluster with a space of some ten thousand shapes.
fn large() -> Planner {
    let cluster = cluster(vec![
        group("A100-40", 32, 8, 25.0, 3.0),
        group("V100-32", 32, 8, 12.5, 2.0),
    ]);
    let model = ModelSpec::gpt("gpt", 48, 6144, 48, 50_000, 1024);
    let mut training = TrainingSpec::new(1024, 1024);
    training.micro_batches = vec![1, 2, 4, 8];
    training.recompute = vec![Recompute::None, Recompute::Selective, Recompute::Full];
    training.zero = vec![0, 1, 2, 3];
    training.schedules = vec![Schedule::OneFOneB, Schedule::ZbH1];
    training.max_vpp = 4;
    Planner::new(cluster, model, training)
}

#[test]
fn what_is_found_in_time_is_true() {
    let planner = large();
    // However far the search gets in this time, nothing it returns is made up.
    for limit in [1, 5, 20, 80] {
        let Ok(part) = planner
            .clone()
            .with_time_limit(Duration::from_millis(limit))
            .plan()
        else {
            continue;
        };
        for point in &part.front {
            let again = planner.evaluate(&point.payload.configuration).unwrap();
            assert_eq!(again, point.payload);
            assert_eq!(again.configuration.global_batch(), 1024);
        }
    }
}

/// Sleeps in the first estimate until the time limit is over, and counts estimates.
#[derive(Debug, Default)]
struct Slow(AnalyticCost, AtomicUsize);

impl CostModel for &'static Slow {
    fn estimate(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<Estimate, Infeasible> {
        if self.1.fetch_add(1, Ordering::Relaxed) == 0 {
            std::thread::sleep(Duration::from_secs(3));
        }
        self.0.estimate(problem, configuration)
    }

    fn round_seconds(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
        virtual_workers: u32,
    ) -> Option<f64> {
        self.0
            .round_seconds(problem, configuration, stage, virtual_workers)
    }
}

#[test]
fn past_the_limit_nothing_more_is_begun() {
    let slow: &'static Slow = Box::leak(Box::default());
    let planner = large()
        .with_cost_model(slow)
        .with_time_limit(Duration::from_secs(3));
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    match pool.install(|| planner.plan()) {
        Ok(report) => assert_eq!(report.stop, StopReason::TimeLimit),
        Err(error) => assert!(matches!(error, Error::TimeLimit { .. }), "{error}"),
    }
    // The row of numbers of replicas at hand is brought to its end: one estimate per ZeRO stage.
    let estimates = slow.1.load(Ordering::Relaxed);
    assert!((1..=4).contains(&estimates), "{estimates} estimates");
}
