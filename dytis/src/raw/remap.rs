//! What happens when a bucket overflows or runs low: remap, expand, split, and their inverses.
//!
//! Overflow, in the order tried:
//! 1. **remap**: a neighbour has room: move the bound between the two. Half of the room is filled, or all of it when the
//!    insertions come in rising or falling runs, since then the keys behind the run will see no more of them.
//! 2. **remap the segment**: it is emptier than `U_t`: lay its pairs evenly over fewer buckets.
//! 3. **expand**: a further bucket. It takes the upper half; what lies behind the new key, if keys come in a run; nothing, if the
//!    new key is beyond the bucket's end. Loads in order thus leave full buckets behind.
//! 4. **split** the segment, when it has all its buckets (see [`super::split`]).

use super::edge::Place;
use super::search::{flip, unflip};
use super::segment::Segment;
use super::{Finger, RawMap};
use alloc::vec::Vec;

impl<V> RawMap<V> {
    /// Makes room near a gap in a full bucket; returns the gap's new place.
    ///
    /// # Safety
    /// `place` is the gap where `bits` belongs.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn make_room(&mut self, place: Place<V>, bits: u64) -> Place<V> {
        // SAFETY: the segment and its buckets are live; positions lie within the lengths that the header gives.
        unsafe {
            self.finger = Finger::NONE;
            let capacity = self.capacity();
            let segment = place.segment;
            let (number, pos) = (place.number, place.pos);
            let len = (*segment).len(number);
            let left_room = number
                .checked_sub(1)
                .map_or(0, |left| (*segment).room(left, capacity));
            let right_room = (*segment).room(number + 1, capacity);
            let (at, before) = (
                usize::from((*segment).latest.0),
                usize::from((*segment).latest.1),
            );
            let rising = at == number && before + 1 == pos;
            let falling = at == number && before == pos;

            if pos == len && right_room > 0 {
                (*segment).set_bound(number, place.bucket.key(len - 1));
                return self.place(segment, number + 1, 0);
            }
            if pos == 0 && left_room > 0 {
                (*segment).set_bound(number - 1, flip(bits));
                return self.place(segment, number - 1, (*segment).len(number - 1));
            }
            if 0 < pos && pos < len {
                // A neighbour with little room is not worth the move, unless no bucket is ever added for its sake.
                let worth = (capacity / 6).max(1);
                if left_room >= worth
                    && (left_room >= right_room || rising)
                    && !(falling && right_room >= worth)
                {
                    let count = if rising {
                        left_room.min(pos)
                    } else {
                        left_room.div_ceil(2)
                    };
                    return self.shift_left(place, count);
                }
                if right_room >= worth {
                    let count = if falling {
                        right_room.min(len - pos)
                    } else {
                        right_room.div_ceil(2)
                    };
                    return self.shift_right(place, count);
                }
            }
            let buckets = (*segment).buckets();
            let full = (buckets * capacity * usize::from(self.params.threshold)) as u32;
            if buckets >= 4 && (*segment).count * 100 < full && self.repack(place.segment) {
                return self.locate(bits).0;
            }
            if buckets == usize::from(self.params.segment_buckets) {
                self.split(place, bits, rising, falling);
                return self.locate(bits).0;
            }
            self.expand(place, bits, rising, falling)
        }
    }

    /// Moves the first `count` pairs of a bucket into its left neighbour; returns where the gap is now.
    unsafe fn shift_left(&mut self, place: Place<V>, count: usize) -> Place<V> {
        // SAFETY: the left neighbour exists and has room for `count`, says the caller.
        unsafe {
            let segment = place.segment;
            let (number, len) = (place.number, (*segment).len(place.number));
            let left = self.place(segment, number - 1, (*segment).len(number - 1));
            (*segment).set_bound(number - 1, place.bucket.key(count - 1));
            left.bucket
                .take(left.pos, left.pos, place.bucket, len, 0, count);
            (*segment).lens[number - 1] += count as u8;
            (*segment).lens[number] -= count as u8;
            (*segment).latest.0 = u8::MAX;
            self.counters.remaps += 1;
            if place.pos < count {
                Place {
                    pos: left.pos + place.pos,
                    ..left
                }
            } else {
                Place {
                    pos: place.pos - count,
                    ..place
                }
            }
        }
    }

    /// Moves the last `count` pairs of a bucket into its right neighbour; returns where the gap is now.
    unsafe fn shift_right(&mut self, place: Place<V>, count: usize) -> Place<V> {
        // SAFETY: the right neighbour exists and has room for `count`, says the caller.
        unsafe {
            let segment = place.segment;
            let (number, len) = (place.number, (*segment).len(place.number));
            let right = self.place(segment, number + 1, 0);
            let kept = len - count;
            // A gap at the seam lies above the bound, so it goes right.
            (*segment).set_bound(number, place.bucket.key(kept - 1));
            right.bucket.take(
                (*segment).len(number + 1),
                0,
                place.bucket,
                len,
                kept,
                count,
            );
            (*segment).lens[number + 1] += count as u8;
            (*segment).lens[number] = kept as u8;
            (*segment).latest.0 = u8::MAX;
            self.counters.remaps += 1;
            if place.pos >= kept {
                Place {
                    pos: place.pos - kept,
                    ..right
                }
            } else {
                place
            }
        }
    }

    /// Adds a bucket beside a full one; returns where the gap is now.
    unsafe fn expand(
        &mut self,
        place: Place<V>,
        bits: u64,
        rising: bool,
        falling: bool,
    ) -> Place<V> {
        // SAFETY: the segment has room for a further bucket, says the caller.
        unsafe {
            let segment = place.segment;
            let (number, pos, len) = (place.number, place.pos, (*segment).len(place.number));
            self.counters.expansions += 1;
            let id = self.pool.acquire();
            if pos == len {
                let bound = (*segment).bound(number);
                (*segment).set_bound(number, place.bucket.key(len - 1));
                (*segment).insert_bucket(number + 1, bound, id, 0);
                return self.place(segment, number + 1, 0);
            }
            if pos == 0 {
                (*segment).insert_bucket(number, flip(bits), id, 0);
                return self.place(segment, number, 0);
            }
            let kept = if rising || falling { pos } else { len / 2 };
            let bound = (*segment).bound(number);
            (*segment).insert_bucket(number + 1, bound, id, len - kept);
            (*segment).lens[number] = kept as u8;
            let right = self.place(segment, number + 1, 0);
            right.bucket.take(0, 0, place.bucket, len, kept, len - kept);
            let left_last = place.bucket.key(kept - 1);
            if pos < kept || (pos == kept && rising) {
                (*segment).set_bound(number, left_last.max(flip(bits)));
                place
            } else {
                (*segment).set_bound(number, left_last);
                Place {
                    pos: pos - kept,
                    ..right
                }
            }
        }
    }

    /// Lays the pairs of a segment evenly over as few buckets as leave each a fifth of its room; false if that gains none.
    unsafe fn repack(&mut self, segment: *mut Segment) -> bool {
        // SAFETY: the segment is live; every pair is moved exactly once.
        unsafe {
            let capacity = self.capacity();
            let old = &mut *segment;
            let (count, buckets) = (old.count as usize, old.buckets());
            let fill = (capacity * 4 / 5).clamp(1, capacity - 1);
            let needed = count.div_ceil(fill);
            if needed >= buckets {
                return false;
            }
            self.counters.remaps += 1;
            let mut new = Segment::new(old.high());
            let (mut source, mut taken) = (0, 0);
            for number in 0..needed {
                let target_len = count * (number + 1) / needed - count * number / needed;
                let id = self.pool.acquire();
                let target = self.pool.bucket(id);
                let mut len = 0;
                while len < target_len {
                    let from = self.pool.bucket(old.ids[source]);
                    let part = (old.len(source) - taken).min(target_len - len);
                    core::ptr::copy_nonoverlapping(
                        from.keys().add(taken),
                        target.keys().add(len),
                        part,
                    );
                    core::ptr::copy_nonoverlapping(
                        from.values().add(taken),
                        target.values().add(len),
                        part,
                    );
                    len += part;
                    taken += part;
                    if taken == old.len(source) {
                        self.pool.release(old.ids[source]);
                        (source, taken) = (source + 1, 0);
                    }
                }
                if number > 0 {
                    let previous = self.pool.bucket(new.ids[number - 1]);
                    new.set_bound(number - 1, previous.key(new.len(number - 1) - 1));
                }
                new.insert_bucket(number, old.high(), id, len);
            }
            (new.count, new.prev, new.next) = (old.count, old.prev, old.next);
            *segment = new;
            true
        }
    }

    /// After a removal from a bucket that is less than a third full: merges it with a neighbour, and segments likewise.
    ///
    /// # Safety
    /// `place` is where a pair was.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn underflow(&mut self, place: Place<V>) {
        // SAFETY: the segment and its buckets are live; merged pairs fit, as the sums say.
        unsafe {
            self.finger = Finger::NONE;
            let capacity = self.capacity();
            let segment = place.segment;
            let (number, len) = (place.number, (*segment).len(place.number));
            if len > 0 {
                let limit = capacity * 7 / 8;
                let with = |other: usize| {
                    other < (*segment).buckets() && len + (*segment).len(other) <= limit
                };
                let left = if number > 0 && with(number - 1) {
                    number - 1
                } else if with(number + 1) {
                    number
                } else {
                    return;
                };
                let (into, from) = (
                    self.place(segment, left, 0),
                    self.place(segment, left + 1, 0),
                );
                let (into_len, from_len) = ((*segment).len(left), (*segment).len(left + 1));
                into.bucket
                    .take(into_len, into_len, from.bucket, from_len, 0, from_len);
                (*segment).lens[left] += from_len as u8;
                let bound = (*segment).bound(left + 1);
                let id = (*segment).remove_bucket(left + 1);
                (*segment).set_bound(left, bound);
                self.pool.release(id);
                self.counters.merges += 1;
            } else if (*segment).buckets() > 1 {
                let id = (*segment).remove_bucket(number);
                self.pool.release(id);
                self.counters.merges += 1;
            } else {
                self.pool.release((*segment).ids[0]);
                let start = Self::start(segment);
                self.unlink(segment, start);
                self.compact();
                return;
            }
            if (*segment).buckets() <= usize::from(self.params.segment_buckets) / 4 {
                self.merge_segment(segment);
            }
            self.compact();
        }
    }

    /// Gives a chunk back if many blocks are unused, by moving its buckets elsewhere.
    fn compact(&mut self) {
        let Some(victim) = self.pool.victim() else {
            return;
        };
        let residents: Vec<_> = self.pool.residents(victim);
        for id in residents {
            // SAFETY: a resident is a live bucket with at least one pair, by which its segment is found; it is copied as a
            // whole, and the original is not used again.
            unsafe {
                let old = self.pool.bucket(id);
                let place = self.locate(unflip(old.key(0))).0;
                debug_assert!(
                    (&(*place.segment).ids)[place.number] == id,
                    "a bucket is found by its keys"
                );
                let new_id = self.pool.acquire();
                let new = self.pool.bucket(new_id);
                let len = (*place.segment).len(place.number);
                core::ptr::copy_nonoverlapping(old.keys(), new.keys(), len);
                core::ptr::copy_nonoverlapping(old.values(), new.values(), len);
                (&mut (*place.segment).ids)[place.number] = new_id;
            }
        }
        // SAFETY: all residents have been moved.
        unsafe { self.pool.end_evacuation(victim) };
    }
}
