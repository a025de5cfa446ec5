//! Optimizers on flat buffers: shards, threads, state and choices do not change what a step computes.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use iidp::optimizer::{
    AdamConfig, AdamWConfig, LambConfig, LarsConfig, Optimizer, OptimizerConfig, OptimizerState,
    SgdConfig, ShardedOptimizer, StepOptions,
};
use iidp::{Communicator, Error, LocalCommunicator};
use proptest::prelude::*;

/// One of each kind, with every term of its formula in use.
fn configs() -> [OptimizerConfig; 7] {
    [
        SgdConfig::new().with_weight_decay(0.01).into(),
        SgdConfig::new().with_momentum(0.9).into(),
        SgdConfig::new()
            .with_momentum(0.8)
            .with_dampening(0.0)
            .with_nesterov(true)
            .with_weight_decay(0.1)
            .into(),
        AdamConfig::new().with_weight_decay(0.01).into(),
        AdamWConfig::new().with_weight_decay(0.1).into(),
        LambConfig::new().with_weight_decay(0.1).into(),
        LarsConfig::new().with_weight_decay(0.01).into(),
    ]
}

/// Whether all sums of the method are element by element, so that shards cannot change a bit.
fn is_exact(config: &OptimizerConfig) -> bool {
    !matches!(config, OptimizerConfig::Lamb(_) | OptimizerConfig::Lars(_))
}

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

fn ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    lengths
        .iter()
        .map(|length| {
            end += length;
            end - length..end
        })
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn close(got: &[f32], expected: &[f32]) -> bool {
    got.len() == expected.len()
        && got
            .iter()
            .zip(expected)
            .all(|(x, y)| (x - y).abs() <= 1e-6 * (1.0 + y.abs()))
}

/// `steps` steps on noise; returns the values.
fn run(optimizer: &mut Optimizer, values: &mut [f32], first: u64, steps: u64) {
    for step in first..first + steps {
        optimizer
            .step(values, &noise(values.len(), 100 + step), 0.05)
            .expect("matching lengths");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn shards_compute_what_the_whole_computes(
        lengths in prop::collection::vec(0..70_usize, 1..8),
        size in 1..=5_usize,
        undecayed in any::<prop::sample::Index>(),
        seed: u64,
    ) {
        let parameters = ranges(&lengths);
        let len = parameters.last().map_or(0, |range| range.end);
        let undecayed = undecayed.index(lengths.len());
        for config in configs() {
            let start = noise(len, seed);
            let mut whole = config.init(&parameters)?.without_decay([undecayed])?;
            // Shards are cut from an optimizer that has a past.
            let mut values = start.clone();
            run(&mut whole, &mut values, 0, 2);
            let (cut, cut_values) = (whole.clone(), values.clone());
            for step in 2..6 {
                let mut gradient = vec![0.0; len];
                for rank in 0..size as u64 {
                    gradient.iter_mut().zip(noise(len, seed ^ (step * 9 + rank))).for_each(|(sum, g)| *sum += g);
                }
                let options = StepOptions { gradient_scale: 0.3, ..StepOptions::new(0.05) };
                whole.step_with(&mut values, &gradient, options)?;
            }
            let ranks: Vec<_> = LocalCommunicator::group(size, Duration::from_secs(20))?
                .into_iter()
                .map(|comm| {
                    let (cut, mut values) = (cut.clone(), cut_values.clone());
                    thread::spawn(move || -> Result<_, Error> {
                        let mut sharded = ShardedOptimizer::new(&cut, comm.rank(), comm.size())?;
                        for step in 2..6 {
                            let mut gradient = noise(len, seed ^ (step * 9 + comm.rank() as u64));
                            let options = StepOptions { gradient_scale: 0.3, ..StepOptions::new(0.05) };
                            sharded.step(&comm, &mut values, &mut gradient, options)?;
                        }
                        let state = sharded.state(&comm)?;
                        let mut again = ShardedOptimizer::new(&cut, comm.rank(), comm.size())?;
                        again.restore(&state)?;
                        assert_eq!(again.state(&comm)?, state);
                        Ok((values, state))
                    })
                })
                .collect();
            for rank in ranks {
                let (got, state) = rank.join().expect("no panic")?;
                if is_exact(&config) {
                    prop_assert_eq!(bits(&got), bits(&values));
                    prop_assert_eq!(state, whole.state());
                } else {
                    prop_assert!(close(&got, &values), "{:?}", config);
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let parameters = ranges(&[50_000, 3, 40_000, 0, 77]);
    for config in configs() {
        let [one, four] = [1, 4].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .expect("a pool");
            pool.install(|| {
                let mut optimizer = config.init(&parameters).expect("valid");
                let mut values = noise(90_080, 1);
                run(&mut optimizer, &mut values, 0, 3);
                values
            })
        });
        assert_eq!(bits(&one), bits(&four), "{config:?}");
    }
}

#[test]
fn a_restored_optimizer_continues_with_the_same_bits() {
    for config in configs() {
        let parameters = ranges(&[37, 5]);
        let mut first = config.init(&parameters).expect("valid");
        let mut values = noise(42, 2);
        run(&mut first, &mut values, 0, 5);
        let text = serde_json::to_string(&first.state()).expect("serialisable");
        let mut second = config.init(&parameters).expect("valid");
        let mut copy = values.clone();
        second
            .restore(&serde_json::from_str(&text).expect("readable"))
            .expect("the same parameters");
        assert_eq!(second.state(), first.state());
        run(&mut first, &mut values, 5, 5);
        run(&mut second, &mut copy, 5, 5);
        assert_eq!(bits(&values), bits(&copy), "{config:?}");
    }
}

#[test]
fn inactive_parameters_keep_values_moments_and_count() {
    for config in configs() {
        let parameters = ranges(&[11, 6]);
        let mut together = config.init(&parameters).expect("valid");
        let mut values = noise(17, 3);
        let mut alone = [11, 6].map(|len| config.init(&ranges(&[len])).expect("valid"));
        let mut parts = [values[..11].to_vec(), values[11..].to_vec()];
        for step in 0..6 {
            let gradient = noise(17, 50 + step);
            let active = [step != 2, step % 2 == 1];
            let options = StepOptions {
                active: Some(&active),
                ..StepOptions::new(0.1)
            };
            together
                .step_with(&mut values, &gradient, options)
                .expect("valid");
            for (i, range) in parameters.iter().enumerate().filter(|(i, _)| active[*i]) {
                alone[i]
                    .step(&mut parts[i], &gradient[range.clone()], 0.1)
                    .expect("valid");
            }
        }
        assert_eq!(together.state().steps, [5, 3]);
        assert_eq!(bits(&values), bits(&parts.concat()), "{config:?}");
    }
}

#[test]
fn the_gradient_scale_is_a_factor_of_the_gradient() {
    for config in configs() {
        let gradient = noise(30, 4);
        let halved: Vec<f32> = gradient.iter().map(|g| g * 0.5).collect();
        let mut values = [noise(30, 5), noise(30, 5)];
        let mut optimizers = [0, 1].map(|_| config.init(&ranges(&[30])).expect("valid"));
        let options = StepOptions {
            gradient_scale: 0.5,
            ..StepOptions::new(0.1)
        };
        optimizers[0]
            .step_with(&mut values[0], &gradient, options)
            .expect("valid");
        optimizers[1]
            .step(&mut values[1], &halved, 0.1)
            .expect("valid");
        assert_eq!(bits(&values[0]), bits(&values[1]), "{config:?}");
    }
}

/// LARS, algorithm 1, in double precision and parameter by parameter.
#[test]
fn lars_follows_its_paper() {
    let config = LarsConfig::new()
        .with_weight_decay(0.01)
        .with_trust_coefficient(0.02);
    let parameters = ranges(&[20, 8, 4]);
    let mut optimizer = OptimizerConfig::from(config)
        .init(&parameters)
        .expect("valid")
        .without_decay([1])
        .expect("valid");
    let mut values = noise(32, 6);
    values[28..].fill(0.0);
    let mut model: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
    let mut velocity = [0.0_f64; 32];
    for step in 0..20 {
        let gradient = noise(32, 60 + step);
        optimizer.step(&mut values, &gradient, 0.5).expect("valid");
        for (index, range) in parameters.iter().enumerate() {
            let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
            let gradient: Vec<f64> = gradient[range.clone()]
                .iter()
                .map(|x| f64::from(*x))
                .collect();
            let decay = if index == 1 { 0.0 } else { 0.01 };
            let weights = norm(&model[range.clone()]);
            let local = if index == 1 || weights == 0.0 {
                1.0
            } else {
                0.02 * weights / (norm(&gradient) + decay * weights)
            };
            for (i, g) in range.clone().zip(gradient) {
                velocity[i] = 0.9 * velocity[i] + 0.5 * local * (g + decay * model[i]);
                model[i] -= velocity[i];
            }
        }
    }
    let expected: Vec<f32> = model.iter().map(|x| *x as f32).collect();
    assert!(
        values
            .iter()
            .zip(&expected)
            .all(|(x, y)| (x - y).abs() <= 1e-5 * (1.0 + y.abs())),
        "{values:?} {expected:?}"
    );
}

#[test]
fn wrong_settings_buffers_and_states_are_named() {
    let refused = |config: OptimizerConfig| {
        config
            .init(&[])
            .expect_err("outside its domain")
            .to_string()
    };
    assert_eq!(
        refused(AdamWConfig::new().with_beta_2(1.0).into()),
        "beta 2: 1, expected a number in 0..1"
    );
    assert_eq!(
        refused(SgdConfig::new().with_weight_decay(f32::NAN).into()),
        "weight decay: NaN, expected a number in 0..inf"
    );
    assert!(
        refused(LarsConfig::new().with_trust_coefficient(0.0).into())
            .starts_with("trust coefficient: 0")
    );

    let adam = OptimizerConfig::from(AdamConfig::new());
    let gap = [0..2, 3..4];
    assert_eq!(
        adam.init(&gap).unwrap_err().to_string(),
        "parameter ranges: 3..4 after 2, expected ranges that follow each other"
    );
    let mut optimizer = adam.init(&[0..2, 2..4]).expect("valid");
    let mismatch = |what: &str, got, expected| {
        Err(Error::LengthMismatch {
            what: what.into(),
            got,
            expected,
        })
    };
    assert_eq!(
        optimizer.step(&mut [0.0; 3], &[0.0; 4], 0.1),
        mismatch("parameter buffer", 3, 4)
    );
    assert_eq!(
        optimizer.step(&mut [0.0; 4], &[0.0; 5], 0.1),
        mismatch("gradient buffer", 5, 4)
    );
    let options = StepOptions {
        active: Some(&[true]),
        ..StepOptions::new(0.1)
    };
    assert_eq!(
        optimizer.step_with(&mut [0.0; 4], &[0.0; 4], options),
        mismatch("choice of parameters", 1, 2)
    );
    assert!(optimizer.clone().without_decay([2]).is_err());

    let other = OptimizerConfig::from(SgdConfig::new())
        .init(&ranges(&[4]))
        .expect("valid");
    assert!(matches!(
        optimizer.restore(&other.state()),
        Err(Error::Invalid {
            what: "optimizer state",
            ..
        })
    ));
    let longer = adam.init(&[0..2, 2..5]).expect("valid").state();
    assert_eq!(optimizer.restore(&longer), mismatch("moment_1", 5, 4));
    assert!(matches!(
        optimizer.restore(&OptimizerState::default()),
        Err(Error::Invalid { .. })
    ));
    assert_eq!(optimizer.state().steps, [0, 0]);

    let comm = &LocalCommunicator::group(1, Duration::from_secs(1)).expect("valid")[0];
    let mut sharded = ShardedOptimizer::new(&optimizer, 0, 2).expect("valid");
    assert!(matches!(
        sharded.step(comm, &mut [0.0; 4], &mut [0.0; 4], StepOptions::new(0.1)),
        Err(Error::Invalid {
            what: "communicator of a sharded optimizer",
            ..
        })
    ));
    assert!(ShardedOptimizer::new(&optimizer, 2, 2).is_err());
}
