//! Speed of planning: the searches of the design page, schedules, the front.
//!
//! ```text
//! cargo bench --bench hp_planner
//! ```
//!
//! With `-- --test` every benchmark runs once on a cluster of a few nodes.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use hp_planner::cost::schedule::{ChunkTimes, Pipeline};
use hp_planner::{
    ClusterSpec, Link, ModelSpec, NodeGroup, Objective, ParetoFront, Planner, Recompute, Schedule,
    TrainingSpec,
};

/// Whether criterion only wants to know that everything runs.
fn smoke() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

fn cluster(groups: &[(&str, u32)]) -> ClusterSpec {
    let mut cluster =
        ClusterSpec::homogeneous(groups[0].0, 1, 8).expect("the catalogue has the GPU");
    cluster.groups = groups
        .iter()
        .map(|&(gpu, nodes)| NodeGroup {
            gpu: gpu.to_owned(),
            nodes: if smoke() { 1 } else { nodes },
            gpus_per_node: 8,
            intra: None,
            inter: Some(Link::new(25.0, 10.0)),
            price_per_gpu_hour: None,
            spot: false,
            zone: String::new(),
        })
        .collect();
    cluster
}

/// All recompute choices, `ZeRO` stages and schedules, up to eight chunks per stage.
fn everything(global_batch: u64) -> TrainingSpec {
    let mut training = TrainingSpec::new(global_batch, 2048);
    training.micro_batches = vec![1, 2, 4, 8];
    training.recompute = vec![Recompute::None, Recompute::Selective, Recompute::Full];
    training.zero = vec![0, 1, 2, 3];
    training.schedules = vec![
        Schedule::GPipe,
        Schedule::OneFOneB,
        Schedule::ZbH1,
        Schedule::Zb2p,
        Schedule::ZbV,
    ];
    training.max_vpp = 8;
    training.sequence_parallel = true;
    training
}

/// What launchers offer most: 1F1B, with and without full recomputation, `ZeRO` stages 0 and 1.
fn plain(global_batch: u64) -> TrainingSpec {
    let mut training = everything(global_batch);
    training.recompute = vec![Recompute::None, Recompute::Full];
    training.zero = vec![0, 1];
    training.schedules = vec![Schedule::OneFOneB];
    training.max_vpp = 1;
    training
}

fn search(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("search");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_secs(5));
    let small = ModelSpec::gpt("gpt-6.7b", 32, 4096, 32, 51_200, 2048);
    let large = ModelSpec::gpt("gpt-175b", 96, 12_288, 96, 51_200, 2048);
    let huge = ModelSpec::gpt("gpt-1t", 128, 25_600, 160, 51_200, 2048);
    let mixed = [("A100-80", 32), ("V100-16", 32)];
    let four = [
        ("H100-80", 16),
        ("A100-80", 16),
        ("V100-32", 16),
        ("T4", 16),
    ];
    let many = [("H100-80", 625), ("A100-80", 625)];
    for (name, groups, model, training) in [
        ("128 A100", &[("A100-80", 16)][..], &small, everything(512)),
        ("512 of two types", &mixed[..], &small, everything(1024)),
        (
            "512 of two types, 1F1B only",
            &mixed[..],
            &small,
            plain(1024),
        ),
        (
            "512 of four types, 1F1B only",
            &four[..],
            &small,
            plain(1024),
        ),
        (
            "175B on 1,024 A100",
            &[("A100-80", 128)][..],
            &large,
            everything(1536),
        ),
        (
            "1T on 10,000 of two types",
            &many[..],
            &huge,
            everything(4096),
        ),
    ] {
        let (model, training) = if smoke() {
            (&small, plain(64))
        } else {
            (model, training)
        };
        let planner = Planner::new(cluster(groups), model.clone(), training);
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(planner.plan().map(|report| report.front.len())));
        });
    }
    group.finish();
}

fn schedules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule of 16 stages, 128 micro-batches");
    let (devices, micro_batches) = if smoke() { (4, 8) } else { (16, 128) };
    for (name, schedule, chunks) in [
        ("1F1B", Schedule::OneFOneB, 1),
        ("interleaved, 4 chunks", Schedule::OneFOneB, 4),
        ("ZB-H1", Schedule::ZbH1, 1),
        ("ZB-V", Schedule::ZbV, 2),
    ] {
        let work: Vec<ChunkTimes> = (0..devices * chunks)
            .map(|stage| {
                let forward = 1.0 + 0.1 * (stage % 3) as f64;
                ChunkTimes {
                    forward,
                    backward: forward,
                    weight: 0.9 * forward,
                }
            })
            .collect();
        let transfer = vec![0.05; work.len() - 1];
        let pipeline = Pipeline::new(devices, work, transfer, micro_batches).expect("valid times");
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(pipeline.time(schedule).map(|time| time.period)));
        });
    }
    group.finish();
}

fn front(criterion: &mut Criterion) {
    let points: Vec<(f64, f64)> = (0..10_000_u64)
        .map(|i| {
            let x = (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / f64::from(1 << 24);
            let y = (i.wrapping_mul(0xd1b5_4a32_d192_ed03) >> 40) as f64 / f64::from(1 << 24);
            (x, (1.0 - x) + y)
        })
        .collect();
    criterion.bench_function("front of 10,000 points and its knee", |bencher| {
        bencher.iter(|| {
            let mut front = ParetoFront::new();
            for (index, &(time, cost)) in points.iter().enumerate() {
                front.insert(time, cost, index).expect("finite points");
            }
            front.select(Objective::Knee).map(|choice| choice.index)
        });
    });
}

criterion_group!(benches, search, schedules, front);
criterion_main!(benches);
