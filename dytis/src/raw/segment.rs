//! A segment's header: the remapping function and the numbers and lengths of its buckets.
//!
//! The paper's remapping function is a piecewise-linear approximation of the local distribution that computes a bucket.
//! A computed bucket overflows by chance long before its neighbours are full, which costs a third of the memory; so here
//! the function is kept as the exact quantiles: `bounds[i]` is the largest key that belongs to bucket `i`. It is evaluated
//! in two steps of one cache line each, first among the eight pieces, then among the eight buckets of the piece; both
//! are one vector comparison. Moving a bound is a remap; adding one is an expansion.

use super::pool::BucketId;
use super::search::{Arch, prefetch};
use core::ptr;

/// The most buckets that a segment can have.
pub(crate) const MAX_BUCKETS: usize = 64;
/// Buckets per piece of the remapping function.
const PIECE: usize = 8;

/// Header of a segment; its buckets lie in the pool.
#[repr(C, align(64))]
pub(crate) struct Segment {
    /// The last bound of each piece.
    pieces: [i64; MAX_BUCKETS / PIECE],
    /// Largest key that belongs to each bucket; from the last bucket on, the segment's own largest.
    bounds: [i64; MAX_BUCKETS],
    pub(crate) ids: [BucketId; MAX_BUCKETS],
    /// Pairs per bucket; none is empty unless it is the only one or about to be filled.
    pub(crate) lens: [u8; MAX_BUCKETS],
    pub(crate) buckets: u8,
    /// Bucket and place of the latest insertion, by which runs of neighbouring keys are recognised.
    pub(crate) latest: (u8, u8),
    /// Pairs in the segment.
    pub(crate) count: u32,
    /// Siblings in key order.
    pub(crate) prev: *mut Segment,
    pub(crate) next: *mut Segment,
}

impl Segment {
    /// A segment without buckets, for keys up to `high`.
    pub(crate) fn new(high: i64) -> Self {
        Self {
            pieces: [high; MAX_BUCKETS / PIECE],
            bounds: [high; MAX_BUCKETS],
            ids: [0; MAX_BUCKETS],
            lens: [0; MAX_BUCKETS],
            buckets: 0,
            latest: (u8::MAX, 0),
            count: 0,
            prev: ptr::null_mut(),
            next: ptr::null_mut(),
        }
    }

    /// The remapping function: the bucket that `key` belongs to, or `None` if `key` lies beyond the segment's end.
    ///
    /// # Safety
    /// The processor has `A`'s instruction set.
    #[inline(always)]
    pub(crate) unsafe fn remap<A: Arch>(&self, key: i64) -> Option<usize> {
        // SAFETY: both arrays are long enough, since `piece` is below 8.
        unsafe {
            let piece = A::rank::<{ MAX_BUCKETS / PIECE }>(self.pieces.as_ptr(), key);
            if piece == MAX_BUCKETS / PIECE {
                return None;
            }
            prefetch(self.ids.as_ptr().add(piece * PIECE));
            Some(piece * PIECE + A::rank::<PIECE>(self.bounds.as_ptr().add(piece * PIECE), key))
        }
    }

    /// The largest key that belongs to the segment.
    #[inline(always)]
    pub(crate) fn high(&self) -> i64 {
        self.pieces[MAX_BUCKETS / PIECE - 1]
    }

    /// Moves the end of the segment.
    pub(crate) fn set_high(&mut self, high: i64) {
        let last = self.buckets().saturating_sub(1);
        self.bounds[last..].fill(high);
        self.refresh_pieces(last);
    }

    pub(crate) fn buckets(&self) -> usize {
        usize::from(self.buckets)
    }

    pub(crate) fn len(&self, bucket: usize) -> usize {
        usize::from(self.lens[bucket])
    }

    /// Free places of a neighbour, 0 where there is no such bucket.
    pub(crate) fn room(&self, bucket: usize, capacity: usize) -> usize {
        if bucket < self.buckets() {
            capacity - self.len(bucket)
        } else {
            0
        }
    }

    pub(crate) fn bound(&self, bucket: usize) -> i64 {
        self.bounds[bucket]
    }

    /// Moves the bound between `bucket` and the next one.
    pub(crate) fn set_bound(&mut self, bucket: usize, bound: i64) {
        self.bounds[bucket] = bound;
        if bucket % PIECE == PIECE - 1 {
            self.pieces[bucket / PIECE] = bound;
        }
    }

    fn refresh_pieces(&mut self, from: usize) {
        for piece in from / PIECE..MAX_BUCKETS / PIECE {
            self.pieces[piece] = self.bounds[piece * PIECE + PIECE - 1];
        }
    }

    /// Puts a bucket before the one at `at`; behind the last one, its bound must be the segment's.
    pub(crate) fn insert_bucket(&mut self, at: usize, bound: i64, id: BucketId, len: usize) {
        let end = self.buckets();
        self.bounds.copy_within(at..end, at + 1);
        self.ids.copy_within(at..end, at + 1);
        self.lens.copy_within(at..end, at + 1);
        (self.bounds[at], self.ids[at], self.lens[at]) = (bound, id, len as u8);
        self.buckets += 1;
        self.refresh_pieces(at);
        self.latest.0 = u8::MAX;
    }

    /// Takes bucket `at` out; the next one inherits its range, or the one before if it was the last.
    pub(crate) fn remove_bucket(&mut self, at: usize) -> BucketId {
        let id = self.ids[at];
        let end = self.buckets();
        self.bounds.copy_within(at + 1..end, at);
        self.ids.copy_within(at + 1..end, at);
        self.lens.copy_within(at + 1..end, at);
        self.buckets -= 1;
        self.lens[end - 1] = 0;
        if end >= 2 {
            self.bounds[end - 2] = self.high();
        }
        self.refresh_pieces(at.saturating_sub(1));
        self.latest.0 = u8::MAX;
        id
    }

    /// Moves the buckets from `at` on, and the range that goes with them, behind those of `to`.
    pub(crate) fn move_buckets(&mut self, at: usize, to: &mut Self) {
        let (start, moved) = (to.buckets(), self.buckets() - at);
        let (from, into) = (at..at + moved, start..start + moved);
        let high = self.high();
        to.bounds[into.clone()].copy_from_slice(&self.bounds[from.clone()]);
        to.ids[into.clone()].copy_from_slice(&self.ids[from.clone()]);
        to.lens[into.clone()].copy_from_slice(&self.lens[from.clone()]);
        to.buckets += moved as u8;
        to.set_high(high);
        self.lens[from].fill(0);
        self.buckets = at as u8;
        if at > 0 {
            self.set_high(self.bounds[at - 1]);
        }
        let moved_pairs: u32 = to.lens[into].iter().map(|&len| u32::from(len)).sum();
        to.count += moved_pairs;
        self.count -= moved_pairs;
        to.refresh_pieces(0);
        (self.latest.0, to.latest.0) = (u8::MAX, u8::MAX);
    }
}
