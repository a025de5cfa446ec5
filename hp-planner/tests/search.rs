//! The search against exhaustive enumeration, and its determinism.

mod support;

use std::time::Duration;

use hp_planner::{
    AnalyticCost, ClusterSpec, Configuration, CostModel, Estimate, Infeasible, Link, ModelSpec,
    NodeGroup, Planner, Precision, Problem, Stage, StopReason, TrainingSpec,
};
use support::space;

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
        Err(error) => assert!(error.to_string().contains("0 examined"), "{error}"),
    }
}

#[test]
fn mixing_is_never_worse_than_the_best_homogeneous_part() {
    for (fast, slow) in [("V100-16", "T4"), ("A100-40", "V100-16"), ("A100-40", "T4")] {
        let group = |gpu: &str| NodeGroup {
            gpu: gpu.to_owned(),
            nodes: 1,
            gpus_per_node: 4,
            intra: None,
            inter: Some(Link::new(12.5, 10.0)),
            price_per_gpu_hour: Some(1.0),
            spot: false,
            zone: String::new(),
        };
        let plan = |groups: Vec<NodeGroup>| {
            let mut cluster = ClusterSpec::homogeneous("V100-16", 1, 1).unwrap();
            cluster.groups = groups;
            let model = ModelSpec::gpt("gpt", 12, 1024, 16, 50_000, 1024);
            let mut training = TrainingSpec::new(1024, 1024);
            training.micro_batches = vec![1, 2, 4];
            training.precision = Precision::Fp16;
            Planner::new(cluster, model, training).plan().unwrap()
        };
        let mixed = plan(vec![group(fast), group(slow)]);
        let mut best = f64::INFINITY;
        for gpu in [fast, slow] {
            let alone = plan(vec![group(gpu)]);
            for point in &alone.front {
                best = best.min(point.time);
                assert!(
                    mixed
                        .front
                        .iter()
                        .any(|p| p.time <= point.time && p.cost <= point.cost)
                );
            }
        }
        let fastest = mixed.front.iter().next().unwrap();
        assert!(
            fastest.time < best,
            "{fast} + {slow}: {} against {best}",
            fastest.time
        );
    }
}
