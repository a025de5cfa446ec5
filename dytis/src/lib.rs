//! An ordered map for keys whose distribution keeps changing.
//!
//! [`DytisMap`] has the face of [`BTreeMap`](alloc::collections::BTreeMap), for keys that embed into `u64` in their order
//! ([`Key`]): to migrate, change the type's name, and take keys by value where an iterator yields them.
//!
//! ```
//! use dytis::DytisMap;
//!
//! let mut sold = DytisMap::new();
//! for (minute, item) in [(12_u32, 7_u32), (3, 7), (12, 1)] {
//!     *sold.entry((item, minute)).or_insert(0) += 1;
//! }
//! // All sales of item 7, in time.
//! assert!(sold.range((7, 0)..=(7, u32::MAX)).map(|((_, minute), _)| minute).eq([3, 12]));
//! ```
//!
//! # How it works
//! It is `DyTIS` (Yang, Yoon, Yun, Noh, Choi: "`DyTIS`: A Dynamic Dataset Targeted Index Structure Simultaneously Efficient for Search,
//! Insert, and Scan", `EuroSys` 2023), changed where the original fails. The words are the paper's:
//!
//! - Keys are grouped in their natural order, never scrambled: the "hash" of a key is the key. So a hash index can scan.
//! - A **directory** has slots for equal parts of the key space; the logarithm of their number is its **global depth**. It
//!   begins and ends where the keys do. Where keys are dense, a slot leads to a further directory.
//! - A **segment** holds the keys of a range, in at most 64 sorted **buckets**; a slot leads to the segment that holds the slot's
//!   start, and the **local depth** tells how many slots lead to the same one. Segments are chained, so that a scan does not go back to
//!   the directory, and a lookup whose slot leads a little too far left goes on to the right.
//! - The segment's **remapping function** leads from a key to its bucket. It is kept as the exact quantiles of the segment's keys:
//!   dense sub-ranges have more buckets.
//!
//! When a bucket overflows, a neighbour with room takes keys over (**remap**); or the segment, if it is emptier than the threshold
//! `U_t`, is laid out anew (remap, too); or it gets a further bucket (**expand**); or, when it has 64, it is **split**,
//! for which the directory may **double**. Removals undo all that and give memory back.
//!
//! # What to expect
//! - An operation is a descent through the directories and a constant number of steps from there. There are one or two levels of
//!   directories for most keys, and at most 11 whatever the keys are.
//! - At most 24 bytes per `u64 -> u64` pair in maps of some size (32 where keys close in on one point), on all the sequences of
//!   `tests/worst_cases.rs`: see [`DytisMap::memory_usage`] and [`DytisMap::stats`].
//! - Every key of the key type is valid.
//! - A panic in code of yours - `Clone`, `Drop`, a predicate - leaves the map usable; it may leak, but never corrupts.
//! - A map with a single pair takes 1.5 KB: for many small maps take `BTreeMap`.
//!
//! # Features
//! `std` (default) chooses the instruction set at run time (AVX-512, AVX2, else plain code; NEON on Arm is always there); without it
//! the crate needs `alloc` only and takes what the build's target features say. `concurrent` (default), `serde` and `rayon` add what
//! their names say.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

mod builder;
#[cfg(feature = "concurrent")]
pub mod concurrent;
#[cfg(feature = "std")]
pub mod dynamics;
mod error;
mod key;
pub mod map;
#[allow(
    unsafe_code,
    clippy::inline_always,
    reason = "the structure itself, each block with its SAFETY argument; what runs inside a `target_feature` function must be inlined into it"
)]
mod raw;
#[cfg(feature = "rayon")]
pub mod rayon;
#[cfg(feature = "serde")]
mod serde;
pub mod set;
#[cfg(feature = "concurrent")]
mod sync;

pub use builder::DytisBuilder;
#[cfg(feature = "concurrent")]
pub use concurrent::ConcurrentDytisMap;
pub use error::Error;
pub use key::{Key, TotalF64};
pub use map::DytisMap;
pub use raw::stats::Stats;
pub use set::DytisSet;

/// The README's examples, compiled and run with the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct ReadmeExamples;
