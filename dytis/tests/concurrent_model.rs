//! The concurrent map's own source on shuttle's scheduler, which tries thousands of interleavings
//! at every lock, with segments of 4 entries so that splits and merges happen in between.
//!
//! The source is compiled into this test with shuttle's locks in place of the standard ones; the
//! epoch reclamation below it is the real one. `DYTIS_MODEL_RUNS` sets how many schedules are tried.

#![allow(
    dead_code,
    unnameable_types,
    unreachable_pub,
    reason = "the included source is written for the crate"
)]

extern crate alloc;

// The names under which the included source knows the rest of the crate.
use dytis::{DytisMap, Key};
mod sync {
    pub(crate) use shuttle::sync::atomic::AtomicUsize;
    pub(crate) use shuttle::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
}

#[path = "../src/concurrent"]
mod concurrent {
    mod directory;
    mod iter;
    mod map;
    mod segment;

    pub use map::ConcurrentDytisMap;
}
#[path = "support/history.rs"]
mod history;
#[path = "support/streams.rs"]
mod streams;

use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use concurrent::ConcurrentDytisMap;
use history::{Call, Event, linearisable};
use shuttle::thread;
use streams::Rng;

/// A key that the splits of its segment move: it is not the lowest of its segment.
const HOT: u64 = 110;

type Map = ConcurrentDytisMap<u64, u64>;

/// Tries schedules drawn at random and schedules with few, deep preemptions.
fn model(test: fn(u64)) {
    let runs = env::var("DYTIS_MODEL_RUNS").map_or(400, |runs| runs.parse().unwrap());
    let seed = AtomicU64::new(0);
    let test = Arc::new(move || test(seed.fetch_add(1, Ordering::Relaxed)));
    let again = Arc::clone(&test);
    shuttle::check_random(move || test(), runs);
    shuttle::check_pct(move || again(), runs, 3);
}

fn spawn<T: Send + 'static>(
    map: &Arc<Map>,
    work: impl FnOnce(&Map) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let map = Arc::clone(map);
    thread::spawn(move || work(&map))
}

/// Full of keys 0, 10, 20, .. below 200, in segments of at most 4.
fn filled() -> Arc<Map> {
    let map = Map::with_segment_len(4);
    for key in (0..200).step_by(10) {
        map.insert(key, key);
    }
    Arc::new(map)
}

#[test]
fn point_operations_are_linearisable_while_segments_split_and_merge() {
    model(|seed| {
        let (map, clock) = (filled(), Arc::new(AtomicU64::new(0)));
        let workers: Vec<_> = (0..3)
            .map(|worker| {
                let clock = Arc::clone(&clock);
                spawn(&map, move |map| {
                    let mut rng = Rng::new(3 * seed + worker);
                    let mut log = Vec::new();
                    for step in 0..4 {
                        let call = Call::random(&mut rng, 1000 * (worker + 1) + step);
                        let start = clock.fetch_add(1, Ordering::SeqCst);
                        let result = match call {
                            Call::Get => map.get(&HOT),
                            Call::Insert(value) => map.insert(HOT, value),
                            Call::Remove => map.remove(&HOT),
                            Call::Update(add) => map.update(&HOT, |value| value + add),
                            Call::Toggle(value) => {
                                map.compute(HOT, |old| old.is_none().then_some(value))
                            }
                            Call::GetOrInsert(value) => Some(map.get_or_insert_with(HOT, || value)),
                        };
                        let end = clock.fetch_add(1, Ordering::SeqCst);
                        log.push(Event {
                            call,
                            result,
                            start: start + 2,
                            end: end + 2,
                        });
                        // One worker fills the neighbourhood of HOT, the others empty it: the
                        // segment of HOT splits and merges.
                        for _ in 0..3 {
                            let beside = HOT - 2 + rng.below(2) * 3 + rng.below(2);
                            if (rng.below(4) == 0) == (worker == 0) {
                                map.remove(&beside);
                            } else {
                                map.insert(beside, 0);
                            }
                        }
                    }
                    log
                })
            })
            .collect();
        let mut history: Vec<Vec<Event>> = workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect();
        // The value that was there before all others.
        history.push(vec![Event {
            call: Call::Insert(HOT),
            result: None,
            start: 0,
            end: 1,
        }]);
        assert!(linearisable(&history), "{history:#?}");
    });
}

#[test]
fn a_scan_sees_every_key_that_stays_while_others_come_and_go() {
    model(|seed| {
        let map = filled();
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                spawn(&map, move |map| {
                    let mut rng = Rng::new(2 * seed + writer);
                    for _ in 0..12 {
                        // Keys that end in 1 to 8: never those that stay, never those that end in 9.
                        let key = rng.below(20) * 10 + 1 + rng.below(8);
                        if rng.below(2) == 0 {
                            map.insert(key, key)
                        } else {
                            map.remove(&key)
                        };
                    }
                })
            })
            .collect();
        let scanner = spawn(&map, |map| {
            map.iter().map(|(key, _)| key).collect::<Vec<u64>>()
        });
        let keys = scanner.join().unwrap();
        assert!(keys.is_sorted_by(|a, b| a < b), "{keys:?}");
        assert!(
            (0..200).step_by(10).all(|key| keys.contains(&key)),
            "{keys:?}"
        );
        assert!(keys.iter().all(|key| key % 10 != 9), "{keys:?}");
        for writer in writers {
            writer.join().unwrap();
        }
        assert_eq!(map.len(), map.iter().count());
    });
}

#[test]
fn emptying_from_both_ends_ends() {
    model(|_| {
        let map = filled();
        let up = spawn(&map, |map| {
            (0..200)
                .step_by(10)
                .filter(|key| map.remove(key).is_some())
                .count()
        });
        let down = spawn(&map, |map| {
            (1..=20)
                .filter(|step| map.remove(&(200 - step * 10)).is_some())
                .count()
        });
        let again = spawn(&map, |map| {
            (0..20)
                .filter(|key| map.insert(1000 + key, *key).is_none())
                .count()
        });
        assert_eq!(up.join().unwrap() + down.join().unwrap(), 20);
        assert_eq!(again.join().unwrap(), 20);
        assert!(map.iter().map(|(key, _)| key).eq(1000..1020));
    });
}
