//! Mixed GPU types within one job against the homogeneous parts of the same cluster.

mod support;

use std::path::PathBuf;

use hp_planner::{ClusterSpec, ModelSpec, PlanReport, Planner, TrainingSpec};
use support::space;

fn data(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "data", name]
        .iter()
        .collect()
}

/// The plan of the whole cluster and that of each group alone, where it has one.
fn plans(
    cluster: &ClusterSpec,
    model: &ModelSpec,
    training: &TrainingSpec,
) -> (Option<PlanReport>, Vec<PlanReport>) {
    let plan = |cluster: ClusterSpec| {
        Planner::new(cluster, model.clone(), training.clone())
            .plan()
            .ok()
    };
    let parts = cluster.groups.iter().filter_map(|group| {
        let mut part = cluster.clone();
        part.groups = vec![group.clone()];
        plan(part)
    });
    let parts = parts.collect();
    (plan(cluster.clone()), parts)
}

fn never_worse(whole: &PlanReport, part: &PlanReport, what: &str) {
    for point in &part.front {
        assert!(
            whole
                .front
                .iter()
                .any(|p| p.time <= point.time && p.cost <= point.cost),
            "{what}: nothing as good as {} s for {}",
            point.time,
            point.cost
        );
    }
}

#[test]
fn a_mixed_cluster_is_never_worse_than_one_of_its_parts() {
    let mut compared = 0;
    for seed in 0..300 {
        let (cluster, model, training) = space(seed);
        if cluster.groups.len() < 2 {
            continue;
        }
        let (whole, parts) = plans(&cluster, &model, &training);
        for part in &parts {
            let whole = whole
                .as_ref()
                .expect("what runs on a part runs on the whole");
            never_worse(whole, part, &format!("space {seed}"));
            compared += 1;
        }
    }
    assert!(compared > 200, "only {compared} parts compared");
}

/// The mixed cluster is faster than its best part, with a plan that uses all groups.
fn faster_together(name: &str) {
    let cluster = ClusterSpec::from_path(data(name)).unwrap();
    let model = ModelSpec::from_path(data("gpt_760m.toml")).unwrap();
    let training = TrainingSpec::from_path(data("training_fp16.toml")).unwrap();
    let (whole, parts) = plans(&cluster, &model, &training);
    let whole = whole.unwrap();
    assert_eq!(parts.len(), 2, "each part can run alone");
    let mut best = f64::INFINITY;
    for part in &parts {
        never_worse(&whole, part, name);
        best = best.min(part.front.points()[0].time);
    }
    let fastest = &whole.front.points()[0];
    assert!(
        fastest.time < best,
        "{name}: {} s together, {best} s on the best part",
        fastest.time
    );
    let groups = fastest.payload.configuration.allocation.groups();
    assert_eq!(groups.count(), 2);
}

#[test]
fn v100_with_p100_is_faster_than_either() {
    faster_together("v100_p100.toml");
}

#[test]
fn a100_with_v100_is_faster_than_either() {
    faster_together("a100_v100.toml");
}

#[test]
fn a100_with_t4_is_faster_than_either() {
    faster_together("a100_t4.toml");
}
