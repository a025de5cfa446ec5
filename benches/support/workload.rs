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

/// What the mixes over one set of keys draw from; O(keys) to make, so made once for all mixes.
#[derive(Debug)]
pub struct Draws<'a> {
    keys: &'a [u64],
    /// Keys that a mix inserts, in this order, until there are no more.
    fresh: &'a [u64],
    /// The keys by popularity, which has nothing to do with their order or age.
    popular: Vec<u64>,
    zipf: Zipf,
}

impl<'a> Draws<'a> {
    pub fn new(keys: &'a [u64], fresh: &'a [u64]) -> Self {
        let mut popular = keys.to_vec();
        Rng::new(5).shuffle(&mut popular);
        Self {
            keys,
            fresh,
            popular,
            zipf: Zipf::new(keys.len()),
        }
    }

    /// `count` operations over a map that holds the keys.
    pub fn ops(&self, mix: Mix, count: usize, seed: u64) -> Vec<Op> {
        let keys = self.keys;
        let mut rng = Rng::new(seed);
        let mut fresh = self.fresh.iter().copied();
        let mut recent = if mix == Mix::D {
            keys.to_vec()
        } else {
            Vec::new()
        };
        let absent = if mix == Mix::Miss {
            absent_neighbours(keys)
        } else {
            Vec::new()
        };
        (0..count)
            .map(|_| {
                let dice = rng.below(100);
                match mix {
                    Mix::Uniform => Op::Get(keys[rng.below(keys.len() as u64) as usize]),
                    Mix::Miss => Op::Get(absent[rng.below(absent.len() as u64) as usize]),
                    Mix::D | Mix::E if dice < 5 => match fresh.next() {
                        Some(key) => {
                            if mix == Mix::D {
                                recent.push(key);
                            }
                            Op::Insert(key)
                        }
                        None => Op::Get(self.popular(&mut rng)),
                    },
                    Mix::D => Op::Get(recent[recent.len() - 1 - self.zipf.rank(&mut rng)]),
                    Mix::E => Op::Scan(self.popular(&mut rng)),
                    Mix::A if dice < 50 => Op::Update(self.popular(&mut rng)),
                    Mix::B if dice < 5 => Op::Update(self.popular(&mut rng)),
                    Mix::F if dice < 50 => Op::ReadModifyWrite(self.popular(&mut rng)),
                    Mix::A | Mix::B | Mix::C | Mix::F => Op::Get(self.popular(&mut rng)),
                }
            })
            .collect()
    }

    fn popular(&self, rng: &mut Rng) -> u64 {
        self.popular[self.zipf.rank(rng)]
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
