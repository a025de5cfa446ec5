//! Parallel iterators.
//!
//! `par_iter` and `par_iter_mut` divide the key range in halves, which a descent each finds; a map taken apart is
//! handed out from a vector of its pairs. Collecting gathers pairs in parallel and inserts them one after the other.

use crate::map::{DytisMap, IterMut};
use crate::{DytisSet, Key};
use alloc::vec::Vec;
use rayon::iter::plumbing::{Folder, UnindexedConsumer, UnindexedProducer, bridge_unindexed};
use rayon::iter::{
    FromParallelIterator, IntoParallelIterator, IntoParallelRefIterator, ParallelExtend,
    ParallelIterator,
};

/// Parallel iterator over the pairs of a map; from its `par_iter`.
pub struct ParIter<'a, K, V> {
    map: &'a DytisMap<K, V>,
}

impl<K, V> core::fmt::Debug for ParIter<'_, K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ParIter")
            .field("len", &self.map.len())
            .finish()
    }
}

/// A stretch of the key space, with at least one pair.
struct Stretch<'a, K, V> {
    map: &'a DytisMap<K, V>,
    low: u64,
    high: u64,
}

impl<'a, K: Key, V: Sync> UnindexedProducer for Stretch<'a, K, V> {
    type Item = (K, &'a V);

    fn split(self) -> (Self, Option<Self>) {
        // Halving the stretch of keys may leave one half empty, so the halves are narrowed to the keys that they hold.
        let raw = self.map.raw();
        if self.low == self.high || raw.lie_close(self.low, self.high) {
            return (self, None);
        }
        let middle = self.low + (self.high - self.low) / 2;
        let (Some((end, _)), Some((start, _))) = (
            raw.walk_between(Some(self.low), Some(middle)).next_back(),
            raw.walk_between(Some(middle + 1), Some(self.high)).next(),
        ) else {
            return (self, None);
        };
        (
            Self {
                map: self.map,
                low: self.low,
                high: end,
            },
            Some(Self {
                map: self.map,
                low: start,
                high: self.high,
            }),
        )
    }

    fn fold_with<F: Folder<Self::Item>>(self, folder: F) -> F {
        folder.consume_iter(crate::map::Range::between(
            self.map.raw(),
            self.low,
            self.high,
        ))
    }
}

impl<'a, K: Key, V: Sync> ParallelIterator for ParIter<'a, K, V> {
    type Item = (K, &'a V);

    fn drive_unindexed<C: UnindexedConsumer<Self::Item>>(self, consumer: C) -> C::Result {
        let raw = self.map.raw();
        match (raw.walk().next(), raw.walk().next_back()) {
            (Some((low, _)), Some((high, _))) => bridge_unindexed(
                Stretch {
                    map: self.map,
                    low,
                    high,
                },
                consumer,
            ),
            _ => consumer.into_folder().complete(),
        }
    }
}

impl<'a, K: Key, V: Sync> IntoParallelIterator for &'a DytisMap<K, V> {
    type Iter = ParIter<'a, K, V>;
    type Item = (K, &'a V);

    fn into_par_iter(self) -> Self::Iter {
        ParIter { map: self }
    }
}

impl<'a, K: Key, V: Send> IntoParallelIterator for &'a mut DytisMap<K, V> {
    type Iter = rayon::vec::IntoIter<(K, &'a mut V)>;
    type Item = (K, &'a mut V);

    /// Gathers the references first, in O(n).
    fn into_par_iter(self) -> Self::Iter {
        let pairs: IterMut<'a, K, V> = self.iter_mut();
        pairs.collect::<Vec<_>>().into_par_iter()
    }
}

impl<K: Key, V: Send> IntoParallelIterator for DytisMap<K, V> {
    type Iter = rayon::vec::IntoIter<(K, V)>;
    type Item = (K, V);

    /// Gathers the pairs first, in O(n).
    fn into_par_iter(self) -> Self::Iter {
        self.into_iter().collect::<Vec<_>>().into_par_iter()
    }
}

impl<K: Key, V: Send> ParallelExtend<(K, V)> for DytisMap<K, V> {
    fn par_extend<I: IntoParallelIterator<Item = (K, V)>>(&mut self, pairs: I) {
        let pairs: Vec<_> = pairs.into_par_iter().collect();
        self.extend(pairs);
    }
}

impl<K: Key, V: Send> FromParallelIterator<(K, V)> for DytisMap<K, V> {
    fn from_par_iter<I: IntoParallelIterator<Item = (K, V)>>(pairs: I) -> Self {
        let mut map = Self::new();
        map.par_extend(pairs);
        map
    }
}

impl<'a, K: Key> IntoParallelIterator for &'a DytisSet<K> {
    type Iter = rayon::iter::Map<ParIter<'a, K, ()>, fn((K, &'a ())) -> K>;
    type Item = K;

    fn into_par_iter(self) -> Self::Iter {
        let key: fn((K, &'a ())) -> K = |(key, ())| key;
        self.as_map().par_iter().map(key)
    }
}

impl<K: Key> ParallelExtend<K> for DytisSet<K> {
    fn par_extend<I: IntoParallelIterator<Item = K>>(&mut self, keys: I) {
        let keys: Vec<_> = keys.into_par_iter().collect();
        self.extend(keys);
    }
}

impl<K: Key> FromParallelIterator<K> for DytisSet<K> {
    fn from_par_iter<I: IntoParallelIterator<Item = K>>(keys: I) -> Self {
        let mut set = Self::new();
        set.par_extend(keys);
        set
    }
}
