//! Small random spaces to search.

use hp_planner::{
    ClusterSpec, Layer, Link, ModelSpec, NodeGroup, Precision, Recompute, Schedule, TrainingSpec,
};

/// A small generator with a fixed seed per case.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.roll(choices.len() as u64) as usize]
    }
}

/// A group of equal nodes with a slow or a fast network and one of two prices, so that ties in money are common.
pub(crate) fn group(
    gpu: &str,
    nodes: u32,
    gpus_per_node: u32,
    bandwidth: f64,
    price: f64,
) -> NodeGroup {
    NodeGroup {
        gpu: gpu.to_owned(),
        nodes,
        gpus_per_node,
        intra: None,
        inter: Some(Link::new(bandwidth, 10.0)),
        price_per_gpu_hour: Some(price),
        spot: false,
        zone: String::new(),
    }
}

pub(crate) fn cluster(groups: Vec<NodeGroup>) -> ClusterSpec {
    let mut cluster = ClusterSpec::homogeneous("V100-16", 1, 1).unwrap();
    cluster.groups = groups;
    cluster
}

/// One or two groups, seldom three; dense transformers, mixtures of experts and explicit layers.
pub(crate) fn space(seed: u64) -> (ClusterSpec, ModelSpec, TrainingSpec) {
    let mut dice = Dice::new(seed);
    let groups = dice.pick(&[1, 2, 2, 2, 2, 2, 2, 3]);
    let groups = (0..groups)
        .map(|_| {
            let gpu = dice.pick(&["V100-16", "T4", "A100-40"]);
            let (nodes, node) = (1 + dice.roll(2) as u32, dice.pick(&[1, 2, 4]));
            // With three groups there is one node in each.
            let nodes = if groups == 3 { 1 } else { nodes };
            group(
                gpu,
                nodes,
                node,
                dice.pick(&[1.25, 12.5]),
                dice.pick(&[1.0, 1.0, 2.5]),
            )
        })
        .collect();
    let mut training = TrainingSpec::new(dice.pick(&[4, 6, 8, 12]), 512);
    let model = model(&mut dice, &mut training);
    training.precision = Precision::Fp16;
    training.micro_batches = vec![1, 2];
    training.recompute = if dice.roll(2) == 0 {
        vec![Recompute::None]
    } else {
        vec![Recompute::None, Recompute::Full]
    };
    training.zero = dice.pick::<&[u8]>(&[&[0], &[0, 1], &[0, 2, 3]]).to_vec();
    training.schedules = dice
        .pick::<&[Schedule]>(&[
            &[Schedule::OneFOneB],
            &[Schedule::GPipe, Schedule::OneFOneB],
            &[Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV],
        ])
        .to_vec();
    training.max_vpp = dice.pick(&[1, 2]);
    training.max_virtual_workers = dice.pick(&[1, 2]);
    training.max_cp = dice.pick(&[1, 1, 2]);
    training.memory_margin = dice.pick(&[0.05, 0.3]);
    training.sequence_parallel = dice.roll(2) == 0;
    (cluster(groups), model, training)
}

fn model(dice: &mut Dice, training: &mut TrainingSpec) -> ModelSpec {
    let layers = 2 + dice.roll(5) as u32;
    let hidden = dice.pick(&[256, 1024, 4096]);
    let mut model = ModelSpec::gpt("small", layers, hidden, 4, 10_000, 512);
    match dice.roll(6) {
        0 => {
            let shape = model.transformer.as_mut().unwrap();
            shape.experts = 4;
            shape.experts_per_token = 2;
            shape.dense_layers = dice.roll(2) as u32;
            training.max_ep = 2;
        }
        1 => {
            model.transformer = None;
            // Layers of very unequal weight, as in convolutional networks.
            model.layers = (0..layers)
                .map(|_| Layer {
                    name: String::new(),
                    parameters: dice.pick(&[1e5, 1e7, 2e8]),
                    forward_flops: dice.pick(&[1e9, 1e10, 2e11]),
                    activation_bytes: dice.pick(&[1e6, 5e7, 1e9]),
                    output_bytes: dice.pick(&[1e5, 2e6]),
                    traffic_bytes: 0.0,
                    kernels: 4,
                    tp_divisor: dice.pick(&[1, 2, 4]),
                    backward_ratio: 2.0,
                })
                .collect();
        }
        _ => {}
    }
    model
}
