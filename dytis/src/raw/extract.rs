//! Removing what a predicate names, and cutting a map in two.

use super::RawMap;
use super::edge::Place;
use alloc::vec::Vec;
use core::mem;

/// Goes through a stretch of pairs and takes out those that a predicate names.
pub(crate) struct Extract<'a, V> {
    map: &'a mut RawMap<V>,
    /// The next pair to ask about, or the end.
    next: Place<V>,
    /// Largest key to ask about.
    high: u64,
}

// SAFETY: as `&mut RawMap<V>`.
unsafe impl<V: Send> Send for Extract<'_, V> {}
// SAFETY: as `&mut RawMap<V>`.
unsafe impl<V: Sync> Sync for Extract<'_, V> {}

impl<V> Extract<'_, V> {
    /// The next pair that `named` answers true for, taken out. If `named` panics, nothing has changed.
    pub(crate) fn next(&mut self, mut named: impl FnMut(u64, &mut V) -> bool) -> Option<(u64, V)> {
        while !self.next.is_end() {
            // SAFETY: `next` is a pair, and stays one until the map changes, upon which it is sought anew.
            unsafe {
                let bits = self.next.key();
                if bits > self.high {
                    self.next = Place::end();
                    return None;
                }
                if named(bits, &mut *self.next.value()) {
                    let value = self.map.remove_at(self.next);
                    self.next = self.map.upper_bound(bits);
                    return Some((bits, value));
                }
                self.next = self.map.after(self.next);
            }
        }
        None
    }
}

impl<V> RawMap<V> {
    /// Extraction from the pairs with `low <= key <= high`; `None` is no bound.
    pub(crate) fn extract(&mut self, low: Option<u64>, high: Option<u64>) -> Extract<'_, V> {
        let next = low.map_or_else(|| self.first(), |bits| self.lower_bound(bits));
        Extract {
            map: self,
            next,
            high: high.unwrap_or(u64::MAX),
        }
    }

    /// Extraction from no pair at all.
    pub(crate) fn extract_none(&mut self) -> Extract<'_, V> {
        Extract {
            map: self,
            next: Place::end(),
            high: 0,
        }
    }

    pub(crate) fn pop_first(&mut self) -> Option<(u64, V)> {
        self.first_occupied().map(super::entry::Occupied::remove)
    }

    pub(crate) fn pop_last(&mut self) -> Option<(u64, V)> {
        self.last_occupied().map(super::entry::Occupied::remove)
    }

    /// Takes everything out and leaves an empty map with the same parameters.
    pub(crate) fn take(&mut self) -> Self {
        let params = self.params;
        mem::replace(self, Self::new(params))
    }

    /// Moves the pairs with `key >= bits` into a new map.
    pub(crate) fn split_off(&mut self, bits: u64) -> Self {
        let mut right = Self::new(self.params);
        let start = self.lower_bound(bits);
        if start.is_end() {
            return right;
        }
        if start == self.first() {
            mem::swap(self, &mut right);
            return right;
        }
        // From the end down, so that what stays is not touched.
        let mut moved = Vec::new();
        while let Some(last) = self.last_occupied() {
            if last.bits() < bits {
                break;
            }
            moved.push(last.remove());
        }
        for (key, value) in moved.into_iter().rev() {
            right.push_last(key, value);
        }
        right
    }
}

impl<V: Clone> Clone for RawMap<V> {
    fn clone(&self) -> Self {
        let mut clone = Self::new(self.params);
        let mut walk = self.walk();
        while let Some((bits, value)) = walk.next() {
            clone.push_last(bits, value.clone());
        }
        clone
    }
}
