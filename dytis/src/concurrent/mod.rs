//! An ordered map that many threads share.
//!
//! # How it works
//!
//! The key space is cut into *segments*: ranges of keys, each a small [`DytisMap`](crate::DytisMap)
//! behind a reader-writer lock of its own. A *directory* - a sorted array of the segments' lowest
//! keys - says which segment covers a key. A directory never changes: a split or merge of segments
//! builds another one and swaps a pointer.
//!
//! ```text
//! find:   pin the epoch; load the directory; the segment is the last whose low <= key
//!         lock the segment (shared to read, exclusive to write)
//!         if the segment no longer covers the key: unlock, start again
//! split:  holding the full segment exclusively, move its upper half into a new segment,
//!         lower its high end, publish a directory with both; then unlock
//! merge:  holding two neighbours exclusively (lower one first), move all entries into the lower
//!         one, mark the other dead, publish a directory without it; then unlock, retire
//! ```
//!
//! What a segment covers is written only under its exclusive lock, and the directory that shows
//! the change is published before that lock is released. So a thread that finds a segment changed
//! finds the change in the directory when it starts again: it never spins on a stale view.
//! Directories and dead segments are freed by epoch reclamation once no thread can hold them.
//!
//! # Promises
//!
//! - `insert`, `get`, `contains_key`, `remove`, `update`, `compute` and `get_or_insert_with` are
//!   **linearisable**: each takes effect at one instant between its call and its return, while the
//!   lock of the segment that covers its key is held.
//! - A reader waits for a writer of the same segment only. Finding the segment takes no lock, and
//!   no operation holds a segment while it waits for another one, but a merge, which holds two
//!   neighbours.
//! - `range`, `scan` and `iter` are ordered and **weakly consistent**: they yield keys in strictly
//!   ascending order, each key that is there from start to end of the iteration, no key that
//!   is never there in that time, and no key twice. A value is one that its key had in that time.
//! - Memory follows the entries: removing merges segments, and what they leave is freed as epochs
//!   advance.
//! - A panic in a closure passed to the map leaves the entry as it was and every lock usable.
//!
//! Closures run while their segment is locked: they must not use the same map, or they may
//! deadlock. The same goes for `V`'s `Clone`.
//!
//! # Decisions
//!
//! - **A lock per segment, not optimistic reads.** To copy a `V` while another thread writes it is
//!   undefined behaviour for a general `V: Clone`, whatever is checked afterwards. Copy-on-write
//!   leaves would make reads free of locks, but each update would copy a leaf and call `V::clone`
//!   for entries that nobody asked about. A shared lock costs two atomic operations on a line that
//!   the reader touches anyway.
//! - **A segment is a whole `DytisMap`**, so that the core's remapping, splits and merges serve
//!   here unchanged. Locks inside the core's own directory were rejected: one change of structure
//!   there touches slots that readers of other segments use.
//! - **The directory is replaced, not changed.** Readers search it without lock or retry. A split
//!   copies 16 bytes per segment; the bound on a segment's entries grows with the number of
//!   segments above 1024, so that an insert pays O(1) amortised for it.
//! - **Epochs, not reference counts**: with `Arc` segments each change of the directory would
//!   touch one counter per segment.

mod directory;
mod iter;
mod map;
mod segment;
#[cfg(test)]
mod tests;

pub use iter::Range;
pub use map::ConcurrentDytisMap;
