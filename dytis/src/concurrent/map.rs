//! The map: point operations, splits and merges.

#![allow(
    unsafe_code,
    reason = "epoch reclamation hands out references that the compiler cannot follow"
)]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::mem;
use core::ops::RangeBounds;
use core::ptr::NonNull;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crossbeam_epoch::{self as epoch, Atomic, Guard, Owned};

use super::directory::Directory;
use super::iter::Range;
use super::segment::{Segment, State};
use crate::sync::Mutex;
use crate::{DytisMap, Key};

/// Entries that a segment may hold before it splits, as long as there are few segments.
const SEGMENT_LEN: usize = 4096;
/// A segment may hold more once there are more than so many segments, so that copying the
/// directory costs an insert O(1) amortised.
const FEW_SEGMENTS: usize = 1024;

/// An ordered map that threads share by reference; see the [module](crate::concurrent) for how it
/// works and what it promises.
///
/// # Examples
///
/// ```
/// use dytis::ConcurrentDytisMap;
///
/// let hits: ConcurrentDytisMap<u32, u32> = ConcurrentDytisMap::new();
/// std::thread::scope(|scope| {
///     for _ in 0..2 {
///         scope.spawn(|| {
///             for page in 0..1000_u32 {
///                 hits.compute(page % 10, |count| Some(count.map_or(1, |count| count + 1)));
///             }
///         });
///     }
/// });
/// assert_eq!(hits.len(), 10);
/// assert!(hits.iter().all(|(_, count)| count == 200));
/// ```
pub struct ConcurrentDytisMap<K, V> {
    directory: Atomic<Directory<K, V>>,
    /// Held while a directory is replaced. Always the last lock taken.
    publishing: Mutex<()>,
    segment_len: usize,
}

// SAFETY: the raw pointers in the directory are to segments that the map owns, and a segment gives
// out `&V` under a shared lock and `&mut V` under an exclusive one, to whatever thread asks.
// Dropping the map on another thread drops `V` there; hence `Send` and `Sync` for both. Keys are
// `Send + Sync` by their trait.
unsafe impl<K: Key, V: Send + Sync> Send for ConcurrentDytisMap<K, V> {}
// SAFETY: as above.
unsafe impl<K: Key, V: Send + Sync> Sync for ConcurrentDytisMap<K, V> {}

impl<K: Key, V> ConcurrentDytisMap<K, V> {
    /// An empty map.
    pub fn new() -> Self {
        Self::with_segment_len(SEGMENT_LEN)
    }

    /// An empty map whose segments split at `entries` (at least 4; 4096 is the default). Smaller
    /// segments let more threads write at once and make a larger directory; the bound grows with
    /// the number of segments once there are more than 1024.
    pub fn with_segment_len(entries: usize) -> Self {
        Self::from_map(DytisMap::new(), entries.max(4))
    }

    fn from_map(map: DytisMap<K, V>, segment_len: usize) -> Self {
        // Built to three quarters, a segment takes inserts before it splits.
        let fill = (segment_len * 3 / 4).max(map.len().div_ceil(FEW_SEGMENTS));
        let mut rest = map;
        // Cut from the top, so that each cut touches the entries that it moves only.
        let mut tops: Vec<K> = rest.keys().step_by(fill).skip(1).collect();
        let mut segments = Vec::with_capacity(tops.len() + 1);
        let mut high = u64::MAX;
        while let Some(low) = tops.pop() {
            let top = rest.split_off(&low);
            segments.push((
                low.to_bits(),
                Box::new(Segment::new(top, low.to_bits(), high)),
            ));
            high = low.to_bits() - 1;
        }
        segments.push((0, Box::new(Segment::new(rest, 0, high))));
        segments.reverse();
        Self {
            directory: Atomic::new(Directory::new(segments)),
            publishing: Mutex::new(()),
            segment_len,
        }
    }

    fn directory<'g>(&self, guard: &'g Guard) -> &'g Directory<K, V> {
        // SAFETY: the pointer is never null, and a directory that was replaced is destroyed only
        // after every guard that was pinned then has gone.
        unsafe { self.directory.load(Ordering::Acquire, guard).deref() }
    }

    /// The segment at `position` of a directory.
    fn segment<'g>(
        directory: &'g Directory<K, V>,
        position: usize,
        _: &'g Guard,
    ) -> &'g Segment<K, V> {
        // SAFETY: a segment in a directory that a guard protects is destroyed only after a directory
        // without it was published and every guard pinned before has gone, this one included.
        unsafe { directory.segment(position).as_ref() }
    }

    /// Calls `read` with the state of the segment that covers `bits`, locked for reading.
    pub(super) fn read<R>(&self, bits: u64, read: impl FnOnce(&State<K, V>) -> R) -> R {
        let guard = epoch::pin();
        loop {
            let directory = self.directory(&guard);
            let segment = Self::segment(directory, directory.position(bits), &guard);
            let state = segment.read();
            if state.covers(bits) {
                return read(&state);
            }
        }
    }

    /// Calls `write` with the map of the segment that covers `bits`, locked for writing, and splits
    /// or merges the segment afterwards if need be. `write` changes the map after its last call of
    /// foreign code, or not at all.
    fn write<R>(&self, bits: u64, write: impl FnOnce(&mut DytisMap<K, V>) -> R) -> R {
        let guard = epoch::pin();
        let (directory, segment, mut state) = loop {
            let directory = self.directory(&guard);
            let segment = Self::segment(directory, directory.position(bits), &guard);
            let state = segment.write();
            if state.covers(bits) {
                break (directory, segment, state);
            }
        };
        let before = state.map.len();
        let result = write(&mut state.map);
        let after = state.map.len();
        if after != before {
            segment.note_len(&state);
            let most = self.most(directory.len());
            if after > most {
                self.split(segment, &mut state, &guard);
            } else if after < before && after <= most / 4 && directory.len() > 1 {
                drop(state);
                self.merge(bits, &guard);
            }
        }
        result
    }

    /// Entries that a segment may hold when there are `segments` of them.
    fn most(&self, segments: usize) -> usize {
        self.segment_len * segments.div_ceil(FEW_SEGMENTS)
    }

    /// Replaces the directory; the caller holds exclusively the segments that the change concerns.
    fn publish(&self, guard: &Guard, change: impl FnOnce(&Directory<K, V>) -> Directory<K, V>) {
        let publishing = self
            .publishing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let next = change(self.directory(guard));
        let last = self
            .directory
            .swap(Owned::new(next), Ordering::AcqRel, guard);
        drop(publishing);
        // SAFETY: `last` is out of reach for every thread that pins from now on, and it was
        // swapped out once. Its drop frees two arrays and touches no segment.
        unsafe { guard.defer_destroy(last) };
    }

    /// Moves the upper half of a segment into a new one.
    fn split(&self, segment: &Segment<K, V>, state: &mut State<K, V>, guard: &Guard) {
        let Some(middle) = state.map.keys().nth(state.map.len() / 2) else {
            return;
        };
        let low = middle.to_bits();
        let upper = Segment::new(state.map.split_off(&middle), low, state.high);
        // At least one key lies below the middle one, so `low` is above 0.
        state.high = low - 1;
        segment.note_len(state);
        let upper = NonNull::from(Box::leak(Box::new(upper)));
        self.publish(guard, |directory| directory.with(low, upper));
        // A directory is large next to what crossbeam counts as garbage: hand it over at once.
        guard.flush();
    }

    /// Merges the segment that covers `bits` with a neighbour when both together are small.
    fn merge(&self, bits: u64, guard: &Guard) {
        let directory = self.directory(guard);
        let at = directory.position(bits);
        let fits = |len: usize| len <= self.most(directory.len()) / 2;
        let pairs = [(at, at + 1), (at.wrapping_sub(1), at)];
        for (lower, upper) in pairs
            .into_iter()
            .filter(|&(lower, upper)| lower < upper && upper < directory.len())
        {
            let low_segment = Self::segment(directory, lower, guard);
            let high_segment = Self::segment(directory, upper, guard);
            if !fits(low_segment.len_hint() + high_segment.len_hint()) {
                continue;
            }
            // The lower one first, always: no two merges wait for each other.
            let mut low_state = low_segment.write();
            let mut high_state = high_segment.write();
            let neighbours = low_state.live
                && high_state.live
                && low_state.high.wrapping_add(1) == high_state.low;
            if !neighbours || !fits(low_state.map.len() + high_state.map.len()) {
                continue;
            }
            low_state.map.append(&mut high_state.map);
            low_state.high = high_state.high;
            high_state.live = false;
            low_segment.note_len(&low_state);
            high_segment.note_len(&high_state);
            let low = high_state.low;
            self.publish(guard, |directory| directory.without(low));
            drop((low_state, high_state));
            let dead = directory.segment(upper);
            // SAFETY: the segment was live until this thread marked it dead, so it is retired
            // once; the published directory no longer holds it. It is empty: its drop, on
            // whatever thread and however late, drops no `V`.
            unsafe { guard.defer_unchecked(move || drop(Box::from_raw(dead.as_ptr()))) };
            guard.flush();
            return;
        }
    }

    /// Inserts an entry and returns the value that the key had.
    ///
    /// Computes in O(log n).
    ///
    /// # Examples
    ///
    /// ```
    /// let map = dytis::ConcurrentDytisMap::new();
    /// assert_eq!(map.insert(7_u64, "a"), None);
    /// assert_eq!(map.insert(7, "b"), Some("a"));
    /// ```
    pub fn insert(&self, key: K, value: V) -> Option<V> {
        self.write(key.to_bits(), |map| map.insert(key, value))
    }

    /// Removes a key and returns its value.
    ///
    /// Computes in O(log n).
    ///
    /// # Examples
    ///
    /// ```
    /// let map = dytis::ConcurrentDytisMap::from_iter([(7_u64, "a")]);
    /// assert_eq!(map.remove(&7), Some("a"));
    /// assert_eq!(map.remove(&7), None);
    /// ```
    pub fn remove(&self, key: &K) -> Option<V> {
        self.write(key.to_bits(), |map| map.remove(key))
    }

    /// Replaces the value of a present key by what `update` makes of it, and returns the old
    /// value; `None` when the key is absent. No other operation on the key comes between.
    ///
    /// Computes in O(log n).
    ///
    /// # Examples
    ///
    /// ```
    /// let map = dytis::ConcurrentDytisMap::from_iter([(7_u64, 1_u32)]);
    /// assert_eq!(map.update(&7, |value| value + 1), Some(1));
    /// assert_eq!(map.get(&7), Some(2));
    /// assert_eq!(map.update(&8, |value| value + 1), None);
    /// ```
    pub fn update(&self, key: &K, update: impl FnOnce(&V) -> V) -> Option<V> {
        self.write(key.to_bits(), |map| {
            let value = map.get_mut(key)?;
            let new = update(value);
            Some(mem::replace(value, new))
        })
    }

    /// Sets the key to what `compute` makes of its value: `Some` inserts or replaces, `None`
    /// removes or leaves absent. Returns the old value. No other operation on the key comes
    /// between. A panic in `compute` leaves the entry as it was.
    ///
    /// Computes in O(log n).
    ///
    /// # Examples
    ///
    /// ```
    /// let map: dytis::ConcurrentDytisMap<u64, u32> = dytis::ConcurrentDytisMap::new();
    /// map.compute(7, |value| Some(value.map_or(1, |value| value + 1)));
    /// map.compute(7, |value| Some(value.map_or(1, |value| value + 1)));
    /// assert_eq!(map.get(&7), Some(2));
    /// assert_eq!(map.compute(7, |_| None), Some(2));
    /// assert!(map.is_empty());
    /// ```
    pub fn compute(&self, key: K, compute: impl FnOnce(Option<&V>) -> Option<V>) -> Option<V> {
        self.write(key.to_bits(), |map| match map.get_mut(&key) {
            Some(value) => match compute(Some(value)) {
                Some(new) => Some(mem::replace(value, new)),
                None => map.remove(&key),
            },
            None => match compute(None) {
                Some(new) => map.insert(key, new),
                None => None,
            },
        })
    }

    /// Whether the key is present.
    ///
    /// Computes in O(log n).
    pub fn contains_key(&self, key: &K) -> bool {
        self.read(key.to_bits(), |state| state.map.contains_key(key))
    }

    /// Number of entries: exact when no other thread writes, else off by at most what is being
    /// written meanwhile.
    ///
    /// Computes in O(number of segments).
    pub fn len(&self) -> usize {
        let guard = epoch::pin();
        let directory = self.directory(&guard);
        (0..directory.len())
            .map(|at| Self::segment(directory, at, &guard).len_hint())
            .sum()
    }

    /// Whether the map has no entries, with the exactness of [`len`](Self::len).
    ///
    /// Computes in O(number of segments).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of heap memory, directory and segments, without what awaits reclamation.
    ///
    /// Computes in O(number of segments) calls of [`DytisMap::memory_usage`].
    pub fn memory_usage(&self) -> usize {
        let guard = epoch::pin();
        let directory = self.directory(&guard);
        let segments = (0..directory.len()).map(|at| {
            Self::segment(directory, at, &guard)
                .read()
                .map
                .memory_usage()
        });
        let headers = directory.len() * size_of::<Segment<K, V>>();
        directory.memory_usage() + headers + segments.sum::<usize>()
    }

    /// Takes the map apart into its segments' maps, in ascending order of keys.
    fn take_maps(&mut self) -> Vec<DytisMap<K, V>> {
        let empty = Directory::new([(0, Box::new(Segment::new(DytisMap::new(), 0, u64::MAX)))]);
        let directory = mem::replace(&mut self.directory, Atomic::new(empty));
        // SAFETY: `&mut self` means that no other thread holds the directory, which is never null.
        let directory = unsafe { directory.into_owned() };
        let own = |segment: &NonNull<Segment<K, V>>| {
            // SAFETY: each live segment is in the directory once, was leaked from a box when it
            // was made, and no other thread can hold it.
            unsafe { Box::from_raw(segment.as_ptr()) }.into_map()
        };
        directory.segments().iter().map(own).collect()
    }
}

impl<K: Key, V: Clone> ConcurrentDytisMap<K, V> {
    /// The value of a key.
    ///
    /// Computes in O(log n).
    ///
    /// # Examples
    ///
    /// ```
    /// let map = dytis::ConcurrentDytisMap::from_iter([(7_u64, "a")]);
    /// assert_eq!(map.get(&7), Some("a"));
    /// assert_eq!(map.get(&8), None);
    /// ```
    pub fn get(&self, key: &K) -> Option<V> {
        self.read(key.to_bits(), |state| state.map.get(key).cloned())
    }

    /// The value of a key, which is inserted first if it is absent. Of several threads that do
    /// this at once, one calls its `value`, and all get what it made.
    ///
    /// Computes in O(log n).
    ///
    /// # Examples
    ///
    /// ```
    /// let map = dytis::ConcurrentDytisMap::new();
    /// assert_eq!(map.get_or_insert_with(7_u64, || "a"), "a");
    /// assert_eq!(map.get_or_insert_with(7, || "b"), "a");
    /// ```
    pub fn get_or_insert_with(&self, key: K, value: impl FnOnce() -> V) -> V {
        if let Some(present) = self.get(&key) {
            return present;
        }
        self.write(key.to_bits(), |map| {
            if let Some(present) = map.get(&key) {
                return present.clone();
            }
            let new = value();
            let copy = new.clone();
            map.insert(key, new);
            copy
        })
    }

    /// The entries of a range of keys in ascending order, weakly consistent (see the
    /// [module](crate::concurrent)). Entries are copied out in batches; no lock is held between
    /// two calls of `next`.
    ///
    /// # Panics
    ///
    /// As `BTreeMap::range`: if the range's start is above its end, or both are equal and
    /// excluded.
    ///
    /// # Examples
    ///
    /// ```
    /// let map = dytis::ConcurrentDytisMap::from_iter((0..100_u64).map(|key| (key, key * key)));
    /// let squares: Vec<u64> = map.range(3..6).map(|(_, square)| square).collect();
    /// assert_eq!(squares, [9, 16, 25]);
    /// ```
    pub fn range(&self, range: impl RangeBounds<K>) -> Range<'_, K, V> {
        Range::new(self, range)
    }

    /// All entries in ascending order of keys: `range(..)`.
    pub fn iter(&self) -> Range<'_, K, V> {
        self.range(..)
    }

    /// Calls `visit` with the first `n` entries from `from` on, in ascending order, weakly
    /// consistent; returns how many there were. `visit` may use the map.
    ///
    /// Computes in O(log n + entries visited).
    ///
    /// # Examples
    ///
    /// ```
    /// let map = dytis::ConcurrentDytisMap::from_iter((0..100_u64).map(|key| (2 * key, key)));
    /// let mut keys = Vec::new();
    /// assert_eq!(map.scan(5, 3, |key, _| keys.push(key)), 3);
    /// assert_eq!(keys, [6, 8, 10]);
    /// ```
    pub fn scan(&self, from: K, n: usize, mut visit: impl FnMut(K, &V)) -> usize {
        let mut visited = 0;
        for (key, value) in Range::with_batch(self, from.., n).take(n) {
            visit(key, &value);
            visited += 1;
        }
        visited
    }
}

impl<K, V> Drop for ConcurrentDytisMap<K, V> {
    fn drop(&mut self) {
        let directory = mem::replace(&mut self.directory, Atomic::null());
        // SAFETY: `&mut self` means that no other thread holds the directory, which is not null:
        // this is the only place that leaves it so.
        let directory = unsafe { directory.into_owned() };
        for segment in directory.segments() {
            // SAFETY: each live segment is in the directory once, was leaked from a box when it
            // was made, and no other thread can hold it.
            drop(unsafe { Box::from_raw(segment.as_ptr()) });
        }
    }
}

impl<K: Key, V> Default for ConcurrentDytisMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Key + fmt::Debug, V: Clone + fmt::Debug> fmt::Debug for ConcurrentDytisMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// Cuts the map into segments, in linear time.
impl<K: Key, V> From<DytisMap<K, V>> for ConcurrentDytisMap<K, V> {
    fn from(map: DytisMap<K, V>) -> Self {
        Self::from_map(map, SEGMENT_LEN)
    }
}

/// Joins the segments, in linear time.
impl<K: Key, V> From<ConcurrentDytisMap<K, V>> for DytisMap<K, V> {
    fn from(mut map: ConcurrentDytisMap<K, V>) -> Self {
        map.take_maps().into_iter().flatten().collect()
    }
}

impl<K: Key, V> FromIterator<(K, V)> for ConcurrentDytisMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        DytisMap::from_iter(entries).into()
    }
}

impl<K: Key, V> Extend<(K, V)> for ConcurrentDytisMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, entries: I) {
        for (key, value) in entries {
            self.insert(key, value);
        }
    }
}

impl<'a, K: Key, V: Clone> IntoIterator for &'a ConcurrentDytisMap<K, V> {
    type Item = (K, V);
    type IntoIter = Range<'a, K, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
