//! Terms of an iteration's time against values computed by hand, on a model of explicit layers and links of round numbers.

use hp_planner::{
    Allocation, AnalyticCost, ClusterSpec, Configuration, Constants, GpuType, Layer, Link,
    ModelSpec, ParallelDims, Problem, Recompute, ReplicaGroup, Schedule, Stage, TimeBreakdown,
    TrainingSpec,
};

/// Parameters of one layer.
const PARAMETERS: f64 = 1e9;

fn cluster(nodes: u32, gpus_per_node: u32) -> ClusterSpec {
    let text = format!(
        "[[groups]]\ngpu = \"A100-40\"\nnodes = {nodes}\ngpus_per_node = {gpus_per_node}\n"
    );
    let mut cluster = ClusterSpec::from_toml(&text).unwrap();
    cluster.groups[0].intra = Some(Link::new(100.0, 4.0));
    cluster.inter = Link::new(50.0, 10.0);
    cluster
}

/// Equal layers with work for about ten seconds, so that all communication has something to run beside.
fn model(layers: usize) -> ModelSpec {
    let layer = Layer {
        name: String::new(),
        parameters: PARAMETERS,
        forward_flops: 2e15,
        activation_bytes: 0.0,
        output_bytes: 8e8,
        traffic_bytes: 0.0,
        kernels: 1,
        tp_divisor: 1,
        backward_ratio: 2.0,
    };
    ModelSpec {
        name: String::new(),
        transformer: None,
        layers: vec![layer; layers],
    }
}

fn constants() -> Constants {
    Constants {
        gemm_efficiency: 0.5,
        memory_efficiency: 0.8,
        intra_efficiency: 0.8,
        inter_efficiency: 0.5,
        overlap: 0.75,
        jitter: 0.01,
        overhead: 0.002,
        ..Constants::of(GpuType::catalogue("A100-40").unwrap())
    }
}

fn configuration(dp: u32, pp: u32, zero: u8, rounds: u32) -> Configuration {
    let stages = (0..pp)
        .map(|first_layer| Stage {
            group: 0,
            first_layer,
            layers: 1,
            tp: 1,
        })
        .collect();
    Configuration {
        dims: ParallelDims::new(dp, 1, pp),
        allocation: Allocation {
            gpus: vec![dp * pp],
        },
        replicas: vec![ReplicaGroup {
            count: dp,
            stages,
            virtual_workers: 1,
            accumulation_steps: rounds,
        }],
        micro_batch: 1,
        schedule: Schedule::OneFOneB,
        recompute: Recompute::None,
        zero,
        sequence_parallel: false,
    }
}

fn time(
    cluster: &ClusterSpec,
    training: &TrainingSpec,
    configuration: &Configuration,
) -> TimeBreakdown {
    let model = model(configuration.dims.pp as usize);
    let problem = Problem {
        cluster,
        model: &model,
        training,
    };
    AnalyticCost::new()
        .with_constants("A100-40", constants())
        .time(&problem, configuration)
        .unwrap()
}

fn close(got: f64, expected: f64) {
    assert!(
        (got / expected - 1.0).abs() < 1e-9,
        "{got} instead of {expected}"
    );
}

/// Forward pass of a layer: 2e15 operations at half of 312e12 per second, and 2e9 bytes of weights at 0.8 x 1555e9 per second.
fn forward() -> f64 {
    2e15 / 156e12 + 2e9 / 1244e9
}

#[test]
fn a_micro_batch_is_one_forward_and_two_backward() {
    let time = time(
        &cluster(1, 1),
        &TrainingSpec::new(4, 1),
        &configuration(1, 1, 0, 4),
    );
    close(time.compute, 4.0 * 3.0 * forward());
    assert!(time.bubble == 0.0 && time.data_parallel == 0.0);
    // Adam in mixed precision (Rajbhandari et al. 2020, section 3.1): 12 bytes of state read and written, 2 of gradient, 2 of
    // parameter read and written.
    close(time.update, PARAMETERS * (24.0 + 2.0 + 4.0) / 1244e9);
    close(time.overhead, 0.002);
}

#[test]
fn a_reduction_hides_as_far_as_it_overlaps() {
    // Ring all-reduce (Thakur et al. 2005): twice half of 2e9 bytes at 0.8 x 100e9 per second and a hop of 4 us; a quarter shows.
    let (cluster, configuration) = (cluster(1, 2), configuration(2, 1, 0, 2));
    let whole = 2.0 * (0.5 * 2e9 / 80e9 + 4e-6);
    let mut training = TrainingSpec::new(4, 1);
    close(
        time(&cluster, &training, &configuration).data_parallel,
        0.25 * whole,
    );
    training.overlap_reduce = false;
    let time = time(&cluster, &training, &configuration);
    close(time.data_parallel, whole);
    // Two ranks: one doubling, and so one per cent of the work for the slower of them.
    close(time.overhead, 0.002 + 0.01 * time.compute);
}

#[test]
fn sharded_parameters_are_gathered_for_every_micro_batch() {
    // ZeRO stage 3 (Rajbhandari et al. 2020, section 7.2.2): parameters twice and gradients once, 2e9 bytes each, in pieces: the
    // layer and what lies around it. Two nodes of one GPU: half the bytes at 0.5 x 50e9 per second, one outer hop per piece.
    let time = time(
        &cluster(2, 1),
        &TrainingSpec::new(6, 1),
        &configuration(2, 1, 3, 3),
    );
    let once = 3.0 * (0.5 * 2e9 / 25e9 + 2.0 * 10e-6);
    close(time.data_parallel, 3.0 * 0.25 * once);
}

#[test]
fn a_pipeline_fills_and_drains_and_sends() {
    // Narayanan et al. 2021, section 2.2: p - 1 = 1 idle pass, and both directions of one boundary: 8e8 bytes at 80e9 per second.
    let time = time(
        &cluster(1, 2),
        &TrainingSpec::new(4, 1),
        &configuration(1, 2, 0, 4),
    );
    close(time.compute, 4.0 * 3.0 * forward());
    close(time.bubble, 3.0 * forward() + 2.0 * (8e8 / 80e9 + 4e-6));
}

#[test]
fn recomputation_repeats_its_share_of_the_forward_pass() {
    let mut configuration = configuration(1, 1, 0, 1);
    configuration.recompute = Recompute::Full;
    let model = model(1);
    let (cluster, training) = (cluster(1, 1), TrainingSpec::new(1, 1));
    let problem = Problem {
        cluster: &cluster,
        model: &model,
        training: &training,
    };
    for share in [1.0, 0.6] {
        let constants = Constants {
            recompute: share,
            ..constants()
        };
        let time = AnalyticCost::new()
            .with_constants("A100-40", constants)
            .time(&problem, &configuration)
            .unwrap();
        close(time.compute, (3.0 + share) * forward());
    }
}
