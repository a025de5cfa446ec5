//! Places in a map, and walking over the chain of segments.

use super::RawMap;
use super::bucket::Bucket;
use super::search::{prefetch, unflip};
use super::segment::Segment;
use core::ptr;

/// A place: a pair, a gap where a pair may go, or the end.
pub(crate) struct Place<V> {
    /// Null at the end.
    pub(crate) segment: *mut Segment,
    pub(crate) bucket: Bucket<V>,
    /// Number of the bucket in its segment.
    pub(crate) number: usize,
    pub(crate) pos: usize,
}

impl<V> Clone for Place<V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for Place<V> {}

impl<V> PartialEq for Place<V> {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.bucket.keys(), other.bucket.keys()) && self.pos == other.pos
    }
}

impl<V> Place<V> {
    /// The place behind the last pair.
    #[inline(always)]
    pub(crate) fn end() -> Self {
        Self {
            segment: ptr::null_mut(),
            bucket: Bucket::at(ptr::null_mut()),
            number: 0,
            pos: 0,
        }
    }

    #[inline(always)]
    pub(crate) fn is_end(&self) -> bool {
        self.segment.is_null()
    }

    /// Bits of the key here.
    ///
    /// # Safety
    /// The place is a pair of a live map.
    #[inline(always)]
    pub(crate) unsafe fn key(&self) -> u64 {
        // SAFETY: a pair.
        unflip(unsafe { self.bucket.key(self.pos) })
    }

    /// Address of the value here.
    ///
    /// # Safety
    /// The place is a pair of a live map.
    #[inline(always)]
    pub(crate) unsafe fn value(&self) -> *mut V {
        // SAFETY: a pair.
        unsafe { self.bucket.value(self.pos) }
    }
}

impl<V> RawMap<V> {
    /// The first pair, or the end.
    pub(crate) fn first(&self) -> Place<V> {
        if self.len == 0 {
            return Place::end();
        }
        // SAFETY: a map with pairs has a first segment, whose first bucket is not empty.
        unsafe { self.place(self.head, 0, 0) }
    }

    /// The last pair, or the end of an empty map.
    pub(crate) fn last(&self) -> Place<V> {
        if self.len == 0 {
            return Place::end();
        }
        // SAFETY: a map with pairs has a last segment, whose last bucket is not empty.
        unsafe {
            let number = (*self.tail).buckets() - 1;
            self.place(self.tail, number, (*self.tail).len(number) - 1)
        }
    }

    /// # Safety
    /// `segment` is a segment of this map and has a bucket `number`.
    #[inline(always)]
    pub(crate) unsafe fn place(
        &self,
        segment: *mut Segment,
        number: usize,
        pos: usize,
    ) -> Place<V> {
        // SAFETY: the bucket's number is live as long as the segment has it.
        let bucket = unsafe { self.pool.bucket((&(*segment).ids)[number]) };
        Place {
            segment,
            bucket,
            number,
            pos,
        }
    }

    /// Turns a gap at the end of a bucket into the pair that follows, or the end.
    ///
    /// # Safety
    /// `place` is a pair or a gap of this map.
    #[inline(always)]
    pub(crate) unsafe fn settle(&self, place: Place<V>) -> Place<V> {
        // SAFETY: the place's segment is live.
        if place.pos < unsafe { (*place.segment).len(place.number) } {
            return place;
        }
        // SAFETY: as above.
        unsafe { self.next_bucket(place) }
    }

    /// The first pair of the bucket that follows, or the end.
    ///
    /// # Safety
    /// `place` is a place of this map, not the end.
    #[inline]
    pub(crate) unsafe fn next_bucket(&self, place: Place<V>) -> Place<V> {
        // SAFETY: segments in the chain are live, and have at least one bucket.
        unsafe {
            let segment = &*place.segment;
            let number = place.number + 1;
            if number < segment.buckets() {
                if number + 1 < segment.buckets() {
                    self.pool.bucket(segment.ids[number + 1]).prefetch();
                }
                return self.place(place.segment, number, 0);
            }
            if segment.next.is_null() {
                Place::end()
            } else {
                self.place(segment.next, 0, 0)
            }
        }
    }

    /// Asks for the bucket `distance` behind that of `place`, or for the next segment's header if that is not in the same one.
    ///
    /// # Safety
    /// `place` is a pair of this map.
    #[inline(always)]
    pub(crate) unsafe fn prefetch_bucket(&self, place: Place<V>, distance: usize) {
        // SAFETY: the segment is live, and its numbers are those of live buckets.
        unsafe {
            let segment = &*place.segment;
            let number = place.number + distance;
            if number < segment.buckets() {
                self.pool.bucket(segment.ids[number]).prefetch();
            } else if !segment.next.is_null() {
                prefetch(&raw const (*segment.next).ids);
                prefetch(&raw const (*segment.next).lens);
                prefetch(&raw const (*segment.next).buckets);
            }
        }
    }

    /// The pair after this one, or the end.
    ///
    /// # Safety
    /// `place` is a pair of this map.
    #[inline(always)]
    pub(crate) unsafe fn after(&self, mut place: Place<V>) -> Place<V> {
        place.pos += 1;
        // SAFETY: a pair, or the gap behind one.
        unsafe { self.settle(place) }
    }

    /// The pair before this one; the end if it is the first.
    ///
    /// # Safety
    /// `place` is a pair of this map or its end.
    #[inline(always)]
    pub(crate) unsafe fn before(&self, place: Place<V>) -> Place<V> {
        if place.is_end() {
            return self.last();
        }
        if place.pos > 0 {
            return Place {
                pos: place.pos - 1,
                ..place
            };
        }
        // SAFETY: segments in the chain are live; no bucket is empty.
        unsafe {
            let (segment, number) = if place.number > 0 {
                (place.segment, place.number - 1)
            } else {
                let segment = (*place.segment).prev;
                if segment.is_null() {
                    return Place::end();
                }
                (segment, (*segment).buckets() - 1)
            };
            self.place(segment, number, (*segment).len(number) - 1)
        }
    }

    /// The first pair whose key is not below `bits`, or the end.
    pub(crate) fn lower_bound(&self, bits: u64) -> Place<V> {
        if self.len == 0 {
            return Place::end();
        }
        // SAFETY: what `locate` returns is a pair or a gap.
        unsafe { self.settle(self.locate(bits).0) }
    }

    /// The first pair whose key is above `bits`, or the end.
    pub(crate) fn upper_bound(&self, bits: u64) -> Place<V> {
        match bits.checked_add(1) {
            Some(above) => self.lower_bound(above),
            None => Place::end(),
        }
    }
}
