//! The structure itself, over key bits: everything `unsafe` of the ordered map lives here.
//!
//! ```text
//! root ──> directory ──> segment ──────────────> bucket
//!          slots over    remapping function      sorted keys │ values
//!          equal parts   (bounds of the buckets)
//!          of the keys   numbers, lengths        one of the pool's blocks
//!              │              ↕ siblings
//!              └─> directory where keys are dense
//! ```
//!
//! A lookup goes through the directory (usually one), evaluates the segment's remapping function (two lines), and ranks the key
//! within the bucket (all of its lines are asked for at once, since no step waits for another).
//!
//! # Invariants
//! - Keys ascend within a bucket, from bucket to bucket, and along the chain of siblings; each lies within its bucket's bounds
//!   and its segment's slots.
//! - No bucket is empty, and no segment, except while a pair is on its way in. An empty map has no segment.
//! - A slot leads to the segment that holds its start; at most two segments begin inside a slot that leads to a segment.

pub(crate) mod bucket;
#[cfg(test)]
mod check;
pub(crate) mod directory;
pub(crate) mod drain;
pub(crate) mod edge;
pub(crate) mod entry;
pub(crate) mod extract;
pub(crate) mod params;
pub(crate) mod pool;
pub(crate) mod remap;
pub(crate) mod search;
pub(crate) mod segment;
mod split;
pub(crate) mod stats;
pub(crate) mod walk;

use self::bucket::{Bucket, Shape};
use self::directory::Slot;
use self::edge::Place;
use self::params::Params;
use self::pool::Pool;
use self::search::{Arch, Base, Level, flip, level, prefetch};
use self::segment::Segment;
use self::stats::Counters;
use alloc::boxed::Box;
use core::mem;
use core::ptr;

/// An ordered map from key bits to values. What a lookup needs comes first, so that it lies in one line.
#[repr(C)]
pub(crate) struct RawMap<V> {
    root: Slot,
    len: usize,
    pool: Pool<V>,
    finger: Finger<V>,
    head: *mut Segment,
    tail: *mut Segment,
    segments: usize,
    params: Params,
    counters: Counters,
}

/// The bucket that a run of insertions fills, by which the next one finds its place without a descent. Void ([`Finger::NONE`])
/// after every change of the structure.
struct Finger<V> {
    segment: *mut Segment,
    bucket: Bucket<V>,
    number: usize,
    /// Keys above this one...
    above: i64,
    /// ...and up to this one belong to the bucket.
    upto: i64,
}

impl<V> Finger<V> {
    const NONE: Self = Self {
        segment: ptr::null_mut(),
        bucket: Bucket::at(ptr::null_mut()),
        number: 0,
        above: i64::MAX,
        upto: i64::MIN,
    };
}

// SAFETY: the pointers lead to memory that the map owns alone; with the values it can move to another thread.
unsafe impl<V: Send> Send for RawMap<V> {}
// SAFETY: `&RawMap` gives out nothing but `&V` and never writes.
unsafe impl<V: Sync> Sync for RawMap<V> {}

impl<V> RawMap<V> {
    pub(crate) const fn new(params: Params) -> Self {
        Self {
            root: Slot::EMPTY,
            pool: Pool::new(),
            head: ptr::null_mut(),
            tail: ptr::null_mut(),
            len: 0,
            segments: 0,
            params,
            counters: Counters::ZERO,
            finger: Finger::NONE,
        }
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Pairs that a bucket may hold.
    #[inline(always)]
    fn capacity(&self) -> usize {
        usize::from(self.params.bucket_capacity).min(Shape::<V>::SLOTS)
    }

    /// The segment that the directories lead to for `bits`: the one of the key, or one shortly before it.
    ///
    /// # Safety
    /// The map is not empty.
    #[inline(always)]
    unsafe fn descend(&self, bits: u64) -> *mut Segment {
        let mut slot = self.root;
        while let Some(directory) = slot.as_directory() {
            // SAFETY: slots of a map that is not empty lead to live directories.
            slot = unsafe { (*directory).get(bits) };
        }
        slot.as_segment()
    }

    /// The segment of `key`, which is `segment` or a later one, and the number of its bucket.
    ///
    /// # Safety
    /// `segment` is live, and the processor has `A`'s instruction set.
    #[inline(always)]
    unsafe fn remap<A: Arch>(mut segment: *mut Segment, key: i64) -> (*mut Segment, usize) {
        loop {
            // SAFETY: the chain's segments are live, and no key lies beyond the last one.
            unsafe {
                if let Some(number) = (*segment).remap::<A>(key) {
                    return (segment, number);
                }
                segment = (*segment).next;
            }
        }
    }

    /// The place of `bits`, and whether a pair is there; a gap otherwise. `CHANGE` asks for what an insertion or removal will need
    /// as well.
    ///
    /// # Safety
    /// The map is not empty, and the processor has `A`'s instruction set.
    #[inline(always)]
    unsafe fn locate_with<A: Arch, const CHANGE: bool>(&self, bits: u64) -> (Place<V>, bool) {
        let key = flip(bits);
        // SAFETY: slots of a map that is not empty lead to live directories and segments; `remap` yields one of the
        // segment's buckets; a finger that is not void leads to a live one.
        unsafe {
            let (segment, number, bucket) =
                if CHANGE && self.finger.above < key && key <= self.finger.upto {
                    (self.finger.segment, self.finger.number, self.finger.bucket)
                } else {
                    let segment = self.descend(bits);
                    if CHANGE {
                        prefetch(&raw const (*segment).lens);
                        prefetch(&raw const (*segment).buckets);
                    }
                    let (segment, number) = Self::remap::<A>(segment, key);
                    let id = *(&raw const (*segment).ids).cast::<u32>().add(number);
                    let bucket = self.pool.bucket(id);
                    bucket.prefetch_values();
                    (segment, number, bucket)
                };
            let pos = Self::rank_in_bucket::<A>(bucket, key);
            // `pos` may be one past the places; of the largest key only the length can tell it from padding.
            let found = pos < Shape::<V>::SLOTS
                && bucket.key(pos) == key
                && (bits != u64::MAX || pos < (*segment).len(number));
            (
                Place {
                    segment,
                    bucket,
                    number,
                    pos,
                },
                found,
            )
        }
    }

    /// # Safety
    /// `bucket` is live, and the processor has `A`'s instruction set.
    #[inline(always)]
    unsafe fn rank_in_bucket<A: Arch>(bucket: Bucket<V>, key: i64) -> usize {
        // SAFETY: all places of a bucket are readable.
        unsafe {
            match Shape::<V>::SLOTS {
                8 => A::rank::<8>(bucket.keys(), key),
                16 => A::rank::<16>(bucket.keys(), key),
                _ => A::rank::<32>(bucket.keys(), key),
            }
        }
    }

    #[inline(always)]
    unsafe fn find_with<A: Arch>(&self, bits: u64) -> *mut V {
        // SAFETY: as the caller of `find` vouches.
        unsafe {
            let (place, found) = self.locate_with::<A, false>(bits);
            if found {
                place.value()
            } else {
                ptr::null_mut()
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,popcnt")]
    unsafe fn find_avx2(&self, bits: u64) -> *mut V {
        // SAFETY: as the caller vouches.
        unsafe { self.find_with::<search::Avx2>(bits) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,popcnt")]
    unsafe fn find_avx512(&self, bits: u64) -> *mut V {
        // SAFETY: as the caller vouches.
        unsafe { self.find_with::<search::Avx512>(bits) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,popcnt")]
    unsafe fn locate_avx2<const CHANGE: bool>(&self, bits: u64) -> (Place<V>, bool) {
        // SAFETY: as the caller vouches.
        unsafe { self.locate_with::<search::Avx2, CHANGE>(bits) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,popcnt")]
    unsafe fn locate_avx512<const CHANGE: bool>(&self, bits: u64) -> (Place<V>, bool) {
        // SAFETY: as the caller vouches.
        unsafe { self.locate_with::<search::Avx512, CHANGE>(bits) }
    }

    /// Address of the value of `bits`.
    #[inline]
    pub(crate) fn find(&self, bits: u64) -> Option<ptr::NonNull<V>> {
        if self.len == 0 {
            return None;
        }
        // SAFETY: the map is not empty, and `level` has found the instruction set.
        let value = unsafe {
            match level() {
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => self.find_avx2(bits),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => self.find_avx512(bits),
                _ => self.find_with::<Base>(bits),
            }
        };
        ptr::NonNull::new(value)
    }

    /// The place of `bits` and whether a pair is there, in a map that is not empty.
    #[inline]
    pub(crate) fn locate(&self, bits: u64) -> (Place<V>, bool) {
        self.locate_for::<false>(bits)
    }

    /// As [`RawMap::locate`], with an eye to the insertion or removal that follows.
    #[inline]
    pub(crate) fn locate_to_change(&self, bits: u64) -> (Place<V>, bool) {
        self.locate_for::<true>(bits)
    }

    #[inline(always)]
    fn locate_for<const CHANGE: bool>(&self, bits: u64) -> (Place<V>, bool) {
        debug_assert!(!self.root.is_empty(), "an empty map has no places");
        // SAFETY: the map is not empty, and `level` has found the instruction set.
        unsafe {
            match level() {
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => self.locate_avx2::<CHANGE>(bits),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => self.locate_avx512::<CHANGE>(bits),
                _ => self.locate_with::<Base, CHANGE>(bits),
            }
        }
    }

    /// Inserts a pair, or replaces the value and returns the old one.
    #[inline]
    pub(crate) fn insert(&mut self, bits: u64, value: V) -> Option<V> {
        if self.len == 0 {
            self.insert_first(bits, value);
            return None;
        }
        let (place, found) = self.locate_to_change(bits);
        // SAFETY: `place` is a pair if found, else the gap where the pair belongs.
        unsafe {
            if found {
                return Some(mem::replace(&mut *place.value(), value));
            }
            self.insert_at(place, bits, value);
        }
        None
    }

    /// Inserts a pair whose key is not in the map; returns the address of the value.
    pub(crate) fn insert_new(&mut self, bits: u64, value: V) -> *mut V {
        if self.len == 0 {
            return self.insert_first(bits, value);
        }
        let (place, found) = self.locate_to_change(bits);
        debug_assert!(!found, "the key is new");
        // SAFETY: the gap where the pair belongs.
        unsafe { self.insert_at(place, bits, value) }
    }

    /// Appends a pair whose key is above all others.
    pub(crate) fn push_last(&mut self, bits: u64, value: V) {
        if self.len == 0 {
            self.insert_first(bits, value);
            return;
        }
        let last = self.last();
        // SAFETY: the gap behind the last pair.
        unsafe {
            self.insert_at(
                Place {
                    pos: last.pos + 1,
                    ..last
                },
                bits,
                value,
            )
        };
    }

    #[cold]
    fn insert_first(&mut self, bits: u64, value: V) -> *mut V {
        debug_assert!(self.root.is_empty(), "an empty map has no segment");
        let id = self.pool.acquire();
        let segment = Box::into_raw(Box::new(Segment::new(search::PAD)));
        // SAFETY: the segment was just made.
        unsafe { (*segment).insert_bucket(0, search::PAD, id, 0) };
        self.root = Slot::segment(segment);
        (self.head, self.tail, self.segments) = (segment, segment, 1);
        // SAFETY: bucket 0 is empty.
        unsafe { self.insert_at(self.place(segment, 0, 0), bits, value) }
    }

    /// Inserts a pair into a gap, making room if there is none; returns the address of the value.
    ///
    /// # Safety
    /// `place` is the gap where `bits` belongs.
    #[inline(always)]
    pub(crate) unsafe fn insert_at(&mut self, mut place: Place<V>, bits: u64, value: V) -> *mut V {
        // SAFETY: the segment is live; a bucket with fewer pairs than `capacity` has a free place.
        unsafe {
            let capacity = self.capacity();
            while (*place.segment).len(place.number) >= capacity {
                place = self.make_room(place, bits);
            }
            let segment = &mut *place.segment;
            let len = usize::from(segment.lens[place.number]);
            segment.lens[place.number] += 1;
            segment.count += 1;
            let before = (place.number as u8, (place.pos as u8).wrapping_sub(1));
            if segment.latest == before {
                self.finger = Finger {
                    segment: place.segment,
                    bucket: place.bucket,
                    number: place.number,
                    above: place.bucket.key(0),
                    upto: segment.bound(place.number),
                };
            }
            segment.latest = (place.number as u8, place.pos as u8);
            self.len += 1;
            place.bucket.insert(len, place.pos, flip(bits), value)
        }
    }

    /// Removes the pair of `bits`.
    #[inline]
    pub(crate) fn remove(&mut self, bits: u64) -> Option<V> {
        if self.len == 0 {
            return None;
        }
        let (place, found) = self.locate_to_change(bits);
        // SAFETY: a pair, if found.
        found.then(|| unsafe { self.remove_at(place) })
    }

    /// Removes the pair at a place; other places of the map are void afterwards.
    ///
    /// # Safety
    /// `place` is a pair of this map.
    #[inline(always)]
    pub(crate) unsafe fn remove_at(&mut self, place: Place<V>) -> V {
        // SAFETY: a pair, in a live segment.
        unsafe {
            let segment = &mut *place.segment;
            let len = segment.len(place.number);
            let value = place.bucket.remove(len, place.pos);
            segment.lens[place.number] -= 1;
            segment.count -= 1;
            segment.latest.0 = u8::MAX;
            self.len -= 1;
            if (len - 1) * 3 < self.capacity() {
                self.underflow(place);
            }
            value
        }
    }

    /// Looks up many keys at once: each level is asked for ahead, for a group of keys, so that their misses overlap.
    pub(crate) fn find_many(&self, bits: impl Fn(usize) -> u64, out: &mut [*mut V]) {
        const GROUP: usize = 16;
        if self.len == 0 {
            out.fill(ptr::null_mut());
            return;
        }
        for (group, out) in out.chunks_mut(GROUP).enumerate() {
            let start = group * GROUP;
            let mut segments = [ptr::null_mut::<Segment>(); GROUP];
            for (i, segment) in segments[..out.len()].iter_mut().enumerate() {
                // SAFETY: the map is not empty.
                *segment = unsafe { self.descend(bits(start + i)) };
                prefetch(*segment);
            }
            for (i, &segment) in segments[..out.len()].iter().enumerate() {
                // SAFETY: a live segment's function yields one of its buckets; the scalar path needs no instruction set.
                unsafe {
                    let (segment, number) = Self::remap::<Base>(segment, flip(bits(start + i)));
                    let keys = self.pool.bucket((&(*segment).ids)[number]).keys();
                    for line in (0..Shape::<V>::SLOTS).step_by(8) {
                        prefetch(keys.add(line));
                    }
                }
            }
            for (i, out) in out.iter_mut().enumerate() {
                *out = self
                    .find(bits(start + i))
                    .map_or(ptr::null_mut(), ptr::NonNull::as_ptr);
                prefetch(*out);
            }
        }
    }

    /// Heap bytes in use.
    pub(crate) fn memory_usage(&self) -> usize {
        let mut bytes = self.pool.memory_usage() + self.segments * size_of::<Segment>();
        self.each_directory(&mut |directory, _| bytes += directory.memory_usage());
        bytes
    }
}
