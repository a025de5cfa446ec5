//! What virtual workers cost in bytes, by an allocator that counts: activations and gradients, but no weights.

#![allow(
    unsafe_code,
    reason = "a global allocator is an unsafe trait; this one counts and passes every call on"
)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use iidp::models::{Gpt, GptConfig};
use iidp::{BoxError, ExecutorConfig, MicroBatch, Mode, WorkerLayout, Workload};

#[global_allocator]
static COUNTING: Counting = Counting;
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

impl Counting {
    fn grow(bytes: usize) {
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK.fetch_max(live, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the system allocator unchanged; the counting touches no memory but its own atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::grow(layout.size());
        // SAFETY: the caller's promise is the one that the system allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::grow(layout.size());
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `block` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Bytes above those that live now, at most, while `work` runs.
fn peak_of<T>(work: impl FnOnce() -> T) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = work();
    let peak = PEAK.load(Ordering::Relaxed);
    drop(result);
    peak - before
}

/// A model with many weights for its activations, so that a copy of the weights would show.
#[derive(Debug, Clone)]
struct WideGpt;

const VOCABULARY: usize = 64;
const CONTEXT: usize = 16;

impl Workload for WideGpt {
    type Model = Gpt;

    fn init(&self, device: &Device) -> Result<Gpt, BoxError> {
        Ok(GptConfig::new(VOCABULARY, CONTEXT, 3, 128, 4).init(device)?)
    }

    fn loss(
        &self,
        model: &Gpt,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let text = |start: u64| -> Vec<u8> {
            (start..=start + CONTEXT as u64)
                .map(|i| (i * i % VOCABULARY as u64) as u8)
                .collect()
        };
        let windows: Vec<Vec<u8>> = batch.samples.iter().map(|s| text(*s)).collect();
        let windows: Vec<&[u8]> = windows.iter().map(Vec::as_slice).collect();
        Ok(model.batch_loss(&windows, batch, device)?)
    }
}

#[test]
fn virtual_workers_cost_activations_and_gradients_but_no_weights() {
    // What one micro-batch takes of itself, on one thread as a worker has.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    let (weights, micro_batch) = pool.install(|| {
        let device = Device::flex().autodiff();
        let model = WideGpt.init(&device).unwrap();
        let compute = || {
            let loss = WideGpt.loss(&model, &MicroBatch::new(&[1], Mode::Train), &device);
            loss.unwrap().backward()
        };
        drop(compute());
        (4 * model.num_params(), peak_of(compute))
    });
    assert!(
        weights > 2_000_000 && micro_batch < 2 * weights,
        "{micro_batch} bytes of activations and gradients, {weights} of weights: a copy would not show"
    );
    let extra = |workers: usize| {
        let layout = WorkerLayout::new(1, workers, 1);
        let mut executor = ExecutorConfig::new(vec![layout]).init(WideGpt).unwrap();
        let samples: Vec<u64> = (0..workers as u64).collect();
        // The first steps make what stays: the view of the weights, the optimizer's moments, the workers' own buffers.
        for _ in 0..2 {
            executor.step(&samples, 1e-3).unwrap();
        }
        peak_of(|| executor.step(&samples, 1e-3).unwrap())
    };
    let (one, four) = (extra(1), extra(4));
    for (what, bytes, workers) in [
        ("4 workers take", four, 4),
        ("3 workers more take", four - one, 3),
    ] {
        assert!(
            bytes as f64 <= 1.02 * (workers * micro_batch) as f64,
            "{what} {bytes} bytes in a step, expected at most {workers} x {micro_batch} and 2 %"
        );
    }
}
