//! Directories: tables of slots over equal parts of the key space, nested where the keys are dense.
//!
//! A directory is a *base*, a *shift* and a row of slots. Slot `i >= 1` stands for the keys from `base + (i - 1) << shift` on,
//! slot 0 for everything below `base`, the last slot for everything above its start: the edges are open, so a directory
//! covers whatever its parent sends it, and it may begin and end where its keys do. Neighbouring slots share a child - a
//! **segment** or a further directory - if their keys do not fill two; the **global depth** is the logarithm of the number of
//! slots, a child's **local depth** that minus the logarithm of the slots it has.
//!
//! When a segment splits at a key `x`, `x` must be a slot's start. There are four ways, tried in this order:
//! 1. **split**: a slot that starts between the segment's quartiles is there already;
//! 2. **doubling**: halve the slots' width as often as needed, or extend the row to the left or right, while the row stays
//!    within its budget (a constant number of slots per child);
//! 3. **nest**: where the row would become sparse because the keys are *dense* here, the segment's slots get a directory of
//!    their own with `x` as its base;
//! 4. **re-root**: where it would become sparse because the keys are *far away*, they leave it for a slot of the closest directory
//!    above that reaches so far, or a coarser directory is put above this one.
//!
//! Each way leaves at least a quarter of the segment's buckets on both sides (but for ascending and descending loads, which
//! leave full segments behind), so the number of segments is bounded by the number of keys whatever these are, and with it
//! the slots. The depth has no such bound: where dense groups of keys appear one after the other at far-apart places, each may
//! bring a level (`tests/worst_cases.rs`, "moving hot spot").

use super::segment::Segment;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

/// A tagged pointer: to a segment, or (lowest bit set) to a directory, or null for the root of an empty map.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(*mut u8);

/// What a slot points to.
pub(crate) enum Child {
    Segment(*mut Segment),
    Directory(*mut Directory),
}

impl Slot {
    pub(crate) const EMPTY: Self = Self(ptr::null_mut());

    pub(crate) fn segment(segment: *mut Segment) -> Self {
        Self(segment.cast())
    }

    pub(crate) fn directory(directory: *mut Directory) -> Self {
        Self(directory.cast::<u8>().map_addr(|address| address | 1))
    }

    #[inline(always)]
    pub(crate) fn is_empty(self) -> bool {
        self.0.is_null()
    }

    /// The directory, if it is one.
    #[inline(always)]
    pub(crate) fn as_directory(self) -> Option<*mut Directory> {
        (self.0.addr() & 1 == 1).then(|| self.0.wrapping_sub(1).cast())
    }

    /// The segment that this slot, which is not a directory, points to.
    #[inline(always)]
    pub(crate) fn as_segment(self) -> *mut Segment {
        self.0.cast()
    }

    pub(crate) fn child(self) -> Child {
        match self.as_directory() {
            Some(directory) => Child::Directory(directory),
            None => Child::Segment(self.as_segment()),
        }
    }
}

/// A table of slots over equal parts of the key space.
pub(crate) struct Directory {
    /// Where slot 1 begins.
    base: u64,
    /// Logarithm of a slot's width.
    shift: u32,
    /// Number of the last slot, at least 1.
    last: u32,
    slots: Vec<Slot>,
    children: usize,
}

/// What has become of a request for a slot that starts at a new place.
pub(crate) enum Placement {
    /// The row has (now) a slot that starts at this key; the flag tells whether slots were halved.
    Slot(u64, Doubled),
    /// The row would be too sparse, since the keys are dense.
    Nest(u64),
    /// The row would be too sparse, since the keys are far from it.
    Reroot(Far),
}

/// A boundary far from a directory.
pub(crate) struct Far {
    pub(crate) boundary: u64,
    /// Shift of a directory of which the one it is far from would fill a slot.
    pub(crate) shift: u32,
    /// Whether it lies beyond the directory's end, or else before its start.
    pub(crate) beyond_end: bool,
}

/// How often a placement has halved the slots.
pub(crate) type Doubled = u32;

/// Where a segment may be split.
pub(crate) struct Cut {
    /// The new boundary lies above this key...
    pub(crate) above: u64,
    /// ...and not above this one.
    pub(crate) upto: u64,
    /// Where it would be best.
    pub(crate) wish: u64,
}

impl Directory {
    /// A directory of two slots that meet at `base`.
    pub(crate) fn new(base: u64, shift: u32, left: Slot, right: Slot) -> *mut Self {
        Box::into_raw(Box::new(Self {
            base,
            shift,
            last: 1,
            slots: alloc::vec![left, right],
            children: 2,
        }))
    }

    /// The slot of `key`.
    #[inline(always)]
    pub(crate) fn index(&self, key: u64) -> usize {
        let (distance, below) = key.overflowing_sub(self.base);
        let slot = (distance >> self.shift).min(u64::from(self.last) - 1) as usize + 1;
        if below { 0 } else { slot }
    }

    /// The child that `key` belongs to.
    #[inline(always)]
    pub(crate) fn get(&self, key: u64) -> Slot {
        // SAFETY: an index never passes `last`, the number of the last slot.
        unsafe { *self.slots.as_ptr().add(self.index(key)) }
    }

    pub(crate) fn children(&self) -> usize {
        self.children
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The slots around `index` that share its child.
    pub(crate) fn run(&self, index: usize) -> core::ops::Range<usize> {
        let child = self.slots[index];
        let start = self.slots[..index]
            .iter()
            .rposition(|&s| s != child)
            .map_or(0, |i| i + 1);
        let end = self.slots[index..]
            .iter()
            .position(|&s| s != child)
            .map_or(self.slots.len(), |i| index + i);
        start..end
    }

    /// First key of slot `index`.
    pub(crate) fn start(&self, index: usize) -> u64 {
        if index == 0 {
            0
        } else {
            self.base + (((index - 1) as u64) << self.shift)
        }
    }

    /// Makes sure that a slot starts within `cut`, with at most `budget` slots in the row.
    pub(crate) fn place(&mut self, cut: &Cut, budget: usize) -> Placement {
        // Relative to the base, in i128: the keys may lie on both sides of it.
        let base = i128::from(self.base);
        let (above, upto) = (i128::from(cut.above) - base, i128::from(cut.upto) - base);
        let wish = i128::from(cut.wish) - base;
        // The coarsest shift at which a multiple lies in (above, upto]: that of their highest differing bit.
        let coarsest = if above < 0 && upto >= 0 {
            127
        } else {
            127 - (above ^ upto).leading_zeros()
        };
        let shift = coarsest.min(self.shift);
        let boundary = if coarsest >= self.shift {
            let nearest = (wish >> shift) << shift;
            if nearest > above {
                nearest
            } else {
                nearest + (1 << shift)
            }
        } else {
            (upto >> shift) << shift
        };
        debug_assert!(
            above < boundary && boundary <= upto,
            "a boundary lies within the cut"
        );
        let key = (base + boundary) as u64;
        let index = boundary >> shift;
        if shift == self.shift && (0..i128::from(self.last)).contains(&index) {
            return Placement::Slot(key, 0);
        }
        // The row must hold the first and last boundaries that count, and the new one.
        let halved = self.shift - shift;
        let first = self
            .slots
            .iter()
            .position(|&s| s != self.slots[0])
            .unwrap_or(1) as i128
            - 1;
        let last_child = self.slots[self.slots.len() - 1];
        let last = self
            .slots
            .iter()
            .rposition(|&s| s != last_child)
            .unwrap_or(0) as i128;
        let (first, last) = (first << halved, last << halved);
        let (mut low, mut high) = (first.min(index), last.max(index));
        let slots = high - low + 2;
        let budget = budget as i128;
        if slots > budget {
            // Sparse because dense here, or because far away? At the present width, would the row reach?
            let (index, first, last) = (boundary >> self.shift, first >> halved, last >> halved);
            let reach = last.max(index) - first.min(index) + 2;
            return if reach <= budget || (first..=last).contains(&index) {
                Placement::Nest(key)
            } else {
                let shift = key.abs_diff(self.base).max(1).ilog2().max(self.shift);
                Placement::Reroot(Far {
                    boundary: key,
                    shift,
                    beyond_end: index > last,
                })
            };
        }
        // Extend by half of the row, so that a row that grows at one end is not rebuilt at every split.
        let spare = (slots / 2).min(budget - slots);
        if index > last {
            high = (high + spare).min((i128::from(u64::MAX) - base) >> shift);
        } else if index < first {
            low = (low - spare).max(-(base >> shift));
        }
        self.regrid(
            (base + (low << shift)) as u64,
            shift,
            (high - low + 2) as usize,
        );
        Placement::Slot(key, halved)
    }

    /// Lays the row out anew; every boundary between children must be a multiple of the new width from the new base.
    fn regrid(&mut self, base: u64, shift: u32, slots: usize) {
        let start = |index: usize| base + (((index - 1) as u64) << shift);
        let row = (0..slots)
            .map(|i| {
                if i == 0 {
                    self.slots[0]
                } else {
                    self.get(start(i))
                }
            })
            .collect();
        self.slots = row;
        (self.base, self.shift, self.last) = (base, shift, slots as u32 - 1);
    }

    /// Gives the slots of `old` that start at or above `boundary` to `right`, the others to `left`: a split.
    pub(crate) fn divide(&mut self, old: Slot, boundary: u64, left: Slot, right: Slot) {
        let run = self.run(self.index(boundary));
        debug_assert!(
            self.slots[run.start] == old,
            "the boundary lies in the segment that is split"
        );
        for index in run {
            self.slots[index] = if self.start(index) >= boundary {
                right
            } else {
                left
            };
        }
        self.children += 1;
    }

    /// Puts another child into the slots of the one at `key`.
    pub(crate) fn replace(&mut self, key: u64, child: Slot) {
        let run = self.run(self.index(key));
        self.slots[run].fill(child);
    }

    /// Takes the child at `key` out; a neighbour inherits its slots. If only one child is left, it is returned.
    pub(crate) fn absorb(&mut self, key: u64) -> Option<Slot> {
        let run = self.run(self.index(key));
        let heir = if run.start > 0 {
            self.slots[run.start - 1]
        } else {
            self.slots[run.end]
        };
        self.slots[run].fill(heir);
        self.children -= 1;
        (self.children == 1).then_some(heir)
    }

    /// Heap bytes of this directory alone.
    pub(crate) fn memory_usage(&self) -> usize {
        size_of::<Self>() + self.slots.capacity() * size_of::<Slot>()
    }
}
