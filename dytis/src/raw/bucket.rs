//! A bucket: a block of sorted keys, and their values in a second array behind them.
//!
//! A bucket does not know its length (the segment's header does), so that the whole block is payload. Key places past the
//! length hold [`PAD`]; value places past it are uninitialised.

use super::params::MAX_BUCKET_CAPACITY;
use super::search::{PAD, prefetch};
use core::marker::PhantomData;
use core::ptr;

/// Sizes of a bucket for values of type `V`.
pub(crate) struct Shape<V>(PhantomData<V>);

impl<V> Shape<V> {
    /// Places for keys: fewer for large values, since an insertion moves half a bucket.
    pub(crate) const SLOTS: usize = if size_of::<V>() <= 64 {
        MAX_BUCKET_CAPACITY
    } else if size_of::<V>() <= 512 {
        16
    } else {
        8
    };
    /// A bucket starts at a cache line, or where its values ask for more.
    pub(crate) const ALIGN: usize = if align_of::<V>() > 64 {
        align_of::<V>()
    } else {
        64
    };
    /// Where the values begin.
    const VALUES: usize = (Self::SLOTS * 8).next_multiple_of(align_of::<V>());
    /// Bytes of a whole bucket.
    pub(crate) const BYTES: usize =
        (Self::VALUES + Self::SLOTS * size_of::<V>()).next_multiple_of(Self::ALIGN);
}

/// Address of a bucket; the pool owns the memory, the segment's header the length.
pub(crate) struct Bucket<V>(*mut u8, PhantomData<V>);

impl<V> Clone for Bucket<V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for Bucket<V> {}

impl<V> Bucket<V> {
    /// A handle for the block at `start`.
    #[inline(always)]
    pub(crate) const fn at(start: *mut u8) -> Self {
        Self(start, PhantomData)
    }

    #[inline(always)]
    pub(crate) fn keys(self) -> *mut i64 {
        self.0.cast()
    }

    #[inline(always)]
    pub(crate) fn values(self) -> *mut V {
        self.0.wrapping_add(Shape::<V>::VALUES).cast()
    }

    /// Asks for the values before it is known which of them is wanted, if they are few lines: so their miss overlaps that of the
    /// keys.
    #[inline(always)]
    pub(crate) fn prefetch_values(self) {
        let bytes = Shape::<V>::SLOTS * size_of::<V>();
        if bytes <= 256 {
            let start = self.values().cast::<u8>();
            for line in (0..bytes).step_by(64) {
                prefetch(start.wrapping_add(line));
            }
        }
    }

    /// Asks for the keys, and for the values where they are few lines.
    #[inline(always)]
    pub(crate) fn prefetch(self) {
        for line in (0..Shape::<V>::SLOTS).step_by(8) {
            prefetch(self.keys().wrapping_add(line));
        }
        self.prefetch_values();
    }

    /// Where an unused block holds the number of the next one.
    pub(crate) fn next_free(self) -> *mut u32 {
        self.0.cast()
    }

    /// # Safety
    /// `self` is a live bucket and `pos` lies within its places.
    #[inline(always)]
    pub(crate) unsafe fn key(self, pos: usize) -> i64 {
        // SAFETY: all places hold a key or `PAD`.
        unsafe { *self.keys().add(pos) }
    }

    /// Address of the value at `pos`.
    ///
    /// # Safety
    /// `self` is a live bucket and `pos` lies within its places.
    #[inline(always)]
    pub(crate) unsafe fn value(self, pos: usize) -> *mut V {
        // SAFETY: the values' array has a place for every key's.
        unsafe { self.values().add(pos) }
    }

    /// Puts a fresh block into the state of an empty bucket.
    ///
    /// # Safety
    /// `self` is a block of `Shape::<V>::BYTES` bytes that nothing else uses.
    pub(crate) unsafe fn clear_keys(self) {
        for pos in 0..Shape::<V>::SLOTS {
            // SAFETY: within the block.
            unsafe { self.keys().add(pos).write(PAD) };
        }
    }

    /// Inserts a pair at `pos` and returns the address of the value.
    ///
    /// # Safety
    /// `self` is a live bucket with `len` pairs, fewer than its places; `pos <= len`, and the order is kept.
    #[inline(always)]
    pub(crate) unsafe fn insert(self, len: usize, pos: usize, key: i64, value: V) -> *mut V {
        // SAFETY: `pos <= len < SLOTS`, so both moves end within their arrays.
        unsafe {
            let keys = self.keys().add(pos);
            let values = self.values().add(pos);
            ptr::copy(keys, keys.add(1), len - pos);
            ptr::copy(values, values.add(1), len - pos);
            keys.write(key);
            values.write(value);
            values
        }
    }

    /// Takes the pair at `pos` out and returns its value.
    ///
    /// # Safety
    /// `self` is a live bucket with `len` pairs and `pos < len`.
    #[inline(always)]
    pub(crate) unsafe fn remove(self, len: usize, pos: usize) -> V {
        // SAFETY: `pos < len`: the value is initialised, and the moves stay within the pairs.
        unsafe {
            let keys = self.keys().add(pos);
            let values = self.values().add(pos);
            let value = values.read();
            ptr::copy(keys.add(1), keys, len - pos - 1);
            ptr::copy(values.add(1), values, len - pos - 1);
            self.keys().add(len - 1).write(PAD);
            value
        }
    }

    /// Moves the `count` pairs of `from` that begin at `from_pos` into this bucket at `pos`, and closes both gaps.
    ///
    /// # Safety
    /// Two different live buckets with `len` and `from_len` pairs; `from_pos + count <= from_len`, `pos <= len`,
    /// `len + count` fits, and the order is kept.
    pub(crate) unsafe fn take(
        self,
        len: usize,
        pos: usize,
        from: Self,
        from_len: usize,
        from_pos: usize,
        count: usize,
    ) {
        // SAFETY: all ranges lie within the arrays, as the caller vouches; the buckets do not overlap.
        unsafe {
            let (keys, values) = (self.keys().add(pos), self.values().add(pos));
            ptr::copy(keys, keys.add(count), len - pos);
            ptr::copy(values, values.add(count), len - pos);
            let (from_keys, from_values) = (from.keys().add(from_pos), from.values().add(from_pos));
            ptr::copy_nonoverlapping(from_keys, keys, count);
            ptr::copy_nonoverlapping(from_values, values, count);
            let rest = from_len - from_pos - count;
            ptr::copy(from_keys.add(count), from_keys, rest);
            ptr::copy(from_values.add(count), from_values, rest);
            for unused in from_len - count..from_len {
                from.keys().add(unused).write(PAD);
            }
        }
    }
}
