//! One interpreter of map operations for all differential tests: it applies the same operations to a
//! `DytisMap` and a `BTreeMap` and compares everything they return.
//!
//! Where the operations come from is a [`Source`]: a seeded generator over a key stream in the
//! long run, a byte string in the fuzz target.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::collections::BTreeMap;
use std::collections::btree_map;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::Ipv4Addr;
use std::ops::Bound;

use dytis::map::Entry;
use dytis::{DytisBuilder, DytisMap, Key, TotalF64};

use super::streams::Rng;

/// A key that any number stands for.
pub trait TestKey: Key + Debug + Hash {
    fn of(number: u64) -> Self;
}

macro_rules! cast_keys {
    ($($int:ty),*) => {$(
        impl TestKey for $int {
            fn of(number: u64) -> Self {
                number as $int
            }
        }
    )*};
}
cast_keys!(u8, u16, u32, u64, usize, i8, i16, i32, i64, isize);

impl TestKey for char {
    fn of(number: u64) -> Self {
        // Numbers fold onto the scalar values, which leave out the surrogates.
        let scalar = (number % 0x10_f800) as u32;
        Self::from_u32(if scalar < 0xd800 {
            scalar
        } else {
            scalar + 0x800
        })
        .unwrap_or_default()
    }
}

impl TestKey for [u8; 3] {
    fn of(number: u64) -> Self {
        [(number >> 16) as u8, (number >> 8) as u8, number as u8]
    }
}

impl TestKey for [u8; 8] {
    fn of(number: u64) -> Self {
        number.to_be_bytes()
    }
}

impl TestKey for (u32, u32) {
    fn of(number: u64) -> Self {
        ((number >> 32) as u32, number as u32)
    }
}

impl TestKey for (u16, u16, u32) {
    fn of(number: u64) -> Self {
        ((number >> 48) as u16, (number >> 32) as u16, number as u32)
    }
}

impl TestKey for Ipv4Addr {
    fn of(number: u64) -> Self {
        Self::from(number as u32)
    }
}

impl TestKey for TotalF64 {
    fn of(number: u64) -> Self {
        Self(f64::from_bits(number))
    }
}

/// A value that a number stands for.
pub trait TestValue: Clone + Default + Ord + Hash + Debug {
    fn of(number: u64) -> Self;
}

impl TestValue for u64 {
    fn of(number: u64) -> Self {
        number
    }
}

impl TestValue for () {
    fn of(_: u64) -> Self {}
}

impl TestValue for String {
    fn of(number: u64) -> Self {
        number.to_string()
    }
}

impl TestValue for [u64; 16] {
    fn of(number: u64) -> Self {
        std::array::from_fn(|i| number.wrapping_add(i as u64))
    }
}

/// Where operations come from. `None` ends the run.
pub trait Source {
    /// The next operation.
    fn op(&mut self) -> Option<u8>;
    /// A number that stands for a key.
    fn key(&mut self) -> u64;
    /// A number below `n`, which is above 0.
    fn below(&mut self, n: usize) -> usize;
}

/// Operations from bytes; keys are small numbers or 8 bytes.
#[derive(Debug)]
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }
}

impl Source for Bytes<'_> {
    fn op(&mut self) -> Option<u8> {
        self.byte()
    }

    fn key(&mut self) -> u64 {
        match self.byte().unwrap_or(0) {
            small @ 0..200 => u64::from(small),
            // Near the ends of the key space, near powers of two, and anywhere.
            end @ 200..220 => u64::MAX - u64::from(end - 200),
            power @ 220..240 => (1_u64 << (power - 220 + 40)).wrapping_add(self.below(4) as u64),
            _ => (0..8).fold(0, |key, _| key << 8 | u64::from(self.byte().unwrap_or(0))),
        }
    }

    fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte().unwrap_or(0)) % n
    }
}

/// Random operations over a stream of keys: mostly the stream's next keys, then the last ones
/// again, then any of the past, and keys that are near one of the stream.
#[derive(Debug)]
pub struct Walk<'a> {
    keys: &'a [u64],
    next: usize,
    rng: Rng,
    steps: usize,
    /// Steps until growing and shrinking change places.
    turn: usize,
    growing: bool,
}

impl<'a> Walk<'a> {
    /// `steps` operations over `keys`, which is not empty.
    pub fn new(keys: &'a [u64], steps: usize, seed: u64) -> Self {
        Self {
            keys,
            next: 0,
            rng: Rng::new(seed),
            steps,
            turn: steps / 5,
            growing: true,
        }
    }
}

impl Source for Walk<'_> {
    fn op(&mut self) -> Option<u8> {
        self.steps = self.steps.checked_sub(1)?;
        self.turn = self.turn.saturating_sub(1);
        if self.turn == 0 {
            self.growing = !self.growing;
            self.turn = 1 + self.rng.below(20_000) as usize;
        }
        let op = self.rng.below(256) as u8;
        // Half of the operations insert while the map grows, half remove while it shrinks.
        Some(match (self.rng.below(2), self.growing) {
            (0, true) => INSERT,
            (0, false) => REMOVE,
            _ => op,
        })
    }

    fn key(&mut self) -> u64 {
        let len = self.keys.len() as u64;
        match self.rng.below(8) {
            0..4 => {
                self.next = (self.next + 1) % self.keys.len();
                self.keys[self.next]
            }
            4 | 5 => {
                let back = self.rng.below(100) as usize;
                self.keys[(self.next + self.keys.len() - back % self.keys.len()) % self.keys.len()]
            }
            6 => self.keys[self.rng.below(len) as usize],
            _ => {
                let near = self.keys[self.rng.below(len) as usize];
                near.wrapping_add(self.rng.below(5)).wrapping_sub(2)
            }
        }
    }

    fn below(&mut self, n: usize) -> usize {
        self.rng.below(n as u64) as usize
    }
}

const INSERT: u8 = 0;
const REMOVE: u8 = 24;

/// Runs all operations of the source on the map, which must be empty, and on a model.
///
/// # Panics
///
/// At the first difference.
pub fn check<K: TestKey, V: TestValue>(map: DytisMap<K, V>, source: &mut dyn Source) {
    let mut pair = Pair {
        map,
        model: BTreeMap::new(),
        work: 0,
        step: 0,
    };
    while let Some(op) = source.op() {
        pair.step += 1;
        pair.work += 2;
        pair.apply(op, source);
        assert_eq!(
            pair.map.len(),
            pair.model.len(),
            "len after operation {op}, step {}",
            pair.step
        );
    }
    pair.compare();
}

/// Runs a byte string: the first four bytes choose the map's parameters, the rest are the operations.
///
/// # Panics
///
/// At the first difference.
pub fn check_bytes<K: TestKey, V: TestValue>(bytes: &[u8]) {
    let Some((parameters, operations)) = bytes.split_first_chunk::<4>() else {
        return;
    };
    let [capacity, buckets, threshold, slack] = parameters.map(usize::from);
    let map = DytisBuilder::new()
        .with_bucket_capacity(2 + capacity % 31)
        .with_segment_buckets(2 + buckets % 63)
        .with_utilization_threshold(threshold % 91)
        .with_directory_slack(1 + slack % 64)
        .build::<K, V>();
    check(map.expect("parameters in range"), &mut Bytes(operations));
}

struct Pair<K, V> {
    map: DytisMap<K, V>,
    model: BTreeMap<K, V>,
    /// Steps' worth of work saved for operations that touch every entry, so that they cost O(1)
    /// a step however large the map is.
    work: usize,
    step: u64,
}

fn key<K: TestKey>(source: &mut dyn Source) -> K {
    K::of(source.key())
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Bounds that `BTreeMap::range` takes.
fn bounds<K: TestKey>(source: &mut dyn Source) -> (Bound<K>, Bound<K>) {
    let (a, b): (K, K) = (key(source), key(source));
    let (low, high) = (a.min(b), a.max(b));
    let from = match source.below(3) {
        0 => Bound::Unbounded,
        1 => Bound::Included(low),
        _ => Bound::Excluded(low),
    };
    let to = match source.below(3) {
        0 => Bound::Unbounded,
        1 => Bound::Included(high),
        _ if low == high => Bound::Included(high),
        _ => Bound::Excluded(high),
    };
    (from, to)
}

fn owned<K: Copy, V>((key, value): (&K, V)) -> (K, V) {
    (*key, value)
}

impl<K: TestKey, V: TestValue> Pair<K, V> {
    fn value(&self) -> V {
        V::of(self.step)
    }

    fn apply(&mut self, op: u8, source: &mut dyn Source) {
        match op {
            INSERT..REMOVE => {
                let (key, value) = (key(source), self.value());
                assert_eq!(
                    self.map.insert(key, value.clone()),
                    self.model.insert(key, value)
                );
            }
            REMOVE..44 => {
                let key = key(source);
                assert_eq!(self.map.remove(&key), self.model.remove(&key));
            }
            44..60 => self.look_up(source),
            60..68 => {
                let key = key(source);
                assert_eq!(self.map.remove_entry(&key), self.model.remove_entry(&key));
            }
            68..100 => self.entry(op, source),
            100..116 => self.ends(op),
            116..140 => self.walk_range(source),
            140..150 => self.change_range(source),
            150..165 => self.scan(source),
            165..180 => self.cursor(source),
            180..190 => self.get_many(source),
            190..200 => self.extend(op, source),
            _ if self.work >= self.map.len() => {
                self.work -= self.map.len();
                self.whole(op, source);
            }
            _ => self.look_up(source),
        }
    }

    fn look_up(&mut self, source: &mut dyn Source) {
        let key = key(source);
        assert_eq!(self.map.get(&key), self.model.get(&key));
        assert_eq!(self.map.contains_key(&key), self.model.contains_key(&key));
        assert_eq!(
            self.map.get_key_value(&key),
            self.model.get_key_value(&key).map(owned)
        );
        let (changed, same) = (self.map.get_mut(&key), self.model.get_mut(&key));
        assert_eq!(changed, same);
        if let (Some(changed), Some(same)) = (changed, same) {
            *changed = V::of(self.step);
            *same = V::of(self.step);
            assert_eq!(&self.map[&key], &self.model[&key]);
        }
    }

    fn entry(&mut self, op: u8, source: &mut dyn Source) {
        let (key, value) = (key::<K>(source), self.value());
        let (entry, model) = (self.map.entry(key), self.model.entry(key));
        assert_eq!(entry.key(), *model.key());
        match op % 8 {
            0 => assert_eq!(entry.or_insert(value.clone()), model.or_insert(value)),
            1 => {
                let change = |old: &mut V| *old = V::of(1);
                let (got, expected) = (entry.and_modify(change), model.and_modify(change));
                assert_eq!(
                    got.or_insert_with_key(|key| V::of(key.to_bits())),
                    expected.or_insert_with_key(|key| V::of(key.to_bits()))
                );
            }
            2 => assert_eq!(entry.or_default(), model.or_default()),
            3 => {
                let mut got = entry.insert_entry(value.clone());
                assert_eq!((got.key(), got.get()), (key, &value));
                assert_eq!(got.get_mut(), &value);
                model.insert_entry(value);
            }
            4 => {
                assert_eq!(
                    entry.or_insert_with(|| value.clone()),
                    model.or_insert_with(|| value.clone())
                );
            }
            _ => match (entry, model) {
                (Entry::Occupied(mut got), btree_map::Entry::Occupied(mut expected)) => {
                    assert_eq!(got.insert(value.clone()), expected.insert(value));
                    match op % 8 {
                        5 => assert_eq!(got.remove(), expected.remove()),
                        6 => assert_eq!(got.remove_entry(), expected.remove_entry()),
                        _ => assert_eq!(got.into_mut(), expected.into_mut()),
                    }
                }
                (Entry::Vacant(got), btree_map::Entry::Vacant(expected)) => match op % 8 {
                    5 => assert_eq!(got.into_key(), expected.into_key()),
                    6 => assert_eq!(got.insert(value.clone()), expected.insert(value)),
                    _ => {
                        let got = got.insert_entry(value.clone());
                        assert_eq!((got.key(), got.get()), (key, &value));
                        expected.insert(value);
                    }
                },
                (got, expected) => panic!("{got:?} against {expected:?}"),
            },
        }
    }

    fn ends(&mut self, op: u8) {
        match op % 4 {
            0 => assert_eq!(self.map.pop_first(), self.model.pop_first()),
            1 => assert_eq!(self.map.pop_last(), self.model.pop_last()),
            2 => {
                let (got, expected) = (self.map.first_entry(), self.model.first_entry());
                assert_eq!(got.is_some(), expected.is_some());
                if let (Some(got), Some(mut expected)) = (got, expected) {
                    assert_eq!(
                        (got.key(), got.get()),
                        (*expected.key(), expected.get_mut() as &V)
                    );
                }
            }
            _ => {
                let (got, expected) = (self.map.last_entry(), self.model.last_entry());
                assert_eq!(
                    got.map(dytis::map::OccupiedEntry::remove_entry),
                    expected.map(btree_map::OccupiedEntry::remove_entry)
                );
            }
        }
        assert_eq!(
            self.map.first_key_value(),
            self.model.first_key_value().map(owned)
        );
        assert_eq!(
            self.map.last_key_value(),
            self.model.last_key_value().map(owned)
        );
    }

    /// Some steps from both ends of a range.
    fn walk_range(&mut self, source: &mut dyn Source) {
        let bounds = bounds::<K>(source);
        let (mut got, mut expected) = (self.map.range(bounds), self.model.range(bounds).map(owned));
        for _ in 0..source.below(48) {
            if source.below(2) == 0 {
                assert_eq!(got.next(), expected.next(), "forward in {bounds:?}");
            } else {
                assert_eq!(
                    got.next_back(),
                    expected.next_back(),
                    "backward in {bounds:?}"
                );
            }
        }
    }

    fn change_range(&mut self, source: &mut dyn Source) {
        let bounds = bounds::<K>(source);
        let n = source.below(48);
        let (got, expected) = (
            self.map.range_mut(bounds),
            self.model.range_mut(bounds).map(owned),
        );
        if source.below(2) == 0 {
            change(got.take(n), expected.take(n), self.step);
        } else {
            change(got.rev().take(n), expected.rev().take(n), self.step);
        }
    }

    fn scan(&mut self, source: &mut dyn Source) {
        let (from, n) = (key::<K>(source), source.below(150));
        let mut expected = self.model.range(from..).take(n).map(owned);
        let visited = self.map.scan(from, n, |key, value| {
            assert_eq!(Some((key, value)), expected.next());
        });
        assert_eq!(
            expected.next(),
            None,
            "scan of {n} from {from:?} ended after {visited}"
        );
    }

    /// Back and forth around a gap.
    fn cursor(&mut self, source: &mut dyn Source) {
        let key = key::<K>(source);
        let (bound, lower) = (source.below(3), source.below(2) == 0);
        let bound = [
            Bound::Unbounded,
            Bound::Included(&key),
            Bound::Excluded(&key),
        ][bound];
        // The model's gap is the number of entries before it, among those near the key.
        let mut cursor = if lower {
            self.map.lower_bound(bound)
        } else {
            self.map.upper_bound(bound)
        };
        let after = match (bound, lower) {
            (Bound::Unbounded, true) => Some((Bound::Unbounded, Bound::Unbounded)),
            (Bound::Unbounded, false) => None,
            (Bound::Included(_), true) | (Bound::Excluded(_), false) => {
                Some((Bound::Included(key), Bound::Unbounded))
            }
            _ => Some((Bound::Excluded(key), Bound::Unbounded)),
        };
        let mut next = after
            .and_then(|range| self.model.range(range).next())
            .map(owned);
        for _ in 0..source.below(24) {
            let before = match next {
                Some((key, _)) => self.model.range(..key).next_back(),
                None => self.model.last_key_value(),
            };
            let before = before.map(owned);
            assert_eq!(cursor.peek_next(), next);
            assert_eq!(cursor.peek_prev(), before);
            if source.below(2) == 0 {
                assert_eq!(cursor.next(), next);
                let beyond = next.map(|(key, _)| (Bound::Excluded(key), Bound::Unbounded));
                next = beyond
                    .and_then(|range| self.model.range(range).next())
                    .map(owned);
            } else {
                assert_eq!(cursor.prev(), before);
                next = before.or(next);
            }
        }
    }

    fn get_many(&mut self, source: &mut dyn Source) {
        let keys: Vec<K> = (0..source.below(40)).map(|_| key(source)).collect();
        let mut out = vec![None; keys.len()];
        self.map.get_many(&keys, &mut out);
        assert!(keys.iter().map(|key| self.model.get(key)).eq(out));
    }

    fn extend(&mut self, op: u8, source: &mut dyn Source) {
        let entries: Vec<(K, V)> = (0..source.below(40))
            .map(|_| (key(source), self.value()))
            .collect();
        if op.is_multiple_of(2) {
            self.map.extend(entries.iter().cloned());
            self.model.extend(entries);
        } else {
            let mut other: DytisMap<K, V> = entries.iter().cloned().collect();
            self.map.append(&mut other);
            assert!(other.is_empty() && other.iter().next().is_none());
            self.model.append(&mut entries.into_iter().collect());
        }
    }

    /// Operations on all entries.
    #[allow(clippy::too_many_lines, reason = "one arm per operation")]
    fn whole(&mut self, op: u8, source: &mut dyn Source) {
        match op % 14 {
            0 => self.compare(),
            1 => {
                let drop_one_in = 2 + source.below(20) as u64;
                let keep = |key: &K, value: &mut V| {
                    *value = V::of(key.to_bits());
                    !key.to_bits().is_multiple_of(drop_one_in)
                };
                self.map.retain(keep);
                self.model.retain(keep);
            }
            2 => self.extract(source),
            3 => {
                let at = key::<K>(source);
                let (mut tail, mut model_tail) =
                    (self.map.split_off(&at), self.model.split_off(&at));
                assert!(tail.iter().eq(model_tail.iter().map(owned)));
                match source.below(4) {
                    0 => (self.map, self.model) = (tail, model_tail),
                    1 => {}
                    _ => {
                        self.map.append(&mut tail);
                        self.model.append(&mut model_tail);
                    }
                }
            }
            4 => {
                let copy = self.map.clone();
                assert_eq!((copy == self.map, hash(&copy)), (true, hash(&self.map)));
                assert_eq!(copy.cmp(&self.map), std::cmp::Ordering::Equal);
                self.map = copy;
            }
            5 => {
                let entries = std::mem::take(&mut self.map);
                self.map = DytisMap::from_sorted_iter(entries).expect("a map's entries ascend");
            }
            6 => {
                let at = source.below(self.model.len() + 1);
                let mut got = std::mem::take(&mut self.map).into_iter();
                let expected = self.model.clone().into_iter();
                assert_eq!(got.len(), expected.len());
                assert!(got.by_ref().take(at).eq(expected.take(at)));
                assert!(got.rev().eq(self.model.clone().into_iter().skip(at).rev()));
                self.map = self
                    .model
                    .iter()
                    .map(|(key, value)| (*key, value.clone()))
                    .collect();
            }
            7 => change(
                self.map.iter_mut(),
                self.model.iter_mut().map(owned),
                self.step,
            ),
            8 => {
                for value in self.map.values_mut().rev() {
                    *value = V::of(self.step);
                }
                for value in self.model.values_mut() {
                    *value = V::of(self.step);
                }
            }
            9 => {
                assert!(self.map.keys().rev().eq(self.model.keys().rev().copied()));
                assert!(self.map.values().eq(self.model.values()));
                assert!(self.map.clone().into_keys().eq(self.model.keys().copied()));
                assert!(
                    self.map
                        .clone()
                        .into_values()
                        .rev()
                        .eq(self.model.clone().into_values().rev())
                );
            }
            10 => {
                // All that is above the last key, in bulk.
                let last = self.model.last_key_value().map(|(key, _)| *key);
                let mut above: Vec<K> = (0..source.below(200)).map(|_| key(source)).collect();
                above.retain(|&key| last.is_none_or(|last| key > last));
                above.sort_unstable();
                above.dedup();
                let entries = above.into_iter().map(|key| (key, self.value()));
                let entries: Vec<(K, V)> = entries.collect();
                self.map
                    .bulk_load(entries.iter().cloned())
                    .expect("keys ascend above the last");
                self.model.extend(entries);
            }
            11 => {
                // However small buckets and segments are asked to be, a pair costs at most a bucket of
                // 32 places, a segment, and its share of the directories.
                let bytes = self.map.memory_usage();
                let most = 32 * (size_of::<V>() + size_of::<u64>()) + 2048;
                assert!(bytes >= self.map.len() * size_of::<V>(), "{bytes} bytes");
                assert!(
                    bytes <= 16 * 1024 + most * self.map.len(),
                    "{bytes} bytes, {} entries",
                    self.map.len()
                );
                assert_eq!(self.map.stats().len, self.map.len());
            }
            12 if source.below(8) == 0 => {
                self.map.clear();
                self.model.clear();
            }
            _ => {
                let text = format!("{:?}", self.map.range(..).take(3).collect::<Vec<_>>());
                assert_eq!(
                    text,
                    format!(
                        "{:?}",
                        self.model.iter().map(owned).take(3).collect::<Vec<_>>()
                    )
                );
            }
        }
    }

    /// Takes some entries out of a range, and may stop half-way.
    fn extract(&mut self, source: &mut dyn Source) {
        let bounds = bounds::<K>(source);
        let (modulus, stop) = (1 + source.below(4) as u64, source.below(100));
        let pick = |key: &K, _: &mut V| key.to_bits().is_multiple_of(modulus);
        let stop = if stop < 50 { stop } else { usize::MAX };
        let got: Vec<(K, V)> = self.map.extract_if(bounds, pick).take(stop).collect();
        let picked = self
            .model
            .range(bounds)
            .map(owned)
            .filter(|(key, _)| key.to_bits() % modulus == 0);
        let expected: Vec<(K, V)> = picked
            .take(stop)
            .map(|(key, value)| (key, value.clone()))
            .collect();
        assert_eq!(got, expected);
        for (key, _) in expected {
            self.model.remove(&key);
        }
    }

    /// Everything that can be seen, from both ends.
    fn compare(&self) {
        assert!(
            self.map.iter().eq(self.model.iter().map(owned)),
            "entries differ"
        );
        assert!(
            self.map.iter().rev().eq(self.model.iter().rev().map(owned)),
            "entries differ from the back"
        );
        assert_eq!(self.map.iter().len(), self.model.len());
        assert_eq!(self.map.is_empty(), self.model.is_empty());
        for (key, value) in &self.model {
            assert_eq!(self.map.get(key), Some(value), "{key:?}");
        }
    }
}

/// Compares the values, then overwrites them.
fn change<'a, K: TestKey, V: TestValue + 'a>(
    mut got: impl Iterator<Item = (K, &'a mut V)>,
    expected: impl Iterator<Item = (K, &'a mut V)>,
    step: u64,
) {
    for (key, value) in expected {
        let (got_key, got_value) = got.next().expect("an entry of the model is missing");
        assert_eq!((got_key, &*got_value), (key, &*value));
        *got_value = V::of(step);
        *value = V::of(step);
    }
    assert!(got.next().is_none());
}
