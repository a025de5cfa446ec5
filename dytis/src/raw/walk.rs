//! Walking over a stretch of pairs from both ends.

use super::RawMap;
use super::bucket::Shape;
use super::edge::Place;
use core::marker::PhantomData;

/// A stretch of pairs, given by its first and last one.
struct Span<V> {
    map: *const RawMap<V>,
    front: Place<V>,
    back: Place<V>,
    /// Both ends are void once this is false.
    live: bool,
}

impl<V> Clone for Span<V> {
    fn clone(&self) -> Self {
        Self {
            map: self.map,
            front: self.front,
            back: self.back,
            live: self.live,
        }
    }
}

impl<V> Span<V> {
    fn empty(map: &RawMap<V>) -> Self {
        Self {
            map,
            front: Place::end(),
            back: Place::end(),
            live: false,
        }
    }

    fn all(map: &RawMap<V>) -> Self {
        Self {
            map,
            front: map.first(),
            back: map.last(),
            live: map.len > 0,
        }
    }

    /// The pairs from `start` to before `end`, where `start` does not lie behind `end`.
    fn between(map: &RawMap<V>, start: Place<V>, end: Place<V>) -> Self {
        if start == end {
            return Self::empty(map);
        }
        // SAFETY: `end` is a pair or the end; a pair, `start` at least, lies before it.
        let back = unsafe { map.before(end) };
        Self {
            map,
            front: start,
            back,
            live: true,
        }
    }

    #[inline(always)]
    fn next(&mut self) -> Option<Place<V>> {
        if !self.live {
            return None;
        }
        let place = self.front;
        if place == self.back {
            self.live = false;
        } else {
            // SAFETY: a pair that is not the last; the map outlives the walk.
            self.front = unsafe { (*self.map).after(place) };
        }
        Some(place)
    }

    #[inline(always)]
    fn next_back(&mut self) -> Option<Place<V>> {
        if !self.live {
            return None;
        }
        let place = self.back;
        if place == self.front {
            self.live = false;
        } else {
            // SAFETY: a pair that is not the first; the map outlives the walk.
            self.back = unsafe { (*self.map).before(place) };
        }
        Some(place)
    }

    /// Calls `visit` on the pairs in order, bucket by bucket, until it answers false; about `wanted` of them.
    #[inline]
    fn visit(mut self, wanted: usize, mut visit: impl FnMut(u64, *mut V) -> bool) {
        // Buckets are asked for so many ahead, unless so many pairs are not wanted.
        const AHEAD: usize = 4;
        let ahead = AHEAD.min(wanted / (Shape::<V>::SLOTS * 3 / 4));
        let mut left = wanted;
        if self.live {
            for distance in 1..ahead {
                // SAFETY: a pair of a live map.
                unsafe { (*self.map).prefetch_bucket(self.front, distance) };
            }
        }
        while self.live {
            let place = self.front;
            if left >= ahead * (Shape::<V>::SLOTS * 3 / 4) {
                // SAFETY: a pair of a live map.
                unsafe { (*self.map).prefetch_bucket(place, ahead) };
            }
            let last_bucket = place.bucket.keys() == self.back.bucket.keys();
            // SAFETY: pairs of a live map, up to the end of the bucket or the last pair of the stretch.
            unsafe {
                let end = if last_bucket {
                    self.back.pos + 1
                } else {
                    (*place.segment).len(place.number)
                };
                left = left.saturating_sub(end - place.pos);
                for pos in place.pos..end {
                    let here = Place { pos, ..place };
                    if !visit(here.key(), here.value()) {
                        return;
                    }
                }
                if last_bucket {
                    self.live = false;
                } else {
                    self.front = (*self.map).next_bucket(place);
                }
            }
        }
    }
}

/// A stretch of pairs, read.
pub(crate) struct Walk<'a, V> {
    span: Span<V>,
    marker: PhantomData<&'a V>,
}

/// A stretch of pairs with values to change.
pub(crate) struct WalkMut<'a, V> {
    span: Span<V>,
    marker: PhantomData<&'a mut V>,
}

// SAFETY: gives out `&V` only.
unsafe impl<V: Sync> Send for Walk<'_, V> {}
// SAFETY: gives out `&V` only.
unsafe impl<V: Sync> Sync for Walk<'_, V> {}
// SAFETY: gives out each `&mut V` once.
unsafe impl<V: Send> Send for WalkMut<'_, V> {}
// SAFETY: `&WalkMut` gives out `&V` at most.
unsafe impl<V: Sync> Sync for WalkMut<'_, V> {}

impl<V> Clone for Walk<'_, V> {
    fn clone(&self) -> Self {
        Self {
            span: self.span.clone(),
            marker: PhantomData,
        }
    }
}

impl<'a, V> Walk<'a, V> {
    /// The stretch from `front` to `back`, both pairs of `map`, unless `left` is 0.
    pub(crate) fn new(map: &'a RawMap<V>, front: Place<V>, back: Place<V>, left: usize) -> Self {
        Self {
            span: Span {
                map,
                front,
                back,
                live: left > 0,
            },
            marker: PhantomData,
        }
    }

    pub(crate) fn empty(map: &'a RawMap<V>) -> Self {
        Self {
            span: Span::empty(map),
            marker: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<(u64, &'a V)> {
        // SAFETY: a pair, borrowed for `'a`.
        self.span
            .next()
            .map(|place| unsafe { (place.key(), &*place.value()) })
    }

    #[inline(always)]
    pub(crate) fn next_back(&mut self) -> Option<(u64, &'a V)> {
        // SAFETY: a pair, borrowed for `'a`.
        self.span
            .next_back()
            .map(|place| unsafe { (place.key(), &*place.value()) })
    }

    /// Calls `visit` on the pairs in order until it answers false.
    #[inline]
    pub(crate) fn visit(self, visit: impl FnMut(u64, &'a V) -> bool) {
        self.visit_about(usize::MAX, visit);
    }

    /// Calls `visit` on the pairs in order until it answers false, which is expected after `wanted` pairs.
    #[inline]
    pub(crate) fn visit_about(self, wanted: usize, mut visit: impl FnMut(u64, &'a V) -> bool) {
        // SAFETY: pairs, borrowed for `'a`.
        self.span
            .visit(wanted, |bits, value| visit(bits, unsafe { &*value }));
    }
}

impl<'a, V> WalkMut<'a, V> {
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<(u64, &'a mut V)> {
        // SAFETY: a pair of a map borrowed exclusively for `'a`; each is yielded once.
        self.span
            .next()
            .map(|place| unsafe { (place.key(), &mut *place.value()) })
    }

    #[inline(always)]
    pub(crate) fn next_back(&mut self) -> Option<(u64, &'a mut V)> {
        // SAFETY: as above.
        self.span
            .next_back()
            .map(|place| unsafe { (place.key(), &mut *place.value()) })
    }

    /// Calls `visit` on the pairs in order until it answers false.
    #[inline]
    pub(crate) fn visit(self, mut visit: impl FnMut(u64, &'a mut V) -> bool) {
        self.span.visit(usize::MAX, |bits, value| {
            // SAFETY: as above.
            visit(bits, unsafe { &mut *value })
        });
    }

    /// The pairs not yet yielded, to look at.
    pub(crate) fn remaining(&self) -> Walk<'_, V> {
        Walk {
            span: self.span.clone(),
            marker: PhantomData,
        }
    }
}

impl<V> RawMap<V> {
    pub(crate) fn walk(&self) -> Walk<'_, V> {
        Walk {
            span: Span::all(self),
            marker: PhantomData,
        }
    }

    pub(crate) fn walk_mut(&mut self) -> WalkMut<'_, V> {
        WalkMut {
            span: Span::all(self),
            marker: PhantomData,
        }
    }

    /// Places of the first pair and behind the last pair with `low <= key <= high`, the bounds being optional.
    fn between(&self, low: Option<u64>, high: Option<u64>) -> Span<V> {
        let start = low.map_or_else(|| self.first(), |bits| self.lower_bound(bits));
        let end = high.map_or_else(Place::end, |bits| self.upper_bound(bits));
        Span::between(self, start, end)
    }

    /// The pairs with `low <= key <= high`; `None` is no bound. `low <= high`.
    pub(crate) fn walk_between(&self, low: Option<u64>, high: Option<u64>) -> Walk<'_, V> {
        Walk {
            span: self.between(low, high),
            marker: PhantomData,
        }
    }

    /// As [`RawMap::walk_between`], with values to change.
    pub(crate) fn walk_between_mut(
        &mut self,
        low: Option<u64>,
        high: Option<u64>,
    ) -> WalkMut<'_, V> {
        WalkMut {
            span: self.between(low, high),
            marker: PhantomData,
        }
    }

    /// No pairs.
    pub(crate) fn walk_none_mut(&mut self) -> WalkMut<'_, V> {
        WalkMut {
            span: Span::empty(self),
            marker: PhantomData,
        }
    }

    /// Whether the keys from `low` to `high`, both in the map, lie in one segment or in two neighbours: too few to divide.
    #[cfg(feature = "rayon")]
    pub(crate) fn lie_close(&self, low: u64, high: u64) -> bool {
        let (first, last) = (
            self.lower_bound(low).segment,
            self.lower_bound(high).segment,
        );
        // SAFETY: places of keys in the map have a live segment.
        core::ptr::eq(first, last) || unsafe { core::ptr::eq((*first).next, last) }
    }
}
