//! The directory: which segment covers a key.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr::NonNull;

use super::segment::Segment;
use crate::Key;

/// An immutable sorted array of segments. The lows lie apart from the pointers, so that a search
/// touches nothing else.
///
/// A table over equal parts of the stretch of the lows says which lows lie in which part; so where
/// the lows are spread evenly, a search looks at one or two of them.
pub(super) struct Directory<K, V> {
    lows: Box<[u64]>,
    segments: Box<[NonNull<Segment<K, V>>]>,
    /// The lowest low above 0.
    base: u64,
    /// Logarithm of a part's width.
    shift: u32,
    /// How many lows lie before each part, and in the end how many there are.
    before: Box<[u32]>,
}

impl<K, V> Directory<K, V> {
    pub(super) fn segments(&self) -> &[NonNull<Segment<K, V>>] {
        &self.segments
    }

    /// Heap bytes of the directory alone.
    pub(super) fn memory_usage(&self) -> usize {
        size_of::<Self>()
            + size_of_val::<[u64]>(&self.lows)
            + size_of_val::<[NonNull<Segment<K, V>>]>(&self.segments)
            + size_of_val::<[u32]>(&self.before)
    }
}

impl<K: Key, V> Directory<K, V> {
    /// A directory over segments given with their lows, which ascend from 0.
    pub(super) fn new(segments: impl IntoIterator<Item = (u64, Box<Segment<K, V>>)>) -> Self {
        let (lows, segments): (Vec<u64>, Vec<_>) = segments
            .into_iter()
            .map(|(low, segment)| (low, NonNull::from(Box::leak(segment))))
            .unzip();
        Self::of(lows.into(), segments.into())
    }

    fn of(lows: Box<[u64]>, segments: Box<[NonNull<Segment<K, V>>]>) -> Self {
        debug_assert_eq!(lows.first(), Some(&0));
        debug_assert!(lows.is_sorted());
        let base = lows.get(1).copied().unwrap_or(u64::MAX);
        let span = lows[lows.len() - 1].saturating_sub(base);
        // Two to four parts for each low.
        let parts = 4 * lows.len() as u64;
        let mut shift = 0;
        while span >> shift >= parts {
            shift += 1;
        }
        let mut before = Vec::with_capacity((span >> shift) as usize + 2);
        let mut count = 0;
        for part in 0..=span >> shift {
            while count < lows.len() && lows[count] < base + (part << shift) {
                count += 1;
            }
            before.push(count as u32);
        }
        before.push(lows.len() as u32);
        Self {
            lows,
            segments,
            base,
            shift,
            before: before.into(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.lows.len()
    }

    /// Position of the segment that covers `bits`; O(log segments).
    pub(super) fn position(&self, bits: u64) -> usize {
        let last = self.before.len() - 2;
        let part = (bits.saturating_sub(self.base) >> self.shift).min(last as u64) as usize;
        let (from, to) = (self.before[part] as usize, self.before[part + 1] as usize);
        // The first low is 0, so at least one lies at or below `bits`; those from `from` to `to` are in question.
        from + self.lows[from..to].partition_point(|&low| low <= bits) - 1
    }

    pub(super) fn segment(&self, position: usize) -> NonNull<Segment<K, V>> {
        self.segments[position]
    }

    /// This directory and one more segment, from `low` on.
    pub(super) fn with(&self, low: u64, segment: NonNull<Segment<K, V>>) -> Self {
        let at = self.lows.partition_point(|&other| other < low);
        Self::of(
            inserted(&self.lows, at, low),
            inserted(&self.segments, at, segment),
        )
    }

    /// This directory without the segment that begins at `low`.
    pub(super) fn without(&self, low: u64) -> Self {
        let at = self.lows.partition_point(|&other| other < low);
        debug_assert_eq!(self.lows[at], low);
        Self::of(removed(&self.lows, at), removed(&self.segments, at))
    }
}

fn inserted<T: Copy>(items: &[T], at: usize, item: T) -> Box<[T]> {
    let mut all = Vec::with_capacity(items.len() + 1);
    all.extend_from_slice(&items[..at]);
    all.push(item);
    all.extend_from_slice(&items[at..]);
    all.into()
}

fn removed<T: Copy>(items: &[T], at: usize) -> Box<[T]> {
    let mut rest = Vec::with_capacity(items.len() - 1);
    rest.extend_from_slice(&items[..at]);
    rest.extend_from_slice(&items[at + 1..]);
    rest.into()
}
