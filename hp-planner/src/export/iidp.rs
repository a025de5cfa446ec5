//! The `iidp` executor: which worker runs which layers with how many virtual workers and rounds.

use serde_json::{Value, json};

use crate::cluster::ClusterSpec;
use crate::plan::Configuration;

pub(super) fn json(configuration: &Configuration, cluster: &ClusterSpec) -> String {
    let replicas: Vec<Value> = configuration
        .each_replica()
        .map(|replica| {
            let stages: Vec<Value> = replica
                .stages
                .iter()
                .map(|stage| {
                    json!({
                        "gpu": cluster.groups.get(stage.group).map(|group| group.gpu.as_str()),
                        "group": stage.group,
                        "first_layer": stage.first_layer,
                        "layers": stage.layers,
                        "tensor_parallel": stage.tp,
                    })
                })
                .collect();
            json!({
                "stages": stages,
                "virtual_workers": replica.virtual_workers,
                "accumulation_steps": replica.accumulation_steps,
            })
        })
        .collect();
    let document = json!({
        "global_batch": configuration.global_batch(),
        "micro_batch": configuration.micro_batch,
        "schedule": configuration.schedule,
        "recompute": configuration.recompute,
        "zero": configuration.zero,
        "replicas": replicas,
    });
    format!("{document:#}\n")
}
