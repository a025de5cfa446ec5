//! `ConcurrentDytisMap` through its public face: one thread against `BTreeMap`, then many threads.
//! Segments hold a few entries here, so that splits and merges never stop.
//!
//! `DYTIS_STRESS_SECONDS=60 cargo test --release -p dytis --test concurrent stress` runs the stress
//! test for a minute.

#[path = "support/history.rs"]
mod history;
#[path = "support/streams.rs"]
mod streams;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use dytis::{ConcurrentDytisMap, DytisMap};
use history::{Call, Event, linearisable};
use proptest::prelude::*;
use streams::{Rng, STREAMS};

#[derive(Debug, Clone)]
enum Op {
    Insert(u64, u32),
    Remove(u64),
    Get(u64),
    Update(u64),
    Compute(u64, Option<u32>),
    GetOrInsert(u64, u32),
    Range(Bound<u64>, Bound<u64>),
    Scan(u64, usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let key = prop_oneof![0_u64..60, Just(u64::MAX), Just(u64::MAX - 1), any::<u64>()];
    let bound = prop_oneof![
        key.clone().prop_map(Bound::Included),
        key.clone().prop_map(Bound::Excluded),
        Just(Bound::Unbounded)
    ];
    let op = prop_oneof![
        4 => (key.clone(), any::<u32>()).prop_map(|(key, value)| Op::Insert(key, value)),
        3 => key.clone().prop_map(Op::Remove),
        1 => key.clone().prop_map(Op::Get),
        1 => key.clone().prop_map(Op::Update),
        1 => (key.clone(), any::<Option<u32>>()).prop_map(|(key, value)| Op::Compute(key, value)),
        1 => (key.clone(), any::<u32>()).prop_map(|(key, value)| Op::GetOrInsert(key, value)),
        1 => (bound.clone(), bound).prop_map(|(from, to)| Op::Range(from, to)),
        1 => (key, 0_usize..300).prop_map(|(key, n)| Op::Scan(key, n)),
    ];
    prop::collection::vec(op, 0..400)
}

/// Whether `BTreeMap::range` takes these bounds.
fn is_range(from: Bound<u64>, to: Bound<u64>) -> bool {
    match (from, to) {
        (Bound::Excluded(from), Bound::Excluded(to)) => from < to,
        (Bound::Unbounded, _) | (_, Bound::Unbounded) => true,
        (
            Bound::Included(from) | Bound::Excluded(from),
            Bound::Included(to) | Bound::Excluded(to),
        ) => from <= to,
    }
}

#[test]
#[allow(clippy::zero_sized_map_values, reason = "only the ranges matter")]
fn bad_ranges_panic_as_in_a_btree_map_with_entries() {
    let map: ConcurrentDytisMap<u64, ()> = [(3, ())].into_iter().collect();
    let model = BTreeMap::from([(3_u64, ())]);
    for bounds in [
        (Bound::Included(4), Bound::Included(3)),
        (Bound::Included(4), Bound::Excluded(3)),
        (Bound::Excluded(3), Bound::Excluded(3)),
        (Bound::Included(3), Bound::Excluded(3)),
        (Bound::Excluded(3), Bound::Included(3)),
    ] {
        let panics = catch_unwind(AssertUnwindSafe(|| drop(map.range(bounds)))).is_err();
        let model_panics = catch_unwind(|| model.range(bounds).count()).is_err();
        assert_eq!(panics, model_panics, "{bounds:?}");
        assert_eq!(panics, !is_range(bounds.0, bounds.1), "{bounds:?}");
    }
}

proptest! {
    #[test]
    fn one_thread_sees_what_a_btree_map_shows(ops in ops(), segment_len in 4_usize..20) {
        let map = ConcurrentDytisMap::with_segment_len(segment_len);
        let mut model = BTreeMap::new();
        for op in ops {
            match op {
                Op::Insert(key, value) => prop_assert_eq!(map.insert(key, value), model.insert(key, value)),
                Op::Remove(key) => prop_assert_eq!(map.remove(&key), model.remove(&key)),
                Op::Get(key) => {
                    prop_assert_eq!(map.get(&key), model.get(&key).copied());
                    prop_assert_eq!(map.contains_key(&key), model.contains_key(&key));
                }
                Op::Update(key) => {
                    let old = model.get(&key).copied();
                    model.entry(key).and_modify(|value| *value ^= 1);
                    prop_assert_eq!(map.update(&key, |value| value ^ 1), old);
                }
                Op::Compute(key, new) => {
                    let old = model.remove(&key);
                    if let Some(value) = new {
                        model.insert(key, value);
                    }
                    let got = map.compute(key, |value| {
                        assert_eq!(value.copied(), old);
                        new
                    });
                    prop_assert_eq!(got, old);
                }
                Op::GetOrInsert(key, value) => {
                    prop_assert_eq!(map.get_or_insert_with(key, || value), *model.entry(key).or_insert(value));
                }
                Op::Range(from, to) if is_range(from, to) => {
                    let expected: Vec<_> =
                        model.range((from, to)).map(|(&key, &value)| (key, value)).collect();
                    prop_assert_eq!(map.range((from, to)).collect::<Vec<_>>(), expected);
                }
                Op::Range(..) => {}
                Op::Scan(from, n) => {
                    let mut got = Vec::new();
                    let count = map.scan(from, n, |key, &value| got.push((key, value)));
                    let expected: Vec<_> = model.range(from..).take(n).map(|(&key, &value)| (key, value)).collect();
                    prop_assert_eq!(count, expected.len());
                    prop_assert_eq!(got, expected);
                }
            }
            prop_assert_eq!(map.len(), model.len());
        }
        prop_assert!(map.iter().eq(model.iter().map(|(&key, &value)| (key, value))));
        let plain = DytisMap::from(map);
        prop_assert!(plain.iter().eq(model.iter().map(|(&key, value)| (key, value))));
        let again = ConcurrentDytisMap::from(plain);
        prop_assert!(again.iter().eq(model));
    }
}

#[test]
fn every_stream_goes_in_and_out_again() {
    for stream in STREAMS {
        let keys = stream.keys(20_000, 3);
        let map = ConcurrentDytisMap::with_segment_len(64);
        for &key in &keys {
            assert_eq!(map.insert(key, !key), None, "{}", stream.name);
        }
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        assert!(
            map.iter().eq(sorted.iter().map(|&key| (key, !key))),
            "{}",
            stream.name
        );
        assert!(
            keys.iter().all(|key| map.get(key) == Some(!key)),
            "{}",
            stream.name
        );
        assert!(
            keys.iter().all(|key| map.remove(key) == Some(!key)),
            "{}",
            stream.name
        );
        assert!(
            map.is_empty() && map.iter().next().is_none(),
            "{}",
            stream.name
        );
    }
}

#[test]
fn memory_follows_the_entries_under_churn() {
    let map = ConcurrentDytisMap::new();
    let window = 20_000_u64;
    let mut most = 0;
    // A window of keys that wanders over the key space: what it leaves must be given back.
    for i in 0..10 * window {
        map.insert(i << 20, i);
        if let Some(last) = i.checked_sub(window) {
            assert_eq!(map.remove(&(last << 20)), Some(last));
        }
        if i % 5_000 == 0 && i > window {
            most = most.max(map.memory_usage());
        }
    }
    assert_eq!(map.len() as u64, window);
    assert!(most < 64 * window as usize, "{most} bytes");
    for i in 9 * window..10 * window {
        map.remove(&(i << 20));
    }
    assert!(
        map.memory_usage() < 64 * 1024,
        "{} bytes when empty",
        map.memory_usage()
    );
}

#[test]
fn the_map_goes_between_threads_as_its_keys_and_values_do() {
    fn shared<T: Send + Sync>() {}
    shared::<ConcurrentDytisMap<u64, String>>();
}

#[test]
fn values_are_dropped_once_and_none_is_kept() {
    let witness = Arc::new(());
    {
        let map = ConcurrentDytisMap::with_segment_len(8);
        for key in 0..1000_u64 {
            map.insert(key * 7 % 1000, Arc::clone(&witness));
        }
        for key in (0..1000).step_by(3) {
            map.remove(&key);
        }
        assert_eq!(Arc::strong_count(&witness), map.len() + 1);
        let plain = DytisMap::from(map);
        assert_eq!(Arc::strong_count(&witness), plain.len() + 1);
        let _again = ConcurrentDytisMap::from(plain);
    }
    assert_eq!(Arc::strong_count(&witness), 1);
}

#[test]
fn a_panicking_closure_changes_and_poisons_nothing() {
    let map: ConcurrentDytisMap<u64, u64> = (0..100).map(|key| (key, key)).collect();
    let panics = |work: &dyn Fn()| assert!(catch_unwind(AssertUnwindSafe(work)).is_err());
    panics(&|| _ = map.compute(5, |_| panic!("present")));
    panics(&|| _ = map.compute(500, |_| panic!("absent")));
    panics(&|| _ = map.update(&6, |_| panic!("update")));
    panics(&|| _ = map.get_or_insert_with(501, || panic!("fill")));
    assert!(map.iter().eq((0..100).map(|key| (key, key))));
    assert_eq!(map.update(&5, |value| value + 1), Some(5));
    assert_eq!(map.get(&5), Some(6));
    assert_eq!(map.insert(500, 1), None);
}

#[test]
fn no_one_waits_for_a_writer_of_another_segment() {
    let map: ConcurrentDytisMap<u64, u64> = ConcurrentDytisMap::with_segment_len(4);
    for key in 0..100 {
        map.insert(key, key);
    }
    let (inside, is_inside) = mpsc::channel();
    let (release, may_leave) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let map = &map;
        scope.spawn(move || {
            map.compute(50, |value| {
                inside.send(()).unwrap();
                may_leave.recv().unwrap();
                value.map(|value| value + 1)
            });
        });
        is_inside.recv().unwrap();
        // The writer now holds the segment of 50, which covers at most 5 keys on either side.
        // Everything below would hang if it waited for that segment.
        for key in (0..45).chain(56..100) {
            assert_eq!(map.get(&key), Some(key));
            assert_eq!(map.update(&key, |value| *value), Some(key));
        }
        assert_eq!(map.range(0..45).count(), 45);
        for key in 1000..1100 {
            map.insert(key, key);
        }
        assert_eq!(map.scan(1000, 100, |_, _| ()), 100);
        for key in 1000..1100 {
            map.remove(&key);
        }
        release.send(()).unwrap();
    });
    assert_eq!(map.get(&50), Some(51));
}

#[test]
fn the_checker_tells_right_from_wrong() {
    let event = |call, result, start, end| Event {
        call,
        result,
        start,
        end,
    };
    let insert = event(Call::Insert(1), None, 0, 3);
    // While the insert runs a reader may see it or not, but not see it and then miss it.
    let reads = |first, second| {
        vec![
            event(Call::Get, first, 1, 2),
            event(Call::Get, second, 4, 5),
        ]
    };
    assert!(linearisable(&[vec![insert], reads(None, Some(1))]));
    assert!(linearisable(&[vec![insert], reads(Some(1), Some(1))]));
    assert!(!linearisable(&[vec![insert], reads(Some(1), None)]));
    assert!(!linearisable(&[vec![insert], reads(None, None)]));
    assert!(!linearisable(&[
        vec![insert],
        vec![event(Call::Insert(2), None, 1, 2)]
    ]));
}

/// Makes the call on the map.
fn run(call: Call, map: &ConcurrentDytisMap<u64, u64>, key: u64) -> Option<u64> {
    match call {
        Call::Get => map.get(&key),
        Call::Insert(value) => map.insert(key, value),
        Call::Remove => map.remove(&key),
        Call::Update(add) => map.update(&key, |value| value + add),
        Call::Toggle(value) => {
            map.compute(key, |old| if old.is_some() { None } else { Some(value) })
        }
        Call::GetOrInsert(value) => Some(map.get_or_insert_with(key, || value)),
    }
}

#[test]
fn histories_are_linearisable() {
    const THREADS: u64 = 3;
    const KEYS: u64 = 4;
    for round in 0..400 {
        let map = ConcurrentDytisMap::with_segment_len(4);
        let clock = AtomicU64::new(0);
        let logs: Vec<Vec<Vec<Event>>> = thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let (map, clock) = (&map, &clock);
                    scope.spawn(move || {
                        let mut rng = Rng::new(round * THREADS + thread);
                        let mut log = vec![Vec::new(); KEYS as usize];
                        for step in 0..60 {
                            let slot = rng.below(KEYS);
                            let call = Call::random(&mut rng, 1 + thread + THREADS * step);
                            let start = clock.fetch_add(1, Ordering::SeqCst);
                            let result = run(call, map, slot * 100);
                            let end = clock.fetch_add(1, Ordering::SeqCst);
                            log[slot as usize].push(Event {
                                call,
                                result,
                                start,
                                end,
                            });
                            // Keys beside those under watch come and go, so that their segments
                            // split and merge.
                            let filler = rng.below(KEYS * 100) | 1;
                            if rng.below(2) == 0 {
                                map.insert(filler, 0)
                            } else {
                                map.remove(&filler)
                            };
                        }
                        log
                    })
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap())
                .collect()
        });
        for key in 0..KEYS as usize {
            let history: Vec<Vec<Event>> = logs.iter().map(|log| log[key].clone()).collect();
            assert!(
                linearisable(&history),
                "round {round}, key {key}: {history:#?}"
            );
        }
    }
}

#[test]
fn get_or_insert_with_makes_one_value() {
    for key in 0..200_u64 {
        let map = ConcurrentDytisMap::with_segment_len(4);
        let made = AtomicUsize::new(0);
        let get = || map.get_or_insert_with(key, || made.fetch_add(1, Ordering::SeqCst));
        thread::scope(|scope| {
            scope.spawn(get);
            scope.spawn(get);
        });
        assert_eq!((made.into_inner(), map.get(&key)), (1, Some(0)));
    }
}

/// Readers, writers, removers and scanners at once. Multiples of 10 are there throughout and
/// count what was added to them; keys that end in 1 to 8 come and go; keys that end in 9 never
/// are.
#[test]
fn stress() {
    const SPAN: u64 = 5_000;
    let seconds = std::env::var("DYTIS_STRESS_SECONDS").map_or(2, |text| text.parse().unwrap());
    let map = ConcurrentDytisMap::with_segment_len(16);
    for key in (0..SPAN).step_by(10) {
        map.insert(key, 0_u64);
    }
    let (stop, added) = (AtomicBool::new(false), AtomicU64::new(0));
    let running = || !stop.load(Ordering::Relaxed);
    thread::scope(|scope| {
        for thread in 0..2 {
            let (map, added) = (&map, &added);
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                while running() {
                    let base = rng.below(SPAN / 10) * 10;
                    let guest = base + 1 + rng.below(8);
                    match rng.below(5) {
                        0 => _ = map.insert(guest, guest),
                        1 | 2 => _ = map.remove(&guest),
                        3 => {
                            assert!(map.update(&base, |count| count + 1).is_some());
                            added.fetch_add(1, Ordering::Relaxed);
                        }
                        _ => {
                            map.compute(base, |count| count.map(|count| count + 1));
                            added.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    // A sweep over a stretch, to grow and to empty whole segments.
                    if rng.below(200) == 0 {
                        for key in (base..(base + 500).min(SPAN))
                            .filter(|key| (1..=8).contains(&(key % 10)))
                        {
                            if thread == 0 {
                                map.insert(key, key)
                            } else {
                                map.remove(&key)
                            };
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            let mut rng = Rng::new(7);
            while running() {
                let base = rng.below(SPAN / 10) * 10;
                assert!(map.get(&base).is_some(), "{base} is gone");
                assert_eq!(map.get(&(base + 9)), None);
                if let Some(value) = map.get(&(base + 3)) {
                    assert_eq!(value, base + 3);
                }
            }
        });
        scope.spawn(|| {
            let mut rng = Rng::new(8);
            while running() {
                let (from, len) = (rng.below(SPAN), rng.below(SPAN));
                let keys: Vec<u64> = map.range(from..from + len).map(|(key, _)| key).collect();
                assert!(keys.is_sorted_by(|a, b| a < b), "out of order from {from}");
                assert!(
                    keys.iter()
                        .all(|key| key % 10 != 9 && (from..from + len).contains(key))
                );
                let fixed = keys.iter().filter(|&key| key % 10 == 0).count() as u64;
                let expected = (from + len)
                    .min(SPAN)
                    .div_ceil(10)
                    .saturating_sub(from.div_ceil(10));
                assert_eq!(fixed, expected, "{from} + {len}");
            }
        });
        // A clock, not a condition: how long to run says nothing about what must hold.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(seconds) {
            thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let counted: u64 = map
        .iter()
        .filter(|(key, _)| key % 10 == 0)
        .map(|(_, count)| count)
        .sum();
    assert_eq!(counted, added.into_inner(), "an addition was lost");
    assert_eq!(map.len(), map.iter().count());
}
