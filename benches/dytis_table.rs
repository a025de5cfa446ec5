//! The README's table: YCSB-like phases at full size, `DytisMap` and its rivals in turn.
//!
//! ```text
//! cargo bench --bench dytis_table -- [OPTIONS]
//!   --keys N         keys per stream (10000000)
//!   --streams A,B    names of generators and key sets (the seven data-like generators)
//!   --indexes A,B    dytis,std,brie,indexset,skiplist,scc,congee (the first three)
//!   --ops N          operations of a phase at most, Load excepted (4000000)
//!   --rounds N       rounds, of which the median counts (1)
//!   --group NAME     the heading under which the results are shown (Streams)
//!   --results FILE   appends the results there, a line each
//! cargo bench --bench dytis_table -- --render FILE [--summary FILE] [--full FILE] [--svg FILE]
//! ```
//!
//! The second form makes Markdown and the plot of all results in a file; `dytis/scripts/table.sh`
//! runs both.
//!
//! Each round loads a map in the stream's own order (Load), then runs uniform gets (CU), gets of
//! absent neighbours (Miss), Zipf gets (C), half updates (A), and 95 % scans of 100 with 5 % inserts
//! (E), and removes half of the keys at random (Del). A map of its own takes the stream in tenths,
//! each inserted and removed again (Saw). Speeds are per second of processor time. The maps take turns
//! within a round, so that a slow spell of the machine hits all of them. Every phase's checksum must be the same
//! for all maps. Bytes per key come from a counting allocator after Load; insert latencies from two
//! more loads with a clock around each insert (about 25 ns of each reading are the clock's own).

#![allow(clippy::print_stdout, reason = "the table is this program's purpose")]
#![allow(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to declare"
)]

#[path = "../dytis/tests/support/alloc.rs"]
mod alloc;
#[path = "support/arguments.rs"]
mod arguments;
#[path = "support/clock.rs"]
mod clock;
#[path = "support/datasets.rs"]
mod datasets;
#[path = "../dytis/tests/support/keysets.rs"]
mod keysets;
#[path = "support/plot.rs"]
mod plot;
#[path = "support/report.rs"]
mod report;
#[path = "support/rivals.rs"]
mod rivals;
#[path = "../dytis/tests/support/streams.rs"]
mod streams;
#[path = "support/workload.rs"]
mod workload;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use brie_tree::BTree;
use brie_tree::nonmax::NonMaxU64;
use clock::ThreadClock;
use congee::Congee;
use crossbeam_skiplist::SkipMap;
use datasets::{Dataset, dataset};
use dytis::DytisMap;
use report::{Cell, PHASES, Report, header};
use rivals::Index;
use scc::TreeIndex;
use streams::Rng;
use workload::{Draws, Mix, Op, run};

const INDEXES: [&str; 7] = [
    "dytis", "std", "brie", "indexset", "skiplist", "scc", "congee",
];
const DATA_LIKE: &str = "uniform,lognormal,longitude,taxi,review,timestamp,adversarial";

#[derive(Default)]
struct Options {
    keys: usize,
    streams: Vec<String>,
    indexes: Vec<&'static str>,
    ops: usize,
    rounds: usize,
    group: String,
    results: Option<String>,
    render: Option<String>,
    summary: Option<String>,
    full: Option<String>,
    svg: Option<String>,
}

fn options() -> Result<Options> {
    let mut options = Options {
        keys: 10_000_000,
        streams: arguments::list(DATA_LIKE),
        indexes: INDEXES[..3].to_vec(),
        ops: 4_000_000,
        rounds: 1,
        group: "Streams".to_owned(),
        ..Options::default()
    };
    let every_index = INDEXES.join(",");
    for (name, value) in arguments::pairs(&[("--keys", "2000"), ("--indexes", &every_index)])? {
        match name.as_str() {
            "--keys" => options.keys = arguments::number(&name, &value, 1000)?,
            "--streams" => options.streams = arguments::list(&value),
            "--indexes" => options.indexes = arguments::choices(&name, &value, INDEXES)?,
            "--ops" => options.ops = arguments::number(&name, &value, 1)?,
            "--rounds" => options.rounds = arguments::number(&name, &value, 1)?,
            "--group" => options.group = value,
            "--results" => options.results = Some(value),
            "--render" => options.render = Some(value),
            "--summary" => options.summary = Some(value),
            "--full" => options.full = Some(value),
            "--svg" => options.svg = Some(value),
            _ => bail!("unknown option {name}"),
        }
    }
    Ok(options)
}

/// What is done with one data set, made once for all maps.
struct Plan<'a> {
    keys: &'a [u64],
    mixes: [Vec<Op>; 5],
    doomed: Vec<u64>,
    /// How many keys pass through the map of the phase Saw.
    passing: usize,
}

impl<'a> Plan<'a> {
    fn new(Dataset { keys, .. }: &'a Dataset, most: usize) -> Self {
        let (keys, fresh) = keys.split_at(keys.len() - keys.len() / 20);
        let count = keys.len().min(most);
        let draws = Draws::new(keys, fresh);
        let mixes = [
            (Mix::Uniform, count),
            (Mix::Miss, count),
            (Mix::C, count),
            (Mix::A, count),
            (Mix::E, count / 4),
        ];
        let mut doomed = keys.to_vec();
        Rng::new(11).shuffle(&mut doomed);
        doomed.truncate(most.min(keys.len() / 2));
        Self {
            keys,
            mixes: mixes.map(|(mix, count)| draws.ops(mix, count, 7)),
            doomed,
            passing: keys.len().min(most / 2),
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
    let clock = ThreadClock::start();
    let result = work();
    (count as f64 / clock.seconds().max(1e-9) / 1e6, result)
}

fn insert_all<I: Index>(index: &mut I, keys: &[u64]) {
    for &key in keys {
        index.insert(key, key);
    }
}

fn remove_all<I: Index>(index: &mut I, keys: &[u64]) -> usize {
    keys.iter().filter(|&&key| index.remove(key)).count()
}

fn round<I: Index>(plan: &Plan<'_>) -> Round {
    let before = alloc::live_bytes();
    let mut index = I::new();
    let (load, ()) = timed(plan.keys.len(), || insert_all(&mut index, plan.keys));
    let bytes_per_key = alloc::live_bytes().wrapping_sub(before) as f64 / plan.keys.len() as f64;
    let mut speeds = vec![load];
    let mut checksum = index.sum();
    for ops in &plan.mixes {
        let (speed, sum) = timed(ops.len(), || run(&mut index, ops));
        speeds.push(speed);
        checksum = checksum.rotate_left(7) ^ sum;
    }
    let (del, removed) = timed(plan.doomed.len(), || remove_all(&mut index, &plan.doomed));
    checksum = checksum.rotate_left(7) ^ removed as u64 ^ index.sum();
    drop(index);

    let mut index = I::new();
    let (saw, removed) = timed(2 * plan.passing, || {
        let tenths = plan.keys[..plan.passing].chunks(plan.keys.len().div_ceil(10));
        tenths.fold(0, |removed, keys| {
            insert_all(&mut index, keys);
            removed + remove_all(&mut index, keys)
        })
    });
    checksum = checksum.rotate_left(7) ^ removed as u64 ^ index.sum();
    speeds.extend([del, saw]);
    Round {
        speeds: speeds.try_into().expect("a speed for each phase"),
        bytes_per_key,
        checksum,
    }
}

/// The 99.9th percentile and the longest of single inserts, in microseconds. The keys are loaded
/// twice, and the faster time of each insert counts, so that an interruption by another program does not.
fn latencies<I: Index>(keys: &[u64]) -> [f64; 2] {
    let mut nanos = vec![u32::MAX; keys.len()];
    for _ in 0..2 {
        let mut index = I::new();
        for (&key, fastest) in keys.iter().zip(&mut nanos) {
            let start = Instant::now();
            index.insert(key, key);
            let elapsed = u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX);
            *fastest = elapsed.min(*fastest);
        }
    }
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
    for _ in 0..options.rounds {
        for (index, rounds) in options.indexes.iter().zip(&mut rounds) {
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
            group: options.group.clone(),
            stream: stream.to_owned(),
            keys: plan.keys.len(),
            index: (*index).to_owned(),
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

fn measure_all(options: &Options) -> Result<()> {
    let mut results = vec![header(options.rounds)];
    for stream in &options.streams {
        let data = dataset(stream, options.keys + options.keys / 19)
            .with_context(|| format!("unknown stream {stream}"))?;
        let plan = Plan::new(&data, options.ops);
        for cell in measure(&plan, options, data.name)? {
            println!("{cell}");
            results.push(cell.to_string());
        }
    }
    if let Some(path) = &options.results {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let lines = results.join("\n") + "\n";
        let written = file.and_then(|mut file| file.write_all(lines.as_bytes()));
        written.with_context(|| path.clone())?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let options = options()?;
    let Some(path) = &options.render else {
        return measure_all(&options);
    };
    let results = fs::read_to_string(path).with_context(|| path.clone())?;
    let report: Report = results.parse().with_context(|| path.clone())?;
    let outputs = [
        (&options.summary, report.summary()),
        (&options.full, report.full()),
        (&options.svg, report.svg()),
    ];
    for (path, text) in outputs {
        match path {
            Some(path) => fs::write(path, text).with_context(|| path.clone())?,
            None => println!("{text}"),
        }
    }
    Ok(())
}
