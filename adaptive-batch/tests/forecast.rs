//! Forecasts one epoch ahead on generated trajectories of the kind that adaptive training produces: a noise scale that grows
//! fast at first, slowly later, jumps when the learning rate falls, and is measured with smoothed noise.

use adaptive_batch::{
    BatchForecast, DampedHolt, Ensemble, Error, Forecaster, GaussianProcess, Persistence,
};

fn uniform(state: &mut u64) -> f64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 11) as f64 / (1u64 << 53) as f64
}

fn normal(state: &mut u64) -> f64 {
    (0..12).map(|_| uniform(state)).sum::<f64>() - 6.0
}

/// Numerator and denominator of the noise scale fluctuate and are smoothed, as `EmaEstimator` does it.
fn trajectory(seed: u64) -> Vec<u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let epochs = 60;
    let growth = 0.5 + 1.5 * uniform(&mut state);
    let noise = 0.05 + 0.25 * uniform(&mut state);
    let drop_at = 20.0 + 30.0 * uniform(&mut state);
    let drop = 0.5 + uniform(&mut state);
    let decay = 0.4 + 0.4 * uniform(&mut state);
    let (mut grad_sq, mut variance) = (1.0, 64.0);
    (0..epochs)
        .map(|epoch| {
            let t = f64::from(epoch);
            let log = growth * (1.0 + t).ln() + drop / (1.0 + (-(t - drop_at)).exp());
            grad_sq = decay * grad_sq + (1.0 - decay) * (-log + noise * normal(&mut state)).exp();
            variance =
                decay * variance + (1.0 - decay) * 64.0 * (noise / 3.0 * normal(&mut state)).exp();
            (variance / grad_sq).round().max(1.0) as u64
        })
        .collect()
}

struct Score {
    mape: f64,
    inside: f64,
}

fn score(mut forecaster: Box<dyn Forecaster>, series: &[u64]) -> Score {
    let (mut error, mut inside, mut count) = (0.0, 0.0, 0.0);
    for (epoch, &batch) in series.iter().enumerate() {
        if epoch >= 4 {
            let BatchForecast {
                batch: median,
                lower,
                upper,
                ..
            } = forecaster.forecast(&[epoch as u64]).unwrap()[0];
            assert!(lower <= median && median <= upper);
            error += (median / batch as f64 - 1.0).abs();
            inside += f64::from(u8::from((lower..=upper).contains(&(batch as f64))));
            count += 1.0;
        }
        forecaster.observe(epoch as u64, batch).unwrap();
    }
    Score {
        mape: error / count,
        inside: inside / count,
    }
}

fn forecasters() -> [Box<dyn Forecaster>; 4] {
    [
        Box::new(Persistence::new()),
        Box::new(DampedHolt::new()),
        Box::new(GaussianProcess::new()),
        Box::new(Ensemble::standard()),
    ]
}

#[test]
fn forecasts_beat_persistence_and_intervals_hold_what_they_promise() {
    let series: Vec<Vec<u64>> = (1..=16).map(trajectory).collect();
    let mut mape = [0.0; 4];
    let mut inside = [0.0; 4];
    for series in &series {
        for (i, forecaster) in forecasters().into_iter().enumerate() {
            let score = score(forecaster, series);
            mape[i] += score.mape / 16.0;
            inside[i] += score.inside / 16.0;
        }
    }
    for i in 1..4 {
        assert!(mape[i] < 0.9 * mape[0], "forecaster {i}: {mape:?}");
    }
    let best = mape[..3].iter().copied().fold(f64::INFINITY, f64::min);
    assert!(mape[3] <= 1.05 * best, "{mape:?}");
    assert!(inside.iter().all(|c| (0.7..=0.9).contains(c)), "{inside:?}");
}

#[test]
fn intervals_widen_with_the_horizon_and_gaps_may_be_uneven() {
    for mut forecaster in forecasters() {
        let mut state = 5;
        let mut step = 0;
        for _ in 0..40 {
            step += 5 + (uniform(&mut state) * 10.0) as u64;
            let batch = 100.0 * (0.02 * step as f64 / 10.0 + 0.1 * normal(&mut state)).exp();
            forecaster.observe(step, batch as u64).unwrap();
        }
        let ahead = forecaster.forecast(&[step + 10, step + 100]).unwrap();
        let width = |f: &BatchForecast| (f.upper / f.lower).ln();
        assert!(width(&ahead[1]) > 1.5 * width(&ahead[0]), "{forecaster:?}");
        assert!(ahead.iter().all(|f| f.batch.is_finite() && f.lower > 0.0));
    }
}

#[test]
fn what_cannot_be_observed_or_forecast_is_refused() {
    for mut forecaster in forecasters() {
        assert!(matches!(
            forecaster.forecast(&[1]),
            Err(Error::TooFewObservations { needed: 1, got: 0 })
        ));
        forecaster.observe(5, 64).unwrap();
        assert!(matches!(
            forecaster.observe(5, 64),
            Err(Error::OutOfOrder { step: 5, last: 5 })
        ));
        assert!(matches!(
            forecaster.observe(6, 0),
            Err(Error::Parameter { .. })
        ));
        assert!(matches!(
            forecaster.forecast(&[6, 5]),
            Err(Error::OutOfOrder { .. })
        ));
        let after_one = forecaster.forecast(&[6]).unwrap()[0];
        assert!((after_one.batch - 64.0).abs() < 1e-6);
    }
    assert!(Ensemble::new([]).is_err());
}

#[test]
fn saved_forecasters_continue_identically() {
    let series = trajectory(3);
    let (mut holt, mut gp) = (DampedHolt::new(), GaussianProcess::new());
    for (epoch, &batch) in series[..30].iter().enumerate() {
        holt.observe(epoch as u64, batch).unwrap();
        gp.observe(epoch as u64, batch).unwrap();
    }
    let mut holt_again: DampedHolt =
        serde_json::from_str(&serde_json::to_string(&holt).unwrap()).unwrap();
    let mut gp_again: GaussianProcess =
        serde_json::from_str(&serde_json::to_string(&gp).unwrap()).unwrap();
    for (epoch, &batch) in series.iter().enumerate().skip(30) {
        let step = epoch as u64;
        assert_eq!(
            holt.forecast(&[step]).unwrap(),
            holt_again.forecast(&[step]).unwrap()
        );
        assert_eq!(
            gp.forecast(&[step]).unwrap(),
            gp_again.forecast(&[step]).unwrap()
        );
        holt.observe(step, batch).unwrap();
        holt_again.observe(step, batch).unwrap();
        gp.observe(step, batch).unwrap();
        gp_again.observe(step, batch).unwrap();
    }
}
