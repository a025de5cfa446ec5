//! The generators keep their promises, so that what tests and benches show means what it says.

#[path = "support/streams.rs"]
mod streams;

use std::collections::HashSet;

use streams::{Rng, STREAMS, Stream, Zipf};

#[test]
fn every_stream_gives_exactly_n_distinct_keys_and_repeats_them() {
    for stream in STREAMS {
        for n in [0, 1, 2, 63, 64, 5000, 100_000] {
            let keys = stream.keys(n, 7);
            assert_eq!(keys.len(), n, "{}", stream.name);
            let distinct: HashSet<u64> = keys.iter().copied().collect();
            assert_eq!(distinct.len(), n, "{} repeats a key", stream.name);
            assert_eq!(
                keys,
                stream.keys(n, 7),
                "{} is not deterministic",
                stream.name
            );
        }
    }
}

#[test]
fn names_are_unique_and_found() {
    let names: HashSet<&str> = STREAMS.iter().map(|stream| stream.name).collect();
    assert_eq!(names.len(), STREAMS.len());
    assert!(names.iter().all(|name| Stream::named(name).is_some()));
    assert!(Stream::named("no such stream").is_none());
}

#[test]
fn streams_have_the_shape_of_their_name() {
    let keys = |name: &str, n: usize| Stream::named(name).unwrap().keys(n, 1);

    let shared = keys("prefix48", 65_536);
    assert!(shared.iter().all(|key| key >> 16 == shared[0] >> 16));

    let late = keys("timestamp", 50_000);
    let mut newest = 0;
    let mut behind = 0;
    for key in late {
        behind += usize::from(key < newest);
        newest = newest.max(key);
    }
    assert!(
        (0.03..0.06).contains(&(behind as f64 / 50_000.0)),
        "{behind} late"
    );

    let mut runs = keys("power_runs", 64_000);
    runs.sort_unstable();
    let starts = runs
        .windows(2)
        .filter(|pair| pair[1] != pair[0] + 1)
        .count();
    assert!((45..64).contains(&starts), "{starts} gaps");

    // The median of exp(2 z) is 1.
    let mut spread = keys("lognormal", 50_001);
    spread.sort_unstable();
    let median = spread[25_000] as f64 / (1_u64 << 46) as f64;
    assert!((0.9..1.1).contains(&median), "median {median}");

    let items: HashSet<u64> = keys("review", 50_000).iter().map(|key| key >> 40).collect();
    assert!((800..1200).contains(&items.len()), "{} items", items.len());
}

#[test]
fn zipf_ranks_stay_below_n_and_favour_the_first() {
    for n in [1, 2, 3, 1000] {
        let (zipf, mut rng) = (Zipf::new(n), Rng::new(3));
        let mut counts = vec![0_u32; n];
        for _ in 0..20_000 {
            counts[zipf.rank(&mut rng)] += 1;
        }
        assert_eq!(counts.iter().max(), counts.first(), "n = {n}");
        assert_eq!(counts.iter().sum::<u32>(), 20_000);
    }
    // p(0) = 1 / zeta(1000, 0.99) = 0.1295
    let (zipf, mut rng) = (Zipf::new(1000), Rng::new(4));
    let first = (0..100_000).filter(|_| zipf.rank(&mut rng) == 0).count();
    assert!((12_300..13_500).contains(&first), "{first}");
}
