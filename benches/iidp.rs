//! iidp: training steps of a GPT against a plain Burn loop, the fused update, overlap of communication with compute; and the
//! parts that need no model (see `support/iidp_parts.rs`).
//!
//! Throughput is in tokens. Everything runs with one thread per worker; two ranks need two cores.

#[path = "support/iidp_parts.rs"]
mod parts;

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use burn::optim::{AdamWConfig as BurnAdamW, GradientsParams};
use burn::tensor::{Device, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use iidp::models::{Gpt, GptConfig};
use iidp::{
    BoxError, Communicator, Error, Executor, ExecutorConfig, LocalCommunicator, MicroBatch, Mode, WorkerLayout, Workload,
};

const VOCABULARY: usize = 65;
const LOCAL_BATCH: usize = 8;

/// Sizes of a GPT: layers, width, heads, context.
#[derive(Clone, Copy)]
struct Size {
    name: &'static str,
    layers: usize,
    width: usize,
    context: usize,
}

const SIZES: [Size; 2] = [
    Size { name: "2x64, context 64", layers: 2, width: 64, context: 64 },
    Size { name: "4x128, context 128", layers: 4, width: 128, context: 128 },
];

/// Next-token prediction on a text that a formula gives.
#[derive(Clone)]
struct Task(Size);

impl Workload for Task {
    type Model = Gpt;

    fn init(&self, device: &Device) -> Result<Gpt, BoxError> {
        let Size { layers, width, context, .. } = self.0;
        Ok(GptConfig::new(VOCABULARY, context, layers, width, 4).init(device)?)
    }

    fn loss(&self, model: &Gpt, batch: &MicroBatch<'_>, device: &Device) -> Result<Tensor<1>, BoxError> {
        let text = |start: u64| -> Vec<u8> {
            (start..=start + self.0.context as u64).map(|i| ((i * i / 7 + i) % VOCABULARY as u64) as u8).collect()
        };
        let windows: Vec<Vec<u8>> = batch.samples.iter().map(|sample| text(*sample)).collect();
        let windows: Vec<&[u8]> = windows.iter().map(Vec::as_slice).collect();
        Ok(model.batch_loss(&windows, batch, device)?)
    }
}

fn executor(task: Task, ranks: usize, workers: usize) -> Executor<Task> {
    ExecutorConfig::new(vec![WorkerLayout::new(LOCAL_BATCH, workers, 1); ranks]).init(task).expect("a valid layout")
}

fn samples(executor: &Executor<Task>) -> Vec<u64> {
    (0..executor.global_batch() as u64).map(|i| i * 97).collect()
}

fn steps(c: &mut Criterion) {
    for size in SIZES {
        let mut group = c.benchmark_group(format!("training step, GPT {}", size.name));
        group.sample_size(10).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(5));
        let tokens = |batch: usize| Throughput::Elements((batch * size.context) as u64);
        group.throughput(tokens(LOCAL_BATCH));
        group.bench_function("plain Burn loop", |b| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("one thread");
            pool.install(|| {
                let device = Device::flex().autodiff();
                let task = Task(size);
                let mut model = task.init(&device).expect("a valid model");
                let mut optimizer = BurnAdamW::new().init();
                let ids: Vec<u64> = (0..LOCAL_BATCH as u64).map(|i| i * 97).collect();
                b.iter(|| {
                    let batch = MicroBatch::new(&ids, Mode::Train);
                    let loss = task.loss(&model, &batch, &device).expect("a valid batch");
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(1e-3, model.clone(), gradients);
                    black_box(loss.into_scalar::<f32>())
                });
            });
        });
        for (name, ranks, workers) in [("1 rank", 1, 1), ("2 ranks", 2, 1), ("1 rank, 2 workers", 1, 2)] {
            let mut executor = executor(Task(size), ranks, workers);
            let ids = samples(&executor);
            group.throughput(tokens(ids.len()));
            group.bench_function(name, |b| b.iter(|| executor.step(&ids, 1e-3).expect("a good step").loss));
        }
        group.finish();
    }
}

/// The update alone: what `executor.step` reports for it, against Burn's `ModuleOptimizer`.
fn update(c: &mut Criterion) {
    let size = SIZES[1];
    let mut group = c.benchmark_group("AdamW update, GPT 4x128");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(4));
    group.bench_function("Burn's ModuleOptimizer", |b| {
        let device = Device::flex().autodiff();
        let task = Task(size);
        let mut model = task.init(&device).expect("a valid model");
        let mut optimizer = BurnAdamW::new().init();
        let ids = [0, 97];
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            for _ in 0..iterations {
                let loss = task.loss(&model, &MicroBatch::new(&ids, Mode::Train), &device).expect("a valid batch");
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                let start = Instant::now();
                model = optimizer.step(1e-3, model.clone(), gradients);
                total += start.elapsed();
            }
            total
        });
    });
    group.bench_function("executor", |b| {
        let config = ExecutorConfig::new(vec![WorkerLayout::new(2, 1, 1)]);
        let mut executor = config.init(Task(size)).expect("a valid layout");
        b.iter_custom(|iterations| {
            (0..iterations).map(|_| executor.step(&[0, 97], 1e-3).expect("a good step").timings.ranks[0].update).sum()
        });
    });
    group.finish();
}

/// A communicator whose all-reduces take at least so long per byte, as over a slow network.
#[derive(Debug)]
struct Slow {
    inner: Box<dyn Communicator>,
    seconds_per_byte: f64,
}

impl Communicator for Slow {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        self.inner.all_reduce_sum(data)?;
        std::thread::sleep(Duration::from_secs_f64(size_of_val(data) as f64 * self.seconds_per_byte));
        Ok(())
    }

    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.inner.all_reduce_sum_f64(data)
    }

    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error> {
        self.inner.reduce_scatter_sum(data)
    }

    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        self.inner.all_gather(data)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.inner.all_gather_bytes(bytes)
    }

    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        self.inner.broadcast(data, root)
    }

    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error> {
        self.inner.send(to, tag, data)
    }

    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        self.inner.recv(from, tag)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.inner.barrier()
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        let inner = self.inner.split(color, key)?;
        Ok(Box::new(Self { inner, seconds_per_byte: self.seconds_per_byte }))
    }

    fn abort(&self, reason: &str) -> Error {
        self.inner.abort(reason)
    }
}

/// Two ranks whose all-reduces are slowed to half of the compute, with and without overlap.
fn overlap(c: &mut Criterion) {
    let size = SIZES[1];
    let ranks = 2;
    let compute = {
        let mut executor = executor(Task(size), ranks, 1);
        let ids = samples(&executor);
        let mut times: Vec<Duration> = (0..5)
            .map(|_| executor.step(&ids, 1e-3).expect("a good step").timings.total)
            .collect();
        times.sort();
        times[times.len() / 2]
    };
    let mut group = c.benchmark_group("communication slowed to half of compute");
    group.sample_size(10).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(5));
    group.bench_function("no communication to speak of", |b| {
        let mut executor = executor(Task(size), ranks, 1);
        let ids = samples(&executor);
        b.iter(|| executor.step(&ids, 1e-3).expect("a good step").loss);
    });
    for overlap in [false, true] {
        let layouts = vec![WorkerLayout::new(LOCAL_BATCH, 1, 1); ranks];
        let bytes = 4 * executor(Task(size), 1, 1).layout().len();
        let seconds_per_byte = compute.as_secs_f64() / 2.0 / bytes as f64;
        let group_of_ranks = LocalCommunicator::group(ranks, Duration::from_secs(60)).expect("a valid group");
        let ends = group_of_ranks.into_iter().map(|end| {
            Box::new(Slow { inner: Box::new(end), seconds_per_byte }) as Box<dyn Communicator>
        });
        let config = ExecutorConfig::new(layouts).with_overlap(overlap).with_bucket_bytes(256 << 10);
        let mut executor = config.init_with(Task(size), ends.collect()).expect("a valid layout");
        let ids = samples(&executor);
        group.bench_function(BenchmarkId::new("overlap", overlap), |b| {
            b.iter(|| executor.step(&ids, 1e-3).expect("a good step").loss);
        });
    }
    group.finish();
}

criterion_group!(executor_benches, steps, update, overlap);
criterion_group!(part_benches, parts::parts);
criterion_main!(executor_benches, part_benches);
