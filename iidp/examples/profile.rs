//! Profiles steps and all-reduces on this machine, and checks the predictions on layouts that were not profiled.
//!
//! ```text
//! cargo run --release -p iidp --example profile -- [table.csv]
//! ```
//!
//! With a path it writes the steps as a table that hp-planner's `Profile` reads.

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::error::Error;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use iidp::models::{Gpt, GptConfig};
use iidp::profiler::AllReduceSample;
use iidp::{BoxError, LocalCommunicator, MicroBatch, Profiler, WorkerLayout, Workload};

const VOCABULARY: usize = 65;
const CONTEXT: usize = 64;
const LAYERS: usize = 2;
const WIDTH: usize = 64;
const HEADS: usize = 4;

/// Next-token prediction on a text that a formula gives.
#[derive(Debug)]
struct Formula;

impl Workload for Formula {
    type Model = Gpt;

    fn init(&self, device: &Device) -> Result<Gpt, BoxError> {
        Ok(GptConfig::new(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS).init(device)?)
    }

    fn loss(
        &self,
        model: &Gpt,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let text = |start: u64| -> Vec<u8> {
            (start..=start + CONTEXT as u64)
                .map(|i| ((i * i / 7 + i) % VOCABULARY as u64) as u8)
                .collect()
        };
        let windows: Vec<Vec<u8>> = batch.samples.iter().map(|sample| text(*sample)).collect();
        let windows: Vec<&[u8]> = windows.iter().map(Vec::as_slice).collect();
        Ok(model.batch_loss(&windows, batch, device)?)
    }
}

/// Prints a prediction beside what it is measured to be, and returns the relative error.
fn compare(what: &str, predicted: f64, measured: f64) -> f64 {
    let error = predicted / measured - 1.0;
    println!(
        "{what:<40} {:>9.3} {:>9.3} {:>+7.1}",
        predicted * 1e3,
        measured * 1e3,
        error * 100.0
    );
    error.abs()
}

/// The all-reduces of two threads, as rank 0 measures them.
fn all_reduces(profiler: Profiler, bytes: &[usize]) -> Result<Vec<AllReduceSample>, iidp::Error> {
    let ends = LocalCommunicator::group(2, Duration::from_mins(1))?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ends
            .into_iter()
            .map(|end| scope.spawn(move || profiler.all_reduces(&end, bytes)))
            .collect();
        let mut results = Vec::new();
        for thread in threads {
            results.push(thread.join().expect("no panic")?);
        }
        Ok(results.swap_remove(0))
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let layouts = |rows: &[(usize, usize, usize)]| -> Vec<WorkerLayout> {
        rows.iter()
            .map(|&(b, v, a)| WorkerLayout::new(b, v, a))
            .collect()
    };
    let profiled = layouts(&[
        (1, 1, 1),
        (4, 1, 1),
        (16, 1, 1),
        (4, 1, 3),
        (8, 1, 2),
        (2, 2, 1),
        (8, 2, 1),
        (16, 2, 1),
        (8, 2, 2),
    ]);
    let others = layouts(&[
        (2, 1, 1),
        (8, 1, 1),
        (12, 1, 1),
        (2, 1, 4),
        (4, 2, 1),
        (12, 2, 1),
        (4, 2, 2),
    ]);
    let samples: Vec<u64> = (0..64).map(|i| i * 97).collect();
    let profiler = Profiler::new(3, 15)?;

    let mut profile = profiler.steps(Formula, |config| config, &samples, &profiled)?;
    profile.all_reduces = all_reduces(profiler, &[1 << 16, 1 << 20, 1 << 22, 1 << 24])?;

    println!(
        "{:<40} {:>9} {:>9} {:>7}",
        "", "predicted", "measured", "error"
    );
    println!("{:<40} {:>9} {:>9} {:>7}", "not profiled", "ms", "ms", "%");
    let mut worst = 0.0f64;
    for step in profiler
        .steps(Formula, |config| config, &samples, &others)?
        .steps
    {
        let WorkerLayout {
            local_batch,
            virtual_workers,
            accumulation_steps,
        } = step.layout;
        let what = format!(
            "step, {virtual_workers} x {accumulation_steps} micro-batches of {local_batch}"
        );
        let predicted = profile
            .step_seconds(step.layout)
            .ok_or("this number of workers was not profiled")?;
        worst = worst.max(compare(&what, predicted, step.seconds));
    }
    for reduced in all_reduces(profiler, &[1 << 18, 1 << 21, 1 << 23])? {
        let what = format!("all-reduce of {} KiB over 2 threads", reduced.bytes >> 10);
        let predicted = profile
            .all_reduce_seconds(reduced.bytes)
            .ok_or("no all-reduces were profiled")?;
        compare(&what, predicted, reduced.seconds);
    }
    println!("largest error of a step: {:.1} %", worst * 100.0);

    if let Some(path) = std::env::args().nth(1) {
        let model = [
            ("model", "formula".to_owned()),
            ("layers", LAYERS.to_string()),
            ("hidden", WIDTH.to_string()),
            ("heads", HEADS.to_string()),
            ("vocab", VOCABULARY.to_string()),
            ("seq", CONTEXT.to_string()),
        ];
        let mut file = std::fs::File::create(&path)?;
        profile.write_planner_rows(&mut file, "cpu", &model)?;
        println!("wrote {path}");
    }
    Ok(())
}
