//! Ordered iteration, batch by batch.

use alloc::vec::{self, Vec};
use core::fmt;
use core::iter::FusedIterator;
use core::ops::{Bound, RangeBounds};

use super::map::ConcurrentDytisMap;
use crate::Key;

/// Entries copied out under one lock.
const BATCH: usize = 128;

/// The entries of a range of keys in ascending order, weakly consistent; made by
/// [`ConcurrentDytisMap::range`].
pub struct Range<'a, K, V> {
    map: &'a ConcurrentDytisMap<K, V>,
    batch: vec::IntoIter<(K, V)>,
    batch_len: usize,
    /// Bits in the next segment to visit; `None` at the end.
    at: Option<u64>,
    /// What remains to be yielded: keys above those copied out already.
    lower: Bound<K>,
    upper: Bound<K>,
}

impl<'a, K: Key, V: Clone> Range<'a, K, V> {
    pub(super) fn new(map: &'a ConcurrentDytisMap<K, V>, range: impl RangeBounds<K>) -> Self {
        Self::with_batch(map, range, BATCH)
    }

    /// At most `batch_len` entries a lock, for a caller that wants no more.
    pub(super) fn with_batch(
        map: &'a ConcurrentDytisMap<K, V>,
        range: impl RangeBounds<K>,
        batch_len: usize,
    ) -> Self {
        let (lower, upper) = (range.start_bound().cloned(), range.end_bound().cloned());
        if let (
            Bound::Included(start) | Bound::Excluded(start),
            Bound::Included(end) | Bound::Excluded(end),
        ) = (lower, upper)
        {
            assert!(start <= end, "range start is greater than range end");
            let excluded = matches!((lower, upper), (Bound::Excluded(_), Bound::Excluded(_)));
            assert!(
                start < end || !excluded,
                "range start and end are equal and excluded"
            );
        }
        let at = match lower {
            Bound::Included(start) | Bound::Excluded(start) => start.to_bits(),
            Bound::Unbounded => 0,
        };
        Self {
            map,
            batch: Vec::new().into_iter(),
            batch_len: batch_len.clamp(1, BATCH),
            at: Some(at),
            lower,
            upper,
        }
    }

    /// Copies out the next entries; leaves the batch empty only at the end.
    fn fill(&mut self) {
        while let Some(at) = self.at {
            let (batch, high) = self.map.read(at, |state| {
                let entries = state
                    .map
                    .range((self.lower, self.upper))
                    .take(self.batch_len);
                let batch: Vec<(K, V)> = entries.map(|(key, value)| (key, value.clone())).collect();
                (batch, state.high)
            });
            if let Some(&(last, _)) = batch.last() {
                self.lower = Bound::Excluded(last);
                self.at = Some(last.to_bits()).filter(|_| !self.spent());
                self.batch = batch.into_iter();
                return;
            }
            // Nothing more in this segment, so go on behind it, unless the range ends there.
            let end = match self.upper {
                Bound::Included(end) | Bound::Excluded(end) => end.to_bits(),
                Bound::Unbounded => u64::MAX,
            };
            self.at = (high < end).then(|| high + 1);
        }
    }

    /// Whether the bounds leave nothing, in a form that a map's `range` would refuse.
    fn spent(&self) -> bool {
        match (self.lower, self.upper) {
            (Bound::Excluded(start), Bound::Included(end) | Bound::Excluded(end)) => start >= end,
            _ => false,
        }
    }
}

impl<K: Key, V: Clone> Iterator for Range<'_, K, V> {
    type Item = (K, V);

    fn next(&mut self) -> Option<(K, V)> {
        if self.batch.len() == 0 {
            self.fill();
        }
        self.batch.next()
    }
}

impl<K: Key, V: Clone> FusedIterator for Range<'_, K, V> {}

impl<K: fmt::Debug, V> fmt::Debug for Range<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Range")
            .field("lower", &self.lower)
            .field("upper", &self.upper)
            .finish_non_exhaustive()
    }
}
