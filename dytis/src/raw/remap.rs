//! What happens when a bucket overflows or runs low: remap, expand, split, and their inverses.
//!
//! Overflow, in the order tried:
//! 1. **remap**: a neighbour has room: move the bound between the two. Half of the room is filled, or all of it when the
//!    insertions come in rising or falling runs, since then the keys behind the run will see no more of them.
//! 2. **remap the segment**: it is emptier than `U_t`: lay its pairs evenly over fewer buckets.
//! 3. **expand**: a further bucket. It takes the upper half; what lies behind the new key, if keys come in a run; nothing, if the
//!    new key is beyond the bucket's end. Loads in order thus leave full buckets behind.
//! 4. **split** the segment, when it has all its buckets (see [`super::directory`]).

use super::directory::{Child, Cut, Directory, Far, Placement, Slot};
use super::edge::Place;
use super::search::{PAD, flip, unflip};
use super::segment::Segment;
use super::{Path, RawMap};
use alloc::boxed::Box;
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
                self.split(place, bits);
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
            let mut new = Segment::new();
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
                new.insert_bucket(number, PAD, id, len);
            }
            (new.count, new.prev, new.next) = (old.count, old.prev, old.next);
            *segment = new;
            true
        }
    }

    /// Splits a segment that has all its buckets, at a key that a directory slot can start with.
    #[inline(never)]
    unsafe fn split(&mut self, place: Place<V>, bits: u64) {
        // SAFETY: the segment is live and none of its buckets is empty.
        unsafe {
            let cut = self.cut(place, bits);
            let segment = place.segment;
            let old = Slot::segment(segment);
            let path = self.path(bits);
            self.counters.splits += 1;

            let Some((&parent, above)) = path.split_last() else {
                self.nest(&path, &cut, round_within(&cut), segment, bits);
                return;
            };
            let budget = self.params.slot_budget((*parent).children() + 1);
            match (*parent).place(&cut, budget) {
                Placement::Slot(boundary, halved) => {
                    self.counters.doublings += u64::from(halved);
                    let right = self.divide(segment, boundary);
                    (*parent).divide(old, boundary, old, Slot::segment(right));
                }
                Placement::Nest(boundary) => self.nest(&path, &cut, boundary, segment, bits),
                Placement::Reroot(far) => self.reroot(parent, above, &cut, far, segment, bits),
            }
        }
    }

    /// Splits a segment at `boundary` and gives its halves a directory of their own, at the end of `path`.
    unsafe fn nest(
        &mut self,
        path: &[*mut Directory],
        cut: &Cut,
        boundary: u64,
        segment: *mut Segment,
        bits: u64,
    ) {
        // SAFETY: the segment is live and `path` leads to it, says the caller.
        unsafe {
            let right = Slot::segment(self.divide(segment, boundary));
            let nested = Directory::new(boundary, width_within(cut), Slot::segment(segment), right);
            self.replace_above(path, bits, Slot::directory(nested));
        }
    }

    /// Splits a segment at the edge of `parent` whose boundary is far from it: at a slot of the closest directory above that
    /// reaches so far, or else of a new one above all that do not.
    unsafe fn reroot(
        &mut self,
        mut parent: *mut Directory,
        mut above: &[*mut Directory],
        cut: &Cut,
        mut far: Far,
        segment: *mut Segment,
        bits: u64,
    ) {
        // SAFETY: the path's directories are live. The segment is the outermost child of `parent`, and `parent` of each
        // directory that it is replaced by, so what is beyond the boundary can leave them all at once.
        unsafe {
            let beyond_end = far.beyond_end;
            let mut slot = None;
            while let Some((&grand, rest)) = above.split_last() {
                let budget = self.params.slot_budget((*grand).children() + 1);
                match (*grand).place(cut, budget) {
                    Placement::Slot(boundary, halved) => {
                        self.counters.doublings += u64::from(halved);
                        slot = Some((grand, boundary));
                        break;
                    }
                    Placement::Reroot(further) if further.beyond_end == beyond_end => {
                        (parent, above, far) = (grand, rest, further);
                    }
                    Placement::Nest(_) | Placement::Reroot(_) => break,
                }
            }
            let boundary = slot.map_or(far.boundary, |(_, boundary)| boundary);
            let inner = Slot::directory(parent);
            let right = Slot::segment(self.divide(segment, boundary));
            // The half that the old directory's range reaches stays in it.
            let (left, right) = if beyond_end {
                (inner, right)
            } else {
                Self::replace_innermost(parent, bits, right);
                (Slot::segment(segment), inner)
            };
            if let Some((grand, _)) = slot {
                (*grand).divide(inner, boundary, left, right);
            } else {
                let outer = Directory::new(boundary, far.shift, left, right);
                self.replace_above(above, bits, Slot::directory(outer));
            }
        }
    }

    /// Puts `child` in the place of the segment that the way from `directory` to `bits` leads to.
    unsafe fn replace_innermost(mut directory: *mut Directory, bits: u64, child: Slot) {
        // SAFETY: slots lead to live directories.
        unsafe {
            while let Some(inner) = (*directory).get(bits).as_directory() {
                directory = inner;
            }
            (*directory).replace(bits, child);
        }
    }

    /// Puts `child` where the way along `path` to `bits` leads.
    unsafe fn replace_above(&mut self, path: &[*mut Directory], bits: u64, child: Slot) {
        match path.last() {
            // SAFETY: a path's directories are live.
            Some(&parent) => unsafe { (*parent).replace(bits, child) },
            None => self.root = child,
        }
    }

    /// Between which keys a segment may be split: its quartiles, or close to the end where a load in order arrives.
    unsafe fn cut(&self, place: Place<V>, bits: u64) -> Cut {
        // SAFETY: the segment is live, has at least two buckets, and none of them is empty.
        unsafe {
            let segment = &*place.segment;
            let buckets = segment.buckets();
            let first = |number| self.place(place.segment, number, 0).key();
            let last = |number| {
                self.place(place.segment, number, segment.len(number) - 1)
                    .key()
            };
            if segment.next.is_null()
                && place.number == buckets - 1
                && place.pos == segment.len(place.number)
            {
                return Cut {
                    above: last(buckets - 1 - buckets / 8),
                    upto: bits,
                    wish: bits,
                };
            }
            if segment.prev.is_null() && place.number == 0 && place.pos == 0 {
                return Cut {
                    above: bits,
                    upto: first(buckets / 8),
                    wish: bits,
                };
            }
            let low = (buckets / 4).saturating_sub(1);
            let high = (buckets * 3 / 4).clamp(low + 1, buckets - 1);
            Cut {
                above: last(low),
                upto: first(high),
                wish: first((buckets / 2).clamp(low + 1, high)),
            }
        }
    }

    /// Moves the pairs from `boundary` on into a new segment and returns it. One of the two may be left with an empty bucket, if the
    /// pair on its way belongs there.
    unsafe fn divide(&mut self, segment: *mut Segment, boundary: u64) -> *mut Segment {
        let right = Box::into_raw(Box::new(Segment::new()));
        // SAFETY: both segments are live; the bucket that the boundary falls into is shared out.
        unsafe {
            let key = flip(boundary);
            let last = |number| {
                self.pool
                    .bucket((&(*segment).ids)[number])
                    .key((*segment).len(number) - 1)
            };
            // The first bucket that holds keys from the boundary on.
            let mut number = 0;
            while number < (*segment).buckets() && last(number) < key {
                number += 1;
            }
            if number < (*segment).buckets() {
                let len = (*segment).len(number);
                let bucket = self.pool.bucket((&(*segment).ids)[number]);
                let pos = (0..len).take_while(|&pos| bucket.key(pos) < key).count();
                if pos > 0 {
                    let id = self.pool.acquire();
                    self.pool.bucket(id).take(0, 0, bucket, len, pos, len - pos);
                    // A header has no place for a bucket more, so the right part goes over at once.
                    (*right).insert_bucket(0, PAD, id, len - pos);
                    (*right).count = (len - pos) as u32;
                    (*segment).lens[number] = pos as u8;
                    (*segment).count -= (len - pos) as u32;
                    let bound = (*segment).bound(number);
                    number += 1;
                    (*segment).move_buckets(number, &mut *right, bound);
                } else {
                    (*segment).move_buckets(number, &mut *right, PAD);
                }
            }
            for half in [segment, right] {
                if (*half).buckets() == 0 {
                    let id = self.pool.acquire();
                    (*half).insert_bucket(0, PAD, id, 0);
                }
            }
            let next = (*segment).next;
            ((*right).prev, (*right).next) = (segment, next);
            if next.is_null() {
                self.tail = right;
            } else {
                (*next).prev = right;
            }
            (*segment).next = right;
            self.segments += 1;
        }
        right
    }

    /// After a removal from a bucket that is less than half full: merges it with a neighbour, and segments likewise.
    ///
    /// # Safety
    /// `place` is where the pair of `bits` was.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn underflow(&mut self, place: Place<V>, bits: u64) {
        // SAFETY: the segment and its buckets are live; merged pairs fit, as the sums say.
        unsafe {
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
                let last = left + 2 == (*segment).buckets();
                let id = (*segment).remove_bucket(left + 1);
                (*segment).set_bound(left, if last { PAD } else { bound });
                self.pool.release(id);
                self.counters.merges += 1;
            } else if (*segment).buckets() > 1 {
                let id = (*segment).remove_bucket(number);
                self.pool.release(id);
                self.counters.merges += 1;
            } else {
                let path = self.path(bits);
                self.pool.release((*segment).ids[0]);
                self.unlink(place.segment, &path, bits);
                self.compact();
                return;
            }
            if (*segment).buckets() <= usize::from(self.params.segment_buckets) / 4 {
                self.merge_segment(place.segment, bits);
            }
            self.compact();
        }
    }

    /// Joins a small segment with a small neighbour in the same directory.
    unsafe fn merge_segment(&mut self, segment: *mut Segment, bits: u64) {
        // SAFETY: slots lead to live segments; neighbours in a directory are neighbours in the chain.
        unsafe {
            let path = self.path(bits);
            let Some(&parent) = path.last() else { return };
            let limit = usize::from(self.params.segment_buckets) / 2;
            let run = (*parent).run((*parent).index(bits));
            let slots = (*parent).slots();
            let left = run.start.checked_sub(1).map(|i| slots[i]);
            let right = slots.get(run.end).copied();
            let buckets = (*segment).buckets();
            let fits = |slot: Option<Slot>| match slot.map(Slot::child) {
                Some(Child::Segment(other)) if (*other).buckets() + buckets <= limit => Some(other),
                _ => None,
            };
            let (into, from) = if let Some(left) = fits(left) {
                (left, segment)
            } else if let Some(right) = fits(right) {
                (segment, right)
            } else {
                return;
            };
            let last = self.place(
                into,
                (*into).buckets() - 1,
                (*into).len((*into).buckets() - 1) - 1,
            );
            let bound = last.bucket.key(last.pos);
            let first = self.place(from, 0, 0).key();
            (*from).move_buckets(0, &mut *into, bound);
            self.counters.merges += 1;
            // `from` is taken out; the slots of the right one of the two go to its left neighbour, which is `into`.
            self.unlink(from, &path, first);
        }
    }

    /// Takes a segment that has no more pairs out of the chain and of its directory, and frees it.
    unsafe fn unlink(&mut self, segment: *mut Segment, path: &Path, bits: u64) {
        // SAFETY: the segment is live and nothing points to it afterwards.
        unsafe {
            let (prev, next) = ((*segment).prev, (*segment).next);
            if prev.is_null() {
                self.head = next;
            } else {
                (*prev).next = next;
            }
            if next.is_null() {
                self.tail = prev;
            } else {
                (*next).prev = prev;
            }
            match path.split_last() {
                None => self.root = Slot::EMPTY,
                Some((&parent, above)) => {
                    if let Some(only) = (*parent).absorb(bits) {
                        self.replace_above(above, bits, only);
                        drop(Box::from_raw(parent));
                    }
                }
            }
            drop(Box::from_raw(segment));
            self.segments -= 1;
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

/// Logarithm of a slot's width for a new directory: some quarters of what the keys around the cut span.
fn width_within(cut: &Cut) -> u32 {
    ((cut.upto - cut.above).ilog2() + 1).min(63)
}

/// The roundest key within a cut.
fn round_within(cut: &Cut) -> u64 {
    let bit = (cut.above ^ cut.upto).ilog2();
    (cut.upto >> bit) << bit
}
