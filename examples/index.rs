//! `dytis` in five minutes: an ordered map used like `BTreeMap`, its scans and ranges, what it looks
//! like inside, the same map shared by threads, and how dynamic a stream of keys is.
//!
//! ```text
//! cargo run --release --example index                    # a cut of a year of flight times
//! cargo run --release --example index -- FILE            # a key file of one's own
//! ```
//!
//! A key file is a `u64` count, then that many `u64` keys in the order of their insertion, all
//! little-endian.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example shows its results"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use dytis::dynamics::{DynamicProfile, ProfileOptions};
use dytis::{ConcurrentDytisMap, DytisMap};

const DEFAULT_KEYS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/examples/data/keys/nyc_time.bin"
);

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let path = args.next().unwrap_or_else(|| PathBuf::from(DEFAULT_KEYS));
    let shown = match args.next() {
        None => show(&path),
        Some(extra) => Err(anyhow::anyhow!(
            "expected one key file, got also {}",
            extra.display()
        )),
    };
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn show(path: &Path) -> Result<()> {
    let keys = read_keys(path).with_context(|| path.display().to_string())?;
    println!("{} keys of {}\n", keys.len(), path.display());
    like_a_btree_map(&keys);
    shared_by_threads(&keys);
    how_dynamic(&keys)
}

fn read_keys(path: &Path) -> Result<Vec<u64>> {
    let bytes = fs::read(path)?;
    let (words, rest) = bytes.as_chunks::<8>();
    let Some((count, keys)) = words.split_first() else {
        bail!(
            "torn key file: expected a count of 8 bytes, got {} bytes",
            bytes.len()
        );
    };
    let count = u64::from_le_bytes(*count);
    ensure!(
        keys.len() as u64 == count && rest.is_empty(),
        "torn key file: expected {count} keys of 8 bytes, got {} bytes after the count",
        bytes.len() - 8
    );
    ensure!(count > 0, "the key file has no keys");
    Ok(keys.iter().map(|key| u64::from_le_bytes(*key)).collect())
}

/// What changes from `BTreeMap` is the name of the type, and that keys come by value.
fn like_a_btree_map(keys: &[u64]) {
    let mut map = DytisMap::new();
    for (position, &key) in keys.iter().enumerate() {
        map.insert(key, position);
    }
    let (first, last) = (map.first_key_value(), map.last_key_value());
    println!("first and last entry        {first:?} {last:?}");

    let middle = keys[keys.len() / 2];
    *map.entry(middle).or_insert(0) += 1;
    println!("get                         {:?}", map.get(&middle));

    // A scan visits the next n entries; a range is any of std's, from both ends.
    let mut positions = Vec::new();
    map.scan(middle, 5, |_, &position| positions.push(position));
    println!("positions of the next five  {positions:?}");
    println!(
        "the one below               {:?}",
        map.range(..middle).next_back()
    );

    let before = map.memory_usage();
    let stats = map.stats();
    println!(
        "heap bytes per key          {:.1}",
        before as f64 / map.len() as f64
    );
    println!(
        "segments, buckets           {}, {}",
        stats.segments, stats.buckets
    );
    println!("utilisation                 {:.2}", stats.utilization);
    println!(
        "splits, remaps, expansions  {}, {}, {}",
        stats.splits, stats.remaps, stats.expansions
    );

    // What is removed is given back.
    map.retain(|key, _| key % 10 == 0);
    println!(
        "bytes after retaining {:>5}  {} of {before}\n",
        map.len(),
        map.memory_usage()
    );
}

/// Two threads insert the two halves; each insert is seen by whoever looks after it returned.
fn shared_by_threads(keys: &[u64]) {
    let map = ConcurrentDytisMap::new();
    let (left, right) = keys.split_at(keys.len() / 2);
    thread::scope(|scope| {
        for half in [left, right] {
            let map = &map;
            scope.spawn(move || {
                for &key in half {
                    map.compute(key, |count: Option<&u32>| {
                        Some(count.map_or(1, |count| count + 1))
                    });
                }
            });
        }
    });
    println!("two threads inserted        {} distinct keys\n", map.len());
}

/// The measures of the stream as it came, and of the same keys shuffled, whose distribution stands still.
fn how_dynamic(keys: &[u64]) -> Result<()> {
    // Parts of a default length, or shorter ones for a short file.
    let part_len = (keys.len() / 4).clamp(16, 4096);
    let options = ProfileOptions::new().with_part_len(part_len);
    let profile: DynamicProfile = options.profile(keys.iter().copied())?;
    println!("the stream as it came:\n{profile}\n");

    // An odd multiplier permutes the numbers, so that this is an order that has nothing to do with theirs.
    let mut shuffled = keys.to_vec();
    shuffled.sort_by_key(|key| key.wrapping_mul(0x9e37_79b9_7f4a_7c15).reverse_bits());
    println!("the same keys shuffled:\n{}", options.profile(shuffled)?);
    Ok(())
}
