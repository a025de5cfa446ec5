//! The directory: which segment covers a key.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr::NonNull;

use super::segment::Segment;
use crate::Key;

/// An immutable sorted array of segments. The lows lie apart from the pointers, so that a search
/// touches nothing else.
pub(super) struct Directory<K, V> {
    lows: Box<[u64]>,
    segments: Box<[NonNull<Segment<K, V>>]>,
}

impl<K, V> Directory<K, V> {
    pub(super) fn segments(&self) -> &[NonNull<Segment<K, V>>] {
        &self.segments
    }
}

impl<K: Key, V> Directory<K, V> {
    /// A directory over segments given with their lows, which ascend from 0.
    pub(super) fn new(segments: impl IntoIterator<Item = (u64, Box<Segment<K, V>>)>) -> Self {
        let (lows, segments): (Vec<u64>, Vec<_>) = segments
            .into_iter()
            .map(|(low, segment)| (low, NonNull::from(Box::leak(segment))))
            .unzip();
        debug_assert_eq!(lows.first(), Some(&0));
        debug_assert!(lows.is_sorted());
        Self {
            lows: lows.into(),
            segments: segments.into(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.lows.len()
    }

    /// Position of the segment that covers `bits`; O(log segments).
    pub(super) fn position(&self, bits: u64) -> usize {
        // The first low is 0, so at least one lies at or below `bits`.
        self.lows.partition_point(|&low| low <= bits) - 1
    }

    pub(super) fn segment(&self, position: usize) -> NonNull<Segment<K, V>> {
        self.segments[position]
    }

    /// This directory and one more segment, from `low` on.
    pub(super) fn with(&self, low: u64, segment: NonNull<Segment<K, V>>) -> Self {
        let at = self.lows.partition_point(|&other| other < low);
        Self {
            lows: inserted(&self.lows, at, low),
            segments: inserted(&self.segments, at, segment),
        }
    }

    /// This directory without the segment that begins at `low`.
    pub(super) fn without(&self, low: u64) -> Self {
        let at = self.lows.partition_point(|&other| other < low);
        debug_assert_eq!(self.lows[at], low);
        Self {
            lows: removed(&self.lows, at),
            segments: removed(&self.segments, at),
        }
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
