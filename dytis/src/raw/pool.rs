//! Memory of the buckets: chunks of equal blocks, numbered, with a free list in each chunk.
//!
//! One allocation per bucket would cost 3 % of bookkeeping and as much again for alignment; chunks cost nothing, and may
//! lie on huge pages. A chunk grows with the map (1/16 of what is there, at most 2 MiB), so that a small map stays small.
//! What a chunk loses by removals is given back by evacuating it: [`Pool::victim`] picks one, the map moves its buckets.

use super::bucket::{Bucket, Shape};
use alloc::alloc::{alloc, dealloc, handle_alloc_error};
use alloc::vec::Vec;
use core::alloc::Layout;
use core::ptr;

/// Number of a bucket: chunk in the high bits, block in the low [`BLOCK_BITS`].
pub(crate) type BucketId = u32;

const BLOCK_BITS: u32 = 12;
const NONE: u32 = u32::MAX;
/// Bytes that a chunk does not exceed, unless a single bucket does.
const CHUNK_BYTES: usize = 2 << 20;

/// Tells the system that a chunk is worth a huge page, so that a lookup in a large map seldom misses the table of pages. A hint:
/// where it is not heeded, nothing changes.
fn ask_for_huge_page(start: *mut u8) {
    #[cfg(all(feature = "std", target_os = "linux", not(miri)))]
    {
        use core::ffi::{c_int, c_void};
        const MADV_HUGEPAGE: c_int = 14;
        unsafe extern "C" {
            fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
        }
        // SAFETY: the range was just allocated, and the advice does not change what is in it.
        unsafe { madvise(start.cast(), CHUNK_BYTES, MADV_HUGEPAGE) };
    }
    #[cfg(not(all(feature = "std", target_os = "linux", not(miri))))]
    let _ = start;
}

/// State of one chunk.
#[derive(Clone, Copy)]
struct Chunk {
    /// Blocks in all; 0 for a number that is vacant.
    blocks: u32,
    used: u32,
    /// Blocks from here on have never been used.
    fresh: u32,
    /// First block of the free list.
    free: u32,
}

/// All buckets of a map.
#[repr(C)]
pub(crate) struct Pool<V> {
    starts: Vec<*mut u8>,
    chunks: Vec<Chunk>,
    /// Chunks with an unused block.
    open: Vec<u32>,
    /// Numbers of chunks given back.
    vacant: Vec<u32>,
    used: usize,
    blocks: usize,
    marker: core::marker::PhantomData<V>,
}

impl<V> Pool<V> {
    const MAX_BLOCKS: usize = {
        let blocks = CHUNK_BYTES / Shape::<V>::BYTES;
        if blocks == 0 {
            1
        } else if blocks > 1 << BLOCK_BITS {
            1 << BLOCK_BITS
        } else {
            blocks
        }
    };

    pub(crate) const fn new() -> Self {
        Self {
            starts: Vec::new(),
            chunks: Vec::new(),
            open: Vec::new(),
            vacant: Vec::new(),
            used: 0,
            blocks: 0,
            marker: core::marker::PhantomData,
        }
    }

    /// Address of a bucket.
    ///
    /// # Safety
    /// `id` came from [`Pool::acquire`] and was not released.
    #[inline(always)]
    pub(crate) unsafe fn bucket(&self, id: BucketId) -> Bucket<V> {
        // SAFETY: the chunk exists, and the block lies within it.
        unsafe {
            let start = *self.starts.as_ptr().add((id >> BLOCK_BITS) as usize);
            Bucket::at(start.add((id & ((1 << BLOCK_BITS) - 1)) as usize * Shape::<V>::BYTES))
        }
    }

    /// An empty bucket.
    pub(crate) fn acquire(&mut self) -> BucketId {
        let number = match self.open.last() {
            Some(&number) => number,
            None => self.grow(),
        };
        let chunk = &mut self.chunks[number as usize];
        let start = self.starts[number as usize];
        let block = if chunk.free == NONE {
            chunk.fresh += 1;
            chunk.fresh - 1
        } else {
            let block = chunk.free;
            // SAFETY: a free block holds the number of the next one at its start.
            chunk.free = unsafe {
                Bucket::<V>::at(start.add(block as usize * Shape::<V>::BYTES))
                    .next_free()
                    .read()
            };
            block
        };
        chunk.used += 1;
        self.used += 1;
        if chunk.used == chunk.blocks {
            self.open.pop();
        }
        let id = number << BLOCK_BITS | block;
        // SAFETY: the block was free, and is ours now.
        unsafe { self.bucket(id).clear_keys() };
        id
    }

    /// Takes a bucket back; its values must have been moved out or dropped.
    ///
    /// # Safety
    /// `id` came from [`Pool::acquire`], was not released, and nothing uses it any more.
    pub(crate) unsafe fn release(&mut self, id: BucketId) {
        let number = id >> BLOCK_BITS;
        let block = id & ((1 << BLOCK_BITS) - 1);
        // SAFETY: the block is live and large enough for a number.
        unsafe {
            self.bucket(id)
                .next_free()
                .write(self.chunks[number as usize].free);
        };
        let chunk = &mut self.chunks[number as usize];
        chunk.free = block;
        if chunk.used == chunk.blocks {
            self.open.push(number);
        }
        chunk.used -= 1;
        self.used -= 1;
        if self.used == 0 {
            // The map is empty: everything goes, the tables too.
            *self = Self::new();
            return;
        }
        // An empty chunk is kept as long as it is all the room there is, lest removals and insertions in turn ask the
        // allocator each time.
        let blocks = chunk.blocks as usize;
        if chunk.used == 0 && self.blocks - self.used >= blocks + blocks / 2 {
            self.open.retain(|&n| n != number);
            self.give_back(number);
        }
    }

    fn layout(blocks: usize) -> Layout {
        let bytes = blocks * Shape::<V>::BYTES;
        // A chunk of the full size fills a huge page.
        let align = if bytes == CHUNK_BYTES {
            CHUNK_BYTES.max(Shape::<V>::ALIGN)
        } else {
            Shape::<V>::ALIGN
        };
        Layout::from_size_align(bytes, align).expect("capacity overflow")
    }

    /// Opens a further chunk and returns its number.
    fn grow(&mut self) -> u32 {
        let blocks = (self.blocks / 16).clamp(1, Self::MAX_BLOCKS);
        let layout = Self::layout(blocks);
        // SAFETY: a bucket has a size above zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        if layout.size() == CHUNK_BYTES {
            ask_for_huge_page(start);
        }
        let chunk = Chunk {
            blocks: blocks as u32,
            used: 0,
            fresh: 0,
            free: NONE,
        };
        let number = if let Some(number) = self.vacant.pop() {
            self.starts[number as usize] = start;
            self.chunks[number as usize] = chunk;
            number
        } else {
            assert!(
                self.chunks.len() < 1 << (32 - BLOCK_BITS),
                "capacity overflow"
            );
            self.starts.push(start);
            self.chunks.push(chunk);
            self.chunks.len() as u32 - 1
        };
        self.blocks += blocks;
        self.open.push(number);
        number
    }

    /// Returns an unused chunk that is not in `open` to the allocator.
    fn give_back(&mut self, number: u32) {
        let chunk = &mut self.chunks[number as usize];
        let layout = Self::layout(chunk.blocks as usize);
        self.blocks -= chunk.blocks as usize;
        (chunk.blocks, chunk.used) = (0, 0);
        // SAFETY: allocated in `grow` with this layout; no block of it is used.
        unsafe { dealloc(self.starts[number as usize], layout) };
        self.starts[number as usize] = ptr::null_mut();
        self.vacant.push(number);
    }

    /// The chunk to evacuate, if more than a third of all blocks is unused: the one that gains most. It gives no more
    /// buckets out; [`Pool::end_evacuation`] must follow.
    pub(crate) fn victim(&mut self) -> Option<u32> {
        if self.blocks <= 64 || self.used * 3 >= self.blocks * 2 {
            return None;
        }
        let gain = |number: &u32| {
            let chunk = self.chunks[*number as usize];
            chunk.blocks - chunk.used
        };
        let number = (0..self.chunks.len() as u32).max_by_key(gain)?;
        self.open.retain(|&n| n != number);
        Some(number)
    }

    /// The buckets that are in use in chunk `number`.
    pub(crate) fn residents(&self, number: u32) -> Vec<BucketId> {
        let chunk = self.chunks[number as usize];
        let mut free = alloc::vec![false; chunk.fresh as usize];
        let mut block = chunk.free;
        while block != NONE {
            free[block as usize] = true;
            // SAFETY: a free block holds the number of the next one at its start.
            block = unsafe { self.bucket(number << BLOCK_BITS | block).next_free().read() };
        }
        (0..chunk.fresh)
            .filter(|&b| !free[b as usize])
            .map(|b| number << BLOCK_BITS | b)
            .collect()
    }

    /// Gives the chunk of [`Pool::victim`] back.
    ///
    /// # Safety
    /// Every resident has been moved away.
    pub(crate) unsafe fn end_evacuation(&mut self, number: u32) {
        self.used -= self.chunks[number as usize].used as usize;
        self.give_back(number);
    }

    /// Buckets in use.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Heap bytes, tables included.
    pub(crate) fn memory_usage(&self) -> usize {
        self.blocks * Shape::<V>::BYTES
            + self.starts.capacity() * size_of::<*mut u8>()
            + self.chunks.capacity() * size_of::<Chunk>()
            + (self.open.capacity() + self.vacant.capacity()) * size_of::<u32>()
    }
}

impl<V> Drop for Pool<V> {
    /// Frees the memory; the values are the map's to drop.
    fn drop(&mut self) {
        for (start, chunk) in self.starts.iter().zip(&self.chunks) {
            if chunk.blocks > 0 {
                // SAFETY: allocated in `grow` with this layout.
                unsafe { dealloc(*start, Self::layout(chunk.blocks as usize)) };
            }
        }
    }
}
