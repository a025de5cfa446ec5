//! `ConcurrentDytisMap` from 1 to 8 threads against concurrent rivals, and against `DytisMap` on one.
//!
//! ```text
//! cargo bench --bench dytis_threads -- [--keys N] [--streams A,B] [--threads 1,2,4,8] [--rounds N] [--out FILE]
//! ```
//!
//! Each thread runs its own list of as many operations as there are keys over the number of
//! threads: C is Zipf gets, A half Zipf gets and half updates, Load inserts the stream in order,
//! thread by thread in turn. Speeds are of all threads together, the median of the rounds.

#![allow(clippy::print_stdout, reason = "the table is this program's purpose")]
#![allow(dead_code, reason = "the shared files serve other benches, too")]

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
use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::{Barrier, RwLock};
use std::thread;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use crossbeam_skiplist::SkipMap;
use datasets::dataset;
use dytis::{ConcurrentDytisMap, DytisMap};
use scc::TreeIndex;
use workload::{Mix, Op, run};

/// A map that threads share.
trait Shared: Sync {
    const NAME: &'static str;

    fn new() -> Self;
    fn insert(&self, key: u64, value: u64);
    fn get(&self, key: u64) -> Option<u64>;
    fn update(&self, key: u64, value: u64);
}

impl Shared for ConcurrentDytisMap<u64, u64> {
    const NAME: &'static str = "ConcurrentDytisMap";

    fn new() -> Self {
        Self::new()
    }
    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key)
    }
    fn update(&self, key: u64, value: u64) {
        self.update(&key, |_| value);
    }
}

impl Shared for SkipMap<u64, u64> {
    const NAME: &'static str = "crossbeam SkipMap";

    fn new() -> Self {
        Self::new()
    }
    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key).map(|entry| *entry.value())
    }
    fn update(&self, key: u64, value: u64) {
        self.insert(key, value);
    }
}

impl Shared for TreeIndex<u64, u64> {
    const NAME: &'static str = "scc TreeIndex";

    fn new() -> Self {
        Self::new()
    }
    fn insert(&self, key: u64, value: u64) {
        self.upsert_sync(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.peek_with(&key, |_, value| *value)
    }
    fn update(&self, key: u64, value: u64) {
        self.upsert_sync(key, value);
    }
}

impl Shared for RwLock<BTreeMap<u64, u64>> {
    const NAME: &'static str = "RwLock<BTreeMap>";

    fn new() -> Self {
        Self::default()
    }
    fn insert(&self, key: u64, value: u64) {
        self.write()
            .expect("no panic under the lock")
            .insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.read()
            .expect("no panic under the lock")
            .get(&key)
            .copied()
    }
    fn update(&self, key: u64, value: u64) {
        self.write()
            .expect("no panic under the lock")
            .insert(key, value);
    }
}

/// Runs the lists, one thread each, and returns Mops/s of all together. The clock runs from the
/// moment when all are ready until the last has ended.
fn speed<S: Shared>(map: &S, lists: &[Vec<Op>]) -> f64 {
    let ready = Barrier::new(lists.len() + 1);
    let total: usize = lists.iter().map(Vec::len).sum();
    let seconds = thread::scope(|scope| {
        let workers: Vec<_> = lists
            .iter()
            .map(|ops| {
                let ready = &ready;
                scope.spawn(move || {
                    ready.wait();
                    let mut sum = 0_u64;
                    for &op in ops {
                        match op {
                            Op::Get(key) => sum = sum.wrapping_add(map.get(key).unwrap_or(1)),
                            Op::Update(key) => map.update(key, sum),
                            Op::Insert(key) => map.insert(key, key),
                            Op::Scan(_) | Op::ReadModifyWrite(_) => {
                                unreachable!("not in these mixes")
                            }
                        }
                    }
                    black_box(sum)
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        for worker in workers {
            worker.join().expect("a worker does not panic");
        }
        start.elapsed().as_secs_f64()
    });
    total as f64 / seconds / 1e6
}

fn load_lists(keys: &[u64], threads: usize) -> Vec<Vec<Op>> {
    let of = |thread| {
        keys.iter()
            .skip(thread)
            .step_by(threads)
            .map(|&key| Op::Insert(key))
            .collect()
    };
    (0..threads).map(of).collect()
}

fn mix_lists(mix: Mix, keys: &[u64], threads: usize) -> Vec<Vec<Op>> {
    (0..threads)
        .map(|thread| mix.ops(keys, &[], keys.len() / threads, 5 + thread as u64))
        .collect()
}

/// Load, C and A in Mops/s.
fn shared_round<S: Shared>(keys: &[u64], threads: usize) -> [f64; 3] {
    let map = S::new();
    let load = speed(&map, &load_lists(keys, threads));
    [
        load,
        speed(&map, &mix_lists(Mix::C, keys, threads)),
        speed(&map, &mix_lists(Mix::A, keys, threads)),
    ]
}

fn plain_round(keys: &[u64]) -> [f64; 3] {
    let timed = |count: usize, work: &mut dyn FnMut() -> u64| {
        let start = Instant::now();
        black_box(work());
        count as f64 / start.elapsed().as_secs_f64() / 1e6
    };
    let mut map = DytisMap::new();
    let load = timed(keys.len(), &mut || {
        for &key in keys {
            map.insert(key, key);
        }
        0
    });
    let [c, a] = [Mix::C, Mix::A].map(|mix| {
        let ops = mix.ops(keys, &[], keys.len(), 5);
        timed(ops.len(), &mut || run(&mut map, &ops))
    });
    [load, c, a]
}

fn median(rounds: usize, mut round: impl FnMut() -> [f64; 3]) -> [f64; 3] {
    let all: Vec<[f64; 3]> = (0..rounds).map(|_| round()).collect();
    std::array::from_fn(|phase| {
        let mut speeds: Vec<f64> = all.iter().map(|speeds| speeds[phase]).collect();
        speeds.sort_by(f64::total_cmp);
        speeds[rounds / 2]
    })
}

struct Options {
    keys: usize,
    streams: Vec<String>,
    threads: Vec<usize>,
    rounds: usize,
    out: Option<String>,
}

fn options() -> Result<Options> {
    let list = |names: &str| names.split(',').map(str::to_owned).collect::<Vec<_>>();
    let mut options = Options {
        keys: 10_000_000,
        streams: list("uniform,review,timestamp"),
        threads: vec![1, 2, 4, 8],
        rounds: 3,
        out: None,
    };
    let mut args = env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            // Cargo passes --bench; --test asks for a run that only shows that everything works.
            "--bench" => continue,
            "--test" => {
                (options.keys, options.rounds) = (2_000, 1);
                continue;
            }
            _ => {}
        }
        let value = args
            .next()
            .with_context(|| format!("{arg} needs a value"))?;
        let number = |value: &str| {
            value
                .parse::<usize>()
                .with_context(|| format!("{arg} {value}"))
        };
        match arg.as_str() {
            "--keys" => options.keys = number(&value)?,
            "--rounds" => options.rounds = number(&value)?,
            "--streams" => options.streams = list(&value),
            "--threads" => options.threads = value.split(',').map(number).collect::<Result<_>>()?,
            "--out" => options.out = Some(value),
            _ => bail!("unknown option {arg}"),
        }
    }
    ensure!(
        options.rounds >= 1 && options.keys >= 1000,
        "at least 1 round and 1000 keys"
    );
    ensure!(
        options.threads.iter().all(|&threads| threads >= 1),
        "at least 1 thread"
    );
    Ok(options)
}

fn main() -> Result<()> {
    let Options {
        keys,
        streams,
        threads,
        rounds,
        out,
    } = options()?;
    let mut table = format!("{keys} keys, Mops/s of all threads, median of {rounds} round(s)\n\n");
    table.push_str("| stream | map | threads | Load | C | A |\n|---|---|---|---|---|---|\n");
    for stream in streams {
        let data = dataset(&stream, keys).with_context(|| format!("unknown stream {stream}"))?;
        let mut row = |map: &str, threads: usize, [load, c, a]: [f64; 3]| {
            println!("{stream} {map} {threads}: {load:.2} {c:.2} {a:.2}");
            writeln!(
                table,
                "| {stream} | {map} | {threads} | {load:.2} | {c:.2} | {a:.2} |"
            )
        };
        row("DytisMap", 1, median(rounds, || plain_round(&data.keys)))?;
        for &threads in &threads {
            let keys = &data.keys;
            macro_rules! measure {
                ($($map:ty),*) => {$(
                    row(<$map as Shared>::NAME, threads, median(rounds, || shared_round::<$map>(keys, threads)))?;
                )*};
            }
            measure!(
                ConcurrentDytisMap<u64, u64>,
                SkipMap<u64, u64>,
                TreeIndex<u64, u64>,
                RwLock<BTreeMap<u64, u64>>
            );
        }
    }
    println!("\n{table}");
    if let Some(path) = out {
        fs::write(&path, table).with_context(|| path)?;
    }
    Ok(())
}
