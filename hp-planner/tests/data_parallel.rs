//! The data-parallel planner against exhaustive enumeration on tiny clusters.

use hp_planner::{
    Allocation, ClusterSpec, Configuration, Error, ModelSpec, Objective, ParallelDims, ParetoFront,
    Planner, Recompute, ReplicaGroup, Schedule, Stage, TrainingSpec,
};

fn cluster(first: (u32, u32), second: (u32, u32)) -> ClusterSpec {
    let text = format!(
        r#"
        inter = {{ bandwidth_gb_s = 1.25, latency_us = 30 }}
        [[groups]]
        gpu = "V100-16"
        nodes = {}
        gpus_per_node = {}
        price_per_gpu_hour = 3.06
        [[groups]]
        gpu = "T4"
        nodes = {}
        gpus_per_node = {}
        price_per_gpu_hour = 0.35
        "#,
        first.0, first.1, second.0, second.1
    );
    ClusterSpec::from_toml(&text).unwrap()
}

fn planner(cluster: ClusterSpec, global_batch: u64, streams: u32, large: bool) -> Planner {
    let model = if large {
        ModelSpec::gpt("gpt2", 12, 768, 12, 50_257, 1024)
    } else {
        ModelSpec::gpt("char", 3, 96, 4, 84, 96)
    };
    let mut training =
        TrainingSpec::new(global_batch, if large { 512 } else { 96 }).data_parallel(2);
    training.max_virtual_workers = streams;
    Planner::new(cluster, model, training)
}

/// All ways to write `total` as a sum of `parts` positive numbers.
fn compositions(total: u64, parts: usize) -> Vec<Vec<u64>> {
    if parts == 0 {
        return if total == 0 { vec![vec![]] } else { vec![] };
    }
    (1..=total)
        .flat_map(|first| {
            compositions(total - first, parts - 1)
                .into_iter()
                .map(move |mut rest| {
                    rest.push(first);
                    rest
                })
        })
        .collect()
}

/// The front over every number of GPUs per group, every number of virtual workers per group and every distribution of
/// micro-batches over the single ranks.
fn exhaustive(planner: &Planner, streams: u32) -> ParetoFront<Configuration> {
    let groups = &planner.cluster().groups;
    let (most_first, most_second) = (groups[0].gpus(), groups[1].gpus());
    let micro_batches = planner.training().global_batch / 2;
    let mut front = ParetoFront::new();
    for first in 0..=most_first {
        for second in 0..=most_second {
            let ranks = (first + second) as usize;
            if ranks == 0 {
                continue;
            }
            for share in compositions(micro_batches, ranks) {
                for code in 0..streams * streams {
                    let workers = [1 + code % streams, 1 + code / streams];
                    let replicas: Option<Vec<ReplicaGroup>> = share
                        .iter()
                        .enumerate()
                        .map(|(rank, &micro_batches)| {
                            let group = usize::from(rank >= first as usize);
                            let rounds = micro_batches as u32 / workers[group];
                            (u64::from(rounds * workers[group]) == micro_batches).then(|| {
                                ReplicaGroup {
                                    count: 1,
                                    stages: vec![Stage {
                                        group,
                                        first_layer: 0,
                                        layers: planner.model().depth(),
                                        tp: 1,
                                    }],
                                    virtual_workers: workers[group],
                                    accumulation_steps: rounds,
                                }
                            })
                        })
                        .collect();
                    let Some(replicas) = replicas else { continue };
                    let configuration = Configuration {
                        dims: ParallelDims::data(ranks as u32),
                        allocation: Allocation {
                            gpus: vec![first, second],
                        },
                        replicas,
                        micro_batch: 2,
                        schedule: Schedule::OneFOneB,
                        recompute: Recompute::None,
                        zero: 0,
                        sequence_parallel: false,
                    };
                    if let Ok(plan) = planner.evaluate(&configuration) {
                        front
                            .insert(plan.iteration_time(), plan.iteration_cost(), configuration)
                            .unwrap();
                    }
                }
            }
        }
    }
    front
}

fn agrees(cluster: ClusterSpec, global_batch: u64, streams: u32, large: bool) {
    let planner = planner(cluster, global_batch, streams, large);
    let expected = exhaustive(&planner, streams);
    let report = planner.plan().unwrap();
    let points = |time: f64, cost: f64| (format!("{time:.12e}"), format!("{cost:.12e}"));
    let expected: Vec<_> = expected.iter().map(|p| points(p.time, p.cost)).collect();
    let found: Vec<_> = report
        .front
        .iter()
        .map(|p| points(p.time, p.cost))
        .collect();
    assert_eq!(found, expected, "batch {global_batch}, {streams} streams");
    for point in &report.front {
        assert_eq!(point.payload.configuration.global_batch(), global_batch);
    }
}

#[test]
fn front_equals_exhaustive_enumeration() {
    agrees(cluster((2, 1), (2, 1)), 20, 1, true);
    agrees(cluster((2, 1), (2, 1)), 20, 1, false);
    agrees(cluster((1, 2), (1, 2)), 16, 3, true);
    agrees(cluster((1, 1), (1, 2)), 24, 4, false);
    agrees(cluster((2, 1), (1, 1)), 26, 2, false);
}

#[test]
fn faster_gpus_get_more_micro_batches() {
    let planner = planner(cluster((2, 1), (2, 1)), 64, 1, true);
    let plan = planner
        .reassign(&Allocation { gpus: vec![2, 2] }, 64)
        .unwrap();
    let steps = |group: usize| {
        plan.configuration
            .replicas
            .iter()
            .filter(|replicas| replicas.stages[0].group == group)
            .map(|replicas| replicas.accumulation_steps)
            .min()
            .unwrap()
    };
    assert!(steps(0) > steps(1), "{:?}", plan.configuration.replicas);
}

#[test]
fn virtual_workers_pay_only_for_tiny_models() {
    let allocation = Allocation { gpus: vec![2, 0] };
    let workers = |large: bool| {
        let planner = planner(cluster((2, 1), (2, 1)), 64, 4, large);
        let plan = planner.reassign(&allocation, 64).unwrap();
        plan.configuration.replicas[0].virtual_workers
    };
    assert!(workers(false) > 1);
    assert_eq!(workers(true), 1);
}

#[test]
fn a_larger_batch_takes_longer_on_the_same_gpus() {
    let planner = planner(cluster((2, 1), (2, 1)), 16, 1, false);
    let allocation = Allocation { gpus: vec![1, 2] };
    let mut last = 0.0;
    for batch in (16..=256).step_by(16) {
        let plan = planner.reassign(&allocation, batch).unwrap();
        assert_eq!(plan.configuration.global_batch(), batch);
        assert!(plan.iteration_time() >= last);
        last = plan.iteration_time();
    }
}

#[test]
fn what_cannot_run_says_why() {
    let planner = planner(cluster((2, 1), (2, 1)), 16, 1, false);
    let all = Allocation { gpus: vec![2, 2] };
    let message = |batch| planner.reassign(&all, batch).unwrap_err().to_string();
    assert_eq!(
        message(6),
        "no feasible configuration among 1 examined: 1 x micro-batches for the ranks: 4 needed, 3 available"
    );
    assert_eq!(
        message(17),
        "no feasible configuration among 1 examined: 1 x divisibility: global batch of 17 is not a multiple of 2 (micro-batch)"
    );
    let error = planner
        .reassign(&Allocation { gpus: vec![3, 0] }, 16)
        .unwrap_err();
    assert!(matches!(error, Error::Field { .. }), "{error}");
    // 7 B parameters with Adam need 16 bytes each: 112 GB do not fit a T4.
    let big = Planner::new(
        ClusterSpec::homogeneous("T4", 1, 1).unwrap(),
        ModelSpec::llama("llama2-7b", 32, 4096, 32, 32, 11_008, 32_000),
        TrainingSpec::new(8, 1024).data_parallel(1),
    );
    let error = big.plan().unwrap_err().to_string();
    assert!(
        error.contains("memory:") && error.contains("stage 0 on T4"),
        "{error}"
    );
}

#[test]
fn reports_survive_json_and_print() {
    let planner = planner(cluster((2, 1), (2, 1)), 64, 1, true);
    let report = planner.plan().unwrap();
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(
        serde_json::from_str::<hp_planner::PlanReport>(&json).unwrap(),
        report
    );
    let table = report.to_string();
    assert!(
        table.contains("V100-16") && table.contains("on the front"),
        "{table}"
    );
    assert!(report.select(Objective::Cheapest).unwrap().index + 1 == report.front.len());
}
