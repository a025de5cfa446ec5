//! Evaluates the forecasters one epoch ahead on batch-size trajectories derived from measured gradient noise.
//!
//! `cargo run --release -p adaptive-batch --example forecast_traces -- FOLDER` reads every `*/validation-BATCH.csv` below
//! the folder with the columns `progress,iteration,metric,grad_sqr,grad_var` (one row per epoch). The target batch of an epoch is
//! a multiple of the noise scale `BATCH * grad_var / grad_sqr`, which forecasts of a logarithm do not depend on. A controller sets it from
//! smoothed moments (`EmaEstimator`), so that is the trajectory: both moments averaged with decay 0.5, and 0.8, per epoch. The raw
//! ratio, one noisy measurement per epoch, is reported as well.
//!
//! The forecasters' constants were chosen on every other series of a workload (in the order of `BATCH`, from the first on); the
//! rest is held out, and the two halves are reported apart.

use std::error::Error;
use std::path::{Path, PathBuf};

use adaptive_batch::{DampedHolt, Ensemble, Forecaster, GaussianProcess, Persistence};

/// Epochs that are only learned from.
const WARM_UP: usize = 4;

/// One file: its name, measured batch, and place among its workload's files.
struct Series {
    path: PathBuf,
    name: String,
    batch: u32,
    place: usize,
}

/// What a half of the series adds up to.
#[derive(Default)]
struct Summary {
    series: f64,
    /// MAPE relative to persistence, of each forecaster.
    relative: [f64; 4],
    /// The ensemble's MAPE relative to its best member.
    to_best: f64,
    worst_to_best: f64,
    inside: usize,
    forecasts: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args()
        .nth(1)
        .ok_or("usage: forecast_traces FOLDER")?;
    let series = find(Path::new(&folder))?;
    for (label, decay) in [
        ("raw", 0.0),
        ("smoothed, decay 0.5", 0.5),
        ("smoothed, decay 0.8", 0.8),
    ] {
        evaluate(&series, label, decay)?;
    }
    Ok(())
}

/// All files, by workload and batch.
fn find(folder: &Path) -> Result<Vec<Series>, Box<dyn Error>> {
    let mut workloads: Vec<_> = std::fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    workloads.sort_by_key(std::fs::DirEntry::file_name);
    let mut all = Vec::new();
    for workload in workloads {
        let mut files = Vec::new();
        for file in std::fs::read_dir(workload.path())? {
            let file = file?;
            let name = file.file_name().to_string_lossy().into_owned();
            let batch = name
                .strip_prefix("validation-")
                .and_then(|n| n.strip_suffix(".csv"));
            if let Some(batch) = batch {
                files.push(Series {
                    path: file.path(),
                    name: format!("{}/{name}", workload.file_name().to_string_lossy()),
                    batch: batch.parse()?,
                    place: 0,
                });
            }
        }
        files.sort_by_key(|f| f.batch);
        for (place, file) in files.iter_mut().enumerate() {
            file.place = place;
        }
        all.extend(files);
    }
    Ok(all)
}

#[expect(clippy::print_stdout, reason = "the program's output")]
fn evaluate(all: &[Series], label: &str, decay: f64) -> Result<(), Box<dyn Error>> {
    println!(
        "\n{label}\n{:<28} {:>6} {:>8} {:>8} {:>8} {:>8}  ensemble's 80 % interval",
        "series (* held out)", "epochs", "persist", "holt", "gp", "ensemble"
    );
    let mut halves = [Summary::default(), Summary::default()];
    for file in all {
        let series = read(&file.path, f64::from(file.batch), decay)?;
        let mut forecasters: [Box<dyn Forecaster>; 4] = [
            Box::new(Persistence::new()),
            Box::new(DampedHolt::new()),
            Box::new(GaussianProcess::new()),
            Box::new(Ensemble::standard()),
        ];
        let mut errors = [0.0; 4];
        let (mut hits, mut count) = (0, 0);
        for (epoch, &target) in series.iter().enumerate() {
            for (i, forecaster) in forecasters.iter_mut().enumerate() {
                if epoch >= WARM_UP {
                    let forecast = forecaster.forecast(&[epoch as u64])?[0];
                    errors[i] += (forecast.batch / target as f64 - 1.0).abs();
                    if i == 3 {
                        let interval = forecast.lower..=forecast.upper;
                        count += 1;
                        hits += usize::from(interval.contains(&(target as f64)));
                    }
                }
                forecaster.observe(epoch as u64, target)?;
            }
        }
        let mape = errors.map(|e| e / count as f64);
        let summary = &mut halves[file.place % 2];
        for (relative, m) in summary.relative.iter_mut().zip(mape) {
            *relative += m / mape[0];
        }
        let to_best = mape[3] / mape[..3].iter().copied().fold(f64::INFINITY, f64::min);
        summary.to_best += to_best;
        summary.worst_to_best = summary.worst_to_best.max(to_best);
        summary.series += 1.0;
        summary.inside += hits;
        summary.forecasts += count;
        println!(
            "{:<28} {:>6} {:>8.4} {:>8.4} {:>8.4} {:>8.4}  {:.0} %",
            format!(
                "{}{}",
                file.name,
                if file.place % 2 == 1 { " *" } else { "" }
            ),
            series.len(),
            mape[0],
            mape[1],
            mape[2],
            mape[3],
            100.0 * hits as f64 / count as f64
        );
    }
    for (half, s) in ["chosen on", "held out"].into_iter().zip(&halves) {
        println!(
            "{half}: MAPE relative to persistence, mean of {} series: holt {:.3}, gp {:.3}, ensemble {:.3}; ensemble / best member: \
             mean {:.3}, worst {:.3}; coverage {:.1} %",
            s.series,
            s.relative[1] / s.series,
            s.relative[2] / s.series,
            s.relative[3] / s.series,
            s.to_best / s.series,
            s.worst_to_best,
            100.0 * s.inside as f64 / s.forecasts as f64
        );
    }
    Ok(())
}

/// Target batches of one file, one per epoch.
fn read(path: &Path, batch: f64, decay: f64) -> Result<Vec<u64>, Box<dyn Error>> {
    let text = std::fs::read_to_string(path)?;
    let mut targets = Vec::new();
    let (mut sqr, mut var) = (0.0, 0.0);
    for (number, line) in text.lines().enumerate().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let [_, _, _, grad_sqr, grad_var] = fields[..] else {
            return Err(format!(
                "{}:{}: expected 5 columns, got {}",
                path.display(),
                number + 1,
                fields.len()
            )
            .into());
        };
        sqr = decay * sqr + (1.0 - decay) * grad_sqr.parse::<f64>()?;
        var = decay * var + (1.0 - decay) * grad_var.parse::<f64>()?;
        targets.push((batch * var / sqr).clamp(1.0, 1e12).round() as u64);
    }
    Ok(targets)
}
