//! Seeded streams of distinct `u64` keys in insertion order, for tests, benches and examples.
//!
//! Each [`Stream`] is named, deterministic in `(n, seed)`, and gives exactly `n` distinct keys.
//! Included by `#[path]` where it is needed; depends on nothing but the standard library.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::collections::HashSet;

/// A named generator of keys.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// The name by which reports and benches know it.
    pub name: &'static str,
    /// What the keys are like, in a few words.
    pub about: &'static str,
    generate: fn(usize, &mut Rng) -> Vec<u64>,
}

impl Stream {
    /// `n` distinct keys in insertion order.
    pub fn keys(&self, n: usize, seed: u64) -> Vec<u64> {
        (self.generate)(n, &mut Rng::new(seed))
    }

    /// The stream of that name.
    pub fn named(name: &str) -> Option<Self> {
        STREAMS.into_iter().find(|stream| stream.name == name)
    }
}

/// All streams: first those that look like data, then the worst cases.
pub const STREAMS: [Stream; 19] = [
    Stream {
        name: "uniform",
        about: "uniform over all of u64",
        generate: uniform,
    },
    Stream {
        name: "lognormal",
        about: "lognormal(0, 2) x 2^46",
        generate: lognormal,
    },
    Stream {
        name: "longitude",
        about: "many places of Zipf size, local skew",
        generate: longitude,
    },
    Stream {
        name: "taxi",
        about: "Morton codes of clusters that drift",
        generate: taxi,
    },
    Stream {
        name: "review",
        about: "item << 40 | ms, Zipf items arriving over time",
        generate: review,
    },
    Stream {
        name: "timestamp",
        about: "nanoseconds in bursts, 5 % late",
        generate: timestamp,
    },
    Stream {
        name: "adversarial",
        about: "dense runs, huge gaps, a moving hot spot",
        generate: adversarial,
    },
    Stream {
        name: "ascending",
        about: "0, 1, 2, ..",
        generate: ascending,
    },
    Stream {
        name: "descending",
        about: "n - 1, n - 2, .., 0",
        generate: descending,
    },
    Stream {
        name: "dense_small",
        about: "0 to n - 1, shuffled",
        generate: dense_small,
    },
    Stream {
        name: "seconds",
        about: "Unix seconds, one key each, ascending",
        generate: seconds,
    },
    Stream {
        name: "micros",
        about: "Unix microseconds, exponential gaps, ascending",
        generate: micros,
    },
    Stream {
        name: "nanos",
        about: "Unix nanoseconds, exponential gaps, ascending",
        generate: nanos,
    },
    Stream {
        name: "prefix48",
        about: "all keys share their top 48 bits (fewer above 2^16 keys)",
        generate: prefix48,
    },
    Stream {
        name: "power_runs",
        about: "dense runs from every power of two, in turn",
        generate: power_runs,
    },
    Stream {
        name: "hot_point",
        about: "uniform around one point, narrowing by halves",
        generate: hot_point,
    },
    Stream {
        name: "ends",
        about: "0, MAX, 1, MAX - 1, ..",
        generate: ends,
    },
    Stream {
        name: "sawtooth",
        about: "ascending sweeps, each between the keys of the last",
        generate: sawtooth,
    },
    Stream {
        name: "gaps",
        about: "dense blocks of 256 at random places",
        generate: gaps,
    },
];

/// `SplitMix64` (Steele, Lea, Flood 2014): small, seedable from any number, good enough for keys.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator; nearby seeds give unrelated streams.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x9e37_79b9_7f4a_7c15))
    }

    /// Uniform over `u64`.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform below `n`, which is above 0 (the bias of the multiplication is below `n / 2^64`).
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform over `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with the given mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = self.exponential(2.0).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Uniform permutation (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// The finaliser of `SplitMix64`: a bijection of `u64`.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Zipf-distributed ranks in `0..n` with exponent 0.99, as YCSB draws them: rank 0 is the most
/// frequent (Gray et al., "Quickly generating billion-record synthetic databases", 1994).
#[derive(Debug, Clone, Copy)]
pub struct Zipf {
    n: f64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

impl Zipf {
    const THETA: f64 = 0.99;

    /// Ranks below `n`, at least 1; O(n) once.
    pub fn new(n: usize) -> Self {
        let zeta_of = |n: usize| (1..=n).map(|i| (i as f64).powf(-Self::THETA)).sum::<f64>();
        let (zeta, two) = (zeta_of(n), zeta_of(2.min(n)));
        let eta = (1.0 - (2.0 / n as f64).powf(1.0 - Self::THETA)) / (1.0 - two / zeta);
        Self {
            n: n as f64,
            zeta,
            alpha: 1.0 / (1.0 - Self::THETA),
            eta,
        }
    }

    /// The next rank.
    pub fn rank(&self, rng: &mut Rng) -> usize {
        let u = rng.unit();
        let uz = u * self.zeta;
        if uz < 1.0 || self.n < 2.0 {
            return 0;
        }
        if uz < 1.0 + 0.5_f64.powf(Self::THETA) {
            return 1;
        }
        let rank = self.n * (self.eta * u - self.eta + 1.0).powf(self.alpha);
        rank.min(self.n - 1.0) as usize
    }
}

/// Draws until `n` distinct keys have come.
fn distinct(n: usize, mut draw: impl FnMut() -> u64) -> Vec<u64> {
    let mut seen = HashSet::with_capacity(n);
    let mut keys = Vec::with_capacity(n);
    while keys.len() < n {
        let key = draw();
        if seen.insert(key) {
            keys.push(key);
        }
    }
    keys
}

fn uniform(n: usize, rng: &mut Rng) -> Vec<u64> {
    let start = rng.bits();
    (0..n as u64).map(|i| mix(start.wrapping_add(i))).collect()
}

fn lognormal(n: usize, rng: &mut Rng) -> Vec<u64> {
    let scale = (1_u64 << 46) as f64;
    distinct(n, || ((2.0 * rng.normal()).exp() * scale) as u64)
}

/// 16,384 places whose sizes follow Zipf's law; within a place keys fall off on both sides with
/// a width of its own, from 2^30 to 2^44.
fn longitude(n: usize, rng: &mut Rng) -> Vec<u64> {
    const PLACES: u64 = 1 << 14;
    let salt = rng.bits();
    distinct(n, || {
        let rank = (PLACES as f64).powf(rng.unit()) as u64;
        let centre = mix(salt.wrapping_add(rank));
        let width = 2_f64.powi(30 + (mix(centre) % 15) as i32);
        let offset = rng.exponential(width) as u64;
        if rng.bits() & 1 == 0 {
            centre.saturating_add(offset)
        } else {
            centre.saturating_sub(offset)
        }
    })
}

/// 24 clusters in a 2^32 x 2^32 plane whose centres walk as the stream goes on.
fn taxi(n: usize, rng: &mut Rng) -> Vec<u64> {
    const SIDE: f64 = 4_294_967_295.0;
    let mut centres: Vec<[f64; 2]> = (0..24)
        .map(|_| [rng.unit() * SIDE, rng.unit() * SIDE])
        .collect();
    let zipf = Zipf::new(centres.len());
    distinct(n, || {
        let centre = &mut centres[zipf.rank(rng)];
        let mut point = [0; 2];
        for (axis, value) in point.iter_mut().enumerate() {
            centre[axis] = (centre[axis] + rng.normal() * SIDE / 20_000.0).clamp(0.0, SIDE);
            *value = (centre[axis] + rng.normal() * SIDE / 300.0).clamp(0.0, SIDE) as u32;
        }
        spread_bits(point[0]) << 1 | spread_bits(point[1])
    })
}

/// Bit `i` of `x` moves to bit `2 i`.
fn spread_bits(x: u32) -> u64 {
    let mut x = u64::from(x);
    for (shift, mask) in [
        (16, 0x0000_ffff_0000_ffff),
        (8, 0x00ff_00ff_00ff_00ff),
        (4, 0x0f0f_0f0f_0f0f_0f0f),
        (2, 0x3333_3333_3333_3333),
        (1, 0x5555_5555_5555_5555),
    ] {
        x = (x | x << shift) & mask;
    }
    x
}

/// One review in 50 is of a new item; every other is of the item of an earlier review drawn at
/// random, which makes the items' sizes follow a power law (Simon 1955).
fn review(n: usize, rng: &mut Rng) -> Vec<u64> {
    let salt = rng.bits();
    let mut keys: Vec<u64> = Vec::with_capacity(n);
    let (mut items, mut ms) = (0_u64, 1_u64 << 36);
    for _ in 0..n {
        let item = if keys.is_empty() || rng.below(50) == 0 {
            items += 1;
            // An odd multiplier permutes the 24-bit numbers.
            items.wrapping_mul(0x9e_3779).wrapping_add(salt) & 0xff_ffff
        } else {
            keys[rng.below(keys.len() as u64) as usize] >> 40
        };
        ms += 1 + rng.exponential(2_000.0) as u64;
        keys.push(item << 40 | ms & ((1 << 40) - 1));
    }
    keys
}

/// Bursts of about 500 events 300 ns apart, 50 ms between bursts; one event in 20 is up to some
/// seconds late.
fn timestamp(n: usize, rng: &mut Rng) -> Vec<u64> {
    let mut clock = 1_700_000_000_000_000_000_u64;
    distinct(n, || {
        let mean = if rng.below(500) == 0 {
            50_000_000.0
        } else {
            300.0
        };
        clock += 1 + rng.exponential(mean) as u64;
        let late = if rng.below(20) == 0 {
            rng.exponential(500_000_000.0) as u64
        } else {
            0
        };
        clock - late
    })
}

/// Dense runs at random multiples of 2^32. Nine keys in ten extend the hot run, which moves to a
/// fresh place every 4096 keys; the tenth extends a run of the past.
fn adversarial(n: usize, rng: &mut Rng) -> Vec<u64> {
    let salt = rng.bits() as u32;
    let mut next: Vec<u64> = Vec::new();
    (0..n)
        .map(|i| {
            if i % 4096 == 0 {
                // An odd multiplier permutes the 32-bit numbers: no two runs share a place.
                let place = (next.len() as u32)
                    .wrapping_mul(0x9e37_79b1)
                    .wrapping_add(salt);
                next.push(u64::from(place) << 32);
            }
            let runs = next.len();
            let run = if rng.below(10) == 0 {
                rng.below(runs as u64) as usize
            } else {
                runs - 1
            };
            next[run] += 1;
            next[run]
        })
        .collect()
}

fn ascending(n: usize, _: &mut Rng) -> Vec<u64> {
    (0..n as u64).collect()
}

fn descending(n: usize, _: &mut Rng) -> Vec<u64> {
    (0..n as u64).rev().collect()
}

fn dense_small(n: usize, rng: &mut Rng) -> Vec<u64> {
    let mut keys = ascending(n, rng);
    rng.shuffle(&mut keys);
    keys
}

fn seconds(n: usize, _: &mut Rng) -> Vec<u64> {
    (0..n as u64).map(|i| 1_700_000_000 + i).collect()
}

fn micros(n: usize, rng: &mut Rng) -> Vec<u64> {
    clock(n, rng, 1_700_000_000_000_000, 1_000.0)
}

fn nanos(n: usize, rng: &mut Rng) -> Vec<u64> {
    clock(n, rng, 1_700_000_000_000_000_000, 1_000_000.0)
}

fn clock(n: usize, rng: &mut Rng, start: u64, mean_gap: f64) -> Vec<u64> {
    let mut now = start;
    (0..n)
        .map(|_| {
            now += 1 + rng.exponential(mean_gap) as u64;
            now
        })
        .collect()
}

/// A random prefix and every suffix once, shuffled; above 2^16 keys the prefix is as much
/// shorter as the keys need.
fn prefix48(n: usize, rng: &mut Rng) -> Vec<u64> {
    let suffix_bits = n.next_power_of_two().trailing_zeros().max(16);
    let prefix = rng.bits() >> suffix_bits << suffix_bits;
    let mut keys: Vec<u64> = (0..1_u64 << suffix_bits)
        .map(|suffix| prefix | suffix)
        .collect();
    rng.shuffle(&mut keys);
    keys.truncate(n);
    keys
}

/// Run `r` goes from 2^r up and ends where the next begins; the runs grow in turn.
fn power_runs(n: usize, _: &mut Rng) -> Vec<u64> {
    let mut keys = Vec::with_capacity(n);
    let mut step = 0;
    while keys.len() < n {
        keys.extend(
            (0..64)
                .filter(|&run| step < 1_u64 << run)
                .map(|run| (1_u64 << run) + step),
        );
        step += 1;
    }
    keys.truncate(n);
    keys
}

/// Fifty rounds of uniform keys around one point, each round half as wide as the last, from 2^63
/// down to where the keys of a round would no longer find room, and again.
fn hot_point(n: usize, rng: &mut Rng) -> Vec<u64> {
    let point = rng.bits();
    let per_round = (n as u64).div_ceil(50).max(1);
    let narrowest = (8 * per_round).next_power_of_two();
    let (mut width, mut left) = (1_u64 << 63, per_round);
    distinct(n, || {
        if left == 0 {
            left = per_round;
            width = if width / 2 < narrowest {
                1 << 63
            } else {
                width / 2
            };
        }
        left -= 1;
        point.wrapping_sub(width / 2).wrapping_add(rng.below(width))
    })
}

fn ends(n: usize, _: &mut Rng) -> Vec<u64> {
    (0..n as u64)
        .map(|i| if i % 2 == 0 { i / 2 } else { u64::MAX - i / 2 })
        .collect()
}

/// Sweeps of 1000 keys over the whole key space, each one key to the right of the one before.
fn sawtooth(n: usize, _: &mut Rng) -> Vec<u64> {
    const SWEEP: u64 = 1000;
    (0..n as u64)
        .map(|i| (i % SWEEP) * (u64::MAX / SWEEP) + i / SWEEP)
        .collect()
}

fn gaps(n: usize, rng: &mut Rng) -> Vec<u64> {
    let salt = rng.bits();
    (0..n as u64)
        .map(|i| ((i / 256 + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) << 8) | (i % 256))
        .collect()
}
