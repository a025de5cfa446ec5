//! Re-sharding a model's state between layouts in memory, against copying the same bytes.
//!
//! ```sh
//! cargo bench --bench iidp_reshard                          # 1 GiB of parameters and moments, a minute
//! cargo bench --bench iidp_reshard -- --test                # once, 4 MiB
//! ```
//!
//! Prints one line per pair of layouts. `copy` copies as many bytes as the plan moves, between ranks and within them, from memory that is there to memory that is new, on as many threads as there are
//! cores; `in process` is `ReshardPlan::apply_in_process`; `messages` is `ReshardPlan::apply` on one thread per rank. Times are medians; the new memory's first touch is part of all of them.

#![allow(clippy::print_stdout, reason = "a table is what this program is for")]

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use iidp::reshard::{ModelSpec, RankState, ReshardPlan, StateLayout, TensorSpec};
use iidp::{Error, LocalCommunicator, ParallelDims, ShardSpec};

const MIB: f64 = 1024.0 * 1024.0;

/// A GPT's tensors with the two moments of Adam: `16 width^2 + ..` elements per block.
fn gpt(blocks: usize, width: usize) -> Result<Arc<ModelSpec>, Error> {
    let mut tensors = vec![TensorSpec::new(
        "tokens.weight",
        [8 * width, width],
        ShardSpec::split(0),
        0,
    )];
    for block in 0..blocks {
        let mut add = |name: &str, shape: &[usize], shard: ShardSpec| {
            let name = format!("blocks.{block}.{name}");
            tensors.push(TensorSpec::new(name, shape, shard, block));
        };
        let thirds = [width; 3];
        add("norm1.gamma", &[width], ShardSpec::Replicated);
        add(
            "qkv.weight",
            &[width, 3 * width],
            ShardSpec::split_sections(1, thirds),
        );
        add(
            "qkv.bias",
            &[3 * width],
            ShardSpec::split_sections(0, thirds),
        );
        add("projection.weight", &[width, width], ShardSpec::split(0));
        add("norm2.gamma", &[width], ShardSpec::Replicated);
        add("up.weight", &[width, 4 * width], ShardSpec::split(1));
        add("up.bias", &[4 * width], ShardSpec::split(0));
        add("down.weight", &[4 * width, width], ShardSpec::split(0));
    }
    ModelSpec::new(tensors, ["moment_1", "moment_2"]).map(Arc::new)
}

fn layout(
    model: &Arc<ModelSpec>,
    (dp, tp, pp): (usize, usize, usize),
    sharded: bool,
) -> Result<StateLayout, Error> {
    let stages: Vec<_> = (0..model.blocks())
        .map(|block| block * pp / model.blocks())
        .collect();
    let layout = StateLayout::mesh(model, ParallelDims::new(dp, tp, pp), &stages)?;
    if sharded {
        layout.with_sharded_moments()
    } else {
        Ok(layout)
    }
}

/// States of the right sizes whose memory has been touched.
fn states(layout: &StateLayout, world: usize) -> Vec<RankState> {
    let state = |rank: usize| {
        let Some(tensors) = layout.ranks().get(rank).map(|rank| rank.pieces.len()) else {
            return RankState::default();
        };
        let mut state = RankState::new(vec![1.0; layout.trained_elements(rank)], Vec::new())
            .with_steps(vec![1; tensors]);
        for name in layout.model().moments() {
            state = state.with_moment(name, vec![0.5; layout.moment_elements(rank)]);
        }
        state
    };
    (0..world).map(state).collect()
}

fn median(repeats: usize, mut measure: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<_> = (0..repeats).map(|_| measure()).collect();
    times.sort_unstable();
    times[repeats / 2]
}

/// Copies `bytes` into new memory.
fn copy(bytes: usize, repeats: usize) -> Duration {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let source = vec![1.0_f32; bytes / size_of::<f32>() / threads];
    median(repeats, || {
        let begin = Instant::now();
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| black_box(black_box(&source).clone()));
            }
        });
        begin.elapsed()
    })
}

fn over_threads(plan: &ReshardPlan, before: &[RankState]) -> Result<Duration, Error> {
    let group = LocalCommunicator::group(plan.world_size(), Duration::from_mins(1))?;
    let begin = Instant::now();
    let outcome: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = group
            .into_iter()
            .zip(before)
            .map(|(communicator, state)| scope.spawn(move || plan.apply(&communicator, state)))
            .collect();
        ranks
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect()
    });
    let time = begin.elapsed();
    for state in outcome {
        black_box(state.expect("no rank panics")?);
    }
    Ok(time)
}

fn main() -> Result<(), Error> {
    let smoke = std::env::args().any(|argument| argument == "--test");
    // 1 GiB: three buffers of 85 or 0.4 million elements.
    let (model, repeats) = if smoke {
        (gpt(4, 64)?, 1)
    } else {
        (gpt(24, 544)?, 5)
    };
    let bytes = 3 * 4 * model.elements();
    println!(
        "{:.0} MiB of parameters and moments in {} tensors",
        bytes as f64 / MIB,
        model.tensors().len()
    );
    println!(
        "{:<44} {:>9} {:>9} {:>8} {:>8} {:>16} {:>16}",
        "dp x tp x pp (z: moments sharded over dp)",
        "sent MiB",
        "kept MiB",
        "plan ms",
        "copy ms",
        "in process ms",
        "messages ms"
    );
    for (from, to) in [
        (((1, 1, 1), false), ((1, 2, 1), false)),
        (((1, 2, 1), false), ((1, 4, 1), false)),
        (((1, 1, 2), false), ((1, 1, 4), false)),
        (((1, 4, 1), false), ((1, 1, 4), false)),
        (((2, 2, 1), true), ((1, 2, 2), false)),
        (((2, 1, 2), true), ((4, 1, 1), true)),
        (((1, 2, 2), false), ((1, 1, 1), false)),
        (((2, 1, 1), false), ((4, 1, 1), false)),
    ] {
        let name = |((dp, tp, pp), sharded): ((usize, usize, usize), bool)| {
            format!("{dp} x {tp} x {pp}{}", if sharded { " z" } else { "" })
        };
        let (old, new) = (layout(&model, from.0, from.1)?, layout(&model, to.0, to.1)?);
        let planning = Instant::now();
        let plan = ReshardPlan::new(&old, &new)?;
        let planning = planning.elapsed();
        let before = states(&old, plan.world_size());
        let (sent, kept) = (plan.bytes_sent(), plan.bytes_kept());
        let base = copy(sent + kept, repeats);
        let mut failure = Ok(());
        let mut timed = |outcome: Result<Duration, Error>| {
            outcome.unwrap_or_else(|error| {
                failure = Err(error);
                Duration::MAX
            })
        };
        let direct = median(repeats, || {
            let begin = Instant::now();
            let after = plan.apply_in_process(&before);
            let time = begin.elapsed();
            timed(after.map(|after| drop(black_box(after))).map(|()| time))
        });
        let messages = median(repeats, || timed(over_threads(&plan, &before)));
        failure?;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let against = |time: Duration| format!("{:.0} ({:.2}x)", ms(time), ms(time) / ms(base));
        println!(
            "{:<44} {:>9.0} {:>9.0} {:>8.1} {:>8.0} {:>16} {:>16}",
            format!("{} to {}", name(from), name(to)),
            sent as f64 / MIB,
            kept as f64 / MIB,
            ms(planning),
            ms(base),
            against(direct),
            against(messages)
        );
    }
    Ok(())
}
