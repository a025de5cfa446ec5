//! The parts of iidp that need no model: all-reduce among threads, optimizers on flat buffers, the solver for worker layouts, the sampler.
//!
//! Throughput is in bytes of one rank's buffer, so that an all-reduce and a copy of the same buffer can be compared.

use std::hint::black_box;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use iidp::communicator::{Communicator, LocalCommunicator};
use iidp::optimizer::{AdamWConfig, LambConfig, OptimizerConfig, SgdConfig};
use iidp::{RankCost, ShardedSampler, assign_workers};

/// Parameters of the GPT in the examples of the executor.
const GPT: usize = 941_000;

/// All groups.
pub(crate) fn parts(c: &mut Criterion) {
    all_reduce(c);
    optimizers(c);
    solver(c);
    sampler(c);
}

/// Runs `body` as many times as asked on every rank, and takes the time of rank 0 from a barrier to its end.
fn on_ranks(
    ranks: usize,
    iterations: u64,
    body: impl Fn(&LocalCommunicator, u64) + Clone + Send + 'static,
) -> Duration {
    let group = LocalCommunicator::group(ranks, Duration::from_mins(1)).expect("a valid group");
    let (sender, receiver) = mpsc::channel();
    let threads: Vec<_> = group
        .into_iter()
        .map(|comm| {
            let (body, sender) = (body.clone(), sender.clone());
            thread::spawn(move || {
                // One run outside the measurement fills the staging buffers.
                body(&comm, 1);
                comm.barrier().expect("all ranks are there");
                let start = Instant::now();
                body(&comm, iterations);
                if comm.rank() == 0 {
                    sender.send(start.elapsed()).expect("the receiver waits");
                }
            })
        })
        .collect();
    let elapsed = receiver.recv().expect("rank 0 reports");
    for thread in threads {
        thread.join().expect("no panic");
    }
    elapsed
}

fn all_reduce(c: &mut Criterion) {
    let mut group = c.benchmark_group("all_reduce");
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    for (ranks, len) in [
        (2, 1_usize),
        (2, 16 << 10),
        (2, 256 << 10),
        (2, 4 << 20),
        (4, 4 << 20),
    ] {
        group.throughput(Throughput::Bytes(4 * len as u64));
        group.bench_function(
            BenchmarkId::new(
                format!("local {ranks} ranks"),
                format!("{} KiB", 4 * len / 1024),
            ),
            |b| {
                b.iter_custom(|iterations| {
                    on_ranks(ranks, iterations, move |comm, iterations| {
                        let mut data = vec![1.0_f32; len];
                        for _ in 0..iterations {
                            comm.all_reduce_sum(&mut data).expect("all ranks are there");
                        }
                        black_box(data);
                    })
                });
            },
        );
    }
    let len = 4 << 20;
    group.throughput(Throughput::Bytes(4 * len as u64));
    for ranks in [1, 2] {
        group.bench_function(
            BenchmarkId::new(format!("memory copy on {ranks} threads"), "16384 KiB"),
            |b| {
                b.iter_custom(|iterations| {
                    on_ranks(ranks, iterations, move |_, iterations| {
                        let (source, mut target) = (vec![1.0_f32; len], vec![0.0_f32; len]);
                        for _ in 0..iterations {
                            target.copy_from_slice(black_box(&source));
                            black_box(&mut target);
                        }
                    })
                });
            },
        );
    }
    group.finish();
}

fn optimizers(c: &mut Criterion) {
    let mut group = c.benchmark_group("flat optimizer, 941k parameters");
    group.throughput(Throughput::Elements(GPT as u64));
    let parameters = cut(GPT);
    let configs: [(&str, OptimizerConfig); 3] = [
        ("sgd momentum", SgdConfig::new().with_momentum(0.9).into()),
        ("adamw", AdamWConfig::new().into()),
        ("lamb", LambConfig::new().into()),
    ];
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        for (name, config) in configs {
            let mut optimizer = config.init(&parameters).expect("valid");
            let (mut values, gradients) = (vec![0.1_f32; GPT], vec![0.01_f32; GPT]);
            group.bench_function(BenchmarkId::new(name, format!("{threads} threads")), |b| {
                pool.install(|| {
                    b.iter(|| {
                        optimizer
                            .step(&mut values, &gradients, 1e-3)
                            .expect("matching lengths");
                    });
                });
            });
        }
    }
    group.finish();
}

/// Parameter ranges like those of a transformer: matrices between biases and norms.
fn cut(len: usize) -> Vec<std::ops::Range<usize>> {
    let mut ranges = Vec::new();
    let mut start = 0;
    for size in [128 * 512, 512, 128, 128 * 128, 128].into_iter().cycle() {
        let end = (start + size).min(len);
        ranges.push(start..end);
        start = end;
        if end == len {
            return ranges;
        }
    }
    ranges
}

fn solver(c: &mut Criterion) {
    let mut group = c.benchmark_group("assign_workers, 10,000 ranks");
    let efficiency = [1.0, 0.9, 0.8, 0.72, 0.65, 0.59, 0.54, 0.5];
    // Speeds of four device types, and the same with every device a little different.
    let types = [0.08, 0.11, 0.17, 0.31];
    let of_types: Vec<_> = (0..10_000)
        .map(|rank| {
            RankCost::new(types[rank % 4])
                .with_overhead(0.02)
                .with_efficiency(&efficiency[..2 + 2 * (rank % 4)])
        })
        .collect();
    let all_different: Vec<_> = of_types
        .iter()
        .enumerate()
        .map(|(rank, cost)| RankCost {
            micro_batch_seconds: cost.micro_batch_seconds * (1.0 + rank as f64 * 1e-5),
            ..cost.clone()
        })
        .collect();
    for (name, costs) in [("four types", &of_types), ("all different", &all_different)] {
        for local in [1, 8, 64] {
            group.bench_function(
                BenchmarkId::new(name, format!("1,000,000 samples by {local}")),
                |b| {
                    b.iter(|| {
                        assign_workers(1_000_000, local, black_box(costs)).expect("enough samples")
                    });
                },
            );
        }
    }
    group.finish();
}

fn sampler(c: &mut Criterion) {
    let mut group = c.benchmark_group("sampler");
    group.throughput(Throughput::Elements(4096));
    group.bench_function("4096 of 10 million", |b| {
        let mut sampler = ShardedSampler::new(10_000_000, 1).expect("samples");
        b.iter(|| sampler.take(4096).expect("samples"));
    });
    group.finish();
}
