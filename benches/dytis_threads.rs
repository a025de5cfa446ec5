//! `ConcurrentDytisMap` from 1 to 8 threads against concurrent rivals, and against `DytisMap` on one.
//!
//! ```text
//! cargo bench --bench dytis_threads -- [OPTIONS]
//!   --keys N          keys per stream (10000000)
//!   --streams A,B     names of generators and key sets (uniform,review,timestamp)
//!   --maps A,B        concurrent,skiplist,scc,congee,locked (all)
//!   --threads 1,2     numbers of threads (1,2,4,8)
//!   --ops N           operations of a phase at most, Load excepted (4000000)
//!   --rounds N        rounds, of which the median counts (3)
//!   --out FILE        appends the table's rows there
//! ```
//!
//! Each thread runs its own list of as many operations as there are over the number of threads: C is
//! Zipf gets, A half Zipf gets and half updates, Load inserts the stream in order, thread by thread in
//! turn. Speeds are of all threads together.

#![allow(clippy::print_stdout, reason = "the table is this program's purpose")]

#[path = "support/arguments.rs"]
mod arguments;
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
use std::fs::OpenOptions;
use std::hint::black_box;
use std::io::Write as _;
use std::sync::{Barrier, RwLock};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use congee::Congee;
use crossbeam_skiplist::SkipMap;
use datasets::dataset;
use dytis::{ConcurrentDytisMap, DytisMap};
use rivals::{Index, Shared};
use scc::TreeIndex;
use workload::{Draws, Mix, Op, run};

const MAPS: [&str; 5] = ["concurrent", "skiplist", "scc", "congee", "locked"];

struct Options {
    keys: usize,
    streams: Vec<String>,
    maps: Vec<&'static str>,
    threads: Vec<usize>,
    ops: usize,
    rounds: usize,
    out: Option<String>,
}

fn options() -> Result<Options> {
    let mut options = Options {
        keys: 10_000_000,
        streams: arguments::list("uniform,review,timestamp"),
        maps: MAPS.to_vec(),
        threads: vec![1, 2, 4, 8],
        ops: 4_000_000,
        rounds: 3,
        out: None,
    };
    for (name, value) in arguments::pairs(&[("--keys", "2000"), ("--rounds", "1")])? {
        match name.as_str() {
            "--keys" => options.keys = arguments::number(&name, &value, 1000)?,
            "--streams" => options.streams = arguments::list(&value),
            "--maps" => options.maps = arguments::choices(&name, &value, MAPS)?,
            "--threads" => {
                let threads = value.split(',');
                let threads = threads.map(|threads| arguments::number(&name, threads, 1));
                options.threads = threads.collect::<Result<_>>()?;
            }
            "--ops" => options.ops = arguments::number(&name, &value, 1000)?,
            "--rounds" => options.rounds = arguments::number(&name, &value, 1)?,
            "--out" => options.out = Some(value),
            _ => bail!("unknown option {name}"),
        }
    }
    Ok(options)
}

/// The lists of operations for one number of threads, a list a thread.
struct Lists {
    load: Vec<Vec<Op>>,
    c: Vec<Vec<Op>>,
    a: Vec<Vec<Op>>,
}

impl Lists {
    fn new(keys: &[u64], draws: &Draws<'_>, ops: usize, threads: usize) -> Self {
        let load = |thread| {
            let keys = keys.iter().skip(thread).step_by(threads);
            keys.map(|&key| Op::Insert(key)).collect()
        };
        let mix = |mix| {
            let list = |thread| draws.ops(mix, ops / threads, 5 + thread as u64);
            (0..threads).map(list).collect()
        };
        Self {
            load: (0..threads).map(load).collect(),
            c: mix(Mix::C),
            a: mix(Mix::A),
        }
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

/// Load, C and A in Mops/s.
fn shared_round<S: Shared>(lists: &Lists) -> [f64; 3] {
    let map = S::new();
    [&lists.load, &lists.c, &lists.a].map(|lists| speed(&map, lists))
}

/// The same for the plain map; the lists are those of one thread.
fn plain_round(lists: &Lists) -> [f64; 3] {
    let mut map = <DytisMap<u64, u64> as Index>::new();
    [&lists.load, &lists.c, &lists.a].map(|lists| {
        let ops = &lists[0];
        let start = Instant::now();
        black_box(run(&mut map, ops));
        ops.len() as f64 / start.elapsed().as_secs_f64() / 1e6
    })
}

fn median(rounds: usize, mut round: impl FnMut() -> [f64; 3]) -> [f64; 3] {
    let all: Vec<[f64; 3]> = (0..rounds).map(|_| round()).collect();
    std::array::from_fn(|phase| {
        let mut speeds: Vec<f64> = all.iter().map(|speeds| speeds[phase]).collect();
        speeds.sort_by(f64::total_cmp);
        speeds[rounds / 2]
    })
}

fn main() -> Result<()> {
    let options = options()?;
    let mut table = String::new();
    for stream in &options.streams {
        let data =
            dataset(stream, options.keys).with_context(|| format!("unknown stream {stream}"))?;
        let draws = Draws::new(&data.keys, &[]);
        let ops = options.ops.min(data.keys.len());
        let mut row = |map: &str, threads: usize, [load, c, a]: [f64; 3]| {
            let row = format!("| {stream} | {map} | {threads} | {load:.2} | {c:.2} | {a:.2} |");
            println!("{row}");
            writeln!(table, "{row}")
        };
        let lists = Lists::new(&data.keys, &draws, ops, 1);
        row("dytis", 1, median(options.rounds, || plain_round(&lists)))?;
        for &threads in &options.threads {
            let lists = Lists::new(&data.keys, &draws, ops, threads);
            for &map in &options.maps {
                let round = match map {
                    "concurrent" => shared_round::<ConcurrentDytisMap<u64, u64>>,
                    "skiplist" => shared_round::<SkipMap<u64, u64>>,
                    "scc" => shared_round::<TreeIndex<u64, u64>>,
                    "congee" => shared_round::<Congee<usize, usize>>,
                    _ => shared_round::<RwLock<BTreeMap<u64, u64>>>,
                };
                row(map, threads, median(options.rounds, || round(&lists)))?;
            }
        }
    }
    if let Some(path) = options.out {
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(table.as_bytes()));
        written.with_context(|| path)?;
    }
    Ok(())
}
