//! Directories: tables of slots over equal parts of the key space, nested where the keys are dense.
//!
//! A directory is a *base*, a *shift* and a row of slots. Slot `i` stands for the keys from `base + (i << shift)` on; the
//! first slot also for everything below, the last one for everything above, so that a directory begins and ends where its keys do.
//! A slot leads to the segment that holds the slot's **start**, or to a further directory. The **global depth** is the
//! logarithm of the number of slots; a segment's **local depth** that minus the logarithm of the slots that lead to it.
//!
//! Segments may begin anywhere within a slot: a lookup whose key lies beyond the segment's last bound goes on to its sibling.
//! At most [`CROWD`] segments may begin inside a slot that leads to a segment, so these steps are few, and rare: usually one
//! slot in eight has a beginning inside. So a segment splits where its keys ask for it, and never where a slot begins.
//!
//! When a new segment begins inside a slot, one of three things happens, the topmost directory that asks for it first:
//! - **double**: a directory with twice the beginnings that it was laid out for is laid out anew;
//! - **extend**: so is one whose slots the beginning lies beyond, when its outermost slot is crowded; half of the row is added as
//!   spare on that side;
//! - **nest**: a crowded slot gets a directory of its own over the stretch from the first to the last beginning in it.
//!
//! # Bounds
//! - *Levels*: a directory has at least 127 times the slots' width to its disposal, or else one slot per key, and a nested one
//!   lies within a slot of the one above ([`Level::cell`]). So a nested shift is at least 6 smaller, from at most 58 at the top:
//!   [`MAX_LEVELS`] levels whatever the keys are.
//! - *Slots*: `slack` (16) for each different slot that beginnings fall into, but at least [`MIN_SLOTS`]; a nested directory has at
//!   least three beginnings.
//! - *Time*: laying out costs O(slots + beginnings), and a directory is laid out again when its beginnings have doubled, or shrunk to
//!   an eighth, or when its stretch has grown by half.

use super::search::{flip, unflip};
use super::segment::Segment;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

/// Segments that may begin inside a slot without a directory of its own.
pub(crate) const CROWD: usize = 2;
/// The fewest slots for which a directory's width is chosen.
pub(crate) const MIN_SLOTS: usize = 128;
/// The most directories between the root and a segment.
#[cfg(test)]
pub(crate) const MAX_LEVELS: usize = 11;

/// A tagged pointer: to a segment, or (lowest bit set) to a directory, or null for the root of an empty map.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(*mut u8);

impl Slot {
    pub(crate) const EMPTY: Self = Self(ptr::null_mut());

    pub(crate) fn segment(segment: *mut Segment) -> Self {
        Self(segment.cast())
    }

    fn directory(directory: Box<Directory>) -> Self {
        Self(
            Box::into_raw(directory)
                .cast::<u8>()
                .map_addr(|address| address | 1),
        )
    }

    #[inline(always)]
    pub(crate) fn is_empty(self) -> bool {
        self.0.is_null()
    }

    #[inline(always)]
    pub(crate) fn as_directory(self) -> Option<*mut Directory> {
        (self.0.addr() & 1 == 1).then(|| self.0.wrapping_sub(1).cast())
    }

    /// The segment, where the slot leads to none of the directories.
    #[inline(always)]
    pub(crate) fn as_segment(self) -> *mut Segment {
        self.0.cast()
    }

    /// The segment that holds the slot's start.
    ///
    /// # Safety
    /// The slot leads to live directories and segments.
    unsafe fn first(mut self) -> *mut Segment {
        while let Some(directory) = self.as_directory() {
            // SAFETY: live, says the caller; a directory has slots.
            self = unsafe { (&(*directory).slots)[0] };
        }
        self.as_segment()
    }

    /// Frees the directories that the slot leads to.
    ///
    /// # Safety
    /// They are live and not used again.
    pub(crate) unsafe fn free_directories(self) {
        if let Some(directory) = self.as_directory() {
            // SAFETY: every directory hangs on one slot, and was made from a box.
            let directory = unsafe { Box::from_raw(directory) };
            for &slot in &directory.slots {
                // SAFETY: as for this one.
                unsafe { slot.free_directories() };
            }
        }
    }
}

/// A table of slots over equal parts of the key space.
pub(crate) struct Directory {
    /// Where slot 0 would begin if it were as wide as the others.
    base: u64,
    /// Logarithm of a slot's width.
    shift: u32,
    /// Number of the last slot.
    last: u32,
    slots: Box<[Slot]>,
    /// Beginnings of segments in the directory's range, those below nested directories included.
    beginnings: usize,
    /// As many as there were when it was laid out.
    laid_out: usize,
}

/// The beginning of a segment: its lowest key.
#[derive(Clone, Copy)]
struct Beginning {
    key: u64,
    segment: *mut Segment,
}

/// A slot on the way down, and what it stands for; bounds are inclusive.
#[derive(Clone, Copy)]
struct Level {
    slot: *mut Slot,
    /// Keys that come this way.
    start: u64,
    end: u64,
    /// What the slot stands for by its width alone: less than the range at the ends of a row.
    cell: (u64, u64),
}

impl Directory {
    /// The slot of `key`.
    #[inline(always)]
    pub(crate) fn index(&self, key: u64) -> usize {
        (key.saturating_sub(self.base) >> self.shift).min(u64::from(self.last)) as usize
    }

    /// The child that `key` belongs to.
    #[inline(always)]
    pub(crate) fn get(&self, key: u64) -> Slot {
        // SAFETY: an index never passes `last`, the number of the last slot.
        unsafe { *self.slots.as_ptr().add(self.index(key)) }
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    #[cfg(test)]
    pub(crate) fn shift(&self) -> u32 {
        self.shift
    }

    #[cfg(test)]
    pub(crate) fn beginnings(&self) -> usize {
        self.beginnings
    }

    /// First key of slot `index` in a directory that is asked for keys from `start` on.
    pub(crate) fn start(&self, index: usize, start: u64) -> u64 {
        if index == 0 {
            start
        } else {
            self.base + ((index as u64) << self.shift)
        }
    }

    /// Last key of slot `index` in a directory that is asked for keys up to `end`.
    pub(crate) fn end(&self, index: usize, end: u64) -> u64 {
        if index == self.last as usize {
            end
        } else {
            self.base + ((index as u64 + 1) << self.shift) - 1
        }
    }

    /// Slot `index` of a directory that `above` leads to.
    fn level(&mut self, index: usize, above: &Level) -> Level {
        let cell_start = self.base + ((index as u64) << self.shift);
        Level {
            slot: &raw mut self.slots[index],
            start: self.start(index, above.start),
            end: self.end(index, above.end),
            cell: (
                cell_start.max(above.cell.0),
                cell_start
                    .saturating_add((1 << self.shift) - 1)
                    .min(above.cell.1),
            ),
        }
    }

    /// Heap bytes of this directory alone.
    pub(crate) fn memory_usage(&self) -> usize {
        size_of::<Self>() + size_of_val::<[Slot]>(&self.slots)
    }

    /// Whether so many beginnings ask for another width.
    fn is_outgrown(&self) -> bool {
        self.beginnings >= 2 * self.laid_out + 4
            || self.beginnings * 8 < self.laid_out
            || self.beginnings <= CROWD
    }
}

/// The smallest shift at which a stretch of `span` keys takes at most `slots` slots, one before its start included.
fn shift_for(span: u64, slots: usize) -> u32 {
    let most = slots as u64 - 2;
    let mut shift = (64 - span.leading_zeros()).saturating_sub(most.ilog2() + 1);
    while span >> shift > most {
        shift += 1;
    }
    shift
}

/// Lays out the slot of `level` for the segments that begin in its range, `row`, after `first`.
fn lay_out(
    row: &[Beginning],
    first: *mut Segment,
    level: &Level,
    slack: usize,
    wide: Spare,
) -> Slot {
    if row.len() <= CROWD {
        return Slot::segment(first);
    }
    let (mut low, mut high) = (row[0].key, row[row.len() - 1].key);
    let spare = (high - low) / 2;
    match wide {
        Spare::None => {}
        Spare::Below => {
            let least = level.cell.0.max(level.start + 1);
            low = low.saturating_sub(spare).max(least.min(low));
        }
        Spare::Above => high = high.saturating_add(spare).min(level.cell.1.max(high)),
    }
    let width_for = |children: usize| shift_for(high - low, MIN_SLOTS.max(slack * (children + 4)));
    let finest = width_for(row.len());
    // Where many beginnings share slots even so, the slots are better spent in the directories below.
    let taken = 1 + row
        .windows(2)
        .filter(|pair| (pair[0].key - low) >> finest != (pair[1].key - low) >> finest)
        .count();
    let shift = width_for(taken);
    let base = low.saturating_sub(1 << shift);
    let last = (high - base) >> shift;
    let mut directory = Box::new(Directory {
        base,
        shift,
        last: last as u32,
        slots: alloc::vec![Slot::EMPTY; last as usize + 1].into(),
        beginnings: row.len(),
        laid_out: row.len(),
    });
    let (mut child, mut rest) = (first, row);
    for index in 0..directory.slots.len() {
        let part = directory.level(index, level);
        let mut take = |upto: u64| {
            let count = rest.iter().take_while(|b| b.key <= upto).count();
            let (taken, left) = rest.split_at(count);
            rest = left;
            taken
        };
        if let Some(exact) = take(part.start).last() {
            child = exact.segment;
        }
        let inside = take(part.end);
        directory.slots[index] = lay_out(inside, child, &part, slack, Spare::None);
        if let Some(last) = inside.last() {
            child = last.segment;
        }
    }
    Slot::directory(directory)
}

/// On which side a row gets spare slots.
#[derive(Clone, Copy)]
enum Spare {
    None,
    Below,
    Above,
}

/// The segments that begin after `first` and not after `end`.
unsafe fn row_after(first: *mut Segment, end: u64) -> impl Iterator<Item = Beginning> {
    let mut segment = first;
    core::iter::from_fn(move || {
        // SAFETY: the chain's segments are live; the last one's bound is the largest key, so the chain goes on after another.
        unsafe {
            let high = (*segment).high();
            if high >= flip(end) {
                return None;
            }
            segment = (*segment).next;
            Some(Beginning {
                key: unflip(high) + 1,
                segment,
            })
        }
    })
}

/// Lays out anew what the slot of `level` leads to; `key` is the beginning that has come or gone.
unsafe fn rebuild(level: &Level, key: u64, slack: usize) {
    // SAFETY: live, says the caller; the old directories are freed once, and the slot leads to the new ones.
    unsafe {
        let old = *level.slot;
        let first = old.first();
        let row: Vec<Beginning> = row_after(first, level.end).collect();
        let wide = match row.as_slice() {
            [.., last] if last.key == key => Spare::Above,
            [next, ..] if next.key == key => Spare::Below,
            _ => Spare::None,
        };
        *level.slot = lay_out(&row, first, level, slack, wide);
        old.free_directories();
    }
}

/// All keys.
fn top(root: &mut Slot) -> Level {
    Level {
        slot: root,
        start: 0,
        end: u64::MAX,
        cell: (0, u64::MAX),
    }
}

/// Tells the directories that a segment begins at `key`, which it did not; returns whether a directory was laid out anew.
///
/// # Safety
/// The root leads to live directories and segments, the chain is in order, and slots that start in the new segment lead to it
/// ([`redirect`]).
pub(crate) unsafe fn add_beginning(root: &mut Slot, key: u64, slack: usize) -> bool {
    let mut above: Option<Level> = None;
    let mut level = top(root);
    // SAFETY: live, says the caller.
    unsafe {
        while let Some(directory) = (*level.slot).as_directory() {
            let directory = &mut *directory;
            directory.beginnings += 1;
            let index = directory.index(key);
            let nested = directory.slots[index].as_directory().is_some();
            let next = directory.level(index, &level);
            let outside = key < next.cell.0 || key > next.cell.1;
            if directory.is_outgrown() || outside && nested {
                rebuild(&level, key, slack);
                return true;
            }
            if key == next.start {
                return false;
            }
            above = Some(level);
            level = next;
        }
        let first = (*level.slot).as_segment();
        let (mut crowd, mut within) = (0, true);
        for beginning in row_after(first, level.end) {
            crowd += 1;
            within &= (level.cell.0..=level.cell.1).contains(&beginning.key);
        }
        if crowd <= CROWD {
            return false;
        }
        match above {
            // What lies beyond the row must not get below it.
            Some(above) if !within => rebuild(&above, key, slack),
            _ => rebuild(&level, key, slack),
        }
        true
    }
}

/// Tells the directories that no segment begins at `key` any more.
///
/// # Safety
/// As for [`add_beginning`].
pub(crate) unsafe fn remove_beginning(root: &mut Slot, key: u64, slack: usize) {
    let mut level = top(root);
    // SAFETY: live, says the caller.
    unsafe {
        while let Some(directory) = (*level.slot).as_directory() {
            let directory = &mut *directory;
            directory.beginnings -= 1;
            if directory.is_outgrown() {
                rebuild(&level, key, slack);
                return;
            }
            let next = directory.level(directory.index(key), &level);
            if key == next.start {
                return;
            }
            level = next;
        }
    }
}

/// Lets the slots that start in `low..=high` and lead to the segment `from` lead to `to`.
///
/// # Safety
/// The root leads to live directories.
pub(crate) unsafe fn redirect(
    root: &mut Slot,
    (low, high): (u64, u64),
    from: *mut Segment,
    to: *mut Segment,
) {
    unsafe fn walk(slot: &mut Slot, start: u64, (low, high): (u64, u64), from: Slot, to: Slot) {
        if let Some(directory) = slot.as_directory() {
            // SAFETY: live, says the caller.
            let directory = unsafe { &mut *directory };
            for index in directory.index(low)..=directory.index(high) {
                let start = directory.start(index, start);
                // SAFETY: as for this slot.
                unsafe { walk(&mut directory.slots[index], start, (low, high), from, to) };
            }
        } else if *slot == from && (low..=high).contains(&start) {
            *slot = to;
        }
    }
    // SAFETY: live, says the caller.
    unsafe { walk(root, 0, (low, high), Slot::segment(from), Slot::segment(to)) };
}
