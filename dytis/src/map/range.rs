//! Stretches of a map between two keys.

use super::iter::in_key_order;
use crate::Key;
use crate::raw::walk::{Walk, WalkMut};
use core::fmt;
use core::iter::FusedIterator;
use core::marker::PhantomData;
use core::ops::{Bound, RangeBounds};

/// The least and greatest bits of a range (`None`: no bound), or `None` if no bits lie in it. Panics where std's `range` does.
pub(crate) fn bounds<K: Key>(range: &impl RangeBounds<K>) -> Option<(Option<u64>, Option<u64>)> {
    match (range.start_bound(), range.end_bound()) {
        (Bound::Excluded(start), Bound::Excluded(end)) if start == end => {
            panic!("range start and end are equal and excluded in DytisMap")
        }
        (
            Bound::Included(start) | Bound::Excluded(start),
            Bound::Included(end) | Bound::Excluded(end),
        ) if start > end => {
            panic!("range start is greater than range end in DytisMap")
        }
        _ => {}
    }
    let low = match range.start_bound() {
        Bound::Included(key) => Some(key.to_bits()),
        Bound::Excluded(key) => Some(key.to_bits().checked_add(1)?),
        Bound::Unbounded => None,
    };
    let high = match range.end_bound() {
        Bound::Included(key) => Some(key.to_bits()),
        Bound::Excluded(key) => Some(key.to_bits().checked_sub(1)?),
        Bound::Unbounded => None,
    };
    (low.unwrap_or(0) <= high.unwrap_or(u64::MAX)).then_some((low, high))
}

/// Stretches over a walk, which knows where it ends.
macro_rules! ranges {
    ($($(#[$doc:meta])* $name:ident over $walk:ident, yields $item:ty;)*) => {$(
        $(#[$doc])*
        pub struct $name<'a, K, V> {
            walk: $walk<'a, V>,
            marker: PhantomData<K>,
        }

        impl<'a, K, V> $name<'a, K, V> {
            pub(super) fn new(walk: $walk<'a, V>) -> Self {
                Self {
                    walk,
                    marker: PhantomData,
                }
            }
        }

        impl<'a, K: Key, V> Iterator for $name<'a, K, V> {
            type Item = (K, $item);

            #[inline]
            fn next(&mut self) -> Option<Self::Item> {
                self.walk.next().map(|(bits, value)| (K::from_bits(bits), value))
            }

            in_key_order!();
        }

        impl<K: Key, V> DoubleEndedIterator for $name<'_, K, V> {
            #[inline]
            fn next_back(&mut self) -> Option<Self::Item> {
                self.walk.next_back().map(|(bits, value)| (K::from_bits(bits), value))
            }
        }

        impl<K: Key, V> FusedIterator for $name<'_, K, V> {}
    )*};
}

ranges! {
    /// Iterator over a range of a map; from [`DytisMap::range`](crate::DytisMap::range).
    Range over Walk, yields &'a V;
    /// Iterator over a range of a map, with values to change; from [`DytisMap::range_mut`](crate::DytisMap::range_mut).
    RangeMut over WalkMut, yields &'a mut V;
}

#[cfg(feature = "rayon")]
impl<'a, K: Key, V> Range<'a, K, V> {
    /// The pairs whose bits lie in `low..=high`.
    pub(crate) fn between(raw: &'a crate::raw::RawMap<V>, low: u64, high: u64) -> Self {
        Self::new(raw.walk_between(Some(low), Some(high)))
    }
}

impl<K, V> Clone for Range<'_, K, V> {
    fn clone(&self) -> Self {
        Self::new(self.walk.clone())
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for Range<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl<K: Key + fmt::Debug, V: fmt::Debug> fmt::Debug for RangeMut<'_, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(Range::<K, V>::new(self.walk.remaining()))
            .finish()
    }
}
