//! iidp, hybrid layouts: a pipeline's steps against the critical path of its schedule, and what tensor parallelism costs.
//!
//! ```text
//! cargo bench --bench iidp_hybrid
//! ```
//!
//! The critical path is the schedule played with the measured duration of each task: what the step would take if messages, bookkeeping and waking up took no
//! time. Ranks are threads with one compute thread each; on fewer cores than ranks tasks slow each other down, which the measured durations contain.
//! With `-- --test` everything runs once, with a small model.

#![allow(clippy::print_stdout, reason = "the bench prints its table")]

use burn::tensor::{Device, Int, Tensor, TensorData};
use iidp::hybrid::{HybridOutput, HybridWorkload, ScheduleKind};
use iidp::models::BlockGptConfig;
use iidp::pipeline::{Activation, StageContext, Task};
use iidp::{BoxError, Error, HybridConfig, MicroBatch, ParallelDims, WorkerLayout};

struct Text {
    model: BlockGptConfig,
    tokens: usize,
}

impl Text {
    fn ids(&self, batch: &MicroBatch<'_>, offset: u64) -> Vec<i32> {
        let tokens = self.tokens as u64;
        let of = |id: &u64| {
            let id = *id;
            (0..tokens).map(move |i| ((id + i + offset).pow(2) / 7 % 64) as i32)
        };
        batch.samples.iter().flat_map(of).collect()
    }
}

impl HybridWorkload for Text {
    type Model = BlockGptConfig;

    fn model(&self) -> &BlockGptConfig {
        &self.model
    }

    fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError> {
        let ids: Vec<f32> = self.ids(batch, 0).into_iter().map(|id| id as f32).collect();
        let data = TensorData::new(ids, [batch.samples.len(), self.tokens]);
        Ok(Activation::new(Tensor::<2>::from_data(data, device)))
    }

    fn loss(&self, output: Activation, context: &StageContext<'_>) -> Result<Tensor<1>, BoxError> {
        let ids = self.ids(&context.batch, 1);
        let data = TensorData::new(ids, [context.batch.samples.len(), self.tokens]);
        let targets = Tensor::<2, Int>::from_data(data, &output.device());
        Ok(BlockGptConfig::loss(output, targets, context.group)?)
    }
}

/// Seconds of the critical path of a step's schedule, played with the durations that were measured in it.
fn critical_path(
    kind: ScheduleKind,
    dims: ParallelDims,
    micro_batches: usize,
    output: &HybridOutput,
) -> Result<f64, Error> {
    let schedule = kind.schedule(dims.pp, micro_batches)?;
    let duration = |stage: usize, task: Task| {
        let rank = output
            .ranks
            .iter()
            .find(|rank| rank.coordinates.pp == stage);
        rank.and_then(|rank| rank.tasks[0].iter().find(|timing| timing.task == task))
            .map_or(0.0, |timing| timing.duration.as_secs_f64())
    };
    Ok(schedule.timing(duration, 0.0)?.makespan)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Error> {
    let smoke = std::env::args().any(|argument| argument == "--test");
    let (steps, layers, width, tokens) = if smoke {
        (1, 2, 16, 8)
    } else {
        (15, 6, 128, 128)
    };
    let micro_batches = 8;
    println!(
        "GPT {layers} x {width}, {tokens} tokens, {micro_batches} micro-batches of 4 samples; medians of {steps} steps, {} cores",
        std::thread::available_parallelism().map_or(0, std::num::NonZero::get)
    );
    println!(
        "{:<34} {:>9} {:>11} {:>14} {:>7} {:>7} {:>10}",
        "layout", "step ms", "compute ms", "critical path", "ratio", "bubble", "KiB/step"
    );
    let pipeline = |pp, kind| (ParallelDims::new(1, 1, pp), kind);
    let rows = [
        pipeline(1, ScheduleKind::OneForwardOneBackward),
        pipeline(2, ScheduleKind::Gpipe),
        pipeline(2, ScheduleKind::OneForwardOneBackward),
        pipeline(2, ScheduleKind::Interleaved { chunks: 2 }),
        pipeline(2, ScheduleKind::ZeroBubbleH1),
        pipeline(4, ScheduleKind::OneForwardOneBackward),
        (
            ParallelDims::new(2, 1, 1),
            ScheduleKind::OneForwardOneBackward,
        ),
        (
            ParallelDims::new(1, 2, 1),
            ScheduleKind::OneForwardOneBackward,
        ),
    ];
    for (dims, kind) in rows {
        let each = micro_batches / dims.dp;
        let model = BlockGptConfig::new(64, tokens, layers, width, 4);
        let layouts = vec![WorkerLayout::new(4, 1, each); dims.dp];
        let mut executor = HybridConfig::new(dims, layouts)
            .with_schedule(kind)
            .init(Text { model, tokens })?;
        let size = executor.global_batch();
        let (mut totals, mut computes, mut paths, mut ratios, mut bubbles) =
            (vec![], vec![], vec![], vec![], vec![]);
        let mut bytes = 0;
        for step in 0..=steps {
            let ids: Vec<u64> = (0..size).map(|i| (step * size + i) as u64).collect();
            let output = executor.step(&ids, 1e-3)?;
            if step == 0 && !smoke {
                continue;
            }
            let compute = output
                .ranks
                .iter()
                .map(|rank| rank.compute.as_secs_f64())
                .fold(0.0, f64::max);
            let path = critical_path(kind, dims, each, &output)?;
            totals.push(output.total.as_secs_f64() * 1e3);
            computes.push(compute * 1e3);
            paths.push(path * 1e3);
            ratios.push(compute / path);
            bubbles.push(output.bubble() * 100.0);
            bytes = output.bytes_sent();
        }
        let name = format!("dp {} tp {} pp {} {kind:?}", dims.dp, dims.tp, dims.pp);
        println!(
            "{:<34} {:>9.1} {:>11.1} {:>14.1} {:>7.3} {:>6.0}% {:>10.0}",
            name.replace("OneForwardOneBackward", "1F1B"),
            median(totals),
            median(computes),
            median(paths),
            median(ratios),
            median(bubbles),
            bytes as f64 / 1024.0
        );
    }
    Ok(())
}
