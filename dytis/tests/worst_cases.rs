//! Size and structure on the sequences that blow up a plain extendible directory.

use dytis::DytisMap;

/// Enough for several directory levels. `DYTIS_WORST_CASE_KEYS` asks for more, for a run in release mode.
fn keys() -> u64 {
    std::env::var("DYTIS_WORST_CASE_KEYS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(200_000)
}

fn mix(i: u64) -> u64 {
    let x = (i ^ i >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x ^ x >> 29).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// The most directories between the root and a segment, whatever the keys are; proven in `src/raw/directory.rs`.
const LEVELS: usize = 11;

/// Loads the keys and checks bytes per pair, order, levels and slots.
fn check(name: &str, bytes_per_key: usize, keys: impl Iterator<Item = u64>) -> DytisMap<u64, u64> {
    let map: DytisMap<u64, u64> = {
        let mut map = DytisMap::new();
        for key in keys {
            map.insert(key, !key);
        }
        map
    };
    let stats = map.stats();
    assert!(
        map.memory_usage() <= bytes_per_key * map.len(),
        "{name}: {} bytes, {stats:?}",
        map.memory_usage()
    );
    assert!(stats.levels <= LEVELS, "{name}: {stats:?}");
    assert!(
        stats.slots <= 16 * stats.segments + 144 * stats.directories,
        "{name}: {stats:?}"
    );
    let mut last = None;
    for (key, value) in &map {
        assert!(last < Some(key) && *value == !key, "{name}");
        last = Some(key);
    }
    map
}

#[test]
fn ascending_and_descending_loads_leave_full_buckets() {
    let n = keys();
    assert!(check("ascending", 18, 0..n).stats().utilization > 0.95);
    assert!(check("descending", 18, (0..n).rev()).stats().utilization > 0.95);
    check("descending from the top", 18, (0..n).map(|i| u64::MAX - i));
}

#[test]
fn time_stamps() {
    let n = keys();
    check(
        "seconds",
        18,
        (0..n).map(|i| 1_700_000_000 + i * 3 + mix(i) % 3),
    );
    check(
        "microseconds",
        18,
        (0..n).map(|i| 1_700_000_000_000_000 + i * 1000 + mix(i) % 900),
    );
    check(
        "nanoseconds in bursts",
        18,
        (0..n).map(|i| 1_700_000_000_000_000_000 + i / 64 * 50_000_000 + i % 64 * 700),
    );
    check(
        "late arrivals",
        24,
        (0..n).map(|i| {
            let now = 1_700_000_000_000_000_000 + i * 1000;
            if mix(i).is_multiple_of(20) {
                now - mix(i) % 1_000_000_000
            } else {
                now
            }
        }),
    );
}

#[test]
fn keys_in_a_corner_of_the_space() {
    let n = keys();
    check("below 2^20", 24, (0..n).map(|i| mix(i) >> 44));
    check(
        "48-bit prefix",
        24,
        (0..65_536_u64).map(|i| 0xdead_beef_cafe_0000 | (i.wrapping_mul(40_503) % 65_536)),
    );
}

#[test]
fn dense_runs_with_gaps() {
    let n = keys();
    let runs: Vec<u64> = (0..64).map(|bit| 1_u64 << bit).collect();
    check(
        "64 runs at powers of two",
        24,
        (0..n).map(|i| runs[(i % 64) as usize].wrapping_add(i / 64)),
    );
    check(
        "64 runs, one after the other",
        24,
        (0..n).map(|i| runs[(i * 64 / n) as usize].wrapping_add(i % (n / 64).max(1))),
    );
    check(
        "moving hot spot",
        24,
        (0..n).map(|i| (mix(i / 5000) & !0xf_ffff) | (i % 5000)),
    );
    check(
        "a thousand growing tails",
        24,
        (0..n).map(|i| (mix(i) % 1000) << 40 | i),
    );
}

#[test]
fn a_hot_point_narrowing_by_halves() {
    let n = keys();
    check(
        "hot point",
        32,
        (0..n).map(|i| (1 << 61) + (mix(i) >> (2 + i * 45 / n))),
    );
    check(
        "hot point, one key per width",
        32,
        (0..n).map(|i| (1_u64 << 63) + (mix(i) >> (1 + i % 60))),
    );
}

#[test]
fn alternating_ends_and_sawtooth() {
    let n = keys();
    // The goal is 24 at a million keys and more, where one chunk and one header weigh less; measured here: 18.07.
    check(
        "alternating ends",
        20,
        (0..n).map(|i| if i % 2 == 0 { i } else { u64::MAX - i }),
    );
    let mut map = DytisMap::new();
    for round in 0..6 {
        for i in 0..n / 4 {
            map.insert(mix(i + round * n), i);
        }
        for i in 0..n / 4 {
            assert_eq!(map.remove(&mix(i + round * n)), Some(i));
        }
        assert!(map.is_empty() && map.memory_usage() < 4096);
    }
    // A queue: appended at one end, taken at the other.
    for i in 0..n {
        map.insert(i, i);
        if i >= 10_000 {
            assert_eq!(map.pop_first(), Some((i - 10_000, i - 10_000)));
        }
    }
    assert!(map.memory_usage() < 40 * map.len(), "{:?}", map.stats());
}

#[test]
fn removal_gives_memory_back() {
    let n = keys();
    let mut map: DytisMap<u64, u64> = (0..n).map(|i| (mix(i), i)).collect();
    for i in 0..n * 9 / 10 {
        map.remove(&mix(i));
    }
    let fresh: DytisMap<u64, u64> = (n * 9 / 10..n).map(|i| (mix(i), i)).collect();
    assert!(map == fresh);
    assert!(
        map.memory_usage() * 2 <= fresh.memory_usage() * 5,
        "{} {}",
        map.memory_usage(),
        fresh.memory_usage()
    );
}
