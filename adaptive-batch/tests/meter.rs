//! What the meter refuses, and that it stays as it was when it does.

use adaptive_batch::{
    EmaEstimator, Error, EstimateSource, GradientOf, HalfSplit, MeterConfig, MicroBatch, OwnerRule,
    Shard, Weighting,
};

fn mb(index: u64) -> MicroBatch {
    MicroBatch { index, samples: 4 }
}

fn two_shards() -> MeterConfig {
    MeterConfig::new([
        Shard::new("first", 4)
            .parameter("w", 0..3, OwnerRule::Partitioned)
            .parameter("b", 3..4, OwnerRule::Excluded),
        Shard::new("second", 2),
    ])
}

#[test]
fn shards_that_are_missing_repeated_or_of_the_wrong_size_are_named() {
    let mut meter = two_shards().build().unwrap();
    let mut acc = [0.0f32; 4];
    meter.accumulate(0, mb(0), &mut acc, &[1.0f32; 4]).unwrap();
    let before = acc;
    for (error, message) in [
        (
            meter.accumulate(0, mb(0), &mut acc, &[1.0f32; 4]),
            "shard `first` of micro-batch 0 was measured before",
        ),
        (
            meter.accumulate(2, mb(0), &mut acc, &[1.0f32; 4]),
            "shard 2 does not exist, the meter has 2 shards",
        ),
        (
            meter.accumulate(1, mb(0), &mut acc[..2], &[1.0f32; 3]),
            "micro-batch 0 of shard `second` has 3 elements, expected 2",
        ),
        (
            meter.accumulate(1, mb(0), &mut acc, &[1.0f32; 2]),
            "accumulator of shard `second` has 4 elements, expected 2",
        ),
        (
            meter.accumulate(
                1,
                MicroBatch {
                    index: 0,
                    samples: 5,
                },
                &mut acc[..2],
                &[1.0f32; 2],
            ),
            "micro-batch 0 has 4 samples, shard `second` came with 5",
        ),
        (
            meter.accumulate(
                1,
                MicroBatch {
                    index: 1,
                    samples: 5,
                },
                &mut acc[..2],
                &[1.0f32; 2],
            ),
            "micro-batches of different sizes were accumulated with equal weights: micro-batch 0 has 4 samples, micro-batch 1 has 5",
        ),
        (
            meter.accumulate(
                1,
                MicroBatch {
                    index: 1,
                    samples: 0,
                },
                &mut acc[..2],
                &[1.0f32; 2],
            ),
            "samples of a micro-batch is 0, expected at least 1",
        ),
    ] {
        assert_eq!(error.unwrap_err().to_string(), message);
    }
    assert_eq!(acc, before);
    let error = meter.finish().unwrap_err();
    assert_eq!(
        error.to_string(),
        "shard `second` of micro-batch 0 was not measured"
    );
    meter.measure(1, mb(0), &[1.0f32; 2]).unwrap();
    meter.summed(0, &acc).unwrap();
    assert_eq!(
        meter.finish().unwrap_err().to_string(),
        "the summed gradient of shard `second` was not measured"
    );
    assert!(matches!(
        meter.summed(0, &acc),
        Err(Error::RepeatedSum { .. })
    ));
    assert!(matches!(
        meter.summed_part(1, 1, &[0.0f32; 2]),
        Err(Error::OutOfShard { .. })
    ));
    meter.summed(1, &[1.0f32; 2]).unwrap();
    assert_eq!(meter.finish().unwrap().micro_batches(), 1);
    assert!(matches!(meter.finish(), Err(Error::NoMicroBatch)));
}

#[test]
fn non_finite_gradients_are_refused_by_name_and_change_nothing() {
    for (bad, guard) in [
        (f32::NAN, true),
        (f32::INFINITY, true),
        (f32::NEG_INFINITY, false),
    ] {
        let run = |spoil: bool| {
            let mut meter = two_shards().guard(guard).build().unwrap();
            let (mut first, mut second) = ([0.0f32; 4], [0.0f32; 2]);
            for index in 0..2 {
                let x = index as f32;
                if spoil {
                    let kept = first;
                    // In the counted range, and in one that only other ranks or nobody counts.
                    for (element, parameter, range) in [(1, "w", 0..3), (3, "b", 3..4)] {
                        let mut grad = [1.0 + x; 4];
                        grad[element] = bad;
                        let error = meter
                            .accumulate(0, mb(index), &mut first, &grad)
                            .unwrap_err();
                        let Error::NonFinite {
                            shard,
                            micro_batch,
                            parameter: p,
                            range: r,
                            element: e,
                            ..
                        } = &error
                        else {
                            panic!("{error}")
                        };
                        assert_eq!(
                            (shard.as_str(), p.as_str(), r, *e),
                            ("first", parameter, &range, element)
                        );
                        assert_eq!(*micro_batch, GradientOf::MicroBatch(index));
                        if !guard {
                            // Plain addition carries it on, as the documentation says.
                            assert!(!first[element].is_finite());
                            first = kept;
                        }
                    }
                    assert_eq!(first, kept);
                }
                meter
                    .accumulate(0, mb(index), &mut first, &[1.0 + x; 4])
                    .unwrap();
                meter
                    .accumulate(1, mb(index), &mut second, &[2.0 - x; 2])
                    .unwrap();
            }
            if spoil {
                let error = meter.summed(1, &[1.0, bad]).unwrap_err();
                assert!(matches!(
                    error,
                    Error::NonFinite {
                        micro_batch: GradientOf::Sum,
                        element: 1,
                        ..
                    }
                ));
            }
            meter.summed(0, &first).unwrap();
            meter.summed(1, &second).unwrap();
            meter.finish().unwrap()
        };
        assert_eq!(run(true), run(false));
    }
}

#[test]
fn the_accumulator_holds_what_the_weighting_says() {
    let grads = [([1.0f32, 2.0], 3u64), ([0.5, 4.0], 5)];
    let run = |weighting, passed_as_sum: bool| {
        let mut meter = MeterConfig::new([Shard::new("all", 2)])
            .weighting(weighting)
            .build()
            .unwrap();
        let mut acc = [0.0f32; 2];
        for (index, (grad, samples)) in grads.iter().enumerate() {
            let factor = if passed_as_sum { *samples as f32 } else { 1.0 };
            let micro_batch = MicroBatch {
                index: index as u64,
                samples: *samples,
            };
            meter
                .accumulate(0, micro_batch, &mut acc, &grad.map(|g| g * factor))
                .unwrap();
        }
        meter.summed(0, &acc).unwrap();
        (acc, meter.finish().unwrap().estimate().unwrap())
    };
    let (samples, a) = run(Weighting::Samples, false);
    assert_eq!(samples, [3.0 + 2.5, 6.0 + 20.0]);
    let (sum, b) = run(Weighting::Sum, true);
    assert_eq!(sum, samples);
    let (mean, c) = run(Weighting::Fraction { batch: 8 }, false);
    assert_eq!(mean, [5.5 / 8.0, 26.0 / 8.0]);
    for other in [b, c] {
        assert!((a.noise_scale / other.noise_scale - 1.0).abs() < 1e-6);
        assert!((a.grad_sq_norm / other.grad_sq_norm - 1.0).abs() < 1e-6);
    }
    let mut meter = MeterConfig::new([Shard::new("all", 1)])
        .weighting(Weighting::Fraction { batch: 9 })
        .build()
        .unwrap();
    meter.measure(0, mb(0), &[1.0f32]).unwrap();
    meter.measure(0, mb(1), &[1.0f32]).unwrap();
    meter.summed(0, &[1.0f32]).unwrap();
    assert_eq!(
        meter.finish().unwrap_err().to_string(),
        "the micro-batches hold 8 samples, the weighting expects 9"
    );
}

#[test]
fn loss_scale_and_adam_change_the_measure_as_documented() {
    let plain = [[1.0f32, 2.0], [3.0, -1.0]];
    let v = [4.0f32, 0.25];
    let (eps, correction) = (0.5, 0.25);
    let scaled = |g: [f32; 2]| {
        let d = |v: f32| (f64::from(v) / correction).sqrt() + eps;
        [f64::from(g[0]) / d(v[0]), f64::from(g[1]) / d(v[1])]
    };
    let norm = |g: [f64; 2]| g[0] * g[0] + g[1] * g[1];
    let mut meter = MeterConfig::new([Shard::new("all", 2)])
        .loss_scale(8.0)
        .adam(eps, correction)
        .build()
        .unwrap();
    let mut acc = [0.0f32; 2];
    assert!(matches!(
        meter.accumulate(0, mb(0), &mut acc, &plain[0]),
        Err(Error::Option { .. })
    ));
    for (index, grad) in plain.iter().enumerate() {
        let grad = grad.map(|g| g * 8.0);
        meter
            .accumulate_preconditioned(0, mb(index as u64), &mut acc, &grad, &v)
            .unwrap();
    }
    assert!(matches!(
        meter.set_loss_scale(2.0),
        Err(Error::MidStep { .. })
    ));
    assert_eq!(acc, [32.0, 8.0]);
    meter.summed_preconditioned(0, &acc, &v).unwrap();
    let stats = meter.finish().unwrap();
    let s1 = norm(scaled(plain[0])) + norm(scaled(plain[1]));
    let s2 = norm(scaled([4.0, 1.0]));
    assert!((stats.weighted_norms() / (4.0 * s1) - 1.0).abs() < 1e-12);
    assert!((stats.mean_gradient_sq() / (s2 / 4.0) - 1.0).abs() < 1e-12);
    meter.set_loss_scale(2.0).unwrap();
    meter.set_adam_correction(0.5).unwrap();
    assert!(meter.set_adam_correction(0.0).is_err());
}

#[test]
fn one_micro_batch_falls_back_to_the_step_before_and_says_so() {
    let step = |meter: &mut adaptive_batch::GradientMeter, grad: [f32; 2], samples| {
        let mut acc = [0.0f32; 2];
        meter
            .accumulate(0, MicroBatch { index: 0, samples }, &mut acc, &grad)
            .unwrap();
        meter.summed(0, &acc).unwrap();
        meter.finish().unwrap()
    };
    let mut alone = MeterConfig::new([Shard::new("all", 2)]).build().unwrap();
    let error = step(&mut alone, [1.0, 0.0], 6).estimate().unwrap_err();
    assert!(
        matches!(error, Error::SingleMicroBatch { samples: 6 }),
        "{error}"
    );

    let mut meter = MeterConfig::new([Shard::new("all", 2)])
        .weighting(Weighting::Samples)
        .keep_previous(true)
        .build()
        .unwrap();
    assert!(step(&mut meter, [1.0, 0.5], 2).estimate().is_err());
    let two_steps = step(&mut meter, [3.0, -1.0], 6).estimate().unwrap();
    assert_eq!(
        (two_steps.source, two_steps.samples),
        (EstimateSource::TwoSteps, 8)
    );
    // The same two gradients as two micro-batches of one step.
    let mut both = MeterConfig::new([Shard::new("all", 2)])
        .weighting(Weighting::Samples)
        .build()
        .unwrap();
    let mut acc = [0.0f32; 2];
    both.accumulate(
        0,
        MicroBatch {
            index: 0,
            samples: 2,
        },
        &mut acc,
        &[1.0f32, 0.5],
    )
    .unwrap();
    both.accumulate(
        0,
        MicroBatch {
            index: 1,
            samples: 6,
        },
        &mut acc,
        &[3.0f32, -1.0],
    )
    .unwrap();
    both.summed(0, &acc).unwrap();
    let one_step = both.finish().unwrap().estimate().unwrap();
    assert_eq!(one_step.source, EstimateSource::MicroBatches);
    assert!((two_steps.grad_sq_norm / one_step.grad_sq_norm - 1.0).abs() < 1e-6);
    assert!((two_steps.variance / one_step.variance - 1.0).abs() < 1e-6);
    // A step that is given up takes what was kept with it.
    meter
        .accumulate(0, mb(0), &mut acc, &[1.0f32, 1.0])
        .unwrap();
    meter.summed(0, &acc).unwrap();
    meter.reset();
    assert!(step(&mut meter, [1.0, 0.0], 4).estimate().is_err());
    assert!(step(&mut meter, [1.0, 0.0], 4).estimate().is_ok());
}

#[test]
fn sample_counts_that_overflow_are_refused_and_the_step_can_be_given_up() {
    let mut meter = MeterConfig::new([Shard::new("all", 1)])
        .weighting(Weighting::Samples)
        .build()
        .unwrap();
    for (index, samples) in [(0, u64::MAX), (1, 1)] {
        let micro_batch = MicroBatch { index, samples };
        meter.measure(0, micro_batch, &[1.0f32]).unwrap();
    }
    meter.summed(0, &[1.0f32]).unwrap();
    for _ in 0..2 {
        let error = meter.finish().unwrap_err();
        assert_eq!(error.to_string(), "number of samples overflows 64 bits");
    }
    meter.reset();
    assert!(matches!(meter.finish(), Err(Error::NoMicroBatch)));
    let micro_batch = MicroBatch {
        index: 0,
        samples: 0,
    };
    assert!(meter.measure(0, micro_batch, &[1.0f32]).is_err());
}

#[test]
fn zero_gradients_are_an_error_and_leave_the_average_alone() {
    let mut meter = MeterConfig::new([Shard::new("all", 3)]).build().unwrap();
    let mut ema = EmaEstimator::new(0.9).unwrap();
    let mut step = |x: f32| {
        for index in 0..2 {
            meter.measure(0, mb(index), &[x; 3]).unwrap();
        }
        meter.summed(0, &[2.0 * x; 3]).unwrap();
        meter.finish().unwrap()
    };
    ema.observe(&step(1.0)).unwrap();
    let before = ema.clone();
    let error = ema.observe(&step(0.0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "all 2 micro-batch gradients are exactly zero"
    );
    assert_eq!(ema, before);
    assert!(EmaEstimator::new(1.0).is_err() && EmaEstimator::new(-0.1).is_err());
    assert!(EmaEstimator::with_half_life(0.0).is_err());
}

#[test]
fn the_exact_half_cosine_is_that_of_the_two_sums() {
    let shards = [Shard::new("a", 3), Shard::new("b", 2)];
    let mut meter = MeterConfig::new(shards.clone()).build().unwrap();
    let mut halves = HalfSplit::new(&shards);
    let mut acc = [vec![0.0f32; 3], vec![0.0f32; 2]];
    let grad = |index: u64, shard: usize| -> Vec<f32> {
        (0..shards[shard].len())
            .map(|e| (index * 7 + e as u64 * 3 + shard as u64) as f32 % 5.0 - 1.5)
            .collect()
    };
    for index in 0..4 {
        for (shard, acc) in acc.iter_mut().enumerate() {
            let target = halves.accumulator(shard, index, acc).unwrap();
            meter
                .accumulate(shard, mb(index), target, &grad(index, shard))
                .unwrap();
        }
    }
    let sum = |parity: u64| -> Vec<f64> {
        (0..2)
            .flat_map(|s| {
                let (x, y) = (grad(parity, s), grad(parity + 2, s));
                x.into_iter()
                    .zip(y)
                    .map(|(x, y)| f64::from(x) + f64::from(y))
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let (first, second) = (sum(0), sum(1));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let cosine = dot(&first, &second) / (dot(&first, &first) * dot(&second, &second)).sqrt();
    for (shard, acc) in acc.iter_mut().enumerate() {
        meter.summed_halves(shard, acc, &halves).unwrap();
    }
    let stats = meter.finish().unwrap();
    assert!((stats.estimate().unwrap().half_cosine - cosine).abs() < 1e-12);
    let total: f64 = first
        .iter()
        .zip(&second)
        .map(|(a, b)| (a + b) * (a + b))
        .sum();
    assert!((stats.mean_gradient_sq() * 16.0 / total - 1.0).abs() < 1e-6);
}
