//! Numbers at the ends of their range, and saved states that someone has damaged: an error or a sane answer, never a panic or a
//! NaN that stays.

use adaptive_batch::{
    BatchLimits, BatchSizeController, DampedHolt, EmaEstimator, Ensemble, Error, FixedController,
    Forecaster, GaussianProcess, GoodputController, GradientEstimate, HalfSplit, LearningRate,
    MeterConfig, MicroBatch, MicroBatchStats, NoiseScaleController, NormTestController,
    Persistence, Placement, Result, ScalingRule, ScheduleController, Shard, SimiGradController,
    ThroughputModel, TrainingState, Weighting,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

fn mb(index: u64, samples: u64) -> MicroBatch {
    MicroBatch { index, samples }
}

/// Statistics of micro-batches of one parameter, passed as their gradients' sums so that nothing is scaled up.
fn stats(grads: &[f64], samples: u64, loss_scale: f64) -> Result<MicroBatchStats> {
    let mut meter = MeterConfig::new([Shard::new("s", 1)])
        .loss_scale(loss_scale)
        .build()?;
    let mut acc = [0.0f64];
    for (index, grad) in grads.iter().enumerate() {
        meter.accumulate(0, mb(index as u64, samples), &mut acc, &[*grad])?;
    }
    meter.summed(0, &acc)?;
    meter.finish()
}

#[test]
fn moments_that_leave_their_range_are_refused_and_leave_the_average_alone() {
    let mut ema = EmaEstimator::new(0.9).unwrap();
    ema.observe(&stats(&[1.0, 1.5], 4, 1.0).unwrap()).unwrap();
    let before = ema.clone();
    for (grads, samples, scale) in [
        // |G|^2 beyond 10^140; S1' beyond f64; the square of the loss scale lifting both beyond it.
        ([1e100, 1.1e100], 4, 1.0),
        ([1e153, 1e153], 1_000_000, 1.0),
        ([1e100, 1.1e100], 4, 1e-140),
    ] {
        let refused = ema.observe(&stats(&grads, samples, scale).unwrap());
        assert!(matches!(refused, Err(Error::Overflow { .. })), "{grads:?}");
        assert_eq!(ema, before);
    }
    for scale in [1e-200, 1e200] {
        let refused = stats(&[1.0, 1.5], 4, scale);
        assert!(
            matches!(refused, Err(Error::Parameter { name, .. }) if name == "loss scale"),
            "{scale}"
        );
    }
}

#[test]
fn halves_whose_sum_overflows_are_refused_before_they_are_joined() {
    let shards = [Shard::new("s", 2)];
    let mut meter = MeterConfig::new(shards.clone()).build().unwrap();
    let mut halves = HalfSplit::new(&shards);
    let mut first = [0.0f32; 2];
    for index in 0..2 {
        let acc = halves.accumulator(0, index, &mut first).unwrap();
        meter
            .accumulate(0, mb(index, 4), acc, &[1.0f32, 3e38])
            .unwrap();
    }
    let before = first;
    let refused = meter.summed_halves(0, &mut first, &halves);
    assert!(matches!(refused, Err(Error::NonFinite { element: 1, .. })));
    assert_eq!(first, before);
}

#[test]
fn second_moments_that_nothing_can_be_divided_by_are_named() {
    for (eps, bad) in [(1e-8, f32::NAN), (1e-8, -1.0), (0.0, 0.0)] {
        for guard in [true, false] {
            let mut meter = MeterConfig::new([Shard::new("w", 2)])
                .adam(eps, 1.0)
                .guard(guard)
                .build()
                .unwrap();
            let mut acc = [0.0f32; 2];
            let v = [1.0f32, bad];
            let named = |result: Result<()>| {
                let message = result.unwrap_err().to_string();
                assert!(
                    message.contains("second moment") && message.contains("element 1 of shard `w`"),
                    "{message}"
                );
            };
            named(meter.accumulate_preconditioned(0, mb(0, 4), &mut acc, &[1.0f32, 2.0], &v));
            assert_eq!(acc[0] == 0.0, guard);
            named(meter.summed_preconditioned(0, &[1.0f32, 2.0], &v));
            named(meter.summed_part_preconditioned(0, 1, &[2.0f32], &v[1..]));
            assert!(matches!(meter.finish(), Err(Error::NoMicroBatch)));
        }
    }
}

#[test]
fn a_warm_up_that_is_not_a_number_is_refused() {
    for warmup_epochs in [f64::NAN, f64::INFINITY, -1.0] {
        let rule = ScalingRule::Legw { warmup_epochs };
        assert!(rule.warmup_epochs(32, 64).is_err(), "{warmup_epochs}");
        assert!(LearningRate::new(0.1, 32, rule).is_err());
    }
}

/// A member from outside that knows nothing.
#[derive(Debug)]
struct Clueless;

impl Forecaster for Clueless {
    fn observe(&mut self, _step: u64, _batch: u64) -> Result<()> {
        Ok(())
    }

    fn forecast(&self, steps: &[u64]) -> Result<Vec<adaptive_batch::BatchForecast>> {
        let nothing = json!({"step": 0, "batch": 0.0, "lower": 0.0, "upper": 0.0});
        Ok(steps
            .iter()
            .map(|_| serde_json::from_value(nothing.clone()).unwrap())
            .collect())
    }
}

fn forecasters() -> Vec<Box<dyn Forecaster>> {
    let members: [Box<dyn Forecaster>; 2] = [Box::new(Persistence::new()), Box::new(Clueless)];
    vec![
        Box::new(Persistence::new()),
        Box::new(DampedHolt::new()),
        Box::new(GaussianProcess::new()),
        Box::new(Ensemble::standard()),
        Box::new(Ensemble::new(members).unwrap()),
    ]
}

#[test]
fn forecasts_stay_batches_however_far_and_wild() {
    let series: [&dyn Fn(u64) -> (u64, u64); 5] = [
        &|i| (i, 1 << i),
        &|i| (i, 1 << (60 - i)),
        &|i| (i * i * i, if i % 2 == 0 { 1 } else { u64::MAX }),
        &|i| (u64::MAX - 100 + i, 64),
        &|i| (1 << i, u64::MAX >> (i * 7 % 60)),
    ];
    let sane = |forecaster: &dyn Forecaster, steps: &[u64]| {
        for f in forecaster.forecast(steps).unwrap() {
            let bounds = [1.0, f.lower, f.batch, f.upper, 1.8447e19];
            assert!(bounds.is_sorted(), "{forecaster:?}: {f:?}");
        }
    };
    for points in series {
        for mut forecaster in forecasters() {
            for (step, batch) in (0..40).map(points) {
                forecaster.observe(step, batch).unwrap();
                sane(&*forecaster, &[step + 1, u64::MAX]);
            }
            // A gap beyond all experience, and calm after it: nothing infinite may stay behind.
            for i in 0..20 {
                let step = u64::MAX - 20 + i;
                if forecaster.observe(step, 100).is_ok() {
                    sane(&*forecaster, &[u64::MAX]);
                }
            }
        }
    }
}

/// Pointers to all values of a JSON tree; of arrays only the first two.
fn pointers(value: &Value, at: &str, all: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), v)).collect(),
        Value::Array(items) => items
            .iter()
            .take(2)
            .enumerate()
            .map(|(i, v)| (i.to_string(), v))
            .collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        let pointer = format!("{at}/{key}");
        pointers(child, &pointer, all);
        all.push(pointer);
    }
}

/// Damages each stored value in turn; what is still accepted has to pass `sane`. At least `refused` are to be refused.
fn damaged<T: Serialize + DeserializeOwned>(state: &T, refused: usize, sane: impl Fn(T) -> bool) {
    let whole = serde_json::to_value(state).unwrap();
    let mut all = Vec::new();
    pointers(&whole, "", &mut all);
    let mut count = 0;
    for pointer in all {
        for damage in [
            "null",
            "0",
            "1",
            "-1.0",
            "2.0",
            "5e-324",
            "1e300",
            "-1e300",
            "18446744073709551615",
            "[]",
        ] {
            let mut torn = whole.clone();
            *torn.pointer_mut(&pointer).unwrap() = serde_json::from_str(damage).unwrap();
            match serde_json::from_value::<T>(torn) {
                Ok(state) => assert!(sane(state), "{pointer} = {damage}"),
                Err(_) => count += 1,
            }
        }
    }
    assert!(count >= refused, "only {count} refused");
}

fn estimate() -> GradientEstimate {
    let estimate = stats(&[1.0, 1.5], 64, 1.0).unwrap().estimate().unwrap();
    let mut value = serde_json::to_value(estimate).unwrap();
    value["noise_scale"] = json!(700.0);
    serde_json::from_value(value).unwrap()
}

#[test]
fn damaged_controllers_are_refused_or_keep_to_their_limits() {
    fn check<C: BatchSizeController + Serialize + DeserializeOwned>(mut controller: C) {
        let estimate = estimate();
        for step in 0..30 {
            controller.decide(&estimate, &TrainingState::new(step, step, 64));
        }
        damaged(&controller, 50, |mut controller| {
            (100..140).all(|step| {
                let state = TrainingState::new(step, step * 64, 64);
                let decision = controller.decide(&estimate, &state);
                decision.batch_size > 0 && !decision.target.is_nan()
            })
        });
    }
    let limits = BatchLimits::new(16, 4_096, 16)
        .and_then(|l| l.hysteresis(0.1))
        .and_then(|l| l.largest_change(2.0))
        .unwrap()
        .cool_down(5);
    let model = ThroughputModel::new(0.01, 0.001, 0.05, 4, 32).unwrap();
    check(SimiGradController::new(0.5, 0.1, 3, limits).unwrap());
    check(NoiseScaleController::new(1.0, limits).unwrap());
    check(NormTestController::new(0.5, limits).unwrap());
    check(GoodputController::new(model, 64, limits).unwrap());
    check(ScheduleController::steps(&[(0, 64), (20, 128)], limits).unwrap());
    check(ScheduleController::token_ramp(16, 128, 1_000, limits).unwrap());
    check(FixedController::new(64).unwrap());

    let mut goodput =
        serde_json::to_value(GoodputController::new(model, 64, limits).unwrap()).unwrap();
    goodput["base_batch"] = json!(0);
    assert!(serde_json::from_value::<GoodputController>(goodput).is_err());
}

#[test]
fn damaged_averages_and_rates_are_refused_or_stay_finite() {
    let step = stats(&[1.0, 1.5], 8, 1.0).unwrap();
    let mut ema = EmaEstimator::new(0.9).unwrap();
    for _ in 0..3 {
        ema.observe(&step).unwrap();
    }
    let finite = |e: &GradientEstimate| {
        e.grad_sq_norm.is_finite() && e.variance.is_finite() && !e.confidence.is_nan()
    };
    damaged(&ema, 80, |mut ema| finite(&ema.observe(&step).unwrap()));
    damaged(&step, 80, |stats| {
        let mut ema = ema.clone();
        ema.observe(&stats).is_err() || finite(&ema.observe(&step).unwrap())
    });

    let rule = ScalingRule::Legw { warmup_epochs: 2.0 };
    let mut rate = LearningRate::new(0.1, 64, rule)
        .and_then(|rate| rate.jump_warmup(100).start_warmup(1_000))
        .unwrap();
    rate.set_batch(128, 10, None).unwrap();
    damaged(&rate, 50, |rate| {
        [0, 50, 10_000]
            .iter()
            .all(|samples| rate.at(*samples) >= 0.0)
    });
    for field in ["base_rate", "base_batch", "batch", "epoch_samples"] {
        let mut torn = serde_json::to_value(&rate).unwrap();
        torn[field] = json!(0);
        assert!(
            serde_json::from_value::<LearningRate>(torn).is_err(),
            "{field}"
        );
    }
}

#[test]
fn a_damaged_placement_is_refused() {
    damaged(&Placement::data_parallel(1, 2).unwrap(), 20, |placement| {
        let mut meter = MeterConfig::new([Shard::new("s", 4)])
            .placement(placement)
            .weighting(Weighting::Samples)
            .build()
            .unwrap();
        meter.summed(0, &[1.0f32; 4]).is_ok()
    });
}

#[test]
fn damaged_forecasters_are_refused_or_stay_sane() {
    fn check<F: Forecaster + Serialize + DeserializeOwned>(mut forecaster: F) {
        for i in 0..8 {
            forecaster.observe(i * 2, 64 + i * i).unwrap();
        }
        damaged(&forecaster, 40, |mut forecaster| {
            let sane = |forecaster: &F, step| match forecaster.forecast(&[step]) {
                Ok(f) => [1.0, f[0].lower, f[0].batch, f[0].upper, 1.8447e19].is_sorted(),
                Err(error) => matches!(error, Error::OutOfOrder { .. }),
            };
            sane(&forecaster, 50)
                && match forecaster.observe(60, 70) {
                    Ok(()) => sane(&forecaster, 70),
                    Err(error) => matches!(error, Error::OutOfOrder { .. }),
                }
        });
    }
    check(Persistence::new());
    check(DampedHolt::new());
    check(GaussianProcess::new());
}
