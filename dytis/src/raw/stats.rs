//! Counters of structure changes, and the walk that gathers depths.

use super::RawMap;
use super::directory::{Directory, Slot};

/// Structure changes since the map was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) remaps: u64,
    pub(crate) expansions: u64,
    pub(crate) splits: u64,
    pub(crate) doublings: u64,
    pub(crate) merges: u64,
}

impl Counters {
    pub(crate) const ZERO: Self = Self {
        remaps: 0,
        expansions: 0,
        splits: 0,
        doublings: 0,
        merges: 0,
    };
}

/// What a map looks like inside, in the words of the paper; from [`DytisMap::stats`](crate::DytisMap::stats).
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Pairs in the map.
    pub len: usize,
    /// Directories, nested ones included.
    pub directories: usize,
    /// Most directories between the root and a segment.
    pub levels: usize,
    /// Slots of all directories.
    pub slots: usize,
    /// Largest global depth: logarithm of a directory's slots, rounded up; of nested directories the sum along the way.
    pub global_depth: u32,
    /// Smallest local depth of a segment: the global depth on its way less the logarithm of the slots that share it.
    pub min_local_depth: u32,
    /// Largest local depth of a segment.
    pub max_local_depth: u32,
    /// Mean local depth of the segments that slots lead to.
    pub mean_local_depth: f64,
    /// Segments.
    pub segments: usize,
    /// Buckets.
    pub buckets: usize,
    /// Pairs that a bucket can hold.
    pub bucket_capacity: usize,
    /// Pairs over the pairs that all buckets could hold; 0 for an empty map.
    pub utilization: f64,
    /// Remaps so far: a bound between buckets was moved, or a segment laid out anew.
    pub remaps: u64,
    /// Expansions so far: a segment got a further bucket.
    pub expansions: u64,
    /// Splits of segments so far.
    pub splits: u64,
    /// Times that a directory was doubled, extended or nested so far.
    pub doublings: u64,
    /// Merges of buckets or segments so far.
    pub merges: u64,
}

impl<V> RawMap<V> {
    /// Calls `visit` with each directory and the number of directories above it.
    pub(crate) fn each_directory(&self, visit: &mut impl FnMut(&Directory, usize)) {
        fn walk(slot: Slot, depth: usize, visit: &mut impl FnMut(&Directory, usize)) {
            let Some(directory) = slot.as_directory() else {
                return;
            };
            // SAFETY: slots lead to live directories.
            let directory = unsafe { &*directory };
            visit(directory, depth);
            let mut last = Slot::EMPTY;
            for &slot in directory.slots() {
                if slot != last {
                    walk(slot, depth + 1, visit);
                    last = slot;
                }
            }
        }
        walk(self.root, 0, visit);
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats {
            len: self.len,
            segments: self.segments,
            buckets: self.pool.used(),
            bucket_capacity: self.capacity(),
            remaps: self.counters.remaps,
            expansions: self.counters.expansions,
            splits: self.counters.splits,
            doublings: self.counters.doublings,
            merges: self.counters.merges,
            ..Stats::default()
        };
        if self.len > 0 {
            stats.utilization = self.len as f64 / (stats.buckets * stats.bucket_capacity) as f64;
        }
        stats.min_local_depth = u32::MAX;
        let mut sum = 0;
        if self.root.is_empty() {
            stats.min_local_depth = 0;
        } else {
            let runs = gather(self.root, 0, 0, &mut stats, &mut sum);
            stats.mean_local_depth = sum as f64 / runs as f64;
        }
        stats
    }
}

/// Adds what is below `slot`, whose run of slots gives it the local depth `local`; returns how many segments were added.
fn gather(slot: Slot, local: u32, level: usize, stats: &mut Stats, sum: &mut u64) -> usize {
    let Some(directory) = slot.as_directory() else {
        stats.min_local_depth = stats.min_local_depth.min(local);
        stats.max_local_depth = stats.max_local_depth.max(local);
        *sum += u64::from(local);
        return 1;
    };
    // SAFETY: slots lead to live directories.
    let slots = unsafe { (*directory).slots() };
    let depth = slots.len().next_power_of_two().ilog2();
    stats.directories += 1;
    stats.slots += slots.len();
    stats.levels = stats.levels.max(level + 1);
    stats.global_depth = stats.global_depth.max(local + depth);
    slots
        .chunk_by(|a, b| a == b)
        .map(|run| {
            let local = local + depth - run.len().ilog2().min(depth);
            gather(run[0], local, level + 1, stats, sum)
        })
        .sum()
}
