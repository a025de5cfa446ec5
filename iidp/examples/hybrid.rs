//! One GPT, one stream of batches, many layouts over data, tensor and pipeline parallelism: a table of what each of them gives.
//!
//! ```text
//! cargo run --release -p iidp --example hybrid
//! ```
//!
//! Ranks are threads of this process, so the step times of layouts with more ranks than cores only show that nothing is lost; with a core per rank they would fall.

#![allow(clippy::print_stdout, reason = "an example")]

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData};
use iidp::hybrid::{HybridWorkload, ScheduleKind};
use iidp::models::BlockGptConfig;
use iidp::pipeline::{Activation, StageContext};
use iidp::{BoxError, Error, HybridConfig, MicroBatch, ParallelDims, WorkerLayout};

const TOKENS: usize = 32;
const VOCABULARY: usize = 48;
const STEPS: usize = 20;
const MICRO_BATCHES: usize = 8;

/// Predicts the next number of a sequence that a sample's id determines.
struct Sequences {
    model: BlockGptConfig,
}

impl Sequences {
    fn ids(batch: &MicroBatch<'_>, offset: u64) -> Vec<i32> {
        let token = |id: u64, i: u64| {
            let at = id + i + offset;
            (at * at / 7 + at) % VOCABULARY as u64
        };
        let of = |id: &u64| {
            let id = *id;
            (0..TOKENS as u64).map(move |i| token(id, i) as i32)
        };
        batch.samples.iter().flat_map(of).collect()
    }
}

impl HybridWorkload for Sequences {
    type Model = BlockGptConfig;

    fn model(&self) -> &BlockGptConfig {
        &self.model
    }

    fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError> {
        let ids: Vec<f32> = Self::ids(batch, 0)
            .into_iter()
            .map(|id| id as f32)
            .collect();
        let data = TensorData::new(ids, [batch.samples.len(), TOKENS]);
        Ok(Activation::new(Tensor::<2>::from_data(data, device)))
    }

    fn loss(&self, output: Activation, context: &StageContext<'_>) -> Result<Tensor<1>, BoxError> {
        let ids = Self::ids(&context.batch, 1);
        let data = TensorData::new(ids, [context.batch.samples.len(), TOKENS]);
        let targets = Tensor::<2, Int>::from_data(data, &output.device());
        Ok(BlockGptConfig::loss(output, targets, context.group)?)
    }
}

/// A layout of the table: its name, and the settings.
fn layouts() -> Vec<(&'static str, HybridConfig)> {
    let even = |dp, tp, pp| {
        let each = WorkerLayout::new(2, 1, MICRO_BATCHES / dp);
        HybridConfig::new(ParallelDims::new(dp, tp, pp), vec![each; dp])
    };
    let uneven = |dp, tp, pp, replicas: &[(usize, usize)]| {
        let layouts = replicas
            .iter()
            .map(|(v, a)| WorkerLayout::new(2, *v, *a))
            .collect();
        HybridConfig::new(ParallelDims::new(dp, tp, pp), layouts)
    };
    let interleaved = ScheduleKind::Interleaved { chunks: 2 };
    vec![
        ("one device", even(1, 1, 1)),
        ("", even(2, 1, 1)),
        ("", even(1, 2, 1)),
        ("", even(1, 3, 1)),
        (
            "sequence parallel",
            even(1, 4, 1).with_sequence_parallel(true),
        ),
        ("1F1B", even(1, 1, 2)),
        ("GPipe", even(1, 1, 2).with_schedule(ScheduleKind::Gpipe)),
        ("interleaved", even(1, 1, 2).with_schedule(interleaved)),
        (
            "zero bubble H1",
            even(1, 1, 2).with_schedule(ScheduleKind::ZeroBubbleH1),
        ),
        (
            "uneven stages, recompute",
            even(1, 1, 3).with_cuts(vec![1, 4]).with_recompute(true),
        ),
        ("1F1B", even(1, 1, 4)),
        ("", even(2, 2, 1)),
        ("", even(1, 2, 2)),
        ("uneven replicas", uneven(2, 1, 2, &[(1, 6), (1, 2)])),
        (
            "virtual workers",
            uneven(3, 1, 1, &[(2, 2), (1, 3), (1, 1)]),
        ),
        ("everything", uneven(2, 2, 2, &[(2, 2), (1, 4)])),
    ]
}

/// Values by canonical name.
type Parameters = BTreeMap<String, Vec<f32>>;

fn main() -> Result<(), Error> {
    println!(
        "GPT: 4 layers, 48 channels, 12 heads, {VOCABULARY} tokens, tied; {MICRO_BATCHES} micro-batches of 2 x {TOKENS} tokens, {STEPS} steps\n"
    );
    println!(
        "{:>3} {:>3} {:>3}  {:<26} {:>9} {:>12} {:>9} {:>8} {:>10}",
        "dp", "tp", "pp", "", "loss", "difference", "step ms", "bubble", "KiB/step"
    );
    let mut first: Option<(Vec<f64>, Parameters)> = None;
    for (name, config) in layouts() {
        let model = BlockGptConfig::new(VOCABULARY, TOKENS, 4, 48, 12).with_tied(true);
        let mut executor = config
            .with_clip_norm(1.0)
            .with_seed(7)
            .init(Sequences { model })?;
        let dims = executor.dims();
        let size = executor.global_batch();
        let mut losses = Vec::new();
        let (mut times, mut bubbles, mut bytes) = (Vec::new(), Vec::new(), 0);
        for step in 0..STEPS {
            let ids: Vec<u64> = (0..size)
                .map(|i| (step * size + i) as u64 * 13 % 1009)
                .collect();
            let output = executor.step(&ids, 3e-3)?;
            losses.push(output.loss);
            times.push(output.total.as_secs_f64() * 1e3);
            bubbles.push(output.bubble());
            bytes = output.bytes_sent();
        }
        let state = executor.state()?;
        let parameters: Parameters = state
            .parameters
            .into_iter()
            .map(|(name, parameter)| (name, parameter.values))
            .collect();
        let (reference, expected) =
            first.get_or_insert_with(|| (losses.clone(), parameters.clone()));
        let mut worst = losses
            .iter()
            .zip(reference.iter())
            .map(|(a, b)| (a - b).abs() / b)
            .fold(0.0, f64::max);
        for (name, values) in &parameters {
            let size = expected[name].iter().fold(0.0_f32, |s, x| s.max(x.abs()));
            for (a, b) in values.iter().zip(&expected[name]) {
                worst = worst.max(f64::from((a - b).abs() / size.max(1e-3)));
            }
        }
        times.sort_by(f64::total_cmp);
        bubbles.sort_by(f64::total_cmp);
        println!(
            "{:>3} {:>3} {:>3}  {name:<26} {:>9.5} {worst:>12.1e} {:>9.1} {:>7.0}% {:>10.0}",
            dims.dp,
            dims.tp,
            dims.pp,
            losses[STEPS - 1],
            times[STEPS / 2],
            bubbles[STEPS / 2] * 100.0,
            bytes as f64 / 1024.0,
        );
    }
    println!(
        "\nloss: of step {STEPS}; difference: greatest relative difference of any loss or parameter (relative to its tensor's largest) from one device"
    );
    Ok(())
}
