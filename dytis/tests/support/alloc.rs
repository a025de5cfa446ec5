//! A global allocator that knows how many bytes each thread has live.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    /// Per thread, since a test harness allocates on its own thread whenever it has something to say. Without a destructor and without
    /// lazy initialisation, so that an allocator may touch it.
    static LIVE: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

/// Bytes that this thread has allocated and not yet freed, as asked for; modulo 2^64 where blocks change threads.
pub fn live_bytes() -> usize {
    LIVE.get()
}

fn add(bytes: usize) {
    LIVE.set(LIVE.get().wrapping_add(bytes));
}

// SAFETY: every call is passed on to the system allocator unchanged; the counting touches no
// memory but the thread's own counter.
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
