use std::sync::atomic::Ordering;

use crossbeam_epoch as epoch;

use super::map::ConcurrentDytisMap;

/// Lengths of the segments, after checking that they cover the key space without gap or overlap
/// and that each holds what it covers.
fn segment_lens(map: &ConcurrentDytisMap<u64, u64>) -> Vec<usize> {
    let mut lens = Vec::new();
    let mut next = Some(0);
    while let Some(low) = next {
        next = map.read(low, |state| {
            assert!(state.live);
            assert_eq!(state.low, low);
            assert!(state.map.keys().all(|key| state.covers(key)));
            lens.push(state.map.len());
            state.high.checked_add(1)
        });
    }
    assert_eq!(lens.iter().sum::<usize>(), map.len());
    lens
}

#[test]
fn segments_split_at_their_bound_and_merge_when_small() {
    let map = ConcurrentDytisMap::with_segment_len(16);
    for key in 0..1000 {
        map.insert(key, key);
    }
    let lens = segment_lens(&map);
    assert!(
        lens.len() >= 1000 / 16 && lens.iter().all(|&len| (1..=16).contains(&len)),
        "{lens:?}"
    );

    for key in (0..1000).filter(|key| key % 20 != 0) {
        map.remove(&key);
    }
    let lens = segment_lens(&map);
    assert!(lens.len() <= 50, "{lens:?}");
    for key in 0..1000 {
        map.remove(&key);
    }
    assert_eq!(segment_lens(&map), [0]);
}

#[test]
fn a_map_made_from_entries_is_cut_into_even_segments() {
    let map: ConcurrentDytisMap<u64, u64> = (0..100_000).map(|key| (key << 30, key)).collect();
    let lens = segment_lens(&map);
    assert!(
        lens.len() > 24 && lens.iter().rev().skip(1).all(|&len| len == lens[0]),
        "{lens:?}"
    );
    let empty: ConcurrentDytisMap<u64, u64> = [].into_iter().collect();
    assert_eq!(segment_lens(&empty), [0]);
}

#[test]
fn the_ends_of_the_key_space_split_like_any_other_place() {
    let map = ConcurrentDytisMap::with_segment_len(4);
    for i in 0..50 {
        map.insert(i, i);
        map.insert(u64::MAX - i, i);
    }
    segment_lens(&map);
    assert_eq!(map.get(&u64::MAX), Some(0));
    assert_eq!(map.range(u64::MAX - 3..).count(), 4);
    assert_eq!(map.iter().count(), 100);
}

#[test]
fn what_was_replaced_is_reclaimed() {
    struct Witness;
    impl Drop for Witness {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Ordering::SeqCst);
        }
    }
    static DROPPED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

    // A guard of this thread's would hold the epoch back; none is left, so that a few rounds of
    // splits, each of which hands its garbage over, must advance it past the witness.
    epoch::pin().defer(|| drop(Witness));
    let map = ConcurrentDytisMap::with_segment_len(4);
    for round in 0..100_000_u64 {
        map.insert(round, round);
        if DROPPED.load(Ordering::SeqCst) == 1 {
            return;
        }
    }
    panic!("no garbage was collected in 100,000 inserts");
}
