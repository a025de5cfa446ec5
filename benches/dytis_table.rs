//! The README's table: YCSB-like phases at full size, `DytisMap` and its rivals in turn.
//!
//! ```text
//! cargo bench --bench dytis_table -- [OPTIONS]
//!   --keys N         keys per stream (10000000)
//!   --streams A,B    names of generators and key sets (the seven data-like generators)
//!   --indexes A,B    dytis,std,brie,indexset,skiplist,scc,congee (the first four)
//!   --rounds N       rounds, of which the median counts (3)
//!   --out FILE       writes the Markdown there, too
//!   --svg FILE       writes the plot there
//! ```
//!
//! Each round loads a map in the stream's own order (Load), then runs uniform gets (CU), Zipf gets
//! (C), half updates (A), and 95 % scans of 100 with 5 % inserts (E), and removes half of the keys
//! at random (Del). The maps take turns within a round, so that a slow spell of the machine hits
//! all of them. Every phase's checksum must be the same for all maps. Bytes per key come from a
//! counting allocator after Load; insert latencies from one more load with a clock around each
//! insert (about 25 ns of each reading are the clock's own).

#![allow(clippy::print_stdout, reason = "the table is this program's purpose")]
#![allow(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to declare"
)]

#[path = "support/alloc.rs"]
mod alloc;
#[path = "support/datasets.rs"]
mod datasets;
#[path = "../dytis/tests/support/keysets.rs"]
mod keysets;
#[path = "support/report.rs"]
mod report;
#[path = "support/rivals.rs"]
mod rivals;
#[path = "../dytis/tests/support/streams.rs"]
mod streams;
#[path = "support/workload.rs"]
mod workload;

use std::collections::BTreeMap;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use brie_tree::BTree;
use brie_tree::nonmax::NonMaxU64;
use congee::Congee;
use crossbeam_skiplist::SkipMap;
use datasets::{Dataset, dataset};
use dytis::DytisMap;
use report::{Cell, PHASES, Report};
use rivals::Index;
use scc::TreeIndex;
use streams::Rng;
use workload::{Mix, Op, run};

const INDEXES: [&str; 7] = [
    "dytis", "std", "brie", "indexset", "skiplist", "scc", "congee",
];
const DATA_LIKE: &str = "uniform,lognormal,longitude,taxi,review,timestamp,adversarial";

struct Options {
    keys: usize,
    streams: Vec<String>,
    indexes: Vec<&'static str>,
    rounds: usize,
    out: Option<String>,
    svg: Option<String>,
}

fn options() -> Result<Options> {
    let list = |names: &str| names.split(',').map(str::to_owned).collect::<Vec<_>>();
    let index = |name: String| {
        let known = INDEXES.into_iter().find(|&index| index == name);
        known.with_context(|| {
            format!(
                "unknown index {name}, expected one of {}",
                INDEXES.join(", ")
            )
        })
    };
    let mut options = Options {
        keys: 10_000_000,
        streams: list(DATA_LIKE),
        indexes: INDEXES[..4].to_vec(),
        rounds: 3,
        out: None,
        svg: None,
    };
    let mut args = env::args().skip(1);
    while let Some(arg) = args.next() {
        // Cargo passes --bench; --test asks for a run that only shows that everything works.
        if arg == "--bench" {
            continue;
        }
        if arg == "--test" {
            options.keys = 2_000;
            options.rounds = 1;
            options.indexes = INDEXES.to_vec();
            continue;
        }
        let value = args
            .next()
            .with_context(|| format!("{arg} needs a value"))?;
        match arg.as_str() {
            "--keys" => options.keys = value.parse().with_context(|| format!("--keys {value}"))?,
            "--rounds" => {
                options.rounds = value.parse().with_context(|| format!("--rounds {value}"))?;
            }
            "--streams" => options.streams = list(&value),
            "--indexes" => {
                options.indexes = list(&value).into_iter().map(index).collect::<Result<_>>()?;
            }
            "--out" => options.out = Some(value),
            "--svg" => options.svg = Some(value),
            _ => bail!("unknown option {arg}"),
        }
    }
    ensure!(
        options.keys >= 1000,
        "--keys must be at least 1000, got {}",
        options.keys
    );
    ensure!(options.rounds >= 1, "--rounds must be at least 1");
    Ok(options)
}

/// What is done with one data set, made once for all maps.
struct Plan<'a> {
    keys: &'a [u64],
    mixes: [Vec<Op>; 4],
    doomed: Vec<u64>,
}

impl<'a> Plan<'a> {
    fn new(Dataset { keys, .. }: &'a Dataset) -> Self {
        let (keys, fresh) = keys.split_at(keys.len() - keys.len() / 20);
        let count = keys.len();
        let mixes = [
            (Mix::Uniform, count),
            (Mix::C, count),
            (Mix::A, count),
            (Mix::E, count / 5),
        ];
        let mut doomed = keys.to_vec();
        Rng::new(11).shuffle(&mut doomed);
        doomed.truncate(count / 2);
        Self {
            keys,
            mixes: mixes.map(|(mix, count)| mix.ops(keys, fresh, count, 7)),
            doomed,
        }
    }
}

/// Speeds in Mops/s in the order of [`PHASES`], bytes per key, and the checksum of what was seen.
struct Round {
    speeds: [f64; PHASES.len()],
    bytes_per_key: f64,
    checksum: u64,
}

fn timed<T>(count: usize, work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = work();
    (count as f64 / start.elapsed().as_secs_f64() / 1e6, result)
}

fn round<I: Index>(plan: &Plan<'_>) -> Round {
    let before = alloc::live_bytes();
    let (load, mut index) = timed(plan.keys.len(), || {
        let mut index = I::new();
        for &key in plan.keys {
            index.insert(key, key);
        }
        index
    });
    let bytes_per_key = (alloc::live_bytes() - before) as f64 / plan.keys.len() as f64;
    let mut speeds = [0.0; PHASES.len()];
    speeds[0] = load;
    let mut checksum = index.sum();
    for (speed, ops) in speeds[1..].iter_mut().zip(&plan.mixes) {
        let (mops, sum) = timed(ops.len(), || run(&mut index, ops));
        *speed = mops;
        checksum = checksum.rotate_left(7) ^ sum;
    }
    let (del, removed) = timed(plan.doomed.len(), || {
        plan.doomed.iter().filter(|&&key| index.remove(key)).count()
    });
    speeds[PHASES.len() - 1] = del;
    checksum = checksum.rotate_left(7) ^ removed as u64 ^ index.sum();
    Round {
        speeds,
        bytes_per_key,
        checksum,
    }
}

/// The 99.9th percentile and the longest of single inserts, in microseconds.
fn latencies<I: Index>(keys: &[u64]) -> [f64; 2] {
    let mut index = I::new();
    let mut nanos: Vec<u32> = keys
        .iter()
        .map(|&key| {
            let start = Instant::now();
            index.insert(key, key);
            u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX)
        })
        .collect();
    let rank = nanos.len() - 1 - nanos.len() / 1000;
    let p999 = *nanos.select_nth_unstable(rank).1;
    let longest = nanos.into_iter().max().unwrap_or(0);
    [p999, longest].map(|nanos| f64::from(nanos) / 1e3)
}

/// Calls the generic function for the index of that name.
macro_rules! with_index {
    ($name:expr, $call:ident($($arg:expr),*)) => {
        match $name {
            "dytis" => $call::<DytisMap<u64, u64>>($($arg),*),
            "std" => $call::<BTreeMap<u64, u64>>($($arg),*),
            "brie" => $call::<BTree<NonMaxU64, u64>>($($arg),*),
            "indexset" => $call::<indexset::BTreeMap<u64, u64>>($($arg),*),
            "skiplist" => $call::<SkipMap<u64, u64>>($($arg),*),
            "scc" => $call::<TreeIndex<u64, u64>>($($arg),*),
            _ => $call::<Congee<usize, usize>>($($arg),*),
        }
    };
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure(plan: &Plan<'_>, options: &Options, stream: &str) -> Result<Vec<Cell>> {
    let mut rounds: Vec<Vec<Round>> = options.indexes.iter().map(|_| Vec::new()).collect();
    for number in 0..options.rounds {
        for (index, rounds) in options.indexes.iter().zip(&mut rounds) {
            println!(
                "{stream}: round {} of {}, {index}",
                number + 1,
                options.rounds
            );
            rounds.push(with_index!(*index, round(plan)));
        }
    }
    // The checksums of the maps must agree: a fast wrong answer is none.
    let expected = rounds[0][0].checksum;
    for (index, rounds) in options.indexes.iter().zip(&rounds) {
        let wrong = rounds.iter().any(|round| round.checksum != expected);
        ensure!(
            !wrong,
            "{stream}: {index} and {} saw different entries",
            options.indexes[0]
        );
    }
    let cells = options.indexes.iter().zip(rounds).map(|(index, rounds)| {
        let [p999_us, max_us] = with_index!(*index, latencies(plan.keys));
        Cell {
            index,
            speeds: std::array::from_fn(|phase| {
                median(rounds.iter().map(|r| r.speeds[phase]).collect())
            }),
            bytes_per_key: rounds[0].bytes_per_key,
            p999_us,
            max_us,
        }
    });
    Ok(cells.collect())
}

fn main() -> Result<()> {
    let options = options()?;
    let mut report = Report::new(options.keys, options.rounds);
    for stream in &options.streams {
        let data = dataset(stream, options.keys + options.keys / 19)
            .with_context(|| format!("unknown stream {stream}"))?;
        let plan = Plan::new(&data);
        report.add(
            data.name,
            plan.keys.len(),
            measure(&plan, &options, data.name)?,
        );
    }
    let markdown = report.markdown();
    println!("\n{markdown}");
    if let Some(path) = options.out {
        fs::write(&path, markdown).with_context(|| path)?;
    }
    if let Some(path) = options.svg {
        fs::write(&path, report.svg()).with_context(|| path)?;
    }
    Ok(())
}
