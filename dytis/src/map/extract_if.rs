//! Taking out what a predicate names.

use crate::Key;
use crate::raw::extract::Extract;
use core::fmt;
use core::iter::FusedIterator;
use core::marker::PhantomData;

/// Iterator that takes pairs out of a map; from [`DytisMap::extract_if`](crate::DytisMap::extract_if).
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct ExtractIf<'a, K, V, F> {
    raw: Extract<'a, V>,
    pred: F,
    marker: PhantomData<K>,
}

impl<'a, K, V, F> ExtractIf<'a, K, V, F> {
    pub(super) fn new(raw: Extract<'a, V>, pred: F) -> Self {
        Self {
            raw,
            pred,
            marker: PhantomData,
        }
    }
}

impl<K: Key, V, F: FnMut(&K, &mut V) -> bool> Iterator for ExtractIf<'_, K, V, F> {
    type Item = (K, V);

    fn next(&mut self) -> Option<Self::Item> {
        let pred = &mut self.pred;
        let (bits, value) = self
            .raw
            .next(|bits, value| pred(&K::from_bits(bits), value))?;
        Some((K::from_bits(bits), value))
    }
}

impl<K: Key, V, F: FnMut(&K, &mut V) -> bool> FusedIterator for ExtractIf<'_, K, V, F> {}

impl<K, V, F> fmt::Debug for ExtractIf<'_, K, V, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExtractIf").finish_non_exhaustive()
    }
}
