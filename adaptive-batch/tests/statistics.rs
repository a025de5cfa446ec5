//! Estimators against their closed forms on Gaussian gradients with known mean and covariance, within three standard errors of the
//! Monte-Carlo mean.

use adaptive_batch::{
    EmaEstimator, EstimateSource, GradientEstimate, HalfSplit, MeterConfig, MicroBatch,
    MicroBatchStats, Shard, Weighting,
};

/// `SplitMix64` with Box and Muller's transform.
struct Normal(u64);

impl Normal {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Gradients with mean `mean` and covariance L L^T, one column of L per independent source.
struct Source {
    mean: Vec<f64>,
    columns: Vec<Vec<f64>>,
}

impl Source {
    /// Independent noise of a different size in every direction.
    fn full_rank() -> Self {
        let d = 12;
        let column = |i: usize| {
            (0..d)
                .map(|j| if i == j { 0.4 + 0.2 * i as f64 } else { 0.0 })
                .collect()
        };
        Self {
            mean: (0..d).map(|i| 0.3 - 0.05 * i as f64).collect(),
            columns: (0..d).map(column).collect(),
        }
    }

    /// Two directions only, one of them along the gradient.
    fn low_rank() -> Self {
        let mean: Vec<f64> = (0..12).map(|i| 0.3 - 0.05 * f64::from(i)).collect();
        let other = (0..12)
            .map(|i| if i % 2 == 0 { 0.7 } else { -0.2 })
            .collect();
        Self {
            columns: vec![mean.iter().map(|g| 2.0 * g).collect(), other],
            mean,
        }
    }

    fn grad_sq(&self) -> f64 {
        self.mean.iter().map(|g| g * g).sum()
    }

    fn trace(&self) -> f64 {
        self.columns.iter().flatten().map(|x| x * x).sum()
    }

    /// The mean gradient of `samples` samples.
    fn draw(&self, normal: &mut Normal, samples: u64) -> Vec<f64> {
        let scale = 1.0 / (samples as f64).sqrt();
        let mut g = self.mean.clone();
        for column in &self.columns {
            let z = normal.next() * scale;
            for (g, c) in g.iter_mut().zip(column) {
                *g += z * c;
            }
        }
        g
    }

    fn step(&self, normal: &mut Normal, sizes: &[u64]) -> MicroBatchStats {
        let mut meter = MeterConfig::new([Shard::new("all", self.mean.len())])
            .weighting(Weighting::Samples)
            .build()
            .unwrap();
        let mut acc = vec![0.0f64; self.mean.len()];
        for (index, &samples) in sizes.iter().enumerate() {
            let grad = self.draw(normal, samples);
            meter
                .accumulate(
                    0,
                    MicroBatch {
                        index: index as u64,
                        samples,
                    },
                    &mut acc,
                    &grad,
                )
                .unwrap();
        }
        meter.summed(0, &acc).unwrap();
        meter.finish().unwrap()
    }
}

/// Mean and standard error of a sample.
#[derive(Default)]
struct Mean {
    n: f64,
    sum: f64,
    square: f64,
}

impl Mean {
    fn add(&mut self, x: f64) {
        self.n += 1.0;
        self.sum += x;
        self.square += x * x;
    }
    fn mean(&self) -> f64 {
        self.sum / self.n
    }
    fn deviation(&self) -> f64 {
        (self.square / self.n - self.mean() * self.mean())
            .max(0.0)
            .sqrt()
    }
    fn check(&self, what: &str, want: f64) {
        let error = self.deviation() / self.n.sqrt();
        let off = (self.mean() - want) / error;
        assert!(
            off.abs() < 3.0,
            "{what}: {} instead of {want}, {off:.1} standard errors off",
            self.mean()
        );
    }
}

#[test]
fn the_moments_are_unbiased_for_any_sizes_and_any_covariance() {
    for (name, source) in [
        ("full rank", Source::full_rank()),
        ("low rank", Source::low_rank()),
    ] {
        for sizes in [vec![4, 4, 4, 4], vec![1, 2, 3, 10], vec![5, 1]] {
            let mut normal = Normal(sizes.len() as u64 + 40);
            let (mut grad_sq, mut variance) = (Mean::default(), Mean::default());
            for _ in 0..20_000 {
                let e = source.step(&mut normal, &sizes).estimate().unwrap();
                grad_sq.add(e.grad_sq_norm);
                variance.add(e.variance);
                assert!(e.variance >= 0.0);
            }
            grad_sq.check(&format!("|G|^2, {name}, {sizes:?}"), source.grad_sq());
            variance.check(&format!("tr, {name}, {sizes:?}"), source.trace());
        }
    }
}

/// K = 1: two steps count as two micro-batches, which is unbiased while the gradient stands still.
#[test]
fn two_steps_of_one_micro_batch_are_unbiased() {
    for (name, source) in [
        ("full rank", Source::full_rank()),
        ("low rank", Source::low_rank()),
    ] {
        let mut normal = Normal(61);
        let mut meter = MeterConfig::new([Shard::new("all", source.mean.len())])
            .weighting(Weighting::Samples)
            .keep_previous(true)
            .build()
            .unwrap();
        let mut step = |samples: u64| {
            let grad = source.draw(&mut normal, samples);
            let micro_batch = MicroBatch { index: 0, samples };
            let mut acc = vec![0.0f64; grad.len()];
            meter.accumulate(0, micro_batch, &mut acc, &grad).unwrap();
            meter.summed(0, &acc).unwrap();
            meter.finish().unwrap()
        };
        let (mut grad_sq, mut variance) = (Mean::default(), Mean::default());
        for _ in 0..10_000 {
            // Pairs that share no step, so that the estimates are independent.
            step(4);
            let e = step(6).estimate().unwrap();
            assert_eq!((e.source, e.samples), (EstimateSource::TwoSteps, 10));
            grad_sq.add(e.grad_sq_norm);
            variance.add(e.variance);
        }
        grad_sq.check(&format!("|G|^2, {name}"), source.grad_sq());
        variance.check(&format!("tr, {name}"), source.trace());
    }
}

/// With Adam's metric the moments are those of the gradient divided by `sqrt(v / correction) + eps`.
#[test]
fn preconditioned_moments_are_unbiased() {
    let source = Source::full_rank();
    let n = source.mean.len();
    let (eps, correction) = (0.1, 0.5);
    let v: Vec<f32> = (0..n).map(|i| 0.2 + (i % 5) as f32).collect();
    let divisors: Vec<f64> = v
        .iter()
        .map(|&v| (f64::from(v) / correction).sqrt() + eps)
        .collect();
    let square = |g: &[f64]| -> f64 {
        g.iter()
            .zip(&divisors)
            .map(|(g, d)| (g / d) * (g / d))
            .sum()
    };
    let mut meter = MeterConfig::new([Shard::new("all", n)])
        .weighting(Weighting::Samples)
        .adam(eps, correction)
        .build()
        .unwrap();
    let mut normal = Normal(62);
    let (mut grad_sq, mut variance) = (Mean::default(), Mean::default());
    for _ in 0..10_000 {
        let mut acc = vec![0.0f64; n];
        for (index, samples) in [(0, 3), (1, 5), (2, 2)] {
            let grad = source.draw(&mut normal, samples);
            let micro_batch = MicroBatch { index, samples };
            meter
                .accumulate_preconditioned(0, micro_batch, &mut acc, &grad, &v)
                .unwrap();
        }
        meter.summed_preconditioned(0, &acc, &v).unwrap();
        let e = meter.finish().unwrap().estimate().unwrap();
        grad_sq.add(e.grad_sq_norm);
        variance.add(e.variance);
    }
    grad_sq.check("|G|^2", square(&source.mean));
    variance.check("tr", source.columns.iter().map(|c| square(c)).sum());
}

/// Numerators and denominators are smoothed apart, so the ratios meet the closed forms of their expectations.
#[test]
fn similarity_noise_scale_and_diversity_meet_their_closed_forms_once_smoothed() {
    let source = Source::full_rank();
    let (k, b) = (8u64, 4u64);
    let total = (k * b) as f64;
    let noise_scale = source.trace() / source.grad_sq();
    let mut scales = Mean::default();
    let mut similarities = Mean::default();
    let mut halves = Mean::default();
    let mut diversities = Mean::default();
    for repeat in 0..20 {
        let mut ema = EmaEstimator::new(0.9995).unwrap();
        let mut normal = Normal(900 + repeat);
        let mut last: Option<GradientEstimate> = None;
        for _ in 0..5_000 {
            last = Some(
                ema.observe(&source.step(&mut normal, &vec![b; k as usize]))
                    .unwrap(),
            );
        }
        let last = last.unwrap();
        scales.add(last.noise_scale);
        similarities.add(last.similarity);
        halves.add(last.half_cosine);
        diversities.add(last.diversity);
        assert!(last.confidence > 0.99);
    }
    let r = noise_scale / total;
    scales.check("noise scale", noise_scale);
    similarities.check("similarity", 1.0 / (1.0 + k as f64 * r));
    halves.check("half-batch cosine", 1.0 / (1.0 + 2.0 * r));
    diversities.check("diversity", (1.0 + k as f64 * r) / (k as f64 * (1.0 + r)));
}

/// The cosine that `SimiGrad` measures, in many dimensions (where norms hardly scatter), is what the similarity predicts.
#[test]
fn the_measured_half_cosine_meets_the_one_from_micro_batches() {
    let d = 400;
    let source = Source {
        mean: vec![0.05; d],
        columns: (0..d)
            .map(|i| (0..d).map(|j| if i == j { 0.5 } else { 0.0 }).collect())
            .collect(),
    };
    let total = 64.0;
    let expected = 1.0 / (1.0 + 2.0 * source.trace() / source.grad_sq() / total);
    let shards = [Shard::new("all", d)];
    let (mut exact, mut grad_sq, mut variance) =
        (Mean::default(), Mean::default(), Mean::default());
    let mut normal = Normal(5);
    for _ in 0..200 {
        let mut meter = MeterConfig::new(shards.clone()).build().unwrap();
        let mut halves = HalfSplit::new(&shards);
        let mut first = vec![0.0f32; d];
        for index in 0..8 {
            let grad: Vec<f32> = source
                .draw(&mut normal, 8)
                .iter()
                .map(|&g| g as f32)
                .collect();
            let acc = halves.accumulator(0, index, &mut first).unwrap();
            meter
                .accumulate(0, MicroBatch { index, samples: 8 }, acc, &grad)
                .unwrap();
        }
        meter.summed_halves(0, &mut first, &halves).unwrap();
        let estimate = meter.finish().unwrap().estimate().unwrap();
        exact.add(estimate.half_cosine);
        grad_sq.add(estimate.grad_sq_norm);
        variance.add(estimate.variance);
    }
    // The ratio has a bias of its own of the order 1 / d, which is why it is compared to 1 % and not to its error.
    assert!(
        (exact.mean() / expected - 1.0).abs() < 0.01,
        "{} {expected}",
        exact.mean()
    );
    let from_moments = grad_sq.mean() / (grad_sq.mean() + 2.0 * variance.mean() / total);
    assert!(
        (exact.mean() / from_moments - 1.0).abs() < 0.02,
        "{} {from_moments}",
        exact.mean()
    );
}

#[test]
fn dividing_before_averaging_is_biased_and_smoothing_removes_it() {
    let source = Source::full_rank();
    // Far below the noise scale.
    let sizes = [1, 1, 1, 1];
    let truth = source.trace() / source.grad_sq();
    let mut normal = Normal(77);
    let mut naive = Mean::default();
    let mut negative = 0;
    let mut ema = EmaEstimator::new(0.9999).unwrap();
    let mut smoothed = 0.0;
    for _ in 0..100_000 {
        let stats = source.step(&mut normal, &sizes);
        let single = stats.estimate().unwrap();
        if single.grad_sq_norm > 0.0 {
            // What is left when the useless draws are thrown away, capped to have a mean at all.
            naive.add(single.noise_scale.min(100.0 * truth));
        } else {
            assert!(single.noise_scale.is_infinite() && single.confidence == 0.0);
            negative += 1;
        }
        smoothed = ema.observe(&stats).unwrap().noise_scale;
    }
    assert!(
        negative > 20_000,
        "the case is meant to be noisy: {negative}"
    );
    assert!(
        (naive.mean() / truth - 1.0).abs() > 0.3,
        "naive {} against {truth}",
        naive.mean()
    );
    assert!(
        (smoothed / truth - 1.0).abs() < 0.1,
        "smoothed {smoothed} against {truth}"
    );
}

#[test]
fn the_error_that_is_reported_is_the_error_that_is_made() {
    let source = Source::full_rank();
    let mut normal = Normal(3);
    let (mut values, mut reported) = (Mean::default(), Mean::default());
    let mut single = Mean::default();
    let mut bound = Mean::default();
    for _ in 0..400 {
        let mut ema = EmaEstimator::new(0.95).unwrap();
        for _ in 0..200 {
            let stats = source.step(&mut normal, &[8, 8, 8, 8]);
            let one = stats.estimate().unwrap();
            single.add(one.grad_sq_norm);
            bound.add(one.grad_sq_norm_error);
            ema.observe(&stats).unwrap();
        }
        let last = ema.last().unwrap();
        values.add(last.grad_sq_norm);
        reported.add(last.grad_sq_norm_error);
    }
    let ratio = reported.mean() / values.deviation();
    assert!(
        (0.8..1.3).contains(&ratio),
        "smoothed: reported {} made {}",
        reported.mean(),
        values.deviation()
    );
    assert!(
        bound.mean() > single.deviation(),
        "one step: bound {} made {}",
        bound.mean(),
        single.deviation()
    );
}

#[test]
fn the_average_starts_without_bias_and_is_saved_to_the_bit() {
    let source = Source::full_rank();
    let mut normal = Normal(8);
    let steps: Vec<MicroBatchStats> = (0..40)
        .map(|_| source.step(&mut normal, &[2, 3, 4]))
        .collect();
    let mut ema = EmaEstimator::new(0.9).unwrap();
    let first = ema.observe(&steps[0]).unwrap();
    assert!((first.grad_sq_norm - steps[0].estimate().unwrap().grad_sq_norm).abs() < 1e-12);
    for stats in &steps[1..20] {
        ema.observe(stats).unwrap();
    }
    let saved = serde_json::to_string(&ema).unwrap();
    let mut restored: EmaEstimator = serde_json::from_str(&saved).unwrap();
    for stats in &steps[20..] {
        assert_eq!(
            ema.observe(stats).unwrap(),
            restored.observe(stats).unwrap()
        );
    }
    assert!(
        serde_json::from_str::<EmaEstimator>(&saved.replace("\"decay\":0.9", "\"decay\":1.5"))
            .is_err()
    );
}
