//! The ordered map.

mod cursor;
mod entry;
mod extract_if;
mod iter;
mod range;
mod traits;

pub use cursor::Cursor;
pub use entry::{Entry, OccupiedEntry, VacantEntry};
pub use extract_if::ExtractIf;
pub use iter::{IntoIter, IntoKeys, IntoValues, Iter, IterMut, Keys, Values, ValuesMut};
pub(crate) use range::bounds;
pub use range::{Range, RangeMut};

use crate::raw::RawMap;
use crate::raw::params::Params;
use crate::{Error, Key, Stats};
use core::marker::PhantomData;
use core::mem;
use core::ops::{Bound, RangeBounds};

/// An ordered map with the face of [`BTreeMap`](alloc::collections::BTreeMap), for keys that embed into `u64`.
///
/// Keys are yielded by value, since they are [`Copy`] and kept as bits. Complexities are stated for `n` pairs; "O(log n)" is
/// the descent through at most 11 levels of directories ([`Stats::levels`] tells; one or two for most keys) and a constant
/// number of steps from there. See the [crate's documentation](crate) for how it works.
///
/// # Examples
/// ```
/// use dytis::DytisMap;
///
/// let mut map = DytisMap::new();
/// map.insert(30_u64, "thirty");
/// map.insert(10, "ten");
/// map.insert(20, "twenty");
///
/// assert_eq!(map.get(&20), Some(&"twenty"));
/// assert_eq!(map.range(15..).next(), Some((20, &"twenty")));
/// assert_eq!(map.keys().collect::<Vec<_>>(), [10, 20, 30]);
/// ```
pub struct DytisMap<K, V> {
    raw: RawMap<V>,
    marker: PhantomData<K>,
}

impl<K, V> DytisMap<K, V> {
    /// An empty map; allocates nothing. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// use dytis::DytisMap;
    /// static EMPTY: DytisMap<u64, u64> = DytisMap::new();
    /// assert!(EMPTY.is_empty());
    /// ```
    pub const fn new() -> Self {
        Self {
            raw: RawMap::new(Params::DEFAULT),
            marker: PhantomData,
        }
    }

    pub(crate) const fn from_raw(raw: RawMap<V>) -> Self {
        Self {
            raw,
            marker: PhantomData,
        }
    }

    #[cfg(feature = "rayon")]
    pub(crate) const fn raw(&self) -> &RawMap<V> {
        &self.raw
    }

    /// Number of pairs. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert_eq!(DytisMap::from([(1_u8, 'a'), (2, 'b')]).len(), 2);
    /// ```
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Whether there is no pair. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert!(DytisMap::<u64, ()>::new().is_empty());
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all pairs and frees the memory. Computes in O(n) if values need dropping, else in O(buckets).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u8, 'a')]);
    /// map.clear();
    /// assert!(map.is_empty());
    /// assert_eq!(map.memory_usage(), 0);
    /// ```
    pub fn clear(&mut self) {
        drop(self.raw.take());
    }

    /// Heap bytes that the map holds itself, exactly: buckets, segments, directories, tables. What values own beyond that is not
    /// counted. Computes in O(segments).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let map: DytisMap<u64, u64> = (0..100_000).map(|i| (i, i)).collect();
    /// assert!(map.memory_usage() < 24 * map.len());
    /// ```
    pub fn memory_usage(&self) -> usize {
        self.raw.memory_usage()
    }

    /// What the map looks like inside: depths, segments, buckets, utilisation, and the structure changes so far. Computes in
    /// O(segments).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let map: DytisMap<u64, u64> = (0..100_000).map(|i| (i, i)).collect();
    /// let stats = map.stats();
    /// assert!(stats.segments > 1 && stats.utilization > 0.9);
    /// ```
    pub fn stats(&self) -> Stats {
        self.raw.stats()
    }
}

impl<K: Key, V> DytisMap<K, V> {
    /// Inserts a pair; the old value comes back if the key was there. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::new();
    /// assert_eq!(map.insert(37_u64, 'a'), None);
    /// assert_eq!(map.insert(37, 'b'), Some('a'));
    /// ```
    #[inline]
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.raw.insert(key.to_bits(), value)
    }

    /// The key's value. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let map = DytisMap::from([(1_i32, 'a')]);
    /// assert_eq!(map.get(&1), Some(&'a'));
    /// assert_eq!(map.get(&-1), None);
    /// ```
    #[inline]
    pub fn get(&self, key: &K) -> Option<&V> {
        self.raw.get(key.to_bits())
    }

    /// The key's value, to change. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 10)]);
    /// *map.get_mut(&1).unwrap() += 1;
    /// assert_eq!(map[&1], 11);
    /// ```
    #[inline]
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.raw.get_mut(key.to_bits())
    }

    /// The pair of a key. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert_eq!(DytisMap::from([(1_u64, 'a')]).get_key_value(&1), Some((1, &'a')));
    /// ```
    pub fn get_key_value(&self, key: &K) -> Option<(K, &V)> {
        let bits = key.to_bits();
        self.raw.get(bits).map(|value| (K::from_bits(bits), value))
    }

    /// Whether the key is there. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert!(DytisMap::from([(1_u64, 'a')]).contains_key(&1));
    /// ```
    #[inline]
    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// Looks up many keys: `out[i]` becomes the value of `keys[i]`. The cache misses of a group of keys overlap, so this is
    /// faster than as many calls of [`get`](Self::get) once the map outgrows the cache. Computes in O(keys * log n).
    ///
    /// # Panics
    /// If `keys` and `out` differ in length.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let map = DytisMap::from([(1_u64, 'a'), (3, 'c')]);
    /// let mut out = [None; 3];
    /// map.get_many(&[3, 2, 1], &mut out);
    /// assert_eq!(out, [Some(&'c'), None, Some(&'a')]);
    /// ```
    pub fn get_many<'a>(&'a self, keys: &[K], out: &mut [Option<&'a V>]) {
        assert_eq!(keys.len(), out.len(), "as many places as keys are needed");
        self.raw.get_many(|i| keys[i].to_bits(), out);
    }

    /// Removes a key and returns its value. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 'a')]);
    /// assert_eq!(map.remove(&1), Some('a'));
    /// assert_eq!(map.remove(&1), None);
    /// ```
    #[inline]
    pub fn remove(&mut self, key: &K) -> Option<V> {
        self.raw.remove(key.to_bits())
    }

    /// Removes a key and returns the pair. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 'a')]);
    /// assert_eq!(map.remove_entry(&1), Some((1, 'a')));
    /// ```
    pub fn remove_entry(&mut self, key: &K) -> Option<(K, V)> {
        let bits = key.to_bits();
        self.raw
            .remove(bits)
            .map(|value| (K::from_bits(bits), value))
    }

    /// The place of a key, to look at and change in one descent. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut count = DytisMap::new();
    /// for word in ["to", "be", "or", "not", "to", "be"] {
    ///     *count.entry(word.len()).or_insert(0) += 1;
    /// }
    /// assert_eq!(count[&2], 5);
    /// ```
    pub fn entry(&mut self, key: K) -> Entry<'_, K, V> {
        match self.raw.entry(key.to_bits()) {
            Ok(raw) => Entry::Occupied(OccupiedEntry::new(raw)),
            Err(raw) => Entry::Vacant(VacantEntry::new(raw)),
        }
    }

    /// The pair with the least key. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert_eq!(DytisMap::from([(2_u64, 'b'), (1, 'a')]).first_key_value(), Some((1, &'a')));
    /// ```
    pub fn first_key_value(&self) -> Option<(K, &V)> {
        self.iter().next()
    }

    /// The pair with the greatest key. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert_eq!(DytisMap::from([(2_u64, 'b'), (1, 'a')]).last_key_value(), Some((2, &'b')));
    /// ```
    pub fn last_key_value(&self) -> Option<(K, &V)> {
        self.iter().next_back()
    }

    /// The entry of the least key. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(2_u64, 'b'), (1, 'a')]);
    /// *map.first_entry().unwrap().get_mut() = 'x';
    /// assert_eq!(map[&1], 'x');
    /// ```
    pub fn first_entry(&mut self) -> Option<OccupiedEntry<'_, K, V>> {
        self.raw.first_occupied().map(OccupiedEntry::new)
    }

    /// The entry of the greatest key. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(2_u64, 'b'), (1, 'a')]);
    /// assert_eq!(map.last_entry().unwrap().remove(), 'b');
    /// ```
    pub fn last_entry(&mut self) -> Option<OccupiedEntry<'_, K, V>> {
        self.raw.last_occupied().map(OccupiedEntry::new)
    }

    /// Removes the pair with the least key. Computes in O(1), amortised.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(2_u64, 'b'), (1, 'a')]);
    /// assert_eq!(map.pop_first(), Some((1, 'a')));
    /// ```
    pub fn pop_first(&mut self) -> Option<(K, V)> {
        self.raw
            .pop_first()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }

    /// Removes the pair with the greatest key. Computes in O(1), amortised.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(2_u64, 'b'), (1, 'a')]);
    /// assert_eq!(map.pop_last(), Some((2, 'b')));
    /// ```
    pub fn pop_last(&mut self) -> Option<(K, V)> {
        self.raw
            .pop_last()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }

    /// Moves all pairs of `other` into this map, leaving it empty; where both have a key, `other`'s value wins. Computes in O(m)
    /// if the `m` pairs of `other` lie behind all of this map, else in O(m log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut a = DytisMap::from([(1_u64, 'a'), (2, 'b')]);
    /// let mut b = DytisMap::from([(2_u64, 'x'), (3, 'c')]);
    /// a.append(&mut b);
    /// assert!(a.iter().eq([(1, &'a'), (2, &'x'), (3, &'c')]) && b.is_empty());
    /// ```
    pub fn append(&mut self, other: &mut Self) {
        if self.is_empty() {
            mem::swap(self, other);
            return;
        }
        let other = Self::from_raw(other.raw.take());
        self.extend(other);
    }

    /// Moves the pairs from `key` on into a new map. Computes in O(moved pairs).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut a = DytisMap::from([(1_u64, 'a'), (2, 'b'), (3, 'c')]);
    /// let b = a.split_off(&2);
    /// assert!(a.iter().eq([(1, &'a')]) && b.iter().eq([(2, &'b'), (3, &'c')]));
    /// ```
    #[must_use = "the pairs that were split off are dropped with it"]
    pub fn split_off(&mut self, key: &K) -> Self {
        Self::from_raw(self.raw.split_off(key.to_bits()))
    }

    /// Keeps the pairs for which `keep` answers true, visiting them in order. Computes in O(n + removed * log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map: DytisMap<u64, u64> = (0..8).map(|i| (i, i)).collect();
    /// map.retain(|key, _| key % 2 == 0);
    /// assert!(map.keys().eq([0, 2, 4, 6]));
    /// ```
    pub fn retain<F: FnMut(&K, &mut V) -> bool>(&mut self, mut keep: F) {
        let mut extract = self.raw.extract(None, None);
        while extract
            .next(|bits, value| !keep(&K::from_bits(bits), value))
            .is_some()
        {}
    }

    /// Takes the pairs of a range out for which `pred` answers true, lazily and in order. What the iterator has not reached when
    /// it is dropped stays.
    ///
    /// # Panics
    /// As [`range`](Self::range).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map: DytisMap<u64, u64> = (0..8).map(|i| (i, i)).collect();
    /// let odd: Vec<_> = map.extract_if(2.., |key, _| key % 2 == 1).map(|(key, _)| key).collect();
    /// assert_eq!(odd, [3, 5, 7]);
    /// assert_eq!(map.len(), 5);
    /// ```
    pub fn extract_if<F, R>(&mut self, range: R, pred: F) -> ExtractIf<'_, K, V, F>
    where
        F: FnMut(&K, &mut V) -> bool,
        R: RangeBounds<K>,
    {
        let raw = match bounds(&range) {
            Some((low, high)) => self.raw.extract(low, high),
            None => self.raw.extract_none(),
        };
        ExtractIf::new(raw, pred)
    }

    /// The pairs of a range of keys, in order. Computes in O(log n).
    ///
    /// # Panics
    /// If the range's start is greater than its end, or if both are equal and excluded: where `BTreeMap::range` is documented
    /// to. An empty map panics too, where std's lets such a range pass as long as it has no root.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let map = DytisMap::from([(1_u64, 'a'), (2, 'b'), (3, 'c')]);
    /// assert!(map.range(2..).eq([(2, &'b'), (3, &'c')]));
    /// assert!(map.range(..=2).rev().eq([(2, &'b'), (1, &'a')]));
    /// ```
    pub fn range<R: RangeBounds<K>>(&self, range: R) -> Range<'_, K, V> {
        Range::new(match bounds(&range) {
            Some((low, high)) => self.raw.walk_between(low, high),
            None => crate::raw::walk::Walk::empty(&self.raw),
        })
    }

    /// As [`range`](Self::range), with values to change.
    ///
    /// # Panics
    /// As [`range`](Self::range).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 10), (2, 20), (3, 30)]);
    /// for (_, value) in map.range_mut(2..) {
    ///     *value += 1;
    /// }
    /// assert!(map.values().eq(&[10, 21, 31]));
    /// ```
    pub fn range_mut<R: RangeBounds<K>>(&mut self, range: R) -> RangeMut<'_, K, V> {
        RangeMut::new(match bounds(&range) {
            Some((low, high)) => self.raw.walk_between_mut(low, high),
            None => self.raw.walk_none_mut(),
        })
    }

    /// The paper's scan: calls `visit` on the first `n` pairs whose key is at least `from`, and returns how many there were.
    /// Computes in O(log n + pairs); the fastest way to read a stretch.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let map: DytisMap<u64, u64> = (0..100).map(|i| (i * 10, i)).collect();
    /// let mut keys = Vec::new();
    /// assert_eq!(map.scan(55, 3, |key, _| keys.push(key)), 3);
    /// assert_eq!(keys, [60, 70, 80]);
    /// ```
    pub fn scan<F: FnMut(K, &V)>(&self, from: K, n: usize, mut visit: F) -> usize {
        let mut seen = 0;
        if n > 0 {
            self.raw
                .walk_between(Some(from.to_bits()), None)
                .visit_about(n, |bits, value| {
                    visit(K::from_bits(bits), value);
                    seen += 1;
                    seen < n
                });
        }
        seen
    }

    /// A cursor in the gap before the first key that `bound` admits as a lower bound. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// use std::ops::Bound;
    /// let map = DytisMap::from([(1_u64, 'a'), (3, 'c')]);
    /// let mut cursor = map.lower_bound(Bound::Included(&2));
    /// assert_eq!(cursor.peek_prev(), Some((1, &'a')));
    /// assert_eq!(cursor.next(), Some((3, &'c')));
    /// assert_eq!(cursor.next(), None);
    /// ```
    pub fn lower_bound(&self, bound: Bound<&K>) -> Cursor<'_, K, V> {
        Cursor::new(match bound {
            Bound::Included(key) => self.raw.cursor_from(Some(key.to_bits())),
            Bound::Excluded(key) => self.cursor_above(*key),
            Bound::Unbounded => self.raw.cursor_from(None),
        })
    }

    /// A cursor in the gap behind the last key that `bound` admits as an upper bound. Computes in O(log n).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// use std::ops::Bound;
    /// let map = DytisMap::from([(1_u64, 'a'), (3, 'c')]);
    /// let mut cursor = map.upper_bound(Bound::Excluded(&3));
    /// assert_eq!(cursor.prev(), Some((1, &'a')));
    /// assert_eq!(cursor.peek_next(), Some((1, &'a')));
    /// ```
    pub fn upper_bound(&self, bound: Bound<&K>) -> Cursor<'_, K, V> {
        Cursor::new(match bound {
            Bound::Included(key) => self.cursor_above(*key),
            Bound::Excluded(key) => self.raw.cursor_from(Some(key.to_bits())),
            Bound::Unbounded => self.raw.cursor_at_end(),
        })
    }

    fn cursor_above(&self, key: K) -> crate::raw::entry::RawCursor<'_, V> {
        match key.to_bits().checked_add(1) {
            Some(above) => self.raw.cursor_from(Some(above)),
            None => self.raw.cursor_at_end(),
        }
    }

    /// All pairs, in order.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert!(DytisMap::from([(2_u64, 'b'), (1, 'a')]).iter().eq([(1, &'a'), (2, &'b')]));
    /// ```
    pub fn iter(&self) -> Iter<'_, K, V> {
        Iter::new(self.raw.walk(), self.len())
    }

    /// All pairs, in order, with values to change.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 10)]);
    /// map.iter_mut().for_each(|(key, value)| *value += key);
    /// assert_eq!(map[&1], 11);
    /// ```
    pub fn iter_mut(&mut self) -> IterMut<'_, K, V> {
        let len = self.len();
        IterMut::new(self.raw.walk_mut(), len)
    }

    /// All keys, in order.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert!(DytisMap::from([(2_u64, 'b'), (1, 'a')]).keys().eq([1, 2]));
    /// ```
    pub fn keys(&self) -> Keys<'_, K, V> {
        Keys::new(self.iter())
    }

    /// All values, in the order of their keys.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert!(DytisMap::from([(2_u64, 'b'), (1, 'a')]).values().eq(&['a', 'b']));
    /// ```
    pub fn values(&self) -> Values<'_, K, V> {
        Values::new(self.iter())
    }

    /// All values, in the order of their keys, to change.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// let mut map = DytisMap::from([(1_u64, 10), (2, 20)]);
    /// map.values_mut().for_each(|value| *value += 1);
    /// assert!(map.values().eq(&[11, 21]));
    /// ```
    pub fn values_mut(&mut self) -> ValuesMut<'_, K, V> {
        ValuesMut::new(self.iter_mut())
    }

    /// The keys, in order, of the map taken apart.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert!(DytisMap::from([(2_u64, 'b'), (1, 'a')]).into_keys().eq([1, 2]));
    /// ```
    pub fn into_keys(self) -> IntoKeys<K, V> {
        IntoKeys::new(self.into_iter())
    }

    /// The values, in the order of their keys, of the map taken apart.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// assert!(DytisMap::from([(2_u64, 'b'), (1, 'a')]).into_values().eq(['a', 'b']));
    /// ```
    pub fn into_values(self) -> IntoValues<K, V> {
        IntoValues::new(self.into_iter())
    }

    /// A map of pairs that come in strictly ascending order of their keys. Computes in O(n); every bucket is left full.
    ///
    /// # Errors
    /// [`Error::Unsorted`] with the position of the first pair that does not ascend.
    ///
    /// # Examples
    /// ```
    /// # use dytis::{DytisMap, Error};
    /// let map = DytisMap::from_sorted_iter((0..1000_u64).map(|i| (i, ())))?;
    /// assert_eq!(map.len(), 1000);
    /// let error = DytisMap::from_sorted_iter([(1_u64, 'a'), (3, 'b'), (3, 'c')]).unwrap_err();
    /// assert_eq!(error, Error::Unsorted { position: 2 });
    /// # Ok::<(), Error>(())
    /// ```
    pub fn from_sorted_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Result<Self, Error> {
        let mut map = Self::new();
        map.bulk_load(pairs)?;
        Ok(map)
    }

    /// Appends pairs that come in strictly ascending order, all above the keys that are there. Computes in O(pairs).
    ///
    /// # Errors
    /// [`Error::Unsorted`] with the position of the first pair that does not ascend; the pairs before it have been inserted.
    ///
    /// # Examples
    /// ```
    /// # use dytis::{DytisMap, Error};
    /// let mut map = DytisMap::from([(5_u64, 'a')]);
    /// map.bulk_load([(6, 'b'), (9, 'c')])?;
    /// assert_eq!(map.bulk_load([(9, 'd')]), Err(Error::Unsorted { position: 0 }));
    /// assert_eq!(map.len(), 3);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn bulk_load<I: IntoIterator<Item = (K, V)>>(&mut self, pairs: I) -> Result<(), Error> {
        let mut last = self.last_key_value().map(|(key, _)| key.to_bits());
        for (position, (key, value)) in pairs.into_iter().enumerate() {
            let bits = key.to_bits();
            if last.is_some_and(|last| bits <= last) {
                return Err(Error::Unsorted { position });
            }
            self.raw.push_last(bits, value);
            last = Some(bits);
        }
        Ok(())
    }
}
