//! iidp: training steps of a GPT against a plain Burn loop, the fused update, overlap of communication with compute; and the
//! parts that need no model (see `support/iidp_parts.rs`).
//!
//! ```text
//! cargo bench --bench iidp
//! ```
//!
//! With `-- --test` everything runs once, with the small model. Throughput is in tokens. Everything runs with one thread per worker; two ranks need two cores.

#[path = "support/iidp_parts.rs"]
mod parts;

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use burn::optim::{AdamWConfig as BurnAdamW, GradientsParams};
use burn::tensor::{Device, Tensor};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use iidp::models::{Gpt, GptConfig};
use iidp::{
    BoxError, Communicator, Error, Executor, ExecutorConfig, LocalCommunicator, MicroBatch, Mode,
    WorkerLayout, Workload,
};

/// Whether criterion only wants to know that everything runs.
fn smoke() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

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
    Size {
        name: "2x64, context 64",
        layers: 2,
        width: 64,
        context: 64,
    },
    Size {
        name: "4x128, context 128",
        layers: 4,
        width: 128,
        context: 128,
    },
];

/// Next-token prediction on a text that a formula gives.
#[derive(Clone)]
struct Task(Size);

impl Workload for Task {
    type Model = Gpt;

    fn init(&self, device: &Device) -> Result<Gpt, BoxError> {
        let Size {
            layers,
            width,
            context,
            ..
        } = self.0;
        Ok(GptConfig::new(VOCABULARY, context, layers, width, 4).init(device)?)
    }

    fn loss(
        &self,
        model: &Gpt,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let text = |start: u64| -> Vec<u8> {
            (start..=start + self.0.context as u64)
                .map(|i| ((i * i / 7 + i) % VOCABULARY as u64) as u8)
                .collect()
        };
        let windows: Vec<Vec<u8>> = batch.samples.iter().map(|sample| text(*sample)).collect();
        let windows: Vec<&[u8]> = windows.iter().map(Vec::as_slice).collect();
        Ok(model.batch_loss(&windows, batch, device)?)
    }
}

fn executor(task: Task, ranks: usize, workers: usize) -> Executor<Task> {
    ExecutorConfig::new(vec![WorkerLayout::new(LOCAL_BATCH, workers, 1); ranks])
        .init(task)
        .expect("a valid layout")
}

fn samples(executor: &Executor<Task>) -> Vec<u64> {
    (0..executor.global_batch() as u64)
        .map(|i| i * 97)
        .collect()
}

fn steps(c: &mut Criterion) {
    for size in SIZES.into_iter().take(if smoke() { 1 } else { 2 }) {
        let mut group = c.benchmark_group(format!("training step, GPT {}", size.name));
        group
            .sample_size(10)
            .warm_up_time(Duration::from_secs(1))
            .measurement_time(Duration::from_secs(5));
        let tokens = |batch: usize| Throughput::Elements((batch * size.context) as u64);
        group.throughput(tokens(LOCAL_BATCH));
        group.bench_function("plain Burn loop", |b| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(1)
                .build()
                .expect("one thread");
            pool.install(|| {
                let device = Device::flex().autodiff();
                let task = Task(size);
                let mut model = Some(task.init(&device).expect("a valid model"));
                let mut optimizer = BurnAdamW::new().init();
                let ids: Vec<u64> = (0..LOCAL_BATCH as u64).map(|i| i * 97).collect();
                b.iter(|| {
                    let current = model.take().expect("put back below");
                    let batch = MicroBatch::new(&ids, Mode::Train);
                    let loss = task.loss(&current, &batch, &device).expect("a valid batch");
                    let gradients = GradientsParams::from_grads(loss.backward(), &current);
                    model = Some(optimizer.step(1e-3, current, gradients));
                    black_box(loss.into_scalar::<f32>())
                });
            });
        });
        for (name, ranks, workers) in [
            ("1 rank", 1, 1),
            ("2 ranks", 2, 1),
            ("1 rank, 2 workers", 1, 2),
        ] {
            let mut executor = executor(Task(size), ranks, workers);
            let ids = samples(&executor);
            group.throughput(tokens(ids.len()));
            group.bench_function(name, |b| {
                b.iter(|| executor.step(&ids, 1e-3).expect("a good step").loss);
            });
        }
        group.finish();
    }
}

/// The update alone: what `executor.step` reports for it, against Burn's `ModuleOptimizer`.
fn update(c: &mut Criterion) {
    let size = SIZES[1];
    let mut group = c.benchmark_group("AdamW update, GPT 4x128");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(4));
    group.bench_function("Burn's ModuleOptimizer", |b| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .build()
            .expect("one thread");
        let device = Device::flex().autodiff();
        let task = Task(size);
        let mut model = Some(task.init(&device).expect("a valid model"));
        let mut optimizer = BurnAdamW::new().init();
        let ids = [0, 97];
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            pool.install(|| {
                for _ in 0..iterations {
                    let current = model.take().expect("put back below");
                    let loss = task
                        .loss(&current, &MicroBatch::new(&ids, Mode::Train), &device)
                        .expect("a valid batch");
                    let gradients = GradientsParams::from_grads(loss.backward(), &current);
                    let start = Instant::now();
                    model = Some(optimizer.step(1e-3, current, gradients));
                    total += start.elapsed();
                }
            });
            total
        });
    });
    group.bench_function("executor", |b| {
        let config = ExecutorConfig::new(vec![WorkerLayout::new(2, 1, 1)]);
        let mut executor = config.init(Task(size)).expect("a valid layout");
        b.iter_custom(|iterations| {
            (0..iterations)
                .map(|_| {
                    executor
                        .step(&[0, 97], 1e-3)
                        .expect("a good step")
                        .timings
                        .ranks[0]
                        .update
                })
                .sum()
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
        std::thread::sleep(Duration::from_secs_f64(
            size_of_val(data) as f64 * self.seconds_per_byte,
        ));
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
        Ok(Box::new(Self {
            inner,
            seconds_per_byte: self.seconds_per_byte,
        }))
    }

    fn abort(&self, reason: &str) -> Error {
        self.inner.abort(reason)
    }
}

/// The median of some steps.
fn step_time(executor: &mut Executor<Task>) -> Duration {
    let ids = samples(executor);
    let mut times: Vec<Duration> = (0..if smoke() { 2 } else { 9 })
        .map(|_| {
            executor
                .step(&ids, 1e-3)
                .expect("a good step")
                .timings
                .total
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

/// Two ranks whose all-reduces are slowed to half of the compute: without overlap a step should take 1.5 times the compute, with
/// overlap at most 1.1 times.
fn overlap(c: &mut Criterion) {
    let size = if smoke() { SIZES[0] } else { SIZES[1] };
    let ranks = 2;
    for accumulation in [1, 2] {
        let layouts = vec![WorkerLayout::new(LOCAL_BATCH, 1, accumulation); ranks];
        let mut group = c.benchmark_group(format!(
            "communication slowed to half of compute, {accumulation} micro-batches per worker"
        ));
        group
            .sample_size(10)
            .warm_up_time(Duration::from_secs(1))
            .measurement_time(Duration::from_secs(4));
        let mut alone = ExecutorConfig::new(layouts.clone())
            .init(Task(size))
            .expect("a valid layout");
        let compute = step_time(&mut alone);
        let ids = samples(&alone);
        group.bench_function("compute alone", |b| {
            b.iter(|| alone.step(&ids, 1e-3).expect("a good step").loss);
        });
        let seconds_per_byte = compute.as_secs_f64() / 2.0 / (4 * alone.layout().len()) as f64;
        drop(alone);
        for depth in 0..=accumulation {
            let ends =
                LocalCommunicator::group(ranks, Duration::from_mins(1)).expect("a valid group");
            let ends = ends.into_iter().map(|end| {
                Box::new(Slow {
                    inner: Box::new(end),
                    seconds_per_byte,
                }) as Box<dyn Communicator>
            });
            let config = ExecutorConfig::new(layouts.clone())
                .with_overlap(depth > 0)
                .with_overlap_depth(depth.max(1))
                .with_bucket_bytes(256 << 10);
            let mut executor = config
                .init_with(Task(size), ends.collect())
                .expect("a valid layout");
            let name = match depth {
                0 => "no overlap".to_owned(),
                depth => format!("overlap, depth {depth}"),
            };
            group.bench_function(name, |b| {
                b.iter(|| executor.step(&ids, 1e-3).expect("a good step").loss);
            });
        }
        group.finish();
    }
}

criterion_group!(executor_benches, steps, update, overlap);
criterion_group!(part_benches, parts::parts);
criterion_main!(executor_benches, part_benches);
