//! Every controller: where it goes, that it stays within its limits, and that a restored one continues identically.

use adaptive_batch::{
    BatchLimits, BatchSizeController, DecisionReason, Error, FixedController, GoodputController,
    GradientEstimate, MeterConfig, MicroBatch, NoiseScaleController, NormTestController,
    ScheduleController, Shard, SimiGradController, ThroughputModel, TrainingState,
};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An estimate with |G|^2 = `grad_sq` and this noise scale, by two micro-batches that lie symmetrically around the gradient.
fn estimate(grad_sq: f64, noise_scale: f64) -> GradientEstimate {
    // |G|^2 = (S2 - S1) / 2 = g1 . g2 and tr = b (S1 - S2 / 2) = b |g1 - g2|^2 / 2, with b = 8.
    let distance_sq = noise_scale * grad_sq / 4.0;
    let (half, along) = (distance_sq / 4.0, grad_sq);
    let x = (along + half).sqrt();
    let y = half.sqrt();
    let mut meter = MeterConfig::new([Shard::new("all", 2)]).build().unwrap();
    let mut acc = [0.0f64; 2];
    for (index, grad) in [[x, y], [x, -y]].into_iter().enumerate() {
        let micro_batch = MicroBatch {
            index: index as u64,
            samples: 8,
        };
        meter.accumulate(0, micro_batch, &mut acc, &grad).unwrap();
    }
    meter.summed(0, &acc).unwrap();
    let e = meter.finish().unwrap().estimate().unwrap();
    assert!(
        (e.noise_scale / noise_scale - 1.0).abs() < 1e-6,
        "{} {noise_scale}",
        e.noise_scale
    );
    e
}

fn limits() -> BatchLimits {
    BatchLimits::new(32, 2_048, 32).unwrap()
}

fn run(controller: &mut dyn BatchSizeController, scales: &[f64], start: u64) -> Vec<u64> {
    let (mut batch, mut samples) = (start, 0);
    scales
        .iter()
        .enumerate()
        .map(|(step, scale)| {
            let state = TrainingState::new(step as u64, samples, batch);
            batch = controller.decide(&estimate(1.0, *scale), &state).batch_size;
            samples += batch;
            batch
        })
        .collect()
}

#[test]
fn noise_scale_and_norm_test_meet_their_formulas() {
    let mut noise = NoiseScaleController::new(1.0, limits()).unwrap();
    assert_eq!(
        run(&mut noise, &[100.0, 700.0, 1e7, 300.0, 1.0], 64),
        [96, 704, 2_048, 288, 32]
    );
    let mut norm = NormTestController::new(0.5, limits()).unwrap();
    // B = 4 x the noise scale, rounded up, and never down again.
    assert_eq!(
        run(&mut norm, &[10.0, 50.0, 101.0, 20.0], 64),
        [64, 224, 416, 416]
    );
}

#[test]
fn simigrad_settles_where_the_half_cosine_meets_its_target() {
    let gamma = 0.6;
    let mut controller = SimiGradController::new(gamma, 0.1, 1, limits()).unwrap();
    // An estimate at batch 16 knows the noise scale; what SimiGrad sees is the cosine at the batch in use.
    let mut batch = 32;
    for step in 0..60 {
        let mut e = estimate(1.0, 300.0);
        e.half_cosine = 1.0 / (1.0 + 2.0 * 300.0 / batch as f64);
        batch = controller
            .decide(&e, &TrainingState::new(step, 0, batch))
            .batch_size;
    }
    let settled = 2.0 * 300.0 * gamma / (1.0 - gamma);
    assert!(
        (batch as f64 / settled - 1.0).abs() < 0.15,
        "{batch} {settled}"
    );
    let same = NoiseScaleController::for_similarity(gamma, limits()).unwrap();
    assert_eq!(run(&mut same.clone(), &[300.0], 64), [896]);
}

#[test]
fn goodput_takes_the_batch_that_brute_force_finds() {
    for (scale, gamma) in [(10.0, 1.0), (200.0, 1.0), (200.0, 3.0), (5_000.0, 1.5)] {
        let model = ThroughputModel::new(0.02, 0.001, 0.1, 4, 64)
            .unwrap()
            .overlap(gamma)
            .unwrap();
        let mut controller = GoodputController::new(model, 64, limits()).unwrap();
        let brute = (1..=64u64)
            .map(|i| i * 32)
            .max_by(|a, b| {
                let value =
                    |batch: u64| batch as f64 / model.step_seconds(batch) / (scale + batch as f64);
                value(*a).total_cmp(&value(*b))
            })
            .unwrap();
        assert_eq!(run(&mut controller, &[scale], 64), [brute]);
    }
    let model = ThroughputModel::new(0.02, 0.001, 0.1, 4, 64).unwrap();
    let fine =
        GoodputController::new(model, 64, BatchLimits::new(1, 10_000_000, 1).unwrap()).unwrap();
    let best = fine.best_batch(3_000.0);
    let worst_miss = (1..20_000)
        .map(|b| fine.goodput(b, 3_000.0))
        .fold(0.0, f64::max);
    assert!(fine.goodput(best, 3_000.0) > 0.99 * worst_miss);
}

#[test]
fn schedules_follow_their_steps_and_tokens() {
    let mut steps = ScheduleController::steps(&[(0, 64), (2, 128), (4, 512)], limits()).unwrap();
    assert_eq!(run(&mut steps, &[1.0; 6], 64), [64, 64, 128, 128, 512, 512]);
    let mut ramp = ScheduleController::token_ramp(64, 1_024, 1_000_000, limits()).unwrap();
    let e = estimate(1.0, 1.0);
    let at = |ramp: &mut ScheduleController, tokens| {
        ramp.decide(&e, &TrainingState::new(1, 10, 64).with_tokens(tokens))
            .batch_size
    };
    assert_eq!(
        (
            at(&mut ramp, 0),
            at(&mut ramp, 500_000),
            at(&mut ramp, 9_000_000)
        ),
        (64, 544, 1_024)
    );
    let mut fixed = FixedController::new(96).unwrap();
    assert_eq!(run(&mut fixed, &[1.0, 1e6], 64), [96, 96]);
}

#[test]
fn parameters_out_of_their_domain_are_named() {
    let model = ThroughputModel::new(0.1, 0.1, 0.1, 1, 1).unwrap();
    let messages = [
        SimiGradController::new(0.0, 0.1, 1, limits())
            .unwrap_err()
            .to_string(),
        SimiGradController::new(0.5, 1.0, 1, limits())
            .unwrap_err()
            .to_string(),
        SimiGradController::new(0.5, 0.5, 0, limits())
            .unwrap_err()
            .to_string(),
        NoiseScaleController::for_similarity(1.5, limits())
            .unwrap_err()
            .to_string(),
        NoiseScaleController::new(f64::NAN, limits())
            .unwrap_err()
            .to_string(),
        NormTestController::new(1.0, limits())
            .unwrap_err()
            .to_string(),
        GoodputController::new(model, 0, limits())
            .unwrap_err()
            .to_string(),
        ThroughputModel::new(0.1, 0.0, 0.1, 1, 1)
            .unwrap_err()
            .to_string(),
        ScheduleController::steps(&[(5, 1), (5, 2)], limits())
            .unwrap_err()
            .to_string(),
        ScheduleController::token_ramp(1, 1, 0, limits())
            .unwrap_err()
            .to_string(),
        FixedController::new(0).unwrap_err().to_string(),
    ];
    assert_eq!(messages[0], "similarity target is 0, expected in (0, 1)");
    assert_eq!(messages[3], "similarity target is 1.5, expected in (0, 1)");
    assert!(
        messages.iter().all(|m| m.contains(", expected ")),
        "{messages:?}"
    );
    assert!(matches!(
        BatchLimits::new(10, 20, 32),
        Err(Error::NoBatch { .. })
    ));
}

#[test]
fn a_batch_that_the_limits_do_not_allow_is_corrected_at_once() {
    let mut controller = NoiseScaleController::new(1.0, limits().cool_down(1_000)).unwrap();
    let decision = controller.decide(&estimate(1.0, 500.0), &TrainingState::new(0, 0, 100));
    assert_eq!(
        (decision.batch_size, decision.reason),
        (96, DecisionReason::OutOfLimits)
    );
}

/// Half of the run, save, restore, and the other half with both.
fn restored_continues<C>(mut controller: C, scales: &[f64]) -> Result<(), TestCaseError>
where
    C: BatchSizeController + Serialize + DeserializeOwned + PartialEq,
{
    let half = scales.len() / 2;
    let batch = *run(&mut controller, &scales[..half], 64)
        .last()
        .unwrap_or(&64);
    let saved = serde_json::to_string(&controller).unwrap();
    let mut restored: C = serde_json::from_str(&saved).unwrap();
    prop_assert_eq!(&restored, &controller);
    let rest = run(&mut controller, &scales[half..], batch);
    prop_assert_eq!(&run(&mut restored, &scales[half..], batch), &rest);
    prop_assert!(
        rest.iter().all(|b| controller_limits().allows(*b)),
        "{:?}",
        rest
    );
    Ok(())
}

fn controller_limits() -> BatchLimits {
    BatchLimits::new(48, 1_500, 24)
        .unwrap()
        .hysteresis(0.1)
        .unwrap()
        .cool_down(2)
        .largest_change(1.7)
        .unwrap()
}

proptest! {
    #[test]
    fn restored_controllers_continue_identically(
        scales in proptest::collection::vec(1e-3f64..1e5, 2..40),
        x in 0.05f64..0.95,
    ) {
        let limits = controller_limits();
        restored_continues(SimiGradController::new(x, 1.0 - x, 2, limits).unwrap(), &scales)?;
        restored_continues(NoiseScaleController::new(x, limits).unwrap(), &scales)?;
        restored_continues(NormTestController::new(x, limits).unwrap(), &scales)?;
        let model = ThroughputModel::new(x, 0.01, 1.0, 2, 16).unwrap().overlap(1.0 + x).unwrap();
        restored_continues(GoodputController::new(model, 48, limits).unwrap(), &scales)?;
        restored_continues(ScheduleController::steps(&[(3, 96), (9, 1_200)], limits).unwrap(), &scales)?;
        restored_continues(ScheduleController::token_ramp(48, 960, 9_999, limits).unwrap(), &scales)?;
    }
}
