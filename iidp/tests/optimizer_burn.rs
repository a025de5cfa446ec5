//! The optimizers on flat buffers against Burn's, parameter by parameter over 100 steps.

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamConfig as BurnAdam, AdamWConfig as BurnAdamW, LambConfig as BurnLamb,
    Optimizer as BurnOptimizer, SgdConfig as BurnSgd,
};
use burn::tensor::{Device, Tensor, TensorData};
use iidp::optimizer::{AdamConfig, AdamWConfig, LambConfig, OptimizerConfig, SgdConfig};

const STEPS: u64 = 100;
const LENGTHS: [usize; 4] = [300, 7, 1, 64];

fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// The gradient of step `step`, of a quadratic with noise, so that the parameters move.
fn gradient(values: &[f32], step: u64) -> Vec<f32> {
    values
        .iter()
        .zip(noise(values.len(), 1000 + step))
        .map(|(p, n)| p + n)
        .collect()
}

fn rate(step: u64) -> f64 {
    0.02 / (1.0 + step as f64 / 50.0)
}

fn with_burn<O: BurnOptimizer>(optimizer: &O) -> Vec<f32> {
    let device = Device::flex();
    let tensor = |values: Vec<f32>| {
        let len = values.len();
        Tensor::<1>::from_data(TensorData::new(values, [len]), &device)
    };
    let mut values = noise(LENGTHS.iter().sum(), 1);
    let mut states: Vec<Option<O::State<1>>> = LENGTHS.iter().map(|_| None).collect();
    for step in 0..STEPS {
        let gradients = gradient(&values, step);
        let mut start = 0;
        for (state, len) in states.iter_mut().zip(LENGTHS) {
            let range = start..start + len;
            let (p, g) = (
                tensor(values[range.clone()].to_vec()),
                tensor(gradients[range.clone()].to_vec()),
            );
            let (p, new) = optimizer.step::<1>(rate(step), p, g, state.take());
            *state = new;
            values[range].copy_from_slice(&p.into_data().try_into_vec::<f32>().expect("f32"));
            start += len;
        }
    }
    values
}

fn on_flat_buffer(config: OptimizerConfig) -> Vec<f32> {
    let mut end = 0;
    let parameters = LENGTHS.map(|len| {
        end += len;
        end - len..end
    });
    let mut optimizer = config.init(&parameters).expect("valid settings");
    let mut values = noise(end, 1);
    for step in 0..STEPS {
        let gradients = gradient(&values, step);
        optimizer
            .step(&mut values, &gradients, rate(step))
            .expect("matching lengths");
    }
    values
}

/// Element-wise methods give Burn's bits.
fn same_bits<O: BurnOptimizer>(config: impl Into<OptimizerConfig>, burn: &O) {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let config = config.into();
    assert_eq!(
        bits(on_flat_buffer(config)),
        bits(with_burn(burn)),
        "{config:?}"
    );
}

#[test]
fn sgd() {
    let momentum = |nesterov| MomentumConfig {
        momentum: 0.9,
        dampening: 0.1,
        nesterov,
    };
    let decay = WeightDecayConfig { penalty: 0.05 };
    same_bits(SgdConfig::new(), &BurnSgd::new().build());
    same_bits(
        SgdConfig::new().with_weight_decay(0.05),
        &BurnSgd::new()
            .with_weight_decay(Some(decay.clone()))
            .build(),
    );
    same_bits(
        SgdConfig::new().with_momentum(0.9),
        &BurnSgd::new().with_momentum(Some(momentum(false))).build(),
    );
    same_bits(
        SgdConfig::new()
            .with_momentum(0.9)
            .with_nesterov(true)
            .with_weight_decay(0.05),
        &BurnSgd::new()
            .with_momentum(Some(momentum(true)))
            .with_weight_decay(Some(decay))
            .build(),
    );
}

#[test]
fn adam() {
    same_bits(AdamConfig::new(), &BurnAdam::new().build());
    same_bits(
        AdamConfig::new()
            .with_beta_1(0.8)
            .with_epsilon(1e-8)
            .with_weight_decay(0.05),
        &BurnAdam::new()
            .with_beta_1(0.8)
            .with_epsilon(1e-8)
            .with_weight_decay(Some(WeightDecayConfig { penalty: 0.05 }))
            .build(),
    );
}

#[test]
fn adamw() {
    same_bits(AdamWConfig::new(), &BurnAdamW::new().build());
    same_bits(
        AdamWConfig::new().with_beta_2(0.95).with_weight_decay(0.3),
        &BurnAdamW::new()
            .with_beta_2(0.95)
            .with_weight_decay(0.3)
            .build(),
    );
}

#[test]
fn lamb() {
    let close = |config: LambConfig, burn: BurnLamb| {
        let (got, expected) = (on_flat_buffer(config.into()), with_burn(&burn.build()));
        for (i, (x, y)) in got.iter().zip(&expected).enumerate() {
            assert!(
                (x - y).abs() <= 1e-6 * (1.0 + y.abs()),
                "{config:?}: element {i} is {x}, Burn's {y}"
            );
        }
    };
    close(LambConfig::new(), BurnLamb::new());
    close(
        LambConfig::new().with_weight_decay(0.1),
        BurnLamb::new().with_weight_decay(0.1),
    );
    close(
        LambConfig::new().with_use_trust_ratio(false),
        BurnLamb::new().with_use_trust_ratio(false),
    );
}
