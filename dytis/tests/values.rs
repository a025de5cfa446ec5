//! Values of every kind: counted, panicking, zero-sized, large, owning.

use dytis::{DytisBuilder, DytisMap};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// A value that counts how many of it live, and panics in `clone` or `drop` when its countdown ends.
struct Counted {
    alive: Rc<Cell<i64>>,
    clones_left: Rc<Cell<i64>>,
    panics_in_drop: bool,
}

impl Counted {
    fn new(alive: &Rc<Cell<i64>>) -> Self {
        Self::with(alive, &Rc::new(Cell::new(i64::MAX)), false)
    }

    fn with(alive: &Rc<Cell<i64>>, clones_left: &Rc<Cell<i64>>, panics_in_drop: bool) -> Self {
        alive.set(alive.get() + 1);
        Self {
            alive: alive.clone(),
            clones_left: clones_left.clone(),
            panics_in_drop,
        }
    }
}

impl Clone for Counted {
    fn clone(&self) -> Self {
        self.clones_left.set(self.clones_left.get() - 1);
        assert!(self.clones_left.get() >= 0, "clone panics");
        Self::with(&self.alive, &self.clones_left, self.panics_in_drop)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.set(self.alive.get() - 1);
        assert!(!self.panics_in_drop, "drop panics");
    }
}

fn tiny<V>() -> DytisMap<u64, V> {
    DytisBuilder::new()
        .with_bucket_capacity(4)
        .with_segment_buckets(4)
        .with_directory_slack(2)
        .build()
        .unwrap()
}

fn mixed(i: u64) -> u64 {
    i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
}

#[test]
fn every_value_is_dropped_exactly_once() {
    let alive = Rc::new(Cell::new(0));
    let mut map = tiny();
    for i in 0..2000 {
        map.insert(mixed(i), Counted::new(&alive));
        assert_eq!(alive.get(), map.len() as i64);
    }
    for i in (0..2000).step_by(3) {
        map.remove(&mixed(i));
        assert_eq!(alive.get(), map.len() as i64);
    }
    map.retain(|key, _| key % 5 != 0);
    assert_eq!(alive.get(), map.len() as i64);
    let right = map.split_off(&(1 << 23));
    assert_eq!(alive.get(), (map.len() + right.len()) as i64);
    let mut pairs = right.into_iter();
    for _ in 0..50 {
        pairs.next();
        pairs.next_back();
    }
    drop(pairs);
    assert_eq!(alive.get(), map.len() as i64);
    let copy = map.clone();
    assert_eq!(alive.get(), 2 * map.len() as i64);
    drop(copy);
    map.extract_if(.., |key, _| key % 2 == 0)
        .take(100)
        .for_each(drop);
    assert_eq!(alive.get(), map.len() as i64);
    map.pop_first();
    map.pop_last();
    assert_eq!(alive.get(), map.len() as i64);
    map.clear();
    assert_eq!((alive.get(), map.memory_usage()), (0, 0));
    map.insert(1, Counted::new(&alive));
    drop(map);
    assert_eq!(alive.get(), 0);
}

#[test]
fn a_panicking_clone_leaves_nothing_behind() {
    let alive = Rc::new(Cell::new(0));
    let clones_left = Rc::new(Cell::new(700));
    let mut map = tiny();
    for i in 0..1000 {
        map.insert(mixed(i), Counted::with(&alive, &clones_left, false));
    }
    let before = alive.get();
    assert!(catch_unwind(AssertUnwindSafe(|| map.clone())).is_err());
    assert_eq!(alive.get(), before);
    assert_eq!(map.iter().count(), map.len());
}

#[test]
fn a_panicking_drop_does_not_keep_the_others_from_being_dropped() {
    for as_iterator in [false, true] {
        let alive = Rc::new(Cell::new(0));
        let mut map = tiny();
        for i in 0..1000_u64 {
            map.insert(i, Counted::with(&alive, &Rc::new(Cell::new(0)), i == 300));
        }
        let result = catch_unwind(AssertUnwindSafe(|| {
            if as_iterator {
                drop(map.into_iter());
            } else {
                drop(map);
            }
        }));
        assert!(result.is_err());
        assert_eq!(alive.get(), 0);
    }
    let alive = Rc::new(Cell::new(0));
    let mut map = tiny();
    for i in 0..1000_u64 {
        map.insert(i, Counted::with(&alive, &Rc::new(Cell::new(0)), i == 300));
    }
    assert!(catch_unwind(AssertUnwindSafe(|| map.clear())).is_err());
    assert!(map.is_empty() && alive.get() == 0);
    map.insert(5, Counted::new(&alive));
    assert_eq!(map.len(), 1);
}

#[test]
fn a_panicking_predicate_leaves_the_map_whole() {
    let mut map: DytisMap<u64, u64> = (0..1000).map(|i| (i, i)).collect();
    let result = catch_unwind(AssertUnwindSafe(|| {
        map.retain(|&key, _| {
            assert!(key < 500, "predicate panics");
            key % 2 == 0
        });
    }));
    assert!(result.is_err());
    assert!(map.keys().eq((0..500).step_by(2).chain(500..1000)));
    let mut extract = map.extract_if(.., |&key, _| {
        assert!(key != 700, "predicate panics");
        key % 4 == 0
    });
    assert!(catch_unwind(AssertUnwindSafe(|| extract.by_ref().count())).is_err());
    drop(extract);
    assert!(
        map.keys().eq((0..500)
            .step_by(2)
            .chain(500..1000)
            .filter(|k| k % 4 != 0 || *k >= 700))
    );
    assert_eq!(map.iter().count(), map.len());
}

#[test]
fn a_panicking_entry_closure_inserts_nothing() {
    let mut map: DytisMap<u64, u64> = DytisMap::new();
    let result = catch_unwind(AssertUnwindSafe(|| {
        map.entry(1).or_insert_with(|| panic!("closure panics"));
    }));
    assert!(result.is_err() && map.is_empty());
}

fn churn<V: Clone + PartialEq + std::fmt::Debug>(value: impl Fn(u64) -> V) {
    let mut map = DytisMap::new();
    let mut model = BTreeMap::new();
    for i in 0..6000 {
        let key = mixed(i) % 4000;
        assert_eq!(map.insert(key, value(i)), model.insert(key, value(i)));
        if i % 3 == 0 {
            let key = mixed(i * 7) % 4000;
            assert_eq!(map.remove(&key), model.remove(&key));
        }
    }
    assert!(map.iter().eq(model.iter().map(|(k, v)| (*k, v))));
    assert!(
        map.clone()
            .into_iter()
            .rev()
            .eq(model.clone().into_iter().rev())
    );
    let right = map.split_off(&2000);
    let right_model = model.split_off(&2000);
    assert!(right.values().eq(right_model.values()) && map.values().eq(model.values()));
}

#[test]
fn values_of_every_size() {
    #[derive(Clone, Copy, PartialEq, Debug)]
    #[repr(align(128))]
    struct Aligned(u8);

    churn(|_| ());
    churn(|i| i as u8);
    churn(|i| [i; 16]);
    churn(|i| [i; 100]);
    churn(|i| i.to_string());
    churn(|i| Aligned(i as u8));
    churn(|i| (i % 3 == 0).then(|| vec![i; 3]));
}
