//! Segments split, merge, and leave the map.

use super::RawMap;
use super::directory;
use super::edge::Place;
use super::search::{flip, unflip};
use super::segment::Segment;
use alloc::boxed::Box;

/// Where a segment is split.
#[derive(Clone, Copy)]
enum Cut {
    /// Before this bucket.
    Before(usize),
    /// At the gap of the new key, through the bucket.
    AtGap,
}

impl<V> RawMap<V> {
    /// Splits a segment that has all its buckets; `place` is the gap where `bits` belongs, and is void afterwards.
    #[inline(never)]
    pub(super) unsafe fn split(&mut self, place: Place<V>, bits: u64, rising: bool, falling: bool) {
        // SAFETY: the segment is live and none of its buckets is empty.
        unsafe {
            let segment = place.segment;
            let cut = Self::cut(place, rising, falling);
            let right = self.divide(place, cut, bits, rising);
            self.counters.splits += 1;
            let start = unflip((*segment).high()) + 1;
            let end = unflip((*right).high());
            directory::redirect(&mut self.root, (start, end), segment, right);
            let slack = usize::from(self.params.slack);
            if directory::add_beginning(&mut self.root, start, slack) {
                self.counters.doublings += 1;
            }
        }
    }

    /// Where to split: in the middle; at the run, where keys come in one; near or at the end of the map where a load in order
    /// arrives.
    ///
    /// Both halves have at least an eighth of the buckets, unless the new key lies beyond all keys of the segment and
    /// continues a run: then the old ones stay together, full as they are, and see no more keys at that end. So the number of
    /// segments is bounded by the number of pairs.
    unsafe fn cut(place: Place<V>, rising: bool, falling: bool) -> Cut {
        // SAFETY: the segment is live.
        let segment = unsafe { &*place.segment };
        let (buckets, number) = (segment.buckets(), place.number);
        let (few, many) = (buckets / 8, buckets - buckets / 8);
        let at_end = number + 1 == buckets && place.pos == segment.len(number);
        let at_start = number == 0 && place.pos == 0;
        if at_end && rising {
            Cut::Before(buckets)
        } else if at_start && falling {
            Cut::Before(0)
        } else if at_end && segment.next.is_null() {
            Cut::Before(many)
        } else if at_start && segment.prev.is_null() {
            Cut::Before(few)
        } else if (rising || falling) && (few..many).contains(&number) {
            Cut::AtGap
        } else {
            Cut::Before(buckets / 2)
        }
    }

    /// Moves what lies behind the cut into a new segment and returns it. Where that leaves one of the two without buckets, it gets
    /// an empty one, for `bits` on its way; `rising` tells to which side of a cut at its own gap it goes.
    unsafe fn divide(
        &mut self,
        place: Place<V>,
        cut: Cut,
        bits: u64,
        rising: bool,
    ) -> *mut Segment {
        // SAFETY: the segment is live, and so are its neighbours.
        unsafe {
            let segment = place.segment;
            let high = (*segment).high();
            let right = Box::into_raw(Box::new(Segment::new(high)));
            let (number, pos) = (place.number, place.pos);
            match cut {
                Cut::Before(at) if at == (*segment).buckets() => {
                    (*segment).set_high(place.bucket.key(pos - 1));
                    (*right).insert_bucket(0, high, self.pool.acquire(), 0);
                }
                Cut::Before(0) => {
                    (*segment).move_buckets(0, &mut *right);
                    (*segment).set_high(flip(bits));
                    (*segment).insert_bucket(0, flip(bits), self.pool.acquire(), 0);
                }
                Cut::Before(at) => (*segment).move_buckets(at, &mut *right),
                Cut::AtGap => {
                    let len = (*segment).len(number);
                    let bound = (*segment).bound(number);
                    (*segment).move_buckets(number + 1, &mut *right);
                    if pos < len {
                        let id = self.pool.acquire();
                        let bucket = self.pool.bucket(id);
                        bucket.take(0, 0, place.bucket, len, pos, len - pos);
                        (*right).insert_bucket(0, bound, id, len - pos);
                        (*right).count += (len - pos) as u32;
                        (*segment).lens[number] = pos as u8;
                        (*segment).count -= (len - pos) as u32;
                    }
                    let last = if pos == 0 {
                        let bound = (*segment).bound(number - 1);
                        self.pool.release((*segment).remove_bucket(number));
                        bound
                    } else if rising {
                        place.bucket.key(pos - 1).max(flip(bits))
                    } else {
                        place.bucket.key(pos - 1)
                    };
                    (*segment).set_high(last);
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
            right
        }
    }

    /// Joins a small segment with a small neighbour.
    pub(super) unsafe fn merge_segment(&mut self, segment: *mut Segment) {
        // SAFETY: the segments are live.
        unsafe {
            let limit = usize::from(self.params.segment_buckets) / 2;
            let buckets = (*segment).buckets();
            let fits =
                |other: *mut Segment| !other.is_null() && (*other).buckets() + buckets <= limit;
            let (into, from) = if fits((*segment).prev) {
                ((*segment).prev, segment)
            } else if fits((*segment).next) {
                (segment, (*segment).next)
            } else {
                return;
            };
            let start = Self::start(from);
            (*from).move_buckets(0, &mut *into);
            self.counters.merges += 1;
            self.unlink(from, start);
        }
    }

    /// Takes a segment that has no more pairs out of the chain and of the directories, and frees it. Its range, from `start` on,
    /// falls to the segment before it, or after it if it is the first.
    pub(super) unsafe fn unlink(&mut self, segment: *mut Segment, start: u64) {
        // SAFETY: the segment is live and nothing points to it afterwards.
        unsafe {
            let (prev, next) = ((*segment).prev, (*segment).next);
            let end = unflip((*segment).high());
            if next.is_null() {
                self.tail = prev;
            } else {
                (*next).prev = prev;
            }
            let slack = usize::from(self.params.slack);
            if prev.is_null() {
                self.head = next;
                if next.is_null() {
                    self.root = directory::Slot::EMPTY;
                } else {
                    directory::redirect(&mut self.root, (start, end), segment, next);
                    directory::remove_beginning(&mut self.root, end + 1, slack);
                }
            } else {
                (*prev).next = next;
                (*prev).set_high((*segment).high());
                directory::redirect(&mut self.root, (start, end), segment, prev);
                directory::remove_beginning(&mut self.root, start, slack);
            }
            drop(Box::from_raw(segment));
            self.segments -= 1;
        }
    }

    /// The lowest key that belongs to a segment.
    pub(super) unsafe fn start(segment: *mut Segment) -> u64 {
        // SAFETY: the segment and its neighbours are live.
        unsafe {
            let prev = (*segment).prev;
            if prev.is_null() {
                0
            } else {
                unflip((*prev).high()) + 1
            }
        }
    }
}
