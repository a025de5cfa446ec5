//! The traits of std's collections.

use super::{DytisMap, IntoIter, Iter, IterMut};
use crate::Key;
use crate::raw::drain::Drain;
use core::cmp::Ordering;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;
use core::ops::Index;

impl<K, V> Default for DytisMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

/// Computes in O(n); the clone's buckets are full.
impl<K, V: Clone> Clone for DytisMap<K, V> {
    fn clone(&self) -> Self {
        Self {
            raw: self.raw.clone(),
            marker: PhantomData,
        }
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for DytisMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl<K: Key, V: PartialEq> PartialEq for DytisMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other)
    }
}

impl<K: Key, V: Eq> Eq for DytisMap<K, V> {}

impl<K: Key, V: PartialOrd> PartialOrd for DytisMap<K, V> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.iter().partial_cmp(other)
    }
}

impl<K: Key, V: Ord> Ord for DytisMap<K, V> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.iter().cmp(other)
    }
}

impl<K: Key + Hash, V: Hash> Hash for DytisMap<K, V> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(self.len());
        for pair in self {
            pair.hash(state);
        }
    }
}

/// The value of a key that is there.
///
/// # Panics
/// If the key is not there.
impl<K: Key, V> Index<&K> for DytisMap<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        self.get(key).expect("no entry found for key")
    }
}

impl<K: Key, V> Extend<(K, V)> for DytisMap<K, V> {
    /// Pairs that ascend, and lie behind all that is there, are appended without a search.
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, pairs: I) {
        let mut last = self.last_key_value().map(|(key, _)| key.to_bits());
        for (key, value) in pairs {
            let bits = key.to_bits();
            if last.is_none_or(|last| bits > last) {
                self.raw.push_last(bits, value);
                last = Some(bits);
            } else {
                self.raw.insert(bits, value);
            }
        }
    }
}

impl<'a, K: Key, V: Copy> Extend<(&'a K, &'a V)> for DytisMap<K, V> {
    fn extend<I: IntoIterator<Item = (&'a K, &'a V)>>(&mut self, pairs: I) {
        self.extend(pairs.into_iter().map(|(key, value)| (*key, *value)));
    }
}

impl<K: Key, V> FromIterator<(K, V)> for DytisMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        let mut map = Self::new();
        map.extend(pairs);
        map
    }
}

impl<K: Key, V, const N: usize> From<[(K, V); N]> for DytisMap<K, V> {
    fn from(pairs: [(K, V); N]) -> Self {
        pairs.into_iter().collect()
    }
}

impl<K: Key, V> IntoIterator for DytisMap<K, V> {
    type Item = (K, V);
    type IntoIter = IntoIter<K, V>;

    fn into_iter(self) -> IntoIter<K, V> {
        IntoIter::new(Drain::new(self.raw))
    }
}

impl<'a, K: Key, V> IntoIterator for &'a DytisMap<K, V> {
    type Item = (K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Iter<'a, K, V> {
        self.iter()
    }
}

impl<'a, K: Key, V> IntoIterator for &'a mut DytisMap<K, V> {
    type Item = (K, &'a mut V);
    type IntoIter = IterMut<'a, K, V>;

    fn into_iter(self) -> IterMut<'a, K, V> {
        self.iter_mut()
    }
}
