//! Accumulation with and without measurement, on one and two threads: `cargo bench --bench adaptive_batch`.
//!
//! | row | what it does | bytes read and written per element |
//! |---|---|---|
//! | `plain` | `acc += g`, a loop of the language, cut into chunks for two threads | 12 |
//! | `fused` | `acc += g` and |g|^2 in one pass | 12 |
//! | `fused_dot` | the same and acc.g | 12 |
//! | `two_pass` | |g|^2, then `acc += g` | 16 |
//! | `half_split` | `acc += g`, then norms and dot product of two halves' sums, each a pass of its own | 28 |
//! | `dot` | x.y with four independent `f32` sums of eight lanes, as a BLAS does it | 8 |
//!
//! Criterion's groups run up to 10^7 elements; `ADAPTIVE_BATCH_TABLE=1` prints instead a table up to 10^8 (0.8 GB) in which the rows
//! take turns, so that a busy machine slows all of them alike. `-- --test` runs each once on 2^16 elements.

use std::hint::black_box;
use std::time::Instant;

use adaptive_batch::{
    accumulate, accumulate_and_measure, accumulate_and_measure_dot, dot, squared_norm,
};
use criterion::{BenchmarkId, Criterion, Throughput};
use rayon::prelude::*;

const CHUNK: usize = 1 << 16;

/// The loop that fused accumulation is compared with, over the threads of the current pool.
fn plain(acc: &mut [f32], grad: &[f32]) {
    let add = |(acc, grad): (&mut [f32], &[f32])| {
        for (a, g) in acc.iter_mut().zip(grad) {
            *a += g;
        }
    };
    if rayon::current_num_threads() == 1 {
        add((acc, grad));
    } else {
        let chunks = acc.par_chunks_mut(CHUNK).zip(grad.par_chunks(CHUNK));
        chunks.for_each(add);
    }
}

/// A dot product in `f32`, with as many independent sums as hide the latency of the additions.
fn blas_like_dot(x: &[f32], y: &[f32]) -> f32 {
    let chunk = |(x, y): (&[f32], &[f32])| {
        let mut sums = [0.0f32; 32];
        for (x, y) in x.as_chunks::<32>().0.iter().zip(y.as_chunks::<32>().0) {
            for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
                *sum += x * y;
            }
        }
        sums.iter().sum::<f32>()
    };
    if rayon::current_num_threads() == 1 {
        chunk((x, y))
    } else {
        x.par_chunks(CHUNK)
            .zip(y.par_chunks(CHUNK))
            .map(chunk)
            .sum()
    }
}

type Row = (&'static str, fn(&mut [f32], &[f32]));

const ROWS: [Row; 6] = [
    ("plain", plain),
    ("fused", |acc, grad| {
        black_box(accumulate_and_measure(acc, grad).expect("equal lengths"));
    }),
    ("fused_dot", |acc, grad| {
        black_box(accumulate_and_measure_dot(acc, grad, 1.0).expect("equal lengths"));
    }),
    ("two_pass", |acc, grad| {
        black_box(squared_norm(grad));
        accumulate(acc, grad, 1.0).expect("equal lengths");
    }),
    ("half_split", |acc, grad| {
        accumulate(acc, grad, 1.0).expect("equal lengths");
        black_box((squared_norm(acc), squared_norm(grad)));
        black_box(dot(acc, grad).expect("equal lengths"));
    }),
    ("dot", |acc, grad| {
        black_box(blas_like_dot(acc, grad));
    }),
];

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("a pool of one or two threads")
}

fn vectors(size: usize) -> (Vec<f32>, Vec<f32>) {
    let grad = (0..size).map(|i| (i % 97) as f32 * 1e-3 - 0.04).collect();
    (vec![0.0; size], grad)
}

fn groups(c: &mut Criterion, sizes: &[usize]) {
    for &size in sizes {
        let (mut acc, grad) = vectors(size);
        for threads in [1, 2] {
            let pool = pool(threads);
            let mut group = c.benchmark_group(format!("accumulate/{threads}_threads"));
            group
                .throughput(Throughput::Elements(size as u64))
                .sample_size(10);
            for (name, run) in ROWS {
                group.bench_function(BenchmarkId::new(name, size), |b| {
                    pool.install(|| b.iter(|| run(black_box(&mut acc), black_box(&grad))));
                });
            }
            group.finish();
        }
    }
}

/// Nanoseconds per element, the median of rounds in which every row has one turn.
#[expect(clippy::print_stdout, reason = "the table")]
fn table() {
    const TURNS: usize = 15;
    println!(
        "| elements | threads | {} | plain / fused |",
        ROWS.map(|r| r.0).join(" | ")
    );
    println!("|---|---|{}---|", "---|".repeat(ROWS.len()));
    for size in [1_000_000usize, 10_000_000, 100_000_000] {
        let (mut acc, grad) = vectors(size);
        // Short passes are repeated within a turn.
        let passes = (10_000_000 / size).max(1);
        for threads in [1, 2] {
            let times = pool(threads).install(|| {
                let mut times = ROWS.map(|_| Vec::with_capacity(TURNS));
                for _ in 0..TURNS {
                    for ((_, run), times) in ROWS.iter().zip(&mut times) {
                        let started = Instant::now();
                        for _ in 0..passes {
                            run(black_box(&mut acc), black_box(&grad));
                        }
                        times.push(started.elapsed().as_secs_f64() / (passes * size) as f64 * 1e9);
                    }
                }
                times
            });
            let medians = times.map(|mut t| {
                t.sort_by(f64::total_cmp);
                t[TURNS / 2]
            });
            let cells = medians.map(|m| format!("{m:.3}")).join(" | ");
            println!(
                "| {size} | {threads} | {cells} | {:.2} |",
                medians[0] / medians[1]
            );
        }
    }
}

fn main() {
    if std::env::var_os("ADAPTIVE_BATCH_TABLE").is_some() {
        table();
        return;
    }
    let smoke = std::env::args().any(|arg| arg == "--test");
    let sizes: &[usize] = if smoke {
        &[1 << 16]
    } else {
        &[1_000_000, 10_000_000]
    };
    let mut criterion = Criterion::default().configure_from_args();
    groups(&mut criterion, sizes);
    criterion.final_summary();
}
