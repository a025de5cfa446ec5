//! Launcher inputs against the options that the launchers document, and pictures of the front.

use hp_planner::export::{Launcher, export, html, svg};
use hp_planner::{
    Allocation, ClusterSpec, Configuration, ModelSpec, Objective, ParallelDims, PlanReport,
    Planner, Precision, Recompute, ReplicaGroup, Schedule, Stage, TrainingSpec,
};

/// Options of Megatron-LM's argument parser that a plan may use, with whether they take a value
/// (`megatron/training/arguments.py`, core 0.12).
const MEGATRON: &[(&str, bool)] = &[
    ("num-layers", true),
    ("hidden-size", true),
    ("ffn-hidden-size", true),
    ("num-attention-heads", true),
    ("num-query-groups", true),
    ("group-query-attention", false),
    ("seq-length", true),
    ("max-position-embeddings", true),
    ("position-embedding-type", true),
    ("micro-batch-size", true),
    ("global-batch-size", true),
    ("tensor-model-parallel-size", true),
    ("pipeline-model-parallel-size", true),
    ("context-parallel-size", true),
    ("expert-model-parallel-size", true),
    ("num-experts", true),
    ("moe-router-topk", true),
    ("num-layers-per-virtual-pipeline-stage", true),
    ("decoder-first-pipeline-num-layers", true),
    ("decoder-last-pipeline-num-layers", true),
    ("swiglu", false),
    ("untie-embeddings-and-output-weights", false),
    ("disable-bias-linear", false),
    ("sequence-parallel", false),
    ("use-flash-attn", false),
    ("recompute-granularity", true),
    ("recompute-method", true),
    ("recompute-num-layers", true),
    ("use-distributed-optimizer", false),
    ("overlap-grad-reduce", false),
    ("bf16", false),
    ("fp16", false),
    ("fp8-format", true),
];

fn cluster() -> ClusterSpec {
    let mut cluster = ClusterSpec::homogeneous("A100-80", 2, 8).unwrap();
    cluster.groups.push(
        ClusterSpec::homogeneous("V100-16", 2, 8)
            .unwrap()
            .groups
            .remove(0),
    );
    cluster
}

fn model() -> ModelSpec {
    ModelSpec::llama("llama", 32, 4096, 32, 8, 14_336, 128_256)
}

fn training() -> TrainingSpec {
    TrainingSpec::new(256, 4096)
}

/// dp 2, tp 4, pp 2 with two chunks per stage, 32 micro-batches of 4 per replica.
fn configuration() -> Configuration {
    Configuration {
        dims: ParallelDims {
            dp: 2,
            tp: 4,
            pp: 2,
            vpp: 2,
            cp: 1,
            ep: 1,
        },
        allocation: Allocation { gpus: vec![16, 0] },
        replicas: vec![ReplicaGroup {
            count: 2,
            stages: vec![
                Stage {
                    group: 0,
                    first_layer: 0,
                    layers: 16,
                    tp: 4,
                },
                Stage {
                    group: 0,
                    first_layer: 16,
                    layers: 16,
                    tp: 4,
                },
            ],
            virtual_workers: 1,
            accumulation_steps: 32,
        }],
        micro_batch: 4,
        schedule: Schedule::OneFOneB,
        recompute: Recompute::Selective,
        zero: 1,
        sequence_parallel: true,
    }
}

fn write(launcher: Launcher, configuration: &Configuration) -> Result<String, String> {
    export(launcher, configuration, &cluster(), &model(), &training())
        .map_err(|error| error.to_string())
}

#[test]
fn megatron_flags_are_documented_ones() {
    let text = write(Launcher::Megatron, &configuration()).unwrap();
    for line in text.lines() {
        let mut words = line.strip_prefix("--").unwrap().split(' ');
        let name = words.next().unwrap();
        let &(_, takes_value) = MEGATRON
            .iter()
            .find(|option| option.0 == name)
            .unwrap_or_else(|| panic!("{name}"));
        assert_eq!(words.count(), usize::from(takes_value), "{line}");
    }
    for expected in [
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 2",
        "--num-layers-per-virtual-pipeline-stage 8",
        "--micro-batch-size 4",
        "--global-batch-size 256",
        "--num-query-groups 8",
        "--recompute-granularity selective",
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--swiglu",
        "--bf16",
    ] {
        assert!(
            text.lines().any(|line| line == expected),
            "{expected} is missing in\n{text}"
        );
    }
    let mut uneven = configuration();
    uneven.dims.vpp = 1;
    uneven.replicas[0].stages[0].layers = 15;
    uneven.replicas[0].stages[1] = Stage {
        group: 0,
        first_layer: 15,
        layers: 17,
        tp: 4,
    };
    let text = write(Launcher::Megatron, &uneven).unwrap();
    assert!(text.contains(
        "--decoder-first-pipeline-num-layers 15\n--decoder-last-pipeline-num-layers 17\n"
    ));
}

#[test]
fn deepspeed_batch_sizes_agree() {
    let mut plain = configuration();
    plain.dims = ParallelDims::data(16);
    plain.replicas = vec![ReplicaGroup {
        count: 16,
        stages: vec![Stage {
            group: 0,
            first_layer: 0,
            layers: 32,
            tp: 1,
        }],
        virtual_workers: 1,
        accumulation_steps: 4,
    }];
    plain.recompute = Recompute::None;
    plain.zero = 3;
    let document: serde_json::Value =
        serde_json::from_str(&write(Launcher::DeepSpeed, &plain).unwrap()).unwrap();
    let number = |key: &str| document[key].as_u64().unwrap();
    assert_eq!(
        number("train_batch_size"),
        number("train_micro_batch_size_per_gpu") * number("gradient_accumulation_steps") * 16
    );
    assert_eq!(document["zero_optimization"]["stage"], 3);
    assert_eq!(document["bf16"]["enabled"], true);
    assert!(
        write(Launcher::DeepSpeed, &configuration())
            .unwrap_err()
            .contains("deepspeed has no")
    );
}

#[test]
fn torchtitan_degrees_multiply_to_the_gpus() {
    let mut sharded = configuration();
    sharded.zero = 3;
    let text = write(Launcher::Torchtitan, &sharded).unwrap();
    let document: toml::Table = text.parse().unwrap();
    let parallelism = document["parallelism"].as_table().unwrap();
    let degree = |key: &str| parallelism[key].as_integer().unwrap();
    let product: i64 = [
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
    ]
    .map(degree)
    .iter()
    .product();
    assert_eq!(product, 16);
    assert_eq!(
        parallelism["pipeline_parallel_schedule"].as_str(),
        Some("Interleaved1F1B")
    );
    assert_eq!(degree("pipeline_parallel_layers_per_stage"), 8);
    let training = document["training"].as_table().unwrap();
    assert_eq!(training["local_batch_size"].as_integer(), Some(128));
    assert_eq!(training["global_batch_size"].as_integer(), Some(256));
    assert!(
        write(Launcher::Torchtitan, &configuration())
            .unwrap_err()
            .contains("ZeRO stage 1")
    );
}

#[test]
fn iidp_layout_holds_every_replica() {
    let mut mixed = configuration();
    mixed.dims = ParallelDims::data(3);
    mixed.allocation = Allocation { gpus: vec![1, 2] };
    let whole = |group| {
        vec![Stage {
            group,
            first_layer: 0,
            layers: 32,
            tp: 1,
        }]
    };
    mixed.replicas = vec![
        ReplicaGroup {
            count: 1,
            stages: whole(0),
            virtual_workers: 3,
            accumulation_steps: 10,
        },
        ReplicaGroup {
            count: 2,
            stages: whole(1),
            virtual_workers: 1,
            accumulation_steps: 17,
        },
    ];
    let document: serde_json::Value =
        serde_json::from_str(&write(Launcher::Iidp, &mixed).unwrap()).unwrap();
    let replicas = document["replicas"].as_array().unwrap();
    assert_eq!(replicas.len(), 3);
    assert_eq!(replicas[0]["virtual_workers"], 3);
    assert_eq!(replicas[0]["stages"][0]["gpu"], "A100-80");
    assert_eq!(replicas[2]["accumulation_steps"], 17);
    assert_eq!(replicas[2]["stages"][0]["gpu"], "V100-16");
    assert_eq!(document["global_batch"], 4 * (30 + 2 * 17));
    // The others say that they cannot do this.
    for launcher in [
        Launcher::Megatron,
        Launcher::DeepSpeed,
        Launcher::Torchtitan,
    ] {
        assert!(
            write(launcher, &mixed)
                .unwrap_err()
                .contains("replicas of unequal shape"),
            "{launcher}"
        );
    }
}

#[test]
fn launchers_have_names() {
    for name in ["megatron", "deepspeed", "torchtitan", "iidp"] {
        assert_eq!(name.parse::<Launcher>().unwrap().to_string(), name);
    }
    assert!(
        "horovod"
            .parse::<Launcher>()
            .unwrap_err()
            .to_string()
            .contains("megatron")
    );
}

fn report() -> PlanReport {
    let cluster = ClusterSpec::homogeneous("V100-16", 2, 4).unwrap();
    let model = ModelSpec::gpt("a <small> model", 6, 512, 8, 10_000, 256);
    let mut training = TrainingSpec::new(64, 256);
    training.precision = Precision::Fp16;
    Planner::new(cluster, model, training).plan().unwrap()
}

#[test]
fn report_survives_json() {
    let report = report();
    let text = serde_json::to_string(&report).unwrap();
    assert!(text.contains("\"schema_version\":"));
    assert_eq!(serde_json::from_str::<PlanReport>(&text).unwrap(), report);
}

#[test]
fn pictures_are_well_formed_and_need_nothing_else() {
    let report = report();
    let chosen = report.select(Objective::Knee).unwrap().index;
    let page = html(&report, Some(chosen));
    let picture = svg(&report, Some(chosen));
    assert!(page.contains(&picture));
    assert_eq!(picture.matches("<circle").count(), report.front.len());
    assert_eq!(picture.matches("#d05020").count(), 1);
    assert!(page.contains("a &lt;small&gt; model") && !page.contains("<small>"));
    for outside in ["src=", "href=", "@import", "<script"] {
        assert!(!page.contains(outside));
    }
    // Every element that opens closes, in order.
    let mut open = Vec::new();
    for tag in picture.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split_whitespace().next().unwrap());
        }
    }
    assert!(open.is_empty(), "{open:?}");
}
