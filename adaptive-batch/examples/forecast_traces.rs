//! Evaluates the forecasters one epoch ahead on batch-size trajectories derived from measured gradient noise.
//!
//! `cargo run --release -p adaptive-batch --example forecast_traces -- FOLDER` reads every `*/validation-BATCH.csv` below
//! the folder with the columns `progress,iteration,metric,grad_sqr,grad_var` (one row per epoch), and takes
//! `BATCH * grad_var / grad_sqr`, a multiple of the noise scale, for the target batch. Series are used as they are
//! (`raw`) and with both moments smoothed as `EmaEstimator` does it (`smoothed`).

use std::error::Error;
use std::path::Path;

use adaptive_batch::{DampedHolt, Ensemble, Forecaster, GaussianProcess, Persistence};

/// Epochs that are only learned from.
const WARM_UP: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args()
        .nth(1)
        .ok_or("usage: forecast_traces FOLDER")?;
    for (label, decay) in [
        ("raw", 0.0),
        ("smoothed, decay 0.5", 0.5),
        ("smoothed, decay 0.8", 0.8),
    ] {
        evaluate(Path::new(&folder), label, decay)?;
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the program's output")]
fn evaluate(folder: &Path, label: &str, decay: f64) -> Result<(), Box<dyn Error>> {
    println!(
        "\n{label}\n{:<28} {:>6} {:>8} {:>8} {:>8} {:>8}  ensemble's 80 % interval",
        "series", "epochs", "persist", "holt", "gp", "ensemble"
    );
    let mut workloads: Vec<_> = std::fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    workloads.sort_by_key(std::fs::DirEntry::file_name);
    let mut relative = [0.0; 4];
    let mut totals = [0.0; 4];
    let (mut series_count, mut inside, mut forecasts) = (0.0, 0, 0);
    for workload in workloads {
        let mut files: Vec<_> = std::fs::read_dir(workload.path())?.collect::<Result<_, _>>()?;
        files.sort_by_key(std::fs::DirEntry::file_name);
        for file in files {
            let name = file.file_name().to_string_lossy().into_owned();
            let Some(batch) = name
                .strip_prefix("validation-")
                .and_then(|n| n.strip_suffix(".csv"))
            else {
                continue;
            };
            let series = read(&file.path(), batch.parse()?, decay)?;
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
                            count += 1;
                            hits += usize::from(
                                (forecast.lower..=forecast.upper).contains(&(target as f64)),
                            );
                        }
                    }
                    forecaster.observe(epoch as u64, target)?;
                }
            }
            let mape = errors.map(|e| e / f64::from(count));
            for i in 0..4 {
                relative[i] += mape[i] / mape[0];
                totals[i] += mape[i];
            }
            series_count += 1.0;
            inside += hits;
            forecasts += count as usize;
            println!(
                "{:<28} {:>6} {:>8.4} {:>8.4} {:>8.4} {:>8.4}  {:.0} %",
                format!("{}/{name}", workload.file_name().to_string_lossy()),
                series.len(),
                mape[0],
                mape[1],
                mape[2],
                mape[3],
                100.0 * hits as f64 / f64::from(count)
            );
        }
    }
    println!(
        "mean MAPE {:?}, relative to persistence: of the means {:?}, mean of the ratios {:?}; coverage {:.1} %",
        totals.map(|t| (t / series_count * 1e4).round() / 1e4),
        totals.map(|t| (t / totals[0] * 1e3).round() / 1e3),
        relative.map(|r| (r / series_count * 1e3).round() / 1e3),
        100.0 * inside as f64 / forecasts as f64
    );
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
