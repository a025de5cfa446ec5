//! Cursors: gaps between pairs.

use crate::Key;
use crate::raw::entry::RawCursor;
use core::fmt;
use core::marker::PhantomData;

/// A gap between two neighbouring pairs of a map, or at an end; from [`DytisMap::lower_bound`](crate::DytisMap::lower_bound)
/// and [`DytisMap::upper_bound`](crate::DytisMap::upper_bound).
pub struct Cursor<'a, K, V> {
    raw: RawCursor<'a, V>,
    marker: PhantomData<K>,
}

impl<'a, K: Key, V> Cursor<'a, K, V> {
    pub(super) fn new(raw: RawCursor<'a, V>) -> Self {
        Self {
            raw,
            marker: PhantomData,
        }
    }

    /// Steps over the pair behind the gap and returns it; at the end it stays and returns `None`. Computes in O(1).
    ///
    /// # Examples
    /// ```
    /// # use dytis::DytisMap;
    /// # use std::ops::Bound;
    /// let map = DytisMap::from([(1_u64, 'a')]);
    /// let mut cursor = map.lower_bound(Bound::Unbounded);
    /// assert_eq!(cursor.next(), Some((1, &'a')));
    /// assert_eq!(cursor.next(), None);
    /// assert_eq!(cursor.prev(), Some((1, &'a')));
    /// ```
    #[expect(
        clippy::should_implement_trait,
        reason = "a cursor goes both ways; std names it so"
    )]
    pub fn next(&mut self) -> Option<(K, &'a V)> {
        self.raw
            .next()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }

    /// Steps back over the pair before the gap and returns it; at the start it stays and returns `None`. Computes in O(1).
    pub fn prev(&mut self) -> Option<(K, &'a V)> {
        self.raw
            .prev()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }

    /// The pair behind the gap. Computes in O(1).
    pub fn peek_next(&self) -> Option<(K, &'a V)> {
        self.raw
            .peek_next()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }

    /// The pair before the gap. Computes in O(1).
    pub fn peek_prev(&self) -> Option<(K, &'a V)> {
        self.raw
            .peek_prev()
            .map(|(bits, value)| (K::from_bits(bits), value))
    }
}

impl<K, V> Clone for Cursor<'_, K, V> {
    fn clone(&self) -> Self {
        Self {
            raw: self.raw.clone(),
            marker: PhantomData,
        }
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for Cursor<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cursor")
            .field("prev", &self.peek_prev())
            .field("next", &self.peek_next())
            .finish()
    }
}
