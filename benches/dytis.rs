//! `DytisMap` against its rivals; groups are named `operation/dataset/n`.
//!
//! ```text
//! cargo bench --bench dytis                              # all, at 20,000 keys
//! DYTIS_BENCH_N=1000000 cargo bench --bench dytis -- load/review
//! cargo bench --bench dytis -- --test                    # each once, at 500 keys
//! ```
//!
//! `DYTIS_KEYS` names a folder of whole key sets in place of the committed cuts. The table of the
//! README comes from `dytis_table`, which interleaves the maps and runs them at 10 million keys.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

#[path = "support/datasets.rs"]
mod datasets;
#[path = "../dytis/tests/support/keysets.rs"]
mod keysets;
#[path = "support/rivals.rs"]
mod rivals;
#[path = "../dytis/tests/support/streams.rs"]
mod streams;
#[path = "support/workload.rs"]
mod workload;

use std::collections::BTreeMap;
use std::env;
use std::hint::black_box;
use std::time::Duration;

use brie_tree::BTree;
use brie_tree::nonmax::NonMaxU64;
use congee::Congee;
use criterion::measurement::WallTime;
use criterion::{
    BatchSize, BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main,
};
use crossbeam_skiplist::SkipMap;
use datasets::{Dataset, dataset, names};
use dytis::DytisMap;
use rivals::Index;
use scc::TreeIndex;
use streams::Rng;
use workload::{Draws, Mix, Op, run};

/// Calls `$call::<I>($args)` for every index.
macro_rules! for_each_index {
    ($call:ident($($arg:expr),*)) => {
        $call::<DytisMap<u64, u64>>($($arg),*);
        $call::<BTreeMap<u64, u64>>($($arg),*);
        $call::<BTree<NonMaxU64, u64>>($($arg),*);
        $call::<indexset::BTreeMap<u64, u64>>($($arg),*);
        $call::<SkipMap<u64, u64>>($($arg),*);
        $call::<TreeIndex<u64, u64>>($($arg),*);
        $call::<Congee<usize, usize>>($($arg),*);
    };
}

const MIXES: [(&str, Mix); 8] = [
    ("get_hit", Mix::Uniform),
    ("get_miss", Mix::Miss),
    ("ycsb_a", Mix::A),
    ("ycsb_b", Mix::B),
    ("ycsb_c", Mix::C),
    ("ycsb_d", Mix::D),
    ("ycsb_e", Mix::E),
    ("ycsb_f", Mix::F),
];

fn bench_size() -> usize {
    match env::var("DYTIS_BENCH_N") {
        Ok(n) => n
            .parse()
            .unwrap_or_else(|_| panic!("DYTIS_BENCH_N must be a number, got {n}")),
        Err(_) if env::args().any(|arg| arg == "--test") => 500,
        Err(_) => 20_000,
    }
}

fn load<I: Index>(keys: &[u64]) -> I {
    let mut index = I::new();
    for &key in keys {
        index.insert(key, key);
    }
    index
}

fn bench_load<I: Index>(group: &mut BenchmarkGroup<'_, WallTime>, keys: &[u64]) {
    group.bench_function(I::NAME, |b| b.iter_with_large_drop(|| load::<I>(keys)));
}

fn bench_bulk<I: Index>(group: &mut BenchmarkGroup<'_, WallTime>, entries: &[(u64, u64)]) {
    group.bench_function(I::NAME, |b| {
        b.iter_with_large_drop(|| I::from_sorted(entries));
    });
}

fn bench_iterate<I: Index>(group: &mut BenchmarkGroup<'_, WallTime>, keys: &[u64]) {
    let index = load::<I>(keys);
    group.bench_function(I::NAME, |b| b.iter(|| index.sum()));
}

fn bench_remove<I: Index>(group: &mut BenchmarkGroup<'_, WallTime>, keys: &[u64], doomed: &[u64]) {
    group.bench_function(I::NAME, |b| {
        b.iter_batched(
            || load::<I>(keys),
            |mut index| {
                for &key in doomed {
                    black_box(index.remove(key));
                }
                index
            },
            BatchSize::LargeInput,
        );
    });
}

/// A map that is filled with a tenth of the keys and emptied again, ten times.
fn bench_sawtooth<I: Index>(group: &mut BenchmarkGroup<'_, WallTime>, keys: &[u64]) {
    group.bench_function(I::NAME, |b| {
        b.iter_with_large_drop(|| {
            let mut index = I::new();
            for keys in keys.chunks(keys.len().div_ceil(10)) {
                for &key in keys {
                    index.insert(key, key);
                }
                for &key in keys {
                    black_box(index.remove(key));
                }
            }
            index
        });
    });
}

/// Mixes with inserts begin each sample with a fresh map, so that the inserts stay inserts.
fn bench_mix<I: Index>(group: &mut BenchmarkGroup<'_, WallTime>, keys: &[u64], ops: &[Op]) {
    if ops.iter().any(|op| matches!(op, Op::Insert(_))) {
        group.bench_function(I::NAME, |b| {
            b.iter_batched_ref(
                || load::<I>(keys),
                |index| run(index, ops),
                BatchSize::LargeInput,
            );
        });
    } else {
        let mut index = load::<I>(keys);
        group.bench_function(I::NAME, |b| b.iter(|| run(&mut index, ops)));
    }
}

fn group<'c>(
    c: &'c mut Criterion,
    operation: &str,
    dataset: &str,
    n: usize,
    elements: usize,
) -> BenchmarkGroup<'c, WallTime> {
    let mut group = c.benchmark_group(format!("{operation}/{dataset}/{n}"));
    group.throughput(Throughput::Elements(elements as u64));
    group
}

fn bench_dataset(c: &mut Criterion, Dataset { name, keys }: &Dataset) {
    let (keys, fresh) = keys.split_at(keys.len() - keys.len() / 20);
    let n = keys.len();
    let mut load = group(c, "load", name, n, n);
    for_each_index!(bench_load(&mut load, keys));
    load.finish();

    let draws = Draws::new(keys, fresh);
    for (operation, mix) in MIXES {
        let ops = draws.ops(mix, n, 7);
        let mut mixed = group(c, operation, name, n, n);
        for_each_index!(bench_mix(&mut mixed, keys, &ops));
        mixed.finish();
    }

    let mut doomed = keys.to_vec();
    Rng::new(9).shuffle(&mut doomed);
    doomed.truncate(n / 2);
    let mut remove = group(c, "remove", name, n, doomed.len());
    for_each_index!(bench_remove(&mut remove, keys, &doomed));
    remove.finish();

    let mut sawtooth = group(c, "sawtooth", name, n, 2 * n);
    for_each_index!(bench_sawtooth(&mut sawtooth, keys));
    sawtooth.finish();

    let mut entries: Vec<(u64, u64)> = keys.iter().map(|&key| (key, key)).collect();
    entries.sort_unstable();
    let mut bulk = group(c, "bulk_load", name, n, n);
    for_each_index!(bench_bulk(&mut bulk, &entries));
    bulk.finish();

    let mut iterate = group(c, "iterate", name, n, n);
    for_each_index!(bench_iterate(&mut iterate, keys));
    iterate.finish();
}

fn benches(c: &mut Criterion) {
    let n = bench_size();
    for name in names() {
        if let Some(dataset) = dataset(name, n + n / 20) {
            bench_dataset(c, &dataset);
        }
    }
}

criterion_group! {
    name = dytis_group;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    targets = benches
}
criterion_main!(dytis_group);
