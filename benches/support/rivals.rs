//! One face for `DytisMap` and its rivals, `u64 -> u64`.
//!
//! Every method is the rival's own fastest public way to do the thing. Concurrent maps also have the
//! face of a [`Shared`] map; as an [`Index`] they are used from one thread.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::RwLock;

use brie_tree::BTree;
use brie_tree::nonmax::NonMaxU64;
use congee::Congee;
use crossbeam_skiplist::SkipMap;
use dytis::{ConcurrentDytisMap, DytisMap};
use scc::{Guard, TreeIndex};

/// An ordered map from `u64` to `u64` under measurement.
pub trait Index: Sized {
    const NAME: &'static str;

    fn new() -> Self;
    fn insert(&mut self, key: u64, value: u64);
    fn get(&self, key: u64) -> Option<u64>;
    /// Overwrites the value of a present key.
    fn update(&mut self, key: u64, value: u64);
    fn remove(&mut self, key: u64) -> bool;
    /// Sum of keys and values (wrapping) of the first `n` entries from `from` on.
    fn scan(&self, from: u64, n: usize) -> u64;
    /// Sum of keys and values (wrapping) of all entries.
    fn sum(&self) -> u64;

    /// From ascending entries, by the bulk way where there is one.
    fn from_sorted(entries: &[(u64, u64)]) -> Self {
        let mut index = Self::new();
        for &(key, value) in entries {
            index.insert(key, value);
        }
        index
    }
}

/// A map that threads share.
pub trait Shared: Sync {
    fn new() -> Self;
    fn insert(&self, key: u64, value: u64);
    fn get(&self, key: u64) -> Option<u64>;
    /// Overwrites the value of a present key.
    fn update(&self, key: u64, value: u64);
    fn remove(&self, key: u64) -> bool;
}

fn add(sum: u64, (key, value): (u64, &u64)) -> u64 {
    sum.wrapping_add(key).wrapping_add(*value)
}

fn add_ref<'a>(sum: u64, (key, value): (&'a u64, &'a u64)) -> u64 {
    add(sum, (*key, value))
}

/// The methods that maps with `BTreeMap`'s face share. `$own` is the key to insert, `$look` the key to
/// look up, both from `$key`.
macro_rules! plain_methods {
    ($name:literal, |$key:ident| $own:expr, $look:expr) => {
        const NAME: &'static str = $name;

        fn new() -> Self {
            Self::new()
        }
        fn insert(&mut self, $key: u64, value: u64) {
            self.insert($own, value);
        }
        fn get(&self, $key: u64) -> Option<u64> {
            self.get($look).copied()
        }
        fn update(&mut self, $key: u64, value: u64) {
            if let Some(slot) = self.get_mut($look) {
                *slot = value;
            }
        }
        fn remove(&mut self, $key: u64) -> bool {
            self.remove($look).is_some()
        }
    };
}

/// The methods that an [`Index`] has from its [`Shared`] face.
macro_rules! shared_methods {
    ($name:literal) => {
        const NAME: &'static str = $name;

        fn new() -> Self {
            Shared::new()
        }
        fn insert(&mut self, key: u64, value: u64) {
            Shared::insert(self, key, value);
        }
        fn get(&self, key: u64) -> Option<u64> {
            Shared::get(self, key)
        }
        fn update(&mut self, key: u64, value: u64) {
            Shared::update(self, key, value);
        }
        fn remove(&mut self, key: u64) -> bool {
            Shared::remove(self, key)
        }
    };
}

impl Index for DytisMap<u64, u64> {
    plain_methods!("dytis", |key| key, &key);

    fn scan(&self, from: u64, n: usize) -> u64 {
        let mut sum = 0;
        self.scan(from, n, |key, value| sum = add(sum, (key, value)));
        sum
    }
    fn sum(&self) -> u64 {
        self.iter().fold(0, add)
    }
    fn from_sorted(entries: &[(u64, u64)]) -> Self {
        Self::from_sorted_iter(entries.iter().copied()).expect("entries ascend")
    }
}

impl Index for BTreeMap<u64, u64> {
    plain_methods!("std", |key| key, &key);

    fn scan(&self, from: u64, n: usize) -> u64 {
        self.range(from..).take(n).fold(0, add_ref)
    }
    fn sum(&self) -> u64 {
        self.iter().fold(0, add_ref)
    }
    fn from_sorted(entries: &[(u64, u64)]) -> Self {
        entries.iter().copied().collect()
    }
}

/// `brie-tree` keeps `u64::MAX` for itself; a stream that holds it is refused.
fn brie_key(key: u64) -> NonMaxU64 {
    NonMaxU64::new(key).expect("brie-tree cannot hold u64::MAX")
}

fn add_brie(sum: u64, (key, value): (NonMaxU64, &u64)) -> u64 {
    add(sum, (key.get(), value))
}

impl Index for BTree<NonMaxU64, u64> {
    plain_methods!("brie", |key| brie_key(key), brie_key(key));

    fn scan(&self, from: u64, n: usize) -> u64 {
        let entries = self.iter_from(Bound::Included(brie_key(from)));
        entries.take(n).fold(0, add_brie)
    }
    fn sum(&self) -> u64 {
        self.iter().fold(0, add_brie)
    }
}

impl Index for indexset::BTreeMap<u64, u64> {
    plain_methods!("indexset", |key| key, &key);

    fn scan(&self, from: u64, n: usize) -> u64 {
        self.range(from..).take(n).fold(0, add_ref)
    }
    fn sum(&self) -> u64 {
        self.iter().fold(0, add_ref)
    }
}

impl Index for SkipMap<u64, u64> {
    shared_methods!("skiplist");

    fn scan(&self, from: u64, n: usize) -> u64 {
        let entries = self.range(from..).take(n);
        entries.fold(0, |sum, entry| add(sum, (*entry.key(), entry.value())))
    }
    fn sum(&self) -> u64 {
        self.iter()
            .fold(0, |sum, entry| add(sum, (*entry.key(), entry.value())))
    }
}

impl Index for TreeIndex<u64, u64> {
    shared_methods!("scc");

    fn scan(&self, from: u64, n: usize) -> u64 {
        self.range(from.., &Guard::new()).take(n).fold(0, add_ref)
    }
    fn sum(&self) -> u64 {
        self.iter(&Guard::new()).fold(0, add_ref)
    }
}

/// `congee` stores `usize` in both places; on 64-bit targets that is a `u64`.
impl Index for Congee<usize, usize> {
    shared_methods!("congee");

    fn scan(&self, from: u64, n: usize) -> u64 {
        let mut found = vec![(0, 0); n];
        let len = self.range(&(from as usize), &usize::MAX, &mut found, &self.pin());
        found[..len].iter().fold(0, add_congee)
    }
    fn sum(&self) -> u64 {
        let guard = self.pin();
        let mut found = vec![(0, 0); 4096];
        let (mut from, mut sum) = (0_usize, 0);
        loop {
            let len = self.range(&from, &usize::MAX, &mut found, &guard);
            sum = found[..len].iter().fold(sum, add_congee);
            match found[..len].last() {
                Some(&(last, _)) if len == found.len() && last < usize::MAX => from = last + 1,
                _ => return sum,
            }
        }
    }
}

fn add_congee(sum: u64, &(key, value): &(usize, usize)) -> u64 {
    add(sum, (key as u64, &(value as u64)))
}

impl Shared for ConcurrentDytisMap<u64, u64> {
    fn new() -> Self {
        Self::new()
    }
    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key)
    }
    fn update(&self, key: u64, value: u64) {
        self.update(&key, |_| value);
    }
    fn remove(&self, key: u64) -> bool {
        self.remove(&key).is_some()
    }
}

impl Shared for SkipMap<u64, u64> {
    fn new() -> Self {
        Self::new()
    }
    fn insert(&self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&key).map(|entry| *entry.value())
    }
    fn update(&self, key: u64, value: u64) {
        self.insert(key, value);
    }
    fn remove(&self, key: u64) -> bool {
        self.remove(&key).is_some()
    }
}

impl Shared for TreeIndex<u64, u64> {
    fn new() -> Self {
        Self::new()
    }
    fn insert(&self, key: u64, value: u64) {
        self.upsert_sync(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.peek_with(&key, |_, value| *value)
    }
    fn update(&self, key: u64, value: u64) {
        self.upsert_sync(key, value);
    }
    fn remove(&self, key: u64) -> bool {
        self.remove_sync(&key)
    }
}

impl Shared for Congee<usize, usize> {
    fn new() -> Self {
        Self::default()
    }
    fn insert(&self, key: u64, value: u64) {
        self.insert(key as usize, value as usize, &self.pin())
            .expect("memory");
    }
    fn get(&self, key: u64) -> Option<u64> {
        self.get(&(key as usize), &self.pin())
            .map(|value| value as u64)
    }
    fn update(&self, key: u64, value: u64) {
        Shared::insert(self, key, value);
    }
    fn remove(&self, key: u64) -> bool {
        self.remove(&(key as usize), &self.pin()).is_some()
    }
}

impl Shared for RwLock<BTreeMap<u64, u64>> {
    fn new() -> Self {
        Self::default()
    }
    fn insert(&self, key: u64, value: u64) {
        let mut map = self.write().expect("no panic under the lock");
        map.insert(key, value);
    }
    fn get(&self, key: u64) -> Option<u64> {
        let map = self.read().expect("no panic under the lock");
        map.get(&key).copied()
    }
    fn update(&self, key: u64, value: u64) {
        Shared::insert(self, key, value);
    }
    fn remove(&self, key: u64) -> bool {
        let mut map = self.write().expect("no panic under the lock");
        map.remove(&key).is_some()
    }
}
