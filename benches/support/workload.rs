//! Mixes of operations after YCSB (Cooper et al., `SoCC` 2010), made before the clock starts.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use super::rivals::Index;
use super::streams::{Rng, Zipf};

/// Entries that a scan of workload E visits.
pub const SCAN_LEN: usize = 100;

/// One operation.
#[derive(Debug, Clone, Copy)]
pub enum Op {
    Get(u64),
    Update(u64),
    Insert(u64),
    Scan(u64),
    ReadModifyWrite(u64),
}

/// What a mix consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Gets of present keys drawn uniformly.
    Uniform,
    /// Gets of absent keys next to present ones drawn uniformly.
    Miss,
    /// 50 % reads, 50 % updates, Zipf.
    A,
    /// 95 % reads, 5 % updates, Zipf.
    B,
    /// Reads, Zipf.
    C,
    /// 95 % reads of recent keys, 5 % inserts.
    D,
    /// 95 % scans of 100 from Zipf starts, 5 % inserts.
    E,
    /// 50 % reads, 50 % read-modify-writes, Zipf.
    F,
}

impl Mix {
    /// `count` operations over a map that holds `keys`; inserts take the keys of `fresh` in order
    /// and stop when there are no more.
    pub fn ops(self, keys: &[u64], fresh: &[u64], count: usize, seed: u64) -> Vec<Op> {
        let mut rng = Rng::new(seed);
        let zipf = Zipf::new(keys.len());
        // Which keys are popular has nothing to do with their order or age.
        let mut popular = keys.to_vec();
        rng.shuffle(&mut popular);
        let mut fresh = fresh.iter().copied();
        let mut recent = keys.to_vec();
        let absent = (self == Self::Miss).then(|| absent_neighbours(keys));
        (0..count)
            .map(|_| {
                let dice = rng.below(100);
                let key = popular[zipf.rank(&mut rng)];
                match self {
                    Self::Uniform => Op::Get(keys[rng.below(keys.len() as u64) as usize]),
                    Self::Miss => {
                        let absent = absent.as_deref().unwrap_or_default();
                        Op::Get(absent[rng.below(absent.len() as u64) as usize])
                    }
                    Self::A if dice < 50 => Op::Update(key),
                    Self::B if dice < 5 => Op::Update(key),
                    Self::F if dice < 50 => Op::ReadModifyWrite(key),
                    Self::A | Self::B | Self::C | Self::F => Op::Get(key),
                    Self::D | Self::E if dice < 5 => match fresh.next() {
                        Some(key) => {
                            recent.push(key);
                            Op::Insert(key)
                        }
                        None => Op::Get(key),
                    },
                    Self::D => Op::Get(recent[recent.len() - 1 - zipf.rank(&mut rng)]),
                    Self::E => Op::Scan(key),
                }
            })
            .collect()
    }
}

/// Keys just above present ones that are themselves absent. Of a set without gaps, the first key
/// beyond its end.
fn absent_neighbours(keys: &[u64]) -> Vec<u64> {
    let mut sorted = keys.to_vec();
    sorted.sort_unstable();
    let after_gap = sorted
        .windows(2)
        .filter(|pair| pair[1] - pair[0] > 1)
        .map(|pair| pair[0] + 1);
    let beyond = sorted
        .last()
        .filter(|&&key| key < u64::MAX - 1)
        .map(|&key| key + 1);
    after_gap.chain(beyond).collect()
}

/// Runs the operations; the sum of all they saw keeps the compiler honest and is the same for
/// every correct map.
pub fn run<I: Index>(index: &mut I, ops: &[Op]) -> u64 {
    let mut sum = 0_u64;
    for &op in ops {
        sum = sum.wrapping_add(match op {
            Op::Get(key) => index.get(key).unwrap_or(1),
            Op::Update(key) => {
                index.update(key, sum);
                0
            }
            Op::Insert(key) => {
                index.insert(key, key);
                0
            }
            Op::Scan(from) => index.scan(from, SCAN_LEN),
            Op::ReadModifyWrite(key) => {
                let value = index.get(key).unwrap_or(1);
                index.update(key, value.wrapping_add(1));
                value
            }
        });
    }
    sum
}
