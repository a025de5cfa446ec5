//! What the global allocator says about the map's memory.

#![allow(
    unsafe_code,
    reason = "a global allocator that counts is unsafe to declare"
)]

#[path = "support/alloc.rs"]
mod alloc;
#[path = "support/streams.rs"]
mod streams;

use alloc::live_bytes;
use dytis::{DytisMap, DytisSet};
use streams::{Rng, STREAMS};

/// Runs the work and checks that every byte that it allocated is freed at its end. Inside, it is told
/// how many bytes are live since its begin.
fn frees_everything(work: impl FnOnce(&dyn Fn() -> usize)) {
    let before = live_bytes();
    work(&|| live_bytes().wrapping_sub(before));
    assert_eq!(live_bytes(), before);
}

#[test]
fn memory_usage_is_exact_and_everything_is_freed() {
    for stream in STREAMS {
        let keys = stream.keys(30_000, 21);
        let mut doomed = keys.clone();
        Rng::new(22).shuffle(&mut doomed);

        frees_everything(|live| {
            let mut map = DytisMap::new();
            assert_eq!(live(), 0, "an empty map allocates nothing");
            for (number, &key) in keys.iter().enumerate() {
                map.insert(key, number);
                if number % 1000 == 0 {
                    assert_eq!(map.memory_usage(), live(), "{} loaded", stream.name);
                }
            }
            for (number, key) in doomed.iter().enumerate() {
                map.remove(key);
                if number % 1000 == 0 {
                    assert_eq!(map.memory_usage(), live(), "{} emptied", stream.name);
                }
            }
            assert_eq!((map.memory_usage(), live()), (0, 0), "{}", stream.name);
        });

        frees_everything(|live| {
            let mut map: DytisMap<u64, u64> = keys.iter().map(|&key| (key, !key)).collect();
            let right = map.split_off(&doomed[0]);
            let copy = map.clone();
            let bytes = [&map, &right, &copy].map(DytisMap::memory_usage);
            assert_eq!(bytes.iter().sum::<usize>(), live(), "{}", stream.name);

            // Taken apart half-way, cleared, and dropped.
            let mut pairs = copy.into_iter();
            pairs.by_ref().take(keys.len() / 4).for_each(drop);
            drop(pairs);
            map.clear();
            assert_eq!(right.memory_usage(), live(), "{}", stream.name);
        });
    }

    frees_everything(|live| {
        let mut sorted = STREAMS[0].keys(50_000, 23);
        sorted.sort_unstable();
        let scratch = live();
        let set: DytisSet<u64> = sorted.iter().copied().collect();
        let map = DytisMap::from_sorted_iter(sorted.iter().map(|&key| (key, key))).unwrap();
        let bytes = set.memory_usage() + map.memory_usage();
        assert_eq!(bytes, live() - scratch);
        // Keys out of order: what was built so far is freed.
        let refused = DytisMap::from_sorted_iter(sorted.iter().rev().map(|&key| (key, key)));
        assert!(refused.is_err());
        drop(refused);
        assert_eq!(bytes, live() - scratch);
    });
}
