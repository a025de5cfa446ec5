//! A pipeline holds no more activations than its schedule says.

#![allow(
    unsafe_code,
    reason = "an allocator that counts can only be written so"
)]

mod blocks;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use blocks::{SEED, Task, even, gpt_of, samples};
use burn::tensor::Device;
use iidp::hybrid::{HybridWorkload, ScheduleKind, init_whole};
use iidp::models::BlockGptConfig;
use iidp::pipeline::{Activation, StageContext, StageModule};
use iidp::tensor_parallel::TensorParallel;
use iidp::{HybridConfig, MicroBatch, Mode, ParallelDims};

/// The system's allocator, with the bytes that are in use and the most that were.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const STAGES: usize = 4;
const MICRO_BATCHES: usize = 8;
const SAMPLES: usize = 4;

/// Much activation for few weights: seven blocks after the embedding, two per stage.
fn task() -> Task<BlockGptConfig> {
    gpt_of(BlockGptConfig::new(24, 12, 6, 24, 12).with_hidden(48))
}

/// Bytes that the graph of one micro-batch keeps on each stage, its received input included.
fn graph_bytes(task: &Task<BlockGptConfig>) -> Vec<usize> {
    let device = Device::flex().autodiff();
    let whole = init_whole(&task.model, &device, SEED).unwrap();
    let ids = samples(0, SAMPLES);
    let batch = MicroBatch::new(&ids, Mode::Train);
    let context = StageContext {
        batch,
        group: &TensorParallel::alone(),
    };
    let mut x = task.input(&batch, &device).unwrap();
    let mut kept = Vec::new();
    let bytes = (0..STAGES)
        .map(|stage| {
            let before = LIVE.load(Ordering::SeqCst);
            if stage > 0 {
                // As a message brings it: a tensor of its own, without the graph of the stage before.
                let plain = x
                    .clone()
                    .into_tensor::<3>()
                    .unwrap()
                    .inner()
                    .mul_scalar(1.0);
                x = Activation::new(burn::tensor::Tensor::<3>::from_inner(plain).require_grad());
            }
            for block in &whole.blocks()[2 * stage..2 * stage + 2] {
                x = block.forward(x.clone(), &context).unwrap();
            }
            if stage + 1 == STAGES {
                let loss = task.loss(x.clone(), &context).unwrap();
                x = Activation::new(loss);
            }
            kept.push(x.clone());
            LIVE.load(Ordering::SeqCst) - before
        })
        .collect();
    drop(kept);
    bytes
}

/// Bytes that a step needs beyond what lies there before it.
fn peak_of_step(config: HybridConfig) -> usize {
    let mut executor = config.init(task()).unwrap();
    let size = executor.global_batch();
    let mut peaks = Vec::new();
    for step in 0..4 {
        let batch = samples(step, size);
        let before = LIVE.load(Ordering::SeqCst);
        PEAK.store(before, Ordering::SeqCst);
        executor.step(&batch, 1e-3).unwrap();
        peaks.push(PEAK.load(Ordering::SeqCst) - before);
    }
    // The first step fills caches.
    peaks[1..].iter().copied().max().unwrap_or_default()
}

#[test]
fn the_peak_is_within_the_schedules_bound() {
    let graphs = graph_bytes(&task());
    let of =
        || even(ParallelDims::new(1, 1, STAGES), SAMPLES, MICRO_BATCHES).with_cuts(vec![2, 4, 6]);
    let bound = |kind: ScheduleKind| -> usize {
        let schedule = kind.schedule(STAGES, MICRO_BATCHES).unwrap();
        (0..STAGES)
            .map(|rank| schedule.peak_in_flight(rank) * graphs[rank])
            .sum()
    };
    let kib = |bytes: usize| bytes as f64 / 1024.0;
    let mut peaks = Vec::new();
    for kind in [ScheduleKind::OneForwardOneBackward, ScheduleKind::Gpipe] {
        let (peak, bound) = (peak_of_step(of().with_schedule(kind)), bound(kind));
        let ratio = peak as f64 / bound as f64;
        assert!(
            ratio <= 1.1,
            "{kind:?}: peak {:.0} KiB, bound {:.0} KiB, ratio {ratio:.3}",
            kib(peak),
            kib(bound)
        );
        assert!(
            ratio > 0.5,
            "{kind:?}: the bound says little, ratio {ratio:.3}"
        );
        peaks.push(peak);
    }
    assert!(
        peaks[0] < peaks[1],
        "1F1B {} KiB, GPipe {} KiB",
        kib(peaks[0]),
        kib(peaks[1])
    );
    let recomputed = peak_of_step(of().with_recompute(true));
    assert!(
        recomputed < peaks[0],
        "with recompute {:.0} KiB, without {:.0} KiB",
        kib(recomputed),
        kib(peaks[0])
    );
}
