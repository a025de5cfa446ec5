//! A global allocator that knows how many bytes are live.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

#[global_allocator]
static COUNTING: Counting = Counting;
static LIVE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

/// Bytes allocated and not yet freed, as asked for.
pub fn live_bytes() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// A plain load and store cost nothing measurable, where a locked addition would; exact while one
/// thread allocates, which is so in the program that includes this.
fn add(bytes: usize) {
    LIVE.store(
        LIVE.load(Ordering::Relaxed).wrapping_add(bytes),
        Ordering::Relaxed,
    );
}

// SAFETY: every call is passed on to the system allocator unchanged; the counting touches no
// memory but its own atomic.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise is the one that the system allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        add(layout.size().wrapping_neg());
        // SAFETY: `block` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size.wrapping_sub(layout.size()));
        // SAFETY: `block` came from `System` through this allocator, with this layout.
        unsafe { System.realloc(block, layout, size) }
    }
}
