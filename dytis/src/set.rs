//! The ordered set: a map without values.

use crate::map::{self, DytisMap};
use crate::{Error, Key, Stats};
use core::cmp::Ordering;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::iter::{FusedIterator, Peekable};
use core::ops::{BitAnd, BitOr, BitXor, RangeBounds, Sub};

/// An ordered set with the face of [`BTreeSet`](alloc::collections::BTreeSet): a [`DytisMap`] without values, whose
/// complexities it has.
///
/// # Examples
/// ```
/// use dytis::DytisSet;
///
/// let mut set = DytisSet::from([30_u64, 10, 20]);
/// assert!(set.insert(15));
/// assert!(!set.insert(20));
/// assert_eq!(set.range(12..).next(), Some(15));
/// assert_eq!(set.iter().collect::<Vec<_>>(), [10, 15, 20, 30]);
/// ```
pub struct DytisSet<K> {
    map: DytisMap<K, ()>,
}

impl<K> DytisSet<K> {
    /// An empty set; allocates nothing. Computes in O(1).
    pub const fn new() -> Self {
        Self {
            map: DytisMap::new(),
        }
    }

    pub(crate) const fn from_map(map: DytisMap<K, ()>) -> Self {
        Self { map }
    }

    #[cfg(feature = "rayon")]
    pub(crate) fn as_map(&self) -> &DytisMap<K, ()> {
        &self.map
    }

    /// Number of keys. Computes in O(1).
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there is no key. Computes in O(1).
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Removes all keys and frees the memory.
    pub fn clear(&mut self) {
        self.map.clear();
    }

    /// Heap bytes of the set, exactly; see [`DytisMap::memory_usage`].
    pub fn memory_usage(&self) -> usize {
        self.map.memory_usage()
    }

    /// What the set looks like inside; see [`DytisMap::stats`].
    pub fn stats(&self) -> Stats {
        self.map.stats()
    }
}

impl<K: Key> DytisSet<K> {
    /// Inserts a key; true if it was not there. Computes in O(log n).
    pub fn insert(&mut self, key: K) -> bool {
        self.map.insert(key, ()).is_none()
    }

    /// Inserts a key and returns the equal one that was there. Computes in O(log n).
    pub fn replace(&mut self, key: K) -> Option<K> {
        self.map.insert(key, ()).map(|()| key)
    }

    /// Whether the key is there. Computes in O(log n).
    pub fn contains(&self, key: &K) -> bool {
        self.map.contains_key(key)
    }

    /// The key, if it is there. Computes in O(log n).
    pub fn get(&self, key: &K) -> Option<K> {
        self.map.get_key_value(key).map(|(key, ())| key)
    }

    /// Removes a key; true if it was there. Computes in O(log n).
    pub fn remove(&mut self, key: &K) -> bool {
        self.map.remove(key).is_some()
    }

    /// Removes and returns a key. Computes in O(log n).
    pub fn take(&mut self, key: &K) -> Option<K> {
        self.map.remove_entry(key).map(|(key, ())| key)
    }

    /// The least key. Computes in O(1).
    pub fn first(&self) -> Option<K> {
        self.map.first_key_value().map(|(key, ())| key)
    }

    /// The greatest key. Computes in O(1).
    pub fn last(&self) -> Option<K> {
        self.map.last_key_value().map(|(key, ())| key)
    }

    /// Removes and returns the least key. Computes in O(1), amortised.
    pub fn pop_first(&mut self) -> Option<K> {
        self.map.pop_first().map(|(key, ())| key)
    }

    /// Removes and returns the greatest key. Computes in O(1), amortised.
    pub fn pop_last(&mut self) -> Option<K> {
        self.map.pop_last().map(|(key, ())| key)
    }

    /// Moves all keys of `other` into this set; see [`DytisMap::append`].
    pub fn append(&mut self, other: &mut Self) {
        self.map.append(&mut other.map);
    }

    /// Moves the keys from `key` on into a new set. Computes in O(moved keys).
    #[must_use = "the keys that were split off are dropped with it"]
    pub fn split_off(&mut self, key: &K) -> Self {
        Self {
            map: self.map.split_off(key),
        }
    }

    /// Keeps the keys for which `keep` answers true, visiting them in order.
    pub fn retain<F: FnMut(&K) -> bool>(&mut self, mut keep: F) {
        self.map.retain(|key, ()| keep(key));
    }

    /// Takes the keys of a range out for which `pred` answers true, lazily and in order.
    ///
    /// # Panics
    /// As [`range`](Self::range).
    pub fn extract_if<F, R>(&mut self, range: R, mut pred: F) -> impl FusedIterator<Item = K>
    where
        F: FnMut(&K) -> bool,
        R: RangeBounds<K>,
    {
        self.map
            .extract_if(range, move |key, ()| pred(key))
            .map(|(key, ())| key)
    }

    /// The keys of a range, in order. Computes in O(log n).
    ///
    /// # Panics
    /// If the range's start is greater than its end, or if both are equal and excluded.
    pub fn range<R: RangeBounds<K>>(&self, range: R) -> Range<'_, K> {
        Range {
            inner: self.map.range(range),
        }
    }

    /// All keys, in order.
    pub fn iter(&self) -> Iter<'_, K> {
        Iter {
            inner: self.map.keys(),
        }
    }

    /// A set of keys that come in strictly ascending order. Computes in O(n).
    ///
    /// # Errors
    /// [`Error::Unsorted`] with the position of the first key that does not ascend.
    pub fn from_sorted_iter<I: IntoIterator<Item = K>>(keys: I) -> Result<Self, Error> {
        DytisMap::from_sorted_iter(keys.into_iter().map(|key| (key, ()))).map(|map| Self { map })
    }

    /// Keys of this set that are not in `other`, in order.
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisSet;
    /// let (a, b) = (DytisSet::from([1_u64, 2, 3]), DytisSet::from([2_u64, 4]));
    /// assert!(a.difference(&b).eq([1, 3]));
    /// assert!(a.intersection(&b).eq([2]));
    /// assert!(a.union(&b).eq([1, 2, 3, 4]));
    /// assert!(a.symmetric_difference(&b).eq([1, 3, 4]));
    /// ```
    pub fn difference<'a>(&'a self, other: &'a Self) -> Merge<'a, K> {
        Merge::new(self, other, [true, false, false])
    }

    /// Keys of both sets, in order.
    pub fn intersection<'a>(&'a self, other: &'a Self) -> Merge<'a, K> {
        Merge::new(self, other, [false, true, false])
    }

    /// Keys of either set, in order.
    pub fn union<'a>(&'a self, other: &'a Self) -> Merge<'a, K> {
        Merge::new(self, other, [true, true, true])
    }

    /// Keys of exactly one of the sets, in order.
    pub fn symmetric_difference<'a>(&'a self, other: &'a Self) -> Merge<'a, K> {
        Merge::new(self, other, [true, false, true])
    }

    /// Whether no key is in both sets.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.intersection(other).next().is_none()
    }

    /// Whether every key of this set is in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.len() <= other.len() && self.difference(other).next().is_none()
    }

    /// Whether every key of `other` is in this set.
    pub fn is_superset(&self, other: &Self) -> bool {
        other.is_subset(self)
    }
}

/// Iterator over the keys of a set; from [`DytisSet::iter`].
#[derive(Clone)]
pub struct Iter<'a, K> {
    inner: map::Keys<'a, K, ()>,
}

/// Iterator over a range of a set; from [`DytisSet::range`].
#[derive(Clone)]
pub struct Range<'a, K> {
    inner: map::Range<'a, K, ()>,
}

/// Iterator over the keys of a set taken apart.
pub struct IntoIter<K> {
    inner: map::IntoKeys<K, ()>,
}

macro_rules! forward {
    ($($name:ident [$($life:lifetime)?] by $key:expr;)*) => {$(
        impl<$($life,)? K: Key> Iterator for $name<$($life,)? K> {
            type Item = K;

            #[inline]
            fn next(&mut self) -> Option<K> {
                self.inner.next().map($key)
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                self.inner.size_hint()
            }

            fn last(mut self) -> Option<K> {
                self.next_back()
            }

            fn min(mut self) -> Option<K> {
                self.next()
            }

            fn max(mut self) -> Option<K> {
                self.next_back()
            }

            #[inline]
            fn fold<B, F: FnMut(B, K) -> B>(self, init: B, f: F) -> B {
                self.inner.map($key).fold(init, f)
            }
        }

        impl<$($life,)? K: Key> DoubleEndedIterator for $name<$($life,)? K> {
            #[inline]
            fn next_back(&mut self) -> Option<K> {
                self.inner.next_back().map($key)
            }
        }

        impl<$($life,)? K: Key> FusedIterator for $name<$($life,)? K> {}

        impl<$($life,)? K: Key + fmt::Debug> fmt::Debug for $name<$($life,)? K> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.inner.fmt(f)
            }
        }
    )*};
}

forward! {
    Iter ['a] by |key| key;
    Range ['a] by |(key, ())| key;
    IntoIter [] by |key| key;
}

impl<K: Key> ExactSizeIterator for Iter<'_, K> {}
impl<K: Key> ExactSizeIterator for IntoIter<K> {}

/// Iterator over two sets merged, as [`DytisSet::union`] and its like give it.
#[derive(Clone)]
pub struct Merge<'a, K: Key> {
    left: Peekable<Iter<'a, K>>,
    right: Peekable<Iter<'a, K>>,
    /// Whether keys of the left set alone, of both, and of the right set alone are yielded.
    yields: [bool; 3],
}

impl<'a, K: Key> Merge<'a, K> {
    fn new(left: &'a DytisSet<K>, right: &'a DytisSet<K>, yields: [bool; 3]) -> Self {
        Self {
            left: left.iter().peekable(),
            right: right.iter().peekable(),
            yields,
        }
    }
}

impl<K: Key> Iterator for Merge<'_, K> {
    type Item = K;

    fn next(&mut self) -> Option<K> {
        loop {
            let order = match (self.left.peek(), self.right.peek()) {
                (None, None) => return None,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(left), Some(right)) => left.cmp(right),
            };
            let key = match order {
                Ordering::Less => self.left.next(),
                Ordering::Greater => self.right.next(),
                Ordering::Equal => {
                    self.right.next();
                    self.left.next()
                }
            };
            if self.yields[(order as i8 + 1) as usize] {
                return key;
            }
        }
    }
}

impl<K: Key> FusedIterator for Merge<'_, K> {}

impl<K: Key + fmt::Debug> fmt::Debug for Merge<'_, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl<K> Default for DytisSet<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> Clone for DytisSet<K> {
    fn clone(&self) -> Self {
        Self {
            map: self.map.clone(),
        }
    }
}

impl<K: Key + fmt::Debug> fmt::Debug for DytisSet<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self).finish()
    }
}

impl<K: Key> PartialEq for DytisSet<K> {
    fn eq(&self, other: &Self) -> bool {
        self.map == other.map
    }
}

impl<K: Key> Eq for DytisSet<K> {}

impl<K: Key> PartialOrd for DytisSet<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<K: Key> Ord for DytisSet<K> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.iter().cmp(other)
    }
}

impl<K: Key + Hash> Hash for DytisSet<K> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.map.hash(state);
    }
}

impl<K: Key> Extend<K> for DytisSet<K> {
    fn extend<I: IntoIterator<Item = K>>(&mut self, keys: I) {
        self.map.extend(keys.into_iter().map(|key| (key, ())));
    }
}

impl<'a, K: Key> Extend<&'a K> for DytisSet<K> {
    fn extend<I: IntoIterator<Item = &'a K>>(&mut self, keys: I) {
        self.extend(keys.into_iter().copied());
    }
}

impl<K: Key> FromIterator<K> for DytisSet<K> {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        let mut set = Self::new();
        set.extend(keys);
        set
    }
}

impl<K: Key, const N: usize> From<[K; N]> for DytisSet<K> {
    fn from(keys: [K; N]) -> Self {
        keys.into_iter().collect()
    }
}

impl<K: Key> IntoIterator for DytisSet<K> {
    type Item = K;
    type IntoIter = IntoIter<K>;

    fn into_iter(self) -> IntoIter<K> {
        IntoIter {
            inner: self.map.into_keys(),
        }
    }
}

impl<'a, K: Key> IntoIterator for &'a DytisSet<K> {
    type Item = K;
    type IntoIter = Iter<'a, K>;

    fn into_iter(self) -> Iter<'a, K> {
        self.iter()
    }
}

macro_rules! operators {
    ($($(#[$doc:meta])* $trait:ident $method:ident = $merge:ident;)*) => {$(
        impl<K: Key> $trait for &DytisSet<K> {
            type Output = DytisSet<K>;

            $(#[$doc])*
            fn $method(self, other: Self) -> DytisSet<K> {
                self.$merge(other).collect()
            }
        }
    )*};
}

operators! {
    /// The union as a new set.
    BitOr bitor = union;
    /// The intersection as a new set.
    BitAnd bitand = intersection;
    /// The symmetric difference as a new set.
    BitXor bitxor = symmetric_difference;
    /// The difference as a new set.
    Sub sub = difference;
}
