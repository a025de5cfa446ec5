//! Adaptive against fixed batch sizes on 8 x 8 digits: ten paired seeds, a small network on flat slices, eight simulated devices.
//!
//! Every run of a seed trains the same network from the same start on the same order of samples with Adam; only batch and learning
//! rate differ. A step's gradient comes in eight micro-batches, one per device, which is all that the noise scale needs.
//!
//! Time is *simulated*: each step takes the time of [`step_times`]. The fixed batches are tuned: each has the best of four learning
//! rates, found on the seeds that are reported, which favours them. The adaptive run has one learning rate, the best one at a batch
//! of 16 (found on ten other seeds), and the square-root rule; it searches nothing.
//!
//! `cargo run --release --example digits_adaptive` prints the table and the figures; it ends with an error if one is missed.

#![expect(clippy::print_stdout, reason = "the program's output")]

#[path = "support/digits.rs"]
mod digits;

use std::path::Path;

use adaptive_batch::{
    BatchLimits, BatchSizeController, EmaEstimator, FixedController, GoodputController,
    LearningRate, ScalingRule, ThroughputModel, TrainingState,
};
use digits::{Adam, DEVICES, Data, Network, Shuffle};

const SEEDS: u64 = 10;
const TARGET: f64 = 0.965;
/// Budgets in passes over the training samples: of runs that go to the end, and of runs that end at the target.
const EPOCHS: u64 = 40;
const MOST_EPOCHS: u64 = 60;
/// The learning rate that suits a batch of 16, of 0.002, 0.004, 0.008, 0.016 and 0.032 the fastest on seeds 100 to 109.
const BASE_BATCH: u64 = 16;
const BASE_RATE: f64 = 0.016;
const FIXED: [u64; 7] = [16, 32, 64, 128, 256, 512, 1_024];
/// Learning rates that a fixed batch is tuned over, relative to the square-root rule.
const RATES: [f64; 4] = [0.5, 0.7, 1.0, 1.4];

/// Step times of eight T4 on two nodes. The constants are a fit by eye, within 15 %, to the step times of ResNet-18 on such
/// devices that were published with Pollux and Sia (`cifar10`, placement 4 + 4, 32 to 1,024 samples per device).
fn step_times() -> adaptive_batch::Result<ThroughputModel> {
    ThroughputModel::new(0.015, 0.000_73, 0.16, DEVICES as u64, 1_024)?.overlap(1.6)
}

/// How a run chooses its batch.
#[derive(Debug, Clone, Copy)]
enum Batch {
    Fixed { size: u64, rate: f64 },
    Adaptive,
}

/// One training run.
#[derive(Debug, Clone, Copy)]
struct Run {
    reached: bool,
    /// Simulated seconds and samples to the target, or to the end of the budget.
    seconds: f64,
    samples: u64,
    /// Mean over the last tenth of the budget, which scatters less than its last point.
    accuracy: f64,
    mean_batch: f64,
}

fn train(data: &Data, seed: u64, choice: Batch, to_the_end: bool) -> anyhow::Result<Run> {
    let step_times = step_times()?;
    let (mut controller, mut rate, mut batch): (Box<dyn BatchSizeController>, _, _) = match choice {
        Batch::Fixed { size, rate } => (
            Box::new(FixedController::new(size)?),
            LearningRate::new(rate, size, ScalingRule::None)?,
            size,
        ),
        Batch::Adaptive => {
            let limits = BatchLimits::new(16, 1_024, DEVICES as u64)?
                .hysteresis(0.1)?
                .largest_change(2.0)?;
            (
                Box::new(GoodputController::new(step_times, BASE_BATCH, limits)?),
                LearningRate::new(BASE_RATE, BASE_BATCH, ScalingRule::Sqrt)?,
                64,
            )
        }
    };
    let mut network = Network::new(seed);
    let mut adam = Adam::new(&network);
    let mut meter = digits::meter()?;
    let mut ema = EmaEstimator::with_half_life(10.0)?;
    let mut shuffle = Shuffle::new(data.train.len(), seed);
    let epochs = if to_the_end { EPOCHS } else { MOST_EPOCHS };
    let budget = epochs * data.train.len() as u64;
    let (mut samples, mut step, mut seconds, mut untested) = (0, 0, 0.0, 0);
    let mut reached = None;
    let mut last_accuracies = Vec::new();
    rate.set_batch(batch, 0, None)?;
    while samples < budget && (to_the_end || reached.is_none()) {
        let chosen = shuffle.take(batch as usize);
        let (gradient, stats) = digits::gradient(&network, data, &chosen, &mut meter)?;
        adam.step(&mut network, &gradient, rate.at(samples));
        step += 1;
        samples += batch;
        untested += batch;
        seconds += step_times.step_seconds(batch);
        // The test set is looked at after every 128 samples, or every step.
        if untested >= 128 {
            untested = 0;
            let accuracy = network.accuracy(&data.test);
            if accuracy >= TARGET && reached.is_none() {
                reached = Some((seconds, samples));
            }
            if samples > budget - budget / 10 {
                last_accuracies.push(accuracy);
            }
        }
        let estimate = ema.observe(&stats)?;
        let decision = controller.decide(&estimate, &TrainingState::new(step, samples, batch));
        batch = decision.batch_size;
        rate.set_batch(batch, samples, Some(&estimate))?;
    }
    let mean_batch = samples as f64 / step as f64;
    let (to_seconds, to_samples) = reached.unwrap_or((seconds, samples));
    Ok(Run {
        reached: reached.is_some(),
        seconds: to_seconds,
        samples: to_samples,
        accuracy: last_accuracies.iter().sum::<f64>() / last_accuracies.len().max(1) as f64,
        mean_batch,
    })
}

/// The runs of all seeds, in the order of the seeds.
fn all_seeds(data: &Data, choice: Batch, to_the_end: bool) -> anyhow::Result<Vec<Run>> {
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads.min(SEEDS))
            .map(|thread| {
                scope.spawn(move || -> anyhow::Result<Vec<(u64, Run)>> {
                    (thread..SEEDS)
                        .step_by(threads as usize)
                        .map(|seed| Ok((seed, train(data, seed, choice, to_the_end)?)))
                        .collect()
                })
            })
            .collect();
        let mut runs = Vec::new();
        for part in parts {
            let part = part.join();
            runs.extend(part.map_err(|_| anyhow::anyhow!("a training thread failed"))??);
        }
        runs.sort_by_key(|(seed, _)| *seed);
        Ok(runs.into_iter().map(|(_, run)| run).collect())
    })
}

/// A fixed batch at the best of its learning rates: most seeds at the target, then the shortest time.
fn tuned(data: &Data, size: u64) -> anyhow::Result<(f64, Vec<Run>)> {
    let mut best: Option<(f64, Vec<Run>)> = None;
    for relative in RATES {
        let rate = BASE_RATE * relative * (size as f64 / BASE_BATCH as f64).sqrt();
        let runs = all_seeds(data, Batch::Fixed { size, rate }, false)?;
        let worth = |runs: &[Run]| (reached(runs), -mean(runs, |r| r.seconds.ln()));
        if best.as_ref().is_none_or(|(_, b)| worth(&runs) > worth(b)) {
            best = Some((rate, runs));
        }
    }
    best.ok_or_else(|| anyhow::anyhow!("no learning rate to try"))
}

fn reached(runs: &[Run]) -> usize {
    runs.iter().filter(|r| r.reached).count()
}

fn mean(runs: &[Run], value: impl Fn(&Run) -> f64) -> f64 {
    runs.iter().map(value).sum::<f64>() / runs.len() as f64
}

/// Mean and half-width of the 95 % confidence interval (Student's t with 9 degrees of freedom).
fn interval(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, 2.262 * (variance / n).sqrt())
}

/// Geometric mean of the paired ratios, and its 95 % interval.
fn ratio(left: &[Run], right: &[Run], value: impl Fn(&Run) -> f64) -> (f64, f64, f64) {
    let logs: Vec<f64> = left
        .iter()
        .zip(right)
        .map(|(l, r)| (value(l) / value(r)).ln())
        .collect();
    let (mean, half) = interval(&logs);
    (mean.exp(), (mean - half).exp(), (mean + half).exp())
}

fn row(name: &str, rate: &str, runs: &[Run], ended: Option<&[Run]>) {
    println!(
        "{name:>9} {rate:>7} {:>6}/{SEEDS} {:>12.1} {:>9.0} {:>11} {:>11.0}",
        reached(runs),
        mean(runs, |r| r.seconds.ln()).exp(),
        mean(runs, |r| (r.samples as f64).ln()).exp(),
        ended.map_or_else(String::new, |e| format!(
            "{:.2}",
            100.0 * mean(e, |r| r.accuracy)
        )),
        mean(runs, |r| r.mean_batch),
    );
}

fn main() -> anyhow::Result<()> {
    let data = Data::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/digits8x8"))?;
    println!(
        "{:>9} {:>7} {:>9} {:>12} {:>9} {:>11} {:>11}",
        "batch", "rate", "reached", "simulated s", "samples", "accuracy %", "mean batch"
    );
    let mut fixed = Vec::new();
    for size in FIXED {
        let (rate, mut runs) = tuned(&data, size)?;
        let ended = size == BASE_BATCH;
        if ended {
            // The same runs, but to the end, for the final accuracy.
            runs = all_seeds(&data, Batch::Fixed { size, rate }, true)?;
        }
        let shown = format!("{rate:.3}");
        row(
            &size.to_string(),
            &shown,
            &runs,
            ended.then_some(runs.as_slice()),
        );
        fixed.push((size, runs));
    }
    let runs = all_seeds(&data, Batch::Adaptive, true)?;
    row("adaptive", "rule", &runs, Some(&runs));

    let (_, small) = &fixed[0];
    let (_, large) = &fixed[FIXED.len() - 1];
    let (best, fastest) = fixed
        .iter()
        .filter(|(_, runs)| reached(runs) == SEEDS as usize)
        .min_by(|a, b| mean(&a.1, |r| r.seconds.ln()).total_cmp(&mean(&b.1, |r| r.seconds.ln())))
        .ok_or_else(|| anyhow::anyhow!("no fixed batch reached the target on every seed"))?;
    println!(
        "\ntime and samples to {:.1} % (geometric means), paired over seeds, 95 % intervals in brackets",
        100.0 * TARGET
    );
    let (sooner, low, high) = ratio(small, &runs, |r| r.seconds);
    println!("time, fixed 16 / adaptive: {sooner:.2} ({low:.2} .. {high:.2}), asked: at least 5");
    let (slower, low, high) = ratio(&runs, fastest, |r| r.seconds);
    println!(
        "time, adaptive / best tuned fixed ({best}): {slower:.2} ({low:.2} .. {high:.2}), asked: at most 1.1"
    );
    let (fewer, low, high) = ratio(&runs, large, |r| r.samples as f64);
    println!(
        "samples, adaptive / fixed 1024: {fewer:.2} ({low:.2} .. {high:.2}), asked: at most 0.6"
    );
    let differences: Vec<f64> = runs
        .iter()
        .zip(small)
        .map(|(a, f)| 100.0 * (a.accuracy - f.accuracy))
        .collect();
    let (points, half) = interval(&differences);
    println!(
        "final accuracy, adaptive - fixed 16: {points:+.2} +- {half:.2} points, asked: at least -0.5"
    );
    let all = reached(&runs) == SEEDS as usize;
    anyhow::ensure!(
        all,
        "only {} of {SEEDS} adaptive runs reached the target",
        reached(&runs)
    );
    let missed = [sooner < 5.0, slower > 1.1, fewer > 0.6, points < -0.5];
    let missed = missed.iter().filter(|m| **m).count();
    anyhow::ensure!(missed == 0, "{missed} of the 4 figures were missed");
    Ok(())
}
